/* Attention of a prompt or a chunk of one on Hopper (sm_90a alone), bf16: wgmma, the copy engine.
 *
 * What      out[t, h] = softmax(scale q[t, h] . K) V over the positions up to positions[0] + t that a
 *           row sees of slot slots[0]; head h reads the cache of head h G / H.
 *           q, out bf16 [T, H, D]; keys, values bf16 [slots, G, R, D].
 * Bound     the card's power: 4 H D FLOPs for each pair of a row and a position that it sees.
 *           TFLOP/s on an H200, 32/8 heads, at 512, 2048, 8192 and 32768 positions: 196, 552, 725,
 *           687 (D = 128); 121, 369, 521, 511 (D = 64). 16/8 heads of 256, 4096 positions: 549. The
 *           last 2048 rows of 32768 (D = 128): 641.
 * Tile      a warpgroup owns 64 queries: 64 / (H/G) rows of all H/G heads of a group, row by row,
 *           which one box of the copy engine brings. So they all end at nearly the same position:
 *           only a tile's last blocks, and with a window its first ones, need a mask, and of the last
 *           one the right half is skipped where no row sees it. Three warpgroups share each block of K
 *           and V; two where tiles are few. Where H/G does not divide 64, queries idle (7: 63 of 64 work).
 * Warps     consumers   S = Q K^T from shared memory, softmax in registers, P = bf16(S) takes over
 *                       S's registers and is an operand of O += P V. Nothing overlaps within a
 *                       warpgroup: the three hide each other. That is why three fit: 64 sums of S
 *                       and 64 of O leave 32 registers of 160.
 *           producer    one thread draws tiles from a counter, longest first, and copies Q, then K
 *                       and V from a tile's last block to its first; it runs ahead into the next.
 *           cleaner     one warp: rows of V that some rows of the tile do not see (Numerics). It is
 *                       done before the scores of their block are weighed.
 * Memory    Q twice, so that the next tile's is there in time; the result leaves through the memory
 *           its Q came in. K and V in two stages each (D = 256: V in one). Panels of 64 columns,
 *           whose chunks of 16 bytes the copy engine swizzles. D = 128: 224 KB; D = 64: 112 KB.
 * Registers 160 a consumer thread and 32 a producer thread; of two consumers 232 and 40.
 * Barriers  struct control; TURN and OWN, at their declaration; __syncthreads: the barriers are set
 *           | a thread waits on one.
 * Numerics  scores, sums and O f32, the weights rounded to bf16 for the second product; 2^x with
 *           scale log2 e folded in. A weight's reference follows the row's maximum once that is
 *           more than 8 ahead in log2, each row for itself. Scores of what a row does not see become
 *           -inf by selection, and their weights 0. Where 0 times V would be no number, the cleaner
 *           steps in: rows past the tile's last position become zeros, whatever they hold, and so
 *           do rows with a NaN or an infinity, which make all rows that see them NaN. So a row's
 *           bytes depend on nothing but what it sees: the same in any chunk, tile and run. Positions
 *           of a tile that lie before a row's window have to be numbers, though.
 * Needs     D = 64, 80, 96, 128 or 256; H/G at most 64; scale > 0; pointers on 16 bytes. */
#include "kernels/cuda_attention_hopper.cuh"
#include "kernels/cuda_tensor_map.h"

#include <algorithm>
#include <cmath>

namespace {

/* ---- consumers: the two products ---- */

/* Both are issued, committed and awaited within one straight piece of code: ptxas serialises every
 * wgmma of a kernel (notes C75..) in which one pipeline crosses a branch, or two branches write one
 * array of sums by products of different widths. */

/* s = Q K^T for 2 N positions; meanwhile() runs while the tensor cores work. */
template <class C, int N, class F>
__device__ __forceinline__ void multiply_keys(float (&s)[N], uint64_t queries, uint64_t keys,
                                              F meanwhile) {
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < C::D / 16; k++)
        wgmma<N * 2>(
            s, queries + (k / 4) * (QUERIES * PANEL_ROW_BYTES / 16) + k % 4 * WGMMA_COLUMNS_16,
            keys + (k / 4) * (C::KEYS * PANEL_ROW_BYTES / 16) + k % 4 * WGMMA_COLUMNS_16, k > 0);
    wgmma_commit();
    meanwhile();
    wgmma_wait<0>();
    settle(s);
}

