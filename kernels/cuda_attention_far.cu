/* Attention of one row over a far cache, on Hopper: a stream of K and V at the speed of memory, through one
 * ring for each multiprocessor that the copy engine fills. */
#include "kernels/cuda_attention_tile.cuh"

namespace {

/* ---- configuration ---- */

enum {
    /* Warps, each with a stage of its own: with the producer two for each scheduler at most, beside a block
     * of cuda_decode.cu. */
    CONSUMERS = 6,
    PART_LEAST = 128, /* positions of a part */
    PART_ROUND = 16,  /* what they are a multiple of: parts differ by less than 1 % */
    /* Of stages. 4.6 TB/s for 1.5 us of a busy memory ask for 52 KB under way on each multiprocessor; one
     * stage or two are being read. */
    RING = 98 << 10,
    /* What a block takes: it starts beside the kernel before it (100 KB), and the kernel after it (116 KB)
     * beside it, whose stream then begins before attention ends. With 116 KB, and a seventh warp, that one
     * had to wait: 2 % of a step of 8B after 32k. */
    SHARED = 100 << 10
};

/* A stage is a tile of K and the same of V, 12 to 16 KB in all, for one warp. Position i of a tile is row
 * i % columns of run i / columns. Runs are multiples of 64 bytes, most of them of 128, so that rows of two
 * runs begin in the same bank. The upper four lie 64 bytes further on: eight lanes that read 16 bytes each,
 * of two runs of K or of four of V, meet two to a bank at most. */
template <int D_> struct far_geometry {
    static constexpr int D = D_, warps = CONSUMERS, mergers = 32 * CONSUMERS;
    static constexpr int threads = mergers + 32;
    static constexpr int tile = D == 64 ? 64 : D == 80 ? 48 : D == 256 ? 16 : 32;
    static constexpr int columns = tile / 8; /* n8 tiles of scores */
    static_assert(D % 16 == 0 && columns % 2 == 0, "steps of the tensor cores");
    static constexpr int row_bytes = 2 * D;
    static constexpr int run_bytes = columns * row_bytes;
    static constexpr int half_bytes = 4 * run_bytes + 64; /* from the lower half to the upper one */
    static constexpr int tile_bytes = 8 * run_bytes + 64;
    static constexpr int stage_bytes = 2 * tile_bytes;
    static constexpr int stages = RING / stage_bytes;
    static_assert(stages >= warps, "a place for each warp");
    static constexpr int most_sets = D > 128 ? 1 : 2; /* of queries, in registers */
    /* A result as geometry's (cuda_attention_tile.cuh), in place of the ring. */
    static constexpr int record = D + 4;
    static constexpr int result = most_sets * QUERIES * record;
    static_assert(stages * stage_bytes <= SHARED && warps * result * 4 <= SHARED, "they fit");
};

/* Of a thread. Where 8 queries are enough, a scheduler has room for three warps of cuda_decode.cu with 72
 * registers beside two of these: 16128 of 16384. */
template <class S, int SETS> constexpr int registers = S::D > 128 || SETS > 1 ? 255 : 144;

/* The next stage for one of `step` that take turns. */
template <class S> struct place {
    int slot, parity;
    __device__ __forceinline__ void move(int step) {
        slot += step;
        if (slot >= S::stages) slot -= S::stages, parity ^= 1;
    }
};

/* ---- the producer ---- */

/* Asks for the part's tiles, stage after stage: lanes 0 and 1 for the halves of K, 2 and 3 of V. */
template <class S>
__device__ __forceinline__ void produce(const struct cuda_attention &a, const struct work &w,
                                        uint32_t ring, uint64_t *full, uint64_t *empty) {
    const int lane = threadIdx.x % 32, half = lane % 2;
    const size_t start = ((size_t)w.slot * a.G + w.kv_head) * a.R * S::D;
    const bf16 *cache = (const bf16 *)(lane / 2 ? a.values : a.keys) + start;
    const uint32_t to = ring + lane / 2 * S::tile_bytes + half * S::half_bytes;
    struct place<S> at = {
        0, 1
    };
    bool waited = false;
#pragma unroll 1
    for (int begin = w.begin, n = 0; begin < w.end; begin += S::tile, n++, at.move(1)) {
        const int valid = min(S::tile, w.end - begin);
        if (!waited && begin + valid == w.length) { /* its last position is of this step */
            wait_for_inputs();
            copies_see_writes();
            waited = true;
        }
        if (n >= S::stages) barrier_wait(shared_address(&empty[at.slot]), at.parity);
        const uint32_t barrier = shared_address(&full[at.slot]);
        if (lane == 0) barrier_expect(barrier, (uint32_t)(2 * valid * S::row_bytes));
        __syncwarp(); /* the bytes are expected, before they come */
        const int rows = min(valid - half * S::tile / 2, S::tile / 2);
        const int first = place_in_ring(begin + half * S::tile / 2, a.R);
        const int straight = min(rows, a.R - first); /* before the ring goes round */
        const uint32_t there = to + (uint32_t)(at.slot * S::stage_bytes);
        if (lane < 4 && rows > 0)
            copy_bulk(there, cache + (size_t)first * S::D, (uint32_t)(straight * S::row_bytes),
                      barrier);
        if (lane < 4 && rows > straight)
            copy_bulk(there + (uint32_t)(straight * S::row_bytes), cache,
                      (uint32_t)((rows - straight) * S::row_bytes), barrier);
    }
    if (!waited) wait_for_inputs();
}

/* ---- one tile, by one warp ---- */

/* Words that a lane reads at once of the `left` that are left to it: 16 bytes, or what there is. */
__device__ constexpr int words_at_once(int left) {
    return left >= 4 ? 4 : left >= 2 ? 2 : 1;
}

template <int WORDS>
__device__ __forceinline__ void load_words(uint32_t word[WORDS], const char *from) {
    if constexpr (WORDS == 4) {
        const uint4 x = *(const uint4 *)from;
        word[0] = x.x, word[1] = x.y, word[2] = x.z, word[3] = x.w;
    } else if constexpr (WORDS == 2) {
        const uint2 x = *(const uint2 *)from;
        word[0] = x.x, word[1] = x.y;
    } else {
        word[0] = *(const uint32_t *)from;
    }
}

/* Which two dims of q and K are words k of a step's operands (k = 0: rows 2 (l%4), +1; 1: +8, +9): any order
 * does as long as both have the same. So that a lane reads 16 bytes, two steps share 32 dims, of which it
 * has 8 neighbours; a last single step has 4. Returns the first dim of steps i and i + 1. */
template <class S> __device__ __forceinline__ int depth_of(int i) {
    return 16 * i + (i + 2 <= S::D / 16 ? 8 : 4) * (threadIdx.x % 4);
}

/* The queries as the first operand: set 0 in rows 0 to 7, set 1 or nothing in rows 8 to 15. of(query): its
 * first dim; read: of some of it. */
template <class S, int SETS, class Of, class Read>
__device__ __forceinline__ void load_depth(uint32_t queries[S::D / 16][2 * SETS],
                                           const struct work &w, Of of, Read read) {
#pragma unroll
    for (int s = 0; s < SETS; s++) {
        const int query = s * QUERIES + threadIdx.x % 32 / 4;
        const bf16 *q = of(min(query, w.last - 1));
#pragma unroll
        for (int i = 0; i < S::D / 16; i += 2) {
            uint4 x = make_uint4(0, 0, 0, 0);
            if (i + 2 <= S::D / 16) {
                x = read((const uint4 *)(q + depth_of<S>(i)));
            } else {
                const uint2 rest = read((const uint2 *)(q + depth_of<S>(i)));
                x.x = rest.x, x.y = rest.y;
            }
            const bool valid = query < w.last;
            queries[i][s] = valid ? x.x : 0, queries[i][SETS + s] = valid ? x.y : 0;
            if (i + 2 <= S::D / 16)
                queries[i + 1][s] = valid ? x.z : 0, queries[i + 1][SETS + s] = valid ? x.w : 0;
        }
    }
}

/* As score_tile, from rows of the tile as they are. */
template <class S, int SETS>
__device__ __forceinline__ void score_rows(float scores[S::columns][SETS][2],
                                           const uint32_t queries[S::D / 16][2 * SETS],
                                           const char *tile) {
    const int run = threadIdx.x % 32 / 4;
    const char *keys = tile + run * S::run_bytes + run / 4 * 64;
    float sums[S::columns][4] = {};
#pragma unroll
    for (int i = 0; i < S::D / 16; i += 2) {
        constexpr int STEPS = S::D / 16;
#pragma unroll
        for (int u = 0; u < S::columns; u++) {
            const char *from = keys + u * S::row_bytes + 2 * depth_of<S>(i);
            uint32_t k[4];
            if (i + 2 <= STEPS)
                load_words<4>(k, from);
            else
                load_words<2>(k, from);
#pragma unroll
            for (int j = i; j < i + 2 && j < STEPS; j++) {
                const uint32_t q[4] = {queries[j][0], SETS > 1 ? queries[j][SETS - 1] : 0,
                                       queries[j][SETS], SETS > 1 ? queries[j][2 * SETS - 1] : 0};
                multiply_add(sums[u], q, k[2 * (j - i)], k[2 * (j - i) + 1]);
            }
        }
    }
#pragma unroll
    for (int u = 0; u < S::columns; u++)
#pragma unroll
        for (int i = 0; i < 2 * SETS; i++) scores[u][i / 2][i % 2] = sums[u][i];
}

/* Which dim row l/4 of a step of V^T is, for step i; row l/4 + 8 is the next one. Steps from `first` on, as
 * many as words_at_once says, share a read: of their dims a lane has neighbours. */
__device__ __forceinline__ int dim_of(int i, int first, int words) {
    return 16 * first + 2 * words * (threadIdx.x % 32 / 4) + 2 * (i - first);
}

/* Steps I on of V^T against the positions in columns u and u + 1. seen: bits of all that was read. */
template <class S, int SETS, int I>
__device__ __forceinline__ void add_steps(float found[SETS][S::D / 16][4],
                                          const struct operand weights[SETS], const char *values,
                                          uint32_t &seen) {
    if constexpr (I < S::D / 16) {
        constexpr int WORDS = words_at_once(S::D / 16 - I);
        const char *from = values + 2 * dim_of(I, I, WORDS);
        uint32_t v[4][WORDS]; /* columns 2 (l%4), +1 of tile u; of tile u + 1 */
#pragma unroll
        for (int k = 0; k < 4; k++)
            load_words<WORDS>(v[k], from + k % 2 * S::run_bytes + k / 2 * S::row_bytes);
#pragma unroll
        for (int j = 0; j < WORDS; j++) {
            const uint32_t rows[4] = {
                __byte_perm(v[0][j], v[1][j], 0x5410), __byte_perm(v[0][j], v[1][j], 0x7632),
                __byte_perm(v[2][j], v[3][j], 0x5410), __byte_perm(v[2][j], v[3][j], 0x7632)};
            seen |= rows[0] | rows[2];
#pragma unroll
            for (int s = 0; s < SETS; s++) add_product(found[s][I + j], rows, weights[s]);
        }
        add_steps<S, SETS, I + WORDS>(found, weights, values, seen);
    }
}

/* As add_values, from rows of the tile as they are. seen: gets bits of all that was read. */
template <class S, int SETS>
__device__ __forceinline__ void add_rows(float found[SETS][S::D / 16][4],
                                         const float weights[S::columns][SETS][2], const char *tile,
                                         uint32_t &seen) {
    const int run = 2 * (threadIdx.x % 4);
    const char *values = tile + run * S::run_bytes + run / 4 * 64;
#pragma unroll
    for (int u = 0; u < S::columns; u += 2) {
        struct operand o[SETS];
#pragma unroll
        for (int s = 0; s < SETS; s++) o[s] = split_weights<S, SETS>(weights, u, s);
        add_steps<S, SETS, 0>(found, o, values + u * S::row_bytes, seen);
    }
}

/* Rows from `valid` on become zeros: a weight of zero does not silence a NaN. By the whole warp, in the last
 * tile of a part, whose place no copy takes anymore. */
template <class S> __device__ __forceinline__ void clear_rows(char *tile, int valid) {
#pragma unroll 1
    for (int i = valid * (S::D / 8) + threadIdx.x % 32; i < S::tile * (S::D / 8); i += 32) {
        const int upper = i >= S::tile / 2 * (S::D / 8);
        *(uint4 *)(tile + 16 * i + 64 * upper) = make_uint4(0, 0, 0, 0);
    }
    __syncwarp(); /* the zeros are written, before they are read */
}

/* A row of a tile of K that has landed. */
template <class S> __device__ __forceinline__ void put_row(char *tile, int row, const bf16 *from) {
    const int lane = threadIdx.x % 32, run = row / S::columns;
    char *to = tile + run * S::run_bytes + run / 4 * 64 + row % S::columns * S::row_bytes;
    if (lane < S::D / 8) *(uint4 *)(to + 16 * lane) = *(const uint4 *)(from + 8 * lane);
    __syncwarp(); /* the row is written, before it is read */
}

/* ---- the consumers ---- */

/* The warp's result, over the ring. */
template <class S, int I>
__device__ __forceinline__ void store_steps(float *result, const float found[S::D / 16][4]) {
    if constexpr (I < S::D / 16) {
        constexpr int WORDS = words_at_once(S::D / 16 - I);
        const int query = 2 * (threadIdx.x % 4);
#pragma unroll
        for (int j = I; j < I + WORDS; j++)
#pragma unroll
            for (int k = 0; k < 2; k++)
                *(float2 *)(result + (query + k) * S::record + dim_of(j, I, WORDS)) =
                    make_float2(found[j][k], found[j][k + 2]);
        store_steps<S, I + WORDS>(result, found);
    }
}

/* Waits, and reads the queries; raw: finishes their heads and the key first. */
template <class S, int SETS>
__device__ __forceinline__ void open_queries(uint32_t queries[S::D / 16][2 * SETS],
                                             const struct cuda_attention &a, const struct work &w,
                                             finished_heads<S::D> *raw) {
    if (raw) {
        unfinished_head<S::D> first = first_head<S::D>(a, w);
        const size_t place = (size_t)place_in_ring(w.length - 1, a.R);
        const bf16 *own =
            (const bf16 *)a.keys + (((size_t)w.slot * a.G + w.kv_head) * a.R + place) * S::D;
        wait_for_inputs();
        finish_heads(*raw, a, w, CONSUMERS, first);
        named_barrier(1, S::mergers); /* heads are finished | read */
        if (threadIdx.x / 32 == CONSUMERS - 1 && w.end == w.length) keep_key(*raw, own);
        load_depth<S, SETS>(
            queries, w, [&](int query) { return raw->q[query]; }, [](auto *some) { return *some; });
    } else {
        wait_for_inputs();
        load_depth<S, SETS>(
            queries, w, [&](int query) { return (const bf16 *)a.q + w.at(a, query); },
            [](auto *some) { return __ldcg(some); });
    }
}

/* Every CONSUMERS-th tile of the part, then the result. */
template <class S, int SETS>
__device__ __forceinline__ void consume(const struct cuda_attention &a, const struct work &w,
                                        char *ring, uint64_t *full, uint64_t *empty,
                                        finished_heads<S::D> *raw) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const float scale = a.scale * LOG2_E;
    uint32_t queries[S::D / 16][2 * SETS];
    open_queries<S, SETS>(queries, a, w, raw);
    float found[SETS][S::D / 16][4] = {}, maximum[SETS], sum[SETS];
#pragma unroll
    for (int s = 0; s < SETS; s++) maximum[s] = -INFINITY, sum[s] = 0.0f;
    struct place<S> at = {
        warp, 0
    };
#pragma unroll 1
    for (int begin = w.begin + warp * S::tile; begin < w.end;
         begin += CONSUMERS * S::tile, at.move(CONSUMERS)) {
        char *keys = ring + at.slot * S::stage_bytes, *values = keys + S::tile_bytes;
        const int valid = w.end - begin;
        float weights[S::columns][SETS][2];
        barrier_wait(shared_address(&full[at.slot]), at.parity);
        if (raw && begin + valid == w.length && valid <= S::tile)
            put_row<S>(keys, valid - 1, raw->key);
        score_rows<S, SETS>(weights, queries, keys);
#pragma unroll
        for (int s = 0; s < SETS; s++) {
#pragma unroll
            for (int i = 0; i < 2 * S::columns; i++) weights[i / 2][s][i % 2] *= scale;
            weigh_tile<S, SETS>(weights, s, 0, valid, maximum[s], sum[s], found[s]);
        }
        if (valid < S::tile) clear_rows<S>(values, valid);
        /* An arrive alone may overtake reads of shared memory, so it is made to depend on them. */
        uint32_t seen = (uint32_t)a.D;
        add_rows<S, SETS>(found, weights, values, seen);
        if (seen != 0) barrier_arrive(shared_address(&empty[at.slot]));
    }
    named_barrier(1, S::mergers); /* all tiles are read, before results take their place */
    float *result = (float *)ring + warp * S::result;
#pragma unroll
    for (int s = 0; s < SETS; s++, result += QUERIES * S::record) {
        float total = sum[s];
        total += __shfl_xor_sync(0xffffffffu, total, 1);
        total += __shfl_xor_sync(0xffffffffu, total, 2);
        if (lane % 4 == 0)
            *(float2 *)(result + lane / 4 * S::record + S::D) = make_float2(maximum[s], total);
        store_steps<S, 0>(result, found[s]);
    }
}

