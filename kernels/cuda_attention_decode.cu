/* Attention of steps of few rows, each with its own slot and position. */
#include "kernels/cuda.cuh"
#include "kernels/cuda.h"

/* ---- configuration ---- */

enum {
    TILE = 16, /* positions that a warp takes at a time: the depth of the second product */
    HEADS = 8, /* query heads of a block: the columns of the second product */
    /* Blocks for each multiprocessor, at most, in a step of several rows: where their positions
     * differ, the long rows still fill the device, and blocks without work cost little. One row has
     * at most one block for each: with two on some, the next kernels' blocks double up as well. */
    BLOCKS = 4,
    PART_ROUND = 64, /* positions of a part are a multiple of this */
    BATCH = 8        /* parts that a thread reads at once when it merges them */
};

/* Scores may exceed the maximum that the sums are relative to by so many powers of two before the
 * sums are scaled anew: 2^8 is far from overflow, and few tiles after the first pay for it. */
static constexpr float SLACK = 8.0f;

/* Warps and ring by head size. A warp's ring holds `depth` tiles, K and V in turn. About 64 KB
 * are under way on a multiprocessor: 4.6 TB/s for 1.2 us ask for 42 KB, and much more would only
 * queue ahead of other loads. Below half of the shared memory, so that the next kernel's block fits
 * beside it. */
template <int D> struct geometry {
    static_assert(D % 16 == 0 && D >= 16 && D <= 256, "steps of the tensor cores; registers");
    static constexpr int warps = D > 128 ? 4 : 8;
    static constexpr int depth = D > 96 ? 2 : D > 64 ? 3 : 4;
    static constexpr int threads = 32 * warps;
    static constexpr int row_bytes = 2 * D + 16; /* an odd number of 16 bytes: no bank conflicts */
    static constexpr int tile_bytes = TILE * row_bytes;
    static constexpr int ring_bytes = depth * tile_bytes;
    static constexpr int shared_bytes = warps * ring_bytes;
    /* A result, f32 [HEADS, D + 4]: D sums of weighted values, the maximum, the sum of the weights;
     * all relative to 2^maximum. D + 4: no bank conflicts. It lies where a warp's ring was. */
    static constexpr int record = D + 4;
    static constexpr int result = ring_bytes / 4;
    static_assert(HEADS * record <= result, "a result takes the place of a ring");
    static_assert(shared_bytes <= 99 * 1024, "what a block may take from sm_80 on");
};

/* ---- what a block works on ---- */

/* Part `index` of `count` of a row: positions begin to end - 1, for heads from `head` on. */
struct part {
    int row, index, count, begin, end;
    int kv_head, head, heads;
};

static __host__ __device__ __forceinline__ int divide_up(int n, int by) {
    return (n + by - 1) / by;
}

/* The work of this block, from its row's position alone: the grid is the same for all of them. */
static __device__ __forceinline__ struct part part_of_block(const struct cuda_attention &a,
                                                            int position) {
    const int ratio = a.H / a.G, sets = divide_up(ratio, HEADS), set = blockIdx.y % sets;
    const int length = position + 1, share = divide_up(length, gridDim.x);
    const int size = max((int)CUDA_PART_POSITIONS, divide_up(share, PART_ROUND) * PART_ROUND);
    struct part p;
    p.row = blockIdx.z;
    p.index = blockIdx.x;
    p.count = divide_up(length, size);
    p.begin = p.index * size;
    p.end = min(length, p.begin + size);
    p.kv_head = blockIdx.y / sets;
    p.head = p.kv_head * ratio + set * HEADS;
    p.heads = min((int)HEADS, ratio - set * HEADS);
    return p;
}

/* ---- one tile, by one warp ---- */

/* Requests a tile of K or V: rows from `from` on, of which `valid` exist; zeros for the others. */
template <int D>
static __device__ __forceinline__ void request_tile(uint32_t to, const bf16 *from, int valid) {
    constexpr int CHUNKS = D / 8;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < TILE * CHUNKS / 32; i++) {
        const int chunk = lane + 32 * i;
        copy_async_16(to + 16 * (chunk + chunk / CHUNKS), from + 8 * chunk, chunk < valid * CHUNKS);
    }
}

