/* Whole random models on the GPU: cut into steps in many ways, against a plain fp64 forward pass and
 * the CPU backend; run again; replayed as graphs. */
#ifndef TESTS_GPU_MODELS_H
#define TESTS_GPU_MODELS_H

#include "tests/gpu_operators.h"

/* ---- what is right ---- */

/* One layer of a whole sequence: x[T, C] becomes the next layer's. */
static inline void reference_layer(const struct step *s, int layer, struct both *x,
                                   const int32_t *positions) {
    const size_t T = s->T, D = s->D, heads = s->H + 2 * s->G;
    struct both *qkv = reference_qkv(s, layer, x, positions);
    struct both *q = both_new(T * s->H * D), *a = both_new(T * s->H * D);
    struct both *k = both_new(T * s->G * D), *v = both_new(T * s->G * D);
    for (size_t t = 0; t < T; t++) {
        const struct both *row = qkv + t * heads * D;
        memcpy(q + t * s->H * D, row, s->H * D * sizeof *q);
        for (size_t g = 0; g < s->G; g++) {
            memcpy(k + (g * T + t) * D, row + (s->H + g) * D, D * sizeof *k);
            memcpy(v + (g * T + t) * D, row + (s->H + s->G + g) * D, D * sizeof *v);
        }
    }
    int32_t *slots = allocated(T * sizeof *slots);
    memset(slots, 0, T * sizeof *slots);
    struct attention_job job = {.q = q,
                                .k = k,
                                .v = v,
                                .out = a,
                                .slots = slots,
                                .positions = positions,
                                .T = T,
                                .H = s->H,
                                .G = s->G,
                                .D = D,
                                .R = T,
                                .layer = layer,
                                .config = &s->g->host.config};
    attention(&job, s->dtype);
    reference_add(s, layer, ATTENTION_OUT, x, a);
    struct both *h = reference_gate_up(s, layer, x);
    reference_add(s, layer, FEED_FORWARD_DOWN, x, h);
    free(qkv);
    free(q);
    free(a);
    free(k);
    free(v);
    free(slots);
    free(h);
}

/* Logits of every row of a sequence in slot 0. */
static inline struct both *reference_logits(struct gpu *g, const int32_t *tokens, int n) {
    const struct step s = step_of(g, (struct rows){n, n}, 1);
    const struct engine *e = &g->host.engine;
    struct both *x = both_new(s.T * s.C);
    int32_t *positions = allocated(s.T * sizeof *positions);
    for (size_t t = 0; t < s.T; t++) positions[t] = (int32_t)t;
    for (size_t i = 0; i < s.T * s.C; i++)
        x[i] = reference_embedding(e, tokens[i / s.C], (int)(i / s.C), i % s.C);
    for (int l = 0; l < e->config->layers; l++) reference_layer(&s, l, x, positions);
    struct both *logits =
        normed_product(x, e->norm_final, e->norm_final_bias, e->config->norm_eps, e->classifier,
                       s.dtype, s.T, s.C, (struct columns){s.V, s.V, 1});
    free(x);
    free(positions);
    return logits;
}

/* ---- what the engines say ---- */

/* logits[n, V] of a sequence in steps of `chunk` rows. replayed: through ops->step. */
static inline float *logits_of(struct engine *e, const int32_t *tokens, int n, int chunk,
                               bool replayed) {
    const size_t V = (size_t)e->config->vocab;
    float *logits = allocated((size_t)n * V * sizeof *logits);
    struct error error = {0};
    for (int done = 0; done < n; done += chunk) {
        const int count = n - done < chunk ? n - done : chunk;
        const struct rows rows = {count, count};
        e->ops->set_rows(e, tokens + done, count, 0, done);
        if (replayed)
            e->ops->step(e, rows, forward, NULL);
        else
            forward(e, rows);
        for (int t = 0; t < count; t++)
            gpu_must(e->ops->read_logits(e, t, logits + (size_t)(done + t) * V, &error), &error);
    }
    return logits;
}

static inline float *cpu_logits(struct config c, const int32_t *tokens, int n) {
    struct random_engine r;
    random_engine_open(&r, c, (struct limits){n, n, 1, n, 2, false});
    float *logits = logits_of(&r.engine, tokens, n, n, false);
    random_engine_close(&r);
    return logits;
}

