/* Products of up to 64 rows in bf16 on sm_90, at the speed of memory: rows of W are the 64-row side
 * of the tensor cores' products, rows of the step the narrow side. A member of a chain of dependent
 * launches: W streams before the kernel's inputs are there. */
#include "kernels/cuda_matmul_few.cuh"
#include "kernels/cuda_matmul_hopper.h"

#include <algorithm>

namespace {

enum {
    CONSUMERS = FEW_CONSUMERS,
    /* A warp asks for W, one for the rows, one gathers their facts. */
    THREADS = CONSUMERS + 3 * 32,
    SWIZZLED = 8,    /* rows of a panel that the copy engine's pattern spans */
    MOST_UNITS = 64, /* of a tile */
    MAX_STAGES = 16,
    /* Bytes of W on their way to a multiprocessor: 4.6 TB/s need about 35 KB, and far more would
     * queue in front of the chain's other traffic. */
    IN_FLIGHT = 48 << 10,
    /* Bytes of a block. Two neighbours of the chain fit into a multiprocessor (227 KB), so that one
     * fills its ring while the other drains, and three do not. Two of the products that ADD never
     * share one: attention leaves some multiprocessors emptier than others, two blocks of the next
     * product would move in there, and all later kernels would inherit the imbalance. */
    SHARED_BYTES = 96 << 10,
    SHARED_BYTES_ADD = 116 << 10,
    /* Of more than 16 rows, whose panels would leave such a ring two or three stages. */
    SHARED_BYTES_WIDE = 200 << 10
};

/* How the units are dealt out, in groups of `group` units: `each` to a block, one more to the first
 * `more`. A block takes them in up to `tiles` tiles that differ by one group at most, the larger
 * ones of `units` units.
 *
 * With QKV a group is a tile: an octet of the pairs of a head (struct pair_of_head), and the same
 * octet of the heads after it, 16 rows of W each. So one box has a tile, which along the rows of a
 * head it would not where two heads meet. `across` groups have an octet of all heads. */
struct deal {
    int blocks, group, each, more, tiles, units, across;
    int stages, in_flight; /* of the ring; of W, on their way at most */
    int steps;             /* of K, in a tile */
};

/* Stages of the ring: two panels of W, [2][units][64], then panels of the rows, [1 or 2][ROWS][64].
 * With ACTIVATE the panels of W are gate and up, else two neighbouring pieces of K. */
template <int ROWS, bool ACTIVATE> struct stage_form {
    static constexpr int PIECES = ACTIVATE ? 1 : 2; /* of 64 of K */
    static constexpr int DEPTH = PIECES * PANEL_DEPTH;
    static constexpr int ROWS_BYTES = ROWS * PANEL_ROW_BYTES;
    static __host__ __device__ constexpr int bytes(int units) {
        return 2 * units * PANEL_ROW_BYTES + PIECES * ROWS_BYTES;
    }
};

struct barriers {
    uint64_t W[MAX_STAGES],
        rows[MAX_STAGES];       /* a stage's bytes have landed | they are multiplied */
    uint64_t empty[MAX_STAGES]; /* all warps' products have read it | it is refilled */
    uint64_t facts;             /* they are gathered | read */
};

/* By one thread of every consumer warp; also those of places that the ring does not have. */
__device__ __forceinline__ void init_barriers(barriers &barrier, int warp) {
    constexpr int OF_WARP = MAX_STAGES / (CONSUMERS / 32);
    static_assert(MAX_STAGES % (CONSUMERS / 32) == 0, "warps share the barriers");
#pragma unroll
    for (int s = warp * OF_WARP; s < (warp + 1) * OF_WARP; s++) {
        barrier_init(shared_address(&barrier.W[s]), 1);
        barrier_init(shared_address(&barrier.rows[s]), 1);
        barrier_init(shared_address(&barrier.empty[s]), CONSUMERS / 32);
    }
    if (warp == 0) barrier_init(shared_address(&barrier.facts), 32);
    barriers_ready();
}

/* A place in the ring and the parity of its phase. */
struct place {
    int stage, parity;
    __device__ __forceinline__ void advance(int stages) {
        if (++stage == stages) stage = 0, parity ^= 1;
    }
};

/* The tiles of this block. */
struct tile_walk {
    int tiles, first, each, more; /* groups: of the block, of a tile; tiles that have one more */
    __device__ __forceinline__ explicit tile_walk(const deal &d) {
        const int block = (int)blockIdx.x, groups = d.each + (block < d.more);
        first = block * d.each + min(block, d.more);
        tiles = min(d.tiles, groups);
        each = groups / tiles;
        more = groups - each * tiles;
    }
    /* First group of a tile. */
    __device__ __forceinline__ int group(int tile) const {
        return first + tile * each + min(tile, more);
    }
};

/* Asks for W, all of the block's, from before the inputs are there. tall, low: boxes of d.units units and
 * of a group less; with QKV both of d.units, for pairs that turn and for the others. */
template <class S, enum epilogue E>
__device__ void ask_for_weights(const CUtensorMap *tall, const CUtensorMap *low, const product &p,
                                const deal &d, uint32_t ring, barriers *barrier) {
    constexpr bool HEADS = E == EPILOGUE_QKV;
    constexpr bool ACTIVATE = E == EPILOGUE_ACTIVATE;
    const tile_walk walk(d);
    place next = {0, 1}, landed = {0, 0};
    int asked = 0;
    for (int tile = 0; tile < walk.tiles; tile++) {
        const int group = walk.group(tile), units = (walk.group(tile + 1) - group) * d.group;
        const int unit = group * d.group; /* not QKV */
        const int octet = HEADS ? group / d.across : 0;
        const int head = (group - octet * d.across) * (d.units / PAIRED);
        const bool first = HEADS ? 8 * octet < p.heads.half : units == d.units;
        const CUtensorMap *map = first ? tall : low;
        for (int k = 0; k < d.steps * S::DEPTH; k += S::DEPTH) {
            const uint32_t full = shared_address(&barrier->W[next.stage]);
            const uint32_t to = ring + next.stage * S::bytes(d.units);
            barrier_wait(shared_address(&barrier->empty[next.stage]), next.parity);
            if (asked++ >= d.in_flight) {
                barrier_wait(shared_address(&barrier->W[landed.stage]), landed.parity);
                landed.advance(d.stages);
            }
            barrier_expect(full, 2 * units * PANEL_ROW_BYTES);
            const uint32_t second = to + d.units * PANEL_ROW_BYTES;
            if constexpr (HEADS) {
                copy_box(to, map, full, READ_ONCE, k, 0, 0, octet, head);
                copy_box(second, map, full, READ_ONCE, k + PANEL_DEPTH, 0, 0, octet, head);
            } else {
                copy_box(to, map, full, READ_ONCE, k, unit, 0);
                copy_box(second, map, full, READ_ONCE, ACTIVATE ? k : k + PANEL_DEPTH, unit,
                         ACTIVATE ? 1 : 0);
            }
            next.advance(d.stages);
        }
    }
}

/* Asks for the rows of the step, once a tile. */
template <class S>
__device__ void ask_for_rows(const CUtensorMap *map, const deal &d, uint32_t ring,
                             barriers *barrier) {
    const int tiles = tile_walk(d).tiles;
    place next = {0, 1};
    prefetch_map(map);
    wait_for_inputs();
    for (int tile = 0; tile < tiles; tile++)
        for (int k = 0; k < d.steps * S::DEPTH; k += S::DEPTH) {
            const uint32_t full = shared_address(&barrier->rows[next.stage]);
            const uint32_t to =
                ring + next.stage * S::bytes(d.units) + 2 * d.units * PANEL_ROW_BYTES;
            barrier_wait(shared_address(&barrier->empty[next.stage]), next.parity);
            barrier_expect(full, S::PIECES * S::ROWS_BYTES);
#pragma unroll
            for (int piece = 0; piece < S::PIECES; piece++)
                copy_box(to + piece * S::ROWS_BYTES, map, full, READ_AGAIN, k + piece * PANEL_DEPTH,
                         0);
            next.advance(d.stages);
        }
}

/* sums[i] = panel i of W times the rows, over all of K. */
template <int ROWS, class S>
__device__ __forceinline__ void multiply_tile(float (&sums)[2][ROWS / 2], const deal &d,
                                              uint32_t ring, barriers *barrier, place &next) {
    int last = -1; /* stage whose products may still be under way */
    for (int step = 0; step < d.steps; step++) {
        const uint32_t at = ring + next.stage * S::bytes(d.units);
        const uint32_t rows_at = at + 2 * d.units * PANEL_ROW_BYTES;
        barrier_wait(shared_address(&barrier->W[next.stage]), next.parity);
        barrier_wait(shared_address(&barrier->rows[next.stage]), next.parity);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < PANEL_DEPTH / 16; i++)
#pragma unroll
            for (int panel = 0; panel < 2; panel++)
                wgmma<ROWS>(sums[panel],
                            wgmma_panel(at + panel * d.units * PANEL_ROW_BYTES) +
                                i * WGMMA_COLUMNS_16,
                            wgmma_panel(rows_at + panel * (S::PIECES - 1) * S::ROWS_BYTES) +
                                i * WGMMA_COLUMNS_16,
                            step > 0 || i > 0);
        wgmma_commit();
        wgmma_wait<1>();
        if (last >= 0 && threadIdx.x % 32 == 0)
            barrier_arrive(shared_address(&barrier->empty[last]));
        last = next.stage;
        next.advance(d.stages);
    }
    wgmma_wait<0>();
    settle(sums[0]);
    settle(sums[1]);
    if (threadIdx.x % 32 == 0) barrier_arrive(shared_address(&barrier->empty[last]));
}

