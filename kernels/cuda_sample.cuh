/* What the kernels of sampling (cuda_sample.cu) compute with: their state, the order of candidates,
 * sums over candidates, and blocks that share the vocabulary. */
#ifndef KERNELS_CUDA_SAMPLE_CUH
#define KERNELS_CUDA_SAMPLE_CUH

#include "kernels/config.h"
#include "kernels/cuda.cuh"

typedef unsigned long long u64; /* what 64-bit atomics take */

enum {
    DRAW_THREADS = 512, /* 128256 ids on 132 multiprocessors: two a thread */
    DRAW_WARPS = DRAW_THREADS / 32,
    DRAW_BATCH = 4,  /* logits that a thread loads at once */
    THREAD_BINS = 3, /* four would not fit into CUDA_DRAW_WORDS */
    DRAW_BINS = DRAW_THREADS * THREAD_BINS,
    DRAW_RECENT = 4096, /* the most ids that the penalty looks back on */
    DRAW_WAITING = 16,  /* draws that were not taken yet */
    /* The largest weight is 2^36: e^-25, the least that counts, is still one half, and 2^20 weights
     * (the largest vocabulary) add up to 2^56, which warp_total takes. */
    WEIGHT_BITS = 36,
    RANDOM_BITS = 24 /* of a random number: those of a float in [0, 1) */
};

/* ---- what the kernels share ---- */

/* What advances from draw to draw. */
struct draw_counters {
    u64 number;    /* of the next draw: the counter of its random number */
    unsigned made; /* draws since cuda_draws_open: the next one's place in drawn */
    int accepted;  /* ids in recent, as sampler->recent_count counts them */
};

/* REGION_DRAWS. All but counters and recent is zero between draws. */
struct draw_state {
    struct draw_counters counters;
    u64 first;         /* the highest rank */
    unsigned smallest; /* ~order of the smallest logit above -inf */
    unsigned invalid;  /* ~id of the first logit that is NaN or +inf; 0: none */
    unsigned finished; /* blocks */
    int32_t recent[DRAW_RECENT];
    unsigned count[DRAW_BINS];  /* candidates of a bin */
    unsigned placed[DRAW_BINS]; /* those of them whose rank lies in its place */
    u64 weight[DRAW_BINS], tempered[DRAW_BINS];
};
static_assert(sizeof(struct draw_state) <= CUDA_DRAW_WORDS * sizeof(uint32_t), "no room for ranks");

enum outcome { DRAWN, NOT_A_NUMBER, NOTHING_FINITE };

/* What comes back to the host, in its own memory. */
struct drawn {
    enum outcome outcome;
    int32_t id;  /* drawn, or of the logit that is not a number */
    float logit; /* that one */
};

/* The argument of all three kernels. */
struct draw {
    float *logits; /* [vocab] */
    int vocab;
    struct draw_state *state;
    u64 *ranks; /* [vocab], behind the state: candidates, bin by bin */
    float temperature, top_p, min_p, penalty;
    int top_k;
    int repeat_last; /* 0: no penalty */
    u64 seed;
    int32_t *token, *slot, *position; /* [T]; row 0 is the next step's */
    int last_row;                     /* whose logits these are */
    struct drawn *drawn;              /* [DRAW_WAITING] */
};

/* SplitMix64 as in sampler.c. */
static __device__ unsigned random_bits(u64 seed, u64 counter) {
    u64 z = seed + (counter + 1) * 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (unsigned)((z ^ z >> 31) >> (64 - RANDOM_BITS));
}

/* Ids that the penalty looks at. */
static __device__ int remembered(const struct draw &d) {
    return min(d.state->counters.accepted, d.repeat_last);
}

/* Sums over candidates. */
struct tally {
    unsigned count;
    u64 weight, tempered; /* in units of 2^-WEIGHT_BITS: at temperature 1; at the temperature, where
                             min-p lets it count */
};

enum measure { COUNT, WEIGHT, TEMPERED };

static __device__ u64 measured(const struct tally &tally, enum measure measure) {
    return measure == COUNT ? tally.count : measure == WEIGHT ? tally.weight : tally.tempered;
}

static __device__ void add(struct tally &sum, const struct tally &more) {
    sum.count += more.count;
    sum.weight += more.weight;
    sum.tempered += more.tempered;
}

/* ---- ranks: a higher one comes first ---- */

