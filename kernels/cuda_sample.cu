/* Sampling on the device: from logits to an id without the host (sampler.h says how).
 *
 * The vocabulary is never sorted. Candidates are counted and weighed in bins of falling logits.
 * Then top-k, top-p and the draw itself each ask for one candidate: that at which a sum over the
 * candidates in order (of ones, of weights, of weights at the temperature) passes a target. The
 * sums of the bins tell its bin, and halving the bin's ranks tells which it is. Weights are whole
 * numbers, so sums do not depend on the order of atomics: the same seed gives the same ids. They
 * differ from those of sampler_draw where its rounding moves a boundary past the target.
 *
 * Three kernels a draw: survey_logits (all that temperature 0 needs), weigh_candidates,
 * choose_candidate. */
#include "kernels/cuda_sample.cuh"

#include "kernels/cuda_backend.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- the end of a draw ---- */

/* One thread: token and position of the next step, the penalty's memory, what the host waits for,
 * and the state as the next draw needs it. */
static __device__ void deliver(const struct draw &d, int id) {
    struct draw_state *state = d.state;
    const unsigned invalid = __ldcg(&state->invalid); /* other blocks wrote it: past L1 */
    struct drawn drawn = {DRAWN, id, 0};
    if (invalid)
        drawn = {NOT_A_NUMBER, (int32_t)~invalid, d.logits[~invalid]};
    else if (logit_of(__ldcg(&state->first)) == -INFINITY)
        drawn = {NOTHING_FINITE, NO_ID, 0};
    const bool good = drawn.outcome == DRAWN;
    struct draw_counters *counters = &state->counters;
    if (good) d.token[0] = id;
    d.slot[0] = d.slot[d.last_row];
    d.position[0] = d.position[d.last_row] + 1;
    if (d.repeat_last > 0) {
        state->recent[counters->accepted % d.repeat_last] = good ? id : NO_ID;
        /* as sampler_accept counts: it never overflows, and stays >= repeat_last once full */
        if (++counters->accepted == 2 * d.repeat_last) counters->accepted = d.repeat_last;
    }
    counters->number++;
    state->first = 0;
    state->smallest = state->invalid = 0;
    d.drawn[counters->made++ % DRAW_WAITING] = drawn; /* read after the event that follows */
}

/* ---- survey ---- */