/* What      the contract of struct product, up to ROWS rows, bf16 with f32 sums.
 * Owners    a block the units that `deal` says, tile by tile for all of K. The warpgroup: 64 units by
 *           ROWS rows; a thread two units by ROWS / 4 rows.
 * Shared    a ring of stages (stage_form), 8 KB past it, barriers, facts. A tile of fewer than 64
 *           units leaves the upper rows of A to what lies behind its panel, numbers or not: these
 *           reach sums of units past the tile alone, which nobody stores.
 * Bound     bytes of W, each read once. The rows come from L2, T / (units of a tile) of the bytes of W:
 *           at T = 16 half for N = 4096, a seventh for gate and up.
 * Numerics  f32 sums over K in ascending order, even and odd pieces of 64 apart (not with ACTIVATE),
 *           whatever the tile. Units past N and K's end arrive as zeros, rows past T as what
 *           lies there. Sums of squares by thread, lanes, warps and blocks, each in a fixed
 *           order.
 * Barriers  struct barriers; __syncthreads: barriers are ready | used; leave_squares.
 * Order     W is asked for at once, up to the ring's size before the inputs are there, norms' weights, biases,
 *           slots and positions as well; rows, their factors, residual, cosines and sines after the wait.
 * Needs     a kernel of this step that waited before it let others start (embed), for slots and positions.
 * Form      one warpgroup and few registers rather than the 384 threads of cuda_matmul_hopper.cu, so
 *           that neighbours of the chain share a multiprocessor. */
