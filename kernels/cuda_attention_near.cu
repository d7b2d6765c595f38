/* Attention of one row over a near cache, on Hopper: a cluster of blocks shares a kv head's positions and
 * merges its parts through shared memory. By way of global memory that takes 2.5 us longer, as fences and
 * counters wait behind the stream of weights. */
#include "kernels/cuda_attention_cluster.cuh"

namespace {

/* Of a thread: with 128 a block fits beside two of cuda_decode.cu with 64, with 224 beside one with 96.
 * 128 are too few for two sets of queries. */
template <class S, int SETS> constexpr int registers = S::D > 128 ? 224 : SETS > 1 ? 144 : 128;

/* ---- the parts ---- */

/* The row's positions in equal shares, one a block of the cluster; blocks past the last one have none. The
 * queries are the heads of the kv head, all of row 0. */
template <class S>
__device__ __forceinline__ struct work part_of_block(const struct cuda_attention &a, int parts) {
    struct work w = {};
    w.cut.ratio = a.H / a.G;
    w.kv_head = blockIdx.x / parts;
    w.last = w.cut.ratio;
    w.slot = __ldcg(a.slots);
    w.length = __ldcg(a.positions) + 1;
    take_part(w, a, {0, part_least<S>, PART_ROUND}, blockIdx.x % parts, parts);
    return w;
}

/* ---- the kernel ---- */

/* out[h] = softmax(scale q[h] K^T) V over the positions that row 0 sees of slot slots[0].
 * In, out   as cuda_attention_decode, with T = 1.
 * Grid      G clusters. A block owns a part of the positions, by its place in the cluster, and of
 *           the merged result every count-th quad.
 * Tensor    as cuda_attention_decode.
 * cores
 * Shared    a ring of tiles for each warp (cp.async); later the results; what the others send.
 * Barriers  The cluster's: the mbarrier is ready | others' stores arrive at it. __syncthreads
 *           (attend): the warps' results are written | merged. received: all parts' stores have
 *           arrived | they are merged; so no block leaves before all that is sent to it has
 *           arrived. With RAW, in attend: heads are finished | read.
 * Bound     latency: all but the row's own position is requested before the wait.
 * Numerics  as cuda_attention_decode.
 * Needs     as cuda_attention_decode. */
template <class S, int SETS, bool RAW>
__global__ void __maxnreg__((registers<S, SETS>))
    attention_near(const __grid_constant__ struct cuda_attention a, int parts) {
    extern __shared__ __align__(128) char shared[];
    __shared__ uint64_t received;
    start_dependents();
    open_exchange(&received);
    cluster_arrive_relaxed();
    const struct work w = part_of_block<S>(a, parts);
    cluster_wait();
    if (w.index >= w.count) {
        wait_for_inputs();
        return;
    }
    struct ring<S> ring;
    ring.open(shared);
    if constexpr (RAW) {
        __shared__ finished_heads<S::D> heads;
        attend<S, SETS, true, true>(a, w, ring, (float *)shared, &heads);
    } else {
        attend<S, SETS, true>(a, w, ring, (float *)shared);
    }
    exchange<S>(a, w, (const float *)shared, shared + S::shared_bytes, &received, 0);
}

/* ---- the launcher ---- */

template <class S, int SETS, bool RAW = false>
void launch_sets(struct cuda_backend *b, const struct cuda_attention *a) {
    int parts = CLUSTER;
    while (parts > 1 && parts * a->G > b->multiprocessors) parts /= 2;
    const int quads = a->H / a->G * (S::D / 4);
    cuda_launch_clusters(b, "attention_near", attention_near<S, SETS, RAW>, dim3(parts * a->G),
                         parts, THREADS, S::shared_bytes + exchange_bytes(quads), *a, parts);
}

template <int D> void launch(struct cuda_backend *b, const struct cuda_attention *a) {
    typedef geometry<D, true> S;
    if constexpr (D % 128 == 0)
        if (a->raw.qkv) {
            a->H / a->G > QUERIES ? launch_sets<S, S::most_sets, true>(b, a)
                                  : launch_sets<S, 1, true>(b, a);
            return;
        }
    if (a->H / a->G > QUERIES)
        launch_sets<S, S::most_sets>(b, a);
    else
        launch_sets<S, 1>(b, a);
}

} // namespace

bool cuda_attention_near_takes(const struct cuda_attention *a) {
    const int queries = a->D > 128 ? QUERIES : 2 * QUERIES;
    return cuda_attention_decode_takes(a->D) && a->H % a->G == 0 && a->H / a->G <= queries &&
           a->cap == 0;
}

/* The head sizes of Qwen 3 and Gemma 3, which have no bias there and turn heads as a whole. */
bool cuda_attention_finishes(const struct config *c) {
    struct cuda_attention a = {};
    a.D = c->head_dim;
    a.H = c->heads;
    a.G = c->kv_heads;
    a.cap = c->attention_cap;
    const bool whole = c->rotary_dims == c->head_dim || c->rotary_dims == 0;
    return c->qk_norm == QK_NORM_HEAD && !c->qkv_bias && whole && a.D % 128 == 0 &&
           cuda_attention_far_takes(&a);
}

void cuda_attention_near(struct cuda_backend *b, const struct cuda_attention *a) {
    with_head_size(a->D, [&](auto size) { launch<decltype(size)::D>(b, a); });
}
