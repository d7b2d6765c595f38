/* model.bin on disk (format.md): opened and checked, then read. Never mapped: a file that is cut
 * while it is read gives an error and not a signal. */
#ifndef MODEL_FILE_H
#define MODEL_FILE_H

#include "model/config.h"

struct model_file {
    int descriptor;
    const char *path; /* the caller's string */
    uint64_t file_bytes, head_bytes, tokenizer_bytes;
    unsigned char *head;    /* head_bytes: everything before the tensors */
    const void *tokenizer;  /* within head; NULL where tokenizer_bytes is 0 */
    struct tensor *tensors; /* tensor_count, in the order of the file */
    uint64_t tensor_count;
    struct config config;
};

/* Opens the file, reads its head and checks all of it: length, checksum, config, tensor table.
 * The flags of the config are left to config_supported, the tokenizer section to tokenizer_open.
 * On failure nothing stays open. EXIT_BAD_FILE, EXIT_MEMORY. */
int model_open(struct model_file *file, const char *path, struct error *error);

/* Reads bytes from offset (counted from the first tensor) to `to`. May run on several threads.
 * EXIT_BAD_FILE where the file has become shorter or cannot be read. */
int model_read(const struct model_file *file, void *to, uint64_t offset, size_t bytes,
               struct error *error);

/* Reads every tensor: its checksum, that its values are finite, that the gaps are zero. Errors name
 * the tensor. EXIT_BAD_FILE, EXIT_MEMORY. */
int model_check(const struct model_file *file, struct error *error);

void model_close(struct model_file *file); /* {0} is fine */

#endif