template <int ROWS, enum epilogue E>
__global__ void __launch_bounds__(THREADS, ROWS > 16 ? 1 : 2)
    few_rows_wgmma(const __grid_constant__ CUtensorMap tall,
                   const __grid_constant__ CUtensorMap low,
                   const __grid_constant__ CUtensorMap rows, const __grid_constant__ product p,
                   const __grid_constant__ deal d) {
    using S = stage_form<ROWS, E == EPILOGUE_ACTIVATE>;
    extern __shared__ unsigned char ring_memory[];
    __shared__ barriers barrier;
    __shared__ row_facts<ROWS> facts;
    const uint32_t ring = panel_aligned(shared_address(ring_memory));
    const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0);
    const int lane = (int)threadIdx.x % 32;
    start_dependents();
    if (lane == 0 && warp < CONSUMERS / 32) init_barriers(barrier, warp);
    __syncthreads();
    if (warp == CONSUMERS / 32) {
        if (lane == 0) ask_for_weights<S, E>(&tall, &low, p, d, ring, &barrier);
        return;
    }
    if (warp == CONSUMERS / 32 + 1) {
        if (lane == 0) ask_for_rows<S>(&rows, d, ring, &barrier);
        return;
    }
    if (warp > CONSUMERS / 32) {
        gather_facts<ROWS, E>(p, facts);
        barrier_arrive(shared_address(&barrier.facts)); /* each lane after its own facts */
        return;
    }
    const tile_walk walk(d);
    const int t = 2 * (lane % 4);
    place next = {0, 0};
    float squares[ROWS / 4] = {};
    for (int tile = 0; tile < walk.tiles; tile++) {
        const int group = walk.group(tile), n = group * d.group + warp * 16 + lane / 4;
        const int last = min(walk.group(tile + 1) * d.group, units_of(p));
        float sums[2][ROWS / 2];
        const auto multiply = [&] {
            multiply_tile<ROWS, S>(sums, d, ring, &barrier, next);
            barrier_wait(shared_address(&barrier.facts), 0);
        };
        if constexpr (E == EPILOGUE_ADD) {
            residual<ROWS> before(p, n, last);
            wait_for_inputs();
            before.load(p, t, n, last);
            multiply();
            finish_add<ROWS>(p, sums, before, facts, squares, t, n, last);
        } else if constexpr (E == EPILOGUE_QKV) {
            const int octet = group / d.across, heads = d.units / PAIRED; /* of the tile */
            const int head = warp < heads ? (group - octet * d.across) * heads + warp : NO_HEAD;
            const pair_of_head pair(p.heads, octet, head, lane / 4);
            turns<ROWS> turns(p, pair);
            wait_for_inputs();
            turns.load(p, t, pair);
            multiply();
            finish_heads<ROWS>(p, sums, turns, facts, t, pair);
        } else {
            wait_for_inputs();
            multiply();
            finish_plain<ROWS, E>(p, sums, facts, t, n, last);
        }
    }
    if (E == EPILOGUE_ADD && p.gamma) leave_squares<ROWS>(p, squares, facts);
}

