#include "model/sampler.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

int sampler_open(struct sampler *sampler, struct sampling sampling, int vocab,
                 struct error *error) {
    *sampler = (struct sampler){.sampling = sampling, .vocab = vocab};
    size_t recent = sampling.repeat_last > 0 ? (size_t)sampling.repeat_last : 1;
    sampler->candidates = calloc((size_t)vocab, sizeof *sampler->candidates);
    sampler->recent = calloc(recent, sizeof *sampler->recent);
    if (sampler->candidates && sampler->recent) return 0;
    sampler_close(sampler);
    return fail(error, EXIT_MEMORY, "host memory: no %zu bytes for the sampler",
                (size_t)vocab * sizeof *sampler->candidates + recent * sizeof *sampler->recent);
}

void sampler_close(struct sampler *sampler) {
    free(sampler->candidates);
    free(sampler->recent);
    sampler->candidates = NULL;
    sampler->recent = NULL;
}

void sampler_accept(struct sampler *sampler, int32_t id) {
    int size = sampler->sampling.repeat_last;
    if (size <= 0) return;
    /* Counts on from `size` to 2 size - 1, so that it never overflows and stays >= size once full.
     */
    sampler->recent[sampler->recent_count % size] = id;
    if (++sampler->recent_count == 2 * size) sampler->recent_count = size;
}

/* SplitMix64 (Steele et al., 2014) of seed and counter: a float in [0, 1). */
static float random_unit(uint64_t seed, uint64_t counter) {
    uint64_t z = seed + (counter + 1) * 0x9e3779b97f4a7c15U;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9U;
    z = (z ^ z >> 27) * 0x94d049bb133111ebU;
    return (float)((z ^ z >> 31) >> 40) * 0x1p-24F;
}

/* Each id once, however often it occurred. */
static void penalise(struct sampler *s, float *logits) {
    int size = s->sampling.repeat_last;
    int count = s->recent_count < size ? s->recent_count : size;
    for (int i = 0; i < count; i++) {
        int32_t id = s->recent[i];
        int seen = id < 0 || id >= s->vocab;
        for (int j = 0; j < i && !seen; j++) seen = s->recent[j] == id;
        if (seen) continue;
        float penalty = s->sampling.repeat_penalty;
        logits[id] = logits[id] > 0 ? logits[id] / penalty : logits[id] * penalty;
    }
}

/* Higher value first, then lower id: a total order, so that ties do not depend on the sort. */
static int before(const void *left, const void *right) {
    const struct candidate *a = left, *b = right;
    if (a->value != b->value) return a->value > b->value ? -1 : 1;
    return a->id < b->id ? -1 : a->id > b->id;
}

/* Restores the heap below `at`: the root is the candidate that all others come before. */
static void sift_down(struct candidate *heap, int count, int at) {
    for (;;) {
        int child = 2 * at + 1;
        if (child >= count) return;
        if (child + 1 < count && before(&heap[child + 1], &heap[child]) > 0) child++;
        if (before(&heap[child], &heap[at]) < 0) return;
        struct candidate moved = heap[at];
        heap[at] = heap[child];
        heap[child] = moved;
        at = child;
    }
}

/* The k first candidates of all logits, unordered: a heap of k, so no sort of the vocabulary. */
static int keep_top_k(struct candidate *kept, const float *logits, int vocab, int k) {
    for (int i = 0; i < k; i++) kept[i] = (struct candidate){logits[i], i};
    for (int i = k / 2 - 1; i >= 0; i--) sift_down(kept, k, i);
    for (int i = k; i < vocab; i++) {
        struct candidate next = {logits[i], i};
        if (before(&next, &kept[0]) > 0) continue;
        kept[0] = next;
        sift_down(kept, k, 0);
    }
    return k;
}

/* Candidates worth a thought when top-k is off: those within 25 of the largest logit (after the
 * division by the temperature, where that is above 1). All the others together weigh less than
 * V e^-25 < 2e-5 of the largest. */
static int keep_likely(struct candidate *kept, const float *logits, int vocab, float largest,
                       float temperature) {
    float least = largest - 25 * (temperature > 1 ? temperature : 1);
    int count = 0;
    for (int i = 0; i < vocab; i++)
        if (logits[i] >= least) kept[count++] = (struct candidate){logits[i], i};
    return count;
}

/* Sorted logits to probabilities at a temperature; returns their sum: in double, since the rounding of
 * a long f32 sum would move the draw among a large vocabulary. */
static double weigh(const struct candidate *kept, int count, float temperature, float *weights) {
    double sum = 0;
    for (int i = 0; i < count; i++)
        sum += (double)(weights[i] = expf((kept[i].value - kept[0].value) / temperature));
    return sum;
}

/* The length of the prefix that top-p (arXiv 1904.09751) and min-p (arXiv 2407.01082) leave. */
static int nucleus(const float *weights, int count, double sum, float top_p, float min_p) {
    double reached = 0;
    const double enough = top_p < 1 ? (double)top_p * sum : INFINITY;
    int n = 0;
    while (n < count && (n == 0 || (reached < enough && weights[n] >= min_p * weights[0])))
        reached += (double)weights[n++];
    return n;
}

int sampler_draw(struct sampler *s, float *logits, int32_t *id, struct error *error) {
    const struct sampling *o = &s->sampling;
    int largest = 0;
    for (int i = 0; i < s->vocab; i++) {
        if (isnan(logits[i]) || logits[i] == INFINITY)
            return fail(error, EXIT_INTERNAL,
                        "the logit of id %d is %f, expected a number: are the weights finite? "
                        "--check tells",
                        i, (double)logits[i]);
    }
    if (o->repeat_penalty != 1) penalise(s, logits);
    for (int i = 1; i < s->vocab; i++)
        if (logits[i] > logits[largest]) largest = i;
    if (logits[largest] == -INFINITY)
        return fail(error, EXIT_INTERNAL, "every logit is -inf: nothing to draw from");
    *id = largest;
    if (o->temperature == 0) return 0;

    struct candidate *kept = s->candidates;
    int count = o->top_k > 0 && o->top_k < s->vocab
                    ? keep_top_k(kept, logits, s->vocab, o->top_k)
                    : keep_likely(kept, logits, s->vocab, logits[largest], o->temperature);
    qsort(kept, (size_t)count, sizeof *kept, before);
    float *weights = logits; /* no longer needed as logits */
    double sum = weigh(kept, count, 1, weights);
    count = nucleus(weights, count, sum, o->top_p, o->min_p);
    sum = weigh(kept, count, o->temperature, weights);
    double drawn = (double)random_unit(o->seed, s->draws++) * sum;
    int n = 0;
    while (n < count - 1 && drawn >= weights[n]) drawn -= (double)weights[n++];
    *id = kept[n].id;
    return 0;
}
