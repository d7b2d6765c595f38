/* Products in bf16 on sm_90 (wgmma): the kernel for more than 64 rows, and the choice of its tile.
 *
 * TFLOP/s on an H200, for the widths of the 8B model at 512, 2048 and 8192 rows: qkv 691, 648, 667;
 * out 557, 612, 632; gate and up 678, 744, 694; down 618, 680, 653. */
#include "kernels/cuda_matmul_hopper.h"
#include "kernels/cuda_wgmma.cuh"

#include <algorithm>

namespace {

enum {
    CONSUMERS = 256, /* two warpgroups */
    THREADS = CONSUMERS + 128,
    PRODUCER_REGISTERS = 40, /* 24 spill */
    CONSUMER_REGISTERS = 232,
    SHARED_BYTES = 227 << 10,
    BARRIER_BYTES = 256,
    MOST_STAGES = 16,
    CLUSTER = 2,
    BOTH = 3, /* blocks of a cluster, a bit each */
    /* Rows of tiles that meet one column of tiles before the next one: 132 tiles that run together
     * then read about as many rows as rows of W, and L2 has both. */
    GROUP_ROWS = 16
};

/* A tile, and how blocks and warpgroups share. Each block of a cluster fetches half of what the two
 * have in common and sends it to both: W where their tiles lie one below the other, the rows where
 * side by side. */
template <int T, int N, bool BELOW, bool TOGETHER_> struct shape {
    static constexpr int TILE_T = T, TILE_N = N;        /* rows; rows of W */
    static constexpr int BELOW_T = BELOW ? CLUSTER : 1; /* tiles of a cluster along T, and N */
    static constexpr int BESIDE_N = BELOW ? 1 : CLUSTER;
    /* Both warpgroups take 64 rows of one tile, and nobody multiplies while they write it. Else
     * they take turns by whole tile: one writes while the other has the tensor cores. */
    static constexpr bool TOGETHER = TOGETHER_;
    static constexpr int BLOCKS_64 = T / 64 / (TOGETHER ? 2 : 1); /* of 64 rows, a warpgroup's */
    static constexpr int IN_BYTES = T * PANEL_ROW_BYTES;
    static constexpr int STAGE_BYTES = IN_BYTES + N * PANEL_ROW_BYTES;
    static constexpr int FIT = (SHARED_BYTES - BARRIER_BYTES - PANEL_ALIGNMENT) / STAGE_BYTES;
    static constexpr int STAGES = FIT < MOST_STAGES ? FIT : MOST_STAGES;
    static constexpr int SHARED = STAGES * STAGE_BYTES + BARRIER_BYTES + PANEL_ALIGNMENT;
    /* Warps that must have read a stage before it is filled again, of both blocks. */
    static constexpr int READERS = CLUSTER * (TOGETHER ? 8 : 4);
    static_assert(N % 16 == 0, "half of W's rows of a tile are whole groups of 8");
    static_assert(STAGES >= 3 && 2 * 8 * STAGES <= BARRIER_BYTES, "the ring and its barriers fit");
};

/* The tiles of clusters, and how many clusters work through them. */
struct schedule {
    int steps;            /* of K, 64 each */
    int tiles_t, tiles_n; /* of clusters */
    int group;            /* rows of tiles */
    int workers;          /* clusters */
};

/* Where a tile of this block starts. */
struct tile {
    int t, unit;
};

template <class S>
__device__ __forceinline__ tile tile_at(const product &p, const schedule &schedule, int index,
                                        int rank) {
    const int of_group = schedule.group * schedule.tiles_n, group = index / of_group;
    const int height = min(schedule.group, schedule.tiles_t - group * schedule.group);
    const int rest = index - group * of_group, column = rest / height;
    const int row = group * schedule.group + rest - column * height;
    const int units = p.epilogue == EPILOGUE_ACTIVATE ? S::TILE_N / 2 : S::TILE_N;
    return {(row * S::BELOW_T + rank % S::BELOW_T) * S::TILE_T,
            (column * S::BESIDE_N + (S::BESIDE_N > 1 ? rank : 0)) * units};
}

/* The stages, and of each two mbarriers of 8 bytes. full: the bytes have landed | they are
 * multiplied; empty: all READERS have read them | this block or the other one overwrites them. */
struct ring {
    uint32_t memory, full, empty;
};

/* Named barriers of both warpgroups. TURN + i: the other one has asked for its last products, or
 * has yet to begin | warpgroup i multiplies. */
constexpr int TURN = 1;

/* ---- the producer ---- */

/* A tile's rows of W in two halves: of the units, or with ACTIVATE the gate and the up rows of all.
 * Where the other block needs the same, it fetches one of them. */
template <class S>
__device__ __forceinline__ void ask_for_weights(const CUtensorMap *map, const product &p,
                                                const ring &ring, int stage, const tile &tile,
                                                int k, int rank) {
    constexpr int HALF = S::TILE_N / 2;
    const bool activate = p.epilogue == EPILOGUE_ACTIVATE;
    const uint32_t full = ring.full + 8 * stage;
    const uint32_t to = ring.memory + stage * S::STAGE_BYTES + S::IN_BYTES;
    if (S::BELOW_T > 1) {
        copy_box_to(to + rank * HALF * PANEL_ROW_BYTES, map, full, READ_NORMALLY, BOTH, k,
                    tile.unit + (activate ? 0 : rank * HALF), activate ? rank : 0);
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
template <class S>
__device__ void produce(const CUtensorMap *in, const CUtensorMap *W, const product &p,
                        const schedule &schedule, const ring &ring, int rank) {
    const int tiles = schedule.tiles_t * schedule.tiles_n, first = blockIdx.x / CLUSTER;
    int early = min(S::STAGES, schedule.steps); /* steps whose W has been asked for */
    const tile start = tile_at<S>(p, schedule, first, rank);
    prefetch_map(in);
    for (int stage = 0; stage < early; stage++) {
        barrier_expect(ring.full + 8 * stage, S::STAGE_BYTES);
        ask_for_weights<S>(W, p, ring, stage, start, stage * PANEL_DEPTH, rank);
    }
    wait_for_inputs();
    int stage = 0, parity = 1;
    for (int index = first; index < tiles; index += schedule.workers) {
        const tile tile = tile_at<S>(p, schedule, index, rank);
        for (int step = 0; step < schedule.steps; step++) {
            if (early > 0) {
                early--;
            } else {
                barrier_wait(ring.empty + 8 * stage, parity);
                barrier_expect(ring.full + 8 * stage, S::STAGE_BYTES);
                ask_for_weights<S>(W, p, ring, stage, tile, step * PANEL_DEPTH, rank);
            }
            ask_for_rows<S>(in, ring, stage, tile, step * PANEL_DEPTH, rank);
            if (++stage == S::STAGES) stage = 0, parity ^= 1;
        }
    }
}

/* ---- what follows a product ---- */

/* Two neighbouring values, of which `left` exist; the others are 0. PAIRS: none or both exist, at a
 * multiple of 8 bytes. */
template <bool PAIRS> __device__ __forceinline__ float2 load_two(const float *from, int left) {
    if (PAIRS) return left > 0 ? __ldcg((const float2 *)from) : float2{0, 0};
    return {left > 0 ? __ldcg(from) : 0, left > 1 ? __ldcg(from + 1) : 0};
}
template <bool PAIRS> __device__ __forceinline__ void store_two(float *to, int left, float2 value) {
    if (PAIRS) {
        if (left > 0) *(float2 *)to = value;
    } else {
        if (left > 0) to[0] = value.x;
        if (left > 1) to[1] = value.y;
    }
}

/* y (+)= scale sums, in rows t and t + 8: of each octet of columns two, from n on for the first. */
template <class S, bool PAIRS>
__device__ __forceinline__ void store_rows(const product &p, const float (&sums)[S::TILE_N / 2],
                                           const float (&scale)[2], int t, int n) {
    constexpr int OCTETS = S::TILE_N / 8;
    constexpr int BATCH = 8; /* loads under way together: what registers hold */
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float *const y = p.y + (size_t)(t + 8 * half) * p.y_stride + n;
        const int left = t + 8 * half < p.T ? p.N - n : 0;
        const int to_add = p.epilogue == EPILOGUE_ADD ? left : 0;
#pragma unroll
        for (int first = 0; first < OCTETS; first += BATCH) {
            float2 value[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; i++)
                if (first + i < OCTETS)
                    value[i] = load_two<PAIRS>(y + 8 * (first + i), to_add - 8 * (first + i));
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                const int octet = first + i;
                if (octet >= OCTETS) break;
                const float *sum = sums + 4 * octet + 2 * half;
                store_two<PAIRS>(
                    y + 8 * octet, left - 8 * octet,
                    {value[i].x + scale[half] * sum[0], value[i].y + scale[half] * sum[1]});
            }
        }
    }
}

/* h = silu(gate) up, of two columns. */
__device__ __forceinline__ uint32_t activate_pair(const float *gate, const float *up, float scale) {
    return pack_halves(silu(scale * gate[0]) * (scale * up[0]),
                       silu(scale * gate[1]) * (scale * up[1]));
}

/* h in rows t and t + 8, columns from unit on: gate is the sums' first half, up the second. Lanes
 * pass each other pairs, so that each writes four columns, even lanes of an even octet and odd ones
 * of the next. */
template <class S>
__device__ __forceinline__ void activate_rows(const product &p, const float (&sums)[S::TILE_N / 2],
                                              const float (&scale)[2], int t, int unit) {
    constexpr int OCTETS = S::TILE_N / 16, UP = S::TILE_N / 4;
    const int F = p.N / 2, quarter = (int)threadIdx.x % 4;
    const bool odd = quarter % 2;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        bf16 *const h = (bf16 *)p.h + (size_t)(t + half * 8) * F + unit;
        const bool inside = t + half * 8 < p.T;
#pragma unroll
        for (int octet = 0; octet + 1 < OCTETS; octet += 2) {
            const float *gate = sums + 4 * octet + 2 * half;
            const uint32_t here = activate_pair(gate, gate + UP, scale[half]);
            const uint32_t next = activate_pair(gate + 4, gate + 4 + UP, scale[half]);
            const uint32_t other = __shfl_xor_sync(0xffffffffu, odd ? here : next, 1);
            const int column = (octet + odd) * 8 + 2 * (quarter - odd);
            if (inside && unit + column < F)
                *(uint2 *)(h + column) = odd ? uint2{other, next} : uint2{here, other};
        }
        if (OCTETS % 2) {
            constexpr int LAST = OCTETS - 1;
            const float *gate = sums + 4 * LAST + 2 * half;
            const uint32_t pair = activate_pair(gate, gate + UP, scale[half]);
            if (inside && unit + LAST * 8 + 2 * quarter < F)
                *(uint32_t *)(h + LAST * 8 + 2 * quarter) = pair;
        }
    }
}

