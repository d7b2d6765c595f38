/* What a block of decode attention works on, and how what warps and blocks found becomes the output. */
#ifndef KERNELS_CUDA_ATTENTION_PARTS_CUH
#define KERNELS_CUDA_ATTENTION_PARTS_CUH

#include "kernels/cuda_heads.cuh"

enum {
    QUERIES = 8, /* of a set: the columns of the second product */
    BATCH = 16   /* parts that a thread reads at once when it merges them */
};

/* ---- what a block works on ---- */

/* How the step is cut, the same for all blocks. Queries of a kv head are numbered row by row: query i
 * is head i % ratio of row i / ratio. */
struct cut {
    int ratio;
    uint64_t inverse; /* 2^32 / ratio, rounded up: divides what is below 2^32 / ratio */
    __device__ __forceinline__ int row(int query) const { return (int)(query * inverse >> 32); }
    __device__ __forceinline__ int head(int query) const { return query - row(query) * ratio; }
};

static inline struct cut cut_of(const struct cuda_attention *a) {
    const int ratio = a->H / a->G;
    return {ratio, (((uint64_t)1 << 32) + (uint64_t)ratio - 1) / (uint64_t)ratio};
}

struct work {
    struct cut cut;
    int kv_head;
    int first, last; /* queries first to last - 1: rows of one slot, at consecutive positions */
    int first_row, last_row; /* theirs */
    int slot, length;        /* and the position after the last row's */
    int index, count;        /* this part, of so many */
    int begin, end;          /* its positions */
    /* A row sees positions from hidden(row) to limit(row) - 1. */
    __device__ __forceinline__ int limit(int row) const { return length - (last_row - row); }
    __device__ __forceinline__ int hidden(const struct cuda_attention &a, int row) const {
        return first_seen(a, limit(row) - 1);
    }
    /* Columns past the last query are like it. */
    __device__ __forceinline__ int row(int query) const { return cut.row(min(query, last - 1)); }
    /* Of q and out: the first dim of a query. */
    __device__ __forceinline__ size_t at(const struct cuda_attention &a, int query) const {
        return ((size_t)cut.row(query) * a.H + kv_head * cut.ratio + cut.head(query)) * a.D;
    }
};

/* How positions are cut into parts, one for each block along the grid's x. */
struct split {
    int whole; /* positions up to which there is one part, since others would have to be merged */
    int least; /* positions of a part */
    int round; /* what they are a multiple of */
};

/* Part `index` of at most `parts` of the positions that the rows see. */
static __device__ __forceinline__ void take_part(struct work &w, const struct cuda_attention &a,
                                                 struct split split, int index, int parts) {
    const int from = w.hidden(a, w.first_row), seen = w.length - from;
    w.index = index;
    w.count = 1;
    w.begin = from;
    w.end = w.length;
    if (seen <= split.whole || parts == 1) return;
    const int share = divide_up(divide_up(seen, parts), split.round) * split.round;
    const int size = max(split.least, share);
    w.count = divide_up(seen, size);
    w.begin = from + index * size;
    w.end = min(w.length, w.begin + size);
}

/* This block's part of queries first to last - 1: from their position alone, since the grid is the same
 * for all positions. */
static __device__ __forceinline__ struct work work_of(const struct cuda_attention &a,
                                                      const struct cut &cut, struct split split,
                                                      int first, int last) {
    struct work w;
    w.cut = cut;
    w.kv_head = blockIdx.z;
    w.first = first;
    w.last = last;
    w.first_row = cut.row(first);
    w.last_row = cut.row(last - 1);
    w.slot = __ldcg(a.slots + w.last_row);
    w.length = __ldcg(a.positions + w.last_row) + 1;
    take_part(w, a, split, blockIdx.x, gridDim.x);
    return w;
}

/* Whether rows first to last are consecutive positions of one slot. */
static __device__ __forceinline__ bool consecutive(const struct cuda_attention &a, int first,
                                                   int last) {
    const int row = min(first + (int)threadIdx.x % 32, last);
    return !__any_sync(0xffffffffu,
                       __ldcg(a.slots + row) != __ldcg(a.slots + first) ||
                           __ldcg(a.positions + row) != __ldcg(a.positions + first) + row - first);
}

