/* What a warp of attention does with its tiles: its ring of them, one tile, all tiles of a part. */
#ifndef KERNELS_CUDA_ATTENTION_TILE_CUH
#define KERNELS_CUDA_ATTENTION_TILE_CUH

#include "kernels/cuda_attention_parts.cuh"

/* ---- configuration ---- */

enum { WARPS = 4, THREADS = 32 * WARPS, NOWHERE = -1 };

/* Scores may exceed the maximum that the sums are relative to by so many powers of two before the
 * sums are scaled anew: 2^8 is far from overflow, and few tiles after the first pay for it. */
static constexpr float SLACK = 8.0f;

/* Ring and tiles by head size and reach. A warp's ring holds `depth` tiles of K and V in turn.
 * Far caches need bytes under way: 64 to 97 KB, of which a good half is (4.6 TB/s for 1.2 us ask for
 * 42 KB on each multiprocessor). Near ones need room: with 34 KB the block fits beside those of the
 * kernels before and after it, whose stream of weights then does not stop for attention. */
template <int D_, bool NEAR> struct geometry {
    static constexpr int D = D_, warps = WARPS, mergers = THREADS;
    static_assert(D % 16 == 0 && D >= 16 && D <= 256, "steps of the tensor cores; registers");
    static constexpr int tile = D > (NEAR ? 64 : 128) ? 16 : 32; /* positions of a warp at a time */
    static constexpr int columns = tile / 8;                     /* n8 tiles of scores */
    static constexpr int depth = NEAR ? D == 80 ? 3 : 2 : D > 96 ? 3 : D > 64 ? 4 : 5;
    /* A tile is cut into eight runs of positions. Row r of an 8 x 8 matrix comes from run r, and runs
     * lie an odd number of 16 bytes apart: no bank conflicts. */
    static constexpr int row_bytes = 2 * D;
    static constexpr int run_bytes = columns * row_bytes + 16;
    static_assert(run_bytes / 16 % 2 == 1, "no bank conflicts");
    static constexpr int tile_bytes = 8 * run_bytes;
    static constexpr int ring_bytes = depth * tile_bytes;
    static constexpr int shared_bytes = WARPS * ring_bytes;
    /* Sets of queries in one pass. */
    static constexpr int most_sets = D > 128 ? 1 : 2;
    /* A result, f32 [queries, D + 4]: D sums of weighted values, the maximum, the sum of the weights;
     * all relative to 2^maximum. D + 4: no bank conflicts. It lies where a warp's ring was. */
    static constexpr int record = D + 4;
    static constexpr int result = ring_bytes / 4;
    static_assert(most_sets * QUERIES * record <= result, "a result takes the place of a ring");
    static_assert(shared_bytes <= 98 * 1024, "99 KB are what a block may take from sm_86 on");
};

/* ---- a warp's ring ---- */

/* The tiles of a part that are this warp's. Item 2n is K, 2n + 1 is V of its tile n. */
template <class S> struct tiles_of_warp {
    const bf16 *keys, *values;
    int first, end; /* positions */
    __device__ __forceinline__ tiles_of_warp(const struct cuda_attention &a, const struct work &w) {
        const size_t start = ((size_t)w.slot * a.G + w.kv_head) * a.R * S::D;
        keys = (const bf16 *)a.keys + start, values = (const bf16 *)a.values + start;
        first = w.begin + (int)threadIdx.x / 32 * S::tile, end = w.end;
    }
    __device__ __forceinline__ const bf16 *cache(int item) const {
        return item % 2 ? values : keys;
    }
    __device__ __forceinline__ int begin(int n) const { return first + n * WARPS * S::tile; }
};

/* Tiles come in the order in which they are requested; the next one to be read is in `slot`. A place is
 * requested anew after all lanes have read it. */
