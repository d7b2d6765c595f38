/* Each operator of the CUDA backend on its own: from what the arena holds before it to what it must
 * hold after it. Outputs and scratch are poison before. */
#ifndef TESTS_GPU_OPERATORS_H
#define TESTS_GPU_OPERATORS_H

#include "tests/gpu_reference.h"

/* A step, and what its checks share. */
struct step {
    struct gpu *g;
    struct rows rows;
    enum dtype dtype;
    size_t T, C, H, G, D, F, V, S, qkv;
    size_t every;            /* of wide products so many columns are not computed but one */
    bool chained;            /* nothing is written between the operators, as in a whole step */
    struct both *unfinished; /* of one row: what qkv should give, where attention is to finish it */
    struct both *x;          /* of one row: what x should be, while REGION_X does not have it */
    char name[160];
};

static inline struct step step_of(struct gpu *g, struct rows rows, size_t every) {
    const struct config *c = &g->host.config;
    struct step s = {.g = g,
                     .rows = rows,
                     .dtype = c->weight_dtype,
                     .T = (size_t)rows.count,
                     .C = (size_t)c->width,
                     .H = (size_t)c->heads,
                     .G = (size_t)c->kv_heads,
                     .D = (size_t)c->head_dim,
                     .F = (size_t)c->ffn,
                     .V = (size_t)c->vocab,
                     .S = (size_t)g->device.plan.limits.context,
                     .every = every};
    s.qkv = (s.H + 2 * s.G) * s.D;
    return s;
}

/* A region as it was before the operator, and as it is now. */
static inline void *was(const struct step *s, enum region region) {
    return engine_region(&s->g->host.engine, region);
}

static inline void *is_now(const struct step *s, enum region region) {
    return region_now(s->g, region);
}

static inline int32_t *row_numbers(const struct step *s, int which) {
    return (int32_t *)was(s, REGION_ROWS) + which * s->g->device.plan.limits.chunk;
}

/* Positions of a layer's cache, elements before its m [slots, G, R, D], and before one position in that. */
static inline size_t ring_of(const struct step *s, int layer) {
    return (size_t)plan_device_ring(&s->g->host.config, &s->g->device.plan.limits, layer);
}

static inline size_t layer_offset(const struct step *s, int layer) {
    size_t positions = 0;
    for (int l = 0; l < layer; l++) positions += ring_of(s, l);
    return positions * (size_t)s->g->device.plan.limits.slots * s->G * s->D;
}

static inline size_t position_offset(const struct step *s, int layer, size_t slot, size_t g,
                                     size_t position) {
    const size_t R = ring_of(s, layer);
    return ((slot * s->G + g) * R + position % R) * s->D;
}

static inline int32_t some_token(struct random_engine *r) {
    r->state = r->state * 6364136223846793005u + 1442695040888963407u;
    return (int32_t)((r->state >> 33) % (uint64_t)r->config.vocab_used);
}

/* Random keys and values of all layers for positions 0..count of a slot, on the host alone: those that the
 * row at `count` sees, and in bf16 for many rows those of a tile before. */
static inline void fill_cache(const struct step *s, size_t slot, size_t count) {
    const bool tiled = s->dtype == BF16 && s->T > CUDA_DECODE_ROWS;
    const size_t m = dtype_size(s->dtype), tile = tiled ? CUDA_RING : 1;
    uint64_t *state = &s->g->host.state;
    for (int l = 0; l < s->g->host.config.layers; l++)
        for (size_t g = 0; g < s->G; g++)
            for (size_t p = first_seen(&s->g->host.config, l, count) / tile * tile; p < count;
                 p++) {
                const size_t at = (layer_offset(s, l) + position_offset(s, l, slot, g, p)) * m;
                random_weights(state, (char *)was(s, REGION_KEYS) + at, s->dtype, s->D, 2);
                random_weights(state, (char *)was(s, REGION_VALUES) + at, s->dtype, s->D, 1);
            }
}

/* One case: the rows of the step, set through the table. */
static inline void check_rows(struct step *s, int slot, int position) {
    int32_t *tokens = allocated(s->T * sizeof *tokens);
    for (size_t t = 0; t < s->T; t++) {
        tokens[t] = row_numbers(s, 0)[t] = some_token(&s->g->host);
        row_numbers(s, 1)[t] = slot;
        row_numbers(s, 2)[t] = position + (int32_t)t;
    }
    s->g->device.ops->set_rows(&s->g->device, tokens, (int)s->T, slot, position);
    if (gpu_read(s->g, s->name, "set_rows")) gpu_unchanged(s->g, s->name, "set_rows");
    free(tokens);
}

