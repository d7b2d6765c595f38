#define _POSIX_C_SOURCE 200809L
#include "cli/output.h"

#include <errno.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

void note(const struct options *options, const char *format, ...) {
    if (options->quiet) return;
    va_list arguments;
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fputc('\n', stderr);
}

/* Whether stdout and stderr are one file or pipe, as in a log. */
static bool one_log(void) {
    struct stat out, err;
    return fstat(STDOUT_FILENO, &out) == 0 && fstat(STDERR_FILENO, &err) == 0 &&
           out.st_dev == err.st_dev && out.st_ino == err.st_ino;
}

void output_open(struct output *output, const struct options *options) {
    memset(output, 0, sizeof *output);
    output->options = options;
    output->terminal = isatty(STDOUT_FILENO) == 1;
    output->ends_line = output->terminal || (!options->quiet && one_log());
}

int output_raw(const char *text, size_t bytes, struct error *error) {
    while (bytes > 0) {
        ssize_t n = write(STDOUT_FILENO, text, bytes);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && errno == EAGAIN) { /* somebody made the pipe non-blocking: wait for room */
            poll(&(struct pollfd){.fd = STDOUT_FILENO, .events = POLLOUT}, 1, -1);
            continue;
        }
        if (n < 0 && (errno == EPIPE || errno == EBADF)) {
            *error = (struct error){.code = EXIT_CLOSED_PIPE};
            return EXIT_CLOSED_PIPE;
        }
        if (n < 0)
            return fail(error, EXIT_INTERNAL, "stdout: cannot be written: %s", strerror(errno));
        text += n;
        bytes -= (size_t)n;
    }
    return 0;
}

/* Bytes of the UTF-8 character at text, 0 where there is none (RFC 3629, lengths only). */
static size_t character_bytes(const unsigned char *text, size_t bytes) {
    size_t length = text[0] < 0x80   ? 1
                    : text[0] < 0xc2 ? 0
                    : text[0] < 0xe0 ? 2
                    : text[0] < 0xf0 ? 3
                    : text[0] < 0xf5 ? 4
                                     : 0;
    if (length > bytes) return 0;
    for (size_t i = 1; i < length; i++)
        if ((text[i] & 0xc0) != 0x80) return 0;
    return length;
}

/* C0 but for tab and line end, DEL, C1: a model's text must not steer the terminal. */
static bool is_control(const unsigned char *character) {
    unsigned char c = character[0];
    return (c < 0x20 && c != '\n' && c != '\t') || c == 0x7f || (c == 0xc2 && character[1] < 0xa0);
}

static int print_for_terminal(const char *text, size_t bytes, struct error *error) {
    const unsigned char *at = (const unsigned char *)text;
    for (size_t i = 0; i < bytes;) {
        size_t length = character_bytes(at + i, bytes - i);
        int code = 0;
        if (length == 0)
            code = output_raw("\xef\xbf\xbd", 3, error); /* U+FFFD */
        else if (!is_control(at + i))
            code = output_raw(text + i, length, error);
        if (code) return code;
        i += length ? length : 1;
    }
    return 0;
}

/* Prints the first bytes of what is held and moves the rest up. */
static int release(struct output *output, size_t bytes, struct error *error) {
    if (bytes == 0) return 0;
    int code = output->terminal ? print_for_terminal(output->held, bytes, error)
                                : output_raw(output->held, bytes, error);
    output->line_open = output->held[bytes - 1] != '\n';
    output->held_bytes -= bytes;
    memmove(output->held, output->held + bytes, output->held_bytes);
    return code;
}

/* The first place where a whole stop text stands, or with `partly` where one may yet come to stand;
 * the end where there is none. */
static size_t find_stop(const struct output *output, bool partly) {
    for (size_t at = 0; at < output->held_bytes; at++) {
        const size_t left = output->held_bytes - at;
        for (int i = 0; i < output->options->stop_count; i++) {
            const char *stop = output->options->stop[i];
            const size_t length = strlen(stop), compared = length < left ? length : left;
            if ((partly || length <= left) && memcmp(output->held + at, stop, compared) == 0)
                return at;
        }
    }
    return output->held_bytes;
}

int output_text(struct output *output, const char *text, size_t bytes, struct error *error) {
    if (output->stopped) return 0;
    memcpy(output->held + output->held_bytes, text, bytes);
    output->held_bytes += bytes;
    /* A whole stop text ends the text, even while a longer one before it is still possible. */
    const size_t whole = find_stop(output, false);
    output->stopped = whole < output->held_bytes;
    int code = release(output, output->stopped ? whole : find_stop(output, true), error);
    if (output->stopped) output->held_bytes = 0;
    return code;
}

int output_unchecked(struct output *output, const char *text, size_t bytes, struct error *error) {
    memcpy(output->held, text, bytes);
    output->held_bytes = bytes;
    return release(output, bytes, error);
}

int output_end(struct output *output, struct error *error) {
    int code = release(output, output->held_bytes, error);
    if (!code && output->ends_line && output->line_open) code = output_raw("\n", 1, error);
    return code;
}