/* As a whole number that rises with x; -0 is 0. */
static __device__ unsigned order_of(float x) {
    const unsigned bits = __float_as_uint(x + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

static __device__ float value_of(unsigned order) {
    return __uint_as_float(order & 0x80000000u ? order & 0x7fffffffu : ~order);
}

/* The larger logit first, of equals the lower id. */
static __device__ u64 rank_of(float logit, int id) {
    return (u64)order_of(logit) << 32 | ~(unsigned)id;
}
static __device__ int id_of(u64 rank) {
    return (int)~(unsigned)rank;
}
static __device__ float logit_of(u64 rank) {
    return value_of((unsigned)(rank >> 32));
}

/* ---- warps and blocks ---- */

static __device__ u64 warp_largest(u64 x) {
    const unsigned high = __reduce_max_sync(0xffffffffu, (unsigned)(x >> 32));
    const unsigned low = high == (unsigned)(x >> 32) ? (unsigned)x : 0;
    return (u64)high << 32 | __reduce_max_sync(0xffffffffu, low);
}

/* The sum, up to 2^57, in every lane. */
static __device__ u64 warp_total(u64 x) {
    const unsigned low = __reduce_add_sync(0xffffffffu, (unsigned)x & 0x3ffffffu);
    return ((u64)__reduce_add_sync(0xffffffffu, (unsigned)(x >> 26)) << 26) + low;
}
static __device__ struct tally warp_total(const struct tally &t) {
    return {__reduce_add_sync(0xffffffffu, t.count), warp_total(t.weight), warp_total(t.tempered)};
}

/* What a block's threads tell one another. */
struct exchange {
    struct tally warp[DRAW_WARPS], found;
    u64 highest[DRAW_WARPS], rank;
};

/* combine(x) of the values of all threads, in every thread. */
template <class X, class Combine>
static __device__ X over_block(X x, X warp[DRAW_WARPS], Combine combine) {
    const int lane = threadIdx.x % 32;
    x = combine(x);
    if (lane == 0) warp[threadIdx.x / 32] = x;
    __syncthreads(); /* the warps' values are written before they are read */
    x = combine(lane < DRAW_WARPS ? warp[lane] : X{});
    __syncthreads(); /* ... and read before the next ones are written */
    return x;
}
static __device__ u64 block_largest(u64 x, struct exchange &exchange) {
    return over_block(x, exchange.highest, [](u64 y) { return warp_largest(y); });
}
static __device__ struct tally block_total(const struct tally &t, struct exchange &exchange) {
    return over_block(t, exchange.warp, [](const struct tally &y) { return warp_total(y); });
}

/* The sum over the threads before this one. */
static __device__ struct tally sum_before(const struct tally &own, struct exchange &exchange) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    struct tally sum = own; /* of the warp's lanes up to this one */
    for (int distance = 1; distance < 32; distance *= 2) {
        const struct tally other = {__shfl_up_sync(0xffffffffu, sum.count, distance),
                                    __shfl_up_sync(0xffffffffu, sum.weight, distance),
                                    __shfl_up_sync(0xffffffffu, sum.tempered, distance)};
        if (lane >= distance) add(sum, other);
    }
    if (lane == 31) exchange.warp[warp] = sum;
    __syncthreads(); /* the warps' sums are written before they are read */
    for (int w = 0; w < warp; w++) add(sum, exchange.warp[w]);
    __syncthreads(); /* ... and read before the next ones are written */
    return {sum.count - own.count, sum.weight - own.weight, sum.tempered - own.tempered};
}

/* Whether this block is the last of the grid: then it sees what all others wrote. */
static __device__ bool is_last_block(unsigned *finished) {
    __shared__ bool last;
    __syncthreads(); /* the block's writes come before the fence that passes them on */
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicInc(finished, gridDim.x - 1) == gridDim.x - 1;
        __threadfence();
    }
    __syncthreads(); /* last is written before it is read, and the others' writes are seen */
    return last;
}

/* A block's share of the ids: so many from the first on; the last blocks have fewer, or none. */
static __device__ int share_size(const struct draw &d) {
    return (d.vocab + (int)gridDim.x - 1) / (int)gridDim.x;
}
static __device__ int share_first(const struct draw &d) {
    return share_size(d) * (int)blockIdx.x;
}

/* Calls visit(id, logit) for the block's share of the ids, loading a few at once. */
template <class Visit> static __device__ void for_share(const struct draw &d, Visit visit) {
    const int first = share_first(d), end = min(first + share_size(d), d.vocab);
    for (int start = first + (int)threadIdx.x; start < end; start += DRAW_BATCH * DRAW_THREADS) {
        float logit[DRAW_BATCH];
#pragma unroll
        for (int i = 0; i < DRAW_BATCH; i++) {
            const int id = start + i * DRAW_THREADS;
            logit[i] = id < end ? d.logits[id] : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < DRAW_BATCH; i++) {
            const int id = start + i * DRAW_THREADS;
            if (id < end) visit(id, logit[i]);
        }
    }
}

#endif
