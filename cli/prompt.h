/* From the command line to the ids that a run starts with. */
#ifndef CLI_PROMPT_H
#define CLI_PROMPT_H

#include "cli/options.h"
#include "model/config.h"
#include "tokenizer/tokenizer.h"

/* The ids of the prompt: --ids as they are, or the text of -p, -f or standard input, with BOS in
 * front as --bos and the model say. An empty text is BOS alone. --chat: the text as a user's turn, up
 * to where the answer begins. tokenizer may be NULL.
 * EXIT_USAGE where the prompt cannot be used, does not fit into the context, or is empty. */
int prompt_ids(struct ids *ids, const struct options *options, const struct config *config,
               struct tokenizer *tokenizer, struct error *error);

/* -z: the tokenizer of another model.bin, or a sentencepiece model. EXIT_BAD_FILE, EXIT_MEMORY. */
int tokenizer_open_file(struct tokenizer **tokenizer, const char *path, int vocab,
                        struct error *error);

/* The seed that text names, or a random one where text is NULL. EXIT_USAGE. */
int choose_seed(uint64_t *seed, const char *text, struct error *error);

#endif
