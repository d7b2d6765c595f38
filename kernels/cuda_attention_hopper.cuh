/* Attention of a prompt on Hopper, what comes before the products: sizes, the tiles of a prompt,
 * shared memory and its barriers, and the warps that fill it: producer and cleaner.
 * cuda_attention_hopper.cu has the whole and the consumers. */
#ifndef KERNELS_CUDA_ATTENTION_HOPPER_CUH
#define KERNELS_CUDA_ATTENTION_HOPPER_CUH

#include "kernels/cuda.cuh"
#include "kernels/cuda.h"
#include "kernels/cuda_wgmma.cuh"

#include <climits>

namespace {

/* ---- shared memory by address ---- */

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
    QUERIES = 64,      /* of a warpgroup: the rows of a wgmma */
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
    static constexpr uint32_t SLAB = PANELS * QUERIES * PANEL_ROW_BYTES; /* Q of a warpgroup */
    static constexpr uint32_t BLOCK = PANELS * KEYS * PANEL_ROW_BYTES;   /* K or V of a block */
    static constexpr uint32_t SHARED =                                   /* and what aligns it */
        2 * CONSUMERS * SLAB + (KEY_STAGES + VALUE_STAGES) * BLOCK + PANEL_ALIGNMENT;
    static_assert(SHARED + 512 <= 227 * 1024, "a multiprocessor's shared memory");
};

struct tensor_maps {
    CUtensorMap q, out, keys, values;
};

/* ---- work ---- */

struct prompt {
    int T, G, heads_of_group;
    int warpgroup_rows, tile_rows; /* of the step, that a warpgroup and a tile take */
    uint32_t query_bytes;          /* of a tile */
    unsigned tiles_of_group, tiles;
    float factor; /* scale log2 e */
    int ring, window;
    const int32_t *slot, *position; /* of row 0 */
    unsigned *counters; /* [2]: tiles drawn after each block's first; blocks that drew in vain */
};

struct tile {
    int row, position, group; /* the first row, and its position in the cache */
    int end;                  /* the position after the last row's */
    int first, blocks;        /* blocks of K and V from the first one to this; 0: no tile is left */
    bool half;                /* of the last block, the first half is enough */
};

/* Tile `number` in the order of drawing: one section of groups after the other, and of each the
 * longest tiles first. start: position of row 0. */
template <class C>
__device__ __forceinline__ tile tile_of(const prompt &p, int start, unsigned section,
                                        unsigned number) {
    tile t = {};
    if (number >= p.tiles) return t;
    const unsigned per_section = section * p.tiles_of_group;
    const unsigned skipped = number / per_section * section;
    const unsigned within = number % per_section, groups = min(section, p.G - skipped);
    t.row = (p.tiles_of_group - 1 - within / groups) * p.tile_rows;
    t.group = skipped + within % groups;
    t.position = start + t.row;
    t.end = min(t.position + p.tile_rows, start + p.T);
    t.first = max(t.position + 1 - p.window, 0) / C::KEYS;
    t.blocks = (t.end - 1) / C::KEYS + 1;
    t.half = C::HALVES && (t.end - 1) % C::KEYS < C::KEYS / 2;
    return t;
}

/* ---- shared memory ---- */

/* Mbarriers: what has happened | what then begins.
 *   queries_full   Q has landed and tiles[] is written | consumers and the cleaner read them
 *   queries_empty  each thread of the consumers and the cleaner has read tiles[] and broken[], and
 *                  the results, which took Q's place, have left | the producer overwrites Q and
 *                  tiles[], the cleaner broken[]
 *   keys_full      a stage of K has landed | consumers read it
 *   keys_empty     all their warps have read it | the producer overwrites it
 *   landed         a stage of V has landed that is to be cleaned | the cleaner reads it. By turns:
 *                  two are under way at most, as V has two stages
 *   values_full    a stage of V has landed, or is clean and broken[] written | consumers read them
 *   values_empty   all their warps have read it | the producer overwrites it */
