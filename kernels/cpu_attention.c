/* Causal attention with grouped heads, online softmax (arXiv 1805.02867).
 *
 * What      out[t, h] = softmax(scale q[t, h] . K) V over the positions 0 to positions[t] of the
 *           row's slot; head h reads the cache of head h G / H.
 * Tiles     the H/G heads of a group and consecutive rows share K and V: query i of a group is head
 *           i % (H/G) of row i / (H/G), and a tile is up to 6 queries in a row. Scores of a tile come
 *           16 positions at a time from the key panels [D][16], as they lie in the cache, in blocks of
 *           CPU_KEYS; then the maximum moves, exp, and V's rows are added up. 6 x 2 vectors of sums
 *           in both products.
 * Owners    a tile belongs to one thread. In a brief step (T <= CPU_BRIEF) its parts of CPU_PART
 *           positions go to different threads, which leave (sum of V, maximum, sum) in `partial`, to
 *           be merged after a barrier.
 * Bound     4 T H S D FLOPs; for a decode step reading the cache, 8 S G D bytes.
 * Numerics  fp32. The cache is always summed up in parts of CPU_PART positions that are merged in
 *           ascending order: a row's result does not depend on the other rows of the step nor on the
 *           number of threads. Nothing past a row's own position reaches it, be it NaN: scores are
 *           masked by selection, and V's rows past the first query's position are added query by
 *           query.
 * Needs     D a multiple of 8, at most 512.
 * Barrier   one in a brief step: all parts written | read by the merge. */
#include "kernels/cpu_attention.h"

#include "kernels/config.h"
#include "kernels/cpu_block.h"
#include "kernels/simd.h"

#include <math.h>

enum { MAX_D = 512, MAX_QUERIES = CPU_QUERIES };

/* Queries of one slot at consecutive positions, and the cache they read. */
struct tile {
    const float *keys, *values;
    size_t count;
    size_t length[MAX_QUERIES]; /* positions that a query sees: ascending */
    float *q;                   /* [count][D], times scale */
    float *o;                   /* [count][D], the weighted sum of V so far */
    float top[MAX_QUERIES];     /* the largest score so far */
    float sum[MAX_QUERIES];     /* of exp(score - top) so far */
};

/* The scores of one query in a block of n positions become exp(score - top): what lies past its
 * length becomes 0, the maximum moves, and what was summed up is scaled to it. */
static void soften(struct tile *tile, size_t j, float *score, size_t first, size_t n, size_t D) {
    size_t seen = tile->length[j] <= first ? 0 : tile->length[j] - first;
    for (size_t k = seen; k < n; k++) score[k] = -INFINITY;
    v8f most = splat8(tile->top[j]);
    for (size_t k = 0; k < n; k += 8) most = max8(load8(score + k), most);
    const float top = largest8(most);

    const v8f shift = splat8(top > -INFINITY ? top : 0); /* -inf: nothing seen yet */
    v8f sum = {0};
    for (size_t k = 0; k < n; k += 8) {
        const v8f weight = exp8_below_88(load8(score + k) - shift);
        sum += weight;
        store8(score + k, weight);
    }
    if (top > tile->top[j]) {
        const float keep = expf(tile->top[j] - top);
        tile->sum[j] *= keep;
        for (size_t d = 0; d < D; d += 8)
            store8(tile->o + j * D + d, load8(tile->o + j * D + d) * keep);
        tile->top[j] = top;
    }
    tile->sum[j] += sum8(sum);
}

/* Asks memory for the values of 16 positions. */
static void ask_for(const float *values, size_t D) {
    for (size_t i = 0; i < CPU_PANEL * D; i += CPU_LINE / sizeof *values)
        __builtin_prefetch(values + i, 0, 2);
}

/* Positions from..to of the cache; from is a multiple of 16. Where they come from memory (`asking`)
 * each panel of keys asks for the values of its positions, which are read a little later. */
