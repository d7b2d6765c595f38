/* Errors that a person reads: one line that says what, where, expected, found and what to do.
 * Functions that can fail return 0 or one of these exit codes, and fill an error on the way. */
#ifndef MODEL_ERROR_H
#define MODEL_ERROR_H

enum exit_code {
    EXIT_INTERNAL = 1,
    EXIT_USAGE = 2,
    EXIT_BAD_FILE = 3, /* model or tokenizer file */
    EXIT_MEMORY = 4,   /* host or device memory */
    EXIT_DEVICE = 5,   /* CUDA */
    EXIT_INTERRUPTED = 130,
    EXIT_CLOSED_PIPE = 141
};

struct error {
    int code;
    char text[512];
};

/* Fills *error with the formatted line (cut at 511 bytes, control characters replaced) and returns
 * code, so that a caller writes `return fail(error, EXIT_BAD_FILE, "...")`. */
__attribute__((format(printf, 3, 4))) int fail(struct error *error, int code, const char *format,
                                               ...);

#endif