/* ---- q and k that attention finishes ---- */

/* Of a kv head, in shared memory: its queries and the key of the row, as q and K hold them. Rows lie an odd
 * number of 16 bytes apart: no bank conflicts. */
template <int D> struct finished_heads {
    static constexpr int ROW = D + 8;
    alignas(16) bf16 q[(D > 128 ? 1 : 2) * QUERIES][ROW], key[ROW];
};

/* A head for a warp at a time, the key last: of the first one what is there before the wait. */
template <int D> using unfinished_head = head_of_lanes<1, D / 64>;
template <int D>
static __device__ __forceinline__ unfinished_head<D> first_head(const struct cuda_attention &a,
                                                                const struct work &w) {
    const int warp = (int)threadIdx.x / 32, ratio = w.cut.ratio;
    unfinished_head<D> x(D, D / 2, (int)threadIdx.x % 32, 32);
    if (warp <= ratio) x.load_weights(warp < ratio ? a.raw.norm_q : a.raw.norm_k);
    return x;
}

/* All of them; x: the first one. A barrier must follow. */
template <int D>
static __device__ __forceinline__ void finish_heads(finished_heads<D> &heads,
                                                    const struct cuda_attention &a,
                                                    const struct work &w, int warps,
                                                    unfinished_head<D> &x) {
    const int ratio = w.cut.ratio;
#pragma unroll 1
    for (int i = (int)threadIdx.x / 32; i <= ratio; i += warps) {
        const bool query = i < ratio;
        const int head = query ? w.kv_head * ratio + i : a.H + w.kv_head;
        if (i >= warps) x.load_weights(query ? a.raw.norm_q : a.raw.norm_k);
        x.load(a.raw.qkv + (size_t)head * D, a.raw.rope);
        x.normalise(x.factor(true, a.raw.eps));
        if (a.raw.rope) x.turn();
        x.store(query ? heads.q[i] : heads.key);
    }
}

/* The finished key to its place in the cache, by one warp of the block whose part has the row's position. */
template <int D>
static __device__ __forceinline__ void keep_key(const finished_heads<D> &heads, const bf16 *place) {
    const int lane = (int)threadIdx.x % 32;
    if (lane < D / 8) ((uint4 *)place)[lane] = ((const uint4 *)heads.key)[lane];
}

/* ---- what the warps found ---- */

/* 2^(x - maximum), and 0 for -inf, of which there may be nothing else. */
static __device__ __forceinline__ float weight_of(float x, float maximum) {
    return exp2_fast(x - (maximum == -INFINITY ? 0.0f : maximum));
}

/* Four neighbouring dims of one query. */
struct merged {
    float maximum, sum;
    float4 values;
};

static __device__ __forceinline__ void add_scaled(float4 &to, float factor, float4 x) {
    to.x += factor * x.x, to.y += factor * x.y;
    to.z += factor * x.z, to.w += factor * x.w;
}

/* The results of the warps that had a tile, in their order. */
template <class S>
static __device__ __forceinline__ struct merged merge_results(const float *results,
                                                              const struct work &w, int query,
                                                              int dim) {
    const int count = min(S::warps, divide_up(w.end - w.begin, S::tile));
    constexpr int RESULT = S::result;
    const float *record = results + query * S::record;
    struct merged m = {-INFINITY, 0.0f, make_float4(0.0f, 0.0f, 0.0f, 0.0f)};
#pragma unroll
    for (int i = 0; i < S::warps; i++)
        if (i < count) m.maximum = fmaxf(m.maximum, record[i * RESULT + S::D]);
#pragma unroll
    for (int i = 0; i < S::warps; i++)
        if (i < count) {
            const float2 sums = *(const float2 *)(record + i * RESULT + S::D);
            const float factor = weight_of(sums.x, m.maximum);
            m.sum += factor * sums.y;
            add_scaled(m.values, factor, *(const float4 *)(record + i * RESULT + dim));
        }
    return m;
}

static __device__ __forceinline__ void write_out(bf16 *to, const struct merged &m) {
    const float factor = 1.0f / m.sum;
    *(uint2 *)to = make_uint2(pack_halves(m.values.x * factor, m.values.y * factor),
                              pack_halves(m.values.z * factor, m.values.w * factor));
}

