/* What follows the product of qkv where that does not do it itself: bias, norms of q and k, RoPE, the
 * cache. */
#include "kernels/cuda.cuh"
#include "kernels/cuda.h"

namespace {

enum { THREADS = 256, LEAST_LANES = 8 };

/* Norms of q and k (RMSNorm, arXiv 1910.07467): of each head, or of all of them together. */
struct norms {
    const float *q, *k; /* f32 [D]; spans: [H D] and [G D]; NULL: none */
    bool spans;
    float eps;
};

/* N neighbouring dims of a head: 4, or 1 where halves do not divide into fours. */
template <int N> struct dims {
    alignas(4 * N) float x[N];
    __device__ __forceinline__ void load(const float *from) {
        if constexpr (N == 4)
            store_four(x, load_four(from));
        else
            x[0] = from[0];
    }
    __device__ __forceinline__ void add(const float *from) {
        dims other;
        other.load(from);
#pragma unroll
        for (int i = 0; i < N; i++) x[i] += other.x[i];
    }
    __device__ __forceinline__ void multiply(float factor, const float *from) {
        dims other;
        other.load(from);
#pragma unroll
        for (int i = 0; i < N; i++) x[i] *= factor * other.x[i];
    }
    __device__ __forceinline__ float squares() const {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < N; i++) sum += x[i] * x[i];
        return sum;
    }
    template <class M> __device__ __forceinline__ void store(M *to) const {
        if constexpr (N == 4)
            store_four(to, load_four(x));
        else
            to[0] = from_float<M>(x[0]);
    }
};

/* Dims that a thread has together: those that turn, half a turn apart; of the others neighbours. */
template <int N> struct pair_of_dims {
    int first, second;
    bool exists, turns;
    __device__ __forceinline__ pair_of_dims(const heads &p, int pair) {
        turns = pair * N < p.half;
        exists = pair * N < p.D / 2;
        first = turns ? pair * N : 2 * pair * N;
        second = turns ? first + p.half : first + N;
    }
};

/* The factor of a norm that spans `count` floats, by the whole block.
 * Barrier  partial[] is read by all, from the call before | written by each warp | read by all. */
__device__ __forceinline__ float factor_of_all(const float *x, int count, float eps) {
    __shared__ float partial[THREADS / 32];
    float sum = 0;
    for (int i = (int)threadIdx.x; i < count; i += THREADS) sum += x[i] * x[i];
    sum = warp_sum(sum);
    __syncthreads();
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = 0;
    for (float of_warp : partial) sum += of_warp;
    return rsqrtf(sum / (float)count + eps);
}

/* What      q, k, v += bias; q, k = RMSNorm; q = RoPE(q) (arXiv 2104.09864), K = RoPE(k) and V = v into
 *           the cache, rounded to m.
 * Shapes    qkv f32 [T, (H + 2G) D]; struct heads, struct norms; D a multiple of 8 up to 256.
 * Owners    block (t, y) heads of row t, `lanes` threads a head: a power of two, at least D / 2 / N of
 *           them or 32. Of a pair of dims that turn together a thread has both.
 * Bound     bytes: 4 + 2 a value.
 * Numerics  f32; a head's squares by thread, then over its lanes. */
