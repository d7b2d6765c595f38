/* Sampling on the device: from logits to an id without the host (sampler.h says how).
 *
 * The vocabulary is never sorted. Candidates are counted and weighed in bins of falling logits.
 * Then top-k, top-p and the draw itself each ask for one candidate: that at which a sum over the
 * candidates in order (of ones, of weights, of weights at the temperature) passes a target. The
 * sums of the bins tell its bin, and a sorted window of at most a candidate a thread tells which it
 * is; where few candidates matter one window serves all three. Weights are whole numbers, so sums
 * do not depend on the order of atomics: the same seed gives the same ids. They differ from those
 * of sampler_draw where its rounding moves a boundary past the target.
 *
 * Three kernels a draw: survey_logits (all that temperature 0 needs), weigh_candidates,
 * choose_candidate. */
#include "kernels/cuda_sample.cuh"

#include <math.h>

/* ---- the end of a draw ---- */

/* One thread: token and position of the next step, the penalty's memory, what the host waits for,
 * and the state as the next draw needs it. first: the highest rank of all. */
static __device__ void deliver(const struct draw &d, const struct turn &turn, u64 first, int id) {
    struct drawn drawn = {DRAWN, id, 0};
    if (order_in(first) == NO_ORDER)
        drawn = {NOT_A_NUMBER, id_of(first), d.logits[id_of(first)]};
    else if (logit_of(first) == -INFINITY)
        drawn = {NOTHING_FINITE, NO_ID, 0};
    const bool good = drawn.outcome == DRAWN;
    struct draw_counters counters = turn.counters;
    d.drawn[counters.made++ % DRAW_WAITING] = drawn; /* read after the event that follows */
    if (good) d.token[0] = id;
    d.slot[0] = turn.slot;
    d.position[0] = turn.position + 1;
    if (d.sampling.repeat_last > 0) {
        d.state->recent[counters.accepted % d.sampling.repeat_last] = good ? id : NO_ID;
        /* as sampler_accept counts: it never overflows, and stays >= repeat_last once full */
        if (++counters.accepted == 2 * d.sampling.repeat_last)
            counters.accepted = d.sampling.repeat_last;
    }
    counters.number++;
    d.state->counters = counters;
    d.state->first = 0;
    d.state->smallest = 0;
}

/* ---- survey ---- */

/* Sets the bits of the ids of the block's share that occur among the recent ones. */
static __device__ void mark_repeated(const struct draw &d, unsigned *repeated) {
    const int first = share_first(d), count = share_size(d);
    const int remembered = min(d.state->counters.accepted, d.sampling.repeat_last);
    for (int i = (int)threadIdx.x; i < remembered; i += DRAW_THREADS) {
        const int at = d.state->recent[i] - first;
        if (at >= 0 && at < count) atomicOr(&repeated[at / 32], 1u << at % 32);
    }
    __syncthreads(); /* the bits are set before they are read */
}

/* Repetition penalty, the first candidate, the smallest logit, and the first that is not a number.
 * logits f32 [V] (the penalty is applied in place) -> state; at temperature 0 -> token, position,
 * drawn. A block surveys a contiguous share, at most one block a multiprocessor; atomics keep the
 * largest of what they find, whatever their order.
 * Shared memory: with a penalty one bit for each id of the share, so that an id that occurs several
 * times counts once and no other kernel is needed. Reads 4 V bytes; bound by latencies: the launch,
 * a load and, at temperature 0, one word of each block on its way to the first one. */
