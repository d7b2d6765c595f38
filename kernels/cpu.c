/* The CPU backend: the operators of the forward pass, in its order, and their table. An operator is
 * one task of the team (cpu_team.h); the function of its name is what each member does. The products
 * are cpu_matmul.c's, attention is cpu_attention.c's, and what is fused with them (norms, RoPE, the
 * cache, the activation, residuals) can be read here.
 *
 * Owners    in a product each member owns some rows of W, that is columns of the output; what follows
 *           in the same task is done by the owner where it can be, else after a barrier.
 * Numerics  fp32 throughout, weights bf16 or f32, the cache f32. A row's result depends neither on the
 *           number of threads nor on the other rows of the step. */
#include "kernels/cpu.h"

#include "kernels/cpu_attention.h"
#include "kernels/cpu_matmul.h"
#include "kernels/simd.h"

#include <math.h>
#include <string.h>

/* ---- what the operators share ---- */

/* What an operator works on: the job of its task. */
struct step {
    struct engine *e;
    int layer;
    enum projection which;
    struct rows rows;
};

static size_t weight_size(const struct engine *e) {
    return dtype_size(e->config->weight_dtype);
}

/* x[T, K] as the input of a product with the model's weights. */
static struct input product_input(const struct engine *e, const float *x, int x_stride, int T,
                                  int K) {
    return (struct input){.x = x,
                          .x_stride = (size_t)x_stride,
                          .T = (size_t)T,
                          .K = (size_t)K,
                          .norm_eps = e->config->norm_eps,
                          .dtype = e->config->weight_dtype,
                          .shared = engine_region(e, REGION_PANELS),
                          .private = engine_region(e, REGION_THREADS)};
}

/* Some rows of the residual stream, with a norm before the product; the norm and its bias may be NULL. */
static struct input normed_input(const struct engine *e, const float *x, int T, const float *norm,
                                 const float *bias) {
    struct input in = product_input(e, x, e->config->width, T, e->config->width);
    in.norm = norm, in.norm_bias = bias;
    return in;
}

/* Floats between rows of REGION_H: gate and up, or up alone. */
static size_t hidden_stride(const struct config *c) {
    return (size_t)c->ffn * (c->gated ? 2 : 1);
}

/* i32 [T]: 0 tokens, 1 slots, 2 positions. */
static int32_t *row_numbers(const struct engine *e, int which) {
    return (int32_t *)engine_region(e, REGION_ROWS) + (size_t)which * (size_t)e->plan.limits.chunk;
}

/* Of a layer: keys f32 [slots, G, S/16, D, 16], values f32 [slots, G, S, D]. */
static float *layer_cache(const struct engine *e, enum region region, int layer) {
    const size_t S = (size_t)e->plan.limits.context;
    const size_t positions =
        region == REGION_KEYS ? (S + CPU_PANEL - 1) / CPU_PANEL * CPU_PANEL : S;
    const size_t floats = (size_t)e->plan.limits.slots * (size_t)e->config->kv_heads * positions *
                          (size_t)e->config->head_dim;
    return (float *)engine_region(e, region) + (size_t)layer * floats;
}

/* ---- rows ---- */

static void cpu_set_rows(struct engine *e, const int32_t *tokens, int count, int slot,
                         int position) {
    for (int t = 0; t < count; t++) {
        row_numbers(e, 0)[t] = tokens[t];
        row_numbers(e, 1)[t] = slot;
        row_numbers(e, 2)[t] = position + t;
    }
}

/* ---- embed ---- */

/* Element i of a matrix. */
static float weight_at(const struct engine *e, const void *matrix, size_t i) {
    float value;
    if (e->config->weight_dtype == F32) {
        memcpy(&value, (const char *)matrix + i * 4, 4);
    } else { /* bf16 is the upper half of an f32 */
        uint16_t half;
        memcpy(&half, (const char *)matrix + i * 2, 2);
        const uint32_t bits = (uint32_t)half << 16;
        memcpy(&value, &bits, 4);
    }
    return value;
}

/* x[C] = embedding of a token, times the model's factor, and of its position where these are learned. */
static void embed_row(const struct engine *e, int32_t token, int32_t position, float *x) {
    const size_t C = (size_t)e->config->width;
    for (size_t c = 0; c < C; c++) {
        x[c] = weight_at(e, e->embed, (size_t)token * C + c) * e->config->embed_scale;
        if (e->positions) x[c] += weight_at(e, e->positions, (size_t)position * C + c);
    }
}

