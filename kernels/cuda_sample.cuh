/* What the kernels of sampling (cuda_sample.cu) compute with: their state, candidates and their
 * order, sums over them, and blocks that share the vocabulary. */
#ifndef KERNELS_CUDA_SAMPLE_CUH
#define KERNELS_CUDA_SAMPLE_CUH

#include "kernels/cuda.cuh"
#include "kernels/cuda_draws.h"

#include <float.h>
#include <math.h>

/* ---- what the kernels share ---- */

/* The argument of all three kernels. */
struct draw {
    float *logits; /* [vocab] */
    int vocab;
    struct draw_state *state;
    u64 *ranks;                       /* [vocab], behind the state: candidates, bin by bin */
    struct sampling sampling;         /* repeat_last 0: no penalty */
    int32_t *token, *slot, *position; /* [T]; row 0 is the next step's */
    int last_row;                     /* whose logits these are */
    struct drawn *drawn;              /* [DRAW_WAITING] */
};

/* What a kernel goes on from: loaded in one trip to L2, before anything waits for a part of it. */
struct turn {
    struct draw_counters counters;
    u64 first;
    unsigned smallest;
    int32_t slot, position;
};

static __device__ struct turn turn_of(const struct draw &d) {
    return {d.state->counters, d.state->first, d.state->smallest, d.slot[d.last_row],
            d.position[d.last_row]};
}

/* SplitMix64 as in sampler.c. */
static __device__ unsigned random_bits(u64 seed, u64 counter) {
    u64 z = seed + (counter + 1) * 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (unsigned)((z ^ z >> 31) >> (64 - RANDOM_BITS));
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

/* In place of the order of a logit that is NaN or +inf: the first of these has the highest rank. */
static const unsigned NO_ORDER = 0xffffffffu;

/* The larger logit first, of equals the lower id. */
static __device__ u64 rank_of(unsigned order, int id) {
    return (u64)order << 32 | ~(unsigned)id;
}
static __device__ int id_of(u64 rank) {
    return (int)~(unsigned)rank;
}
static __device__ unsigned order_in(u64 rank) {
    return (unsigned)(rank >> 32);
}
static __device__ float logit_of(u64 rank) {
    return value_of(order_in(rank));
}

/* ---- candidates ---- */

/* How logits are laid out in bins. A candidate is a logit at most `reach` below the largest: 25,
 * times the temperature where that is above 1. All others together weigh less than V e^-25 of the
 * largest; sampler.c cuts likewise, unless top-k does. */
struct span {
    bool drawable;        /* every logit is a number, and the largest is finite */
    float largest, reach; /* reach NaN: no candidates */
    float bins;           /* in a distance of 1 */
};

static __device__ struct span span_of(const struct draw &d, const struct turn &turn) {
    struct span span;
    span.largest = logit_of(turn.first);
    span.drawable = order_in(turn.first) != NO_ORDER && fabsf(span.largest) < INFINITY;
    /* No further than the smallest: flat distributions, too, spread over all bins. */
    span.reach = fminf(fminf(25 * fmaxf(d.sampling.temperature, 1), FLT_MAX),
                       span.largest - value_of(~turn.smallest));
    if (!span.drawable) span.reach = NAN;
    span.bins = span.reach > 0 ? DRAW_BINS / span.reach : 0;
    return span;
}

/* From the largest logit's down; a larger distance never gives a lower bin. */
static __device__ int bin_of(const struct span &span, float distance) {
    return min((int)(distance * span.bins), DRAW_BINS - 1);
}

/* What one candidate adds to the sums. */
static __device__ struct tally tally_of(const struct draw &d, float distance) {
    const float unit = (float)((u64)1 << WEIGHT_BITS), weight = expf(-distance);
    const bool counts = weight >= d.sampling.min_p;
    return {1, __float2ull_rn(weight * unit),
            counts ? __float2ull_rn(expf(-distance / d.sampling.temperature) * unit) : 0};
}

/* ---- a block's threads ---- */

/* What they tell one another. */
struct exchange {
    u64 highest[DRAW_WARPS], rank[DRAW_THREADS];
    struct tally warp[DRAW_WARPS], above, through;
    unsigned count;
    u64 found;
};

static __device__ u64 warp_largest(u64 x) {
    const unsigned high = __reduce_max_sync(0xffffffffu, (unsigned)(x >> 32));
    const unsigned low = high == (unsigned)(x >> 32) ? (unsigned)x : 0;
    return (u64)high << 32 | __reduce_max_sync(0xffffffffu, low);
}

/* The largest of all threads, in every thread. */
static __device__ u64 block_largest(u64 x, struct exchange &exchange) {
    const int lane = threadIdx.x % 32;
    x = warp_largest(x);
    if (lane == 0) exchange.highest[threadIdx.x / 32] = x;
    __syncthreads(); /* the warps' largest are written before they are read */
    x = warp_largest(lane < DRAW_WARPS ? exchange.highest[lane] : 0);
    __syncthreads(); /* ... and read before the next ones are written */
    return x;
}

/* The sum over the warp's lanes up to this one. */
static __device__ struct tally warp_prefix(struct tally sum) {
    const int lane = threadIdx.x % 32;
#pragma unroll 1 /* here and below: code runs once a draw, so what counts is how much is fetched */
    for (int distance = 1; distance < 32; distance *= 2) {
        const struct tally other = {__shfl_up_sync(0xffffffffu, sum.count, distance),
                                    __shfl_up_sync(0xffffffffu, sum.weight, distance),
                                    __shfl_up_sync(0xffffffffu, sum.tempered, distance)};
        if (lane >= distance) add(sum, other);
    }
    return sum;
}

/* The sum over the threads before this one; total: over all. */
static __device__ struct tally sum_before(const struct tally &own, struct tally &total,
                                          struct exchange &exchange) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    struct tally sum = warp_prefix(own), *sums = exchange.warp;
    if (lane == 31) sums[warp] = sum;
    __syncthreads(); /* the warps' sums are written before they are read */
    if (warp == 0) {
        const struct tally prefix = warp_prefix(lane < DRAW_WARPS ? sums[lane] : tally{});
        if (lane < DRAW_WARPS) sums[lane] = prefix;
    }
    __syncthreads(); /* ... added up before that is read */
    total = sums[DRAW_WARPS - 1];
    if (warp > 0) add(sum, sums[warp - 1]);
    __syncthreads(); /* ... and read before the next ones are written */
    return {sum.count - own.count, sum.weight - own.weight, sum.tempered - own.tempered};
}

