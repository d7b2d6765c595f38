#define _GNU_SOURCE /* getrandom */
#include "cli/prompt.h"

#include "cli/output.h"
#include "model/file.h"
#include "tokenizer/chat.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>

struct bytes {
    char *data;
    size_t count;
};

/* The longest prompt or tokenizer file: more is taken for an endless one, such as /dev/zero. */
enum { MOST_BYTES = 256 << 20 };

/* All of a file or of standard input; NUL and any other byte is as good as the next. */
static int read_stream(struct bytes *bytes, FILE *stream, const char *path, int code_if_bad,
                       struct error *error) {
    size_t capacity = 0;
    for (;;) {
        if (bytes->count == capacity) {
            capacity = capacity ? 2 * capacity : 65536;
            char *grown = realloc(bytes->data, capacity);
            if (!grown)
                return fail(error, EXIT_MEMORY, "host memory: no %zu bytes for %s", capacity, path);
            bytes->data = grown;
        }
        size_t n = fread(bytes->data + bytes->count, 1, capacity - bytes->count, stream);
        bytes->count += n;
        if (bytes->count > MOST_BYTES)
            return fail(error, code_if_bad, "%s: longer than %d bytes", path, MOST_BYTES);
        if (n > 0) continue;
        if (!ferror(stream)) return 0;
        return fail(error, code_if_bad, "%s: cannot be read: %s", path, strerror(errno));
    }
}

static int read_path(struct bytes *bytes, const char *path, int code_if_bad, struct error *error) {
    FILE *file = fopen(path, "rb");
    if (!file) return fail(error, code_if_bad, "%s: cannot be opened: %s", path, strerror(errno));
    int code = read_stream(bytes, file, path, code_if_bad, error);
    fclose(file);
    return code;
}

static int read_prompt(struct bytes *bytes, const struct options *o, struct error *error) {
    if (o->prompt_file) return read_path(bytes, o->prompt_file, EXIT_USAGE, error);
    const char *text = o->prompt ? o->prompt : "";
    if (strcmp(text, "-") == 0)
        return read_stream(bytes, stdin, "standard input", EXIT_USAGE, error);
    char *end = NULL;
    double number = strtod(text, &end);
    if (end != text && !*end && number >= 0 && number <= 1)
        note(o, "the prompt is the text \"%s\"; a probability is --top-p or --min-p", text);
    bytes->count = strlen(text);
    bytes->data = malloc(bytes->count + 1);
    if (!bytes->data) return fail(error, EXIT_MEMORY, "host memory: none for the prompt");
    memcpy(bytes->data, text, bytes->count);
    return 0;
}

/* --ids: numbers with white space or commas between. */
static int parse_ids(struct ids *ids, const char *text, int vocab, struct error *error) {
    for (const char *at = text + strspn(text, " ,\t\n"); *at; at += strspn(at, " ,\t\n")) {
        char *end = NULL;
        errno = 0;
        long id = strtol(at, &end, 10);
        if (end == at || errno || *at < '0' || *at > '9' || id < 0 || id >= vocab ||
            (*end && !strchr(" ,\t\n", *end)))
            return fail(error, EXIT_USAGE, "--ids: \"%.20s\", expected ids from 0 to %d", at,
                        vocab - 1);
        int code = ids_append(ids, (int32_t)id, error);
        if (code) return code;
        at = end;
    }
    return 0;
}

/* Text to ids, BOS in front where it belongs and is not there already. */
static int encode(struct ids *ids, const struct options *o, const struct config *c,
                  struct tokenizer *tokenizer, const struct bytes *text, struct error *error) {
    const bool with_bos = o->bos == BOS_YES || (o->bos == BOS_AUTO && c->add_bos) ||
                          (o->bos == BOS_AUTO && text->count == 0 && c->bos != NO_ID);
    int code = with_bos ? ids_append(ids, c->bos, error) : 0;
    if (!code) code = tokenizer_encode(tokenizer, text->data, text->count, o->special, ids, error);
    if (code || !with_bos || ids->count < 2 || ids->id[1] != c->bos) return code;
    note(o, "the prompt begins with BOS already: not added again");
    memmove(ids->id, ids->id + 1, --ids->count * sizeof *ids->id);
    return 0;
}

/* --chat: the text is what the user says, after --system. */
static int encode_chat(struct ids *ids, const struct options *o, const struct config *c,
                       struct tokenizer *tokenizer, const struct bytes *text, struct error *error) {
    const bool with_bos = o->bos == BOS_YES || (o->bos == BOS_AUTO && c->chat_bos);
    struct chat_message message[2];
    int count = 0;
    if (o->system)
        message[count++] = (struct chat_message){CHAT_SYSTEM, o->system, strlen(o->system)};
    message[count++] = (struct chat_message){CHAT_USER, text->data, text->count};
    return chat_encode(tokenizer, c->chat_shape, with_bos ? c->bos : NO_ID, message, count, ids,
                       error);
}

