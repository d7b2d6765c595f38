/* What is done to rows outside of products and attention: the embedding, a norm's first half before a
 * product, a norm after it, the cap on logits. */
#include "kernels/cuda.cuh"
#include "kernels/cuda_backend.h"

namespace {

enum { ROW_THREADS = 256 };

/* The sum over the block in a fixed order.
 * Barrier   partial[] is written by each warp | all read it. */
__device__ __forceinline__ float block_sum(float x, float partial[ROW_THREADS / 32]) {
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = x;
    __syncthreads();
    float sum = 0;
    for (int i = 0; i < ROW_THREADS / 32; i++) sum += partial[i];
    return sum;
}

__device__ __forceinline__ float squares_of(float4 v) {
    return v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
}

/* in = x gamma, rounded, of four columns of a row. */
template <class M> __device__ __forceinline__ void scale_four(M *in, float4 v, const float *gamma) {
    const float4 g = gamma ? load_four(gamma) : make_float4(1, 1, 1, 1);
    store_four(in, make_float4(v.x * g.x, v.y * g.y, v.z * g.z, v.w * g.w));
}

/* Of four columns from c on of the row that begins at element `row`: what the next product reads. */
template <class M>
__device__ __forceinline__ void prepare(const prepared &next, size_t row, int c, float4 v) {
    if (next.in) scale_four((M *)next.in + row + c, v, next.gamma ? next.gamma + c : NULL);
}

/* ---- embed ---- */

struct embedding {
    const int32_t *tokens, *positions; /* [T] */
    const void *table;                 /* m [V, C] */
    float *x;                          /* f32 [T, C] */
    prepared next;
    const float *frequencies; /* f32 [rope_tables, half] */
    float *rope;              /* f32 [rope_tables, chunk, 2, half] */
    int C, rope_tables, half, chunk;
    float embed_scale, rope_scale;
};

/* What      x[t] = table[token] embed_scale; rope[.., t] = cosines and sines of the position's angles;
 *           next: x gamma, and the sum of x^2.
 * Owners    block t the row t.
 * Bound     latency: a few KB a row.
 * Numerics  f32; the angle is the f32 product of position and frequency, as on the CPU.
 * Order     the first kernel of a step: it waits before it lets the next one start. So all later kernels
 *           of the step may read tokens, slots, positions and older rows of the cache before their own
 *           wait: whatever wrote those had ended before they began. */
template <class M> __global__ void __launch_bounds__(ROW_THREADS) embed_kernel(embedding p) {
    __shared__ float partial[ROW_THREADS / 32];
    wait_for_inputs();
    start_dependents();
    const size_t t = blockIdx.x, C = (size_t)p.C;
    const M *from = (const M *)p.table + (size_t)p.tokens[t] * C;
    float squares = 0;
    for (int c = threadIdx.x * 4; c < p.C; c += ROW_THREADS * 4) {
        const float4 v = load_four(from + c);
        const float s = p.embed_scale;
        const float4 x = make_float4(v.x * s, v.y * s, v.z * s, v.w * s);
        store_four(p.x + t * C + c, x);
        squares += squares_of(x);
        prepare<M>(p.next, t * C, c, x);
    }
    const float position = (float)p.positions[t];
    for (int i = threadIdx.x; i < p.rope_tables * p.half; i += ROW_THREADS) {
        const int table = i / p.half, j = i % p.half;
        float *turn = p.rope + ((size_t)table * p.chunk + t) * 2 * p.half + j;
        const float angle = position * p.frequencies[i];
        turn[0] = cosf(angle) * p.rope_scale;
        turn[p.half] = sinf(angle) * p.rope_scale;
    }
    if (!p.next.in) return;
    squares = block_sum(squares, partial);
    if (threadIdx.x == 0) p.next.squares[t] = squares;
}

/* ---- norm ---- */

/* What      in[t] = x[t] gamma, rounded to m; scale[t] = 1 / sqrt(mean(x[t]^2) + eps). The product that
 *           follows multiplies its sums by scale: RMSNorm (arXiv 1910.07467) in two halves. gamma NULL: 1.
 * Shapes    x f32 [T, C], gamma f32 [C] or NULL, in m [T, C], scale f32 [T]; C a multiple of 8.
 * Owners    block t the row t, a thread four neighbouring columns at a time.
 * Bound     bytes: 4 C + 2 C a row.
 * Numerics  f32; each thread sums its columns in ascending order, then the warp, then the warps. */
template <class M>
__global__ void __launch_bounds__(ROW_THREADS)
    norm_kernel(const float *x, const float *gamma, M *in, float *scale, int C, float eps) {
    __shared__ float partial[ROW_THREADS / 32];
    start_dependents();
    wait_for_inputs();
    const size_t row = (size_t)blockIdx.x * C;
    float squares = 0;
    for (int c = threadIdx.x * 4; c < C; c += ROW_THREADS * 4) {
        const float4 v = load_four(x + row + c);
        squares += squares_of(v);
        scale_four(in + row + c, v, gamma ? gamma + c : NULL);
    }
    squares = block_sum(squares, partial);
    if (threadIdx.x == 0) scale[blockIdx.x] = rsqrtf(squares / (float)C + eps);
}

/* ---- a norm after a product ---- */

/* What      x[t] = from[t] + RMSNorm(y[t]); and what `prepared` says, as embed_kernel does.
 * Shapes    x, from (which may be x), y f32 [T, C], gamma f32 [C]; C a multiple of 8.
 * Owners    block t the row t, a thread four neighbouring columns at a time.
 * Bound     bytes: 16 C + 2 C a row.
 * Numerics  f32; sums as norm_kernel's. */
template <class M>
__global__ void __launch_bounds__(ROW_THREADS)
    add_normed_kernel(float *x, const float *from, const float *y, const float *gamma, int C,
                      float eps, const prepared next) {
    __shared__ float partial[2][ROW_THREADS / 32];
    start_dependents();
    wait_for_inputs();
    const size_t t = blockIdx.x, row = t * C;
    float squares = 0;
    for (int c = (int)threadIdx.x * 4; c < C; c += ROW_THREADS * 4)
        squares += squares_of(load_four(y + row + c));
    const float factor = rsqrtf(block_sum(squares, partial[0]) / (float)C + eps);
    squares = 0;
    for (int c = (int)threadIdx.x * 4; c < C; c += ROW_THREADS * 4) {
        const float4 u = load_four(y + row + c), g = load_four(gamma + c);
        float4 v = load_four(from + row + c);
        v.x += u.x * factor * g.x, v.y += u.y * factor * g.y;
        v.z += u.z * factor * g.z, v.w += u.w * factor * g.w;
        store_four(x + row + c, v);
        squares += squares_of(v);
        prepare<M>(next, row, c, v);
    }
    if (!next.in) return;
    squares = block_sum(squares, partial[1]);
    if (threadIdx.x == 0) next.squares[t] = squares;
}

/* ---- caps ---- */

/* What      logits = cap tanh(logits / cap), f32 [rows, stride], columns below `count`.
 * Owners    a thread a logit.
 * Bound     bytes: 8 a logit. */
__global__ void __launch_bounds__(ROW_THREADS)
    cap_kernel(float *logits, int count, int stride, float cap) {
    start_dependents();
    wait_for_inputs();
    const int i = (int)blockIdx.x * ROW_THREADS + (int)threadIdx.x;
    float *at = logits + (size_t)blockIdx.y * stride + i;
    if (i < count) *at = cap * tanhf(*at / cap);
}

} // namespace