/* Cosines and sines of one position, for one table: [2, rotary_dims/2]. */
static void turn_row(const struct engine *e, int table, int position, float *turn) {
    const int half = e->config->rotary_dims / 2;
    for (int i = 0; i < half; i++) {
        const float angle = (float)position * e->rope[table * half + i];
        turn[i] = cosf(angle) * e->config->rope_scale;
        turn[half + i] = sinf(angle) * e->config->rope_scale;
    }
}

/* What      x[T,C] = embedding; the cosines and sines that all layers use.
 * Owners    rows.
 * Numerics  angle = position * frequency in f32, as the reference implementations have it. */
static void embed(struct member me, void *job) {
    const struct step *s = job;
    const struct engine *e = s->e;
    const struct config *c = e->config;
    float *x = engine_region(e, REGION_X), *turns = engine_region(e, REGION_ROPE);
    const int32_t *tokens = row_numbers(e, 0), *positions = row_numbers(e, 2);
    const size_t chunk = (size_t)e->plan.limits.chunk, turn = (size_t)c->rotary_dims;
    const struct span own = share(me, (size_t)s->rows.count, 1);
    for (size_t t = own.first; t < own.last; t++) {
        embed_row(e, tokens[t], positions[t], x + t * (size_t)c->width);
        for (int table = 0; table < c->rope_tables; table++)
            turn_row(e, table, positions[t], turns + ((size_t)table * chunk + t) * turn);
    }
}

/* ---- qkv ---- */

/* Turns one head in place: dimension i with i + half. */
static void rotate(float *restrict low, float *restrict high, const float *restrict cosine,
                   const float *restrict sine, int half) {
    for (int i = 0; i < half; i++) {
        const float a = low[i], b = high[i];
        low[i] = a * cosine[i] - b * sine[i];
        high[i] = b * cosine[i] + a * sine[i];
    }
}

/* RMSNorm of n numbers in place, or with a bias LayerNorm. */
static void normalise(float *restrict x, const float *restrict weight, const float *restrict bias,
                      size_t n, float eps) {
    const struct norm_row row = norm_row(x, n, eps, bias != NULL);
    for (size_t i = 0; i < n; i++) x[i] = (x[i] - row.mean) * (row.scale * weight[i]);
    for (size_t i = 0; bias && i < n; i++) x[i] += bias[i];
}

/* Of a row of qkv: the factors of a norm that spans all of q, and of one that spans all of k. */
struct whole {
    float q, k;
};

static struct whole whole_of_row(const struct engine *e, size_t t) {
    const struct config *c = e->config;
    const size_t query = (size_t)c->heads * (size_t)c->head_dim;
    const size_t key = (size_t)c->kv_heads * (size_t)c->head_dim;
    const float *row = (float *)engine_region(e, REGION_QKV) + t * (query + 2 * key);
    return (struct whole){norm_scale(row, query, c->norm_eps),
                          norm_scale(row + query, key, c->norm_eps)};
}

/* What follows the product in some heads of q or k: bias, norm, RoPE; any may be NULL. whole: the factor of
 * a norm that spans all heads. turn: cosines, then sines. */
static void finish_heads(const struct config *c, float *x, size_t heads, const float *bias,
                         const float *norm, float whole, const float *turn) {
    const size_t D = (size_t)c->head_dim, half = (size_t)c->rotary_dims / 2;
    for (size_t h = 0; h < heads; h++, x += D) {
        for (size_t d = 0; bias && d < D; d++) x[d] += bias[h * D + d];
        if (norm && c->qk_norm == QK_NORM_HEAD) normalise(x, norm, NULL, D, c->norm_eps);
        for (size_t d = 0; norm && c->qk_norm == QK_NORM_FULL && d < D; d++)
            x[d] *= whole * norm[h * D + d];
        if (turn) rotate(x, x + half, turn, turn + half, (int)half);
    }
}

