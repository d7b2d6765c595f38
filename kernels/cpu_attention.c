/* Causal attention with grouped heads, online softmax (arXiv 1805.02867).
 *
 * What      out[t, h] = softmax(scale q[t, h] . K) V over the positions 0 to positions[t] of the
 *           row's slot; head h reads the cache of head h G / H.
 * Tiles     the H/G heads of a group and consecutive rows share K and V: query i of a group is head
 *           i % (H/G) of row i / (H/G), and a tile is up to 6 queries in a row. Scores of a tile
 * come 16 positions at a time from the key panels [D][16], as they lie in the cache, in blocks of
 *           CPU_KEYS; then the maximum moves, exp, and V's rows are added up. 6 x 2 vectors of sums
 *           in both products.
 * Owners    a tile belongs to one thread. In a short step (T <= CPU_SPLITS/2) the positions are
 * split in parts that different threads take, and each part leaves (maximum, sum, weighted V) in
 *           `partial`; the parts are merged in ascending order.
 * Bound     4 T H S D FLOPs; for a decode step reading the cache, 8 S G D bytes.
 * Numerics  fp32. The parts depend on positions and T, not on the number of threads. Nothing past a
 *           row's own position reaches its result, be it NaN: scores are masked by selection, and
 * V's rows past the first query's position are added query by query. Needs     D a multiple of 8,
 * at most 512. Barrier   one in a short step: all parts written | read by the merge. */
#include "kernels/cpu_attention.h"

#include "kernels/config.h"
#include "kernels/cpu_block.h"
#include "kernels/cpu_threads.h"
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
    float top = tile->top[j];
    for (int i = 0; i < 8; i++) top = most[i] > top ? most[i] : top;

    const v8f shift = splat8(top > -INFINITY ? top : 0); /* -inf: nothing seen yet */
    v8f sum = {0};
    for (size_t k = 0; k < n; k += 8) {
        v8f weight = exp8(load8(score + k) - shift);
        sum += weight;
        store8(score + k, weight);
    }
    const float keep = expf(tile->top[j] - shift[0]);
    tile->sum[j] = tile->sum[j] * keep + sum8(sum);
    if (top > tile->top[j])
        for (size_t d = 0; d < D; d += 8)
            store8(tile->o + j * D + d, load8(tile->o + j * D + d) * keep);
    tile->top[j] = top;
}

/* Asks memory for 16 positions of keys or of values. */
static void ask_for(const float *cache, size_t D) {
    for (size_t i = 0; i < CPU_PANEL * D; i += CPU_LINE / sizeof *cache)
        __builtin_prefetch(cache + i, 0, 2);
}

/* Positions from..to of the cache; from is a multiple of 16. Where they come from memory (`asking`),
 * each panel of keys asks for what will be read a little later: the values of the same positions, and
 * the keys of the next block. */