/* The queries as the first operand: heads in rows 0 to 7, nothing in rows 8 to 15. */
template <int D>
static __device__ __forceinline__ void load_queries(uint32_t queries[D / 16][2], const bf16 *q,
                                                    int heads) {
    const int lane = threadIdx.x % 32, head = lane / 4;
#pragma unroll
    for (int i = 0; i < D / 8; i++)
        queries[i / 2][i % 2] =
            head < heads ? __ldcg((const unsigned *)(q + (size_t)head * D + 8 * i + 2 * (lane % 4)))
                         : 0;
}

/* q k of head l/4 at positions 2 (l%4), +1, +8, +9 of the tile. keys: this lane's address for
 * ldmatrix. */
template <int D>
static __device__ __forceinline__ void score_tile(float scores[4],
                                                  const uint32_t queries[D / 16][2],
                                                  uint32_t keys) {
    float sums[2][2][4] = {}; /* even and odd steps, lower and upper positions: shorter chains */
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
        uint32_t k[4];
        load_matrices(k, keys + 32 * i);
        const uint32_t q[4] = {queries[i][0], 0, queries[i][1], 0};
        multiply_add(sums[i % 2][0], q, k[0], k[1]);
        multiply_add(sums[i % 2][1], q, k[2], k[3]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) scores[i] = sums[0][i / 2][i % 2] + sums[1][i / 2][i % 2];
}

/* Scores, in powers of two, of the tile's `valid` positions become weights relative to 2^maximum.
 * Lane l keeps maximum and sum (of its own positions) of head l/4; found has heads 2 (l%4), +1. */
template <int D>
static __device__ __forceinline__ void weigh_tile(float weights[4], int valid, float &maximum,
                                                  float &sum, float found[D / 16][4]) {
    const int lane = threadIdx.x % 32;
    if (valid < TILE) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (2 * (lane % 4) + i % 2 + i / 2 * 8 >= valid) weights[i] = -INFINITY;
    }
    float highest = fmaxf(fmaxf(weights[0], weights[1]), fmaxf(weights[2], weights[3]));
    if (__any_sync(0xffffffffu, highest > maximum + SLACK)) {
        highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 1));
        highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 2));
        highest = fmaxf(highest, maximum);
        const float factor = exp2_fast(maximum - highest);
        const float even = __shfl_sync(0xffffffffu, factor, lane % 4 * 8);
        const float odd = __shfl_sync(0xffffffffu, factor, lane % 4 * 8 + 4);
        maximum = highest;
        sum *= factor;
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
            found[i][0] *= even, found[i][1] *= odd;
            found[i][2] *= even, found[i][3] *= odd;
        }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) weights[i] = exp2_fast(weights[i] - maximum);
    sum += (weights[0] + weights[1]) + (weights[2] + weights[3]);
}

/* found[D, HEADS] += V^T [D, TILE] P^T [TILE, HEADS]. The weights lie as the second operand wants
 * them; they are split into two bf16 each, so that they are good to 16 bits. values: as keys. */
template <int D>
static __device__ __forceinline__ void add_values(float found[D / 16][4], const float weights[4],
                                                  uint32_t values) {
    uint32_t high[2], low[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float first = weights[2 * i], second = weights[2 * i + 1];
        high[i] = pack_halves(first, second);
        low[i] = pack_halves(first - low_half(high[i]), second - high_half(high[i]));
    }
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
        uint32_t v[4];
        load_matrices_transposed(v, values + 32 * i);
        multiply_add(found[i], v, high[0], high[1]);
        multiply_add(found[i], v, low[0], low[1]);
    }
}

/* ---- merging ---- */

/* A warp's result into shared memory. */
template <int D>
static __device__ __forceinline__ void store_result(float *result, float maximum, float sum,
                                                    const float found[D / 16][4]) {
    constexpr int RECORD = geometry<D>::record;
    const int lane = threadIdx.x % 32, row = lane / 4, column = 2 * (lane % 4);
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    if (lane % 4 == 0) *(float2 *)(result + row * RECORD + D) = make_float2(maximum, sum);
#pragma unroll
    for (int i = 0; i < D / 16; i++)
#pragma unroll
        for (int k = 0; k < 4; k++)
            result[(column + k % 2) * RECORD + 16 * i + row + k / 2 * 8] = found[i][k];
}

/* Four neighbouring dims of one head. */
struct merged {
    float maximum, sum;
    float4 values;
};

static __device__ __forceinline__ void add_scaled(float4 &to, float factor, float4 x) {
    to.x += factor * x.x, to.y += factor * x.y;
    to.z += factor * x.z, to.w += factor * x.w;
}