/* ---- the kernel ---- */

/* out[h] = softmax(scale q[h] K^T) V over the positions that row 0 sees of slot slots[0].
 * In, out   as cuda_attention_decode, with T = 1.
 * Grid      (parts, 1, G). A block owns a part of a kv head's positions; its last warp asks for stages, the
 *           others take them in turn. The last block of a kv head merges the parts, in their order.
 * Tensor    as cuda_attention_decode; the copy engine leaves rows as they are, so lanes read their operands
 * cores     with plain loads, in an order of depth and dims that makes them 16 bytes.
 * Shared    a ring of stages; later the results.
 * Barriers  full[s]: a stage has landed | it is read. empty[s]: each lane of its warp has read it | it
 *           is overwritten. __syncthreads: barriers are ready | used. Barrier 1, of the consumers: the
 *           ring is read | results take its place; then: the results are written | merged. With RAW first:
 *           heads are finished | read.
 * Bound     bytes of K and V, each read once. 16 KB take 830 cycles at 4.6 TB/s; shared memory is busy for
 *           384 of them (128 the copy, 128 K and 128 V, at two lanes a bank), a scheduler issues 100
 *           instructions, and a warp holds the stage for about 900.
 * Numerics  as cuda_attention_decode.
 * Needs     as cuda_attention_decode. */
