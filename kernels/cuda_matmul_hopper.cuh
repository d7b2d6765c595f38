/* What surrounds the products of many rows (cuda_matmul_hopper.cu): tiles and who has them, the factor
 * that a norm before them left over, and what follows them: residual and the next norm's first half,
 * activation, norms of heads, RoPE and the cache.
 *
 * A norm (RMSNorm, arXiv 1910.07467) has no kernel here, as with few rows: whoever writes x also writes
 * x gamma, rounded, and of each of its tiles a part of the sum of x^2. */
#ifndef KERNELS_CUDA_MATMUL_HOPPER_CUH
#define KERNELS_CUDA_MATMUL_HOPPER_CUH

#include "kernels/cuda_matmul_hopper.h"
#include "kernels/cuda_wgmma.cuh"

namespace {

/* ---- tiles ---- */

enum {
    CONSUMERS = 256, /* two warpgroups */
    THREADS = CONSUMERS + 128,
    PRODUCER_REGISTERS = 40, /* 24 spill */
    CONSUMER_REGISTERS = 232,
    SHARED_BYTES = 227 << 10,
    BARRIER_BYTES = 256,
    CLUSTER = 2,
    BOTH = 3, /* blocks of a cluster, a bit each */
    /* QKV: neighbouring dimensions of a head in a tile, and as many that turn with them. */
    SPAN = 16,
    /* HEADS: dims of a head, which is a tile. Two heads of 128 a tile, or one of 256, have an ending too long
     * for a tile that both warpgroups end together. */
    NORMED_HEAD = 128,
    /* Rows of tiles that meet one column of tiles before the next one: 132 tiles that run together
     * then read about as many rows as rows of W, and L2 has both. */
    GROUP_ROWS = 16
};

/* What the two blocks of a cluster have in common. Of tiles one below the other it is W, of tiles side
 * by side the rows: each block fetches half of it and sends it to both. Or it is the tile, of which each
 * multiplies half of K: where tiles are few, wider ones read the rows less often. */
enum sharing { BELOW, BESIDE, HALVES };

/* A tile, and how blocks and warpgroups share. */
template <int T, int N, sharing SHARING, bool TOGETHER_> struct shape {
    static constexpr int TILE_T = T, TILE_N = N; /* rows; rows of W */
    /* Tiles of a cluster along T, and along N; pieces of K, of a block each. */
    static constexpr int BELOW_T = SHARING == BELOW ? CLUSTER : 1;
    static constexpr int BESIDE_N = SHARING == BESIDE ? CLUSTER : 1;
    static constexpr int CUTS_K = SHARING == HALVES ? CLUSTER : 1;
    /* Both warpgroups take 64 rows of one tile, and nobody multiplies while they write it. Else
     * they take turns by whole tile: one writes while the other has the tensor cores. */
    static constexpr bool TOGETHER = TOGETHER_;
    static constexpr int BLOCKS_64 = T / 64 / (TOGETHER ? 2 : 1); /* of 64 rows, a warpgroup's */
    static constexpr int SUMS = BLOCKS_64 * N / 2; /* of a thread, which has 232 registers */
    static constexpr int IN_BYTES = T * PANEL_ROW_BYTES;
    static constexpr int STAGE_BYTES = IN_BYTES + N * PANEL_ROW_BYTES;
    /* Sums that the other block hands over. */
    static constexpr int HANDED_BYTES = SHARING == HALVES ? 64 * N * 4 : 0;
    static constexpr int OTHER_BYTES = BARRIER_BYTES + PANEL_ALIGNMENT + HANDED_BYTES;
    static constexpr int STAGES = (SHARED_BYTES - OTHER_BYTES) / STAGE_BYTES;
    static constexpr int SHARED = STAGES * STAGE_BYTES + OTHER_BYTES;
    static constexpr int HEADS = N / (2 * SPAN); /* QKV: that a tile has a part of */
    /* QKV: in each of the parts that W's rows are fetched in. */
    static constexpr bool WHOLE_HEADS = N % (2 * SPAN * BELOW_T) == 0;
    /* Blocks that a stage's bytes go to, and warps of them that must have read it before it is filled
     * again. */
    static constexpr int FILLED = CLUSTER / CUTS_K, READERS = FILLED * (TOGETHER ? 8 : 4);
    static_assert(SHARING != HALVES || (TOGETHER && T == 128), "64 rows for either block");
    static_assert(T * BELOW_T <= CUDA_TILE_ROWS, "regions have whole tiles (model/plan.c)");
    static_assert(N % 16 == 0, "half of W's rows of a tile are whole groups of 8");
    static_assert(N >= CUDA_LEAST_TILE,
                  "REGION_SQUARES (model/plan.c) has room for every tile's part");
    static_assert(STAGES >= 3 && 8 * (2 * STAGES + 1) <= BARRIER_BYTES,
                  "the ring and its barriers fit");
};

/* The tiles of clusters, and how many clusters work through them. */
struct schedule {
    int steps;            /* of K, 64 each, that a block takes */
    int tiles_t, tiles_n; /* of clusters */
    int group;            /* rows of tiles */
    int workers;          /* clusters */
    int across;           /* QKV: tiles from the first head to the last */
};

/* A tile of this block: its first row, its column among all tiles, and the first unit. With QKV in
 * place of the latter SPAN dimensions that begin at `span`, those that turn with them, and the first
 * head: columns go through all heads, and then to the next dimensions. */
struct tile {
    int t, column, unit, span, head;
};

template <class S, enum epilogue E>
__device__ __forceinline__ tile tile_at(const schedule &schedule, int index, int rank) {
    const int of_group = schedule.group * schedule.tiles_n, group = index / of_group;
    const int height = min(schedule.group, schedule.tiles_t - group * schedule.group);
    const int rest = index - group * of_group, pair = rest / height;
    const int row = group * schedule.group + rest - pair * height;
    const int column = pair * S::BESIDE_N + (S::BESIDE_N > 1 ? rank : 0);
    tile tile = {};
    tile.t = (row * S::BELOW_T + rank % S::BELOW_T) * S::TILE_T;
    tile.column = column;
    tile.unit = column * (E == EPILOGUE_ACTIVATE ? S::TILE_N / 2 : S::TILE_N);
    if (E == EPILOGUE_QKV) {
        tile.span = column / schedule.across * SPAN;
        tile.head = column % schedule.across * S::HEADS;
    }
    return tile;
}

/* ---- before a product ---- */

/* What the sums of a thread's rows are to be multiplied by: t, t + 8, and of each further 64 rows the
 * same. Four lanes have a row. With a norm before the product they share its parts: each adds up every
 * fourth one. */
template <class S>
__device__ __forceinline__ void factors_of(const product &p, float (&factor)[S::BLOCKS_64][2],
                                           int t) {
    constexpr int ROWS = 2 * S::BLOCKS_64;
    float sums[ROWS] = {};
    const auto row = [&](int i) { return t + i / 2 * 64 + i % 2 * 8; };
#pragma unroll 8
    for (int part = (int)threadIdx.x % 4; p.squares && part < p.parts; part += 4)
#pragma unroll
        for (int i = 0; i < ROWS; i++)
            if (row(i) < p.T)
                sums[i] += __ldcg(p.squares + (size_t)part * p.squares_stride + row(i));
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        float &to = factor[i / 2][i % 2];
        to = p.scale && row(i) < p.T ? __ldcg(p.scale + row(i)) : 1.0f;
        if (!p.squares) continue;
        sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], 1);
        sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], 2);
        to = rsqrtf(sums[i] / (float)p.K + p.eps);
    }
}