/* A group's heads of one row: its heads of q and its key are finished; key and value to the cache. */
static void finish_group(const struct engine *e, int layer, size_t t, size_t group,
                         struct whole whole) {
    const struct config *c = e->config;
    const struct layer_weights *w = &e->layer[layer];
    const size_t H = (size_t)c->heads, G = (size_t)c->kv_heads, D = (size_t)c->head_dim;
    const size_t S = (size_t)e->plan.limits.context, padded = (S + 15) / 16 * 16;
    const size_t slot = (size_t)row_numbers(e, 1)[t], s = (size_t)row_numbers(e, 2)[t];
    float *row = (float *)engine_region(e, REGION_QKV) + t * (H + 2 * G) * D;
    const size_t query = group * (H / G) * D, k = (H + group) * D, v = (H + G + group) * D;
    float *key = row + k, *value = row + v;
    const float *bias = w->qkv_bias, *turn = NULL;
    const int table = c->layer[layer].rope_table;
    if (table != NO_ID)
        turn = (float *)engine_region(e, REGION_ROPE) +
               ((size_t)table * (size_t)e->plan.limits.chunk + t) * (size_t)c->rotary_dims;
    const size_t spans = c->qk_norm == QK_NORM_FULL;
    const float *norm_q = w->norm_q ? w->norm_q + spans * query : NULL;
    const float *norm_k = w->norm_k ? w->norm_k + spans * group * D : NULL;
    finish_heads(c, row + query, H / G, bias ? bias + query : NULL, norm_q, whole.q, turn);
    finish_heads(c, key, 1, bias ? bias + k : NULL, norm_k, whole.k, turn);
    finish_heads(c, value, 1, bias ? bias + v : NULL, NULL, 0, NULL);
    const size_t cache = slot * G + group;
    float *panel =
        layer_cache(e, REGION_KEYS, layer) + cache * padded * D + s / CPU_PANEL * CPU_PANEL * D;
    for (size_t d = 0; d < D; d++) panel[d * CPU_PANEL + s % CPU_PANEL] = key[d];
    memcpy(layer_cache(e, REGION_VALUES, layer) + (cache * S + s) * D, value, D * sizeof *value);
}

/* What      qkv[T,(H+2G)D] = norm(x) Wqkv^T; bias; norm and RoPE of q's and k's heads; k into its panel,
 *           v into its row.
 * Owners    product: columns of qkv. Then rows, 16 at a time; of a few rows the groups that the
 *           member will attend to.
 * Barrier   qkv is written | RoPE reads pairs that two members may have computed. With a norm of all of q:
 *           each member has read the rows | their heads change. */
static void qkv(struct member me, void *job) {
    const struct step *s = job;
    const struct engine *e = s->e;
    const struct config *c = e->config;
    const struct layer_weights *w = &e->layer[s->layer];
    const size_t T = (size_t)s->rows.count, G = (size_t)c->kv_heads;
    const size_t outputs = ((size_t)c->heads + 2 * G) * (size_t)c->head_dim;
    float *to = engine_region(e, REGION_QKV);
    const struct input in = normed_input(e, engine_region(e, REGION_X), s->rows.count,
                                         w->norm_attention, w->norm_attention_bias);
    const float *x = matmul_prepare(&in, me);
    matmul(&in, x, w->qkv, share(me, outputs, 8), to, outputs, false, me);
    team_barrier(me);
    const bool few = T <= CPU_DECODE_ROWS;
    const bool spans = c->qk_norm == QK_NORM_FULL;
    const struct span own = few ? (struct span){0, T} : share(me, T, CPU_PANEL);
    struct whole of_few[CPU_DECODE_ROWS], whole = {0, 0};
    for (size_t t = 0; spans && few && t < T; t++) of_few[t] = whole_of_row(e, t);
    if (spans && few) team_barrier(me);
    for (size_t t = own.first; t < own.last; t++) {
        if (spans) whole = few ? of_few[t] : whole_of_row(e, t);
        for (size_t g = 0; g < G; g++)
            if (!few || attention_owner(g, me.count) == me.index)
                finish_group(e, s->layer, t, g, whole);
    }
}

/* ---- attend ---- */

static void attend(struct member me, void *job) {
    const struct step *s = job;
    const struct engine *e = s->e;
    const struct config *c = e->config;
    const size_t H = (size_t)c->heads, G = (size_t)c->kv_heads, D = (size_t)c->head_dim;
    const struct attention a = {.q = engine_region(e, REGION_QKV),
                                .q_stride = (H + 2 * G) * D,
                                .keys = layer_cache(e, REGION_KEYS, s->layer),
                                .values = layer_cache(e, REGION_VALUES, s->layer),
                                .out = engine_region(e, REGION_A),
                                .partial = engine_region(e, REGION_PARTS),
                                .slots = row_numbers(e, 1),
                                .positions = row_numbers(e, 2),
                                .T = (size_t)s->rows.count,
                                .H = H,
                                .G = G,
                                .D = D,
                                .S = (size_t)e->plan.limits.context,
                                .window = (size_t)c->layer[s->layer].window,
                                .scale = c->attention_scale,
                                .cap = c->attention_cap};
    cpu_attend(&a, me);
}

/* ---- project ---- */

/* y[T, N] += bias for some columns of all rows; NULL: none. */
static void add_bias(float *y, size_t y_stride, size_t T, const float *bias, struct span own) {
    for (size_t t = 0; bias && t < T; t++, y += y_stride)
        for (size_t i = own.first; i < own.last; i++) y[i] += bias[i];
}

