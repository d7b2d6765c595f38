/* The models that the benchmarks run: shapes and flags of published ones, with random weights. */
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

#endif