/* ---- what follows a product ----
 *
 * Of rows t and t + 8, called half 0 and 1, a thread has two neighbouring sums in each octet of the
 * tile's columns (cuda_wgmma.cuh). */

/* Of two octets lanes pass each other pairs, so that each has four neighbouring columns, even lanes of the
 * first octet and odd ones of the second: as bf16 in two words, or as floats. A warp then reads or writes
 * 32 or 64 bytes of a row at once, with half as many instructions (down of the 8B model: 2 %). */
__device__ __forceinline__ uint2 four_of_pairs(uint32_t first, uint32_t second) {
    const bool odd = threadIdx.x % 2;
    const uint32_t other = __shfl_xor_sync(0xffffffffu, odd ? first : second, 1);
    return odd ? uint2{other, second} : uint2{first, other};
}
__device__ __forceinline__ float4 four_of_pairs(float2 first, float2 second) {
    const bool odd = threadIdx.x % 2;
    const float x = __shfl_xor_sync(0xffffffffu, odd ? first.x : second.x, 1);
    const float y = __shfl_xor_sync(0xffffffffu, odd ? first.y : second.y, 1);
    return odd ? float4{x, y, second.x, second.y} : float4{first.x, first.y, x, y};
}
/* Where they begin, from the first octet on: in the lane's octet, and in the two. */
__device__ __forceinline__ int octet_of_four() {
    return (int)threadIdx.x % 2 * 8;
}
__device__ __forceinline__ int column_of_four() {
    return octet_of_four() + (int)threadIdx.x % 4 / 2 * 4;
}