/* ---- the consumers ---- */

/* This warp has read the stage: to those who fill it, here and in the other block. */
__device__ __forceinline__ void release(const ring &ring, int stage, int rank) {
    const int lane = (int)threadIdx.x % 32;
    if (lane < CLUSTER) barrier_arrive_at(ring.empty + 8 * stage, rank ^ lane);
}

/* sums = the tile's products over all of K, from the `passed`-th step through the ring on. `issued`
 * is called when the last one has been asked for. */
template <class S, class F>
__device__ __forceinline__ void multiply_tile(float (&sums)[S::BLOCKS_64][S::TILE_N / 2],
                                              const schedule &schedule, const ring &ring,
                                              uint64_t in, uint64_t W, int passed, int rank,
                                              F issued) {
    int stage = passed % S::STAGES, parity = passed / S::STAGES % 2, last = -1;
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
        if (last >= 0) release(ring, last, rank);
        last = stage;
        if (++stage == S::STAGES) stage = 0, parity ^= 1;
    }
    issued();
    wgmma_wait<0>();
#pragma unroll
    for (int block = 0; block < S::BLOCKS_64; block++) settle(sums[block]);
    release(ring, last, rank);
}

/* Whole tiles by turns, or 64 rows of every tile. The turns are not for speed alone: a warpgroup
 * that waited for a fill more than a lap of the ring ahead would take an old phase of the same
 * parity for it. */
