/* Drives the tokenizer for the Python tests: tokenize SECTION VOCAB [plain|special [decode]]
 *
 * Reads texts from stdin, each as u32 length and bytes; writes for each u32 count and i32 ids, and
 * with `decode` u32 length and the bytes that the decoder makes of those ids. All little-endian. */
#include "tokenizer/tokenizer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int failed(const struct error *error) {
    fprintf(stderr, "%s\n", error->text);
    return error->code;
}

/* The whole file, for the caller to free; NULL where it cannot be read. */
static char *read_file(const char *path, size_t *bytes) {
    FILE *file = fopen(path, "rb");
    if (!file) return NULL;
    char *data = NULL;
    if (!fseek(file, 0, SEEK_END)) {
        long end = ftell(file);
        *bytes = end < 0 ? 0 : (size_t)end;
        data = malloc(*bytes + 1);
    }
    rewind(file);
    if (data && fread(data, 1, *bytes, file) != *bytes) {
        free(data);
        data = NULL;
    }
    fclose(file);
    return data;
}

static void write_decoded(const struct tokenizer *tokenizer, const struct ids *ids) {
    struct decoder decoder = {0};
    char *text = malloc((ids->count + 1) * DECODER_ROOM);
    if (!text) exit(EXIT_MEMORY);
    size_t bytes = 0;
    for (size_t i = 0; i < ids->count; i++)
        bytes += decoder_next(&decoder, tokenizer, ids->id[i], text + bytes);
    bytes += decoder_end(&decoder, text + bytes);
    uint32_t length = (uint32_t)bytes;
    fwrite(&length, sizeof length, 1, stdout);
    fwrite(text, 1, bytes, stdout);
    free(text);
}

static int run(struct tokenizer *tokenizer, bool special, bool decode) {
    uint32_t length = 0;
    struct error error;
    while (fread(&length, sizeof length, 1, stdin) == 1) {
        struct ids ids = {0};
        char *text = malloc((size_t)length + 1);
        if (!text || fread(text, 1, length, stdin) != length) {
            free(text);
            return EXIT_USAGE;
        }
        int code = tokenizer_encode(tokenizer, text, length, special, &ids, &error);
        free(text);
        if (code) {
            free(ids.id);
            return failed(&error);
        }
        uint32_t count = (uint32_t)ids.count;
        fwrite(&count, sizeof count, 1, stdout);
        if (count > 0) fwrite(ids.id, sizeof *ids.id, count, stdout);
        if (decode) write_decoded(tokenizer, &ids);
        free(ids.id);
    }
    return 0;
}

int main(int argc, char **argv) {
    if (argc < 3) {
        fprintf(stderr, "usage: tokenize SECTION VOCAB [plain|special [decode]]\n");
        return EXIT_USAGE;
    }
    size_t bytes = 0;
    char *section = read_file(argv[1], &bytes);
    if (!section) {
        fprintf(stderr, "cannot read %s\n", argv[1]);
        return EXIT_USAGE;
    }
    struct tokenizer *tokenizer = NULL;
    struct error error;
    int code = tokenizer_open(&tokenizer, section, bytes, atoi(argv[2]), &error);
    free(section);
    if (code) return failed(&error);
    code = run(tokenizer, argc > 3 && !strcmp(argv[3], "special"),
               argc > 4 && !strcmp(argv[4], "decode"));
    tokenizer_close(tokenizer);
    return code;
}