/* ---- launching ---- */

int blocks_for(const struct cuda_backend *b, int groups) {
    return std::min({groups, b->multiprocessors, (int)CUDA_SQUARES});
}

/* With QKV every tile has as many heads as it takes for the blocks to do with one tile each, at
 * most 4; past the last head a tile is zeros. */
deal deal_for(const struct cuda_backend *b, const struct product &p) {
    deal d = {};
    int groups = 0;
    if (p.epilogue == EPILOGUE_QKV) {
        const int heads = p.heads.H + 2 * p.heads.G, octets = p.heads.D / PAIRED;
        do {
            d.group += PAIRED;
            d.across = divide_up(heads, d.group / PAIRED);
            groups = octets * d.across;
        } while (d.group < MOST_UNITS && groups > b->multiprocessors);
    } else {
        d.group = SWIZZLED;
        groups = divide_up(units_of(p), d.group);
    }
    d.blocks = blocks_for(b, groups);
    d.each = groups / d.blocks;
    d.more = groups % d.blocks;
    const int most = divide_up(groups, d.blocks);
    d.tiles = divide_up(most, MOST_UNITS / d.group);
    d.units = divide_up(most, d.tiles) * d.group;
    return d;
}

/* The two boxes by which ask_for_weights has a tile. */
bool weight_maps(struct cuda_backend *b, CUtensorMap map[2], const struct product &p,
                 const deal &d) {
    if (p.epilogue == EPILOGUE_QKV)
        return cuda_heads_map(b, &map[0], p, PAIRED / 2, std::max(p.heads.half, 8),
                              d.units / PAIRED) &&
               cuda_heads_map(b, &map[1], p, PAIRED / 2, 8, d.units / PAIRED);
    return cuda_weight_map(b, &map[0], p, d.units) &&
           cuda_weight_map(b, &map[1], p, std::max(d.units - d.group, d.group));
}

template <int ROWS, enum epilogue E> void launch(struct cuda_backend *b, const struct product *p) {
    using S = stage_form<ROWS, E == EPILOGUE_ACTIVATE>;
    deal d = deal_for(b, *p);
    d.steps = divide_up(p->K, S::DEPTH);
    const int block = ROWS > 16           ? SHARED_BYTES_WIDE
                      : E == EPILOGUE_ADD ? SHARED_BYTES_ADD
                                          : SHARED_BYTES;
    const int shared = block - (int)(sizeof(barriers) + sizeof(row_facts<ROWS>));
    const int beyond = (MOST_UNITS - d.units) * PANEL_ROW_BYTES; /* rows of A past a panel */
    d.stages = std::min((shared - PANEL_ALIGNMENT - beyond) / S::bytes(d.units), (int)MAX_STAGES);
    d.in_flight = std::min(divide_up(IN_FLIGHT, 2 * d.units * PANEL_ROW_BYTES), d.stages);
    CUtensorMap W[2], rows;
    if (weight_maps(b, W, *p, d) &&
        cuda_matrix_map(b, &rows, p->in, cuda_rows_to_read(*p, ROWS), p->K, ROWS))
        cuda_launch(b, "few_rows_wgmma", few_rows_wgmma<ROWS, E>, dim3((unsigned)d.blocks), THREADS,
                    (size_t)shared, W[0], W[1], rows, *p, d);
}

template <int ROWS> void launch(struct cuda_backend *b, const struct product *p) {
    switch (p->epilogue) {
    case EPILOGUE_STORE: launch<ROWS, EPILOGUE_STORE>(b, p); return;
    case EPILOGUE_ADD: launch<ROWS, EPILOGUE_ADD>(b, p); return;
    case EPILOGUE_ACTIVATE: launch<ROWS, EPILOGUE_ACTIVATE>(b, p); return;
    case EPILOGUE_QKV: launch<ROWS, EPILOGUE_QKV>(b, p); return;
    case EPILOGUE_HEADS: /* fits() in cuda_matmul_hopper.cu: of many rows alone */
        cuda_failed(b, "cuda_matmul_few: norms of heads", cudaErrorInvalidValue);
    }
}

} // namespace

int cuda_matmul_few_parts(const struct cuda_backend *b, int N) {
    return blocks_for(b, divide_up(N, SWIZZLED));
}

void cuda_matmul_few(struct cuda_backend *b, const struct product *p) {
    if (p->T <= 8)
        launch<8>(b, p);
    else if (p->T <= 16)
        launch<16>(b, p);
    else if (p->T <= 32)
        launch<32>(b, p);
    else
        launch<64>(b, p);
}
