/* Attention of a prompt or a chunk of one, bf16, from sm_80 on (arXiv 2205.14135, 2307.08691).
 *
 * What      out[t, h] = softmax(scale q[t, h] . K) V over the positions up to positions[0] + t that a
 *           row sees of slot slots[0]; head h reads the cache of head h G / H. Scores may have a cap.
 *           q, out bf16 [T, H, D]; keys, values bf16 [slots, G, R, D].
 * Queries   the H/G heads of a group share K and V: query i of a group is head i % (H/G) of row
 *           i / (H/G). So one tile of K and V serves them all, a short chunk fills its blocks, and
 *           few positions lie on the diagonal, where work is masked away.
 * Owners    a block: ROWS queries of one group, longest first; a warp: TILES times 16 of them, and
 *           all positions that they see, so that nothing is merged. 32 queries a warp halve what
 *           ldmatrix reads of K and V for each product: with 16, shared memory is the bound.
 * Memory    queries [ROWS, D], and two stages of K [KEYS, D] and V [KEYS, D]: while one is used,
 *           the next arrives. Pieces of 16 bytes are swizzled, so that ldmatrix and the copies meet
 *           no bank conflict. Scores, weights and sums stay in registers; queries too where they
 *           fit. D = 128: 96 KB and 255 registers.
 * Bound     tensor cores: 4 H D FLOPs for each pair of a row and a position that it sees.
 * Numerics  scores and sums f32, the weights rounded to bf16 for the second product. Weights are
 *           2^(score - top), where top follows the row's maximum only once that is more than 8
 *           ahead: the quotient is the same, and the sums are seldom rescaled. Nothing past the
 *           last row's position is read; K and V are zeros there, and scores of what a row does not
 *           see become -inf by selection. A NaN in V of a later row, or of a position
 *           before a window, does reach the rows of its tile, whose weight for it is zero: the model is
 *           broken, and the last row says so.
 * Needs     D a multiple of 8, at most 256; scale > 0; q, keys and values on 16 bytes, out on 4. */
#include "kernels/cuda.cuh"
#include "kernels/cuda.h"

#include <math.h>