template <class M, int N>
__global__ void __launch_bounds__(THREADS)
    heads_kernel(const float *qkv, const heads p, const norms norms, int lanes) {
    constexpr int ROUNDS = N == 4 ? 1 : 4; /* of 32 lanes, for 256 dims */
    start_dependents();
    wait_for_inputs();
    const size_t t = blockIdx.x, D = (size_t)p.D;
    const int lane = (int)threadIdx.x % lanes;
    const int head = (int)blockIdx.y * (THREADS / lanes) + (int)threadIdx.x / lanes;
    const bool exists = head < p.H + 2 * p.G, value = head >= p.H + p.G, query = head < p.H;
    const float *row = qkv + t * (size_t)(p.H + 2 * p.G) * D, *from = row + (size_t)head * D;
    const float *norm = value ? NULL : query ? norms.q : norms.k;
    float whole[2] = {0, 0};
    if (norms.spans) {
        whole[0] = factor_of_all(row, p.H * p.D, norms.eps);
        whole[1] = factor_of_all(row + (size_t)p.H * D, p.G * p.D, norms.eps);
    }
    dims<N> first[ROUNDS], second[ROUNDS];
    float squares = 0;
#pragma unroll
    for (int i = 0; i < ROUNDS; i++) {
        const pair_of_dims<N> pair(p, lane + i * lanes);
        if (!exists || !pair.exists) continue;
        first[i].load(from + pair.first);
        second[i].load(from + pair.second);
        if (p.bias) first[i].add(p.bias + (size_t)head * D + pair.first);
        if (p.bias) second[i].add(p.bias + (size_t)head * D + pair.second);
        squares += first[i].squares() + second[i].squares();
    }
    for (int distance = lanes / 2; distance > 0; distance /= 2)
        squares += __shfl_xor_sync(0xffffffffu, squares, distance);
    if (!exists) return;
    const float factor = norms.spans ? whole[!query] : rsqrtf(squares / (float)p.D + norms.eps);
    if (norm && norms.spans) norm += (size_t)(query ? head : head - p.H) * D;
    const int g = head - p.H - (value ? p.G : 0); /* of what is no query */
    M *to = (M *)p.q + (t * p.H + head) * D;
    if (!query)
        to = (M *)(value ? p.values : p.keys) +
             (((size_t)p.slots[t] * p.G + g) * p.R + p.positions[t] % p.R) * D;
    const float *turn = p.rope + t * 2 * p.half;
#pragma unroll
    for (int i = 0; i < ROUNDS; i++) {
        const pair_of_dims<N> pair(p, lane + i * lanes);
        if (!pair.exists) continue;
        if (norm) first[i].multiply(factor, norm + pair.first);
        if (norm) second[i].multiply(factor, norm + pair.second);
        if (p.rope && !value && pair.turns) {
            dims<N> cosines, sines;
            cosines.load(turn + pair.first);
            sines.load(turn + pair.second);
#pragma unroll
            for (int k = 0; k < N; k++) {
                const float x = first[i].x[k], y = second[i].x[k];
                first[i].x[k] = x * cosines.x[k] - y * sines.x[k];
                second[i].x[k] = y * cosines.x[k] + x * sines.x[k];
            }
        }
        first[i].store(to + pair.first);
        second[i].store(to + pair.second);
    }
}

template <class M> void launch(struct engine *e, int layer, int rows) {
    const struct config *c = e->config;
    const float *qkv = (const float *)engine_region(e, REGION_QKV);
    const heads h = cuda_heads(e, layer);
    norms n = {};
    n.q = e->layer[layer].norm_q;
    n.k = e->layer[layer].norm_k;
    n.spans = c->qk_norm == QK_NORM_FULL;
    n.eps = c->norm_eps;
    const bool fours = h.half % 4 == 0;
    int lanes = LEAST_LANES;
    while (lanes < 32 && lanes * (fours ? 8 : 2) < h.D) lanes *= 2;
    const dim3 grid((unsigned)rows, (unsigned)divide_up(h.H + 2 * h.G, THREADS / lanes));
    cuda_launch(backend_of(e), "heads", fours ? heads_kernel<M, 4> : heads_kernel<M, 1>, grid,
                THREADS, 0, qkv, h, n, lanes);
}

} // namespace

struct heads cuda_heads(const struct engine *e, int layer) {
    const struct config *c = e->config;
    struct heads h = {};
    h.q = engine_region(e, REGION_Q);
    h.keys = cuda_layer_cache(e, REGION_KEYS, layer);
    h.values = cuda_layer_cache(e, REGION_VALUES, layer);
    h.slots = cuda_row_numbers(e, 1);
    h.positions = cuda_row_numbers(e, 2);
    h.bias = e->layer[layer].qkv_bias;
    h.rope = cuda_turns(e, layer);
    h.H = c->heads;
    h.G = c->kv_heads;
    h.D = c->head_dim;
    h.R = cuda_ring(e, layer);
    h.half = c->rotary_dims / 2;
    return h;
}

void cuda_finish_heads(struct engine *e, int layer, struct rows rows) {
    if (e->config->weight_dtype == F32)
        launch<float>(e, layer, rows.count);
    else
        launch<bf16>(e, layer, rows.count);
}