/* o += P V for KEYS positions; o = P V where it holds nothing yet. */
template <class C, int KEYS>
__device__ __forceinline__ void multiply_values(float (&o)[C::D / 2], const uint32_t *weights,
                                                uint64_t values, bool nothing) {
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < KEYS / 16; k++)
        wgmma_transposed<C::D>(o, weights + 4 * k, values + k * 2 * WGMMA_ROWS_8,
                               k > 0 || !nothing);
    wgmma_commit();
    wgmma_wait<0>();
    settle(o);
}

/* o += P V of a block of V; half: of its first half alone. */
template <class C>
__device__ __forceinline__ void add_block(float (&o)[C::D / 2],
                                          const uint32_t (&weights)[C::KEYS / 4], uint64_t values,
                                          bool half, bool nothing) {
    if (C::HALVES && half)
        multiply_values<C, C::KEYS / 2>(o, weights, values, nothing);
    else
        multiply_values<C, C::KEYS>(o, weights, values, nothing);
}

/* ---- consumers: softmax ---- */

/* A thread holds two of wgmma's 64 rows, called half 0 and 1 (cuda_wgmma.cuh says which). Its
 * element i belongs to half i / 2 % 2, and lies i / 4 * 8 + i % 2 columns after the thread's
 * first. */
struct rows_found {
    float top[2]; /* the score whose weight is 1 */
    float sum[2]; /* of the weights of this thread's columns */
};

/* seen_0, seen_1: the last column that each half sees, from the thread's first on. */
template <int N> __device__ __forceinline__ void mask(float (&s)[N], int seen_0, int seen_1) {
#pragma unroll
    for (int i = 0; i < N; i++)
        if (i / 4 * 8 + i % 2 > (i / 2 % 2 ? seen_1 : seen_0)) s[i] = -INFINITY;
}

/* hidden_0, hidden_1: the last column that lies before each half's window. */
template <int N> __device__ __forceinline__ void hide(float (&s)[N], int hidden_0, int hidden_1) {
#pragma unroll
    for (int i = 0; i < N; i++)
        if (i / 4 * 8 + i % 2 <= (i / 2 % 2 ? hidden_1 : hidden_0)) s[i] = -INFINITY;
}

/* Scores become weights. keep: what o must be multiplied by, where it returns true for a row of the
 * warp. top starts as -2^100, finite, so that a row which sees nothing in a block finds weights of
 * 0. */
template <int N>
__device__ __forceinline__ bool weigh(float (&s)[N], rows_found &found, float (&keep)[2],
                                      float factor) {
    constexpr float AHEAD = 8; /* weights up to 2^8: far from f32's end, and no less exact */
    float most[8], top[2], sum[4] = {0, 0, 0, 0};
    bool moved = false;
#pragma unroll
    for (int i = 0; i < 8; i++) most[i] = s[i];
#pragma unroll
    for (int i = 8; i < N; i++) most[i % 8] = fmaxf(most[i % 8], s[i]);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float x = fmaxf(fmaxf(most[2 * half], most[2 * half + 1]),
                        fmaxf(most[2 * half + 4], most[2 * half + 5]));
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
        const float before = found.top[half];
        const bool moves = (x - before) * factor > AHEAD;
        const float now = moves ? x : before;
        keep[half] = exp2_fast((before - now) * factor);
        found.top[half] = now;
        top[half] = now * factor;
        found.sum[half] *= keep[half];
        moved |= moves;
    }
#pragma unroll
    for (int i = 0; i < N; i++) {
        s[i] = exp2_fast(fmaf(s[i], factor, -top[i / 2 % 2]));
        sum[i % 4] += s[i];
    }
    found.sum[0] += sum[0] + sum[1];
    found.sum[1] += sum[2] + sum[3];
    return __any_sync(0xffffffffu, moved);
}

/* ---- consumers: the result ---- */

