/* The CPU's roof, measured on the memory and with the vectors that the products use: what --bench
 * compares with, in the same minute, since a shared machine's bandwidth wanders.
 *
 * Reading   the weights (their first 512 MB), once a pass, by all threads, each thread in 1, 2 or 4
 *           streams far apart; the fastest counts, since which one that is depends on the machine.
 *           Weights smaller than the last-level cache are read from that cache, as a step of the
 *           model reads them: then that is the roof. Small ones are read again until 256 MB are.
 * FLOPs     12 independent chains of multiply-adds a thread, in registers. */
#define _POSIX_C_SOURCE 200809L
#include "kernels/cpu.h"
#include "kernels/simd.h"

#include <time.h>

enum { CHAINS = 12, LINE = 256, PEAK_STEPS = 4000000 };
static const size_t pass_bytes = 512U << 20, least_bytes = 256U << 20;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* Reads `lines` lines of 256 bytes in each of `streams` streams that are `apart` bytes apart. What
 * it returns is of no use but to keep the reads. */
static uint32_t read_streams(const char *from, size_t lines, size_t streams, size_t apart) {
    v8u sum[8];
    uint32_t all = 0;
    for (int i = 0; i < 8; i++) sum[i] = (v8u){0};
    for (size_t line = 0; line < lines; line++)
        for (size_t s = 0; s < streams; s++)
            for (int i = 0; i < 8; i++)
                sum[i] += *(const v8u *)(from + s * apart + line * LINE + i * 32);
    for (int i = 0; i < 8; i++)
        for (int j = 0; j < 8; j++) all += sum[i][j];
    return all;
}

/* Bytes a second of all threads with so many streams each. */
static double read_rate(const struct engine *e, size_t streams) {
    const char *weights = engine_region(e, REGION_WEIGHTS);
    const size_t bytes = e->plan.region[REGION_WEIGHTS].bytes;
    const size_t pass = bytes < pass_bytes ? bytes : pass_bytes;
    const size_t passes = (least_bytes + pass - 1) / pass;
    size_t read = 0;
    const double start = now();
#pragma omp parallel num_threads(e->plan.limits.threads)
    {
        const struct member me = this_member(e);
        const size_t lines = pass / me.count / streams / LINE, apart = lines * LINE;
        for (size_t i = 0; i < passes; i++)
            me.scratch[0] =
                (float)read_streams(weights + me.index * streams * apart, lines, streams, apart);
        if (me.index == 0) read = passes * me.count * streams * apart;
    }
    return (double)read / (now() - start);
}

/* Multiply-adds in registers; the factors are read from memory so that nothing is known about them.
 */
static double peak_rate(const struct engine *e) {
    volatile float half = 0.5f, quarter = 0.25f;
    size_t threads = 0;
    const double start = now();
#pragma omp parallel num_threads(e->plan.limits.threads)
    {
        const struct member me = this_member(e);
        const v8f a = splat8(half), b = splat8(quarter);
        v8f sum[CHAINS], all = {0};
        for (int i = 0; i < CHAINS; i++) sum[i] = splat8((float)i);
        for (int k = 0; k < PEAK_STEPS; k++)
            for (int i = 0; i < CHAINS; i++) sum[i] = sum[i] * a + b;
        for (int i = 0; i < CHAINS; i++) all += sum[i];
        me.scratch[0] = sum8(all);
        if (me.index == 0) threads = me.count;
    }
    return (double)threads * CHAINS * CPU_LANES * 2 * PEAK_STEPS / (now() - start);
}

void cpu_roof(struct engine *e, struct roof *roof) {
    *roof = (struct roof){0};
    for (size_t streams = 1; streams <= 4; streams *= 2) {
        const double rate = read_rate(e, streams);
        if (rate > roof->bytes_per_second) roof->bytes_per_second = rate;
    }
    roof->flops_per_second = peak_rate(e);
}
