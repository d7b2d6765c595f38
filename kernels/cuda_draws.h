/* A draw on the device as both sides see it: what the kernels (cuda_sample.cu) leave in device memory, and
 * what the host (cuda_draws.cu) keeps of it. */
#ifndef KERNELS_CUDA_DRAWS_H
#define KERNELS_CUDA_DRAWS_H

#include "kernels/cuda.h"

typedef unsigned long long u64; /* what 64-bit atomics take */

enum {
    DRAW_THREADS = 512, /* 128256 ids on 132 multiprocessors: two a thread */
    DRAW_WARPS = DRAW_THREADS / 32,
    DRAW_BATCH = 2,  /* logits that a thread loads at once */
    THREAD_BINS = 2, /* most bins then have no more candidates than a block has threads */
    DRAW_BINS = DRAW_THREADS * THREAD_BINS,
    DRAW_RECENT = 4096, /* the most ids that the penalty looks back on */
    DRAW_WAITING = 16,  /* draws that were not taken yet */
    /* The largest weight is 2^36: e^-25, the least that counts, is still one half, and 2^20 weights
     * (the largest vocabulary) add up to 2^56. */
    WEIGHT_BITS = 36,
    RANDOM_BITS = 24 /* of a random number: those of a float in [0, 1) */
};

/* What advances from draw to draw. */
struct draw_counters {
    u64 number;    /* of the next draw: the counter of its random number */
    unsigned made; /* draws since cuda_draws_open: the next one's place in drawn */
    int accepted;  /* ids in recent, as sampler->recent_count counts them */
};

/* REGION_DRAWS. All but counters and recent is zero between draws. */
struct draw_state {
    struct draw_counters counters;
    u64 first;              /* the highest rank */
    unsigned smallest;      /* ~order of the smallest logit above -inf */
    u64 word[DRAW_THREADS]; /* from each block to the first one */
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

/* Draw number n uses the slot n % DRAW_WAITING of drawn and event. */
struct cuda_draws {
    struct drawn *drawn, *drawn_device; /* [DRAW_WAITING], pinned; the same from the device */
    cudaEvent_t event[DRAW_WAITING];
    uint64_t enqueued, taken;

    /* What captured graphs have in their arguments. */
    int vocab;
    struct sampling sampling;
};

static inline bool has_penalty(const struct sampling *sampling) {
    return sampling->repeat_penalty != 1 && sampling->repeat_last > 0;
}

#endif
