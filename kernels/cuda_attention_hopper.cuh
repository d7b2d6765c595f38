/* Attention of a prompt on Hopper, what comes before the products: sizes, the tiles of a prompt, shared
 * memory and its barriers, and the warps that fill it: producer and cleaner. */
#ifndef KERNELS_CUDA_ATTENTION_HOPPER_CUH
#define KERNELS_CUDA_ATTENTION_HOPPER_CUH

#include "kernels/cuda.cuh"
#include "kernels/cuda.h"
#include "kernels/cuda_wgmma.cuh"

#include <climits>

/* ---- shared memory and the copy engine ---- */

/* What this thread wrote to shared memory comes before what copy engine and tensor cores do with it. */
__device__ __forceinline__ void fence_for_copies() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
/* A box to global memory; what lies outside of the tensor is not written. The thread that asks commits,
 * and waits: until the boxes are read, or written. */
__device__ __forceinline__ void store_box(const CUtensorMap *map, uint32_t from, int x, int y,
                                          int z, int w) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], "
                 "[%1];" ::"l"(map),
                 "r"(from), "r"(x), "r"(y), "r"(z), "r"(w)
                 : "memory");
}
__device__ __forceinline__ void commit_boxes() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
__device__ __forceinline__ void wait_for_boxes_read() {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
__device__ __forceinline__ void wait_for_boxes_written() {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
/* Four 8x8 matrices of bf16 to shared memory, a row's address per lane (stmatrix). */
__device__ __forceinline__ void store_matrices(uint32_t address, uint32_t r0, uint32_t r1,
                                               uint32_t r2, uint32_t r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address),
                 "r"(r0), "r"(r1), "r"(r2), "r"(r3)
                 : "memory");
}
__device__ __forceinline__ uint4 load_shared_16(uint32_t from) {
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(from)
                 : "memory");
    return x;
}
__device__ __forceinline__ void clear_shared_16(uint32_t to) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%1,%1,%1};" ::"r"(to), "r"(0) : "memory");
}

/* ---- configuration ---- */

enum {
    QUERIES = 64, /* of a warpgroup: the rows of a wgmma */
    LINE = PANEL_ROW_BYTES,
    NOTES = 4,         /* see note */
    SECTION = 16 << 20 /* bytes of K and V that tiles work on at a time, to stay in the L2 */
};

template <int HEAD, int WARPGROUPS> struct tiling {
    static constexpr int D = HEAD, CONSUMERS = WARPGROUPS;
    static constexpr int PANELS = (D + PANEL_DEPTH - 1) / PANEL_DEPTH; /* zeros fill the last */
    /* D = 256: O takes 128 registers, so two consumers, and memory is for 64 positions. */
    static constexpr int KEYS = D <= 128 ? 128 : 64; /* positions of a block */
    static constexpr bool HALVES = KEYS == 128;      /* half of the diagonal block may be skipped */
    static constexpr int KEY_STAGES = 2, VALUE_STAGES = D <= 128 ? 2 : 1;
    static constexpr int THREADS = (CONSUMERS + 1) * 128;
    static constexpr int CONSUMER_REGISTERS = CONSUMERS == 3 ? 160 : 232;
    static constexpr int PRODUCER_REGISTERS = CONSUMERS == 3 ? 32 : 40;
    static constexpr uint32_t SLAB = PANELS * QUERIES * LINE; /* Q of a warpgroup */
    static constexpr uint32_t BLOCK = PANELS * KEYS * LINE;   /* K or V of a block */
    static constexpr uint32_t SHARED =                        /* and what aligns it */
        2 * CONSUMERS * SLAB + (KEY_STAGES + VALUE_STAGES) * BLOCK + PANEL_ALIGNMENT;
    static_assert(SHARED + 512 <= 227 * 1024, "a multiprocessor's shared memory");
};

struct tensor_maps {
    CUtensorMap q, out, keys, values;
};

/* ---- work ---- */

struct prompt {
    int T, G, per_group;            /* heads of a group */
    int span, rows;                 /* rows of a warpgroup, of a tile */
    uint32_t query_bytes;           /* of a tile */
    unsigned heights, tiles;        /* tiles of a group; of all */
    float factor;                   /* scale log2 e */
    const int32_t *slot, *position; /* of row 0 */
    unsigned *counters;             /* tiles drawn beside the first; blocks that drew in vain */
};

struct tile {
    int row, position, group; /* the first row, and its position in the cache */
    int end;                  /* positions that the last row sees */
    int blocks;               /* of K and V; 0: no tile is left */
    bool half;                /* of the last block, the first half is enough */
};

