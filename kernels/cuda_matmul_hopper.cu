/* Products in bf16 on sm_90 (wgmma): the kernel for many rows, and the choice of its tile.
 *
 * TFLOP/s on an H200, with what follows, for the widths of the 8B model at 512, 2048 and 8192 rows:
 * qkv 599, 637, 612; out 539, 517, 617; gate and up 623, 698, 682; down 580, 662, 630. cuBLAS without
 * it, in turns with these: 638, 663, 652; 594, 575, 626; 609, 699, 691; 596, 696, 662
 * (tests/results/h200-peers.txt). */
#include "kernels/cuda_matmul_hopper.cuh"
#include "kernels/cuda_test.h"

#include <algorithm>

namespace {

/* The stages, and of each two mbarriers of 8 bytes. full: the bytes have landed | they are
 * multiplied; empty: all READERS have read them | this block or the other one overwrites them. */
struct ring {
    uint32_t memory, full, empty;
    /* HALVES: the other block's sums have landed in `sums` | they are added. */
    uint32_t handed, sums;
};

/* Named barriers of both warpgroups. TURN + i: the other one has asked for its last products, or
 * has yet to begin | warpgroup i multiplies. */
constexpr int TURN = 1;

/* ---- the producer ---- */

/* A tile's rows of W: its units, with ACTIVATE the gate rows and the up rows of all of them, with QKV
 * its heads' pairs. Where the other block needs the same, it fetches one half. */
template <class S, enum epilogue E>
__device__ __forceinline__ void ask_for_weights(const CUtensorMap *map, const ring &ring, int stage,
                                                const tile &tile, int k, int rank) {
    constexpr int HALF = S::TILE_N / 2;
    constexpr bool activate = E == EPILOGUE_ACTIVATE;
    const uint32_t full = ring.full + 8 * stage;
    const uint32_t to = ring.memory + stage * S::STAGE_BYTES + S::IN_BYTES;
    if (S::BELOW_T > 1) {
        const uint32_t there = to + rank * HALF * PANEL_ROW_BYTES;
        if (E == EPILOGUE_QKV)
            copy_box_to(there, map, full, READ_NORMALLY, BOTH, k, 0, 0, tile.span / SPAN,
                        tile.head + rank * (S::HEADS / 2));
        else
            copy_box_to(there, map, full, READ_NORMALLY, BOTH, k,
                        tile.unit + (activate ? 0 : rank * HALF), activate ? rank : 0);
    } else if (E == EPILOGUE_QKV) {
        copy_box(to, map, full, READ_NORMALLY, k, 0, 0, tile.span / SPAN, tile.head);
    } else {
        copy_box(to, map, full, READ_NORMALLY, k, tile.unit, 0);
        copy_box(to + HALF * PANEL_ROW_BYTES, map, full, READ_NORMALLY, k,
                 tile.unit + (activate ? 0 : HALF), activate ? 1 : 0);
    }
}

template <class S>
__device__ __forceinline__ void ask_for_rows(const CUtensorMap *map, const ring &ring, int stage,
                                             const tile &tile, int k, int rank) {
    constexpr int SHARE = S::TILE_T / S::BESIDE_N;
    const uint32_t full = ring.full + 8 * stage, to = ring.memory + stage * S::STAGE_BYTES;
    if (S::BESIDE_N > 1)
        copy_box_to(to + rank * SHARE * PANEL_ROW_BYTES, map, full, READ_NORMALLY, BOTH, k,
                    tile.t + rank * SHARE);
    else
        copy_box(to, map, full, READ_NORMALLY, k, tile.t);
}

/* Keeps the ring full, tile after tile. W of the first steps is asked for before the inputs are
 * there. */
template <class S, enum epilogue E>
__device__ void produce(const CUtensorMap *in, const CUtensorMap *W, const schedule &schedule,
                        const ring &ring, int rank) {
    const int tiles = schedule.tiles_t * schedule.tiles_n, first = blockIdx.x / CLUSTER;
    const int first_step = S::CUTS_K > 1 ? rank * schedule.steps : 0;
    int early = min(S::STAGES, schedule.steps); /* steps whose W has been asked for */
    const tile start = tile_at<S, E>(schedule, first, rank);
    prefetch_map(in);
#pragma unroll 1
    for (int stage = 0; stage < early; stage++) {
        barrier_expect(ring.full + 8 * stage, S::STAGE_BYTES);
        ask_for_weights<S, E>(W, ring, stage, start, (first_step + stage) * PANEL_DEPTH, rank);
    }
    wait_for_inputs();
    int stage = 0, parity = 1;
    for (int index = first; index < tiles; index += schedule.workers) {
        const tile tile = tile_at<S, E>(schedule, index, rank);
#pragma unroll 1
        for (int step = 0; step < schedule.steps; step++) {
            const int k = (first_step + step) * PANEL_DEPTH;
            if (early > 0) {
                early--;
            } else {
                barrier_wait(ring.empty + 8 * stage, parity);
                barrier_expect(ring.full + 8 * stage, S::STAGE_BYTES);
                ask_for_weights<S, E>(W, ring, stage, tile, k, rank);
            }
            ask_for_rows<S>(in, ring, stage, tile, k, rank);
            if (++stage == S::STAGES) stage = 0, parity ^= 1;
        }
    }
}

/* ---- the consumers ---- */

/* This warp has read the stage: to those who fill it, here and in the other block. */
template <class S> __device__ __forceinline__ void release(const ring &ring, int stage, int rank) {
    const int lane = (int)threadIdx.x % 32;
    if (lane < S::FILLED) barrier_arrive_at(ring.empty + 8 * stage, rank ^ lane);
}

/* threadIdx.x, read anew for each tile, so that what is computed from it holds no register during the
 * products. */
__device__ __forceinline__ int thread_again() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

/* HALVES: a warpgroup's sums become the other block's, and those that have come from there are added. */
template <class S>
__device__ __forceinline__ void hand_over(const ring &ring, const float (&sums)[S::TILE_N / 2],
                                          int to) {
    const uint32_t there = address_in(to, ring.sums) + thread_again() % 128 * (int)sizeof(float4);
    const uint32_t barrier = address_in(to, ring.handed);
#pragma unroll
    for (int i = 0; i < S::TILE_N / 2; i += 4)
        send(there + i / 4 * 128 * sizeof(float4),
             make_float4(sums[i], sums[i + 1], sums[i + 2], sums[i + 3]), barrier);
}
template <class S>
__device__ __forceinline__ void take_over(const ring &ring, float (&sums)[S::TILE_N / 2]) {
    const uint32_t from = ring.sums + thread_again() % 128 * (int)sizeof(float4);
    barrier_wait(ring.handed, 0);
#pragma unroll
    for (int i = 0; i < S::TILE_N / 2; i += 4) {
        float4 other;
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(other.x), "=f"(other.y), "=f"(other.z), "=f"(other.w)
                     : "r"(from + i / 4 * 128 * (int)sizeof(float4)));
        sums[i] += other.x, sums[i + 1] += other.y, sums[i + 2] += other.z, sums[i + 3] += other.w;
    }
}