static void attend_span(struct tile *tile, size_t from, size_t to, size_t D, bool asking) {
    float score[MAX_QUERIES][CPU_KEYS];
    for (size_t first = from; first < to; first += CPU_KEYS) {
        const size_t n = to - first < CPU_KEYS ? to - first : CPU_KEYS;
        const size_t whole = (n + CPU_PANEL - 1) / CPU_PANEL * CPU_PANEL;
        for (size_t k = 0; k < whole; k += CPU_PANEL) {
            const float *keys = tile->keys + (first + k) * D;
            if (asking) ask_for(tile->values + (first + k) * D, D);
            block_product(tile->q, D, keys, CPU_PANEL, score[0] + k, CPU_KEYS, tile->count,
                          CPU_PANEL, D, false);
        }
        for (size_t j = 0; j < tile->count; j++) soften(tile, j, score[j], first, whole, D);

        /* All queries see the positions before `common`, and fewer and fewer those after it. */
        const size_t end = first + n, least = tile->length[0];
        const size_t common = least < first ? first : least < end ? least : end;
        const float *values = tile->values + first * D;
        block_product(score[0], CPU_KEYS, values, D, tile->o, D, tile->count, D, common - first,
                      true);
        for (size_t k = common, j = 0; k < end; k++) {
            while (tile->length[j] <= k) j++;
            block_product(score[j] + (k - first), CPU_KEYS, tile->values + k * D, D,
                          tile->o + j * D, D, tile->count - j, D, 1, true);
        }
    }
}

/* What was found in some parts of the cache: o[D] = sum of V exp(score - top), sum of exp(...). */
struct found {
    float top, sum, *o;
};

/* all += part, for parts in ascending order. A part where the query sees nothing has sum 0. */
static void absorb(struct found *all, const struct found *part, size_t D) {
    if (part->sum == 0) return;
    const float top = part->top > all->top ? part->top : all->top;
    const float keep = expf(all->top - top), weight = expf(part->top - top);
    all->top = top;
    all->sum = all->sum * keep + part->sum * weight;
    for (size_t d = 0; d < D; d += 8)
        store8(all->o + d, load8(all->o + d) * keep + load8(part->o + d) * weight);
}

/* A query's part in `partial`: o [D], top, sum. */
static float *stored_part(const struct attention *a, size_t part, size_t row, size_t head) {
    return a->partial + ((part * a->T + row) * a->H + head) * (a->D + 2);
}

/* Makes the tile's queries ready: nothing found yet. */
static void start_tile(const struct attention *a, struct tile *tile, size_t group, size_t first) {
    const size_t D = a->D, per_group = a->H / a->G;
    for (size_t j = 0; j < tile->count; j++) {
        const size_t row = (first + j) / per_group, head = (first + j) % per_group;
        const float *from = a->q + row * a->q_stride + (group * per_group + head) * D;
        tile->length[j] = (size_t)a->positions[row] + 1;
        for (size_t d = 0; d < D; d += 8) store8(tile->q + j * D + d, load8(from + d) * a->scale);
    }
}

/* The tile's queries in one part of the cache. */
static void attend_part(const struct attention *a, struct tile *tile, size_t part) {
    const size_t D = a->D, length = tile->length[tile->count - 1], from = part * CPU_PART;
    for (size_t j = 0; j < tile->count; j++) {
        tile->top[j] = -INFINITY;
        tile->sum[j] = 0;
        for (size_t d = 0; d < D; d += 8) store8(tile->o + j * D + d, (v8f){0});
    }
    attend_span(tile, from, from + CPU_PART < length ? from + CPU_PART : length, D,
                a->T <= CPU_BRIEF);
}

/* Queries first..first + count of a group, all in one slot and at consecutive positions: one part,
 * stored (part >= 0), or all of them, to out. */