/* However a sequence is cut into steps: its logits are right. */
static inline void check_chunks(struct config config, int n, const int *chunks, int count) {
    struct gpu g;
    const size_t V = (size_t)config.vocab;
    const enum dtype dtype = config.weight_dtype;
    gpu_open(&g, config, (struct limits){n, n, 1, n, 1, true});
    int32_t *tokens = allocated((size_t)n * sizeof *tokens);
    for (int i = 0; i < n; i++) tokens[i] = some_token(&g.host);
    struct both *right = reference_logits(&g, tokens, n);
    float *cpu = cpu_logits(g.host.config, tokens, n);
    const int heads = config.heads * config.head_dim;
    const size_t longest = (size_t)(config.ffn > heads ? config.ffn : heads);
    const double tolerance = tolerance_of(right, (size_t)n * V, longest, dtype, false);
    char name[160];
    snprintf(name, sizeof name, "C %d %s, %d positions", config.width, dtype_name(dtype), n);
    compare(name, "logits on the CPU", cpu, V, right, (size_t)n, V, tolerance);
    struct both *of_cpu = both_from(cpu, (size_t)n * V);
    for (int general = 0; general < 2; general++) {
        cuda_general_path(&g.device, general);
        for (int i = 0; i < count; i++) {
            snprintf(name, sizeof name, "C %d %s, %d positions in chunks of %d%s", config.width,
                     dtype_name(dtype), n, chunks[i], general ? ", general path" : "");
            gpu_reset(&g);
            gpu_put_all(&g);
            float *logits = logits_of(&g.device, tokens, n, chunks[i], true);
            compare(name, "logits", logits, V, right, (size_t)n, V, tolerance);
            compare(name, "logits against the CPU's", logits, V, of_cpu, (size_t)n, V,
                    2 * tolerance);
            free(logits);
        }
    }
    free(of_cpu);
    free(right);
    free(cpu);
    free(tokens);
    gpu_close(&g);
}

/* ---- the same bits ---- */

enum way { DIRECTLY, AS_STEP };

/* A step from the same start; the arena after it into `now`. */
static inline bool run_again(struct step *s, const int32_t *tokens, int position, enum way way) {
    struct engine *e = &s->g->device;
    gpu_put_all(s->g);
    e->ops->set_rows(e, tokens, s->rows.count, 0, position);
    if (way == AS_STEP)
        e->ops->step(e, s->rows, forward, NULL);
    else
        forward(e, s->rows);
    return gpu_read(s->g, s->name, "forward");
}

/* Whether `now` holds the bits that `first` remembers. */
static inline bool same_bits(const struct gpu *g, const char *first) {
    for (int i = 0; i < g->kept_count; i++) {
        const struct stretch k = g->kept[i];
        if (memcmp(g->now + k.from, first + k.from, k.to - k.from) != 0) return false;
    }
    return true;
}

/* A step run several times leaves the same bits behind, cache, logits and all; as a graph, too: when it
 * is captured and when it is replayed. */
static inline void check_repeats(struct gpu *g, struct rows rows, int position, int repeats) {
    struct step s = step_of(g, rows, 1);
    const size_t from = region_end(&g->device.plan, REGION_WEIGHTS);
    char *first = allocated(g->host.arena_bytes);
    int32_t *tokens = allocated(s.T * sizeof *tokens);
    for (size_t t = 0; t < s.T; t++) tokens[t] = some_token(&g->host);
    snprintf(s.name, sizeof s.name, "C %zu V %zu %s, T %zu (%d classified) at %d", s.C, s.V,
             dtype_name(s.dtype), s.T, rows.classified, position);
    gpu_reset(g);
    fill_cache(&s, 0, (size_t)position);
    bool well = run_again(&s, tokens, position, DIRECTLY);
    memcpy(first + from, g->now + from, g->host.arena_bytes - from);
    int other = 0;
    for (int i = 1; i < repeats && well; i++) {
        well = run_again(&s, tokens, position, DIRECTLY);
        other += !same_bits(g, first);
    }
    check(well && !other, "%s: other bits in %d of %d runs", s.name, other, repeats);
    for (int i = 0; i < 3 && well; i++) {
        well = run_again(&s, tokens, position, AS_STEP);
        check(well && same_bits(g, first), "%s: other bits as a step, time %d", s.name, i + 1);
    }
    free(first);
    free(tokens);
}

#endif