/* STORE: y = factor sums, columns from n on. PAIRS: two neighbours exist or do not, at a multiple of 8
 * bytes. */
template <class S, bool PAIRS>
__device__ __forceinline__ void store_rows(const product &p, const float (&sums)[S::TILE_N / 2],
                                           const float (&factor)[2], int t, int n) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float *const y = p.y + (size_t)(t + 8 * half) * p.y_stride + n;
        const int left = t + 8 * half < p.T ? p.N - n : 0;
#pragma unroll
        for (int octet = 0; octet < S::TILE_N / 8; octet++) {
            const float *sum = sums + 4 * octet + 2 * half;
            const float2 value = {factor[half] * sum[0], factor[half] * sum[1]};
            float *const to = y + 8 * octet;
            if (PAIRS) {
                if (left > 8 * octet) *(float2 *)to = value;
            } else {
                if (left > 8 * octet) to[0] = value.x;
                if (left > 8 * octet + 1) to[1] = value.y;
            }
        }
    }
}

/* The same number, but the assembler does not know: loads from a row and stores to the same one keep
 * their order. Else it asks for one value after the other, each when the one before has been stored. */
__device__ __forceinline__ int unknown(int row) {
    return __shfl_sync(0xffffffffu, row, (int)threadIdx.x % 32);
}

/* ADD: what a thread's results are added to, in rounds of BATCH fours of one row. A round is asked for
 * DEPTH - 1 rounds ahead, the first ones before the tile's products (with HALVES, where registers are
 * short, after them); all of them then, where registers hold it. */
template <class S> struct residual {
    static constexpr int FOURS = S::TILE_N / 16;
    static constexpr int BATCH = S::CUTS_K > 1 ? 1 : 4;
    static constexpr int OF_ROW = (FOURS + BATCH - 1) / BATCH, ROUNDS = 2 * S::BLOCKS_64 * OF_ROW;
    static constexpr int DEPTH = S::SUMS <= 64 ? ROUNDS : S::CUTS_K > 1 ? 4 : 2;
    float4 y[DEPTH][BATCH];
    /* Where a round is: its row, from the thread's first on, and its first four. */
    static __device__ __forceinline__ int row(int round) {
        return round / OF_ROW / 2 * 64 + round / OF_ROW % 2 * 8;
    }
    static __device__ __forceinline__ int four(int round) { return round % OF_ROW * BATCH; }
    __device__ __forceinline__ void ask(const product &p, int t, const tile &tile, int round) {
        const int columns = t + row(round) < p.T ? p.N - tile.unit - octet_of_four() : 0;
        const float *from =
            p.y + (size_t)(t + row(round)) * p.y_stride + tile.unit + column_of_four();
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const int at = 16 * (four(round) + i);
            const bool inside = at < S::TILE_N && at < columns;
            y[round % DEPTH][i] = inside ? __ldcg((const float4 *)(from + at)) : float4{0, 0, 0, 0};
        }
    }
    __device__ __forceinline__ void ask_first(const product &p, int t, const tile &tile) {
#pragma unroll
        for (int round = 0; round < (DEPTH < ROUNDS ? DEPTH - 1 : ROUNDS); round++)
            ask(p, t, tile, round);
    }
};