/* sums = the tile's products over what the block has of K, from the `passed`-th step through the ring on.
 * `issued` is called when the last one has been asked for. Of `all` steps of the block the last ones are
 * not released, as nothing takes their place: a signal that the other block does not wait for could come
 * when its shared memory is another kernel's. */
template <class S, class F>
__device__ __forceinline__ void multiply_tile(float (&sums)[S::BLOCKS_64][S::TILE_N / 2],
                                              const schedule &schedule, const ring &ring,
                                              uint64_t in, uint64_t W, int passed, int all,
                                              int rank, F issued) {
    int stage = passed % S::STAGES, parity = passed / S::STAGES % 2, last = 0;
    const int refilled = all - passed - S::STAGES; /* steps of the tile */
    for (int step = 0; step < schedule.steps; step++) {
        barrier_wait(ring.full + 8 * stage, parity);
        const uint64_t at = stage * (S::STAGE_BYTES / 16);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < PANEL_DEPTH / 16; i++)
#pragma unroll
            for (int block = 0; block < S::BLOCKS_64; block++)
                wgmma<S::TILE_N>(sums[block],
                                 in + at + block * 8 * WGMMA_ROWS_8 + i * WGMMA_COLUMNS_16,
                                 W + at + i * WGMMA_COLUMNS_16, step > 0 || i > 0);
        wgmma_commit();
        wgmma_wait<1>();
        if (step > 0 && step <= refilled) release<S>(ring, last, rank);
        last = stage;
        if (++stage == S::STAGES) stage = 0, parity ^= 1;
    }
    issued();
    wgmma_wait<0>();