namespace {

/* ---- configuration ---- */

/* D: columns of a tile. PADDED: heads are narrower, and zeros fill the rest. */
template <int COLUMNS, int TILES_OF_16, bool FILLED> struct tiling {
    static constexpr int D = COLUMNS, TILES = TILES_OF_16;
    static constexpr bool PADDED = FILLED;
    /* A warp for each tensor core; the second block of a multiprocessor computes while the first
     * one is in its softmax. */
    static constexpr int THREADS = 128, BLOCKS = 2;
    static constexpr int ROWS = THREADS / 32 * 16 * TILES;
    /* 64 positions: 256 products of a warp between two barriers (D = 128), and reading the queries
     * again costs a quarter of what reading K and V does. D = 256 has registers for 16 queries a
     * warp, and shared memory for 32 positions. */
    static constexpr int KEYS = D <= 128 ? 64 : 32;
    static constexpr unsigned PIECES = D / 8; /* of 16 bytes, in a row */
    /* Neighbouring threads copy SIDE pieces of a row, the power of two in PIECES (at most 8): then
     * all that a thread copies lies at constant distances. STEP: from its row to its next. */
    static constexpr unsigned SIDE = D % 64 == 0 ? 8 : D % 32 == 0 ? 4 : 2, STEP = THREADS / SIDE;
    static constexpr bool CAPS = TILES == 1; /* on scores, for which else registers are short */
    /* Queries stay in registers where that takes at most 32 of the 255. */
    static constexpr bool KEPT = D * TILES <= 128;
    static constexpr unsigned QUERY_BYTES = ROWS * D * 2, TILE_BYTES = KEYS * D * 2;
    static constexpr size_t SHARED = QUERY_BYTES + 2 * (TILE_BYTES + TILE_BYTES);
    static_assert(BLOCKS * SHARED <= 227 * 1024, "two blocks share the memory of a multiprocessor");
};

/* What a warp has found: lane l holds rows l/4 and l/4 + 8 of each 16, and of each 8 columns
 * 2 (l%4) and the next (multiply_add, cuda.cuh). Scores lie alike; queries are inputs of it. */
template <class C> struct sums {
    float o[C::TILES][C::D / 8][4]; /* of V times weight, so far */
    float top[C::TILES][2];         /* the score, times scale log2 e, whose weight is 1 */
    float sum[C::TILES][2];         /* of the weights of this lane's columns */
};
template <class C> using scores = float[C::TILES][C::KEYS / 8][4];
template <class C> using queries = uint32_t[C::KEPT ? C::D / 16 : 1][C::TILES][4];

/* ---- shared memory ---- */

/* Piece p of a row lies at p ^ turn(row). Eight rows at the same column, as ldmatrix reads them,
 * then cover all banks: rows are PIECES apart, which repeats after 8 / SIDE of them. */
template <class C> __device__ __forceinline__ unsigned turn(unsigned row) {
    return row / (8 / C::SIDE) % C::SIDE;
}

/* Where a lane's row of ldmatrix begins, and its piece in the first 16 columns, turned. */
struct lane_row {
    uint32_t address, piece;
};
template <class C>
__device__ __forceinline__ lane_row row_of_lane(uint32_t from, unsigned row, unsigned piece) {
    return {from + row * C::PIECES * 16, (piece ^ turn<C>(row)) * 16};
}
/* The same piece, `rows` (a multiple of 8) further down and 16 `step` columns to the right. */
template <class C> __device__ __forceinline__ uint32_t at(lane_row r, int rows, int step) {
    return r.address + (r.piece ^ (unsigned)step * 32) + (unsigned)rows * C::PIECES * 16;
}

/* Starts the copy of ROWS rows, zeros from row `valid` on. from(i): where the thread's first piece
 * in the i-th of its rows comes from. */
template <class C, int ROWS, class From>
__device__ __forceinline__ void copy_rows(uint32_t to, int valid, int width, From from) {
    static_assert(ROWS % C::STEP == 0, "every thread copies as many pieces");
    const unsigned row = threadIdx.x / C::SIDE, piece = threadIdx.x % C::SIDE;
    to += row * C::PIECES * 16 + (piece ^ turn<C>(row)) * 16;
#pragma unroll
    for (unsigned i = 0; i < ROWS / C::STEP; i++) {
        const bf16 *source = from(i);
        const bool inside = (int)(i * C::STEP) < valid - (int)row;
#pragma unroll
        for (unsigned k = 0; k < C::PIECES; k += C::SIDE)
            copy_async_16(to + (i * C::STEP * C::PIECES + k) * 16, source + k * 8,
                          inside && (!C::PADDED || (int)(k + piece) * 8 < width));
    }
}

/* ---- the two products ---- */

template <class C>
__device__ __forceinline__ void load_queries(uint32_t q[C::TILES][4], lane_row from, int step) {
#pragma unroll
    for (int m = 0; m < C::TILES; m++) load_matrices(q[m], at<C>(from, m * 16, step));
}

/* s = q K^T. A load brings 16 positions by 16 columns: positions + 8 from lane 16 on, columns + 8
 * in every second eight lanes. */
template <class C>
__device__ __forceinline__ void multiply_keys(scores<C> &s, queries<C> &kept, lane_row from,
                                              uint32_t keys) {
    const unsigned lane = threadIdx.x % 32;
    const lane_row key = row_of_lane<C>(keys, lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
    for (int m = 0; m < C::TILES; m++)
#pragma unroll
        for (int n = 0; n < C::KEYS / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) s[m][n][i] = 0;
#pragma unroll
    for (int step = 0; step < C::D / 16; step++) {
        uint32_t(&q)[C::TILES][4] = kept[C::KEPT ? step : 0];
        if (!C::KEPT) load_queries<C>(q, from, step);
#pragma unroll
        for (int n = 0; n < C::KEYS / 16; n++) {
            uint32_t k[4];
            load_matrices(k, at<C>(key, n * 16, step));
#pragma unroll
            for (int m = 0; m < C::TILES; m++) {
                multiply_add(s[m][2 * n], q[m], k[0], k[1]);
                multiply_add(s[m][2 * n + 1], q[m], k[2], k[3]);
            }
        }
    }
}

/* o += weights V. Two 8-column tiles of weights, as the first product left them, lie in the lanes
 * as one 16-column input of the second: nothing moves. */
template <class C>
__device__ __forceinline__ void multiply_values(sums<C> &found, const scores<C> &weight,
                                                uint32_t values) {
    const lane_row value = row_of_lane<C>(values, threadIdx.x % 16, threadIdx.x % 32 / 16);
#pragma unroll
    for (int step = 0; step < C::KEYS / 16; step++) {
        uint32_t p[C::TILES][4];
#pragma unroll
        for (int m = 0; m < C::TILES; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float *pair = &weight[m][2 * step + i / 2][i % 2 * 2];
                p[m][i] = pack_halves(pair[0], pair[1]);
            }
#pragma unroll
        for (int n = 0; n < C::D / 16; n++) {
            uint32_t v[4];
            load_matrices_transposed(v, at<C>(value, step * 16, n));
#pragma unroll
            for (int m = 0; m < C::TILES; m++) {
                multiply_add(found.o[m][2 * n], p[m], v[0], v[1]);
                multiply_add(found.o[m][2 * n + 1], p[m], v[2], v[3]);
            }
        }
    }
}

/* ---- softmax ---- */

/* No weight for what comes after a query, or BEFORE for what comes before its window. first: the position of
 * the tile's first key less that of row 0 (BEFORE: less window); query: the lane's first. */
template <class C, bool BEFORE>
__device__ __forceinline__ void mask(scores<C> &s, int first, int query, int per_group) {
#pragma unroll
    for (int m = 0; m < C::TILES; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = (query + m * 16 + half * 8) / per_group;
            const int last = row - first - (int)(threadIdx.x % 4) * 2; /* the last one */
#pragma unroll
            for (int n = 0; n < C::KEYS / 8; n++)
#pragma unroll
                for (int i = 0; i < 2; i++)
                    if (BEFORE ? n * 8 + i <= last : n * 8 + i > last)
                        s[m][n][half * 2 + i] = -INFINITY;
        }
}

/* Scores with a cap, in natural units. */
template <class C>
__device__ __forceinline__ void cap_scores(scores<C> &s, float scale, float cap) {
#pragma unroll
    for (int m = 0; m < C::TILES; m++)
#pragma unroll
        for (int n = 0; n < C::KEYS / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) s[m][n][i] = capped(s[m][n][i] * scale, cap);
}

/* Moves top where a row's maximum has run away from it. factor: scale log2 e. */
template <class C>
__device__ __forceinline__ void follow_top(sums<C> &found, const scores<C> &s, float factor) {
    constexpr float AHEAD = 8; /* weights up to 2^8: far from f32's end, and no less exact */
    bool moved = false;
    float keep[C::TILES][2];
#pragma unroll
    for (int m = 0; m < C::TILES; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float most = -INFINITY;
#pragma unroll
            for (int n = 0; n < C::KEYS / 8; n++)
                most = fmaxf(most, fmaxf(s[m][n][half * 2], s[m][n][half * 2 + 1]));
            most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
            most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2)) * factor;
            const float before = found.top[m][half];
            const bool moves = most > before + AHEAD;
            found.top[m][half] = moves ? most : before;
            keep[m][half] = moves ? exp2_fast(before - most) : 1;
            moved |= moves;
        }
    if (!__any_sync(0xffffffffu, moved)) return;
#pragma unroll
    for (int m = 0; m < C::TILES; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            found.sum[m][half] *= keep[m][half];
#pragma unroll
            for (int n = 0; n < C::D / 8; n++) {
                found.o[m][n][half * 2] *= keep[m][half];
                found.o[m][n][half * 2 + 1] *= keep[m][half];
            }
        }
}