/* The first `count` results in shared memory, in their order. */
template <int D>
static __device__ __forceinline__ struct merged merge_results(const float *results, int count,
                                                              int head, int dim) {
    constexpr int RESULT = geometry<D>::result;
    const float *record = results + head * geometry<D>::record;
    struct merged m = {-INFINITY, 0.0f, make_float4(0.0f, 0.0f, 0.0f, 0.0f)};
#pragma unroll
    for (int i = 0; i < geometry<D>::warps; i++)
        if (i < count) m.maximum = fmaxf(m.maximum, record[i * RESULT + D]);
#pragma unroll
    for (int i = 0; i < geometry<D>::warps; i++)
        if (i < count) {
            const float2 sums = *(const float2 *)(record + i * RESULT + D);
            const float factor = exp2_fast(sums.x - m.maximum);
            m.sum += factor * sums.y;
            add_scaled(m.values, factor, *(const float4 *)(record + i * RESULT + dim));
        }
    return m;
}

/* The block's output, complete. */
template <int D>
static __device__ __forceinline__ void write_out(const struct cuda_attention &a,
                                                 const struct part &p, const float *results,
                                                 int count) {
    bf16 *out = (bf16 *)a.out + ((size_t)p.row * a.H + p.head) * D;
#pragma unroll 1
    for (int i = 4 * threadIdx.x; i < p.heads * D; i += 4 * geometry<D>::threads) {
        const struct merged m = merge_results<D>(results, count, i / D, i % D);
        const float factor = 1.0f / m.sum;
        *(uint2 *)(out + i) = make_uint2(pack_halves(m.values.x * factor, m.values.y * factor),
                                         pack_halves(m.values.z * factor, m.values.w * factor));
    }
}

/* A row's parts: f32 [CUDA_PARTS, H, D] of values, then [CUDA_PARTS, H, 2] of maximum and sum. Both
 * point at part 0 of the block's first head; the next part lies H D floats, or H pairs, on. */
struct part_store {
    float *values;
    float2 *sums;
};

template <int D>
static __device__ __forceinline__ struct part_store parts_of(const struct cuda_attention &a,
                                                             const struct part &p) {
    float *row = a.parts + (size_t)p.row * CUDA_PARTS * a.H * (D + 2);
    struct part_store store;
    store.values = row + p.head * D;
    store.sums = (float2 *)(row + (size_t)CUDA_PARTS * a.H * D) + p.head;
    return store;
}

template <int D>
static __device__ __forceinline__ void write_part(const struct cuda_attention &a,
                                                  const struct part &p, const float *results,
                                                  int count) {
    const struct part_store parts = parts_of<D>(a, p);
    float *values = parts.values + (size_t)p.index * a.H * D;
    float2 *sums = parts.sums + p.index * a.H;
#pragma unroll 1
    for (int i = 4 * threadIdx.x; i < p.heads * D; i += 4 * geometry<D>::threads) {
        const struct merged m = merge_results<D>(results, count, i / D, i % D);
        *(float4 *)(values + i) = m.values;
        if (i % D == 0) sums[i / D] = make_float2(m.maximum, m.sum);
    }
}

/* Whether this block is the last of its row and heads to have written its part. */
static __device__ __forceinline__ bool last_to_write(const struct cuda_attention &a,
                                                     const struct part &p) {
    __threadfence(); /* this thread's share of the part, before the count */
    __syncthreads(); /* every thread's share, before the count */
    bool last = false;
    if (threadIdx.x == 0) {
        unsigned *counter = a.counters + blockIdx.z * gridDim.y + blockIdx.y;
        last = atomicInc(counter, p.count - 1) == (unsigned)(p.count - 1); /* and back to zero */
    }
    /* results, read by write_part, before read_parts writes over them; and everyone learns it */
    last = __syncthreads_or(last);
    if (last) __threadfence(); /* the count, before the other parts are read */
    return last;
}

/* Parts first, first + step, ..., BATCH of them at most, merged into m; their reads overlap. */
static __device__ __forceinline__ void add_parts(struct merged &m, const float *values,
                                                 const float2 *sums, int first, int step, int count,
                                                 int heads, int head_dim) {
    float2 other[BATCH];
    float4 x[BATCH];
    const float before = m.maximum;
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
        const int index = first + i * step;
        other[i] = make_float2(-INFINITY, 0.0f);
        x[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (index < count) {
            other[i] = __ldcg(sums + index * heads);
            x[i] = __ldcg((const float4 *)(values + (size_t)index * heads * head_dim));
        }
    }
#pragma unroll
    for (int i = 0; i < BATCH; i++) m.maximum = fmaxf(m.maximum, other[i].x);
    const float factor = exp2_fast(before - m.maximum);
    m.sum *= factor;
    m.values.x *= factor, m.values.y *= factor, m.values.z *= factor, m.values.w *= factor;
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
        const float weight = exp2_fast(other[i].x - m.maximum);
        m.sum += weight * other[i].y;
        add_scaled(m.values, weight, x[i]);
    }
}