static void attend_span(struct tile *tile, size_t from, size_t to, size_t D, bool asking) {
    float score[MAX_QUERIES][CPU_KEYS];
    for (size_t first = from; first < to; first += CPU_KEYS) {
        const size_t n = to - first < CPU_KEYS ? to - first : CPU_KEYS;
        const size_t whole = (n + CPU_PANEL - 1) / CPU_PANEL * CPU_PANEL;
        for (size_t k = 0; k < whole; k += CPU_PANEL) {
            const float *keys = tile->keys + (first + k) * D;
            if (asking) {
                ask_for(tile->values + (first + k) * D, D);
                ask_for(keys + CPU_KEYS * D, D);
            }
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

/* How many parts the positions of this step are split in. */
static size_t count_splits(const struct attention *a) {
    size_t longest = 1;
    for (size_t t = 0; t < a->T && a->T <= CPU_SPLITS / 2; t++)
        if ((size_t)a->positions[t] + 1 > longest) longest = (size_t)a->positions[t] + 1;
    const size_t parts = (longest + CPU_SPLIT_KEYS - 1) / CPU_SPLIT_KEYS, most = CPU_SPLITS / a->T;
    return parts < most || most < 1 ? parts : most;
}

/* Result of a query: straight to out, or as the part of a split. */
static void finish(const struct attention *a, const struct tile *tile, size_t j, size_t row,
                   size_t head, size_t split, size_t splits) {
    const size_t D = a->D;
    const float *o = tile->o + j * D;
    if (splits > 1) {
        float *part = a->partial + ((split * a->T + row) * a->H + head) * (D + 2);
        part[D] = tile->top[j];
        part[D + 1] = tile->sum[j];
        for (size_t d = 0; d < D; d += 8) store8(part + d, load8(o + d));
        return;
    }
    float *to = a->out + (row * a->H + head) * D;
    for (size_t d = 0; d < D; d += 8) store8(to + d, load8(o + d) / tile->sum[j]);
}

/* Queries first..first + count of a group, all in one slot and at consecutive positions. */
static void attend_tile(const struct attention *a, size_t group, size_t first, size_t count,
                        size_t split, size_t splits) {
    const size_t D = a->D, per_group = a->H / a->G, padded = (a->S + 15) / 16 * 16;
    const size_t cache = (size_t)a->slots[first / per_group] * a->G + group;
    float q[MAX_QUERIES * MAX_D], o[MAX_QUERIES * MAX_D];
    struct tile tile = {
        a->keys + cache * padded * D, a->values + cache * a->S * D, count, {0}, q, o, {0}, {0}};
    for (size_t j = 0; j < count; j++) {
        const size_t row = (first + j) / per_group, head = (first + j) % per_group;
        const float *from = a->q + row * a->q_stride + (group * per_group + head) * D;
        tile.length[j] = (size_t)a->positions[row] + 1;
        tile.top[j] = -INFINITY;
        for (size_t d = 0; d < D; d += 8) {
            store8(q + j * D + d, load8(from + d) * a->scale);
            store8(o + j * D + d, (v8f){0});
        }
    }
    const size_t length = tile.length[count - 1];
    size_t part = (length + splits - 1) / splits;
    if (part < CPU_SPLIT_KEYS) part = CPU_SPLIT_KEYS;
    part = splits > 1 ? (part + CPU_PANEL - 1) / CPU_PANEL * CPU_PANEL : length;
    const size_t from = split * part, to = from + part < length ? from + part : length;
    attend_span(&tile, from, to, D, a->T <= CPU_SPLITS / 2);
    for (size_t j = 0; j < count; j++)
        finish(a, &tile, j, (first + j) / per_group, group * per_group + (first + j) % per_group,
               split, splits);
}

/* The parts of one query, in ascending order. */
static void merge(const struct attention *a, size_t row, size_t head, size_t splits) {
    const size_t D = a->D, step = a->T * a->H * (D + 2);
    const float *parts = a->partial + (row * a->H + head) * (D + 2);
    float *out = a->out + (row * a->H + head) * D;
    float top = -INFINITY, sum = 0;
    for (size_t s = 0; s < splits; s++)
        if (parts[s * step + D] > top) top = parts[s * step + D];
    for (size_t d = 0; d < D; d += 8) store8(out + d, (v8f){0});
    for (size_t s = 0; s < splits; s++) {
        const float *part = parts + s * step, weight = expf(part[D] - top);
        sum += part[D + 1] * weight;
        for (size_t d = 0; d < D; d += 8)
            store8(out + d, load8(out + d) + load8(part + d) * weight);
    }
    for (size_t d = 0; d < D; d += 8) store8(out + d, load8(out + d) / sum);
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

void cpu_attend(const struct attention *a, struct member me) {
    const size_t queries = a->T * (a->H / a->G), splits = count_splits(a);
    const size_t tiles = (queries + CPU_QUERIES - 1) / CPU_QUERIES;
    for (size_t i = me.index; i < a->G * splits * tiles; i += me.count) {
        /* A short step: the newest part of every group first. A long one: group by group, so that
         * their keys and values stay in the cache. */
        const bool brief = a->T <= CPU_SPLITS / 2;
        const size_t group = brief ? i % a->G : i / tiles,
                     tile = brief ? i / a->G % tiles : i % tiles;
        const size_t split = brief ? splits - 1 - i / a->G / tiles : 0;
        const size_t first = tile * CPU_QUERIES, left = queries - first;
        const size_t end = first + (left < CPU_QUERIES ? left : CPU_QUERIES);
        for (size_t q = first, count; q < end; q += count) {
            count = tile_count(a, q, end);
            attend_tile(a, group, q, count, split, splits);
        }
    }
    if (splits == 1) return;
    barrier(); /* all parts are written | the merge reads them */
    for (size_t i = me.index; i < a->T * a->H; i += me.count) merge(a, i / a->H, i % a->H, splits);
}