/* Scores become weights. top is finite, so that a row which sees nothing of a tile finds weights of 0. */
template <class C>
__device__ __forceinline__ void weigh(sums<C> &found, scores<C> &s, float factor) {
    follow_top<C>(found, s, factor);
#pragma unroll
    for (int m = 0; m < C::TILES; m++)
#pragma unroll
        for (int n = 0; n < C::KEYS / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                s[m][n][i] = exp2_fast(fmaf(s[m][n][i], factor, -found.top[m][i / 2]));
                found.sum[m][i / 2] += s[m][n][i];
            }
}

/* ---- the kernel ---- */

template <class C> __device__ __forceinline__ void find_nothing(sums<C> &found) {
#pragma unroll
    for (int m = 0; m < C::TILES; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            found.top[m][half] = -0x1p100f;
            found.sum[m][half] = 0;
#pragma unroll
            for (int n = 0; n < C::D / 8; n++)
                found.o[m][n][half * 2] = found.o[m][n][half * 2 + 1] = 0;
        }
}

/* query: the lane's first. */
template <class C>
__device__ __forceinline__ void write_result(const struct cuda_attention &a, sums<C> &found,
                                             int query, int group) {
    const int per_group = a.H / a.G, width = C::PADDED ? a.D : C::D;
    const int column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int m = 0; m < C::TILES; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float sum = found.sum[m][half];
            sum += __shfl_xor_sync(0xffffffffu, sum, 1);
            sum += __shfl_xor_sync(0xffffffffu, sum, 2);
            const float share = 1 / sum;
            const int i = query + m * 16 + half * 8, row = i / per_group;
            const size_t head = (size_t)row * a.H + group * per_group + i % per_group;
            bf16 *to = (bf16 *)a.out + head * width + column;
            if (row >= a.T) continue;
#pragma unroll
            for (int n = 0; n < C::D / 8; n++)
                if (!C::PADDED || n * 8 < width)
                    *(uint32_t *)(to + n * 8) = pack_halves(found.o[m][n][half * 2] * share,
                                                            found.o[m][n][half * 2 + 1] * share);
        }
}

