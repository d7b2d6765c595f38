/* Attention of several rows over a near cache, on Hopper: as one row's (cuda_attention_near.cu), in groups of
 * rows that follow each other in a slot. */
#include "kernels/cuda_attention_cluster.cuh"

namespace {

/* Blocks whose registers fit together. */
template <class S, int SETS> constexpr int blocks_of_registers = S::D > 128 ? 2 : SETS > 1 ? 3 : 4;

/* out[t, h] = softmax(scale q[t, h] K^T) V over the positions that row t sees of slot slots[t].
 * In, out   as cuda_attention_decode.
 * Grid      (parts, groups of queries, G) in clusters of `parts` blocks. A cluster owns 8 SETS queries of a
 *           kv head, a block a part of their positions, and of the merged result every count-th quad.
 *           Where the rows are not consecutive positions of one slot, they take turns.
 * Tensor    as cuda_attention_decode.
 * cores
 * Shared    a ring of tiles for each warp (cp.async); later the results; what the others send.
 * Barriers  The cluster's, first: the mbarrier is ready | others' stores arrive at it; then between rows that
 *           take turns: results and what was received are read | the next row's take their place.
 *           __syncthreads (attend): the warps' results are written | merged. received: all parts' stores
 *           have arrived | they are merged. No block leaves before all that is sent to it has arrived.
 * Bound     latency: what is old is requested before the wait. All groups read the same tiles at about the
 *           same time, so from memory once.
 * Numerics  as cuda_attention_decode.
 * Needs     as cuda_attention_decode. */
template <class S, int SETS>
__global__ void __launch_bounds__(THREADS, (blocks_of_registers<S, SETS>))
    attention_rows(const __grid_constant__ struct cuda_attention a,
                   const __grid_constant__ struct cut cut) {
    extern __shared__ __align__(128) char shared[];
    __shared__ uint64_t received;
    start_dependents();
    open_exchange(&received);
    cluster_arrive();
    struct ring<S> ring;
    ring.open(shared);
    const int first = blockIdx.y * SETS * QUERIES;
    const int last = min(a.T * cut.ratio, first + SETS * QUERIES);
    const bool together = consecutive(a, cut.row(first), cut.row(last - 1));
    cluster_wait();
    for (int from = first, to, parity = 0; from < last; from = to) {
        to = together ? last : min(last, (cut.row(from) + 1) * cut.ratio);
        const struct work w = work_of(a, cut, {0, part_least<S>, PART_ROUND}, from, to);
        if (w.index < w.count) {
            attend<S, SETS, false>(a, w, ring, (float *)shared);
            exchange<S>(a, w, (const float *)shared, shared + S::shared_bytes, &received, parity);
            parity ^= w.count > 1;
        } else {
            wait_for_inputs();
        }
        if (to < last) cluster_arrive(), cluster_wait();
    }
}

/* ---- the launcher ---- */

/* Up to two blocks a multiprocessor: half the positions for each warp are worth more than that costs. */
template <class S, int SETS>
void launch_sets(struct cuda_backend *b, const struct cuda_attention *a) {
    const int groups = divide_up(a->T * (a->H / a->G), SETS * QUERIES);
    int parts = CLUSTER;
    while (parts > 1 && parts * groups * a->G > 2 * b->multiprocessors) parts /= 2;
    cuda_launch_clusters(
        b, "attention_rows", attention_rows<S, SETS>, dim3(parts, groups, a->G), parts, THREADS,
        S::shared_bytes + exchange_bytes(SETS * QUERIES * (S::D / 4)), *a, cut_of(a));
}

template <int D> void launch(struct cuda_backend *b, const struct cuda_attention *a) {
    typedef geometry<D, true> S;
    if (a->T * (a->H / a->G) > QUERIES)
        launch_sets<S, S::most_sets>(b, a);
    else
        launch_sets<S, 1>(b, a);
}

} // namespace

bool cuda_attention_rows_takes(const struct cuda_attention *a) {
    return cuda_attention_decode_takes(a->D) && a->H % a->G == 0;
}

void cuda_attention_rows(struct cuda_backend *b, const struct cuda_attention *a) {
    with_head_size(a->D, [&](auto size) { launch<decltype(size)::D>(b, a); });
}