static inline void poison(struct step *s, enum region region) {
    if (!s->chained) gpu_poison(s->g, region);
}

/* Before an operator. */
static inline void begin(struct step *s) {
    poison(s, REGION_QKV);
    poison(s, REGION_PANELS);
    poison(s, REGION_SCALES);
    poison(s, REGION_SQUARES);
}

/* Two cases: the output at `region` is right, and nothing else has changed. */
static inline void end(struct step *s, const char *what, enum region region, enum dtype dtype,
                       const struct both *right, size_t rows, size_t columns, double tolerance) {
    float *got = floats_from(is_now(s, region), dtype, rows * columns);
    compare(s->name, what, got, columns, right, rows, columns, tolerance);
    gpu_allow(s->g, is_now(s, region), rows * columns * dtype_size(dtype));
    gpu_unchanged(s->g, s->name, what);
    free(got);
}

/* Rows whose sum of squares, in parts in REGION_SQUARES, is not that of x. */
static inline int wrong_squares(const struct step *s, const float *x, int parts, int stride) {
    int wrong = 0;
    const size_t bytes = (size_t)parts * (size_t)stride * sizeof(float);
    float *squares = allocated(bytes); /* scratch: gpu_read leaves it out */
    cuda_read(&s->g->device, squares, engine_region(&s->g->device, REGION_SQUARES), bytes);
    for (size_t t = 0; t < s->T; t++) {
        double right = 0, got = 0;
        for (size_t c = 0; c < s->C; c++) right += (double)x[t * s->C + c] * x[t * s->C + c];
        for (int p = 0; p < parts; p++) got += squares[(size_t)p * (size_t)stride + t];
        wrong += !(fabs(got - right) <= 1e-5 * right);
    }
    free(squares);
    return wrong;
}

/* Two cases, where the operator has prepared the norm after it, for x as it is now: x gamma, bit by bit, and
 * its sums of squares. */
static inline void check_prepared(const struct step *s, const char *what) {
    const float *gamma, *x = is_now(s, REGION_X);
    int parts, stride;
    const size_t m = dtype_size(s->dtype), count = s->T * s->C;
    const size_t rows = (size_t)cuda_prepared_rows(&s->g->device, &gamma, &parts, &stride);
    if (rows == 0) return;
    if (gamma) /* on the host it lies at the same place */
        gamma = (const float *)(s->g->host.engine.arena +
                                ((const char *)gamma - (const char *)s->g->device.arena));
    char *in = allocated(count * m);
    cuda_read(&s->g->device, in, engine_region(&s->g->device, REGION_PANELS), count * m);
    size_t wrong = rows == s->T ? 0 : count;
    for (size_t i = 0; i < count; i++) {
        const float right = gamma ? x[i] * gamma[i % s->C] : x[i];
        wrong += weight_at(in, s->dtype, i) != rounded(right, s->dtype);
    }
    free(in);
    check(!wrong, "%s: %s: %zu prepared inputs have other bits", s->name, what, wrong);
    if (parts == 0) return;
    const int others = wrong_squares(s, x, parts, stride);
    check(!others, "%s: %s: the sums of squares of %d rows are wrong", s->name, what, others);
}

/* x before an operator. */
static inline struct both *x_before(const struct step *s) {
    const size_t count = s->T * s->C;
    if (!s->x) return both_of(was(s, REGION_X), F32, count);
    return memcpy(both_new(count), s->x, count * sizeof *s->x);
}

/* A case, where x was not in REGION_X before the operator: now it is. */
static inline void check_arrived(struct step *s, const char *what) {
    const size_t count = s->T * s->C, longest = s->F > s->H * s->D ? s->F : s->H * s->D;
    if (!s->x) return;
    compare(s->name, what, is_now(s, REGION_X), s->C, s->x, s->T, s->C,
            tolerance_of(s->x, count, longest, s->dtype, false));
    gpu_allow(s->g, is_now(s, REGION_X), count * sizeof(float));
    free(s->x);
    s->x = NULL;
}

/* ---- embed ---- */

