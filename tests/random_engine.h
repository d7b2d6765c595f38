/* An engine with a random model, for tests and benchmarks of the kernels: no file, any shape. The
 * arena is poisoned with NaN wherever no weight lies, and its regions are PLAN_GUARD bytes apart.
 */
#ifndef TESTS_RANDOM_ENGINE_H
#define TESTS_RANDOM_ENGINE_H

#include "kernels/ops.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PLAN_GUARD = 4096, POISON = 0xff /* of every byte: a NaN in f32 and in bf16 */ };

struct shape {
    int C, L, H, G, D, F, V;
};

struct random_engine {
    struct config config;
    struct engine engine;
    uint64_t state;
    size_t arena_bytes;
};

/* Uniform in -1..1. */
static inline float random_float(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (float)((int)(*state >> 40) - (1 << 23)) / (float)(1 << 23);
}

static inline void random_weights(uint64_t *state, void *to, enum dtype dtype, size_t count,
                                  float scale) {
    for (size_t i = 0; i < count; i++) {
        const float value = random_float(state) * scale;
        uint32_t bits;
        memcpy(&bits, &value, 4);
        bits >>= dtype == BF16 ? 16 : 0; /* bf16 is the upper half */
        memcpy((char *)to + i * dtype_size(dtype), &bits, dtype_size(dtype));
    }
}

static inline struct config random_config(struct shape s, enum dtype dtype) {
    struct config c = {.name = "random",
                       .width = s.C,
                       .layers = s.L,
                       .heads = s.H,
                       .kv_heads = s.G,
                       .head_dim = s.D,
                       .ffn = s.F,
                       .vocab = s.V,
                       .vocab_used = s.V,
                       .context = 4096,
                       .weight_dtype = dtype,
                       .norm_eps = 1e-5f,
                       .gated = 1,
                       .rotary_dims = s.D,
                       .rope_tables = 1,
                       .rope_scale = 1,
                       .embed_scale = 1,
                       .tied = 1};
    c.attention_scale = 1.0f / (float)s.D * 3; /* not too flat a softmax */
    return c;
}

/* One of 0 to n - 1. */
static inline int random_choice(uint64_t *state, int n) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (int)((*state >> 33) % (uint64_t)n);
}

/* Flags that differ with T and the position, each by itself, and windows and RoPE tables that differ from layer
 * to layer. */
static inline void random_flags(struct config *c, int T, int position) {
    static const int windows[] = {0, 1, 3, 0, 16, 65, 0, 200, 700};
    uint64_t state = (uint64_t)T * 1000003u + (uint64_t)position;
    for (int i = 0; i < 4; i++) random_choice(&state, 2);
    c->qk_norm = (enum qk_norm)random_choice(&state, 3);
    c->qkv_bias = random_choice(&state, 2) && c->qk_norm != QK_NORM_FULL;
    c->rotary_dims = c->head_dim;
    if (random_choice(&state, 4) == 0 && c->head_dim % 16 == 0) c->rotary_dims /= 2;
    c->rope_tables = random_choice(&state, 3);
    if (!c->rope_tables) c->rotary_dims = 0;
    c->norm = random_choice(&state, 4) == 0 ? LAYER_NORM : RMS_NORM;
    c->gated = random_choice(&state, 4) > 0;
    c->out_bias = random_choice(&state, 4) == 0;
    c->ffn_bias = random_choice(&state, 4) == 0;
    c->learned_positions = random_choice(&state, 4) == 0;
    c->norm_placement = (enum norm_placement)random_choice(&state, 3);
    c->activation = (enum activation)random_choice(&state, 3);
    c->attention_cap = random_choice(&state, 4) == 0 ? 2.5f : 0;
    c->final_cap = random_choice(&state, 4) == 0 ? 1.5f : 0;
    for (int l = 0; l < c->layers; l++) {
        const int table = random_choice(&state, 3);
        c->layer[l].window = windows[random_choice(&state, 9)];
        c->layer[l].rope_table = table < c->rope_tables ? table : NO_ID;
    }
}

/* What families have beside a Llama; their windows, and a layer without RoPE, they all have. The last one is
 * none: LayerNorms where Gemma has its norms. */