template <class S>
__device__ __forceinline__ void consume(const product &p, const schedule &schedule,
                                        const ring &ring, int rank) {
    const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0); /* known to be uniform */
    const int lane = (int)threadIdx.x % 32, group = warp / 4;
    const int first_row = (S::TOGETHER ? group * 64 : 0) + warp % 4 * 16 + lane / 4;
    const uint64_t in = wgmma_panel(ring.memory + (S::TOGETHER ? group * 64 * PANEL_ROW_BYTES : 0));
    const uint64_t W = wgmma_panel(ring.memory + S::IN_BYTES);
    const int tiles = schedule.tiles_t * schedule.tiles_n;
    const bool pairs = p.y_stride % 2 == 0 && p.N % 2 == 0 && (uintptr_t)p.y % 8 == 0;
    int passed = 0, turn = group;
    float sums[S::BLOCKS_64][S::TILE_N / 2];
    const auto give_turn = [&] {
        if (!S::TOGETHER) named_arrive(TURN + 1 - group, CONSUMERS);
    };
    if (group == 1) give_turn(); /* the first tile is warpgroup 0's */
    for (int index = blockIdx.x / CLUSTER; index < tiles; index += schedule.workers) {
        const bool own = S::TOGETHER || turn == 0;
        turn ^= 1;
        passed += schedule.steps;
        if (!own) continue;
        const tile tile = tile_at<S>(p, schedule, index, rank);
        const int t = tile.t + first_row;
        float scale[S::BLOCKS_64][2];
#pragma unroll
        for (int i = 0; i < 2 * S::BLOCKS_64; i++) {
            const int row = t + i / 2 * 64 + i % 2 * 8;
            scale[i / 2][i % 2] = p.scale && row < p.T ? __ldcg(p.scale + row) : 1.0f;
        }
        if (!S::TOGETHER) named_barrier(TURN + group, CONSUMERS);
        multiply_tile<S>(sums, schedule, ring, in, W, passed - schedule.steps, rank, give_turn);
#pragma unroll
        for (int block = 0; block < S::BLOCKS_64; block++) {
            const int column = tile.unit + lane % 4 * 2;
            if (p.epilogue == EPILOGUE_ACTIVATE)
                activate_rows<S>(p, sums[block], scale[block], t + block * 64, tile.unit);
            else if (pairs)
                store_rows<S, true>(p, sums[block], scale[block], t + block * 64, column);
            else
                store_rows<S, false>(p, sums[block], scale[block], t + block * 64, column);
        }
    }
}