/* The result takes the place of the warpgroup's Q, which nobody reads any more. broken_0, broken_1:
 * the half's row sees what is no number. */
template <class C>
__device__ __forceinline__ void stage_result(const float (&o)[C::D / 2], const rows_found &found,
                                             bool broken_0, bool broken_1, uint32_t slab) {
    const unsigned lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16;
    float share[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float sum = found.sum[half];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        share[half] = (half ? broken_1 : broken_0) ? __int_as_float(0x7fffffff) : 1 / sum;
    }
#pragma unroll
    for (int step = 0; step < C::D / 16; step++) {
        const float *x = o + 8 * step;
        const unsigned chunk = (step % 4 * 2 + lane / 16) ^ row % 8;
        store_matrices(slab + step / 4 * QUERIES * PANEL_ROW_BYTES + row * PANEL_ROW_BYTES +
                           chunk * 16,
                       pack_halves(x[0] * share[0], x[1] * share[0]),
                       pack_halves(x[2] * share[1], x[3] * share[1]),
                       pack_halves(x[4] * share[0], x[5] * share[0]),
                       pack_halves(x[6] * share[1], x[7] * share[1]));
    }
    fence_for_copies(); /* this thread's part is written | the copy engine reads it */
}

/* From there to memory; one thread asks. */
template <class C>
__device__ __forceinline__ void store_result(const tensor_maps &maps, const tile &t, int first_row,
                                             uint32_t slab) {
    for (int panel = 0; panel < C::PANELS; panel++)
        store_box(&maps.out, slab + panel * QUERIES * PANEL_ROW_BYTES, panel * PANEL_DEPTH, 0,
                  t.row + first_row, t.group);
    commit_boxes();
}

/* ---- consumers: a warpgroup ---- */

/* Named barriers. TURN + i, of two warpgroups: the one before i has asked for its scores | i asks
 * for its own; so their softmaxes spread out. OWN + i, of one: its warps have staged the result |
 * one thread stores it. */
constexpr int TURN = 1, OWN = 4;