struct control {
    uint64_t queries_full[2], queries_empty[2];
    uint64_t keys_full[2], keys_empty[2];
    uint64_t values_full[2], values_empty[2], landed[2];
    tile tiles[2];
    int broken[2]; /* of a tile: rows from this position on see a NaN or an infinity in V */
    int slot;      /* the producer's alone, which has few registers */
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
        barrier_init(shared_address(&c.queries_empty[i]), C::CONSUMERS * 128 + 32);
        barrier_init(shared_address(&c.keys_full[i]), 1);
        barrier_init(shared_address(&c.values_full[i]), 1);
        barrier_init(shared_address(&c.keys_empty[i]), C::CONSUMERS * 4);
        barrier_init(shared_address(&c.values_empty[i]), C::CONSUMERS * 4);
        barrier_init(shared_address(&c.landed[i]), 1);
    }
    barriers_ready();
}

/* ---- the producer: one thread ---- */

/* Q of a tile: 64 queries of each warpgroup. Rows past T become zeros, the box's idle rest
 * stays. */
template <class C>
__device__ __forceinline__ void copy_queries(const tensor_maps &maps, const prompt &p,
                                             const tile &t, uint32_t to, uint32_t barrier) {
    barrier_expect(barrier, p.query_bytes);
#pragma unroll 1
    for (int i = 0; i < C::CONSUMERS * C::PANELS; i++)
        copy_box(to + i * QUERIES * PANEL_ROW_BYTES, &maps.q, barrier, READ_NORMALLY,
                 i % C::PANELS * PANEL_DEPTH, 0, t.row + i / C::PANELS * p.warpgroup_rows, t.group);
}

/* Of K or V. What lies past the ring's end becomes zeros. */
template <class C>
__device__ __forceinline__ void copy_positions(const CUtensorMap *map, int position, int group,
                                               int slot, uint32_t to, uint32_t barrier) {
    barrier_expect(barrier, C::BLOCK);
#pragma unroll 2
    for (int panel = 0; panel < C::PANELS; panel++)
        copy_box(to + panel * C::KEYS * PANEL_ROW_BYTES, map, barrier, READ_NORMALLY,
                 panel * PANEL_DEPTH, position, group, slot);
}

/* Whether the cleaner looks at a block of V: some rows of the tile do not see it in full. The
 * tile's last block is one. */
template <class C> __device__ __forceinline__ bool needs_cleaner(const tile &t, int block) {
    return (block + 1) * C::KEYS > t.position;
}

/* The n-th block of K and V that this thread copies; so many went to the cleaner before. */
template <class C>
__device__ __forceinline__ void copy_block(const tensor_maps &maps, const tile &t, int ring,
                                           int block, unsigned n, unsigned &cleaned,
                                           const memory &at, control &c) {
    const int k = stage_of<C::KEY_STAGES>(n), v = stage_of<C::VALUE_STAGES>(n);
    const int position = block * C::KEYS % ring;
    barrier_wait(shared_address(&c.keys_empty[k]), parity_of<C::KEY_STAGES>(n) ^ 1);
    copy_positions<C>(&maps.keys, position, t.group, c.slot, at.keys + k * C::BLOCK,
                      shared_address(&c.keys_full[k]));
    barrier_wait(shared_address(&c.values_empty[v]), parity_of<C::VALUE_STAGES>(n) ^ 1);
    const uint32_t full = needs_cleaner<C>(t, block)
                              ? shared_address(&c.landed[stage_of<2>(cleaned++)])
                              : shared_address(&c.values_full[v]);
    copy_positions<C>(&maps.values, position, t.group, c.slot, at.values + v * C::BLOCK, full);
}