/* Sorts a rank of each thread, the highest first, where those from count on are zero. Bitonic:
 * ranks that are less than a warp apart are compared through registers. */
static __device__ u64 sort(u64 rank, unsigned count, struct exchange &exchange) {
    const unsigned thread = threadIdx.x;
#pragma unroll 1
    for (unsigned size = 2; size / 2 < count; size *= 2)
#pragma unroll 1
        for (unsigned distance = size / 2; distance > 0; distance /= 2) {
            u64 other;
            if (distance < 32) {
                other = __shfl_xor_sync(0xffffffffu, rank, (int)distance);
            } else {
                exchange.rank[thread] = rank;
                __syncthreads(); /* the ranks are written before they are read */
                other = exchange.rank[thread ^ distance];
                __syncthreads(); /* ... and read before the next ones are written */
            }
            const bool falling = (thread & size) == 0, lower = (thread & distance) == 0;
            rank = falling == lower ? max(rank, other) : min(rank, other);
        }
    return rank;
}

/* ---- blocks: the first one waits for a word of each other one ---- */

/* Nobody waits for the first one, so all others run wherever there is room. At most DRAW_THREADS
 * blocks. One thread; the word is not 0. */
static __device__ void tell_first_block(const struct draw &d, u64 word) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(&d.state->word[blockIdx.x]), "l"(word)
                 : "memory");
}

/* Before a word: whoever has it sees what the thread, and others before a barrier, have written. */
static __device__ void release_writes() {
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
}

/* In the first block: thread n has the word of block n, others 0. */
static __device__ u64 hear_other_blocks(const struct draw &d) {
    u64 word = 0;
    if (threadIdx.x == 0 || threadIdx.x >= gridDim.x) return word;
    do
        asm volatile("ld.acquire.gpu.global.u64 %0, [%1];"
                     : "=l"(word)
                     : "l"(&d.state->word[threadIdx.x])
                     : "memory");
    while (word == 0);
    d.state->word[threadIdx.x] = 0;
    return word;
}

/* A block's share of the ids: so many from the first on; the last blocks have fewer, or none. */
static __device__ int share_size(const struct draw &d) {
    return (d.vocab + (int)gridDim.x - 1) / (int)gridDim.x;
}
static __device__ int share_first(const struct draw &d) {
    return share_size(d) * (int)blockIdx.x;
}
static __device__ int share_end(const struct draw &d) {
    return min(share_first(d) + share_size(d), d.vocab);
}

/* Some of a thread's logits of the share. */
struct batch {
    float logit[DRAW_BATCH];
};

static __device__ struct batch load_batch(const struct draw &d, int start) {
    struct batch batch;
#pragma unroll
    for (int i = 0; i < DRAW_BATCH; i++) {
        const int id = start + i * DRAW_THREADS;
        batch.logit[i] = id < share_end(d) ? d.logits[id] : 0.0f;
    }
    return batch;
}
static __device__ struct batch first_batch(const struct draw &d) {
    return load_batch(d, share_first(d) + (int)threadIdx.x);
}

/* Calls visit(id, logit) for the share. The first batch is loaded ahead: its trip to L2 passes
 * while the block waits for other things. */
template <class Visit>
static __device__ void for_share(const struct draw &d, struct batch batch, Visit visit) {
    for (int start = share_first(d) + (int)threadIdx.x; start < share_end(d);) {
#pragma unroll
        for (int i = 0; i < DRAW_BATCH; i++) {
            const int id = start + i * DRAW_THREADS;
            if (id < share_end(d)) visit(id, batch.logit[i]);
        }
        start += DRAW_BATCH * DRAW_THREADS;
        batch = load_batch(d, start);
    }
}

#endif
