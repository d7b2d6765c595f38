/* What a model is: the config of model.bin (format.md), as the engine holds it.
 *
 * Legend, used in every shape: T rows (tokens) in this call, S cached positions, C model width,
 * H query heads, G key/value heads, D head size, F feed-forward width, V vocabulary rows, L layers.
 * Matrices are [outputs, inputs], row-major. */
#ifndef MODEL_CONFIG_H
#define MODEL_CONFIG_H

#include "model/error.h"

#include <stddef.h>
#include <stdint.h>

enum dtype { F32, BF16, DTYPES };
enum { NO_ID = -1, MAX_LAYERS = 1024, MAX_STOPS = 16, MAX_TENSORS = 32 * 1024 };
enum norm { RMS_NORM, LAYER_NORM };
enum norm_placement { NORM_BEFORE, NORM_BEFORE_AND_AFTER, NORM_AFTER };
enum qk_norm { QK_NORM_NONE, QK_NORM_HEAD, QK_NORM_FULL };
enum activation { SILU, GELU_TANH, GELU };
enum chat_shape {
    CHAT_NONE,
    CHAT_LLAMA2,
    CHAT_LLAMA3,
    CHAT_CHATML,
    CHAT_GEMMA,
    CHAT_PHI3,
    CHAT_ZEPHYR,
    CHAT_MISTRAL,
    CHAT_LLAMA3_1,
    CHAT_QWEN3,
    CHAT_PHI4,
    CHAT_PHI4_MINI,
    CHAT_OLMO,
    CHAT_MISTRAL_V1,
    CHAT_MISTRAL_V3,
    CHAT_MISTRAL_TEKKEN,
    CHAT_MISTRAL_V7,
    CHAT_SHAPES
};

struct config {
    char name[64];
    int width, layers, heads, kv_heads, head_dim, ffn; /* C L H G D F */
    int vocab, vocab_used, context;                    /* V; ids >= vocab_used are padding */
    enum dtype weight_dtype;
    enum norm norm;
    enum norm_placement norm_placement;
    float norm_eps;
    int qkv_bias, out_bias, ffn_bias;
    enum qk_norm qk_norm;
    int gated;
    enum activation activation;
    int learned_positions, rotary_dims, rope_tables;
    int rope_original; /* the longest context of the first set of tables; 0: there is no other */
    float rope_scale, attention_scale, attention_cap, final_cap, embed_scale;
    int tied, experts, experts_used, experts_renormalised;
    int32_t bos, pad, unk, stops[MAX_STOPS]; /* NO_ID: none */
    int add_bos, stop_count;
    enum chat_shape chat_shape;
    int chat_bos; /* conversations begin with bos */
    struct {
        int window;     /* 0: all positions */
        int rope_table; /* NO_ID: no RoPE */
    } layer[MAX_LAYERS];
};

/* One tensor of the file. Offsets are from the start of the tensors, not of the file. */
struct tensor {
    char name[64];
    enum dtype dtype;
    int dims;
    uint64_t shape[4], offset, bytes, checksum;
};

/* Bytes of one element: 4 or 2. */
size_t dtype_size(enum dtype dtype);
const char *dtype_name(enum dtype dtype);
const char *chat_shape_name(enum chat_shape shape);

/* Reads the config (448 bytes) and the layers (16 L bytes) and checks every field against the
 * limits of format.md. bytes is what is left in the file after the header. EXIT_BAD_FILE. */
int config_read(struct config *config, const unsigned char *data, uint64_t bytes,
                struct error *error);

/* Refuses, by name, the flags that no backend of this build implements. EXIT_BAD_FILE. */
int config_supported(const struct config *config, struct error *error);

/* Lists the tensors that a file with this config holds, in order, with offsets and sizes
 * (checksums zero). Returns their number, at most MAX_TENSORS, or -1 where a size overflows.
 * *total is the length of all of them, padded to 256. tensors may be NULL. */
int config_tensors(const struct config *config, struct tensor *tensors, uint64_t *total);

/* Number of parameters: elements of all matrices and vectors but the RoPE table. */
uint64_t config_parameters(const struct config *config);

#endif
