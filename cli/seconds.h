/* Wall-clock time from a clock that never jumps. */
#ifndef CLI_SECONDS_H
#define CLI_SECONDS_H

#include <time.h>

static inline double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

#endif
