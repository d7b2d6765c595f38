/* What is done to rows outside of products and attention: the embedding, the norm's first half, RoPE
 * and the cache. */
#include "kernels/cuda.cuh"
#include "kernels/cuda_backend.h"

namespace {

enum { ROW_THREADS = 256 };

/* The sum over the block in a fixed order, in thread 0.
 * Barrier   partial[] is written by each warp | thread 0 reads it. */
__device__ __forceinline__ float block_sum(float x) {
    __shared__ float partial[ROW_THREADS / 32];
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = x;
    __syncthreads();
    float sum = 0;
    if (threadIdx.x == 0)
        for (float of_warp : partial) sum += of_warp;
    return sum;
}

/* ---- embed ---- */

struct embedding {
    const int32_t *tokens, *positions; /* [T] */
    const void *table;                 /* m [V, C] */
    float *x;                          /* f32 [T, C] */
    const float *gamma;                /* f32 [C], of the first norm; NULL: the rest of it is not */
    void *in;                          /* m [T, C] = x gamma */
    float *squares;                    /* f32 [T], the sum of x^2 */
    const float *frequencies;          /* f32 [rope_tables, half] */
    float *rope;                       /* f32 [rope_tables, chunk, 2, half] */
    int C, rope_tables, half, chunk;
    float embed_scale, rope_scale;
};

/* What      x[t] = table[token] embed_scale; rope[.., t] = cosines and sines of the position's angles.
 *           gamma: norm_kernel's outputs as well, but the sum of squares in place of the factor.
 * Owners    block t the row t.
 * Bound     latency: a few KB a row.
 * Numerics  f32; the angle is the f32 product of position and frequency, as on the CPU.
 * Order     the first kernel of a step: it waits before it lets the next one start. So all later kernels
 *           of the step may read tokens, slots, positions and older rows of the cache before their own
 *           wait: whatever wrote those had ended before they began. */
template <class M> __global__ void __launch_bounds__(ROW_THREADS) embed_kernel(embedding p) {
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
        squares += x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w;
        if (!p.gamma) continue;
        const float4 g = load_four(p.gamma + c);
        store_four((M *)p.in + t * C + c, make_float4(x.x * g.x, x.y * g.y, x.z * g.z, x.w * g.w));
    }
    const float position = (float)p.positions[t];
    for (int i = threadIdx.x; i < p.rope_tables * p.half; i += ROW_THREADS) {
        const int table = i / p.half, j = i % p.half;
        float *turn = p.rope + ((size_t)table * p.chunk + t) * 2 * p.half + j;
        const float angle = position * p.frequencies[i];
        turn[0] = cosf(angle) * p.rope_scale;
        turn[p.half] = sinf(angle) * p.rope_scale;
    }
    if (!p.gamma) return;
    squares = block_sum(squares);
    if (threadIdx.x == 0) p.squares[t] = squares;
}

/* ---- norm ---- */

/* What      in[t] = x[t] gamma, rounded to m; scale[t] = 1 / sqrt(mean(x[t]^2) + eps). The product that
 *           follows multiplies its sums by scale: RMSNorm (arXiv 1910.07467) in two halves.
 * Shapes    x f32 [T, C], gamma f32 [C], in m [T, C], scale f32 [T]; C a multiple of 8.
 * Owners    block t the row t, a thread four neighbouring columns at a time.
 * Bound     bytes: 4 C + 2 C a row.
 * Numerics  f32; each thread sums its columns in ascending order, then the warp, then the warps. */
template <class M>
__global__ void __launch_bounds__(ROW_THREADS)
    norm_kernel(const float *x, const float *gamma, M *in, float *scale, int C, float eps) {
    start_dependents();
    wait_for_inputs();
    const size_t row = (size_t)blockIdx.x * C;
    float squares = 0;
    for (int c = threadIdx.x * 4; c < C; c += ROW_THREADS * 4) {
        const float4 v = *(const float4 *)(x + row + c), g = *(const float4 *)(gamma + c);
        squares += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
        store_four(in + row + c, make_float4(v.x * g.x, v.y * g.y, v.z * g.z, v.w * g.w));
    }
    squares = block_sum(squares);
    if (threadIdx.x == 0) scale[blockIdx.x] = rsqrtf(squares / (float)C + eps);
}

/* ---- RoPE and the cache ---- */

