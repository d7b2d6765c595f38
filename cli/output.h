/* The generated text on its way to stdout: stop texts found and cut off, control characters kept
 * from a terminal, a closed or full stdout noticed. */
#ifndef CLI_OUTPUT_H
#define CLI_OUTPUT_H

#include "cli/options.h"
#include "tokenizer/tokenizer.h"

struct output {
    const struct options *options;
    bool terminal;
    bool ends_line;                           /* more lines follow in the same place */
    bool stopped;                             /* a stop text came: nothing more is printed */
    bool line_open;                           /* the last byte printed was no line end */
    char held[MAX_STOP_BYTES + DECODER_ROOM]; /* may be the start of a stop text */
    size_t held_bytes;
};

void output_open(struct output *output, const struct options *options);

/* Prints text[0..bytes), bytes <= DECODER_ROOM, but for what may still become a stop text.
 * EXIT_CLOSED_PIPE (with an empty message: a shell expects silence) where nobody reads stdout any
 * more, EXIT_INTERNAL where writing fails otherwise. */
int output_text(struct output *output, const char *text, size_t bytes, struct error *error);

/* Prints text[0..bytes) whatever stop texts it holds: the echo of a prompt. The same errors. */
int output_unchecked(struct output *output, const char *text, size_t bytes, struct error *error);

/* Prints what was held back, and the line's end on a terminal or where stderr goes the same way. */
int output_end(struct output *output, struct error *error);

/* Writes bytes to stdout as they are: the same errors. */
int output_raw(const char *text, size_t bytes, struct error *error);

/* A line on stderr unless --quiet. A stderr that cannot be written to is no error. */
__attribute__((format(printf, 2, 3))) void note(const struct options *options, const char *format,
                                                ...);

#endif