/* All parts of the row into shared memory as results, whose number it returns: groups of threads
 * take parts in turn, each thread four dims of one head. */
template <int D>
static __device__ __forceinline__ int read_parts(const struct cuda_attention &a,
                                                 const struct part &p, float *results) {
    constexpr int THREADS = geometry<D>::threads;
    const struct part_store parts = parts_of<D>(a, p);
    const int quads = p.heads * D / 4;
    const int groups = max(1, min((int)geometry<D>::warps, THREADS / quads));
#pragma unroll 1
    for (int item = threadIdx.x; item < groups * quads; item += THREADS) {
        const int group = item / quads, at = 4 * (item % quads), head = at / D;
        struct merged m = {-INFINITY, 0.0f, make_float4(0.0f, 0.0f, 0.0f, 0.0f)};
#pragma unroll 1
        for (int first = group; first < p.count; first += BATCH * groups)
            add_parts(m, parts.values + at, parts.sums + head, first, groups, p.count, a.H, D);
        float *record = results + group * geometry<D>::result + head * geometry<D>::record;
        *(float4 *)(record + at % D) = m.values;
        if (at % D == 0) *(float2 *)(record + D) = make_float2(m.maximum, m.sum);
    }
    return groups;
}

/* ---- the kernel ---- */

/* out[t, h] = softmax(scale q[t, h] K^T) V over positions 0 to positions[t] of slot slots[t].
 * In, out   q bf16 [T, H, D], out bf16 [T, H, D], K and V bf16 [slots, G, S, D]; nothing aliases.
 * Grid      (parts, G x sets of up to HEADS heads, T). A block owns one part of a row's
 *           positions for one set; its warps take tiles of TILE positions in turn. The last block
 *           of a row and set merges the parts, in their order. Blocks past the last part only wait.
 * Tensor    S[heads, positions] = Q K^T leaves the weights in the registers where P^T is the second
 * cores     operand of O^T[D, heads] = V^T P^T: nothing moves between lanes, and the sums of 8
 *           heads take D / 4 registers. As first operand, P would fill half its rows: twice that.
 * Shared    a ring of tiles for each warp (cp.async, no barrier but the warp's); later the results.
 * Registers half of the multiprocessor's at most, so that the next kernel's block fits beside.
 * Bound     bytes of K and V, read once for each set. Short rows: latency, so old tiles are
 *           requested before the wait; only the newest T positions may be of this step.
 * Numerics  f32 sums, weights to 16 bits, 2^x with scale log2(e) folded in. Positions past the
 *           row's own are neither read nor counted; a row has one position at least. NaN stays NaN.
 * Needs     a kernel of this step that waited before it let others start, so that slots, positions
 *           and the older cache can be read before the wait. Rows of one step that share a slot are
 *           consecutive positions. */