/* The tiles of the block, one after the other: this warpgroup's 64 queries of each. */
template <class C>
__device__ __forceinline__ void consume(const tensor_maps &maps, const prompt &p, const memory &at,
                                        control &c, int warpgroup) {
    const int lane = threadIdx.x % 32, query = threadIdx.x / 32 % 4 * 16 + lane / 4;
    const int first_row = warpgroup * p.warpgroup_rows; /* of the tile */
    const int row[2] = {first_row + query / p.heads_of_group,
                        first_row + (query + 8) / p.heads_of_group};
    const bool leads = threadIdx.x % 128 == 0;
    float s[C::KEYS / 2], o[C::D / 2], keep[2];
    uint32_t weights[C::KEYS / 4]; /* in the registers of s */
    unsigned n = 0;                /* blocks so far */
    int owed = -1;                 /* whose result the copy engine may still be reading */
    if (warpgroup == 0) named_arrive(TURN, 256); /* the first turn */

    for (unsigned tiles = 0;; tiles++) {
        const int place = stage_of<2>(tiles);
        barrier_wait(shared_address(&c.queries_full[place]), parity_of<2>(tiles));
        const tile &t = c.tiles[place];
        const int first = t.first, blocks = t.blocks, position = t.position;
        const bool last_half = t.half;
        if (blocks == 0) break;
        const uint32_t slab = at.queries + (place * C::CONSUMERS + warpgroup) * C::SLAB;
        rows_found found = {{-0x1p100f, -0x1p100f}, {0, 0}};
        for (int block = blocks - 1; block >= first; block--, n++) {
            const bool nothing = block == blocks - 1, half = nothing && last_half;
            const int k = stage_of<C::KEY_STAGES>(n), v = stage_of<C::VALUE_STAGES>(n);
            const auto meanwhile = [&] {
                named_arrive(TURN + (warpgroup + 1) % C::CONSUMERS, 256);
                if (owed < 0) return;
                if (leads) {
                    wait_for_boxes_read();
                    barrier_arrive(shared_address(&c.queries_empty[owed]));
                }
                owed = -1;
            };
            barrier_wait(shared_address(&c.keys_full[k]), parity_of<C::KEY_STAGES>(n));
            named_barrier(TURN + warpgroup, 256);
            const uint64_t queries = wgmma_panel(slab), keys = wgmma_panel(at.keys + k * C::BLOCK);
            if (C::HALVES && half) { /* no function: ptxas would serialise (C7511) */
                float left[C::KEYS / 4];
                multiply_keys<C>(left, queries, keys, meanwhile);
#pragma unroll
                for (int i = 0; i < C::KEYS / 2; i++) s[i] = i < C::KEYS / 4 ? left[i] : -INFINITY;
            } else {
                multiply_keys<C>(s, queries, keys, meanwhile);
            }
            if (lane == 0) barrier_arrive(shared_address(&c.keys_empty[k]));
            const int ahead = position - block * C::KEYS;
            if (C::KEYS - 1 > ahead + first_row)
                mask(s, ahead + row[0] - lane % 4 * 2, ahead + row[1] - lane % 4 * 2);
            if (ahead + first_row + p.warpgroup_rows > p.window)
                hide(s, ahead + row[0] - p.window - lane % 4 * 2,
                     ahead + row[1] - p.window - lane % 4 * 2);
            if (weigh(s, found, keep, p.factor) && !nothing) {
#pragma unroll
                for (int i = 0; i < C::D / 2; i++) o[i] *= keep[i / 2 % 2];
            }
#pragma unroll
            for (int i = 0; i < C::KEYS / 4; i++) weights[i] = pack_halves(s[2 * i], s[2 * i + 1]);
            barrier_wait(shared_address(&c.values_full[v]), parity_of<C::VALUE_STAGES>(n));
            add_block<C>(o, weights,
                         wgmma_panel(at.values + v * C::BLOCK, C::KEYS * PANEL_ROW_BYTES), half,
                         nothing);
            if (lane == 0) barrier_arrive(shared_address(&c.values_empty[v]));
        }
        const int broken = c.broken[place] - position; /* rows of the tile from here on */
        stage_result<C>(o, found, row[0] >= broken, row[1] >= broken, slab);
        named_barrier(OWN + warpgroup, 128);
        if (leads)
            store_result<C>(maps, t, first_row, slab);
        else
            barrier_arrive(shared_address(&c.queries_empty[place]));
        owed = place;
    }
    if (leads) wait_for_boxes_written(); /* shared memory outlives the last one */
}

/* ---- the kernel ---- */

template <class C>
__global__ void __launch_bounds__(C::THREADS, 1)
    attention_hopper(const __grid_constant__ tensor_maps maps, const __grid_constant__ prompt p) {
    extern __shared__ unsigned char shared[];
    __shared__ control c;
    memory at;
    at.queries = panel_aligned(shared_address(shared));
    at.keys = at.queries + 2 * C::CONSUMERS * C::SLAB;
    at.values = at.keys + C::KEY_STAGES * C::BLOCK;
    /* The shuffle tells the compiler that a warp agrees. */
    const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0), warpgroup = warp / 4;
    if (threadIdx.x == 0) {
        init_barriers<C>(c);
        prefetch_map(&maps.q);
        prefetch_map(&maps.keys);
        prefetch_map(&maps.values);
    }
    start_dependents();
    wait_for_inputs();
    __syncthreads();

    if (warpgroup < C::CONSUMERS) {
        take_registers<C::CONSUMER_REGISTERS>();
        consume<C>(maps, p, at, c, warpgroup);
    } else {
        give_registers<C::PRODUCER_REGISTERS>();
        if (warp % 4 == 0 && threadIdx.x % 32 == 0) produce<C>(maps, p, at, c);
        if (warp % 4 == 1) clean<C>(at, c);
    }
}

/* ---- launch ---- */