/* ADD: y += factor sums. Of the norm that follows, next = y gamma, and the sums of squares of the
 * tile's columns. */
template <class S>
__device__ __forceinline__ void add_tile(const product &p,
                                         const float (&sums)[S::BLOCKS_64][S::TILE_N / 2],
                                         const float (&factor)[S::BLOCKS_64][2],
                                         residual<S> &before, int t, const tile &tile) {
    using R = residual<S>;
    const int n = tile.unit + column_of_four();
    float squares = 0;
#pragma unroll
    for (int round = 0; round < R::ROUNDS; round++) {
        if (R::DEPTH < R::ROUNDS && round + R::DEPTH - 1 < R::ROUNDS)
            before.ask(p, t, tile, round + R::DEPTH - 1);
        const int row = t + R::row(round), half = R::row(round) / 8 % 2, block = R::row(round) / 64;
        const int columns = row < p.T ? p.N - tile.unit - octet_of_four() : 0;
        float *const y = p.y + (size_t)unknown(row) * p.y_stride + n;
        bf16 *const next = (bf16 *)p.next + (size_t)row * p.N + n;
        float4 gamma[R::BATCH], (&value)[R::BATCH] = before.y[round % R::DEPTH];
#pragma unroll
        for (int i = 0; i < R::BATCH && R::four(round) + i < R::FOURS; i++) {
            const int at = 16 * (R::four(round) + i);
            const bool inside = p.gamma && at < columns;
            gamma[i] = inside ? *(const float4 *)(p.gamma + n + at) : float4{0, 0, 0, 0};
        }
#pragma unroll
        for (int i = 0; i < R::BATCH && R::four(round) + i < R::FOURS; i++) {
            const int at = 16 * (R::four(round) + i);
            const float *sum = sums[block] + at / 2 + 2 * half;
            const float4 four = four_of_pairs(float2{sum[0], sum[1]}, float2{sum[4], sum[5]});
            float4 &v = value[i];
            v.x += factor[block][half] * four.x, v.y += factor[block][half] * four.y;
            v.z += factor[block][half] * four.z, v.w += factor[block][half] * four.w;
            if (at >= columns) continue;
            squares += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
            *(float4 *)(y + at) = v;
        }
#pragma unroll
        for (int i = 0; i < R::BATCH && R::four(round) + i < R::FOURS; i++) {
            const int at = 16 * (R::four(round) + i);
            const float4 v = value[i], g = gamma[i];
            if (p.gamma && at < columns)
                *(uint2 *)(next + at) = {pack_halves(v.x * g.x, v.y * g.y),
                                         pack_halves(v.z * g.z, v.w * g.w)};
        }
        if ((round + 1) % R::OF_ROW) continue;
        squares += __shfl_xor_sync(0xffffffffu, squares, 1);
        squares += __shfl_xor_sync(0xffffffffu, squares, 2);
        if (p.gamma && row < p.T && threadIdx.x % 4 == 0)
            p.next_squares[(size_t)tile.column * p.squares_stride + row] = squares;
        squares = 0;
    }
}

/* h = act(gate) up, of two columns. */
__device__ __forceinline__ uint32_t activate_pair(const float *gate, const float *up, float factor,
                                                  bool gelu) {
    return pack_halves(activate(factor * gate[0], gelu) * (factor * up[0]),
                       activate(factor * gate[1], gelu) * (factor * up[1]));
}