#pragma unroll
    for (int block = 0; block < S::BLOCKS_64; block++) settle(sums[block]);
    if (schedule.steps <= refilled) release<S>(ring, last, rank);
}

/* Whole tiles by turns, or 64 rows of every tile. The turns are not for speed alone: a warpgroup
 * that waited for a fill more than a lap of the ring ahead would take an old phase of the same
 * parity for it. */
template <class S, enum epilogue E>
__device__ __forceinline__ void consume(const product &p, const schedule &schedule,
                                        const ring &ring, int rank) {
    const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0); /* known to be uniform */
    const int group = warp / 4;
    const uint64_t in = wgmma_panel(ring.memory + (S::TOGETHER ? group * 64 * PANEL_ROW_BYTES : 0));
    const uint64_t W = wgmma_panel(ring.memory + S::IN_BYTES);
    const int tiles = schedule.tiles_t * schedule.tiles_n, first = blockIdx.x / CLUSTER;
    const int rounds = S::CUTS_K > 1 ? 1 : divide_up(tiles - first, schedule.workers);
    const bool pairs = p.y_stride % 2 == 0 && p.N % 2 == 0 && (uintptr_t)p.y % 8 == 0;
    float sums[S::BLOCKS_64][S::TILE_N / 2];
    const auto give_turn = [&] {
        if (!S::TOGETHER) named_arrive(TURN + 1 - group, CONSUMERS);
    };
    if (group == 1) give_turn(); /* the first tile is warpgroup 0's */
    for (int round = S::TOGETHER ? 0 : group; round < rounds; round += S::TOGETHER ? 1 : 2) {
        const tile tile = tile_at<S, E>(schedule, first + round * schedule.workers, rank);
        const int thread = thread_again(), n = tile.unit + thread % 4 * 2;
        const int t =
            tile.t + (S::TOGETHER ? group * 64 : 0) + thread / 32 % 4 * 16 + thread % 32 / 4;
        float factor[S::BLOCKS_64][2];
        row_turn turns[S::BLOCKS_64][2];
        residual<S> before;
        const bool writes = S::CUTS_K == 1 || group == rank;
        if (writes) factors_of<S>(p, factor, t);
#pragma unroll
        for (int i = 0; E == EPILOGUE_QKV && i < 2 * S::BLOCKS_64; i++)
            if (writes && S::SUMS <= row_turn::MOST_SUMS)
                turns[i / 2][i % 2].ask(p, t + i / 2 * 64 + i % 2 * 8, tile);
        if (E == EPILOGUE_ADD && S::CUTS_K == 1) before.ask_first(p, t, tile);
        if (!S::TOGETHER) named_barrier(TURN + group, CONSUMERS);
        multiply_tile<S>(sums, schedule, ring, in, W, round * schedule.steps,
                         rounds * schedule.steps, rank, give_turn);
        if (!writes) {
            hand_over<S>(ring, sums[0], rank ^ 1);
            continue;
        }
        if (E == EPILOGUE_ADD && S::CUTS_K > 1) before.ask_first(p, t, tile);
        if (S::CUTS_K > 1) take_over<S>(ring, sums[0]);
        if (E == EPILOGUE_ADD) add_tile<S>(p, sums, factor, before, t, tile);
#pragma unroll
        for (int block = 0; block < S::BLOCKS_64 && E != EPILOGUE_ADD; block++) {
            const int row = t + block * 64;
            if (E == EPILOGUE_ACTIVATE)
                activate_rows<S>(p, sums[block], factor[block], row, tile.unit);
            else if (E == EPILOGUE_QKV)
                heads_rows<S>(p, sums[block], factor[block], turns[block], row, tile);
            else if constexpr (E == EPILOGUE_HEADS)
                normed_head_rows<S>(p, sums[block], factor[block], row, tile);
            else if (pairs)
                store_rows<S, true>(p, sums[block], factor[block], row, n);
            else
                store_rows<S, false>(p, sums[block], factor[block], row, n);
        }
    }
}

