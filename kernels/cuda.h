/* The CUDA backend from the inside: what its files share on the host. Device code shares cuda.cuh.
 *
 * m is the dtype of the weights, of the cache and of every input of a product: bf16 or f32. Sums, the
 * residual stream and the softmax are f32. An operator chooses its regime by the number of rows; the
 * general kernels run from sm_80 on and take every shape, the others name what they need. */
#ifndef KERNELS_CUDA_H
#define KERNELS_CUDA_H

extern "C" {
#include "kernels/ops.h"
}
#include "kernels/config.h"

#include <cuda_bf16.h>
#include <cuda_runtime.h>

struct cuda_backend {
    cudaStream_t stream;
    int multiprocessors;
    int capability;             /* 90 for 9.0 */
    int shared_bytes;           /* of shared memory that one block may take */
    int position;               /* of row 0, as the host knows it */
    bool rows_set;              /* by the host since the last draw */
    int32_t *slots, *positions; /* [chunk], the rows' numbers on their way to the device */
    /* What the kernel that last wrote x has left in REGION_PANELS and REGION_SQUARES for the
     * product after it: x times the weights of this norm, and sums of squares in so many parts (0: the
     * product finds the sum). */
    struct {
        const float *gamma;      /* NULL: x itself, no norm comes before the product */
        int rows, parts, stride; /* rows 0: nothing; stride: from one part to the next */
    } normed;
    /* Of a step of one row (cuda_decode.cu): where a norm follows a product, what is still to be added to x,
     * by the product after it. */
    struct {
        const float *product, *gamma; /* f32 [C]; product NULL: nothing */
        bool moved;                   /* x lies in the other of its two places */
        bool heads;                   /* q and k of this layer are attention's to finish */
        int layer;
    } pending;
    bool general;       /* the general path alone, whatever the device can do: tests ask for it */
    int tile;           /* of products of many rows, where tests ask for one (cuda_one_tile) */
    struct error error; /* the first failure of a call; what is asked for after it does nothing */
    /* by rows, classified rows, whether an id is drawn, whether the cache is short */
    cudaGraphExec_t graph[CUDA_GRAPH_ROWS + 1][CUDA_GRAPH_ROWS + 1][2][2];
    void (*captured)(struct engine *, struct rows); /* the forward pass that the graphs repeat */
    void *roof_memory;                              /* what the roof reads */
    size_t roof_bytes;
    struct cuda_draws *draws; /* cuda_draws.h */
};

static inline struct cuda_backend *backend_of(const struct engine *e) {
    return (struct cuda_backend *)e->backend;
}

/* The positions up to which the cache counts as short for a step of so many rows, and whether it is when
 * the next one has been made. Attention has a form for either, and steps have a graph. */
static inline int cuda_near(const struct engine *e, int rows) {
    return rows == 1 ? CUDA_NEAR_VALUES / e->config->head_dim : CUDA_NEAR;
}
static inline bool cuda_is_short(const struct engine *e, int rows) {
    return backend_of(e)->position + rows <= cuda_near(e, rows);
}

/* i32 [T]: 0 tokens, 1 slots, 2 positions; on the device. */
static inline int32_t *cuda_row_numbers(const struct engine *e, int which) {
    return (int32_t *)engine_region(e, REGION_ROWS) + (size_t)which * (size_t)e->plan.limits.chunk;
}

/* Positions that a layer's cache holds, R. */
static inline int cuda_ring(const struct engine *e, int layer) {
    return plan_device_ring(e->config, &e->plan.limits, layer);
}

/* Keys or values of a layer: m [slots, G, R, D]. */
static inline void *cuda_layer_cache(const struct engine *e, enum region region, int layer) {
    size_t before = 0; /* positions of the layers before it */
    for (int l = 0; l < layer; l++) before += (size_t)cuda_ring(e, l);
    return (char *)engine_region(e, region) +
           before * (size_t)e->plan.limits.slots * (size_t)e->config->kv_heads *
               (size_t)e->config->head_dim * dtype_size(e->config->weight_dtype);
}

