/* Causal attention with grouped heads, online softmax (arXiv 1805.02867).
 *
 * What      out[t, h] = softmax(scale q[t, h] . K) V over the positions 0 to positions[t] of the
 *           row's slot, or the last `window` of them; head h reads the cache of head h G / H.
 * Tiles     the H/G heads of a group and the rows of a slot share K and V: query i of a group is head
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
 *           number of threads. Nothing past a row's own position or before its window reaches it, be
 *           it NaN: scores are masked by selection, and V's rows that not all queries of a tile see
 *           are added for those that do.
 * Needs     D a multiple of 8, at most 512.
 * Barrier   one in a brief step: all parts written | read by the merge. */
#include "kernels/cpu_attention.h"

#include "kernels/config.h"
#include "kernels/cpu_block.h"
#include "kernels/simd.h"

#include <math.h>

enum { MAX_D = 512, MAX_QUERIES = CPU_QUERIES };

/* Queries of one slot at ascending positions, the cache that they read, and what they have found. */
struct tile {
    const float *keys, *values;
    float cap;
    size_t count, row[MAX_QUERIES], head[MAX_QUERIES];
    size_t start[MAX_QUERIES];    /* positions that a query sees: from here, ascending */
    size_t length[MAX_QUERIES];   /* to here: ascending */
    float q[MAX_QUERIES * MAX_D]; /* [count][D], times scale */
    float o[MAX_QUERIES * MAX_D]; /* [count][D], the sum of V exp(score - top) so far */
    float top[MAX_QUERIES];       /* the largest score so far */
    float sum[MAX_QUERIES];       /* of exp(score - top) so far */
};

/* ---- one tile ---- */

/* The scores of one query in a block of n positions become exp(score - top): what the query does not see
 * becomes 0, the maximum moves, and what was summed up is scaled to it. */