/* What      the contract of struct product, bf16 with f32 sums.
 * Owners    a cluster of two blocks two neighbouring tiles, and every workers-th pair of them; with
 *           HALVES one tile, of which either block writes 64 rows. In a block two warpgroups consume,
 *           and of the third one thread produces.
 * Shared    a ring of stages: TILE_T rows, then TILE_N rows of W, 64 of K each; barriers; with
 *           HALVES what the other block hands over. With ACTIVATE the first half of W's rows are
 *           gate rows and the second their up rows, so that a thread holds both sums; with HEADS they are
 *           one head.
 * Registers BLOCKS_64 TILE_N / 2 sums a thread, up to 192 of 232.
 * Bound     2 T N K FLOPs, at full load by the power that they draw; up to 256 rows by W's bytes.
 * Numerics  f32 sums over K in ascending order; with HALVES those of its halves, and then the two. Rows
 *           of W past N and K's end arrive as zeros, rows past T as what lies there; nothing past T
 *           and N is stored. A row's sum of squares: by thread over the tile's columns, over four
 *           lanes, over the tiles by the next product.
 * Barriers  struct ring; TURN. Of the cluster, first: the barriers are ready | the other block
 *           signals them; last: what this block has sent has landed in the other | this one ends.
 * Order     W is asked for before the inputs are waited for, rows, scale and residual after.
 * Form      results go from registers to memory, 32 bytes of a row at a time, since y has any stride:
 *           whole sectors but for h of tile 176. The other warpgroup's products hide it. */
template <class S, enum epilogue E>
__global__ void __launch_bounds__(THREADS, 1)
    matmul_wgmma(const __grid_constant__ CUtensorMap in, const __grid_constant__ CUtensorMap W,
                 const __grid_constant__ product p, const __grid_constant__ schedule schedule) {
    extern __shared__ unsigned char memory[];
    ring ring;
    ring.memory = panel_aligned(shared_address(memory));
    ring.full = ring.memory + S::STAGES * S::STAGE_BYTES;
    ring.empty = ring.full + 8 * S::STAGES;
    ring.handed = ring.empty + 8 * S::STAGES;
    ring.sums = ring.full + BARRIER_BYTES;
    const int rank = cluster_rank();
    start_dependents();
    if (threadIdx.x == 0) {
        for (int i = 0; i < S::STAGES; i++) {
            barrier_init(ring.full + 8 * i, 1);
            barrier_init(ring.empty + 8 * i, S::READERS);
        }
        if (S::CUTS_K > 1) barrier_init(ring.handed, 1);
        barriers_ready();
        if (S::CUTS_K > 1) barrier_expect(ring.handed, S::HANDED_BYTES);
    }
    cluster_sync(); /* first */
    if (threadIdx.x >= CONSUMERS) {
        give_registers<PRODUCER_REGISTERS>();
        if (threadIdx.x == CONSUMERS) produce<S, E>(&in, &W, schedule, ring, rank);
    } else {
        take_registers<CONSUMER_REGISTERS>();
        wait_for_inputs();
        consume<S, E>(p, schedule, ring, rank);
    }
    __syncwarp();   /* the producer's warp is whole again: the next needs all of its threads */
    cluster_sync(); /* last */
}

/* ---- launching ---- */

using kernel = void (*)(CUtensorMap, CUtensorMap, product, schedule);

struct form {
    int tile_t, tile_n, below, beside, cuts; /* cuts: of K */
    bool together;
    int shared;
    kernel kernels[5]; /* by epilogue; NULL: none for that one */
};

template <class S> constexpr kernel kernel_of_heads() {
    if constexpr (S::WHOLE_HEADS) return matmul_wgmma<S, EPILOGUE_QKV>;
    return NULL;
}

template <class S> constexpr kernel kernel_of_activation() {
    if constexpr (S::CUTS_K == 1) return matmul_wgmma<S, EPILOGUE_ACTIVATE>;
    return NULL; /* gate and up have many tiles */
}

template <class S> constexpr kernel kernel_of_add() {
    if constexpr (S::SUMS <= 128) return matmul_wgmma<S, EPILOGUE_ADD>;
    return NULL; /* registers would spill */
}

template <class S> constexpr kernel kernel_of_normed_heads() {
    if constexpr (S::TILE_N == NORMED_HEAD) return matmul_wgmma<S, EPILOGUE_HEADS>;
    return NULL;
}