/* f32 [V]: the logits of a classified row. */
static inline float *cuda_logits(const struct engine *e, int row) {
    return (float *)engine_region(e, REGION_LOGITS) + (size_t)row * (size_t)e->config->vocab;
}

/* f32 [T, 2, rotary_dims/2]: cosines and sines of the rows for a layer; NULL: it does not turn. */
static inline const float *cuda_turns(const struct engine *e, int layer) {
    const int table = e->config->layer[layer].rope_table;
    if (table == NO_ID) return NULL;
    return (const float *)engine_region(e, REGION_ROPE) +
           (size_t)table * (size_t)e->plan.limits.chunk * (size_t)e->config->rotary_dims;
}

/* ---- errors ---- */

/* Keeps the first failure: "CUDA: cudaStreamSynchronize: unspecified launch failure (...)". Returns whether
 * status is a failure. */
bool cuda_failed(struct cuda_backend *b, const char *call, cudaError_t status);
#define CUDA_TRY(b, call) cuda_failed(b, #call, call)

/* The kernel's launch failed: the message names kernel, grid, threads and shared memory. */
void cuda_launch_failed(struct cuda_backend *b, const char *kernel, dim3 grid, int threads,
                        size_t shared, cudaError_t status);

/* Launches a kernel on the backend's stream, blocks in clusters of so many. On sm_90 and later it may start
 * before its predecessor has ended (programmatic dependent launch), so every kernel calls
 * wait_for_inputs() (cuda.cuh) before it touches anything but weights. Shared memory above 48 KB is asked
 * for here, of which a kernel may declare 16 KB. */
template <class... P, class... A>
void cuda_launch_clusters(struct cuda_backend *b, const char *name, void (*kernel)(P...), dim3 grid,
                          int cluster, int threads, size_t shared, A... arguments) {
    if (b->error.code) return;
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim = {(unsigned)cluster, 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = dim3((unsigned)threads);
    config.dynamicSmemBytes = shared;
    config.stream = b->stream;
    config.attrs = attributes;
    config.numAttrs = b->capability < 90 ? 0 : cluster > 1 ? 2 : 1;
    cudaError_t status = cudaSuccess;
    /* All kernels ask for the same split of shared memory and L1: a multiprocessor changes it only when
     * it is empty, and then neighbours of the chain could not share one. */
    status = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, 100);
    if (status == cudaSuccess && shared > 32 * 1024) /* with static memory that may be 48 KB */
        status =
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared);
    if (status == cudaSuccess) status = cudaLaunchKernelEx(&config, kernel, P(arguments)...);
    if (status != cudaSuccess) cuda_launch_failed(b, name, grid, threads, shared, status);
}

template <class... P, class... A>
void cuda_launch(struct cuda_backend *b, const char *name, void (*kernel)(P...), dim3 grid,
                 int threads, size_t shared, A... arguments) {
    cuda_launch_clusters(b, name, kernel, grid, 1, threads, shared, arguments...);
}

/* n / by, rounded up. */
__host__ __device__ inline int divide_up(int n, int by) {
    return n / by + (n % by != 0);
}

/* ---- products ---- */

enum epilogue {
    EPILOGUE_STORE,    /* y[T, N] = s */
    EPILOGUE_ADD,      /* y[T, N] += s */
    EPILOGUE_ACTIVATE, /* h[T, N/2] = act(s of row n) s of row N/2 + n: gate and up, F = N/2 */
    EPILOGUE_QKV,      /* q, and k and v into the cache, of heads; cuda_matmul_hopper alone */
    EPILOGUE_HEADS     /* the same with norms of q's and k's heads, of many rows */
};

