/* The operator table: what a backend does for the forward pass (run.c). The CPU backend is the
 * reference and the oracle of every other one. Shapes use the legend of model/config.h. */
#ifndef KERNELS_OPS_H
#define KERNELS_OPS_H

#include "model/config.h"
#include "model/file.h"
#include "model/plan.h"
#include "model/sampler.h"

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
    const char *name; /* "cpu" */

    /* ---- life cycle ---- */
    /* Takes the device and writes its description (engine.device). EXIT_DEVICE. */
    int (*open)(struct engine *e, struct error *error);
    /* Bytes that a plan may take now: what is free on the device, or in the machine. */
    size_t (*free_memory)(const struct engine *e);
    /* Allocates engine.plan, all at once; nothing later allocates. EXIT_MEMORY: needed and free. */
    int (*allocate)(struct engine *e, struct error *error);
    /* Reads the weights from the file into place. EXIT_BAD_FILE. */
    int (*upload)(struct engine *e, const struct model_file *file, struct error *error);
    void (*close)(struct engine *e);

    /* ---- one step: rows first, then the operators in the order of the forward pass ---- */
    /* The rows of the next step: consecutive positions of one slot, from `position` on. */
    void (*set_rows)(struct engine *e, const int32_t *tokens, int count, int slot, int position);
    /* x[T,C] = embedding of the tokens; prepares what depends on the positions alone. */
    void (*embed)(struct engine *e, struct rows rows);
    /* q, and K and V appended to the cache: RMSNorm, projection, RoPE. */
    void (*qkv)(struct engine *e, int layer, struct rows rows);
    /* a[T,H D] = softmax(q K^T scale) V: causal over the row's slot, grouped heads. Online softmax
     * (arXiv 1805.02867). */
    void (*attend)(struct engine *e, int layer, struct rows rows);
    /* x[T,C] += a Wout^T, or x += h Wdown^T. */
    void (*project)(struct engine *e, int layer, enum projection which, struct rows rows);
    /* h[T,F] = silu(gate) * up: RMSNorm, both projections, activation. */
    void (*gate_up)(struct engine *e, int layer, struct rows rows);
    /* logits[classified,V] of the last rows: RMSNorm, classifier. */
    void (*classify)(struct engine *e, struct rows rows);

    /* ---- results ---- */
    /* Draws an id from the last classified row. EXIT_INTERNAL for logits that are not numbers. */
    int (*sample)(struct engine *e, struct rows rows, struct sampler *sampler, int32_t *id,
                  struct error *error);
    /* Copies the logits of one of the classified rows: vocab_used floats. */
    void (*read_logits)(struct engine *e, int row, float *logits);

    /* Measures the roof now; takes about 0.1 s. */
    void (*roof)(struct engine *e, struct roof *roof);
};

/* Where the weights of a layer lie; m: f32 or bf16 as engine.config->weight_dtype says. */
struct layer_weights {
    const float *norm_attention; /* [C] */
    const void *qkv;             /* m [(H + 2G) D, C] */
    const void *out;             /* m [C, H D] */
    const float *norm_ffn;       /* [C] */
    const void *gate_up;         /* m [2F, C] */
    const void *down;            /* m [C, F] */
};

struct engine {
    const struct config *config;
    const struct ops *ops;
    struct plan plan;
    char device[160]; /* "AMD EPYC, 2 threads, AVX2" */
    char *arena;      /* plan.bytes, laid out by plan.region */
    void *backend;    /* what the backend keeps for itself */

    /* Into the arena. */
    const float *rope;           /* [rope_tables, rotary_dims/2] */
    const void *embed;           /* m [V, C] */
    const float *norm_final;     /* [C] */
    const void *classifier;      /* m [V, C]; the embedding where tied */
    struct layer_weights *layer; /* [L] */
};

extern const struct ops cpu_ops;

/* Points rope, embed, layer[], norm_final and classifier at their tensors in REGION_WEIGHTS.
 * EXIT_INTERNAL for a tensor that this engine does not know. */
int engine_locate_weights(struct engine *e, const struct tensor *tensors, uint64_t count,
                          struct error *error);

/* The start of a region of the plan. */
static inline void *engine_region(const struct engine *e, enum region region) {
    return e->arena + e->plan.region[region].offset;
}

#endif