static __global__ void __launch_bounds__(DRAW_THREADS) survey_logits(struct draw d) {
    extern __shared__ unsigned repeated[];
    __shared__ struct exchange exchange;
    start_dependents();
    if (d.sampling.repeat_last > 0) {
        for (int i = (int)threadIdx.x; i <= (share_size(d) - 1) / 32; i += DRAW_THREADS)
            repeated[i] = 0;
        __syncthreads(); /* the bits are cleared before some are set */
    }
    wait_for_inputs();
    const struct batch batch = first_batch(d);
    const struct turn turn = turn_of(d);
    if (d.sampling.repeat_last > 0) mark_repeated(d, repeated);

    u64 first = 1; /* a block without ids, too, has a word to tell */
    unsigned smallest = 0;
    for_share(d, batch, [&](int id, float logit) {
        unsigned order = NO_ORDER;
        if (logit < INFINITY) {
            const int at = id - share_first(d);
            if (d.sampling.repeat_last > 0 && repeated[at / 32] >> at % 32 & 1) {
                logit = logit > 0 ? logit / d.sampling.repeat_penalty
                                  : logit * d.sampling.repeat_penalty;
                d.logits[id] = logit;
            }
            order = order_of(logit);
            if (logit > -INFINITY) smallest = max(smallest, ~order);
        }
        first = max(first, rank_of(order, id));
    });
    first = block_largest(first, exchange);
    if (d.sampling.temperature > 0) {
        smallest = (unsigned)block_largest(smallest, exchange);
        if (threadIdx.x == 0) {
            atomicMax(&d.state->first, first);
            atomicMax(&d.state->smallest, smallest);
        }
    } else if (blockIdx.x > 0) {
        if (threadIdx.x == 0) tell_first_block(d, first);
    } else {
        first = block_largest(max(first, hear_other_blocks(d)), exchange);
        if (threadIdx.x == 0) deliver(d, turn, first, id_of(first));
    }
}

/* ---- weights ---- */

/* A sum in shared memory, where 64-bit atomics would be loops. */
struct halves {
    unsigned low, high;
};

static __device__ void add(struct halves &sum, u64 x) {
    const unsigned low = (unsigned)x, before = atomicAdd(&sum.low, low);
    const unsigned high = (unsigned)(x >> 32) + (before + low < before);
    if (high > 0) atomicAdd(&sum.high, high);
}
static __device__ void add(u64 *to, const struct halves &sum) {
    const u64 x = (u64)sum.high << 32 | sum.low;
    if (x > 0) atomicAdd(to, x);
}

/* Counts and weighs the candidates, bin by bin.
 * logits f32 [V] -> count, weight (where top-p asks for it) and tempered of the state. Grid and
 * shares are those of the survey. Shared memory: 20 KB, the block's own bins, since atomics on
 * neighbouring words pass L2 together and scattered ones do not. Bound by latencies; where all
 * logits are equal they meet in one bin. */
static __global__ void __launch_bounds__(DRAW_THREADS) weigh_candidates(struct draw d) {
    __shared__ unsigned count[DRAW_BINS];
    __shared__ struct halves weight[DRAW_BINS], tempered[DRAW_BINS];
    start_dependents();
    for (int bin = (int)threadIdx.x; bin < DRAW_BINS; bin += DRAW_THREADS) {
        count[bin] = 0;
        weight[bin] = tempered[bin] = {};
    }
    __syncthreads(); /* the bins are cleared before something is added */
    wait_for_inputs();
    const struct batch batch = first_batch(d);
    const struct span span = span_of(d, turn_of(d));
    for_share(d, batch, [&](int, float logit) {
        const float distance = span.largest - logit;
        if (!(distance <= span.reach)) return;
        const int bin = bin_of(span, distance);
        const struct tally tally = tally_of(d, distance);
        atomicAdd(&count[bin], 1);
        if (d.sampling.top_p < 1) add(weight[bin], tally.weight);
        if (tally.tempered > 0) add(tempered[bin], tally.tempered);
    });
    __syncthreads(); /* the bins are complete before they are read */
    for (int bin = (int)threadIdx.x; bin < DRAW_BINS; bin += DRAW_THREADS) {
        if (count[bin] > 0) atomicAdd(&d.state->count[bin], count[bin]);
        add(&d.state->weight[bin], weight[bin]);
        add(&d.state->tempered[bin], tempered[bin]);
    }
}

/* ---- choice: candidates go to their bins ---- */

/* The bins of a thread, the sum of all bins before them, and that of all bins. */
struct bins {
    struct tally own[THREAD_BINS], before, total;
};