/* Where q, k and v of a layer go, their bias, and how they turn (RoPE, arXiv 2104.09864). */
struct heads {
    void *q;                          /* m [T, H, D] */
    void *keys, *values;              /* m [slots, G, R, D] of this layer */
    const int32_t *slots, *positions; /* [T]; position s lies at s mod R */
    const float *bias;                /* f32 [(H + 2G) D]; NULL: none */
    const float *norm_q, *norm_k;     /* f32 [D], with HEADS */
    /* cuda_decode.cu alone, f32 [(H + 2G) D]: takes q and k as they are before norm and RoPE (and v), for
     * attention to finish; NULL: not. */
    float *raw;
    const float *rope;    /* f32 [T, 2, half], cosines and sines; NULL: nothing turns */
    int H, G, D, R, half; /* dimension j < half turns with j + half */
};

/* s[t, n] = scale[t] sum_k in[t, k] W[n, k], in f32; K a multiple of 8, N (ACTIVATE: N/2) and T any; on
 * sm_90 as cuda_matmul_hopper_takes says. */
struct product {
    enum epilogue epilogue;
    enum dtype dtype; /* m */
    int T, N, K;
    const void *W;      /* m [N, K] */
    const void *in;     /* m [T, K] */
    int in_rows;        /* that exist there, whatever they hold past T */
    const float *scale; /* f32 [T]; NULL: 1 */
    float *y;           /* f32 [T, y_stride] */
    int y_stride;
    void *h; /* m [T, N/2] */
    enum activation activation;
    /* cuda_matmul_hopper alone. A norm before it: scale[t] = 1 / sqrt(sum of its squares / K +
     * eps), squares f32 [parts, squares_stride]; NULL: scale says it. */
    const float *squares;
    int parts;
    float eps;
    /* A norm after it, with ADD: next m [T, N] = y gamma, rounded, and the sums of squares of y in
     * parts, f32 [cuda_matmul_hopper_parts(), squares_stride]; NULL: none. */
    const float *gamma;
    void *next;
    float *next_squares;
    int squares_stride; /* of both */
    struct heads heads; /* with QKV and HEADS; N = (H + 2G) D */
};

/* Many rows: cuda_matmul.cu (bf16, mma.sync) and cuda_matmul_f32.cu. */
void cuda_matmul(struct cuda_backend *b, const struct product *p);
void cuda_matmul_f32(struct cuda_backend *b, const struct product *p);

/* bf16, on sm_90 alone: cuda_matmul_hopper.cu, and cuda_matmul_few.cu for few rows (config.h). */
bool cuda_matmul_hopper_takes(const struct product *p);
void cuda_matmul_hopper(struct cuda_backend *b, const struct product *p);
/* From one part of the rows' sums of squares to the next, in a step of T rows. */
inline int cuda_squares_stride(int T) {
    return T <= CUDA_FEW_ROWS ? (int)CUDA_FEW_ROWS : T;
}
/* Parts of a row's sum of squares that this ADD leaves in next_squares. */
int cuda_matmul_hopper_parts(const struct cuda_backend *b, const struct product *p);

/* Up to CUDA_MATVEC_ROWS rows, on any device (cuda_matvec.cu). */
void cuda_matvec(struct cuda_backend *b, const struct product *p);

/* ---- one row on Hopper, bf16 (cuda_decode.cu): the operators of ops.h ---- */

/* Whether they take a model: its widths, norms, biases and activation. */
bool cuda_decode_takes(const struct config *c);
void cuda_decode_qkv(struct engine *e, int layer);
/* next: what it prepares beside x; nothing, where a norm comes after the product. */
void cuda_decode_project(struct engine *e, int layer, enum projection which,
                         const struct prepared *next);
void cuda_decode_gate_up(struct engine *e, int layer);
void cuda_decode_classify(struct engine *e);
/* Does what is pending, for who looks between two operators. */
void cuda_decode_settle(struct engine *e);

/* ---- rows (cuda_rows.cu) ---- */