bool cuda_has_code() {
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, embed_kernel<bf16>) == cudaSuccess;
}

/* ---- launchers ---- */

void cuda_embed_rows(struct engine *e, struct rows rows, const struct prepared *next) {
    const struct config *c = e->config;
    struct embedding p = {};
    p.tokens = cuda_row_numbers(e, 0);
    p.positions = cuda_row_numbers(e, 2);
    p.table = e->embed;
    p.x = (float *)engine_region(e, REGION_X);
    p.next = *next;
    p.frequencies = e->rope;
    p.rope = (float *)engine_region(e, REGION_ROPE);
    p.C = c->width;
    p.rope_tables = c->rope_tables;
    p.half = c->rotary_dims / 2;
    p.chunk = e->plan.limits.chunk;
    p.embed_scale = c->embed_scale;
    p.rope_scale = c->rope_scale;
    cuda_launch(backend_of(e), "embed",
                c->weight_dtype == F32 ? embed_kernel<float> : embed_kernel<bf16>,
                dim3((unsigned)rows.count), ROW_THREADS, 0, p);
}

void cuda_norm(struct engine *e, const float *gamma, int first, int count) {
    const int C = e->config->width;
    const float *x = (const float *)engine_region(e, REGION_X) + (size_t)first * (size_t)C;
    float *scale = (float *)engine_region(e, REGION_SCALES);
    void *in = engine_region(e, REGION_PANELS);
    const dim3 grid((unsigned)count);
    if (e->config->weight_dtype == F32)
        cuda_launch(backend_of(e), "norm", norm_kernel<float>, grid, ROW_THREADS, 0, x, gamma,
                    (float *)in, scale, C, e->config->norm_eps);
    else
        cuda_launch(backend_of(e), "norm", norm_kernel<bf16>, grid, ROW_THREADS, 0, x, gamma,
                    (bf16 *)in, scale, C, e->config->norm_eps);
}

void cuda_add_normed(struct engine *e, int rows, const float *from, const float *y,
                     const float *gamma, const struct prepared *next) {
    const struct config *c = e->config;
    cuda_launch(backend_of(e), "add_normed",
                c->weight_dtype == F32 ? add_normed_kernel<float> : add_normed_kernel<bf16>,
                dim3((unsigned)rows), ROW_THREADS, 0, (float *)engine_region(e, REGION_X), from, y,
                gamma, c->width, c->norm_eps, *next);
}

void cuda_cap_logits(struct engine *e, struct rows rows) {
    const struct config *c = e->config;
    const dim3 grid((unsigned)divide_up(c->vocab_used, ROW_THREADS), (unsigned)rows.classified);
    cuda_launch(backend_of(e), "cap", cap_kernel, grid, ROW_THREADS, 0, cuda_logits(e, 0),
                c->vocab_used, c->vocab, c->final_cap);
}