static __device__ struct bins read_bins(const struct draw &d, struct exchange &exchange) {
    struct bins bins = {};
    struct tally sum = {};
#pragma unroll
    for (int i = 0; i < THREAD_BINS; i++) {
        const int bin = (int)threadIdx.x * THREAD_BINS + i;
        bins.own[i] = {d.state->count[bin], d.state->weight[bin], d.state->tempered[bin]};
        add(sum, bins.own[i]);
    }
    bins.before = sum_before(sum, bins.total, exchange);
    return bins;
}

/* Top-p keeps the candidates up to the one at which the weights pass this, if `total` are left. */
static __device__ u64 nucleus_target(const struct draw &d, const struct tally &total) {
    const u64 share = (u64)ceil((double)d.sampling.top_p * (double)total.weight);
    return share > 0 ? share - 1 : 0;
}

/* Whether a candidate with so much before its bin may still be asked for. */
static __device__ bool matters(const struct draw &d, const struct tally &before,
                               const struct tally &total) {
    if (d.sampling.top_k > 0 && (unsigned)d.sampling.top_k < total.count)
        return before.count < (unsigned)d.sampling.top_k;
    return d.sampling.top_p >= 1 || before.weight <= nucleus_target(d, total);
}

/* Writes the ranks of the block's share of the candidates to their bins: places in a bin are taken
 * in any order. */
static __device__ void place_candidates(const struct draw &d, const struct batch &batch,
                                        const struct span &span, const struct bins &bins,
                                        unsigned offset[DRAW_BINS]) {
    const unsigned nowhere = 0xffffffffu;
    struct tally before = bins.before;
#pragma unroll
    for (int i = 0; i < THREAD_BINS; i++) {
        offset[(int)threadIdx.x * THREAD_BINS + i] =
            matters(d, before, bins.total) ? before.count : nowhere;
        add(before, bins.own[i]);
    }
    __syncthreads(); /* the offsets are written before they are read */
    for_share(d, batch, [&](int id, float logit) {
        const float distance = span.largest - logit;
        if (!(distance <= span.reach)) return;
        const int bin = bin_of(span, distance);
        if (offset[bin] == nowhere) return;
        d.ranks[offset[bin] + atomicAdd(&d.state->placed[bin], 1)] = rank_of(order_of(logit), id);
    });
}

/* ---- choice: one block finds the candidates that are asked for ---- */

/* Calls visit(rank) for a thread's share of the ranks from low to high, which come in any order. */
template <class Visit>
static __device__ void for_ranks(const u64 *ranks, unsigned count, u64 low, u64 high, Visit visit) {
#pragma unroll 4
    for (unsigned i = threadIdx.x; i < count; i += DRAW_THREADS) {
        const u64 rank = __ldcg(&ranks[i]); /* other blocks wrote it: past L1 */
        if (rank >= low && rank <= high) visit(rank);
    }
}

/* Some candidates that follow one another, sorted, one a thread. */
struct window {
    unsigned first, end; /* their numbers in the order of all */
    u64 rank;
    struct tally own, before; /* own 0: none for this thread; before: all that come before it */
};

/* What the choice works with. */
struct choice {
    const struct draw &d;
    const struct span &span;
    const struct bins &bins;
    struct exchange &exchange;
    struct window window;
};

/* Of so many candidates, in any order at ranks, takes those around the one at which the sum passes
 * target, if `above` is the sum of all that come before these: halving the range of ranks until
 * there is a thread for each that is left. Returns a thread's rank, or 0; above and count become
 * those of the ranks taken. */