template <int D>
static __global__ void __launch_bounds__(geometry<D>::threads, 2)
    attention_decode(const __grid_constant__ struct cuda_attention a) {
    using shape = geometry<D>;
    start_dependents();
    const int position = __ldcg(a.positions + blockIdx.z);
    const struct part p = part_of_block(a, position);
    if (p.index >= p.count) {
        wait_for_inputs();
        return;
    }
    extern __shared__ __align__(128) char shared[];
    float *results = (float *)shared;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t ring = shared_address(shared) + warp * shape::ring_bytes;
    const size_t start = ((size_t)__ldcg(a.slots + p.row) * a.G + p.kv_head) * a.S * D;
    const bf16 *keys = (const bf16 *)a.keys + start, *values = (const bf16 *)a.values + start;
    const int tiles = divide_up(p.end - p.begin, TILE);

    /* Item 2n is K, 2n + 1 is V of this warp's tile n. Each item is one group of copies, empty past
     * the last tile, so that the number of groups under way tells which item has come. */
    auto tile_begin = [&](int n) { return p.begin + (warp + n * shape::warps) * TILE; };
    auto request = [&](int item) {
        const int begin = tile_begin(item / 2);
        if (begin < p.end)
            request_tile<D>(ring + item % shape::depth * shape::tile_bytes,
                            (item % 2 ? values : keys) + (size_t)begin * D, p.end - begin);
        copy_async_commit();
    };
    const int older = position - (a.T - 1); /* positions below were written before this step */
    int item = 0;
#pragma unroll 1
    for (; item < shape::depth && tile_begin(item / 2) + TILE <= older; item++) request(item);
    wait_for_inputs();
    uint32_t queries[D / 16][2];
    load_queries<D>(queries, (const bf16 *)a.q + ((size_t)p.row * a.H + p.head) * D, p.heads);
#pragma unroll 1
    for (; item < shape::depth; item++) request(item);

    const float scale = a.scale * 1.4426950408889634f;
    const uint32_t row =
        (lane % 8 + lane / 16 * 8) * shape::row_bytes + lane / 8 % 2 * 16; /* ldmatrix */
    float found[D / 16][4] = {}, maximum = -INFINITY, sum = 0.0f;
#pragma unroll 1
    for (int n = 0; tile_begin(n) < p.end; n++) {
        float weights[4];
        copy_async_wait<shape::depth - 1>();
        __syncwarp(); /* all lanes' copies of K, before it is read */
        score_tile<D>(weights, queries, ring + 2 * n % shape::depth * shape::tile_bytes + row);
        __syncwarp(); /* K is read, before its place is taken */
        request(2 * n + shape::depth);
#pragma unroll
        for (int i = 0; i < 4; i++) weights[i] *= scale;
        weigh_tile<D>(weights, p.end - tile_begin(n), maximum, sum, found);
        copy_async_wait<shape::depth - 1>();
        __syncwarp(); /* all lanes' copies of V, before it is read */
        add_values<D>(found, weights, ring + (2 * n + 1) % shape::depth * shape::tile_bytes + row);
        __syncwarp(); /* V is read, before its place is taken, by a tile or by the result */
        request(2 * n + 1 + shape::depth);
    }

    store_result<D>(results + warp * shape::result, maximum, sum, found);
    __syncthreads(); /* the warps' results are written, before they are merged */
    int count = min((int)shape::warps, tiles);
    if (p.count > 1) {
        write_part<D>(a, p, results, count);
        if (!last_to_write(a, p)) return;
        count = read_parts<D>(a, p, results);
        __syncthreads(); /* the groups' results are written, before they are merged */
    }
    write_out<D>(a, p, results, count);
}

/* ---- the launcher ---- */

/* Parts of each row: for one row the device once over, for several BLOCKS times at most. Where
 * there are parts to merge, T x sets counters are used, at most BLOCKS x multiprocessors / 2. */
static int parts_for(const struct cuda_backend *b, int sets, int T) {
    const int alone = b->multiprocessors / sets;
    const int together = BLOCKS * b->multiprocessors / (sets * T);
    return max(1, min((int)CUDA_PARTS, min(alone, together)));
}

template <int D> static void launch(struct cuda_backend *b, const struct cuda_attention *a) {
    const int sets = a->G * divide_up(a->H / a->G, HEADS);
    const dim3 grid(parts_for(b, sets, a->T), sets, a->T);
    const size_t counters = grid.x > 1 ? (size_t)sets * a->T : 0;
    if (a->T < 1 || a->T > CUDA_DECODE_ROWS || a->H % a->G != 0 || counters > CUDA_COUNTERS) {
        cuda_launch_failed(b, "attention_decode", grid, geometry<D>::threads,
                           geometry<D>::shared_bytes, cudaErrorInvalidValue);
        return;
    }
    cuda_launch(b, "attention_decode", attention_decode<D>, grid, geometry<D>::threads,
                geometry<D>::shared_bytes, *a);
}

bool cuda_attention_decode_takes(int D) {
    return D == 64 || D == 80 || D == 96 || D == 128 || D == 256;
}

void cuda_attention_decode(struct cuda_backend *b, const struct cuda_attention *a) {
    switch (a->D) {
    case 64: launch<64>(b, a); return;
    case 80: launch<80>(b, a); return;
    case 96: launch<96>(b, a); return;
    case 128: launch<128>(b, a); return;
    case 256: launch<256>(b, a); return;
    default:
        cuda_launch_failed(b, "attention_decode: no such head size", dim3(), 0, (size_t)a->D,
                           cudaErrorInvalidValue);
    }
}