template <class S, int SETS, bool RAW>
__global__ void __maxnreg__((registers<S, SETS>))
    attention_far(const __grid_constant__ struct cuda_attention a,
                  const __grid_constant__ struct cut cut) {
    extern __shared__ __align__(128) char ring[];
    __shared__ uint64_t full[S::stages], empty[S::stages];
    start_dependents();
    const struct work w = work_of(a, cut, {0, PART_LEAST, PART_ROUND}, 0, cut.ratio);
    if (threadIdx.x == 0) {
        for (int s = 0; s < S::stages; s++) {
            barrier_init(shared_address(&full[s]), 1);
            barrier_init(shared_address(&empty[s]), 32);
        }
        barriers_ready();
    }
    __syncthreads();
    if (w.index >= w.count) {
        wait_for_inputs();
        return;
    }
    if (threadIdx.x >= S::mergers) {
        produce<S>(a, w, shared_address(ring), full, empty);
        return;
    }
    if constexpr (RAW) {
        __shared__ finished_heads<S::D> heads;
        consume<S, SETS>(a, w, ring, full, empty, &heads);
    } else {
        consume<S, SETS>(a, w, ring, full, empty, NULL);
    }
    named_barrier(1, S::mergers);
    merge<S>(a, w, (const float *)ring);
}