static __device__ u64 narrow(struct choice &c, const u64 *ranks, struct tally &above,
                             unsigned &count, enum measure measure, u64 target) {
    const unsigned all = count;
    u64 low = 0, high = 0;
    struct tally total;
    for_ranks(ranks, all, 0, ~(u64)0, [&](u64 rank) {
        high = max(high, rank);
        low = max(low, ~rank);
    });
    high = block_largest(high, c.exchange);
    low = ~block_largest(low, c.exchange);
    while (count > DRAW_THREADS) {
        const u64 middle = low + (high - low) / 2;
        struct tally upper = {};
        for_ranks(ranks, all, middle + 1, high,
                  [&](u64 rank) { add(upper, tally_of(c.d, c.span.largest - logit_of(rank))); });
        sum_before(upper, total, c.exchange);
        if (target < measured(above, measure) + measured(total, measure)) {
            low = middle + 1;
            count = total.count;
        } else {
            add(above, total);
            high = middle;
            count -= total.count;
        }
    }
    struct tally own = {};
    for_ranks(ranks, all, low, high, [&](u64) { own.count++; });
    unsigned at = sum_before(own, total, c.exchange).count;
    for_ranks(ranks, all, low, high, [&](u64 rank) { c.exchange.rank[at++] = rank; });
    __syncthreads(); /* the ranks are written before they are read */
    const u64 rank = threadIdx.x < count ? c.exchange.rank[threadIdx.x] : 0;
    __syncthreads(); /* ... and read before a sort writes there */
    return rank;
}

/* Around the candidate of a bin at which the sum passes target: all from the very first to the
 * bin's last if they fit, since these are what is asked for next, else some of the bin. above: the
 * sum before the bin. */
static __device__ struct window open_window(struct choice &c, struct tally above, unsigned count,
                                            enum measure measure, u64 target) {
    struct window window = {};
    if (above.count + count <= DRAW_THREADS) {
        count += above.count;
        above = {};
    }
    const u64 *ranks = c.d.ranks + above.count;
    if (count > DRAW_THREADS)
        window.rank = narrow(c, ranks, above, count, measure, target);
    else if (threadIdx.x < count)
        window.rank = __ldcg(&ranks[threadIdx.x]); /* other blocks wrote it: past L1 */
    window.rank = sort(window.rank, count, c.exchange);
    window.first = above.count;
    window.end = above.count + count;
    if (threadIdx.x < count) window.own = tally_of(c.d, c.span.largest - logit_of(window.rank));
    struct tally total;
    window.before = sum_before(window.own, total, c.exchange);
    add(window.before, above);
    return window;
}

static __device__ bool passes(const struct tally &before, const struct tally &own,
                              enum measure measure, u64 target) {
    const u64 reached = measured(before, measure);
    return reached <= target && target - reached < measured(own, measure);
}

/* Makes `through` the sum of all candidates up to and with that at which the sum in order passes
 * target, which is less than the sum of all. Returns its rank. */
static __device__ u64 find(struct choice &c, enum measure measure, u64 target,
                           struct tally &through) {
    struct tally before = c.bins.before;
#pragma unroll
    for (int i = 0; i < THREAD_BINS; i++) {
        if (passes(before, c.bins.own[i], measure, target)) {
            c.exchange.above = before;
            c.exchange.count = c.bins.own[i].count;
        }
        add(before, c.bins.own[i]);
    }
    __syncthreads(); /* the one bin is written before it is read */
    const struct tally above = c.exchange.above;
    const unsigned count = c.exchange.count;
    if (above.count < c.window.first || above.count + count > c.window.end)
        c.window = open_window(c, above, count, measure, target);
    if (passes(c.window.before, c.window.own, measure, target)) {
        c.exchange.through = c.window.before;
        add(c.exchange.through, c.window.own);
        c.exchange.found = c.window.rank;
    }
    __syncthreads(); /* the candidate is written before it is read, and the bin is read */
    through = c.exchange.through;
    return c.exchange.found;
}

/* top-k, top-p (min-p is in the weights), then the draw with this random number. */
static __device__ int draw_id(struct choice &c, unsigned random) {
    struct tally through = c.bins.total; /* the sums of those that are left */
    u64 rank = 0;
#pragma unroll 1
    for (int measure = COUNT; measure <= TEMPERED; measure++) {
        u64 target;
        if (measure == COUNT) {
            if (c.d.sampling.top_k == 0 || (unsigned)c.d.sampling.top_k >= through.count) continue;
            target = (u64)c.d.sampling.top_k - 1;
        } else if (measure == WEIGHT) {
            if (c.d.sampling.top_p >= 1) continue;
            target = nucleus_target(c.d, through);
        } else { /* random / 2^RANDOM_BITS of the sum, in two parts that do not overflow */
            const u64 rest = through.tempered & (((u64)1 << RANDOM_BITS) - 1);
            target = (through.tempered >> RANDOM_BITS) * random + (rest * random >> RANDOM_BITS);
        }
        rank = find(c, (enum measure)measure, target, through);
    }
    return id_of(rank);
}