enum family { LLAMA, QWEN, QWEN3, GEMMA, OLMO, GPT2, CENTRED, FAMILIES };
static inline void random_family(struct config *c, enum family family) {
    const bool gemma = family == GEMMA || family == CENTRED, gpt2 = family == GPT2;
    if (family == LLAMA) return;
    c->qkv_bias = family == QWEN || gpt2;
    c->qk_norm = gemma || family == QWEN3 ? QK_NORM_HEAD
                 : family == OLMO         ? QK_NORM_FULL
                                          : QK_NORM_NONE;
    c->norm_placement = gemma ? NORM_BEFORE_AND_AFTER : family == OLMO ? NORM_AFTER : NORM_BEFORE;
    c->activation = gemma || gpt2 ? GELU_TANH : SILU;
    c->attention_cap = gemma ? 3 : 0;
    c->norm = gpt2 || family == CENTRED ? LAYER_NORM : RMS_NORM;
    c->gated = !gpt2;
    c->out_bias = c->ffn_bias = gpt2 || family == CENTRED;
    c->learned_positions = gpt2;
    c->rope_tables = !gpt2;
    c->rotary_dims *= c->rope_tables;
    for (int l = 0; l < c->layers; l++) {
        const bool turns = c->rope_tables && (c->layers == 1 || l < c->layers - 1);
        c->layer[l].window = l % 2 ? 9 : 530;
        c->layer[l].rope_table = turns ? 0 : NO_ID;
    }
}

/* Matrices of about unit gain, norms around 1, inverse frequencies from 1 down. */
static inline void random_tensor(struct random_engine *r, const struct tensor *t) {
    void *to = (char *)engine_region(&r->engine, REGION_WEIGHTS) + t->offset;
    size_t count = t->bytes / dtype_size(t->dtype);
    if (!strcmp(t->name, "rope")) {
        for (size_t i = 0; i < count; i++) ((float *)to)[i] = 1.0f / (float)(1 + 3 * i);
    } else if (strstr(t->name, "bias")) {
        for (size_t i = 0; i < count; i++) ((float *)to)[i] = random_float(&r->state);
    } else if (t->dims == 1 || strstr(t->name, "norm")) {
        for (size_t i = 0; i < count; i++) ((float *)to)[i] = 1 + 0.3f * random_float(&r->state);
    } else {
        float scale = 1;
        while (strcmp(t->name, "embed") != 0 && scale * scale * (float)t->shape[1] > 3)
            scale *= 0.7f;
        random_weights(&r->state, to, t->dtype, count, scale);
    }
}

/* The regions apart, everything poisoned, then the weights. */
static inline void random_engine_open(struct random_engine *r, struct config config,
                                      struct limits limits) {
    struct error error;
    uint64_t bytes;
    struct tensor *tensors = malloc(MAX_TENSORS * sizeof *tensors);
    *r = (struct random_engine){.config = config, .state = 1};
    struct engine *e = &r->engine;
    e->config = &r->config;
    e->ops = &cpu_ops;
    const int count = tensors ? config_tensors(&config, tensors, &bytes) : -1;
    if (count < 0 || plan_make(&e->plan, &config, bytes, limits, &error)) abort();
    for (int i = 0; i < REGIONS; i++) e->plan.region[i].offset += (size_t)(i + 1) * PLAN_GUARD;
    r->arena_bytes = e->plan.bytes + (REGIONS + 1) * PLAN_GUARD;
    e->plan.bytes = r->arena_bytes;
    e->ops->open(e, &error);
    if (e->ops->allocate(e, &error)) {
        fprintf(stderr, "%s\n", error.text);
        abort();
    }
    memset(e->arena, POISON, r->arena_bytes);
    for (int i = 0; i < count; i++) random_tensor(r, &tensors[i]);
    if (engine_locate_weights(e, tensors, (uint64_t)count, &error)) abort();
    free(tensors);
}

static inline void random_engine_close(struct random_engine *r) {
    r->engine.ops->close(&r->engine);
}

/* What run.c's forward does, over any table of operators. */
static inline void forward(struct engine *e, struct rows rows) {
    e->ops->embed(e, rows);
    for (int l = 0; l < e->config->layers; l++) {
        e->ops->qkv(e, l, rows);
        e->ops->attend(e, l, rows);
        e->ops->project(e, l, ATTENTION_OUT, rows);
        e->ops->gate_up(e, l, rows);
        e->ops->project(e, l, FEED_FORWARD_DOWN, rows);
    }
    if (rows.classified > 0) e->ops->classify(e, rows);
}

/* In its place for a step that only draws, from logits that were written. */
static inline void no_operators(struct engine *e, struct rows rows) {
    (void)e;
    (void)rows;
}

#endif
