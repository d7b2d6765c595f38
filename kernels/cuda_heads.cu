/* What follows the product of qkv where that does not do it itself: bias, norms of q and k, RoPE, the
 * cache. */
#include "kernels/cuda_heads.cuh"

namespace {

enum { THREADS = 256, LEAST_LANES = 8 };

/* Norms of q and k (RMSNorm, arXiv 1910.07467): of each head, or of all of them together. */
struct norms {
    const float *q, *k; /* f32 [D]; spans: [H D] and [G D]; NULL: none */
    bool spans;
    float eps;
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
    float whole[2] = {0, 0}; /* factors of norms that span all heads of q, of k */
    if (norms.spans) {
        whole[0] = factor_of_all(row, p.H * p.D, norms.eps);
        whole[1] = factor_of_all(row + (size_t)p.H * D, p.G * p.D, norms.eps);
    }
    if (norm && norms.spans) norm += (size_t)(query ? head : head - p.H) * D;
    const float *turns = p.rope && !value ? p.rope + t * 2 * p.half : NULL;
    head_of_lanes<N, ROUNDS> x(p.D, p.half, lane, lanes);
    if (exists) x.load(from, turns);
    if (exists && norm) x.load_weights(norm);
    if (exists && p.bias) x.add(p.bias + (size_t)head * D);
    const float of_head = x.factor(exists, norms.eps);
    if (!exists) return;
    if (norm) x.normalise(norms.spans ? whole[!query] : of_head);
    if (turns) x.turn();
    const int g = head - p.H - (value ? p.G : 0); /* of what is no query */
    if (query)
        x.store((M *)p.q + (t * p.H + head) * D);
    else
        x.store((M *)(value ? p.values : p.keys) +
                (((size_t)p.slots[t] * p.G + g) * p.R + place_in_ring(p.positions[t], p.R)) * D);
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
    h.norm_q = e->layer[layer].norm_q;
    h.norm_k = e->layer[layer].norm_k;
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