/* ACTIVATE: h, columns from `unit` on: gate is the sums' first half, up the second. */
template <class S>
__device__ __forceinline__ void activate_rows(const product &p, const float (&sums)[S::TILE_N / 2],
                                              const float (&factor)[2], int t, int unit) {
    constexpr int OCTETS = S::TILE_N / 16, UP = S::TILE_N / 4;
    const int F = p.N / 2, four = unit + column_of_four();
    const bool gelu = p.activation == GELU_TANH;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        bf16 *const h = (bf16 *)p.h + (size_t)(t + half * 8) * F;
        const int columns = t + half * 8 < p.T ? F : 0;
#pragma unroll
        for (int octet = 0; octet + 1 < OCTETS; octet += 2) {
            const float *gate = sums + 4 * octet + 2 * half;
            const uint2 values =
                four_of_pairs(activate_pair(gate, gate + UP, factor[half], gelu),
                              activate_pair(gate + 4, gate + 4 + UP, factor[half], gelu));
            const int column = four + octet * 8;
            if (column < columns) *(uint2 *)(h + column) = values;
        }
        if (OCTETS % 2) {
            constexpr int LAST = OCTETS - 1;
            const float *gate = sums + 4 * LAST + 2 * half;
            const uint32_t pair = activate_pair(gate, gate + UP, factor[half], gelu);
            const int column = unit + LAST * 8 + (int)threadIdx.x % 4 * 2;
            if (column < columns) *(uint32_t *)(h + column) = pair;
        }
    }
}

/* QKV: of a row, cosines and sines for the thread's two pairs of dimensions, and where its position
 * lies in the cache. Asked for before the tile's products, if these leave so many registers. */
struct row_turn {
    static constexpr int MOST_SUMS = 128;
    float2 cosines[2], sines[2];
    size_t place;
    __device__ __forceinline__ void ask(const product &p, int row, const tile &tile) {
        const heads &h = p.heads;
        const bool inside = row < p.T && tile.span < h.half;
        const float *from =
            h.rope + (size_t)row * 2 * h.half + tile.span + (int)threadIdx.x % 4 * 2;
#pragma unroll
        for (int octet = 0; octet < 2; octet++) {
            const bool turns = inside && h.rope;
            const float2 none = {0, 0};
            cosines[octet] = turns ? __ldcg((const float2 *)(from + 8 * octet)) : none;
            sines[octet] = turns ? __ldcg((const float2 *)(from + h.half + 8 * octet)) : none;
        }
        place = 0;
        if (!inside) return;
        place = (size_t)__ldcg(h.slots + row) * h.G * h.R +
                (size_t)place_in_ring(__ldcg(h.positions + row), h.R);
    }
};

/* QKV: SPAN pairs of dimensions of HEADS heads. Of each head the sums of 2 octets, and then of the 2
 * that turn with them. */
template <class S>
__device__ __forceinline__ void heads_rows(const product &p, const float (&sums)[S::TILE_N / 2],
                                           const float (&factor)[2], row_turn (&turns)[2], int t,
                                           const tile &tile) {
    const heads &h = p.heads;
    const int four = tile.span + column_of_four();
    if (tile.span >= h.half) return; /* the last of an odd number of columns */
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = t + 8 * half;
        row_turn &turn = turns[half];
        if (S::SUMS > row_turn::MOST_SUMS) turn.ask(p, row, tile);
#pragma unroll
        for (int i = 0; i < S::HEADS; i++) {
            const int head = tile.head + i;
            if (head >= h.H + 2 * h.G) break;
            const bool query = head < h.H, value = head >= h.H + h.G, still = value || !h.rope;
            const int g = head - h.H - (value ? h.G : 0); /* of what is no query */
            uint32_t low[2], high[2];
#pragma unroll
            for (int octet = 0; octet < 2; octet++) {
                const float *sum = sums + 16 * i + 4 * octet + 2 * half;
                float2 a = {factor[half] * sum[0], factor[half] * sum[1]};
                float2 b = {factor[half] * sum[8], factor[half] * sum[9]};
                if (h.bias) {
                    const float *bias = h.bias + (size_t)head * h.D + tile.span + 8 * octet +
                                        (int)threadIdx.x % 4 * 2;
                    const float2 low = *(const float2 *)bias;
                    const float2 high = *(const float2 *)(bias + h.half);
                    a.x += low.x, a.y += low.y, b.x += high.x, b.y += high.y;
                }
                const float2 c = turn.cosines[octet], s = turn.sines[octet];
                const float2 x = {a.x * c.x - b.x * s.x, a.y * c.y - b.y * s.y};
                const float2 y = {b.x * c.x + a.x * s.x, b.y * c.y + a.y * s.y};
                low[octet] = still ? pack_halves(a.x, a.y) : pack_halves(x.x, x.y);
                high[octet] = still ? pack_halves(b.x, b.y) : pack_halves(y.x, y.y);
            }
            bf16 *const to =
                query ? (bf16 *)h.q + ((size_t)row * h.H + head) * h.D
                      : (bf16 *)(value ? h.values : h.keys) + ((size_t)g * h.R + turn.place) * h.D;
            const uint2 lows = four_of_pairs(low[0], low[1]);
            const uint2 highs = four_of_pairs(high[0], high[1]);
            if (row < p.T) *(uint2 *)(to + four) = lows, *(uint2 *)(to + four + h.half) = highs;
        }
    }
}