template <class C>
__device__ __forceinline__ void produce(const tensor_maps &maps, const prompt &p, const memory &at,
                                        control &c) {
    const int start = *p.position;
    c.slot = *p.slot;
    const unsigned section = max(1, min(SECTION / (C::D * 4) / min(start + p.T, p.window), p.G));
    unsigned number = blockIdx.x, blocks = 0, cleaned = 0; /* so far */
    for (unsigned tiles = 0;; tiles++) {
        const int place = stage_of<2>(tiles);
        const uint32_t full = shared_address(&c.queries_full[place]);
        barrier_wait(shared_address(&c.queries_empty[place]), parity_of<2>(tiles) ^ 1);
        c.tiles[place] = tile_of<C>(p, start, section, number);
        const tile &t = c.tiles[place]; /* few registers */
        if (t.blocks == 0) {
            barrier_arrive(full);
            break;
        }
        copy_queries<C>(maps, p, t, at.queries + place * C::CONSUMERS * C::SLAB, full);
        number = gridDim.x + atomicAdd(&p.counters[0], 1u);
#pragma unroll 1
        for (int block = t.blocks - 1; block >= t.first; block--, blocks++)
            copy_block<C>(maps, t, p.ring, block, blocks, cleaned, at, c);
    }
    /* The last block leaves the counters zero: all others have drawn in vain before. */
    if (count_up(&p.counters[1], gridDim.x - 1) == gridDim.x - 1) p.counters[0] = 0;
}

/* ---- the cleaner: one warp ---- */

/* Sets a row of V to zeros where no row of the tile sees it, or where it holds a NaN or an
 * infinity; returns whether that is so. Every lane takes a row, and begins at another of its chunks
 * of 16 bytes: no bank conflicts. */
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
            for (unsigned chunk = 0; chunk < PANEL_ROW_BYTES / 16; chunk++) {
                const uint4 x = load_shared_16(row + panel * C::KEYS * PANEL_ROW_BYTES +
                                               (chunk ^ threadIdx.x % 8) * 16);
                add(x.x), add(x.y), add(x.z), add(x.w);
            }
    const bool broken = __hisnan(sum.x) || __hisnan(sum.y);
    if (!seen || broken)
#pragma unroll 1
        for (int panel = 0; panel < C::PANELS; panel++)
#pragma unroll 2
            for (unsigned chunk = 0; chunk < PANEL_ROW_BYTES / 16; chunk++)
                clear_shared_16(row + panel * C::KEYS * PANEL_ROW_BYTES +
                                (chunk ^ threadIdx.x % 8) * 16);
    return broken;
}

/* A block of V in its stage: the first of its rows that is no number, INT_MAX for none. */
template <class C>
__device__ __forceinline__ int clean_block(const tile &t, int block, uint32_t stage) {
    const int position = block * C::KEYS;
    const int used = block == t.blocks - 1 && t.half ? C::KEYS / 2 : C::KEYS;
    int broken = INT_MAX;
#pragma unroll 1
    for (int row = max(t.position + 1 - position, 0) + (int)threadIdx.x % 32; row < used; row += 32)
        if (clean_row<C>(stage + row * PANEL_ROW_BYTES, row < t.end - position))
            broken = min(broken, position + row);
    fence_for_copies(); /* zeros are written | wgmma reads them, copies overwrite them */
    return __reduce_min_sync(0xffffffffu, broken);
}

template <class C> __device__ __forceinline__ void clean(const memory &at, control &c) {
    unsigned n = 0, cleaned = 0; /* blocks of V so far, and of them the cleaner's */
    for (unsigned tiles = 0;; tiles++) {
        const int place = stage_of<2>(tiles);
        barrier_wait(shared_address(&c.queries_full[place]), parity_of<2>(tiles));
        const tile &t = c.tiles[place];
        if (t.blocks == 0) break;
        int broken = INT_MAX, block = t.blocks - 1;
#pragma unroll 1
        for (; block >= t.first && needs_cleaner<C>(t, block); block--, n++, cleaned++) {
            const int v = stage_of<C::VALUE_STAGES>(n);
            barrier_wait(shared_address(&c.landed[stage_of<2>(cleaned)]), parity_of<2>(cleaned));
            broken = min(broken, clean_block<C>(t, block, at.values + v * C::BLOCK));
            __syncwarp(); /* every lane has written its zeros | lane 0 says so */
            if (threadIdx.x % 32 == 0) {
                c.broken[place] = broken;
                barrier_arrive(shared_address(&c.values_full[v]));
            }
        }
        n += block + 1 - t.first;
        barrier_arrive(shared_address(&c.queries_empty[place]));
    }
}

} // namespace

#endif