static inline void check_embed(struct step *s) {
    struct gpu *g = s->g;
    const struct config *c = &g->host.config;
    const size_t half = (size_t)c->rotary_dims / 2, chunk = (size_t)g->device.plan.limits.chunk;
    struct both *x = both_new(s->T * s->C), *turn = both_new(s->T * 2 * half);
    poison(s, REGION_X);
    poison(s, REGION_ROPE);
    begin(s);
    g->device.ops->embed(&g->device, s->rows);
    if (gpu_read(g, s->name, "embed")) {
        for (size_t t = 0; t < s->T; t++) {
            for (size_t i = 0; i < s->C; i++)
                x[t * s->C + i] = reference_embedding(&g->host.engine, row_numbers(s, 0)[t],
                                                      row_numbers(s, 2)[t], i);
        }
        for (size_t table = 0; table < (size_t)c->rope_tables; table++) {
            const float *turns = (float *)is_now(s, REGION_ROPE) + table * chunk * 2 * half;
            for (size_t i = 0; i < s->T * half; i++) { /* cosines turn (1, 0), sines come with it */
                struct both unit[2] = {{1, 1}, {0, 0}};
                reference_rope(unit, g->host.engine.rope + table * half + i % half,
                               row_numbers(s, 2)[i / half], 1, c->rope_scale);
                turn[i / half * 2 * half + i % half] = unit[0];
                turn[i / half * 2 * half + half + i % half] = unit[1];
            }
            compare(s->name, "rope", turns, 2 * half, turn, s->T, 2 * half,
                    tolerance_of(turn, s->T * 2 * half, 0, F32, false));
            gpu_allow(g, turns, s->T * 2 * half * sizeof *turns);
        }
        end(s, "embed", REGION_X, F32, x, s->T, s->C, tolerance_of(x, s->T * s->C, 0, F32, false));
        check_prepared(s, "embed");
    }
    free(x);
    free(turn);
}

/* ---- qkv ---- */

/* A case: K or V of the step's rows in the cache, against columns of what is right. */
static inline void check_append(struct step *s, int layer, enum region region,
                                const struct both *qkv, size_t column, double tolerance) {
    const size_t width = s->G * s->D, m = dtype_size(s->dtype);
    struct both *right = both_new(s->T * width);
    float *got = allocated(s->T * width * sizeof *got);
    for (size_t t = 0; t < s->T; t++)
        for (size_t g = 0; g < s->G; g++) {
            const size_t slot = (size_t)row_numbers(s, 1)[t], at = (size_t)row_numbers(s, 2)[t];
            const size_t offset = layer_offset(s, layer) + position_offset(s, layer, slot, g, at);
            const char *from = (char *)is_now(s, region) + offset * m;
            for (size_t d = 0; d < s->D; d++) {
                got[t * width + g * s->D + d] = weight_at(from, s->dtype, d);
                right[t * width + g * s->D + d] = qkv[t * s->qkv + column + g * s->D + d];
            }
            gpu_allow(s->g, from, s->D * m);
        }
    compare(s->name, region_name(region), got, width, right, s->T, width, tolerance);
    free(got);
    free(right);
}

/* Queries, keys and values of a layer, rounded as they are stored. */
static inline struct both *reference_qkv(const struct step *s, int layer, const struct both *x,
                                         const int32_t *positions) {
    const struct engine *e = &s->g->host.engine;
    const struct columns columns = {s->qkv, s->D / 2, s->every};
    const struct layer_weights *w = &e->layer[layer];
    struct both *qkv = normed_product(x, w->norm_attention, w->norm_attention_bias,
                                      e->config->norm_eps, w->qkv, s->dtype, s->T, s->C, columns);
    for (size_t t = 0; t < s->T; t++) reference_heads(e, layer, qkv + t * s->qkv, positions[t]);
    round_plain(qkv, s->T * s->qkv, s->dtype);
    return qkv;
}

static inline void check_qkv(struct step *s, int layer) {
    struct gpu *g = s->g;
    struct both *x = x_before(s);
    const size_t queries = s->H * s->D;
    poison(s, REGION_Q);
    begin(s);
    g->device.ops->qkv(&g->device, layer, s->rows);
    const bool unfinished = s->chained && cuda_unfinished(&g->device);
    if (!unfinished) cuda_settle(&g->device);
    if (gpu_read(g, s->name, "qkv")) {
        struct both *qkv = reference_qkv(s, layer, x, row_numbers(s, 2));
        struct both *q = both_new(s->T * queries);
        for (size_t t = 0; t < s->T; t++)
            memcpy(q + t * queries, qkv + t * s->qkv, queries * sizeof *q);
        const double tolerance = tolerance_of(qkv, s->T * s->qkv, s->C, s->dtype, true);
        check_arrived(s, "x in qkv");
        check_append(s, layer, REGION_VALUES, qkv, queries + s->G * s->D, tolerance);
        if (unfinished) {
            gpu_unchanged(g, s->name, "qkv");
            s->unfinished = qkv;
        } else {
            check_append(s, layer, REGION_KEYS, qkv, queries, tolerance);
            end(s, "qkv", REGION_Q, s->dtype, q, s->T, queries, tolerance);
            free(qkv);
        }
        free(q);
    }
    free(x);
}