template <int T, int N, sharing SHARING = BELOW, bool TOGETHER = SHARING == HALVES>
constexpr form form_of() {
    using S = shape<T, N, SHARING, TOGETHER>;
    return {T,
            N,
            S::BELOW_T,
            S::BESIDE_N,
            S::CUTS_K,
            TOGETHER,
            S::SHARED,
            {matmul_wgmma<S, EPILOGUE_STORE>, kernel_of_add<S>(), kernel_of_activation<S>(),
             kernel_of_heads<S>(), kernel_of_normed_heads<S>()}};
}

constexpr form forms[] = {
    /* Up to 384 rows, which wait for W: clusters enough to ask for it. N x T = 4096 x 128 are 64 tiles
     * of the first, 6144 x 128 as many of the second, 4096 x 384 are 66 of the third. */
    form_of<128, 64, HALVES>(),
    form_of<128, 96, HALVES>(),
    form_of<128, 192, HALVES>(),
    /* Where tiles of 64 rows fill the clusters without cutting K: 4096 x 256 are 128 tiles of the first,
     * 28672 x 128 twice as many of the last; the second fills some shapes between. */
    form_of<64, 128>(),
    form_of<64, 192>(),
    form_of<64, 224>(),
    /* More rows, by how they fill the last wave: 128 for 4096; 176 and 192 give L2 the least to do
     * and the tensor cores the longest runs. */
    form_of<128, 128>(),
    form_of<128, 176>(),
    form_of<128, 192>(),
    /* The same with 128 rows in a cluster, not 256, where T has an odd number of tiles. */
    form_of<128, 128, BESIDE>(),
    form_of<128, 176, BESIDE>(),
    /* A single wave, which both warpgroups end together: 4096 x 512 and 6144 x 512 are 128 tiles. The
     * last one also where K is long: with twice the columns it reads the rows half as often, which at
     * full load leaves power for the clock. */
    form_of<128, 128, BELOW, true>(),
    form_of<128, 192, BELOW, true>(),
    form_of<128, 256, BELOW, true>(),
};

/* QKV: heads that a tile has a part of. */
int heads_of(const form &form) {
    return form.tile_n / (2 * SPAN);
}

schedule schedule_for(const struct cuda_backend *b, const struct product *p, const form &form) {
    const int units = p->epilogue == EPILOGUE_ACTIVATE ? form.tile_n / 2 : form.tile_n;
    schedule schedule = {};
    schedule.steps = divide_up(divide_up(p->K, PANEL_DEPTH), form.cuts);
    schedule.tiles_t = divide_up(p->T, form.tile_t * form.below);
    int columns = divide_up(units_of(*p), units);
    if (p->epilogue == EPILOGUE_QKV) {
        schedule.across = divide_up(p->heads.H + 2 * p->heads.G, heads_of(form));
        columns = p->heads.half / SPAN * schedule.across;
    }
    schedule.tiles_n = divide_up(columns, form.beside);
    schedule.group = std::min(GROUP_ROWS / form.below, schedule.tiles_t);
    schedule.workers = std::min(b->multiprocessors / CLUSTER, schedule.tiles_t * schedule.tiles_n);
    return schedule;
}

/* Cycles of the busiest multiprocessor, roughly. A step costs the most of its products (64 rows by N by 64
 * of K: 2 N cycles, and as 3 more columns for reading the rows), of its bytes from L2 (48 a cycle) and of its
 * bytes from memory (20 a cycle), and a sixth of L2's for their power. A tile takes 300 more. What follows 64
 * rows of a tile takes 20 cycles a column, with ADD 40; by turns it is seen once, at the end. With halves of
 * K a tenth less is measured. */
double cost(const form &form, const schedule &schedule, const product &p) {
    const double from_L2 =
        PANEL_ROW_BYTES * ((double)form.tile_t / form.beside + (double)form.tile_n / form.below);
    const double from_memory = PANEL_ROW_BYTES * (double)form.tile_n / divide_up(p.T, form.tile_t);
    const double products = form.tile_t / 64 * (form.tile_n + 3) * 2;
    const double step = std::max({products, from_L2 / 48, from_memory / 20}) + from_L2 / 280;
    const int waves = divide_up(schedule.tiles_t * schedule.tiles_n, schedule.workers);
    const int seen = form.together ? waves : form.tile_t / 64;
    const double cycles = waves * (schedule.steps * step + 300) +
                          seen * form.tile_n * (p.epilogue == EPILOGUE_ADD ? 40.0 : 20.0);
    return form.cuts > 1 ? 0.9 * cycles : cycles;
}

