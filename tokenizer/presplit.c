#include "tokenizer/presplit.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <stdint.h>
#include <stdlib.h>

/* The published patterns, with \s written out as the Unicode property White_Space: PCRE2's \s also
 * matches U+180E. The alternatives are tried in this order. */
#define WHITE                                                                                      \
    "\\x09-\\x0d\\x20\\x85\\xa0\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}"   \
    "\\x{3000}"
#define SPACES "[" WHITE "]+(?![^" WHITE "])|[" WHITE "]+"
#define LINES  "[" WHITE "]*[\\r\\n]+"
#define SUFFIX "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
#define UPPER  "[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]"
#define LOWER  "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]"

static const char *const patterns[PATTERNS] = {
    [PATTERN_GPT2] = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+"
                     "| ?[^" WHITE "\\p{L}\\p{N}]+|" SPACES,
    [PATTERN_LLAMA3] = SUFFIX "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}"
                              "| ?[^" WHITE "\\p{L}\\p{N}]+[\\r\\n]*|" LINES "|" SPACES,
    [PATTERN_QWEN2] = SUFFIX "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}"
                             "| ?[^" WHITE "\\p{L}\\p{N}]+[\\r\\n]*|" LINES "|" SPACES,
    /* Two steps in one: every digit on its own, then GPT-2's pattern on what is between. */
    [PATTERN_SMOLLM2] = "\\p{N}|'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?[^" WHITE "\\p{L}\\p{N}]+"
                        "|[" WHITE "]+(?![^" WHITE "\\p{N}])|[" WHITE "]+",
    [PATTERN_O200K] = "[^\\r\\n\\p{L}\\p{N}]?" UPPER "*" LOWER "+" SUFFIX "?"
                      "|[^\\r\\n\\p{L}\\p{N}]?" UPPER "+" LOWER "*" SUFFIX "?|\\p{N}{1,3}"
                      "| ?[^" WHITE "\\p{L}\\p{N}]+[\\r\\n/]*|" LINES "|" SPACES,
    [PATTERN_TEKKEN] = "[^\\r\\n\\p{L}\\p{N}]?" UPPER "*" LOWER "+"
                       "|[^\\r\\n\\p{L}\\p{N}]?" UPPER "+" LOWER "*|\\p{N}"
                       "| ?[^" WHITE "\\p{L}\\p{N}]+[\\r\\n/]*|" LINES "|" SPACES,
};

struct presplit {
    pcre2_code *code;
    pcre2_match_data *match;
    pcre2_match_context *context;
};

static int pcre2_failed(int number, const char *action, struct error *error) {
    PCRE2_UCHAR message[256] = "unknown error";
    pcre2_get_error_message(number, message, sizeof message);
    int code = number == PCRE2_ERROR_NOMEMORY ? EXIT_MEMORY : EXIT_INTERNAL;
    return fail(error, code, "tokenizer: PCRE2 failed to %s: %s (%d)", action,
                (const char *)message, number);
}

int presplit_open(struct presplit **presplit, enum pattern pattern, struct error *error) {
    struct presplit *opened = *presplit = calloc(1, sizeof *opened);
    if (!opened) return fail(error, EXIT_MEMORY, "tokenizer: no memory for a pattern");
    int number = 0;
    PCRE2_SIZE place = 0;
    opened->code = pcre2_compile((PCRE2_SPTR)patterns[pattern], PCRE2_ZERO_TERMINATED,
                                 PCRE2_UTF | PCRE2_UCP, &number, &place, NULL);
    if (!opened->code) {
        if (number == PCRE2_ERROR_HEAP_FAILED) number = PCRE2_ERROR_NOMEMORY;
        return pcre2_failed(number, "compile a pattern", error);
    }
    opened->match = pcre2_match_data_create(1, NULL);
    opened->context = pcre2_match_context_create(NULL);
    if (!opened->match || !opened->context)
        return pcre2_failed(PCRE2_ERROR_NOMEMORY, "make room for a match", error);
    /* The limits guard against patterns that backtrack without end. These do not: but a run of
     * spaces as long as the default limit would meet it. */
    pcre2_set_match_limit(opened->context, UINT32_MAX);
    pcre2_set_heap_limit(opened->context, UINT32_MAX);
    /* Without just-in-time compilation the same code is interpreted: nothing to report. */
    pcre2_jit_compile(opened->code, PCRE2_JIT_COMPLETE);
    return 0;
}

void presplit_close(struct presplit *presplit) {
    if (!presplit) return;
    pcre2_match_context_free(presplit->context);
    pcre2_match_data_free(presplit->match);
    pcre2_code_free(presplit->code);
    free(presplit);
}

int presplit_next(struct presplit *presplit, const char *text, size_t bytes, size_t from,
                  size_t *end, struct error *error) {
    /* Validating the text here, on each call, would take time quadratic in its length. */
    int number =
        pcre2_match(presplit->code, (PCRE2_SPTR)text, bytes, from,
                    PCRE2_NO_UTF_CHECK | PCRE2_NOTEMPTY, presplit->match, presplit->context);
    if (number < 0 && number != PCRE2_ERROR_NOMATCH)
        return pcre2_failed(number, "split a text", error);
    if (number == PCRE2_ERROR_NOMATCH) {
        *end = bytes;
        return 0;
    }
    /* What no alternative matches would be a piece of its own, up to the next match. */
    const PCRE2_SIZE *match = pcre2_get_ovector_pointer(presplit->match);
    *end = match[0] > from ? match[0] : match[1];
    return 0;
}
