/* Steps of random models, operator by operator, on the paths that the device has. */
#ifndef TESTS_GPU_STEPS_H
#define TESTS_GPU_STEPS_H

#include "tests/gpu_operators.h"

/* The device's own kernels, the general ones, and the former once more in a chain, where an
 * operator finds what the one before it has left. */
enum path { OWN, GENERAL, CHAINED, PATHS };

static inline void name_step(struct step *s, enum path path) {
    static const char *const names[] = {"", ", general path", ", in a chain"};
    snprintf(s->name, sizeof s->name, "C %zu H %zu G %zu D %zu F %zu V %zu %s, T %zu at %d%s", s->C,
             s->H, s->G, s->D, s->F, s->V, dtype_name(s->dtype), s->T, row_numbers(s, 2)[0],
             names[path]);
}

/* T rows at a position of slot 1 of two, on all paths; everything else in the caches is NaN. */
static inline void check_step(struct gpu *g, int T, int position, size_t every) {
    for (int path = 0; path < PATHS; path++) {
        struct step s = step_of(g, (struct rows){T, T % 4 == 3 ? T : T < 3 ? 1 : T % 4}, every);
        s.chained = path == CHAINED;
        if (s.chained && s.dtype == F32) continue;
        cuda_general_path(&g->device, path == GENERAL);
        gpu_reset(g);
        fill_cache(&s, 1, (size_t)position);
        gpu_put_all(g);
        row_numbers(&s, 2)[0] = position; /* for the name; the device is told below */
        name_step(&s, (enum path)path);
        check_rows(&s, 1, position);
        check_operators(&s);
    }
}

static inline void check_config(struct config c, int T, int position) {
    const struct shape shape = {.C = c.width, .V = c.vocab};
    struct gpu g;
    c.rope_scale = 1.25f;
    c.embed_scale = 1.5f;
    c.tied = T % 2;
    c.vocab_used = shape.V > 2 ? shape.V - T % 3 : shape.V;
    gpu_open(&g, c, (struct limits){position + T + T % 5, T + T % 3, 2, T, 1, true});
    /* A norm after a product needs all of it. */
    const size_t every = shape.C > 2000 && c.norm_placement == NORM_BEFORE ? 7 : 1;
    check_step(&g, T, position, every);
    if (T > CUDA_LEAST_ROWS && T <= CUDA_FEW_ROWS) { /* as many rows above, with weights so small */
        cuda_one_tile(&g.device, CUDA_FEW);
        check_step(&g, T, position, every);
    }
    gpu_close(&g);
}

static inline void check_shape(struct shape shape, enum dtype dtype, int T, int position) {
    check_config(random_config(shape, dtype), T, position);
}

/* ---- prompts ---- */

struct prompt {
    struct shape shape;
    int T, position, window;
    bool qk_norm;
};

/* bf16, in slot 1 of two. tile: 0, or which one of cuda_tiles() all products of many rows take on the
 * device's own path. */
static inline void check_prompt(struct prompt p, int classified, size_t every, enum path path,
                                int tile) {
    struct gpu g;
    struct config c = random_config(p.shape, BF16);
    c.layer[0].window = p.window;
    if (p.qk_norm) c.qk_norm = QK_NORM_HEAD;
    gpu_open(&g, c,
             (struct limits){p.position + p.T + p.T % 5, p.T + p.T % 3, 2, classified, 1, true});
    struct step s = step_of(&g, (struct rows){p.T, classified}, every);
    s.chained = path == CHAINED;
    cuda_one_tile(&g.device, tile);
    cuda_general_path(&g.device, path == GENERAL);
    fill_cache(&s, 1, (size_t)p.position);
    gpu_put_all(&g);
    row_numbers(&s, 2)[0] = p.position; /* for the name; the device is told below */
    name_step(&s, path);
    check_rows(&s, 1, p.position);
    check_operators(&s);
    gpu_close(&g);
}

/* ---- a row that is NaN ---- */

/* A later row of the same step is past a row's length, too: its NaN stays its own. In prompts it
 * may reach the rows of its tile of 64 positions where Hopper's own attention does not run, since
 * there a weight of zero does not end a NaN. */
static inline void check_nan_row(struct shape shape, enum dtype dtype, int T, bool general) {
    enum { TILE = 64 };
    struct gpu g;
    gpu_open(&g, random_config(shape, dtype), (struct limits){200, T, 1, 1, 1, true});
    const bool hopper = !general && dtype == BF16 && cuda_capability(&g.device) == 90;
    struct step s = step_of(&g, (struct rows){T, 1}, 1);
    snprintf(s.name, sizeof s.name, "C %zu D %zu %s, T %d, the last row NaN%s", s.C, s.D,
             dtype_name(dtype), T, general ? ", general path" : "");
    cuda_general_path(&g.device, general);
    check_rows(&s, 0, 0);
    g.device.ops->embed(&g.device, s.rows);
    float *row = allocated(s.C * sizeof *row);
    for (size_t c = 0; c < s.C; c++) row[c] = NAN;
    cuda_write(&g.device, (float *)engine_region(&g.device, REGION_X) + (s.T - 1) * s.C, row,
               s.C * sizeof *row);
    g.device.ops->qkv(&g.device, 0, s.rows);
    g.device.ops->attend(&g.device, 0, s.rows);
    const size_t last = s.T - 1, width = s.H * s.D;
    const size_t clean = T > CUDA_DECODE_ROWS && !hopper ? last / TILE * TILE : last; /* rows */
    size_t wrong = 0;
    if (gpu_read(&g, s.name, "attend"))
        for (size_t a = 0; a < s.T * width; a++) {
            const bool nan = isnan(weight_at(is_now(&s, REGION_A), s.dtype, a));
            wrong += a < clean * width ? nan : a >= last * width && !nan;
        }
    check(!wrong, "%s: %zu numbers are wrongly NaN, or not", s.name, wrong);
    free(row);
    gpu_close(&g);
}

#endif