/* Whether there is a kernel. One that cuts K takes a single tile: there is room for the sums of one. */
bool takes(const struct cuda_backend *b, const struct product *p, const form &form) {
    const schedule schedule = schedule_for(b, p, form);
    return form.kernels[p->epilogue] &&
           (form.cuts == 1 || schedule.tiles_t * schedule.tiles_n == schedule.workers);
}

const form &choose(const struct cuda_backend *b, const struct product *p) {
    if (b->tile > 0 && takes(b, p, forms[b->tile - 1])) return forms[b->tile - 1];
    const form *best = NULL;
    double least = 0;
    for (const form &form : forms) {
        if (!takes(b, p, form)) continue;
        const double cycles = cost(form, schedule_for(b, p, form), *p);
        if (!best || cycles < least) best = &form, least = cycles;
    }
    return *best;
}

} // namespace

/* Whether the kernel for few rows, or for many, has what follows the product. */
static bool fits(const struct product *p, bool few) {
    const struct heads &h = p->heads;
    switch (p->epilogue) {
    case EPILOGUE_STORE: return true;
    case EPILOGUE_ADD:
        return few || (p->N % 8 == 0 && p->y_stride % 4 == 0 && (uintptr_t)p->y % 16 == 0);
    case EPILOGUE_ACTIVATE: return p->N % 16 == 0 && (uintptr_t)p->h % 8 == 0;
    case EPILOGUE_QKV:
        return few ? h.D % 16 == 0 && h.half % 8 == 0 : h.half % SPAN == 0 && h.D == 2 * h.half;
    case EPILOGUE_HEADS: return !few && h.D == NORMED_HEAD && h.D == 2 * h.half && !h.bias;
    }
    return false;
}

/* Which one takes it. */
static bool as_few(const struct cuda_backend *b, const struct product *p) {
    if (p->T <= CUDA_LEAST_ROWS || p->T > CUDA_FEW_ROWS || !fits(p, false))
        return p->T <= CUDA_FEW_ROWS;
    if (b->tile) return b->tile == CUDA_FEW;
    return (size_t)p->N * (size_t)p->K * sizeof(bf16) > CUDA_SMALL_WEIGHTS;
}

bool cuda_matmul_hopper_takes(const struct product *p) {
    const bool aligned = (uintptr_t)p->W % 16 == 0 && (uintptr_t)p->in % 16 == 0;
    return p->dtype == BF16 && p->T >= 1 && p->N >= 1 && p->K >= 8 && p->K % 8 == 0 && aligned &&
           fits(p, p->T <= CUDA_FEW_ROWS);
}

int cuda_tiles(void) {
    return sizeof forms / sizeof *forms;
}

int cuda_matmul_hopper_parts(const struct cuda_backend *b, const struct product *p) {
    if (as_few(b, p)) return cuda_matmul_few_parts(b, p->N);
    const form &form = choose(b, p);
    return schedule_for(b, p, form).tiles_n * form.beside;
}

void cuda_matmul_hopper(struct cuda_backend *b, const struct product *p) {
    if (!cuda_matmul_hopper_takes(p)) {
        cuda_failed(b, "cuda_matmul_hopper: bf16, K a multiple of 8, N as the epilogue needs it",
                    cudaErrorInvalidValue);
        return;
    }
    if (as_few(b, p)) {
        cuda_matmul_few(b, p);
        return;
    }
    const form &form = choose(b, p);
    const schedule schedule = schedule_for(b, p, form);
    CUtensorMap in, W;
    const bool mapped = p->epilogue == EPILOGUE_QKV ? cuda_heads_map(b, &W, *p, SPAN, p->heads.half,
                                                                     heads_of(form) / form.below)
                                                    : cuda_weight_map(b, &W, *p, form.tile_n / 2);
    const int rows = cuda_rows_to_read(*p, form.tile_t * form.below);
    if (mapped && cuda_matrix_map(b, &in, p->in, rows, p->K, form.tile_t / form.beside))
        cuda_launch_clusters(b, "matmul_wgmma", form.kernels[p->epilogue],
                             dim3((unsigned)(schedule.workers * CLUSTER)), CLUSTER, THREADS,
                             (size_t)form.shared, in, W, *p, schedule);
}