/* The box is 64 columns wide. Strides of dimensions 1 to 3. */
bool map_tensor(struct cuda_backend *b, CUtensorMap *map, const void *start, const uint64_t size[4],
                const uint64_t stride[4], int box_1, int box_2) {
    struct tensor_view t = {};
    t.start = start;
    t.rank = 4;
    for (int i = 0; i < 4; i++) {
        t.size[i] = size[i];
        t.stride[i] = stride[i];
        t.box[i] = 1;
    }
    t.box[0] = PANEL_DEPTH;
    t.box[1] = (uint32_t)box_1;
    t.box[2] = (uint32_t)box_2;
    return cuda_tensor_map(b, map, &t);
}

/* q or out as D, heads of a group, rows, groups: a box is all heads of as many rows as make up 64
 * queries at most. Rows past T read zeros and are not written. */
bool map_queries(struct cuda_backend *b, CUtensorMap *map, const void *q,
                 const struct cuda_attention *a) {
    const uint64_t head = (uint64_t)a->D * 2, per_group = (uint64_t)(a->H / a->G);
    const uint64_t size[4] = {(uint64_t)a->D, per_group, (uint64_t)a->T, (uint64_t)a->G};
    const uint64_t stride[4] = {2, head, head * (uint64_t)a->H, head * per_group};
    return map_tensor(b, map, q, size, stride, (int)per_group, QUERIES / (int)per_group);
}

/* keys or values as D, positions, groups, slots: a box is positions of one group. How many slots
 * there are is not known here; the rows' slot is one of them. */
bool map_cache(struct cuda_backend *b, CUtensorMap *map, const void *cache, int positions,
               const struct cuda_attention *a) {
    const uint64_t D = (uint64_t)a->D, R = (uint64_t)a->R, G = (uint64_t)a->G;
    const uint64_t size[4] = {D, R, G, 1 << 30};
    const uint64_t stride[4] = {2, D * 2, R * D * 2, G * R * D * 2};
    return map_tensor(b, map, cache, size, stride, positions, 1);
}

template <int D, int CONSUMERS>
void launch(struct cuda_backend *b, const struct cuda_attention *a) {
    using C = tiling<D, CONSUMERS>;
    prompt p;
    p.T = a->T;
    p.G = a->G;
    p.heads_of_group = a->H / a->G;
    p.warpgroup_rows = QUERIES / p.heads_of_group;
    p.tile_rows = CONSUMERS * p.warpgroup_rows;
    p.query_bytes =
        (uint32_t)(CONSUMERS * C::PANELS * PANEL_ROW_BYTES * p.heads_of_group * p.warpgroup_rows);
    p.tiles_of_group = (unsigned)divide_up(p.T, p.tile_rows);
    p.tiles = p.tiles_of_group * (unsigned)p.G;
    p.factor = a->scale * LOG2_E;
    p.ring = a->R;
    p.window = a->window;
    p.slot = a->slots;
    p.position = a->positions;
    p.counters = a->counters;
    tensor_maps maps;
    if (map_queries(b, &maps.q, a->q, a) && map_queries(b, &maps.out, a->out, a) &&
        map_cache(b, &maps.keys, a->keys, C::KEYS, a) &&
        map_cache(b, &maps.values, a->values, C::KEYS, a))
        cuda_launch(b, "attention_hopper", attention_hopper<C>,
                    dim3(std::min(p.tiles, (unsigned)b->multiprocessors)), C::THREADS, C::SHARED,
                    maps, p);
}

/* Three warpgroups, unless that leaves multiprocessors with fewer than two tiles, or their registers no
 * room for O. */
template <int D> void launch_by_rows(struct cuda_backend *b, const struct cuda_attention *a) {
    constexpr int most = D > 128 ? 2 : 3;
    const int rows = most * (QUERIES / (a->H / a->G));
    if (divide_up(a->T, rows) * a->G < 2 * b->multiprocessors)
        launch<D, 2>(b, a);
    else
        launch<D, most>(b, a);
}

} // namespace

bool cuda_attention_hopper_takes(const struct cuda_attention *a) {
    return cuda_attention_decode_takes(a->D) && a->H / a->G <= QUERIES && a->scale > 0 &&
           a->cap == 0;
}

void cuda_attention_hopper(struct cuda_backend *b, const struct cuda_attention *a) {
    with_head_size(a->D, [&](auto size) { launch_by_rows<decltype(size)::D>(b, a); });
}