/* ---- attend ---- */

/* A case: the key that attention has finished. Then q, and the key in k, are what qkv should give. */
static inline void check_finished(struct step *s, int layer, struct both *q, struct both *k) {
    const size_t queries = s->H * s->D;
    const size_t slot = (size_t)row_numbers(s, 1)[0], at = (size_t)row_numbers(s, 2)[0];
    check_append(s, layer, REGION_KEYS, s->unfinished, queries,
                 tolerance_of(s->unfinished, s->qkv, s->C, s->dtype, true));
    memcpy(q, s->unfinished, queries * sizeof *q);
    for (size_t g = 0; g < s->G; g++)
        memcpy(k + position_offset(s, layer, slot, g, at), s->unfinished + queries + g * s->D,
               s->D * sizeof *k);
    free(s->unfinished);
    s->unfinished = NULL;
}

static inline void check_attend(struct step *s, int layer) {
    struct gpu *g = s->g;
    const size_t count = s->T * s->H * s->D;
    const size_t cache = (size_t)g->device.plan.limits.slots * s->G * ring_of(s, layer) * s->D;
    const size_t before = layer_offset(s, layer) * dtype_size(s->dtype);
    poison(s, REGION_A);
    poison(s, REGION_PARTS);
    begin(s);
    g->device.ops->attend(&g->device, layer, s->rows);
    if (!gpu_read(g, s->name, "attend")) return;
    struct both *q = both_of(was(s, REGION_Q), s->dtype, count), *a = both_new(count);
    struct both *k = both_of((char *)was(s, REGION_KEYS) + before, s->dtype, cache);
    struct both *v = both_of((char *)was(s, REGION_VALUES) + before, s->dtype, cache);
    if (s->unfinished) check_finished(s, layer, q, k);
    struct attention_job job = {.q = q,
                                .k = k,
                                .v = v,
                                .out = a,
                                .slots = row_numbers(s, 1),
                                .positions = row_numbers(s, 2),
                                .T = s->T,
                                .H = s->H,
                                .G = s->G,
                                .D = s->D,
                                .R = ring_of(s, layer),
                                .layer = layer,
                                .config = &g->host.config};
    attention(&job, s->dtype);
    end(s, "attend", REGION_A, s->dtype, a, s->T, s->H * s->D,
        tolerance_of(a, count, s->S, s->dtype, true));
    free(q);
    free(k);
    free(v);
    free(a);
}

/* ---- project ---- */

/* x += in W^T + bias, or a norm of that. */
static inline void reference_add(const struct step *s, int layer, enum projection which,
                                 struct both *x, const struct both *in) {
    const bool out = which == ATTENTION_OUT;
    const struct layer_weights *w = &s->g->host.engine.layer[layer];
    const float *norm = out ? w->after_attention : w->after_ffn;
    const float *norm_bias = out ? w->after_attention_bias : w->after_ffn_bias;
    struct both *y = norm ? both_new(s->T * s->C) : x;
    product(y, in, out ? w->out : w->down, s->dtype, s->T, out ? s->H * s->D : s->F,
            (struct columns){s->C, s->C, s->every});
    reference_bias(y, out ? w->out_bias : w->down_bias, s->T, s->C);
    if (!norm) return;
    reference_any_norm(y, y, norm, norm_bias, s->g->host.config.norm_eps, s->T, s->C);
    for (size_t i = 0; i < s->T * s->C; i++) {
        x[i].exact += y[i].exact;
        x[i].plain += y[i].plain;
    }
    free(y);
}