/* A norm's weights f32 [C], gamma NULL: there is no norm; and of a LayerNorm its bias f32 [C], NULL: it is an
 * RMSNorm. */
struct norm_weights {
    const float *gamma, *bias;
};

/* in = m [T, C] = x gamma, rounded, into REGION_PANELS; scale[t] = 1 / sqrt(mean(x^2) + eps) into
 * REGION_SCALES: the norm's second half is a factor of the finished sums. Without a norm in = x, and a
 * LayerNorm is in as a whole; neither has a scale. first: row of X. */
void cuda_norm(struct engine *e, struct norm_weights norm, int first, int count);

/* The same for the product after it, by the kernel that writes x: x gamma into REGION_PANELS, one part of
 * the sums of squares into REGION_SQUARES (struct product says how). */
struct prepared {
    const float *gamma; /* f32 [C]; NULL: x itself */
    void *in;           /* m [T, C]; NULL: nothing is prepared */
    float *squares;     /* f32 [T]; NULL: the product finds them */
};

/* x = embeddings, and REGION_ROPE. */
void cuda_embed_rows(struct engine *e, struct rows rows, const struct prepared *next);

/* What follows a product before x takes it: bias f32 [C] or NULL, and a norm. */
struct after {
    const float *bias;
    struct norm_weights norm;
};

/* x = from + norm(y + bias) of rows of f32 [T, C]; from may be x. */
void cuda_add(struct engine *e, int rows, const float *from, const float *y, struct after after,
              const struct prepared *next);

/* REGION_QKV, f32 [T, 2F] or where it is not gated [T, F] -> bias, activation -> REGION_H. */
void cuda_activate(struct engine *e, int layer, int rows);

/* logits[classified, V] = cap tanh(logits / cap). */
void cuda_cap_logits(struct engine *e, struct rows rows);

/* ---- heads (cuda_heads.cu) ---- */

/* Of a layer and the rows that are set. */
struct heads cuda_heads(const struct engine *e, int layer);

/* REGION_QKV -> bias, norms of q and k, RoPE -> q into REGION_Q, k and v into the cache. */
void cuda_finish_heads(struct engine *e, int layer, struct rows rows);

/* ---- attention ---- */

/* Where a position lies in a ring of R. */
__host__ __device__ inline int place_in_ring(int position, int R) {
    return position < R ? position : position % R;
}

/* The window of a layer without one. */
enum { ALL_POSITIONS = 1 << 30 };

/* One layer: q m [T, H, D] -> out m [T, H, D]. The cache holds what the rows see; where the
 * tiles of cuda_attention_hopper or cuda_attention_prefill begin before a window, there are numbers too. */
struct cuda_attention {
    const void *q;
    void *out;
    const void *keys, *values;        /* m [slots, G, R, D], of this layer */
    const int32_t *slots, *positions; /* [T]: a row sees positions up to its own of its slot */
    float *parts;                     /* f32, REGION_PARTS (plan.h) */
    unsigned *counters;               /* REGION_COUNTERS, zero before and after */
    int T, H, G, D;
    int R;      /* position s lies at s mod R */
    int window; /* a row sees so many positions, its own the last */
    float scale;
    float cap; /* scores s become cap tanh(s / cap); 0: none */
    /* One row whose q and k the attention finishes: norms of heads, RoPE, the key into the cache. */
    struct {
        const float *qkv;             /* f32 [(H + 2G) D]; NULL: they are there */
        const float *norm_q, *norm_k; /* f32 [D] */
        const float *rope;            /* f32 [2, D/2]; NULL: nothing turns */
        float eps;
    } raw;
};

/* The first position that a row at this one sees. */
__host__ __device__ inline int first_seen(const struct cuda_attention &a, int position) {
    return position >= a.window ? position - a.window + 1 : 0;
}