/* See the top of the file. factor: of scores to powers of two. Block i: group i % G, and the tiles from the
 * last to the first. */
template <class C>
__global__ void __launch_bounds__(C::THREADS, C::BLOCKS)
    attention_prefill(const __grid_constant__ struct cuda_attention a, const float factor) {
    extern __shared__ __align__(128) unsigned char shared[];
    const uint32_t q = shared_address(shared), stages = q + C::QUERY_BYTES;
    const int per_group = a.H / a.G, width = C::PADDED ? a.D : C::D, count = a.T * per_group;
    const int group = blockIdx.x % a.G;
    /* The shuffle tells the compiler that a warp agrees: what follows takes uniform registers. */
    const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0);
    const int first = (gridDim.x - 1 - blockIdx.x) / a.G * C::ROWS; /* query of the block */
    const int own = first + warp * 16 * C::TILES;                   /* first query of the warp */
    start_dependents();
    wait_for_inputs();

    const int start = a.positions[0]; /* of row 0 */
    const int begin = first_seen(a, start + first / per_group) / C::KEYS * C::KEYS;
    const int end = start + min(first + C::ROWS - 1, count - 1) / per_group + 1; /* positions */
    const int own_first = start + own / per_group; /* position of the warp's first and last query */
    const int own_last =
        own < count ? start + min(own + 16 * C::TILES - 1, count - 1) / per_group : -1;
    const unsigned row = threadIdx.x / C::SIDE, column = threadIdx.x % C::SIDE * 8; /* to copy */
    size_t next = (((size_t)a.slots[0] * a.G + group) * a.R + begin % a.R + row) * width + column;

    const auto copy_tile = [&](int position, uint32_t to) {
        const bf16 *k = (const bf16 *)a.keys + next, *v = (const bf16 *)a.values + next;
        copy_rows<C, C::KEYS>(to, end - position, width,
                              [&](unsigned i) { return k + i * C::STEP * width; });
        copy_rows<C, C::KEYS>(to + C::TILE_BYTES, end - position, width,
                              [&](unsigned i) { return v + i * C::STEP * width; });
        copy_async_commit();
        next += (size_t)C::KEYS * width;
        if ((position + C::KEYS) % a.R == 0) next -= (size_t)a.R * width; /* around the ring */
    };
    copy_rows<C, C::ROWS>(q, count - first, width, [&](unsigned i) {
        const int query = first + (int)(row + i * C::STEP);
        const size_t head =
            (size_t)(query / per_group) * a.H + group * per_group + query % per_group;
        return (const bf16 *)a.q + head * width + column;
    });
    const auto stage_of = [&](int position) {
        return stages + position / C::KEYS % 2 * 2 * C::TILE_BYTES;
    };
    copy_tile(begin, stage_of(begin));

    const lane_row query = row_of_lane<C>(q, own - first + threadIdx.x % 16, threadIdx.x % 32 / 16);
    sums<C> found;
    queries<C> kept;
    find_nothing<C>(found);
    for (int position = begin; position < end; position += C::KEYS) {
        const uint32_t tile = stage_of(position);
        copy_async_wait<0>();
        __syncthreads(); /* this tile is written | every warp reads it; and every warp has read the
                            one before | the copies of the next overwrite it */
        if (position + C::KEYS < end) copy_tile(position + C::KEYS, stage_of(position + C::KEYS));
        if (position > own_last) continue;
        if (C::KEPT && position == begin) {
#pragma unroll
            for (int step = 0; step < C::D / 16; step++)
                load_queries<C>(kept[C::KEPT ? step : 0], query, step);
        }
        scores<C> s;
        multiply_keys<C>(s, kept, query, tile);
        if (C::CAPS && a.cap > 0) cap_scores<C>(s, a.scale, a.cap);
        if (position + C::KEYS - 1 > own_first)
            mask<C, false>(s, position - start, own + threadIdx.x % 32 / 4, per_group);
        if (position + a.window <= own_last)
            mask<C, true>(s, position - start + a.window, own + threadIdx.x % 32 / 4, per_group);
        weigh<C>(found, s, factor);
        multiply_values<C>(found, s, tile + C::TILE_BYTES);
    }
    write_result<C>(a, found, own + threadIdx.x % 32 / 4, group);
}