/* Longest first; start: position of row 0; section: groups whose tiles are drawn together. */
template <class C>
__device__ __forceinline__ tile tile_of(const prompt &p, int start, unsigned section,
                                        unsigned number) {
    tile t = {};
    if (number >= p.tiles) return t;
    const unsigned per_section = section * p.heights, skipped = number / per_section * section;
    const unsigned within = number % per_section, groups = min(section, p.G - skipped);
    t.row = (p.heights - 1 - within / groups) * p.rows;
    t.group = skipped + within % groups;
    t.position = start + t.row;
    t.end = min(t.position + p.rows, start + p.T);
    t.blocks = (t.end - 1) / C::KEYS + 1;
    t.half = C::HALVES && (t.end - 1) % C::KEYS < C::KEYS / 2;
    return t;
}

/* ---- shared memory ---- */

/* The producer tells the cleaner of a block of V that some rows of a tile do not see in full, and of a
 * tile's last block in any case. At most two are under way, and a note that no more will come. */
struct note {
    int stage; /* no more: -1 */
    int tile;  /* which of the two in control */
    int block;
};

struct control {
    uint64_t queries_full[2];  /* Q and the tile's description are there | a consumer reads them */
    uint64_t queries_empty[2]; /* the results have left Q's memory | the producer overwrites it */
    uint64_t keys_full[2], values_full[2];   /* a stage has arrived (and is clean) | it is read */
    uint64_t keys_empty[2], values_empty[2]; /* all warps have read a stage | it is overwritten */
    uint64_t landed[NOTES];                  /* a stage of V has arrived, with a note | cleaner */
    tile tiles[2];
    int slot;      /* the producer's */
    int broken[2]; /* rows from this position on see a NaN or an infinity in V */
    note notes[NOTES];
};

/* Where Q, K and V lie. */
struct memory {
    uint32_t queries, keys, values;
};

/* Where the n-th use of a ring lies, and the parity of its phase. */
template <int STAGES> __device__ __forceinline__ int stage_of(unsigned n) {
    return (int)(n % STAGES);
}
template <int STAGES> __device__ __forceinline__ int parity_of(unsigned n) {
    return (int)(n / STAGES % 2);
}

template <class C> __device__ __forceinline__ void init_barriers(control &c) {
    for (int i = 0; i < 2; i++) {
        barrier_init(shared_address(&c.queries_full[i]), 1);
        barrier_init(shared_address(&c.queries_empty[i]), C::CONSUMERS);
        barrier_init(shared_address(&c.keys_full[i]), 1);
        barrier_init(shared_address(&c.values_full[i]), 1);
        barrier_init(shared_address(&c.keys_empty[i]), C::CONSUMERS * 4);
        barrier_init(shared_address(&c.values_empty[i]), C::CONSUMERS * 4);
    }
    for (int i = 0; i < NOTES; i++) barrier_init(shared_address(&c.landed[i]), 1);
    barriers_ready();
}

/* ---- the producer: one thread ---- */

/* Q of a tile: 64 queries of each warpgroup. Rows past T become zeros, the box's idle rest stays. */
template <class C>
__device__ __forceinline__ void copy_queries(const tensor_maps &maps, const prompt &p,
                                             const tile &t, uint32_t to, uint32_t barrier) {
    barrier_expect(barrier, p.query_bytes);
#pragma unroll 1
    for (int i = 0; i < C::CONSUMERS * C::PANELS; i++)
        copy_box(to + i * QUERIES * LINE, &maps.q, barrier, READ_NORMALLY,
                 i % C::PANELS * PANEL_DEPTH, 0, t.row + i / C::PANELS * p.span, t.group);
}

/* Of K or V. What lies past S becomes zeros. */
template <class C>
__device__ __forceinline__ void copy_positions(const CUtensorMap *map, int position, int group,
                                               int slot, uint32_t to, uint32_t barrier) {
    barrier_expect(barrier, C::BLOCK);
#pragma unroll 2
    for (int panel = 0; panel < C::PANELS; panel++)
        copy_box(to + panel * C::KEYS * LINE, map, barrier, READ_NORMALLY, panel * PANEL_DEPTH,
                 position, group, slot);
}

/* The n-th block of K and V that this thread copies, of the i-th tile. */
template <class C>
__device__ __forceinline__ void copy_block(const tensor_maps &maps, const tile &t, int block,
                                           unsigned i, unsigned n, unsigned &notes,
                                           const memory &at, control &c) {
    const int k = stage_of<C::KEY_STAGES>(n), v = stage_of<C::VALUE_STAGES>(n);
    const int position = block * C::KEYS;
    barrier_wait(shared_address(&c.keys_empty[k]), parity_of<C::KEY_STAGES>(n) ^ 1);
    copy_positions<C>(&maps.keys, position, t.group, c.slot, at.keys + k * C::BLOCK,
                      shared_address(&c.keys_full[k]));
    barrier_wait(shared_address(&c.values_empty[v]), parity_of<C::VALUE_STAGES>(n) ^ 1);
    uint32_t full = shared_address(&c.values_full[v]);
    if (position + C::KEYS > t.position) {
        c.notes[stage_of<NOTES>(notes)] = {v, stage_of<2>(i), block};
        full = shared_address(&c.landed[stage_of<NOTES>(notes++)]);
    }
    copy_positions<C>(&maps.values, position, t.group, c.slot, at.values + v * C::BLOCK, full);
}