template <class S> struct ring {
    uint32_t tiles; /* of this warp */
    int slot;

    __device__ __forceinline__ void open(char *shared) {
        tiles = shared_address(shared) + threadIdx.x / 32 * S::ring_bytes;
        slot = 0;
    }
    __device__ __forceinline__ uint32_t place(int s) const { return tiles + s * S::tile_bytes; }
    __device__ __forceinline__ void next() {
        if (++slot == S::depth) slot = 0;
    }

    /* The place of an item that is requested before any was read. */
    __device__ __forceinline__ uint32_t place_of(int item) const {
        return place((slot + item) % S::depth);
    }

    /* Asks for a tile of K or V, from a cache that is a ring; zeros past the end. But not for row `but`. */
    __device__ __forceinline__ void copy(uint32_t to, const struct cuda_attention &a,
                                         const tiles_of_warp<S> &t, int item, int but) {
        const int lane = threadIdx.x % 32, begin = t.begin(item / 2), valid = t.end - begin;
        if (valid <= 0) return;
        const int first = place_in_ring(begin, a.R);
        const bf16 *from = t.cache(item) + (size_t)first * S::D;
        const bf16 *around = from - (size_t)a.R * S::D;
#pragma unroll
        for (int i = 0; i < S::tile * S::D / 256; i++) {
            const int chunk = lane + 32 * i, row = chunk / (S::D / 8);
            if (row != but)
                copy_async_16(to + 16 * (chunk + row / S::columns),
                              (first + row < a.R ? from : around) + 8 * chunk, row < valid);
        }
    }
    /* The same of a whole tile, as a group; also an empty one, so that their number tells what has come. */
    __device__ __forceinline__ void request(uint32_t to, const struct cuda_attention &a,
                                            const tiles_of_warp<S> &t, int item) {
        copy(to, a, t, item, NOWHERE);
        copy_async_commit();
    }
    /* Row `row` alone, if the tile has it, from the cache's first position on `from`. */
    __device__ __forceinline__ void copy_row(uint32_t to, const bf16 *cache, int row,
                                             int from) const {
        const int lane = threadIdx.x % 32, chunk = row * (S::D / 8) + lane;
        if (row >= 0 && row < S::tile && lane < S::D / 8)
            copy_async_16(to + 16 * (chunk + row / S::columns), cache + from + 8 * lane, true);
    }

    /* A row of the tile to be read. shared: what open() was given. */
    __device__ __forceinline__ void put_row(void *shared, int row, const bf16 *from) const {
        const int lane = threadIdx.x % 32, chunk = row * (S::D / 8) + lane;
        char *tile = (char *)shared + (place(slot) - shared_address(shared));
        if (lane < S::D / 8)
            *(uint4 *)(tile + 16 * (chunk + row / S::columns)) = *(const uint4 *)(from + 8 * lane);
        __syncwarp(); /* the row is written, before it is read */
    }

    __device__ __forceinline__ void wait() const {
        copy_async_wait<S::depth - 1>();
        __syncwarp(); /* all lanes' copies, before they are read */
    }
};

/* ---- one tile, by one warp ---- */

/* The queries as the first operand: set 0 in rows 0 to 7, set 1 or nothing in rows 8 to 15. RAW: they are in
 * shared memory. */
template <class S, int SETS, bool RAW>
static __device__ __forceinline__ void load_queries(uint32_t queries[S::D / 16][2 * SETS],
                                                    const struct cuda_attention &a,
                                                    const struct work &w,
                                                    const finished_heads<S::D> *raw) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int s = 0; s < SETS; s++) {
        const int query = w.first + s * QUERIES + lane / 4;
        const bf16 *q = (RAW ? raw->q[query] : (const bf16 *)a.q + w.at(a, query)) + 2 * (lane % 4);
#pragma unroll
        for (int i = 0; i < S::D / 8; i++) {
            const unsigned *word = (const unsigned *)(q + 8 * i);
            queries[i / 2][i % 2 * SETS + s] = query >= w.last ? 0 : RAW ? *word : __ldcg(word);
        }
    }
}

/* q k of query l/4 of each set at the two positions of column pair l%4. keys: this lane's address for
 * ldmatrix. */
template <class S, int SETS>
static __device__ __forceinline__ void score_tile(float scores[S::columns][SETS][2],
                                                  const uint32_t queries[S::D / 16][2 * SETS],
                                                  uint32_t keys) {
    float sums[S::columns][4] = {};
#pragma unroll
    for (int i = 0; i < S::D / 16; i++) {
        const uint32_t q[4] = {queries[i][0], SETS > 1 ? queries[i][SETS - 1] : 0, queries[i][SETS],
                               SETS > 1 ? queries[i][2 * SETS - 1] : 0};
#pragma unroll
        for (int u = 0; u < S::columns; u += 2) {
            uint32_t k[4];
            load_matrices(k, keys + u * S::row_bytes + 32 * i);
            multiply_add(sums[u], q, k[0], k[1]);
            multiply_add(sums[u + 1], q, k[2], k[3]);
        }
    }
#pragma unroll
    for (int u = 0; u < S::columns; u++)
#pragma unroll
        for (int i = 0; i < 2 * SETS; i++) scores[u][i / 2][i % 2] = sums[u][i];
}

