/* Drives the tokenizer for the Python tests: tokenize SECTION VOCAB [plain|special [decode]]
 *                                            tokenize SECTION VOCAB chat SHAPE BOS
 *
 * Reads texts from stdin, each as u32 length and bytes; writes for each u32 count and i32 ids, and
 * with `decode` u32 length and the bytes that the decoder makes of those ids. With `chat` it reads
 * conversations, each as u32 number of messages and for each message u32 role, u32 length and bytes.
 * All little-endian. */
#include "tokenizer/chat.h"

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

static void write_ids(const struct ids *ids) {
    uint32_t count = (uint32_t)ids->count;
    fwrite(&count, sizeof count, 1, stdout);
    if (count > 0) fwrite(ids->id, sizeof *ids->id, count, stdout);
}

enum { MOST_MESSAGES = 64 };

/* The text is on the heap, without a zero at the end: AddressSanitizer finds a read beyond it. */
static bool read_message(struct chat_message *message) {
    uint32_t role = 0, length = 0;
    if (fread(&role, sizeof role, 1, stdin) != 1 || fread(&length, sizeof length, 1, stdin) != 1)
        return false;
    char *text = malloc(length > 0 ? length : 1);
    *message = (struct chat_message){(enum chat_role)role, text, length};
    return text && fread(text, 1, length, stdin) == length;
}

static int converse(struct tokenizer *tokenizer, enum chat_shape shape, int32_t bos) {
    uint32_t count = 0;
    int code = 0;
    struct error error;
    while (!code && fread(&count, sizeof count, 1, stdin) == 1) {
        struct chat_message message[MOST_MESSAGES] = {0};
        bool good = count <= MOST_MESSAGES;
        for (uint32_t i = 0; good && i < count; i++) good = read_message(&message[i]);
        if (!good) return EXIT_USAGE;
        struct ids ids = {0};
        code = chat_encode(tokenizer, shape, bos, message, (int)count, &ids, &error);
        if (code)
            failed(&error);
        else
            write_ids(&ids);
        for (uint32_t i = 0; i < count; i++) free((char *)message[i].text);
        free(ids.id);
    }
    return code;
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
        write_ids(&ids);
        if (decode) write_decoded(tokenizer, &ids);
        free(ids.id);
    }
    return 0;
}

int main(int argc, char **argv) {
    if (argc < 3) {
        fprintf(stderr, "usage: tokenize SECTION VOCAB [plain|special [decode]|chat SHAPE BOS]\n");
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
    if (argc > 5 && !strcmp(argv[3], "chat"))
        code = converse(tokenizer, (enum chat_shape)atoi(argv[4]), (int32_t)atoi(argv[5]));
    else
        code = run(tokenizer, argc > 3 && !strcmp(argv[3], "special"),
                   argc > 4 && !strcmp(argv[4], "decode"));
    tokenizer_close(tokenizer);
    return code;
}
