/* The models that the benchmarks run: shapes and flags of published ones, with random weights; and what work
 * their steps are. */
#ifndef TESTS_BENCH_MODELS_H
#define TESTS_BENCH_MODELS_H

#include "tests/random_engine.h"

static const struct bench_model {
    const char *name;
    struct shape shape;
    bool tied, qkv_bias, qk_norm;
    bool gemma;            /* norms after the block's halves, GELU */
    int window, unlimited; /* of the layers, but of every so many-th, which sees all; 0: of all */
    bool chosen;           /* where nobody names a model */
} bench_models[] = {
    {"SmolLM2-135M", {576, 30, 9, 3, 64, 1536, 49152}, .tied = true, .chosen = true},
    {"1B", {2048, 16, 32, 8, 64, 8192, 128256}, .tied = true, .chosen = true},
    {"3B", {3072, 28, 24, 8, 128, 8192, 128256}, .tied = true, .chosen = true},
    {"8B", {4096, 32, 32, 8, 128, 14336, 128256}, .chosen = true},
    {"Qwen3-0.6B", {1024, 28, 16, 8, 128, 3072, 151936}, .tied = true, .qk_norm = true},
    {"Qwen3-8B", {4096, 36, 32, 8, 128, 12288, 151936}, .qk_norm = true},
    {"Qwen2.5-7B", {3584, 28, 28, 4, 128, 18944, 152064}, .qkv_bias = true},
    {"Mistral-7B", {4096, 32, 32, 8, 128, 14336, 32000}, .window = 4096},
    {"Phi-3-mini", {3072, 32, 32, 32, 96, 8192, 32064}, .window = 2047},
    {"Gemma-3-1B",
     {1152, 26, 4, 1, 256, 6912, 262144},
     .tied = true,
     .qk_norm = true,
     .gemma = true,
     .window = 512,
     .unlimited = 6},
    {"Gemma-3-4B",
     {2560, 34, 8, 4, 256, 10240, 262208},
     .tied = true,
     .qk_norm = true,
     .gemma = true,
     .window = 1024,
     .unlimited = 6},
};
enum { BENCH_MODELS = sizeof bench_models / sizeof *bench_models };

static inline struct config bench_config(const struct bench_model *m) {
    struct config c = random_config(m->shape, BF16);
    c.tied = m->tied;
    c.qkv_bias = m->qkv_bias;
    c.qk_norm = m->qk_norm ? QK_NORM_HEAD : QK_NORM_NONE;
    c.norm_placement = m->gemma ? NORM_BEFORE_AND_AFTER : NORM_BEFORE;
    c.activation = m->gemma ? GELU_TANH : SILU;
    if (m->unlimited) c.rope_tables = 2;
    for (int l = 0; l < c.layers; l++) {
        const bool sees_all = m->unlimited && (l + 1) % m->unlimited == 0;
        c.layer[l].window = sees_all ? 0 : m->window;
        c.layer[l].rope_table = sees_all;
    }
    return c;
}

/* ---- what the work is ---- */

enum operator{ EMBED, QKV, ATTEND, OUT, GATE_UP, DOWN, CLASSIFY, OPERATORS };
static const char *const names[] = {"embed", "qkv", "attend", "out", "gate_up", "down", "classify"};

/* Weights of an operator, of one layer. */
static inline double weights_of(const struct config *c, enum operator o) {
    const double C = c->width, F = c->ffn, D = c->head_dim, H = c->heads, G = c->kv_heads;
    switch (o) {
    case QKV: return (H + 2 * G) * D * C;
    case OUT: return C * H * D;
    case GATE_UP: return 2 * F * C;
    case DOWN: return F * C;
    case CLASSIFY: return (double)c->vocab * C;
    default: return 0;
    }
}

/* Bytes read and FLOPs of an operator of a layer in a step of T rows at `context`. */
static inline double bytes_of(const struct config *c, int layer, enum operator o, int T,
                              int context) {
    const double m = (double)dtype_size(c->weight_dtype);
    const int window = c->layer[layer].window, seen = context + T;
    if (o == ATTEND)
        return 2 * m * c->kv_heads * c->head_dim *
               (window && seen > window + T - 1 ? window + T - 1 : seen);
    return m * weights_of(c, o);
}

static inline double flops_of(const struct config *c, int layer, enum operator o, int T,
                              int context) {
    double pairs = 0; /* of a row and a position that it sees */
    const int window = c->layer[layer].window;
    if (o != ATTEND) return 2 * weights_of(c, o) * T;
    for (int t = 1; t <= T; t++) pairs += window && context + t > window ? window : context + t;
    return 4 * pairs * c->heads * c->head_dim;
}

/* Adds the same of a whole step, of which `classified` rows get logits. */
static inline void step_work(const struct config *c, int T, int classified, int context,
                             double *bytes, double *flops) {
    if (classified > 0) *bytes += bytes_of(c, 0, CLASSIFY, classified, 0);
    *flops += flops_of(c, 0, CLASSIFY, classified, 0);
    for (int l = 0; l < c->layers; l++)
        for (int o = QKV; o <= DOWN; o++) {
            *bytes += bytes_of(c, l, (enum operator)o, T, context);
            *flops += flops_of(c, l, (enum operator)o, T, context);
        }
}

#endif