/* What      the contract of struct product, bf16 with f32 sums.
 * Owners    a cluster of two blocks two neighbouring tiles, and every workers-th pair of them. In a
 *           block two warpgroups consume, and of the third one thread produces.
 * Shared    a ring of stages: TILE_T rows, then TILE_N rows of W, 64 of K each; barriers. With
 *           ACTIVATE the first half of the latter are gate rows and the second their up rows, so
 *           that a thread holds both sums.
 * Registers BLOCKS_64 TILE_N / 2 sums a thread, up to 176 of 232.
 * Bound     2 T N K FLOPs, at full load by the power that they draw; 65 to 256 rows by W's bytes.
 * Numerics  f32 sums over K in ascending order, whatever the tile. Rows past T, rows of W past N
 *           and K's end arrive as zeros; nothing past T and N is stored.
 * Barriers  struct ring; TURN. Of the cluster, first: the barriers are ready | the other block
 *           signals them; last: the other one has sent its last bytes and signals | this one ends.
 * Order     W is asked for before the inputs are waited for, rows, scale and residual after.
 * Form      results go from registers to memory, whole 32-byte sectors at a time, since y has any
 *           stride; the other warpgroup's products hide it. */
template <class S>
__global__ void __launch_bounds__(THREADS, 1)
    matmul_wgmma(const __grid_constant__ CUtensorMap in, const __grid_constant__ CUtensorMap W,
                 const __grid_constant__ product p, const __grid_constant__ schedule schedule) {
    extern __shared__ unsigned char memory[];
    ring ring;
    ring.memory = panel_aligned(shared_address(memory));
    ring.full = ring.memory + S::STAGES * S::STAGE_BYTES;
    ring.empty = ring.full + 8 * S::STAGES;
    const int rank = cluster_rank();
    start_dependents();
    if (threadIdx.x == 0) {
        for (int i = 0; i < S::STAGES; i++) {
            barrier_init(ring.full + 8 * i, 1);
            barrier_init(ring.empty + 8 * i, S::READERS);
        }
        barriers_ready();
    }
    cluster_sync(); /* first */
    if (threadIdx.x >= CONSUMERS) {
        give_registers<PRODUCER_REGISTERS>();
        if (threadIdx.x == CONSUMERS) produce<S>(&in, &W, p, schedule, ring, rank);
    } else {
        take_registers<CONSUMER_REGISTERS>();
        wait_for_inputs();
        consume<S>(p, schedule, ring, rank);
    }
    __syncwarp();   /* the producer's warp is whole again: the next needs all of its threads */
    cluster_sync(); /* last */
}

/* ---- launching ---- */

struct form {
    int tile_t, tile_n, below, beside;
    bool together;
    int shared;
    void (*kernel)(CUtensorMap, CUtensorMap, product, schedule);
};

template <int T, int N, bool BELOW = true, bool TOGETHER = false> constexpr form form_of() {
    using S = shape<T, N, BELOW, TOGETHER>;
    return {T, N, S::BELOW_T, S::BESIDE_N, TOGETHER, S::SHARED, matmul_wgmma<S>};
}