/* Draws from the weighed candidates.
 * logits f32 [V], bins of the state -> ranks u64 [V]; token, position, drawn; bins zero again.
 * All blocks put the candidates' ranks into their bins; then the first block chooses: up to three
 * times it finds a bin and a candidate in a window around it, which it sorts if it does not have it
 * yet. Shared memory: 4 KB of offsets, 4 KB to exchange ranks; at most 64 registers, so that it
 * starts beside its predecessors. Bound by latencies; where most logits are equal, by what one
 * multiprocessor reads from L2. */
static __global__ void __launch_bounds__(DRAW_THREADS, 2) choose_candidate(struct draw d) {
    __shared__ unsigned offset[DRAW_BINS];
    __shared__ struct exchange exchange;
    start_dependents();
    wait_for_inputs();
    const struct batch batch = first_batch(d);
    const struct turn turn = turn_of(d);
    const struct bins bins = read_bins(d, exchange);
    const struct span span = span_of(d, turn);
    place_candidates(d, batch, span, bins, offset);
    __syncthreads(); /* the block's ranks are written before the fence that passes them on */
    if (blockIdx.x > 0) {
        if (threadIdx.x > 0) return;
        release_writes();
        tell_first_block(d, 1);
        return;
    }
    hear_other_blocks(d);
    __syncthreads(); /* every block has read the bins and written its ranks */
    for (int bin = (int)threadIdx.x; bin < DRAW_BINS; bin += DRAW_THREADS) {
        d.state->count[bin] = d.state->placed[bin] = 0;
        d.state->weight[bin] = d.state->tempered[bin] = 0;
    }
    struct choice choice = {d, span, bins, exchange, {}};
    const unsigned random = random_bits(d.sampling.seed, turn.counters.number);
    const int id = span.drawable ? draw_id(choice, random) : id_of(turn.first);
    if (threadIdx.x == 0) deliver(d, turn, turn.first, id);
}

/* ---- launching ---- */

void cuda_draw(struct cuda_backend *b, const struct cuda_draw *what) {
    struct draw d = {};
    d.logits = what->logits;
    d.vocab = what->sampler->vocab;
    d.state = (struct draw_state *)what->state;
    d.ranks = (u64 *)((uint32_t *)what->state + CUDA_DRAW_WORDS);
    d.sampling = what->sampler->sampling;
    if (!has_penalty(&d.sampling)) d.sampling.repeat_last = 0;
    d.token = what->tokens;
    d.slot = what->slots;
    d.position = what->positions;
    d.last_row = what->last_row;
    d.drawn = b->draws->drawn_device;
    const int most = (d.vocab + DRAW_THREADS - 1) / DRAW_THREADS;
    const int largest = b->multiprocessors < DRAW_THREADS ? b->multiprocessors : DRAW_THREADS;
    const int blocks = most < largest ? most : largest;
    const size_t bits = d.sampling.repeat_last > 0 ? (size_t)((d.vocab + blocks - 1) / blocks) : 0;
    const size_t shared = (bits + 31) / 32 * sizeof(unsigned);
    const dim3 grid((unsigned)blocks);
    cuda_launch(b, "survey_logits", survey_logits, grid, DRAW_THREADS, shared, d);
    if (d.sampling.temperature == 0) return;
    cuda_launch(b, "weigh_candidates", weigh_candidates, grid, DRAW_THREADS, 0, d);
    cuda_launch(b, "choose_candidate", choose_candidate, grid, DRAW_THREADS, 0, d);
}