/* Sets the bits of the ids of the block's share that occur among the recent ones. */
static __device__ void mark_repeated(const struct draw &d, unsigned *repeated) {
    const int first = share_first(d), count = share_size(d);
    const int count_recent = remembered(d);
    for (int i = (int)threadIdx.x; i < count_recent; i += DRAW_THREADS) {
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
 * a load and, at temperature 0, three trips of the last block to L2. */
static __global__ void __launch_bounds__(DRAW_THREADS) survey_logits(struct draw d) {
    extern __shared__ unsigned repeated[];
    __shared__ struct exchange exchange;
    start_dependents();
    if (d.repeat_last > 0) {
        for (int i = (int)threadIdx.x; i <= (share_size(d) - 1) / 32; i += DRAW_THREADS)
            repeated[i] = 0;
        __syncthreads(); /* the bits are cleared before some are set */
    }
    wait_for_inputs();
    if (d.repeat_last > 0) mark_repeated(d, repeated);

    u64 first = 0;
    unsigned smallest = 0;
    for_share(d, [&](int id, float logit) {
        if (!(logit < INFINITY)) {
            atomicMax(&d.state->invalid, ~(unsigned)id);
            return;
        }
        const int at = id - share_first(d);
        if (d.repeat_last > 0 && repeated[at / 32] >> at % 32 & 1) {
            logit = logit > 0 ? logit / d.penalty : logit * d.penalty;
            d.logits[id] = logit;
        }
        first = max(first, rank_of(logit, id));
        if (logit > -INFINITY) smallest = max(smallest, ~order_of(logit));
    });
    first = block_largest(first, exchange);
    smallest = (unsigned)block_largest(smallest, exchange);
    if (threadIdx.x == 0) {
        atomicMax(&d.state->first, first);
        atomicMax(&d.state->smallest, smallest);
    }
    if (d.temperature > 0 || !is_last_block(&d.state->finished)) return;
    if (threadIdx.x == 0) deliver(d, id_of(__ldcg(&d.state->first)));
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

static __device__ struct span span_of(const struct draw &d) {
    struct span span;
    span.largest = logit_of(d.state->first);
    span.drawable = d.state->invalid == 0 && fabsf(span.largest) < INFINITY;
    /* No further than the smallest: flat distributions, too, spread over all bins. */
    span.reach = fminf(fminf(25 * fmaxf(d.temperature, 1), FLT_MAX),
                       span.largest - value_of(~d.state->smallest));
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
    const bool counts = weight >= d.min_p;
    return {1, __float2ull_rn(weight * unit),
            counts ? __float2ull_rn(expf(-distance / d.temperature) * unit) : 0};
}

/* Counts and weighs the candidates, bin by bin.
 * logits f32 [V] -> count, weight (where top-p asks for it) and tempered of the state. Grid and
 * shares are those of the survey. Bound by L2's throughput of atomics, up to three an id, none with
 * return; where all logits are equal they meet in one bin. */
static __global__ void __launch_bounds__(DRAW_THREADS) weigh_candidates(struct draw d) {
    start_dependents();
    wait_for_inputs();
    const struct span span = span_of(d);
    for_share(d, [&](int, float logit) {
        const float distance = span.largest - logit;
        if (!(distance <= span.reach)) return;
        const int bin = bin_of(span, distance);
        const struct tally tally = tally_of(d, distance);
        atomicAdd(&d.state->count[bin], 1);
        if (d.top_p < 1) atomicAdd(&d.state->weight[bin], tally.weight);
        if (tally.tempered > 0) atomicAdd(&d.state->tempered[bin], tally.tempered);
    });
}

/* ---- choice ---- */

/* The three bins of a thread, and the sum of all bins before them. */
struct bins {
    struct tally own[THREAD_BINS], before;
};

static __device__ struct bins read_bins(const struct draw_state *state, struct exchange &exchange) {
    struct bins bins;
    struct tally sum = {};
#pragma unroll
    for (int i = 0; i < THREAD_BINS; i++) {
        const int bin = (int)threadIdx.x * THREAD_BINS + i;
        bins.own[i] = {state->count[bin], state->weight[bin], state->tempered[bin]};
        add(sum, bins.own[i]);
    }
    bins.before = sum_before(sum, exchange);
    return bins;
}

/* Writes the ranks of the block's share of the candidates to their bins: places in a bin are taken
 * in any order. Bins past top-k are of no use. */
static __device__ void place_candidates(const struct draw &d, const struct span &span,
                                        const struct bins &bins, unsigned offset[DRAW_BINS]) {
    unsigned before = bins.before.count;
#pragma unroll
    for (int i = 0; i < THREAD_BINS; i++) {
        offset[(int)threadIdx.x * THREAD_BINS + i] = before;
        before += bins.own[i].count;
    }
    __syncthreads(); /* the offsets are written before they are read */
    for_share(d, [&](int id, float logit) {
        const float distance = span.largest - logit;
        if (!(distance <= span.reach)) return;
        const int bin = bin_of(span, distance);
        if (d.top_k > 0 && offset[bin] >= (unsigned)d.top_k) return;
        d.ranks[offset[bin] + atomicAdd(&d.state->placed[bin], 1)] = rank_of(logit, id);
    });
}

/* What was asked for: a candidate and the sums of all up to and with it. */
struct found {
    struct tally through;
    u64 rank;
};

/* Of `left` candidates, in any order at ranks: that at which the sum passes target, if `above` is
 * the sum of all that come before these. Ranks differ, so halving their range ends with one. A
 * thread keeps its first candidate in registers: few bins have more than one a thread. */
static __device__ struct found narrow(const struct draw &d, const struct span &span,
                                      const u64 *ranks, struct tally above, unsigned left,
                                      enum measure measure, u64 target, struct exchange &exchange) {
    const unsigned count = left, thread = threadIdx.x;
    const u64 kept = thread < count ? __ldcg(&ranks[thread]) : 0; /* other blocks wrote them */
    const struct tally kept_tally = tally_of(d, span.largest - logit_of(kept));
    u64 high = 0, inverse_low = 0;
    for (unsigned i = thread; i < count; i += DRAW_THREADS) {
        const u64 rank = i == thread ? kept : __ldcg(&ranks[i]);
        high = max(high, rank);
        inverse_low = max(inverse_low, ~rank);
    }
    high = block_largest(high, exchange);
    u64 low = ~block_largest(inverse_low, exchange);
    while (left > 1) {
        const u64 middle = low + (high - low) / 2;
        struct tally upper = {};
        for (unsigned i = thread; i < count; i += DRAW_THREADS) {
            const u64 rank = i == thread ? kept : __ldcg(&ranks[i]);
            if (rank <= middle || rank > high) continue;
            add(upper, i == thread ? kept_tally : tally_of(d, span.largest - logit_of(rank)));
        }
        upper = block_total(upper, exchange);
        if (target < measured(above, measure) + measured(upper, measure)) {
            low = middle + 1;
            left = upper.count;
        } else {
            add(above, upper);
            high = middle;
            left -= upper.count;
        }
    }
    for (unsigned i = thread; i < count; i += DRAW_THREADS) {
        const u64 rank = i == thread ? kept : __ldcg(&ranks[i]);
        if (rank < low || rank > high) continue;
        exchange.rank = rank;
        exchange.found = above;
        add(exchange.found, tally_of(d, span.largest - logit_of(rank)));
    }
    __syncthreads(); /* the candidate is written before it is read */
    const struct found found = {exchange.found, exchange.rank};
    __syncthreads(); /* ... and read before the next one is written */
    return found;
}

/* The candidate at which the sum in order passes target, which is less than the sum of all. */
static __device__ struct found find(const struct draw &d, const struct span &span,
                                    const struct bins &bins, enum measure measure, u64 target,
                                    struct exchange &exchange) {
    __shared__ unsigned bin_count;
    struct tally before = bins.before;
#pragma unroll
    for (int i = 0; i < THREAD_BINS; i++) {
        const u64 reached = measured(before, measure);
        if (reached <= target && target - reached < measured(bins.own[i], measure)) {
            exchange.found = before;
            bin_count = bins.own[i].count;
        }
        add(before, bins.own[i]);
    }
    __syncthreads(); /* the one bin is written before it is read */
    const struct tally above = exchange.found;
    const unsigned count = bin_count;
    __syncthreads(); /* ... and read before the next one is written */
    return narrow(d, span, d.ranks + above.count, above, count, measure, target, exchange);
}

/* top-k, top-p (min-p is in the weights), then the draw. */
static __device__ int draw_id(const struct draw &d, const struct span &span,
                              const struct bins &bins, struct exchange &exchange) {
    struct tally through = {}; /* the sums of those that are left */
    for (int i = 0; i < THREAD_BINS; i++) add(through, bins.own[i]);
    through = block_total(through, exchange);
    if (d.top_k > 0 && (unsigned)d.top_k < through.count)
        through = find(d, span, bins, COUNT, (u64)d.top_k - 1, exchange).through;
    if (d.top_p < 1) {
        const u64 share = (u64)ceil((double)d.top_p * (double)through.weight);
        through = find(d, span, bins, WEIGHT, share > 0 ? share - 1 : 0, exchange).through;
    }
    /* random / 2^RANDOM_BITS of the sum, rounded down, in two parts that do not overflow. */
    const u64 whole = through.tempered >> RANDOM_BITS;
    const u64 rest = through.tempered & (((u64)1 << RANDOM_BITS) - 1);
    const u64 random = random_bits(d.seed, d.state->counters.number);
    const u64 target = whole * random + (rest * random >> RANDOM_BITS);
    return id_of(find(d, span, bins, TEMPERED, target, exchange).rank);
}

/* Draws from the weighed candidates.
 * logits f32 [V], bins of the state -> ranks u64 [V]; token, position, drawn; bins zero again.
 * All blocks put the candidates' ranks into their bins; the last one to finish chooses: up to three
 * times it finds a bin and halves it, about log2 of its candidates times, with two barriers each.
 * Shared memory: 6 KB of offsets, 0.5 KB to exchange sums. Bound by latencies; where most logits
 * are equal, by what one multiprocessor reads from L2. */
static __global__ void __launch_bounds__(DRAW_THREADS, 1) choose_candidate(struct draw d) {
    __shared__ unsigned offset[DRAW_BINS];
    __shared__ struct exchange exchange;
    start_dependents();
    wait_for_inputs();
    const struct span span = span_of(d);
    const struct bins bins = read_bins(d.state, exchange);
    place_candidates(d, span, bins, offset);
    if (!is_last_block(&d.state->finished)) return;
    const int id = span.drawable ? draw_id(d, span, bins, exchange) : id_of(d.state->first);
    for (int bin = (int)threadIdx.x; bin < DRAW_BINS; bin += DRAW_THREADS) {
        d.state->count[bin] = d.state->placed[bin] = 0;
        d.state->weight[bin] = d.state->tempered[bin] = 0;
    }
    if (threadIdx.x == 0) deliver(d, id);
}

/* ---- host: memory ---- */

/* Draw number n uses the slot n % DRAW_WAITING of drawn and event. */
struct cuda_draws {
    struct drawn *drawn, *drawn_device; /* [DRAW_WAITING], pinned; the same from the device */
    cudaEvent_t event[DRAW_WAITING];
    uint64_t enqueued, taken;

    /* The draws that follow one another without the host: whose they are. */
    const struct sampler *sampler; /* NULL: none yet */
    struct sampling sampling;      /* what captured graphs have in their arguments */
    uint64_t seen;                 /* sampler->draws at the last draw */
};

void cuda_draws_open(struct cuda_backend *b) {
    if (b->error.code) return;
    struct cuda_draws *draws = (struct cuda_draws *)calloc(1, sizeof *draws);
    b->draws = draws;
    if (!draws) {
        fail(&b->error, EXIT_MEMORY, "host memory: no %zu bytes for draws", sizeof *draws);
        return;
    }
    if (CUDA_TRY(b, cudaHostAlloc((void **)&draws->drawn, DRAW_WAITING * sizeof *draws->drawn,
                                  cudaHostAllocMapped)))
        return;
    if (CUDA_TRY(b, cudaHostGetDevicePointer((void **)&draws->drawn_device, draws->drawn, 0)))
        return;
    for (int i = 0; i < DRAW_WAITING; i++)
        if (CUDA_TRY(b, cudaEventCreateWithFlags(&draws->event[i], cudaEventDisableTiming))) return;
}

void cuda_draws_close(struct cuda_backend *b) {
    struct cuda_draws *draws = b->draws;
    if (!draws) return;
    cudaStreamSynchronize(b->stream); /* draws that nobody takes still write */
    for (int i = 0; i < DRAW_WAITING; i++)
        if (draws->event[i]) cudaEventDestroy(draws->event[i]);
    cudaFreeHost(draws->drawn);
    free(draws);
    b->draws = NULL;
}

/* ---- host: draws ---- */

static bool has_penalty(const struct sampling *sampling) {
    return sampling->repeat_penalty != 1 && sampling->repeat_last > 0;
}

/* Whether the device's memory is not of this sampler: another one, or the same opened again. */
static bool starts_anew(const struct cuda_draws *draws, const struct sampler *sampler) {
    return draws->sampler != sampler || sampler->draws < draws->seen ||
           memcmp(&draws->sampling, &sampler->sampling, sizeof draws->sampling) != 0;
}

/* Brings what the sampler has accepted. A copy from pageable memory has read it when it returns. */
static void start(struct cuda_backend *b, const struct sampler *sampler, struct draw_state *state) {
    struct cuda_draws *draws = b->draws;
    const struct draw_counters counters = {sampler->draws, (unsigned)draws->enqueued,
                                           sampler->recent_count};
    cuda_graphs_close(b);
    CUDA_TRY(b, cudaMemsetAsync(state, 0, sizeof *state, b->stream));
    CUDA_TRY(b, cudaMemcpyAsync(&state->counters, &counters, sizeof counters,
                                cudaMemcpyHostToDevice, b->stream));
    if (has_penalty(&sampler->sampling))
        CUDA_TRY(b, cudaMemcpyAsync(state->recent, sampler->recent,
                                    (size_t)sampler->sampling.repeat_last * sizeof(int32_t),
                                    cudaMemcpyHostToDevice, b->stream));
    draws->sampler = sampler;
    draws->sampling = sampler->sampling;
}

void cuda_draw_begin(struct cuda_backend *b, const struct sampler *sampler, void *state) {
    if (b->error.code) return;
    struct cuda_draws *draws = b->draws;
    if (sampler->sampling.repeat_last > DRAW_RECENT)
        fail(&b->error, EXIT_INTERNAL, "the penalty looks back on %d ids, the device on at most %d",
             sampler->sampling.repeat_last, DRAW_RECENT);
    else if (draws->enqueued - draws->taken == DRAW_WAITING)
        fail(&b->error, EXIT_INTERNAL, "%d draws wait to be taken, and there is room for no more",
             DRAW_WAITING);
    else if (starts_anew(draws, sampler))
        start(b, sampler, (struct draw_state *)state);
    draws->seen = sampler->draws;
}

void cuda_draw(struct cuda_backend *b, const struct cuda_draw *what) {
    const struct sampling *sampling = &what->sampler->sampling;
    struct draw d = {};
    d.logits = what->logits;
    d.vocab = what->sampler->vocab;
    d.state = (struct draw_state *)what->state;
    d.ranks = (u64 *)((uint32_t *)what->state + CUDA_DRAW_WORDS);
    d.temperature = sampling->temperature;
    d.top_p = sampling->top_p;
    d.min_p = sampling->min_p;
    d.penalty = sampling->repeat_penalty;
    d.top_k = sampling->top_k;
    d.repeat_last = has_penalty(sampling) ? sampling->repeat_last : 0;
    d.seed = sampling->seed;
    d.token = what->tokens;
    d.slot = what->slots;
    d.position = what->positions;
    d.last_row = what->last_row;
    d.drawn = b->draws->drawn_device;
    const int most = (d.vocab + DRAW_THREADS - 1) / DRAW_THREADS;
    const int blocks = most < b->multiprocessors ? most : b->multiprocessors;
    const size_t bits = d.repeat_last > 0 ? (size_t)((d.vocab + blocks - 1) / blocks) : 0;
    const size_t shared = (bits + 31) / 32 * sizeof(unsigned);
    const dim3 grid((unsigned)blocks);
    cuda_launch(b, "survey_logits", survey_logits, grid, DRAW_THREADS, shared, d);
    if (d.temperature == 0) return;
    cuda_launch(b, "weigh_candidates", weigh_candidates, grid, DRAW_THREADS, 0, d);
    cuda_launch(b, "choose_candidate", choose_candidate, grid, DRAW_THREADS, 0, d);
}

void cuda_draw_end(struct cuda_backend *b) {
    struct cuda_draws *draws = b->draws;
    if (b->error.code) return;
    CUDA_TRY(b, cudaEventRecord(draws->event[draws->enqueued % DRAW_WAITING], b->stream));
    if (!b->error.code) draws->enqueued++;
}

int cuda_take(struct cuda_backend *b, int32_t *id, struct error *error) {
    struct cuda_draws *draws = b->draws;
    if (!b->error.code && draws->enqueued == draws->taken)
        fail(&b->error, EXIT_INTERNAL, "no draw was made that could be taken");
    if (!b->error.code)
        CUDA_TRY(b, cudaEventSynchronize(draws->event[draws->taken % DRAW_WAITING]));
    if (b->error.code) {
        *error = b->error;
        return error->code;
    }
    const struct drawn drawn = draws->drawn[draws->taken++ % DRAW_WAITING];
    if (drawn.outcome == NOT_A_NUMBER)
        return fail(error, EXIT_INTERNAL,
                    "the logit of id %d is %f, expected a number: are the weights finite? "
                    "--check tells",
                    drawn.id, (double)drawn.logit);
    if (drawn.outcome == NOTHING_FINITE)
        return fail(error, EXIT_INTERNAL, "every logit is -inf: nothing to draw from");
    *id = drawn.id;
    return 0;
}