/* ---- launch ---- */

template <int D, int TILES, bool PADDED>
void launch(struct cuda_backend *b, const struct cuda_attention *a) {
    using C = tiling<D, TILES, PADDED>;
    const int tiles = (a->T * (a->H / a->G) + C::ROWS - 1) / C::ROWS;
    cuda_launch(b, "attention_prefill", attention_prefill<C>, dim3((unsigned)(tiles * a->G)),
                C::THREADS, C::SHARED, *a, a->cap > 0 ? LOG2_E : a->scale * LOG2_E);
}

/* 32 queries a warp, unless that leaves multiprocessors with fewer than two blocks, or scores have a cap. */
template <int D> void launch_by_rows(struct cuda_backend *b, const struct cuda_attention *a) {
    const int blocks = (a->T * (a->H / a->G) + 127) / 128 * a->G;
    if (blocks < 2 * b->multiprocessors || a->cap > 0)
        launch<D, 1, false>(b, a);
    else
        launch<D, 2, false>(b, a);
}

} // namespace

void cuda_attention_prefill(struct cuda_backend *b, const struct cuda_attention *a) {
    if (a->D % 8 || a->D > 256 || !(a->scale > 0))
        cuda_failed(b, "cuda_attention_prefill: head size or scale", cudaErrorInvalidValue);
    else if (a->D == 64)
        launch_by_rows<64>(b, a);
    else if (a->D == 80)
        launch_by_rows<80>(b, a);
    else if (a->D == 96)
        launch_by_rows<96>(b, a);
    else if (a->D == 128)
        launch_by_rows<128>(b, a);
    else if (a->D == 256)
        launch<256, 1, false>(b, a);
    else if (a->D < 64)
        launch<64, 1, true>(b, a);
    else if (a->D < 128)
        launch<128, 1, true>(b, a);
    else
        launch<256, 1, true>(b, a);
}