/* What      x[T,C] += a Wout^T + bias, or x += h Wdown^T + bias, where h begins REGION_H's rows. Where a
 *           norm follows, the product goes to REGION_QKV, and x += its norm.
 * Owners    columns of x; with a norm columns of the product, then rows of x.
 * Barrier   with a norm: the product is written | its rows are normalised. */
static void project(struct member me, void *job) {
    const struct step *s = job;
    const struct engine *e = s->e;
    const struct config *c = e->config;
    const struct layer_weights *w = &e->layer[s->layer];
    const size_t C = (size_t)c->width, T = (size_t)s->rows.count;
    const bool out = s->which == ATTENTION_OUT;
    const int K = out ? c->heads * c->head_dim : c->ffn;
    const int stride = out ? K : (int)hidden_stride(c);
    const float *norm = out ? w->after_attention : w->after_ffn;
    const float *norm_bias = out ? w->after_attention_bias : w->after_ffn_bias;
    const struct input in =
        product_input(e, engine_region(e, out ? REGION_A : REGION_H), stride, s->rows.count, K);
    float *x = engine_region(e, REGION_X), *product = engine_region(e, REGION_QKV);
    float *y = norm ? product : x;
    const struct span columns = share(me, C, 8), own = share(me, T, 1);
    const float *prepared = matmul_prepare(&in, me);
    matmul(&in, prepared, out ? w->out : w->down, columns, y, C, !norm, me);
    add_bias(y, C, T, out ? w->out_bias : w->down_bias, columns);
    if (!norm) return;
    team_barrier(me);
    for (size_t t = own.first; t < own.last; t++) {
        normalise(product + t * C, norm, norm_bias, C, c->norm_eps);
        for (size_t i = 0; i < C; i++) x[t * C + i] += product[t * C + i];
    }
}

/* ---- gate and up ---- */

/* x / (1 + e^-x), and GELU (arXiv 1606.08415), x (1 + erf(x / sqrt 2)) / 2, by the tanh that it is nearly:
 * 0.5 x (1 + tanh u) = x / (1 + e^-2u). */
static v8f silu8(v8f x) {
    return x / (1.0f + exp8(-x));
}
static v8f gelu8(v8f x) {
    const v8f u = 0.7978845608f * (x + 0.044715f * x * x * x);
    return x / (1.0f + exp8(-2.0f * u));
}

/* gate = activation(gate) up for some columns of all rows; gate and up are F floats apart. Without a
 * gate up stands in its place: up = activation(up). */
static void activate(const struct config *c, float *gate, size_t T, struct span own) {
    const size_t F = (size_t)c->ffn;
    for (size_t t = 0; t < T; t++, gate += hidden_stride(c)) {
        const float *up = gate + F;
        for (size_t f = own.first; c->activation == SILU && f < own.last; f += 8)
            store8(gate + f, silu8(load8(gate + f)));
        for (size_t f = own.first; c->activation == GELU_TANH && f < own.last; f += 8)
            store8(gate + f, gelu8(load8(gate + f)));
        for (size_t f = own.first; c->activation == GELU && f < own.last; f++)
            gate[f] *= 0.5f * (1 + erff(0.7071067812f * gate[f]));
        for (size_t f = own.first; c->gated && f < own.last; f += 8)
            store8(gate + f, load8(gate + f) * load8(up + f));
    }
}

/* What      h[T,F] = activation(gate) up, gate and up = norm(x) W^T + bias; REGION_H holds [T, gate F |
 *           up F]. Without a gate h = activation(up), and there [T, up F].
 * Owners    a member owns the same columns of gate and of up, and then of h: no barrier. Prefill
 *           does a few columns at a time, so that the activation finds them in the cache. */
static void gate_up(struct member me, void *job) {
    const struct step *s = job;
    const struct engine *e = s->e;
    const struct config *c = e->config;
    const struct layer_weights *w = &e->layer[s->layer];
    const size_t T = (size_t)s->rows.count, C = (size_t)c->width, F = (size_t)c->ffn;
    const size_t matrices = c->gated ? 2 : 1, stride = hidden_stride(c);
    float *h = engine_region(e, REGION_H);
    const struct input in =
        normed_input(e, engine_region(e, REGION_X), s->rows.count, w->norm_ffn, w->norm_ffn_bias);
    const struct span own = share(me, F, 8);
    const float *x = matmul_prepare(&in, me);
    const size_t step = T <= CPU_DECODE_ROWS ? F : CPU_ACTIVATE;
    for (size_t f = own.first; f < own.last; f += step) {
        const struct span some = {f, own.last - f < step ? own.last : f + step};
        for (size_t i = 0; i < matrices; i++) {
            const char *W = (const char *)w->gate_up + i * F * C * weight_size(e);
            matmul(&in, x, W, some, h + i * F, stride, false, me);
            add_bias(h + i * F, stride, T, w->gate_up_bias ? w->gate_up_bias + i * F : NULL, some);
        }
        activate(c, h, T, some);
    }
}

