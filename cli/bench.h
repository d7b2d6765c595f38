/* --bench: tokens per second of prompts (pp) and of generation (tg), each beside the roof that was
 * measured in the same minute. Conventions of llama-bench: random tokens, one run dropped, an empty
 * cache for every run, average and standard deviation. */
#ifndef CLI_BENCH_H
#define CLI_BENCH_H

#include "cli/options.h"
#include "kernels/ops.h"

/* The lists of the options as numbers. */
enum { MAX_BENCH_LIST = 32 };
struct bench_plan {
    int pp[MAX_BENCH_LIST], tg[MAX_BENCH_LIST], depth[MAX_BENCH_LIST];
    int pp_count, tg_count, depth_count;
    int context; /* positions that the longest test takes, at least 1 */
};

/* Reads --pp, --tg and --depth. EXIT_USAGE. */
int bench_read(struct bench_plan *plan, const struct options *options, struct error *error);

/* Runs the tests on an engine whose plan holds plan->context positions, and prints the table on
 * stdout. */
int bench_run(struct engine *e, const struct bench_plan *plan, const struct options *options,
              void (*forward)(struct engine *, struct rows), struct error *error);

#endif
