/* The CPU's roof, measured on the memory and with the vectors that the products use: what --bench
 * compares with, in the same minute, since a shared machine's bandwidth wanders.
 *
 * Reading   the weights (their first 512 MB), once a pass, by all threads, each in 1, 2 or 4 streams
 *           far apart; the fastest counts, since which one that is depends on the machine. Weights
 *           smaller than the last-level cache are read from that cache, as a step of the model reads
 *           them: then that is the roof. Small ones are read again until 256 MB are.
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

/* A measurement, and where its results go so that the work is done. */
struct measurement {
    const struct engine *e;
    size_t pass, passes, streams; /* bytes read together, how often, in how many streams a thread */
    float *sink;                  /* [threads] */
};

static void read_weights(struct member me, void *job) {
    const struct measurement *m = job;
    const char *weights = engine_region(m->e, REGION_WEIGHTS);
    const size_t lines = m->pass / me.count / m->streams / LINE, apart = lines * LINE;
    for (size_t i = 0; i < m->passes; i++)
        m->sink[me.index * THREAD_FLOATS] =
            (float)read_streams(weights + me.index * m->streams * apart, lines, m->streams, apart);
}

/* The factors are read from memory, so that the compiler knows nothing about them. */
static void multiply_add(struct member me, void *job) {
    const struct measurement *m = job;
    volatile float half = 0.5f, quarter = 0.25f;
    const v8f a = splat8(half), b = splat8(quarter);
    v8f sum[CHAINS], all = {0};
    for (int i = 0; i < CHAINS; i++) sum[i] = splat8((float)i);
    for (int k = 0; k < PEAK_STEPS; k++)
        for (int i = 0; i < CHAINS; i++) sum[i] = sum[i] * a + b;
    for (int i = 0; i < CHAINS; i++) all += sum[i];
    m->sink[me.index * THREAD_FLOATS] = sum8(all);
}

static double seconds_of(struct engine *e, team_task *task, struct measurement *m) {
    const double start = now();
    team_run(team_of(e), task, m);
    return now() - start;
}

void cpu_roof(struct engine *e, struct roof *roof) {
    const size_t bytes = e->plan.region[REGION_WEIGHTS].bytes;
    const double threads = e->plan.limits.threads;
    struct measurement m = {.e = e, .sink = engine_region(e, REGION_THREADS)};
    m.pass = bytes < pass_bytes ? bytes : pass_bytes;
    m.passes = (least_bytes + m.pass - 1) / m.pass;
    *roof = (struct roof){0};
    for (m.streams = 1; m.streams <= 4; m.streams *= 2) {
        const double rate = (double)(m.pass * m.passes) / seconds_of(e, read_weights, &m);
        if (rate > roof->bytes_per_second) roof->bytes_per_second = rate;
    }
    roof->flops_per_second =
        threads * CHAINS * CPU_LANES * 2 * PEAK_STEPS / seconds_of(e, multiply_add, &m);
}
