/* Fuzzes conversations: whatever is said, in any shape, the control tokens are those of the shape.
 *
 * Input: a byte that chooses the shape, a byte of choices, and the messages: each ends before a byte
 * 0xff. The tokenizers are the tiny ones, whose control tokens include </s>, [INST]
 * and [/INST] (sentencepiece). */
#include "tests/tokenizer_section.h"
#include "tokenizer/chat.h"

#include <stdbool.h>
#include <stdlib.h>

enum { DUMMY_PREFIX = 1, WITH_SYSTEM = 2, WITH_BOS = 4 };
enum { MOST_MESSAGES = 32 };

static struct tokenizer *open_tiny(bool dummy_prefix) {
    struct section_bytes model, section;
    tiny_sp_model(&model, dummy_prefix);
    sp_section(&section, model.data, model.count);
    return open_section(&section);
}

/* The messages of the input, their number odd but for a system message in front. */
static int split(struct chat_message *message, const char *text, size_t bytes, bool with_system) {
    int count = 0;
    for (size_t at = 0; at <= bytes && count < MOST_MESSAGES; count++) {
        const char *end = at < bytes ? memchr(text + at, 0xff, bytes - at) : NULL;
        size_t length = end ? (size_t)(end - text) - at : bytes - at;
        bool user = (count - with_system) % 2 == 0;
        enum chat_role role = user ? CHAT_USER : CHAT_ASSISTANT;
        if (count < with_system) role = CHAT_SYSTEM;
        message[count] = (struct chat_message){role, text + at, length};
        at += length + 1;
    }
    return (count - with_system) % 2 ? count : count - 1;
}

static size_t controls(const struct ids *ids) {
    size_t count = 0;
    for (size_t i = 0; i < ids->count; i++) {
        if (ids->id[i] < 0 || ids->id[i] >= TINY_VOCAB) abort();
        for (size_t t = 0; t < TINY_ADDED; t++)
            count += (uint32_t)ids->id[i] == tiny_added[t].id && tiny_added[t].flags & CONTROL;
    }
    return count;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static struct tokenizer *tokenizers[2];
    if (size < 2) return 0;
    enum chat_shape shape = data[0] % CHAT_SHAPES;
    const unsigned choices = data[1];
    struct tokenizer **tokenizer = &tokenizers[choices & DUMMY_PREFIX];
    if (!*tokenizer) *tokenizer = open_tiny(choices & DUMMY_PREFIX);

    struct chat_message said[MOST_MESSAGES], nothing[MOST_MESSAGES];
    int count = split(said, (const char *)data + 2, size - 2, choices & WITH_SYSTEM);
    for (int i = 0; i < MOST_MESSAGES; i++)
        nothing[i] = (struct chat_message){i < count ? said[i].role : CHAT_USER, "", 0};
    int32_t bos = choices & WITH_BOS ? START : NO_ID;
    struct ids ids = {0}, without = {0};
    struct error error;
    int code = chat_encode(*tokenizer, shape, bos, said, count, &ids, &error);
    if (code != chat_encode(*tokenizer, shape, bos, nothing, count, &without, &error)) abort();
    if (code && (code != EXIT_USAGE || ids.count > 0)) abort();
    if (controls(&ids) != controls(&without)) abort();
    free(ids.id);
    free(without.id);
    return 0;
}