static inline void check_project(struct step *s, int layer, enum projection which) {
    struct gpu *g = s->g;
    const bool out = which == ATTENTION_OUT;
    const char *name = out ? "x + a Wout" : "x + h Wdown";
    const size_t K = out ? s->H * s->D : s->F;
    struct both *x = x_before(s);
    begin(s);
    g->device.ops->project(&g->device, layer, which, s->rows);
    const bool unadded = s->chained && cuda_unadded(&g->device);
    if (!unadded) cuda_settle(&g->device);
    if (gpu_read(g, s->name, name)) {
        struct both *in = both_of(was(s, out ? REGION_A : REGION_H), s->dtype, s->T * K);
        reference_add(s, layer, which, x, in);
        free(in);
        if (unadded) {
            gpu_unchanged(g, s->name, name);
            free(s->x);
            s->x = x;
            return;
        }
        end(s, name, REGION_X, F32, x, s->T, s->C,
            tolerance_of(x, s->T * s->C, K, s->dtype, false));
        check_prepared(s, name);
    }
    free(x);
}

/* ---- gate and up ---- */

/* activation(gate) up, or of up alone, rounded as it is stored. */
static inline struct both *reference_gate_up(const struct step *s, int layer,
                                             const struct both *x) {
    const struct engine *e = &s->g->host.engine;
    const struct layer_weights *w = &e->layer[layer];
    const struct config *c = e->config;
    const size_t outputs = (c->gated ? 2 : 1) * s->F;
    struct both *h = both_new(s->T * s->F);
    struct both *product =
        normed_product(x, w->norm_ffn, w->norm_ffn_bias, c->norm_eps, w->gate_up, s->dtype, s->T,
                       s->C, (struct columns){outputs, s->F, s->every});
    reference_bias(product, w->gate_up_bias, s->T, outputs);
    if (c->gated) reference_activate(c->activation, h, product, s->T, s->F);
    for (size_t i = 0; !c->gated && i < s->T * s->F; i++)
        h[i] = reference_activation(c->activation, product[i]);
    round_plain(h, s->T * s->F, s->dtype);
    free(product);
    return h;
}

static inline void check_gate_up(struct step *s, int layer) {
    struct gpu *g = s->g;
    struct both *x = x_before(s);
    poison(s, REGION_H);
    begin(s);
    g->device.ops->gate_up(&g->device, layer, s->rows);
    if (gpu_read(g, s->name, "gate_up")) {
        struct both *h = reference_gate_up(s, layer, x);
        end(s, "gate_up", REGION_H, s->dtype, h, s->T, s->F,
            tolerance_of(h, s->T * s->F, s->C, s->dtype, true));
        free(h);
    }
    free(x);
}

/* ---- classify ---- */

/* A row of REGION_LOGITS is the operator's as a whole; of ids that are not in use nothing is asked. */
static inline void check_classify(struct step *s) {
    struct gpu *g = s->g;
    const struct engine *e = &g->host.engine;
    const size_t n = (size_t)s->rows.classified, used = (size_t)e->config->vocab_used;
    struct both *all = x_before(s), *x = all + (s->T - n) * s->C;
    poison(s, REGION_LOGITS);
    begin(s);
    g->device.ops->classify(&g->device, s->rows);
    if (gpu_read(g, s->name, "classify")) {
        const float *got = is_now(s, REGION_LOGITS);
        check_arrived(s, "x in classify");
        struct both *logits =
            normed_product(x, e->norm_final, e->norm_final_bias, e->config->norm_eps, e->classifier,
                           s->dtype, n, s->C, (struct columns){used, used, s->every});
        for (size_t i = 0; i < n * used; i++)
            logits[i] = reference_cap(logits[i], e->config->final_cap);
        compare(s->name, "logits", got, s->V, logits, n, used,
                tolerance_of(logits, n * used, s->C, s->dtype, false));
        float *row = allocated(used * sizeof *row);
        struct error error = {0};
        for (size_t t = 0; t < n; t++) {
            const int code = g->device.ops->read_logits(&g->device, (int)t, row, &error);
            check(!code && !memcmp(row, got + t * s->V, used * sizeof *row),
                  "%s: read_logits of row %zu: %s", s->name, t, code ? error.text : "other bits");
        }
        gpu_allow(g, got, n * s->V * sizeof *got);
        gpu_unchanged(g, s->name, "classify");
        free(row);
        free(logits);
    }
    free(all);
}

/* ---- all of them ---- */

/* Every operator once, on the rows that are set. */
static inline void check_operators(struct step *s) {
    check_embed(s);
    for (int l = 0; l < s->g->host.config.layers; l++) {
        check_qkv(s, l);
        check_attend(s, l);
        check_project(s, l, ATTENTION_OUT);
        check_gate_up(s, l);
        check_project(s, l, FEED_FORWARD_DOWN);
    }
    if (s->rows.classified > 0) check_classify(s);
}

#endif