/* HEADS: the tile's columns are one head, of which four lanes have a row, each lane both dims of a pair that
 * turns. q and k: RMSNorm, then RoPE. */
template <class S>
__device__ __forceinline__ void normed_head_rows(const product &p,
                                                 const float (&sums)[S::TILE_N / 2],
                                                 const float (&factor)[2], int t,
                                                 const tile &tile) {
    constexpr int D = S::TILE_N, HALF = D / 2;
    const heads &h = p.heads;
    const int head = tile.unit / D, column = (int)threadIdx.x % 4 * 2;
    const bool query = head < h.H, value = head >= h.H + h.G, still = value || !h.rope;
    const float *norm = (query ? h.norm_q : h.norm_k) + column;
    if (tile.unit >= p.N) return; /* the last of an odd number of columns */
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = t + 8 * half, known = min(row, p.T - 1);
        const float *turns = h.rope + (size_t)known * D + column, *sum = sums + 2 * half;
        float squares = 0;
#pragma unroll
        for (int i = 0; i < D / 2; i += 4) squares += sum[i] * sum[i] + sum[i + 1] * sum[i + 1];
        squares += __shfl_xor_sync(0xffffffffu, squares, 1);
        squares += __shfl_xor_sync(0xffffffffu, squares, 2);
        const float f = factor[half];
        const float scale = value ? f : f * rsqrtf(f * f * squares / (float)D + p.eps);
        const int g = head - h.H - (value ? h.G : 0); /* of what is no query */
        const size_t place = ((size_t)__ldcg(h.slots + known) * h.G + g) * h.R +
                             (size_t)place_in_ring(__ldcg(h.positions + known), h.R);
        bf16 *const to = (query ? (bf16 *)h.q + ((size_t)row * h.H + head) * D
                                : (bf16 *)(value ? h.values : h.keys) + place * D) +
                         column_of_four();
#pragma unroll
        for (int first = 0; first < HALF; first += 16) { /* dims */
            uint32_t low[2], high[2];
#pragma unroll
            for (int k = 0; k < 2; k++) {
                const int dim = first + 8 * k;
                const float *x = sum + dim / 2, *y = x + HALF / 2;
                const float2 one = {1, 1}, none = {0, 0};
                const float2 v = value ? one : *(const float2 *)(norm + dim);
                const float2 w = value ? one : *(const float2 *)(norm + dim + HALF);
                const float2 c = still ? one : __ldcg((const float2 *)(turns + dim));
                const float2 s = still ? none : __ldcg((const float2 *)(turns + dim + HALF));
                const float2 a = {scale * x[0] * v.x, scale * x[1] * v.y};
                const float2 b = {scale * y[0] * w.x, scale * y[1] * w.y};
                low[k] = pack_halves(a.x * c.x - b.x * s.x, a.y * c.y - b.y * s.y);
                high[k] = pack_halves(b.x * c.x + a.x * s.x, b.y * c.y + a.y * s.y);
            }
            const uint2 lows = four_of_pairs(low[0], low[1]);
            const uint2 highs = four_of_pairs(high[0], high[1]);
            if (row < p.T) *(uint2 *)(to + first) = lows, *(uint2 *)(to + first + HALF) = highs;
        }
    }
}

} // namespace

#endif
