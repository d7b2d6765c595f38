#include "model/error.h"

#include <stdarg.h>
#include <stdio.h>

int fail(struct error *error, int code, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error->text, sizeof error->text, format, arguments);
    va_end(arguments);
    /* Names from a file or a command line may hold escape sequences or line ends. */
    for (char *c = error->text; *c; c++)
        if ((unsigned char)*c < 0x20 || *c == 0x7f) *c = '?';
    error->code = code;
    return code;
}