/* N neighbouring dims of a head: 4, or 1 where heads or halves do not divide into fours. */
template <int N> struct dims {
    alignas(4 * N) float x[N];
    __device__ __forceinline__ void load(const float *from) {
        if constexpr (N == 4)
            store_four(x, load_four(from));
        else
            x[0] = from[0];
    }
    template <class M> __device__ __forceinline__ void store(M *to) const {
        if constexpr (N == 4)
            store_four(to, load_four(x));
        else
            to[0] = from_float<M>(x[0]);
    }
};

/* What      q = RoPE(q) (arXiv 2104.09864), K = RoPE(k) and V = v into the cache, rounded to m.
 * Shapes    qkv f32 [T, (H + 2G) D]; struct heads.
 * Owners    block t the row t; a thread the same dims of every few heads, and those half a turn further.
 * Bound     bytes: 4 + 2 a value. */
template <class M, int N>
__global__ void __launch_bounds__(ROW_THREADS) rope_kernel(const float *qkv, heads p) {
    const int threads = p.D / N, together = ROW_THREADS / threads; /* of a head; heads at once */
    const int d = threadIdx.x % threads * N;
    start_dependents();
    wait_for_inputs();
    if ((int)threadIdx.x >= threads * together) return;
    const size_t t = blockIdx.x, D = (size_t)p.D;
    const size_t slot = (size_t)p.slots[t], position = (size_t)p.positions[t];
    const float *turn = p.rope + t * 2 * p.half;
    for (int head = threadIdx.x / threads; head < p.H + 2 * p.G; head += together) {
        const bool value = head >= p.H + p.G;
        const int turning = p.rope && !value ? p.half : 0;
        if (d >= turning && d < 2 * turning) continue;
        const size_t g = (size_t)(head - p.H - (value ? p.G : 0));
        M *to = head < p.H
                    ? (M *)p.q + (t * p.H + head) * D
                    : (M *)(value ? p.values : p.keys) + ((slot * p.G + g) * p.S + position) * D;
        const float *from = qkv + (t * (p.H + 2 * p.G) + head) * D;
        dims<N> low, high, cosines, sines;
        low.load(from + d);
        if (d < turning) {
            high.load(from + d + turning);
            cosines.load(turn + d);
            sines.load(turn + turning + d);
#pragma unroll
            for (int i = 0; i < N; i++) {
                const float x = low.x[i], y = high.x[i];
                low.x[i] = x * cosines.x[i] - y * sines.x[i];
                high.x[i] = y * cosines.x[i] + x * sines.x[i];
            }
            high.store(to + d + turning);
        }
        low.store(to + d);
    }
}

template <class M> void launch_rope(struct engine *e, int layer, int rows) {
    const float *qkv = (const float *)engine_region(e, REGION_QKV);
    const heads h = cuda_heads(e, layer);
    cuda_launch(backend_of(e), "rope", h.half % 4 == 0 ? rope_kernel<M, 4> : rope_kernel<M, 1>,
                dim3((unsigned)rows), ROW_THREADS, 0, qkv, h);
}

} // namespace

bool cuda_has_code() {
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, embed_kernel<bf16>) == cudaSuccess;
}

/* ---- launchers ---- */

void cuda_embed_rows(struct engine *e, struct rows rows, const float *gamma) {
    const struct config *c = e->config;
    struct embedding p = {};
    p.tokens = cuda_row_numbers(e, 0);
    p.positions = cuda_row_numbers(e, 2);
    p.table = e->embed;
    p.x = (float *)engine_region(e, REGION_X);
    p.gamma = gamma;
    p.in = engine_region(e, REGION_PANELS);
    p.squares = (float *)engine_region(e, REGION_SQUARES);
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

struct heads cuda_heads(const struct engine *e, int layer) {
    const struct config *c = e->config;
    struct heads h = {};
    h.q = engine_region(e, REGION_Q);
    h.keys = cuda_layer_cache(e, REGION_KEYS, layer);
    h.values = cuda_layer_cache(e, REGION_VALUES, layer);
    h.slots = cuda_row_numbers(e, 1);
    h.positions = cuda_row_numbers(e, 2);
    h.rope = cuda_turns(e, layer);
    h.H = c->heads;
    h.G = c->kv_heads;
    h.D = c->head_dim;
    h.S = e->plan.limits.context;
    h.half = c->rotary_dims / 2;
    return h;
}

void cuda_rope(struct engine *e, int layer, struct rows rows) {
    if (e->config->weight_dtype == F32)
        launch_rope<float>(e, layer, rows.count);
    else
        launch_rope<bf16>(e, layer, rows.count);
}
