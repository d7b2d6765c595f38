/* The operator table: what a backend does for the forward pass (run.c). The CPU backend is the
 * reference and the oracle of every other one. Shapes use the legend of model/config.h. */
#ifndef KERNELS_OPS_H
#define KERNELS_OPS_H

#include "model/config.h"
#include "model/file.h"
#include "model/plan.h"
#include "model/sampler.h"

#include <stdbool.h>

/* The rows of one step. A row is (token, slot, position), kept where the backend computes. */
struct rows {
    int count;      /* T, 1 to plan.limits.chunk */
    int classified; /* the last so many rows get logits; 0 to plan.limits.classified */
};

/* The two products that are added to the residual stream. */
enum projection { ATTENTION_OUT, FEED_FORWARD_DOWN };

struct engine;

/* What the machine can do at most, measured: the yardstick of --bench. */
struct roof {
    double bytes_per_second; /* reading memory once */
    double flops_per_second; /* multiply-adds in registers, counted as two */
};

struct ops {
    const char *name; /* "cpu", "cuda" */
    /* Draws that may be under way while the next step is asked for: 1 where a device works beside the
     * host, 0 where they are one. */
    int ahead;

    /* ---- life cycle ---- */
    /* Takes the device and writes its description (engine.device). EXIT_DEVICE. */
    int (*open)(struct engine *e, struct error *error);
    /* Bytes that a plan may take now: what is free on the device, or in the machine. */
    size_t (*free_memory)(const struct engine *e);
    /* Allocates engine.plan, all at once; nothing is allocated later but what measuring the roof takes,
     * and a graph at the first step of its kind. EXIT_MEMORY: needed and free. */
    int (*allocate)(struct engine *e, struct error *error);
    /* Reads the weights from the file into place. EXIT_BAD_FILE. */
    int (*upload)(struct engine *e, const struct model_file *file, struct error *error);
    void (*close)(struct engine *e);

    /* ---- one step: rows first, then the operators in the order of the forward pass ----
     * A device does them some time later: what fails there is kept, and take, read_logits and finish
     * report it. */
    /* The rows of the next step: consecutive positions of one slot, from `position` on. */
    void (*set_rows)(struct engine *e, const int32_t *tokens, int count, int slot, int position);
    /* Runs forward, which calls the operators below, or repeats what it did for such rows before. With a
     * sampler, then draws an id from the last classified row: row 0 becomes that id at the next
     * position, so that a step of one row can follow at once. */
    void (*step)(struct engine *e, struct rows rows,
                 void (*forward)(struct engine *e, struct rows rows), struct sampler *sampler);
    /* x[T,C] = embedding of the tokens, and of the positions where these are learned; prepares what
     * depends on the positions alone. */
    void (*embed)(struct engine *e, struct rows rows);
    /* q, and K and V appended to the cache: norm (RMSNorm or LayerNorm, here and below), projection,
     * bias, RMSNorm of each head of q and k or of all, RoPE. */
    void (*qkv)(struct engine *e, int layer, struct rows rows);
    /* a[T,H D] = softmax(q K^T scale) V: causal over the row's slot, as far back as the layer's window
     * goes, grouped heads; scores s become c tanh(s / c) where there is a cap c. Online softmax (arXiv
     * 1805.02867). */
    void (*attend)(struct engine *e, int layer, struct rows rows);
    /* x[T,C] += a Wout^T, or x += h Wdown^T, with a bias where there is one; where a norm follows, x +=
     * the norm of that. */
    void (*project)(struct engine *e, int layer, enum projection which, struct rows rows);
    /* h[T,F] = activation(gate) * up, or activation(up) alone: norm, projections, biases, SiLU or GELU. */
    void (*gate_up)(struct engine *e, int layer, struct rows rows);
    /* logits[classified,V] of the last rows: norm, classifier, and a cap where there is one. */
    void (*classify)(struct engine *e, struct rows rows);