/* Scores of a set, in powers of two, become weights relative to 2^maximum; positions before `hidden` and
 * from `valid` on count nothing. Lane l keeps maximum and sum (of its own positions) of query l/4; found
 * has queries 2 (l%4), +1. */
template <class S, int SETS>
static __device__ __forceinline__ void weigh_tile(float weights[S::columns][SETS][2], int s,
                                                  int hidden, int valid, float &maximum, float &sum,
                                                  float found[S::D / 16][4]) {
    const int lane = threadIdx.x % 32;
    float highest = -INFINITY;
#pragma unroll
    for (int i = 0; i < 2 * S::columns; i++) {
        float &weight = weights[i / 2][s][i % 2];
        const int position = (2 * (lane % 4) + i % 2) * S::columns + i / 2;
        if (position < hidden || position >= valid) weight = -INFINITY;
        highest = fmaxf(highest, weight);
    }
    if (__any_sync(0xffffffffu, highest > maximum + SLACK)) {
        highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 1));
        highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 2));
        highest = fmaxf(highest, maximum);
        const float factor = weight_of(maximum, highest);
        const float even = __shfl_sync(0xffffffffu, factor, lane % 4 * 8);
        const float odd = __shfl_sync(0xffffffffu, factor, lane % 4 * 8 + 4);
        maximum = highest;
        sum *= factor;
#pragma unroll
        for (int i = 0; i < S::D / 16; i++) {
            found[i][0] *= even, found[i][1] *= odd;
            found[i][2] *= even, found[i][3] *= odd;
        }
    }
    const float base = maximum == -INFINITY ? 0.0f : maximum;
    float sums[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < 2 * S::columns; i++) {
        float &weight = weights[i / 2][s][i % 2];
        weight = exp2_fast(weight - base);
        sums[i % 2] += weight;
    }
    sum += sums[0] + sums[1];
}

/* Weights lie as the second operand wants them: P^T [16 positions, 8 queries] of columns u and u + 1.
 * They are split into two bf16 each, so that they are good to 16 bits. */
struct operand {
    uint32_t high[2], low[2];
};

template <class S, int SETS>
static __device__ __forceinline__ struct operand split_weights(
    const float weights[S::columns][SETS][2], int u, int s) {
    struct operand o;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float first = weights[u + i][s][0], second = weights[u + i][s][1];
        o.high[i] = pack_halves(first, second);
        o.low[i] = pack_halves(first - low_half(o.high[i]), second - high_half(o.high[i]));
    }
    return o;
}

static __device__ __forceinline__ void add_product(float found[4], const uint32_t values[4],
                                                   const struct operand &weights) {
    multiply_add(found, values, weights.high[0], weights.high[1]);
    multiply_add(found, values, weights.low[0], weights.low[1]);
}

/* found[D, queries] += V^T [D, tile] P^T [tile, queries]. values: as keys. */
template <class S, int SETS>
static __device__ __forceinline__ void add_values(float found[SETS][S::D / 16][4],
                                                  const float weights[S::columns][SETS][2],
                                                  uint32_t values) {
#pragma unroll
    for (int u = 0; u < S::columns; u += 2) {
        struct operand o[SETS];
#pragma unroll
        for (int s = 0; s < SETS; s++) o[s] = split_weights<S, SETS>(weights, u, s);
#pragma unroll
        for (int i = 0; i < S::D / 16; i++) {
            uint32_t v[4];
            load_matrices_transposed(v, values + u * S::row_bytes + 32 * i);
#pragma unroll
            for (int s = 0; s < SETS; s++) add_product(found[s][i], v, o[s]);
        }
    }
}

/* add_values for tiles that hold rows of this step, which earlier rows must not see, or positions that later
 * rows see no more: a weight of zero does not silence a NaN. So what is not finite is left out, and makes
 * NaN of the sums of those who see it: they count it, as a product with ones. Query l/4 sees positions
 * hidden to valid - 1 of the tile. */
