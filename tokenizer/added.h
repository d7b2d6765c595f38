/* Finds added tokens ("<|im_end|>") in a text, before it is split any further. */
#ifndef TOKENIZER_ADDED_H
#define TOKENIZER_ADDED_H

#include "model/error.h"
#include "tokenizer/section.h"
#include "tokenizer/tokenizer.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct added {
    const struct section_added **token; /* [count], sorted by their bytes, no two the same */
    int32_t count;
    int32_t first[257];  /* tokens that start with byte b: first[b] to first[b + 1] - 1 */
    bool starts[2][256]; /* [parse_special][b]: such a token may match */
};

struct added_match {
    size_t start,
        end; /* the bytes of the text that it stands for, swallowed white space included */
    int32_t id;
};

/* Sorts the added tokens of section, which has to outlive *added. Of several with the same bytes
 * only that with the lowest id can be matched. EXIT_MEMORY. */
int added_open(struct added *added, const struct section *section, struct error *error);
void added_close(struct added *added);

/* The leftmost match in text[from..bytes), and the longest at its place. Control tokens match only
 * inside of a part that says parse_special. *part holds text[from] or comes before the part that
 * does, and moves on with the search. Time: a step per byte of the text, and where a token may start
 * as many as the longest token shares bytes with the text. */
bool added_find(const struct added *added, const char *text, size_t bytes, size_t from,
                const struct text_part **part, struct added_match *match);

#endif