    /* ---- results ---- */
    /* Waits for the oldest draw that was not taken. EXIT_INTERNAL for logits that are not numbers,
     * EXIT_DEVICE. */
    int (*take)(struct engine *e, int32_t *id, struct error *error);
    /* Copies the logits of one of the classified rows: vocab_used floats. EXIT_DEVICE. */
    int (*read_logits)(struct engine *e, int row, float *logits, struct error *error);
    /* Waits until all that was asked for is done. EXIT_DEVICE. */
    int (*finish)(struct engine *e, struct error *error);

    /* Measures the roof now; takes about 0.1 s. */
    void (*roof)(struct engine *e, struct roof *roof);
};

/* Where the weights of a layer lie; m: f32 or bf16 as engine.config->weight_dtype says. */
struct layer_weights {
    const float *norm_attention;  /* [C]; NULL: none before */
    const void *qkv;              /* m [(H + 2G) D, C] */
    const float *qkv_bias;        /* [(H + 2G) D]; NULL: none */
    const float *norm_q;          /* [D], or [H D] where one norm spans them; NULL: none */
    const float *norm_k;          /* [D], or [G D] */
    const void *out;              /* m [C, H D] */
    const float *after_attention; /* [C]: a norm of what out gives; NULL: none */
    const float *norm_ffn;        /* [C]; NULL: none before */
    const void *gate_up;          /* m [2F, C]; not gated: [F, C] */
    const void *down;             /* m [C, F] */
    const float *after_ffn;       /* [C]: of what down gives; NULL: none */

    /* Where the norms are LayerNorms: what each adds; NULL: RMSNorm, or there is no such norm. */
    const float *norm_attention_bias, *norm_ffn_bias;   /* [C] */
    const float *after_attention_bias, *after_ffn_bias; /* [C] */
    const float *out_bias, *gate_up_bias, *down_bias;   /* [C], [2F] or [F], [C]; NULL: none */
};

struct engine {
    const struct config *config;
    const struct ops *ops;
    struct plan plan;
    char device[160];        /* "AMD EPYC, 2 threads, AVX2" */
    char *arena;             /* plan.bytes, laid out by plan.region, in the backend's memory */
    void *backend;           /* what the backend keeps for itself */
    int device_number;       /* of several GPUs; set before open */
    struct sampler *sampler; /* of the draw that the CPU makes when it is taken */
    int drawn_row;           /* and its classified row */

    /* Into the arena. */
    const float *rope;       /* [rope_tables, rotary_dims/2]: the set that the context is for */
    const void *embed;       /* m [V, C] */
    const void *positions;   /* m [context of the config, C]; NULL: none are learned */
    const float *norm_final; /* [C] */
    const float *norm_final_bias; /* [C]; NULL: RMSNorm */
    const void *classifier;       /* m [V, C]; the embedding where tied */
    struct layer_weights *layer;  /* [L] */
};

extern const struct ops cpu_ops;
#ifdef WITH_CUDA
extern const struct ops cuda_ops;
/* Whether a GPU with this number can be used for such a model (NULL: for any); why not, where it cannot. */
bool cuda_usable(const struct config *config, int number, char why[160]);
#endif

/* EXIT_MEMORY for a plan that is larger than what is free: one line with both, and the context that
 * would fit. memory: "host" or "device". */
int engine_no_memory(const struct engine *e, const char *memory, size_t available,
                     struct error *error);

/* The bytes between tensors, and after the last one, are zero: whatever else is in them came from a
 * file that was changed. Looks at `bytes` of them that lie at `data`, from offset `from`.
 * EXIT_BAD_FILE. */
int engine_check_gaps(const struct model_file *file, const char *data, uint64_t from, size_t bytes,
                      struct error *error);

/* Points rope, embed, layer[], norm_final and classifier at their tensors in REGION_WEIGHTS.
 * EXIT_INTERNAL for a tensor that this engine does not know. */
int engine_locate_weights(struct engine *e, const struct tensor *tensors, uint64_t count,
                          struct error *error);

/* The start of a region of the plan. */
static inline void *engine_region(const struct engine *e, enum region region) {
    return e->arena + e->plan.region[region].offset;
}

#endif