static void attend_tile(const struct attention *a, size_t group, size_t first, size_t count,
                        int part) {
    const size_t D = a->D, per_group = a->H / a->G, padded = (a->S + 15) / 16 * 16;
    const size_t cache = (size_t)a->slots[first / per_group] * a->G + group;
    float q[MAX_QUERIES * MAX_D], o[MAX_QUERIES * MAX_D], total[MAX_QUERIES * MAX_D];
    struct found all[MAX_QUERIES];
    struct tile tile = {
        a->keys + cache * padded * D, a->values + cache * a->S * D, count, {0}, q, o, {0}, {0}};
    start_tile(a, &tile, group, first);
    for (size_t j = 0; j < count; j++) {
        const size_t row = (first + j) / per_group,
                     head = group * per_group + (first + j) % per_group;
        float *stored = part < 0 ? total + j * D : stored_part(a, (size_t)part, row, head);
        all[j] = (struct found){-INFINITY, 0, stored};
        for (size_t d = 0; d < D; d += 8) store8(stored + d, (v8f){0});
    }
    const size_t parts = (tile.length[count - 1] + CPU_PART - 1) / CPU_PART;
    for (size_t p = part < 0 ? 0 : (size_t)part; p < parts && (part < 0 || p == (size_t)part);
         p++) {
        attend_part(a, &tile, p);
        for (size_t j = 0; j < count; j++)
            absorb(&all[j], &(struct found){tile.top[j], tile.sum[j], o + j * D}, D);
    }
    for (size_t j = 0; j < count; j++) {
        const size_t row = (first + j) / per_group,
                     head = group * per_group + (first + j) % per_group;
        if (part >= 0) {
            all[j].o[D] = all[j].top;
            all[j].o[D + 1] = all[j].sum;
            continue;
        }
        float *to = a->out + (row * a->H + head) * D;
        for (size_t d = 0; d < D; d += 8) store8(to + d, load8(all[j].o + d) / all[j].sum);
    }
}

/* The stored parts of one query. */
static void merge(const struct attention *a, size_t row, size_t head, size_t parts) {
    const size_t D = a->D;
    float *out = a->out + (row * a->H + head) * D;
    struct found all = {-INFINITY, 0, out};
    for (size_t d = 0; d < D; d += 8) store8(out + d, (v8f){0});
    for (size_t p = 0; p < parts; p++) {
        float *stored = stored_part(a, p, row, head);
        absorb(&all, &(struct found){stored[D], stored[D + 1], stored}, D);
    }
    for (size_t d = 0; d < D; d += 8) store8(out + d, load8(out + d) / all.sum);
}

/* Queries of a group from `first` on that go together: at most 6, one slot, consecutive positions.
 */
static size_t tile_count(const struct attention *a, size_t first, size_t end) {
    const size_t per_group = a->H / a->G;
    size_t count = 1;
    for (; first + count < end; count++) {
        const size_t row = (first + count) / per_group, before = (first + count - 1) / per_group;
        if (row != before &&
            (a->slots[row] != a->slots[before] || a->positions[row] != a->positions[before] + 1))
            break;
    }
    return count;
}

size_t attention_owner(size_t group, size_t threads) {
    return group % threads;
}

/* Parts that the members share: all of a brief step's, else one, since there are tiles enough. */
static size_t shared_parts(const struct attention *a) {
    size_t longest = 1;
    if (a->T > CPU_BRIEF) return 1;
    for (size_t t = 0; t < a->T; t++)
        if ((size_t)a->positions[t] + 1 > longest) longest = (size_t)a->positions[t] + 1;
    return (longest + CPU_PART - 1) / CPU_PART;
}

void cpu_attend(const struct attention *a, struct member me) {
    const size_t queries = a->T * (a->H / a->G), parts = shared_parts(a);
    const size_t tiles = (queries + CPU_QUERIES - 1) / CPU_QUERIES;
    for (size_t i = me.index; i < a->G * parts * tiles; i += me.count) {
        /* A brief step: the newest part of every group first. A long one: group by group, so that
         * their keys and values stay in the cache. */
        const bool brief = a->T <= CPU_BRIEF;
        const size_t group = brief ? i % a->G : i / tiles;
        const size_t tile = brief ? i / a->G % tiles : i % tiles;
        const size_t part = parts - 1 - i / a->G / tiles;
        const size_t first = tile * CPU_QUERIES, left = queries - first;
        const size_t end = first + (left < CPU_QUERIES ? left : CPU_QUERIES);
        for (size_t q = first, count; q < end; q += count) {
            count = tile_count(a, q, end);
            attend_tile(a, group, q, count, parts > 1 ? (int)part : -1);
        }
    }
    if (parts == 1) return;
    team_barrier(me); /* all parts are written | the merge reads them */
    for (size_t i = me.index; i < a->T * a->H; i += me.count) merge(a, i / a->H, i % a->H, parts);
}