/* Calls launch with the head size as a type, if attention with splits or wgmma has instances for it. */
template <int D_> struct head_size { static constexpr int D = D_; };
template <class L> bool with_head_size(int D, L launch) {
    switch (D) {
    case 64: launch(head_size<64>()); return true;
    case 80: launch(head_size<80>()); return true;
    case 96: launch(head_size<96>()); return true;
    case 128: launch(head_size<128>()); return true;
    case 256: launch(head_size<256>()); return true;
    default: return false;
    }
}

/* Rows that are consecutive positions of one slot, bf16 (cuda_attention.cu, mma.sync). */
void cuda_attention_prefill(struct cuda_backend *b, const struct cuda_attention *a);
/* The same on Hopper (cuda_attention_hopper.cu, wgmma: compute capability 9.0 alone), and whether it
 * takes the head size and the number of heads. */
void cuda_attention_hopper(struct cuda_backend *b, const struct cuda_attention *a);
bool cuda_attention_hopper_takes(const struct cuda_attention *a);
/* Up to CUDA_DECODE_ROWS rows of any slots and positions, bf16 (cuda_attention_decode.cu): splits of the
 * cache, merged in a fixed order. */
void cuda_attention_decode(struct cuda_backend *b, const struct cuda_attention *a);
/* Whether it has an instance for the head size; the others take every multiple of 8 up to 256. */
bool cuda_attention_decode_takes(int D);
/* One row on Hopper, bf16: over a near cache (cuda_attention_near.cu), and over a far one
 * (cuda_attention_far.cu). */
bool cuda_attention_near_takes(const struct cuda_attention *a);
void cuda_attention_near(struct cuda_backend *b, const struct cuda_attention *a);
bool cuda_attention_far_takes(const struct cuda_attention *a);
/* Whether both finish q and k of a model with norms of heads. */
bool cuda_attention_finishes(const struct config *c);
void cuda_attention_far(struct cuda_backend *b, const struct cuda_attention *a);
/* Up to CUDA_DECODE_ROWS rows over a near cache on Hopper, bf16 (cuda_attention_rows.cu). */
bool cuda_attention_rows_takes(const struct cuda_attention *a);
void cuda_attention_rows(struct cuda_backend *b, const struct cuda_attention *a);
/* f32, any rows (cuda_attention_f32.cu). */
void cuda_attention_f32(struct cuda_backend *b, const struct cuda_attention *a);

/* ---- sampling (cuda_sample.cu; cuda_draws.cu on the host) ---- */

/* Pinned memory and events for what is drawn. */
void cuda_draws_open(struct cuda_backend *b);
void cuda_draws_close(struct cuda_backend *b);

/* A draw from f32 [sampler->vocab] logits, as sampler_draw (model/sampler.h) makes it; another id only
 * where a rounding moves a boundary. Row 0
 * becomes the id at the position after last_row's, in that row's slot; the id comes to the host by
 * itself. logits may be changed. */
struct cuda_draw {
    float *logits;
    const struct sampler *sampler;
    void *state;                         /* REGION_DRAWS */
    int32_t *tokens, *slots, *positions; /* [T] */
    int last_row;
};
/* Before the kernels of a draw: room for its result. Where the host has set the rows since the last draw,
 * what the sampler has accepted and how often it has drawn go to the device; after that the device
 * remembers what it drew. Other settings than before: captured graphs are forgotten. */
void cuda_draw_begin(struct cuda_backend *b, struct sampler *sampler, void *state);
/* Launches the kernels; may be captured, since what changes from draw to draw is in the state. */
void cuda_draw(struct cuda_backend *b, const struct cuda_draw *draw);
/* After them: cuda_take can wait for the result. */
void cuda_draw_end(struct cuda_backend *b);

/* Waits for the oldest draw that was not taken yet. EXIT_INTERNAL for logits that are not numbers (as
 * sampler_draw says it), EXIT_DEVICE. */
int cuda_take(struct cuda_backend *b, int32_t *id, struct error *error);

#endif
