/* Attention of steps of few rows: consecutive rows of a slot share each pass over its cache. */
#include "kernels/cuda_attention_tile.cuh"

enum {
    /* Positions up to which a row is one part: the merge of parts costs about 2 us, as much as a block
     * takes for so many positions. */
    WHOLE = 256,
    PART_LEAST = 128, /* positions of a part: a tile for each warp */
    PART_ROUND = 64
};

/* ---- the kernel ---- */

/* out[t, h] = softmax(scale q[t, h] K^T) V over the positions that row t sees of slot slots[t].
 * In, out   q bf16 [T, H, D], out bf16 [T, H, D], K and V bf16 [slots, G, R, D]; nothing aliases.
 * Grid      (parts, groups of queries, G). A block owns one part of the positions for 8 SETS queries
 *           of a kv head, heads of rows that follow each other; its warps take tiles in turn. Where
 *           the rows are not consecutive positions of one slot, it takes row by row. The last block
 *           of a group merges the parts, in their order. Blocks past the last part only wait.
 * Tensor    S[queries, positions] = Q K^T leaves the weights in the registers where P^T is the second
 * cores     operand of O^T[D, queries] = V^T P^T: nothing moves between lanes, and the sums of 8
 *           queries take D / 4 registers. As first operand, P would take twice that for one set.
 * Shared    a ring of tiles for each warp (cp.async), no barriers but the warp's own; later the
 *           results.
 * Bound     bytes of K and V, from memory once, from L2 once for each group. Short rows: latency, so
 *           old tiles are requested before the wait; only the newest T positions may be of this step.
 * Numerics  f32 sums, weights to 16 bits, 2^x with scale log2(e) folded in. Positions past the
 *           row's own count nothing, whatever they hold; a row has one position at least. NaN stays
 *           NaN.
 * Needs     a kernel of this step that waited before it let others start, so that slots, positions
 *           and the older cache can be read before the wait. Rows of one step that share a slot are
 *           consecutive positions. */
template <class S, int SETS>
static __global__ void __launch_bounds__(THREADS, 2)
    attention_decode(const __grid_constant__ struct cuda_attention a,
                     const __grid_constant__ struct cut cut) {
    extern __shared__ __align__(128) char shared[];
    start_dependents();
    struct ring<S> ring;
    ring.open(shared);
    const int first = blockIdx.y * SETS * QUERIES;
    const int last = min(a.T * cut.ratio, first + SETS * QUERIES);
    const bool together = a.T == 1 || consecutive(a, cut.row(first), cut.row(last - 1));
    for (int from = first, to; from < last; from = to) {
        to = together ? last : min(last, (cut.row(from) + 1) * cut.ratio);
        const struct work w = work_of(a, cut, {WHOLE, PART_LEAST, PART_ROUND}, from, to);
        if (w.index < w.count) {
            attend<S, SETS, false>(a, w, ring, (float *)shared);
            merge<S>(a, w, (const float *)shared);
        } else {
            wait_for_inputs();
        }
        if (to < last) __syncthreads(); /* the results are read, before tiles take their place */
    }
}

/* ---- the launcher ---- */

/* Parts for the device once over: with two blocks on some multiprocessors, the next kernels' blocks
 * double up as well. Where there are parts to merge, each row of each group may use a counter. */
template <class S, int SETS>
static void launch(struct cuda_backend *b, const struct cuda_attention *a) {
    const int ratio = a->H / a->G, queries = a->T * ratio;
    const int groups = divide_up(queries, SETS * QUERIES);
    const int parts = max(1, min((int)CUDA_PARTS, b->multiprocessors / (groups * a->G)));
    const dim3 grid(parts, groups, a->G);
    const int counters = parts > 1 ? groups * a->G * a->T : 0;
    if (a->T < 1 || a->T > CUDA_DECODE_ROWS || a->H % a->G != 0 || counters > CUDA_COUNTERS) {
        cuda_launch_failed(b, "attention_decode", grid, THREADS, S::shared_bytes,
                           cudaErrorInvalidValue);
        return;
    }
    cuda_launch(b, "attention_decode", attention_decode<S, SETS>, grid, THREADS, S::shared_bytes,
                *a, cut_of(a));
}

template <int D> static void launch(struct cuda_backend *b, const struct cuda_attention *a) {
    typedef geometry<D, false> S;
    if (a->T * (a->H / a->G) > QUERIES)
        launch<S, S::most_sets>(b, a);
    else
        launch<S, 1>(b, a);
}

bool cuda_attention_decode_takes(int D) {
    return with_head_size(D, [](auto) {});
}

void cuda_attention_decode(struct cuda_backend *b, const struct cuda_attention *a) {
    if (!with_head_size(a->D, [&](auto size) { launch<decltype(size)::D>(b, a); }))
        cuda_failed(b, "cuda_attention_decode: 64, 80, 96, 128 or 256 dimensions",
                    cudaErrorInvalidValue);
}