template <class S, int SETS>
static __device__ __forceinline__ void add_new_values(float found[SETS][S::D / 16][4],
                                                      const float weights[S::columns][SETS][2],
                                                      uint32_t values, const int hidden[SETS],
                                                      const int valid[SETS]) {
    constexpr uint32_t FIRST = 0x3f80, SECOND = FIRST << 16; /* ones */
    const int position = 2 * (threadIdx.x % 4) * S::columns;
#pragma unroll
    for (int u = 0; u < S::columns; u += 2) {
        struct operand o[SETS];
        uint32_t seen[SETS][2];
#pragma unroll
        for (int s = 0; s < SETS; s++) {
            o[s] = split_weights<S, SETS>(weights, u, s);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int first = position + u + i, second = first + S::columns;
                seen[s][i] = (first >= hidden[s] && first < valid[s] ? FIRST : 0) |
                             (second >= hidden[s] && second < valid[s] ? SECOND : 0);
            }
        }
#pragma unroll
        for (int i = 0; i < S::D / 16; i++) {
            uint32_t v[4], other[4];
            load_matrices_transposed(v, values + u * S::row_bytes + 32 * i);
#pragma unroll
            for (int k = 0; k < 4;
                 k++) { /* the exponent's bits are all set: plus one, they overflow */
                const uint32_t halves = (((v[k] & 0x7fff7fffu) + 0x00800080u) >> 15 & 0x00010001u);
                v[k] &= ~(halves * 0xffffu);
                other[k] = halves * FIRST;
            }
#pragma unroll
            for (int s = 0; s < SETS; s++) add_product(found[s][i], v, o[s]);
            if (!__any_sync(0xffffffffu, other[0] | other[1] | other[2] | other[3])) continue;
#pragma unroll
            for (int s = 0; s < SETS; s++) {
                float count[4] = {};
                multiply_add(count, other, seen[s][0], seen[s][1]);
#pragma unroll
                for (int k = 0; k < 4; k++)
                    if (count[k] > 0.0f) found[s][i][k] = NAN;
            }
        }
    }
}

/* ---- a part ---- */

/* Asks for the first items, as far as they are older than this step, before its kernels are awaited; and for the
 * rest of them after that. Of one row, ALONE, its own position alone is not older: all items are one group, and
 * the others are empty. RAW: the key is finished here. */
template <class S, bool ALONE, bool RAW> struct first_items {
    const tiles_of_warp<S> &t;
    int older; /* the first position of this step */
    int item;  /* ask for from here on */
    int own;   /* ALONE: where `older` lies in keys and values, its first dim */
    __device__ __forceinline__ void before(struct ring<S> &ring, const struct cuda_attention &a) {
        if (ALONE) own = place_in_ring(older, a.R) * S::D;
#pragma unroll 1
        for (item = 0; item < S::depth; item++) {
            if (!ALONE && t.begin(item / 2) + S::tile > older) break;
            ring.copy(ring.place_of(item), a, t, item, ALONE ? older - t.begin(item / 2) : NOWHERE);
            if (!ALONE) copy_async_commit();
        }
    }
    __device__ __forceinline__ void after(struct ring<S> &ring, const struct cuda_attention &a) {
        if constexpr (ALONE) {
#pragma unroll
            for (item = RAW; item < S::depth; item += 1 + RAW)
                ring.copy_row(ring.place_of(item), t.cache(item), older - t.begin(item / 2), own);
#pragma unroll
            for (item = 0; item < S::depth; item++) copy_async_commit();
        } else {
#pragma unroll 1
            for (; item < S::depth; item++) ring.request(ring.place_of(item), a, t, item);
        }
    }
};

/* Around the wait: asks for the first items and reads the queries, whose heads RAW finishes first. */
template <class S, int SETS, bool ALONE, bool RAW>
static __device__ __forceinline__ void open_part(uint32_t queries[S::D / 16][2 * SETS],
                                                 const struct cuda_attention &a,
                                                 const struct work &w, struct ring<S> &ring,
                                                 const tiles_of_warp<S> &tiles,
                                                 finished_heads<S::D> *raw) {
    first_items<S, ALONE, RAW> items = {tiles, w.length - a.T};
    items.before(ring, a);
    if constexpr (RAW) {
        unfinished_head<S::D> first = first_head<S::D>(a, w);
        wait_for_inputs();
        items.after(ring, a);
        finish_heads(*raw, a, w, WARPS, first);
        __syncthreads(); /* heads are finished | read */
        if (threadIdx.x / 32 == WARPS - 1 && w.end == w.length)
            keep_key(*raw, tiles.keys + items.own);
        load_queries<S, SETS, RAW>(queries, a, w, raw);
    } else {
        wait_for_inputs();
        load_queries<S, SETS, RAW>(queries, a, w, raw);
        items.after(ring, a);
    }
}