/* ---- the launcher ---- */

template <class S, int SETS, bool RAW = false>
void launch_sets(struct cuda_backend *b, const struct cuda_attention *a) {
    const int parts = max(1, min((int)CUDA_PARTS, b->multiprocessors / a->G));
    cuda_launch(b, "attention_far", attention_far<S, SETS, RAW>, dim3(parts, 1, a->G), S::threads,
                SHARED, *a, cut_of(a));
}

template <int D> void launch(struct cuda_backend *b, const struct cuda_attention *a) {
    typedef far_geometry<D> S;
    if constexpr (D % 128 == 0)
        if (a->raw.qkv) {
            a->H / a->G > QUERIES ? launch_sets<S, S::most_sets, true>(b, a)
                                  : launch_sets<S, 1, true>(b, a);
            return;
        }
    if (a->H / a->G > QUERIES)
        launch_sets<S, S::most_sets>(b, a);
    else
        launch_sets<S, 1>(b, a);
}

} // namespace

bool cuda_attention_far_takes(const struct cuda_attention *a) {
    return cuda_attention_near_takes(a) && a->G <= CUDA_COUNTERS;
}

void cuda_attention_far(struct cuda_backend *b, const struct cuda_attention *a) {
    with_head_size(a->D, [&](auto size) { launch<decltype(size)::D>(b, a); });
}