/* ---- classify ---- */

/* What      logits[classified, V] = norm(x of the last rows) W^T, for the ids that are in use; with a
 *           cap c they become c tanh(logit / c).
 * Owners    columns of the logits. */
static void classify(struct member me, void *job) {
    const struct step *s = job;
    const struct engine *e = s->e;
    const struct config *c = e->config;
    const size_t first = (size_t)(s->rows.count - s->rows.classified);
    const float *x = (float *)engine_region(e, REGION_X) + first * (size_t)c->width;
    const struct input in =
        normed_input(e, x, s->rows.classified, e->norm_final, e->norm_final_bias);
    const float *prepared = matmul_prepare(&in, me);
    const struct span own = share(me, (size_t)c->vocab_used, 8);
    float *logits = engine_region(e, REGION_LOGITS);
    matmul(&in, prepared, e->classifier, own, logits, (size_t)c->vocab, false, me);
    if (c->final_cap == 0) return;
    for (int t = 0; t < s->rows.classified; t++, logits += c->vocab)
        for (size_t i = own.first; i < own.last; i++)
            logits[i] = c->final_cap * tanhf(logits[i] / c->final_cap);
}

/* ---- the table ---- */

static void cpu_embed(struct engine *e, struct rows rows) {
    team_run(team_of(e), embed, &(struct step){.e = e, .rows = rows});
}

static void cpu_qkv(struct engine *e, int layer, struct rows rows) {
    team_run(team_of(e), qkv, &(struct step){.e = e, .layer = layer, .rows = rows});
}

static void cpu_attend_layer(struct engine *e, int layer, struct rows rows) {
    team_run(team_of(e), attend, &(struct step){.e = e, .layer = layer, .rows = rows});
}

static void cpu_project(struct engine *e, int layer, enum projection which, struct rows rows) {
    team_run(team_of(e), project, &(struct step){e, layer, which, rows});
}

static void cpu_gate_up(struct engine *e, int layer, struct rows rows) {
    team_run(team_of(e), gate_up, &(struct step){.e = e, .layer = layer, .rows = rows});
}

static void cpu_classify(struct engine *e, struct rows rows) {
    if (rows.classified > 0) team_run(team_of(e), classify, &(struct step){.e = e, .rows = rows});
}

/* Logits of one of the classified rows. */
static float *logits_row(const struct engine *e, int row) {
    return (float *)engine_region(e, REGION_LOGITS) + (size_t)row * (size_t)e->config->vocab;
}

static int cpu_take(struct engine *e, int32_t *id, struct error *error) {
    const int code = sampler_draw(e->sampler, logits_row(e, e->drawn_row), id, error);
    row_numbers(e, 0)[0] = *id;
    return code;
}

static int cpu_read_logits(struct engine *e, int row, float *logits, struct error *error) {
    (void)error;
    memcpy(logits, logits_row(e, row), (size_t)e->config->vocab_used * sizeof *logits);
    return 0;
}

static void cpu_step(struct engine *e, struct rows rows,
                     void (*forward)(struct engine *e, struct rows rows), struct sampler *sampler) {
    forward(e, rows);
    if (!sampler) return;
    e->sampler = sampler;
    e->drawn_row = rows.classified - 1;
    row_numbers(e, 1)[0] = row_numbers(e, 1)[rows.count - 1];
    row_numbers(e, 2)[0] = row_numbers(e, 2)[rows.count - 1] + 1;
}

static int cpu_finish(struct engine *e, struct error *error) {
    (void)e;
    (void)error;
    return 0;
}

const struct ops cpu_ops = {.name = "cpu",
                            .open = cpu_open,
                            .free_memory = cpu_free_memory,
                            .allocate = cpu_allocate,
                            .upload = cpu_upload,
                            .close = cpu_close,
                            .set_rows = cpu_set_rows,
                            .step = cpu_step,
                            .embed = cpu_embed,
                            .qkv = cpu_qkv,
                            .attend = cpu_attend_layer,
                            .project = cpu_project,
                            .gate_up = cpu_gate_up,
                            .classify = cpu_classify,
                            .take = cpu_take,
                            .read_logits = cpu_read_logits,
                            .finish = cpu_finish,
                            .roof = cpu_roof};