/* A warp's result into shared memory. */
template <class S, int SETS>
static __device__ __forceinline__ void store_result(float *result, const float maximum[SETS],
                                                    const float sum[SETS],
                                                    const float found[SETS][S::D / 16][4]) {
    constexpr int RECORD = S::record;
    const int lane = threadIdx.x % 32, row = lane / 4, column = 2 * (lane % 4);
#pragma unroll
    for (int s = 0; s < SETS; s++, result += QUERIES * RECORD) {
        float total = sum[s];
        total += __shfl_xor_sync(0xffffffffu, total, 1);
        total += __shfl_xor_sync(0xffffffffu, total, 2);
        if (lane % 4 == 0)
            *(float2 *)(result + row * RECORD + S::D) = make_float2(maximum[s], total);
#pragma unroll
        for (int i = 0; i < S::D / 16; i++)
#pragma unroll
            for (int k = 0; k < 4; k++)
                result[(column + k % 2) * RECORD + 16 * i + row + k / 2 * 8] = found[s][i][k];
    }
}

/* One pass over the positions of a part, by all warps: their results lie in shared memory after it. ALONE:
 * the queries are of one row, which sees all positions of the part. RAW: its heads are finished first. */
template <class S, int SETS, bool ALONE, bool RAW = false>
static __device__ __forceinline__ void attend(const struct cuda_attention &a, const struct work &w,
                                              struct ring<S> &ring, float *results,
                                              finished_heads<S::D> *raw = NULL) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const tiles_of_warp<S> tiles(a, w);
    uint32_t queries[S::D / 16][2 * SETS];
    open_part<S, SETS, ALONE, RAW>(queries, a, w, ring, tiles, raw);
    const float scale = a.scale * LOG2_E;
    const uint32_t row =
        lane % 8 * S::run_bytes + lane / 16 * S::row_bytes + lane / 8 % 2 * 16; /* for ldmatrix */
    float found[SETS][S::D / 16][4] = {}, maximum[SETS], sum[SETS];
    int limit[SETS];
#pragma unroll
    for (int s = 0; s < SETS; s++) {
        maximum[s] = -INFINITY, sum[s] = 0.0f;
        const int query_row = ALONE ? 0 : w.row(w.first + s * QUERIES + lane / 4);
        limit[s] = ALONE ? w.end : w.limit(query_row);
    }
#pragma unroll 1
    for (int n = 0; tiles.begin(n) < w.end; n++) {
        const int begin = tiles.begin(n);
        float weights[S::columns][SETS][2];
        ring.wait();
        if (RAW && begin + S::tile >= w.length)
            ring.put_row(results, w.length - 1 - begin, raw->key);
        score_tile<S, SETS>(weights, queries, ring.place(ring.slot) + row);
        __syncwarp(); /* K is read, before its place is taken */
        ring.request(ring.place(ring.slot), a, tiles, 2 * n + S::depth);
        ring.next();
        int hidden[SETS], valid[SETS];
#pragma unroll
        for (int s = 0; s < SETS; s++) {
#pragma unroll
            for (int i = 0; i < 2 * S::columns; i++) weights[i / 2][s][i % 2] *= scale;
#pragma unroll
            for (int i = 0; i < 2 * S::columns; i++)
                if (!ALONE && a.cap > 0)
                    weights[i / 2][s][i % 2] = capped(weights[i / 2][s][i % 2], a.cap * LOG2_E);
            hidden[s] = ALONE ? 0 : limit[s] - a.window - begin;
            valid[s] = min(limit[s], w.end) - begin;
            weigh_tile<S, SETS>(weights, s, hidden[s], valid[s], maximum[s], sum[s], found[s]);
        }
        ring.wait();
        if (ALONE || w.first_row == w.last_row ||
            (begin >= w.hidden(a, w.last_row) && begin + S::tile <= w.limit(w.first_row)))
            add_values<S, SETS>(found, weights, ring.place(ring.slot) + row);
        else
            add_new_values<S, SETS>(found, weights, ring.place(ring.slot) + row, hidden, valid);
        __syncwarp(); /* V is read, before its place is taken, by a tile or by the result */
        ring.request(ring.place(ring.slot), a, tiles, 2 * n + 1 + S::depth);
        ring.next();
    }
    store_result<S, SETS>(results + warp * S::result, maximum, sum, found);
    __syncthreads(); /* the warps' results are written, before they are merged */
}

#endif