constexpr form forms[] = {
    /* 65 to 256 rows, which wait for W: clusters enough to ask for it without cutting K. N x T =
     * 4096 x 128 and 6144 x 128 are 128 tiles of the first two, 4096 x 256 and 6144 x 256 of the
     * next, 28672 x 128 twice as many of the last. */
    form_of<64, 64>(),
    form_of<64, 96>(),
    form_of<64, 128>(),
    form_of<64, 192>(),
    form_of<64, 224>(),
    /* More rows, by how they fill the last wave: 28672 x 256 are 512 tiles of 112; 128 for 4096;
     * 176 gives L2 the least to do and the tensor cores the longest runs. */
    form_of<128, 112>(),
    form_of<128, 128>(),
    form_of<128, 176>(),
    /* The same with half of the rows in a cluster, where T has an odd number of tiles. */
    form_of<128, 128, false>(),
    form_of<128, 176, false>(),
    /* Too large for two sets of sums: 6144 x 512 are 128 tiles. */
    form_of<128, 192, true, true>(),
};

schedule schedule_for(const struct cuda_backend *b, const struct product *p, const form &form) {
    const int units = p->epilogue == EPILOGUE_ACTIVATE ? form.tile_n / 2 : form.tile_n;
    schedule schedule = {};
    schedule.steps = divide_up(p->K, PANEL_DEPTH);
    schedule.tiles_t = divide_up(p->T, form.tile_t * form.below);
    schedule.tiles_n = divide_up(units_of(*p), units * form.beside);
    schedule.group = std::min(GROUP_ROWS / form.below, schedule.tiles_t);
    schedule.workers = std::min(b->multiprocessors / CLUSTER, schedule.tiles_t * schedule.tiles_n);
    return schedule;
}

/* Cycles of the busiest multiprocessor, roughly: a step costs the most of its products (64 rows by
 * N by 64 of K: 2 N cycles), of its bytes from L2 (48 a cycle) and of its bytes from memory (20 a
 * cycle), and a tenth of L2's for their power. */
double cost(const form &form, const schedule &schedule, int T) {
    const double from_L2 =
        PANEL_ROW_BYTES * ((double)form.tile_t / form.beside + (double)form.tile_n / form.below);
    const double from_memory = PANEL_ROW_BYTES * (double)form.tile_n / divide_up(T, form.tile_t);
    const double products = form.tile_t / 64 * form.tile_n * 2;
    const double step = std::max({products, from_L2 / 48, from_memory / 20}) + from_L2 / 480;
    const int waves = divide_up(schedule.tiles_t * schedule.tiles_n, schedule.workers);
    const double exposed = form.together ? 4000.0 * waves : 0; /* the epilogues */
    return waves * schedule.steps * step + exposed;
}

const form &choose(const struct cuda_backend *b, const struct product *p) {
    const form *best = &forms[0];
    double least = 0;
    for (const form &form : forms) {
        const double cycles = cost(form, schedule_for(b, p, form), p->T);
        if (&form == forms || cycles < least) best = &form, least = cycles;
    }
    return *best;
}

} // namespace

bool cuda_matmul_hopper_takes(const struct product *p) {
    const bool aligned = (uintptr_t)p->W % 16 == 0 && (uintptr_t)p->in % 16 == 0;
    const bool activates =
        p->epilogue != EPILOGUE_ACTIVATE || (p->N % 16 == 0 && (uintptr_t)p->h % 8 == 0);
    const bool pairs = p->epilogue != EPILOGUE_QKV ||
                       (p->T <= CUDA_FEW_ROWS && p->heads.D % 16 == 0 && p->heads.half % 8 == 0);
    return p->dtype == BF16 && p->T >= 1 && p->N >= 1 && p->K >= 8 && p->K % 8 == 0 && aligned &&
           activates && pairs;
}

void cuda_matmul_hopper(struct cuda_backend *b, const struct product *p) {
    if (!cuda_matmul_hopper_takes(p)) {
        cuda_failed(b, "cuda_matmul_hopper: bf16, K a multiple of 8, N as the epilogue needs it",
                    cudaErrorInvalidValue);
        return;
    }
    if (p->T <= CUDA_FEW_ROWS) {
        cuda_matmul_few(b, p);
        return;
    }
    const form &form = choose(b, p);
    const schedule schedule = schedule_for(b, p, form);
    CUtensorMap in, W;
    if (cuda_matrix_map(b, &in, p->in, p->T, p->K, form.tile_t / form.beside) &&
        cuda_weight_map(b, &W, *p, form.tile_n / 2))
        cuda_launch_clusters(b, "matmul_wgmma", form.kernel,
                             dim3((unsigned)(schedule.workers * CLUSTER)), CLUSTER, THREADS,
                             (size_t)form.shared, in, W, *p, schedule);
}