static void soften(struct tile *tile, size_t j, float *score, size_t first, size_t n, size_t D) {
    const size_t seen = tile->length[j] <= first ? 0 : tile->length[j] - first;
    const size_t unseen = tile->start[j] <= first ? 0 : tile->start[j] - first;
    for (size_t k = seen; k < n; k++) score[k] = -INFINITY;
    for (size_t k = 0; k < unseen && k < n; k++) score[k] = -INFINITY;
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

/* Adds V's rows from..to of a block that begins at `first`, weighted, one by one for those who see them. */
static void add_each(struct tile *tile, float (*score)[CPU_KEYS], size_t first, size_t from,
                     size_t to, size_t D) {
    for (size_t k = from; k < to; k++) {
        size_t j = 0, end = tile->count;
        while (j < end && tile->length[j] <= k) j++;
        while (end > j && tile->start[end - 1] > k) end--;
        if (end > j)
            block_product(score[j] + (k - first), CPU_KEYS, tile->values + k * D, D,
                          tile->o + j * D, D, end - j, D, 1, true);
    }
}

/* The same for a whole block. All queries see the positions from `common` to `after`. */
static void add_values(struct tile *tile, float (*score)[CPU_KEYS], size_t first, size_t end,
                       size_t D) {
    const size_t latest = tile->start[tile->count - 1], least = tile->length[0];
    const size_t common = latest < first ? first : latest < end ? latest : end;
    const size_t after = least < common ? common : least < end ? least : end;
    add_each(tile, score, first, first, common, D);
    block_product(score[0] + (common - first), CPU_KEYS, tile->values + common * D, D, tile->o, D,
                  tile->count, D, after - common, true);
    add_each(tile, score, first, after, end, D);
}

/* Positions from..to of the cache; from is a multiple of CPU_KEYS. Where they come from memory (`asking`)
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
        for (size_t j = 0; j < tile->count; j++) {
            for (size_t k = 0; tile->cap > 0 && k < whole; k++)
                score[j][k] = tile->cap * tanhf(score[j][k] / tile->cap);
            soften(tile, j, score[j], first, whole, D);
        }
        add_values(tile, score, first, first + n, D);
    }
}

/* The first position that a row sees. */
static size_t start_of(const struct attention *a, size_t row) {
    const size_t length = (size_t)a->positions[row] + 1;
    return a->window && length > a->window ? length - a->window : 0;
}

/* Queries first..first + count of a group, all in one slot and at ascending positions. */
static void open_tile(const struct attention *a, struct tile *tile, size_t group, size_t first,
                      size_t count) {
    const size_t D = a->D, per_group = a->H / a->G, padded = (a->S + 15) / 16 * 16;
    const size_t cache = (size_t)a->slots[first / per_group] * a->G + group;
    tile->keys = a->keys + cache * padded * D;
    tile->values = a->values + cache * a->S * D;
    tile->cap = a->cap;
    tile->count = count;
    for (size_t j = 0; j < count; j++) {
        tile->row[j] = (first + j) / per_group;
        tile->head[j] = group * per_group + (first + j) % per_group;
        tile->length[j] = (size_t)a->positions[tile->row[j]] + 1;
        tile->start[j] = start_of(a, tile->row[j]);
        const float *from = a->q + tile->row[j] * a->q_stride + tile->head[j] * D;
        for (size_t d = 0; d < D; d += 8) store8(tile->q + j * D + d, load8(from + d) * a->scale);
    }
}

/* One part of the cache: what the tile's queries find in it alone, without the blocks that none of them
 * sees. */
static void attend_part(const struct attention *a, struct tile *tile, size_t part) {
    const size_t D = a->D, length = tile->length[tile->count - 1], begin = part * CPU_PART;
    const size_t end = begin + CPU_PART < length ? begin + CPU_PART : length;
    const size_t seen = tile->start[0] / CPU_KEYS * CPU_KEYS, from = begin < seen ? seen : begin;
    for (size_t j = 0; j < tile->count; j++) {
        tile->top[j] = -INFINITY;
        tile->sum[j] = 0;
        for (size_t d = 0; d < D; d += 8) store8(tile->o + j * D + d, (v8f){0});
    }
    attend_span(tile, from, end, D, a->T <= CPU_BRIEF);
}

/* What a query has found in some parts. */
struct found {
    float top, sum, o[MAX_D];
};

static void find_nothing(struct found *found, size_t D) {
    found->top = -INFINITY;
    found->sum = 0;
    for (size_t d = 0; d < D; d += 8) store8(found->o + d, (v8f){0});
}

/* Adds a part to those before it, if the query sees any of it. */
static void add_part(struct found *found, const float *o, float top, float sum, size_t D) {
    if (top == -INFINITY && sum == 0) return;
    const float both = top > found->top ? top : found->top;
    const float keep = expf(found->top - both), weight = expf(top - both);
    for (size_t d = 0; d < D; d += 8)
        store8(found->o + d, load8(found->o + d) * keep + load8(o + d) * weight);
    found->sum = found->sum * keep + sum * weight;
    found->top = both;
}

static void write_result(const struct attention *a, size_t row, size_t head,
                         const struct found *found) {
    float *to = a->out + (row * a->H + head) * a->D;
    for (size_t d = 0; d < a->D; d += 8) store8(to + d, load8(found->o + d) / found->sum);
}

/* A tile in a long step: all parts one after the other, and the result. */
static void attend_tile(const struct attention *a, struct tile *tile) {
    const size_t D = a->D, count = tile->count;
    const size_t parts = (tile->length[count - 1] + CPU_PART - 1) / CPU_PART;
    struct found found[MAX_QUERIES];
    for (size_t j = 0; j < count; j++) find_nothing(&found[j], D);
    for (size_t p = tile->start[0] / CPU_PART; p < parts; p++) {
        attend_part(a, tile, p);
        for (size_t j = 0; j < count; j++)
            add_part(&found[j], tile->o + j * D, tile->top[j], tile->sum[j], D);
    }
    for (size_t j = 0; j < count; j++) write_result(a, tile->row[j], tile->head[j], &found[j]);
}

/* Where a brief step keeps what a query has found in one part: o [D], top, sum. */
static float *stored_part(const struct attention *a, size_t part, size_t row, size_t head) {
    return a->partial + ((part * a->T + row) * a->H + head) * (a->D + 2);
}

/* A tile in a brief step: one part, stored. */
static void store_part(const struct attention *a, struct tile *tile, size_t part) {
    attend_part(a, tile, part);
    for (size_t j = 0; j < tile->count; j++) {
        float *to = stored_part(a, part, tile->row[j], tile->head[j]);
        for (size_t d = 0; d < a->D; d += 8) store8(to + d, load8(tile->o + j * a->D + d));
        to[a->D] = tile->top[j];
        to[a->D + 1] = tile->sum[j];
    }
}

/* The stored parts of one query, and the result. */
static void merge_parts(const struct attention *a, size_t row, size_t head, size_t first,
                        size_t parts) {
    struct found found;
    find_nothing(&found, a->D);
    for (size_t p = first; p < parts; p++) {
        const float *part = stored_part(a, p, row, head);
        add_part(&found, part, part[a->D], part[a->D + 1], a->D);
    }
    write_result(a, row, head, &found);
}

/* ---- sharing the work ---- */

/* How many queries of a group, from `first` on, are in one slot and at ascending positions. */
static size_t tile_count(const struct attention *a, size_t first, size_t end) {
    const size_t per_group = a->H / a->G;
    size_t count = 1;
    for (; first + count < end; count++) {
        const size_t row = (first + count) / per_group, before = (first + count - 1) / per_group;
        if (a->slots[row] != a->slots[before] || a->positions[row] < a->positions[before]) break;
    }
    return count;
}

size_t attention_owner(size_t group, size_t threads) {
    return group % threads;
}

/* Parts *first to *end hold what the rows of the step see. */
static void find_parts(const struct attention *a, size_t *first, size_t *end) {
    size_t longest = 1, start = SIZE_MAX;
    for (size_t t = 0; t < a->T; t++) {
        if ((size_t)a->positions[t] + 1 > longest) longest = (size_t)a->positions[t] + 1;
        if (start_of(a, t) < start) start = start_of(a, t);
    }
    *first = start / CPU_PART;
    *end = (longest + CPU_PART - 1) / CPU_PART;
}

/* The tiles in queries first..end of a group: whole, or one part of them. */
static void attend_queries(const struct attention *a, size_t group, size_t first, size_t end,
                           size_t part, bool whole) {
    struct tile tile;
    for (size_t q = first; q < end; q += tile.count) {
        open_tile(a, &tile, group, q, tile_count(a, q, end));
        if (whole)
            attend_tile(a, &tile);
        else
            store_part(a, &tile, part);
    }
}

/* A long step goes group by group, so that their keys and values stay in the cache. A brief one
 * starts with the newest part of every group, which its owner has just appended to. */
void cpu_attend(const struct attention *a, struct member me) {
    const bool brief = a->T <= CPU_BRIEF;
    size_t oldest = 0, newest = 1;
    if (brief) find_parts(a, &oldest, &newest);
    const size_t queries = a->T * (a->H / a->G), parts = newest - oldest;
    const size_t tiles = (queries + CPU_QUERIES - 1) / CPU_QUERIES;
    for (size_t i = me.index; i < a->G * tiles * parts; i += me.count) {
        const size_t group = brief ? i % a->G : i / tiles;
        const size_t first = (brief ? i / a->G % tiles : i % tiles) * CPU_QUERIES;
        const size_t end = queries - first < CPU_QUERIES ? queries : first + CPU_QUERIES;
        attend_queries(a, group, first, end, newest - 1 - i / (a->G * tiles), parts == 1);
    }
    if (parts == 1) return;
    team_barrier(me); /* all parts are written | the merge reads them */
    for (size_t i = me.index; i < a->T * a->H; i += me.count)
        merge_parts(a, i / a->H, i % a->H, oldest, newest);
}
