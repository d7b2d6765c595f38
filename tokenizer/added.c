#include "tokenizer/added.h"

#include "tokenizer/white_space.h"

#include <stdlib.h>
#include <string.h>

static int by_bytes(const void *left, const void *right) {
    const struct section_added *a = *(const struct section_added *const *)left;
    const struct section_added *b = *(const struct section_added *const *)right;
    int order = memcmp(a->text, b->text, a->bytes < b->bytes ? a->bytes : b->bytes);
    if (order) return order;
    if (a->bytes != b->bytes) return a->bytes < b->bytes ? -1 : 1;
    return a->id < b->id ? -1 : 1;
}

static bool same_bytes(const struct section_added *a, const struct section_added *b) {
    return a->bytes == b->bytes && !memcmp(a->text, b->text, a->bytes);
}

int added_open(struct added *added, const struct section *section, struct error *error) {
    memset(added, 0, sizeof *added);
    if (section->added_count == 0) return 0;
    added->token = malloc((size_t)section->added_count * sizeof(struct section_added *));
    if (!added->token)
        return fail(error, EXIT_MEMORY, "tokenizer: no memory for %d added tokens",
                    section->added_count);
    for (int32_t i = 0; i < section->added_count; i++) added->token[i] = &section->added[i];
    qsort(added->token, (size_t)section->added_count, sizeof(struct section_added *), by_bytes);
    for (int32_t i = 0; i < section->added_count; i++) {
        const struct section_added *token = added->token[i];
        if (added->count > 0 && same_bytes(added->token[added->count - 1], token)) continue;
        added->token[added->count++] = token;
        unsigned char start = (unsigned char)token->text[0];
        added->first[start + 1]++;
        added->starts[true][start] = true;
        if (!token->control) added->starts[false][start] = true;
    }
    for (int byte = 0; byte < 256; byte++) added->first[byte + 1] += added->first[byte];
    return 0;
}

void added_close(struct added *added) {
    free(added->token);
    added->token = NULL;
}

/* The first of token[low..high) whose byte at `depth` is `byte` or above; they share all bytes
 * before it, and none ends there. */
static int32_t lower_bound(const struct added *added, int32_t low, int32_t high, uint32_t depth,
                           int byte) {
    while (low < high) {
        int32_t middle = low + (high - low) / 2;
        if ((unsigned char)added->token[middle]->text[depth] >= byte)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

/* The longest token at text[0..bytes), a control token only in the first special_bytes, or NULL: the
 * range of tokens that share the bytes read so far narrows with each byte. */
static const struct section_added *longest(const struct added *added, const char *text,
                                           size_t bytes, size_t special_bytes) {
    const struct section_added *best = NULL;
    int32_t low = added->first[(unsigned char)text[0]];
    int32_t high = added->first[(unsigned char)text[0] + 1];
    for (uint32_t depth = 1; low < high; depth++) {
        if (added->token[low]->bytes == depth) {
            if (depth <= special_bytes || !added->token[low]->control) best = added->token[low];
            low++;
        }
        if (depth == bytes || low == high) break;
        char next = text[depth];
        if (added->token[low]->text[depth] == next && added->token[high - 1]->text[depth] == next)
            continue; /* all of them go on like the text, which is the common case */
        low = lower_bound(added, low, high, depth, (unsigned char)next);
        high = lower_bound(added, low, high, depth, (unsigned char)next + 1);
    }
    return best;
}

bool added_find(const struct added *added, const char *text, size_t bytes, size_t from,
                const struct text_part **part, struct added_match *match) {
    if (added->count == 0) return false;
    for (size_t at = from; at < bytes; at++) {
        while ((*part)->end <= at) ++*part;
        if (!added->starts[(*part)->parse_special][(unsigned char)text[at]]) continue;
        size_t special_bytes = (*part)->parse_special ? (*part)->end - at : 0;
        const struct section_added *token = longest(added, text + at, bytes - at, special_bytes);
        if (!token) continue;
        match->id = token->id;
        match->start = at;
        match->end = at + token->bytes;
        size_t white = 1;
        while (token->strip_left && white > 0) {
            white = white_before(text, from, match->start);
            match->start -= white;
        }
        white = 1;
        while (token->strip_right && white > 0) {
            white = white_after(text, match->end, bytes);
            match->end += white;
        }
        return true;
    }
    return false;
}