static int text_ids(struct ids *ids, const struct options *o, const struct config *c,
                    struct tokenizer *tokenizer, struct error *error) {
    if (!tokenizer)
        return fail(error, EXIT_USAGE,
                    "%s has no tokenizer: give the prompt as --ids, or a tokenizer with -z",
                    o->model);
    if (o->bos == BOS_YES && c->bos == NO_ID)
        return fail(error, EXIT_USAGE, "--bos yes, but the model has no BOS");
    if (o->chat && c->chat_shape == CHAT_NONE)
        return fail(
            error, EXIT_USAGE,
            "%s has no chat shape: export it with --chat-shape, or write the turns into the "
            "prompt with --special",
            o->model);
    struct bytes text = {0};
    int code = read_prompt(&text, o, error);
    if (!code) code = (o->chat ? encode_chat : encode)(ids, o, c, tokenizer, &text, error);
    free(text.data);
    return code;
}

int prompt_ids(struct ids *ids, const struct options *o, const struct config *c,
               struct tokenizer *tokenizer, struct error *error) {
    const int context = o->context ? o->context : c->context;
    int code = o->ids ? parse_ids(ids, o->ids, c->vocab_used, error)
                      : text_ids(ids, o, c, tokenizer, error);
    if (code || o->tokenize) return code;
    if (ids->count == 0)
        return fail(error, EXIT_USAGE,
                    "the prompt has no tokens and no BOS is added: nothing to start from");
    if (ids->count > (size_t)context)
        return fail(error, EXIT_USAGE,
                    "the prompt has %zu tokens, but the context only %d positions; -c sets it",
                    ids->count, context);
    return 0;
}

/* A sentencepiece model as the tokenizer section (model/format.md) of a file that held only it. */
static int open_sentencepiece(struct tokenizer **tokenizer, const char *path, int vocab,
                              struct error *error) {
    enum { SECTION_HEADER = 32, KIND_SENTENCEPIECE = 2 };
    struct bytes model = {0};
    int code = read_path(&model, path, EXIT_BAD_FILE, error);
    unsigned char *section = code ? NULL : calloc(1, SECTION_HEADER + model.count);
    if (!code && !section) code = fail(error, EXIT_MEMORY, "host memory: none for %s", path);
    if (section) {
        section[0] = KIND_SENTENCEPIECE;
        for (int i = 0; i < 8; i++) section[24 + i] = (unsigned char)(model.count >> 8 * i);
        memcpy(section + SECTION_HEADER, model.data, model.count);
        code = tokenizer_open(tokenizer, section, SECTION_HEADER + model.count, vocab, error);
    }
    free(section);
    free(model.data);
    return code;
}

int tokenizer_open_file(struct tokenizer **tokenizer, const char *path, int vocab,
                        struct error *error) {
    char start[8] = "";
    struct stat status;
    if (stat(path, &status) == 0 && !S_ISREG(status.st_mode))
        return fail(error, EXIT_BAD_FILE, "%s: not a regular file, expected a tokenizer", path);
    FILE *file = fopen(path, "rb");
    if (!file) return fail(error, EXIT_BAD_FILE, "%s: cannot be opened: %s", path, strerror(errno));
    size_t got = fread(start, 1, sizeof start, file);
    fclose(file);
    int code = 0;
    struct error inner = {0};
    if (got < sizeof start || memcmp(start, "ROOFLINE", sizeof start) != 0) {
        code = open_sentencepiece(tokenizer, path, vocab, &inner);
    } else {
        struct model_file other;
        if ((code = model_open(&other, path, error))) return code;
        code = other.tokenizer ? tokenizer_open(tokenizer, other.tokenizer, other.tokenizer_bytes,
                                                vocab, &inner)
                               : fail(&inner, EXIT_BAD_FILE, "tokenizer: there is none");
        model_close(&other);
    }
    if (code != EXIT_BAD_FILE) return code ? fail(error, code, "%s: %s", path, inner.text) : 0;
    return fail(error, code, "%s: %s; -z takes a model.bin that has one, or a sentencepiece model",
                path, inner.text);
}

int choose_seed(uint64_t *seed, const char *text, struct error *error) {
    if (!text) {
        if (getrandom(seed, sizeof *seed, 0) != sizeof *seed) *seed = (uint64_t)time(NULL);
        return 0;
    }
    char *end = NULL;
    errno = 0;
    *seed = strtoull(text, &end, 10);
    if (end == text || *end || errno || strchr(text, '-'))
        return fail(error, EXIT_USAGE, "--seed is %s, expected a whole number from 0 to 2^64 - 1",
                    text);
    return 0;
}