/* ---- what the blocks found ---- */

/* A row's parts: f32 [CUDA_PARTS, H, D] of values, then [CUDA_PARTS, H, 2] of maximum and sum. Both
 * point at part 0 of a query; the next part lies H D floats, or H pairs, on. */
struct part_store {
    float *values;
    float2 *sums;
};

template <class S>
static __device__ __forceinline__ struct part_store parts_of(const struct cuda_attention &a,
                                                             const struct work &w, int query) {
    float *parts = a.parts + (size_t)w.cut.row(query) * CUDA_PARTS * a.H * (S::D + 2);
    const int head = w.kv_head * w.cut.ratio + w.cut.head(query);
    struct part_store store;
    store.values = parts + head * S::D;
    store.sums = (float2 *)(parts + (size_t)CUDA_PARTS * a.H * S::D) + head;
    return store;
}

/* Whether this block is the last of its queries to have written its part. Barrier 1, of the threads
 * that merge: each one's share of the part is written | it is counted; last is known | others read it,
 * and the other blocks' parts. */
template <class S>
static __device__ __forceinline__ bool last_to_write(const struct cuda_attention &a,
                                                     const struct work &w) {
    __shared__ bool last;
    named_barrier(1, S::mergers);
    if (threadIdx.x == 0) {
        const int group = blockIdx.z * gridDim.y + blockIdx.y;
        last = count_up(a.counters + group * a.T + w.first_row, w.count - 1) ==
               (unsigned)(w.count - 1);
    }
    named_barrier(1, S::mergers);
    return last;
}

/* All parts of a query, BATCH at a time, whose reads overlap, in their order. */
template <class S>
static __device__ __forceinline__ struct merged merge_parts(const struct part_store &parts,
                                                            int count, int heads) {
    struct merged m = {-INFINITY, 0.0f, make_float4(0.0f, 0.0f, 0.0f, 0.0f)};
#pragma unroll 1
    for (int first = 0; first < count; first += BATCH) {
        float2 other[BATCH];
        float4 x[BATCH];
        const float before = m.maximum;
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            other[i] = make_float2(-INFINITY, 0.0f);
            x[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (first + i < count) {
                const int at = (first + i) * heads;
                other[i] = __ldcg(parts.sums + at);
                x[i] = __ldcg((const float4 *)(parts.values + at * S::D));
            }
        }
#pragma unroll
        for (int i = 0; i < BATCH; i++) m.maximum = fmaxf(m.maximum, other[i].x);
        const float factor = weight_of(before, m.maximum);
        m.sum *= factor;
        m.values.x *= factor, m.values.y *= factor, m.values.z *= factor, m.values.w *= factor;
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const float weight = weight_of(other[i].x, m.maximum);
            m.sum += weight * other[i].y;
            add_scaled(m.values, weight, x[i]);
        }
    }
    return m;
}

/* The warps' results become the output, by way of parts where there are several. */
template <class S>
static __device__ __forceinline__ void merge(const struct cuda_attention &a, const struct work &w,
                                             const float *results) {
    const int quads = (w.last - w.first) * (S::D / 4);
#pragma unroll 1
    for (int i = threadIdx.x; i < quads; i += S::mergers) {
        const int query = w.first + i / (S::D / 4), dim = 4 * (i % (S::D / 4));
        const struct merged m = merge_results<S>(results, w, query - w.first, dim);
        if (w.count == 1) {
            write_out((bf16 *)a.out + w.at(a, query) + dim, m);
            continue;
        }
        const struct part_store parts = parts_of<S>(a, w, query);
        *(float4 *)(parts.values + (size_t)w.index * a.H * S::D + dim) = m.values;
        if (dim == 0) parts.sums[w.index * a.H] = make_float2(m.maximum, m.sum);
    }
    if (w.count == 1 || !last_to_write<S>(a, w)) return;
#pragma unroll 1
    for (int i = threadIdx.x; i < quads; i += S::mergers) {
        const int query = w.first + i / (S::D / 4), dim = 4 * (i % (S::D / 4));
        struct part_store parts = parts_of<S>(a, w, query);
        parts.values += dim;
        write_out((bf16 *)a.out + w.at(a, query) + dim, merge_parts<S>(parts, w.count, a.H));
    }
}

#endif