template <class C>
__device__ __forceinline__ void produce(const tensor_maps &maps, const prompt &p, const memory &at,
                                        control &c) {
    const int start = *p.position;
    c.slot = *p.slot;
    const unsigned section = max(1, min(SECTION / (C::D * 4) / (start + p.T), p.G));
    unsigned number = blockIdx.x, n = 0, notes = 0;
    for (unsigned i = 0;; i++) {
        const uint32_t full = shared_address(&c.queries_full[stage_of<2>(i)]);
        barrier_wait(shared_address(&c.queries_empty[stage_of<2>(i)]), parity_of<2>(i) ^ 1);
        c.tiles[stage_of<2>(i)] = tile_of<C>(p, start, section, number);
        const tile &t = c.tiles[stage_of<2>(i)]; /* few registers */
        if (t.blocks == 0) {
            barrier_arrive(full);
            break;
        }
        copy_queries<C>(maps, p, t, at.queries + stage_of<2>(i) * C::CONSUMERS * C::SLAB, full);
        number = gridDim.x + atomicAdd(&p.counters[0], 1u);
#pragma unroll 1
        for (int block = t.blocks - 1; block >= 0; block--, n++)
            copy_block<C>(maps, t, block, i, n, notes, at, c);
    }
    c.notes[stage_of<NOTES>(notes)].stage = -1;
    barrier_arrive(shared_address(&c.landed[stage_of<NOTES>(notes)]));
    /* The last block leaves the counters zero: all others have drawn in vain before. */
    if (count_up(&p.counters[1], gridDim.x - 1) == gridDim.x - 1) p.counters[0] = 0;
}

/* ---- the cleaner: one warp ---- */

/* Sets a row of V to zeros where no row of the tile sees it, or where it holds a NaN or an infinity;
 * returns whether it does. Every lane takes a row, and begins at another piece of it: no conflicts. */
template <class C> __device__ __forceinline__ bool clean_row(uint32_t row, bool seen) {
    const __nv_bfloat162 zero = __float2bfloat162_rn(0);
    __nv_bfloat162 sum = zero; /* 0 times everything */
    const auto add = [&](uint32_t pair) {
        sum = __hfma2(*reinterpret_cast<const __nv_bfloat162 *>(&pair), zero, sum);
    };
    if (seen)
#pragma unroll 1
        for (int panel = 0; panel < C::PANELS; panel++)
#pragma unroll 4
            for (unsigned piece = 0; piece < LINE / 16; piece++) {
                const uint4 x =
                    load_shared_16(row + panel * C::KEYS * LINE + (piece ^ threadIdx.x % 8) * 16);
                add(x.x), add(x.y), add(x.z), add(x.w);
            }
    const bool broken = __hisnan(sum.x) || __hisnan(sum.y);
    if (!seen || broken)
#pragma unroll 1
        for (int panel = 0; panel < C::PANELS; panel++)
#pragma unroll 2
            for (unsigned piece = 0; piece < LINE / 16; piece++)
                clear_shared_16(row + panel * C::KEYS * LINE + (piece ^ threadIdx.x % 8) * 16);
    return broken;
}

template <class C> __device__ __forceinline__ void clean(const memory &at, control &c) {
    const int lane = threadIdx.x % 32;
    int broken = INT_MAX;
    for (unsigned n = 0;; n++) {
        barrier_wait(shared_address(&c.landed[stage_of<NOTES>(n)]), parity_of<NOTES>(n));
        const note now = c.notes[stage_of<NOTES>(n)];
        if (now.stage < 0) break;
        const tile &t = c.tiles[now.tile];
        const int position = now.block * C::KEYS, end = t.end - position;
        const bool last = now.block == t.blocks - 1;
        const int used = last && t.half ? C::KEYS / 2 : C::KEYS;
        if (last) broken = INT_MAX; /* a new tile */
#pragma unroll 1
        for (int row = max(t.position + 1 - position, 0) + lane; row < used; row += 32)
            if (clean_row<C>(at.values + now.stage * C::BLOCK + row * LINE, row < end))
                broken = min(broken, position + row);
        broken = __reduce_min_sync(0xffffffffu, broken);
        fence_for_copies(); /* zeros are written | wgmma reads them, the copy engine overwrites */
        if (lane == 0) c.broken[now.tile] = broken;
        __syncwarp(); /* every lane has written its zeros | lane 0 says so */
        if (lane == 0) barrier_arrive(shared_address(&c.values_full[now.stage]));
    }
}

#endif
