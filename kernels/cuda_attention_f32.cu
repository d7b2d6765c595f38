/* Attention of f32 models, for any rows: one token, many sequences, a prompt.
 *
 * What      out[t, h] = softmax(scale q[t, h] . K) V over the positions that row t sees of slot
 *           slots[t]; head h reads the cache of head h G / H. Scores may have a cap.
 *           q, out f32 [T, H, D]; keys, values f32 [slots, G, R, D].
 * Queries   a block has up to 16 queries of one group: heads of one row, or, in steps of more than
 *           CUDA_DECODE_ROWS rows, heads of a few. They share each tile of K and V if their rows
 *           are of one slot; rows of different slots follow one another.
 * Parts     in steps of few rows a row's positions are cut into parts, a block each, which leave
 *           (sum of V times weight, maximum, sum of weights) in `parts`; attention_f32_merge adds
 *           them up. How many parts follows from the step alone, where they end from the position.
 * Owners    a warp: 4 queries; a lane: one position of 32 in the scores, then up to 8 columns of
 *           the values, 4 neighbouring ones at a time.
 * Memory    queries [16, D], K [32, D + 4] (rows 4 banks apart, so that lanes do not conflict),
 *           V [32, D], weights [16, 32]: 83 KB at D = 256, 43 KB at D = 128, so that a few blocks
 *           hide each other's waits.
 * Bound     decode: 8 S G D bytes of the cache. Prefill: reading shared memory, at about half of
 *           what the multiply-adds could do: this is the precise form, not the fast one.
 * Numerics  f32; a score adds up its columns in ascending order, a column its positions. Nothing
 *           past the last position of a block's rows is read; K and V are zeros there. A query that
 *           has seen nothing has top -inf, sum 0 and o 0.
 * Needs     D a multiple of 4, at most 256; keys and values on 16 bytes. */
#include "kernels/cuda.cuh"
#include "kernels/cuda.h"

#include <math.h>

namespace {

enum {
    MOST_D = 256,
    QUERIES = 16, /* four a warp: each value read from shared memory serves four products */
    KEYS = 32,    /* positions of a tile: a lane each */
    WARPS = 4,
    THREADS = WARPS * 32,
    OWN = QUERIES / WARPS,
    QUARTERS = MOST_D / 128, /* float4 of a lane */
    BLOCKS = 3               /* of a multiprocessor: registers allow them, decode asks for them */
};
static_assert(CUDA_PART_POSITIONS % KEYS == 0, "a tile lies in one part");

/* The step, and how it is shared out. */
struct step {
    struct cuda_attention a;
    int rows;  /* of a block */
    int heads; /* of a row in a block */
    int parts; /* of a row's positions; more than one: rows is 1 */
};

/* What a warp has found for its queries; a lane has columns 4 lane + 128 c. */
struct found {
    int row[OWN], head[OWN]; /* row -1: no query */
    float top[OWN], sum[OWN];
    float4 o[OWN][QUARTERS];
};

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, distance));
    return x;
}

__device__ __forceinline__ void add_product(float4 &sum, float x, float4 y) {
    sum.x = fmaf(x, y.x, sum.x);
    sum.y = fmaf(x, y.y, sum.y);
    sum.z = fmaf(x, y.z, sum.z);
    sum.w = fmaf(x, y.w, sum.w);
}
__device__ __forceinline__ float4 times(float4 x, float y) {
    return make_float4(x.x * y, x.y * y, x.z * y, x.w * y);
}

/* Positions of a part. */
__device__ __forceinline__ int part_length(int length, int parts) {
    const int least = (length + parts - 1) / parts;
    return (least + CUDA_PART_POSITIONS - 1) / CUDA_PART_POSITIONS * CUDA_PART_POSITIONS;
}

__device__ __forceinline__ float *stored_part(const struct cuda_attention &a, int row, int part,
                                              int head) {
    return a.parts + (((size_t)row * CUDA_PARTS + part) * a.H + head) * (a.D + 2);
}

/* The warp's queries into shared memory, times scale; zeros where there is none. */
__device__ __forceinline__ void open_queries(const step &s, struct found &found, float *q,
                                             int first_row, int last_row, int first_head,
                                             int head_end) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, D = s.a.D;
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        const int j = warp * OWN + i;
        const int row = first_row + j / s.heads, head = first_head + j % s.heads;
        const bool some = row < last_row && head < head_end;
        found.row[i] = some ? row : -1;
        found.head[i] = head;
        found.top[i] = -INFINITY;
        found.sum[i] = 0;
        for (int c = 0; c < QUARTERS; c++) found.o[i][c] = make_float4(0, 0, 0, 0);
        const float *from = (const float *)s.a.q + ((size_t)row * s.a.H + head) * D;
        for (int d = lane; d < D; d += 32) q[j * D + d] = some ? from[d] * s.a.scale : 0;
    }
    __syncwarp(); /* q of the warp is written | its lanes read it */
}

/* KEYS rows of the cache, zeros before row `hidden` and from row `valid` on. */
__device__ __forceinline__ void copy_tile(float *to, int stride, const float *from, int D,
                                          int hidden, int valid) {
    for (int row = threadIdx.x / 32; row < KEYS; row += WARPS)
        for (int d = threadIdx.x % 32 * 4; d < D; d += 128)
            copy_async_16(shared_address(to + row * stride + d), from + (size_t)row * D + d,
                          row >= hidden && row < valid);
}

/* The lane's position against the warp's queries. */
__device__ __forceinline__ void score(float s[OWN], const float *q, const float *key, int D) {
#pragma unroll
    for (int i = 0; i < OWN; i++) s[i] = 0;
#pragma unroll 4
    for (int d = 0; d < D; d += 4) {
        const float4 k = *(const float4 *)(key + d);
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            const float4 x = *(const float4 *)(q + i * D + d);
            s[i] = fmaf(x.x, k.x, s[i]);
            s[i] = fmaf(x.y, k.y, s[i]);
            s[i] = fmaf(x.z, k.z, s[i]);
            s[i] = fmaf(x.w, k.w, s[i]);
        }
    }
}

/* Scores become weights, in shared memory. Of the tile a query sees positions hidden to seen - 1; one that
 * sees none keeps what it has. */
__device__ __forceinline__ void weigh(struct found &found, const float s[OWN],
                                      const int hidden[OWN], const int seen[OWN], float *weight) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        const float own = lane >= hidden[i] && lane < seen[i] ? s[i] : -INFINITY;
        const float top = fmaxf(found.top[i], warp_max(own));
        const float shift = top > -INFINITY ? top : 0; /* -inf: nothing seen yet */
        const float keep = expf(found.top[i] - shift), w = expf(own - shift);
        found.sum[i] = fmaf(found.sum[i], keep, warp_sum(w));
        found.top[i] = top;
#pragma unroll
        for (int c = 0; c < QUARTERS; c++) found.o[i][c] = times(found.o[i][c], keep);
        weight[i * KEYS + lane] = w;
    }
    __syncwarp(); /* weights of the warp are written | its lanes read them */
}

__device__ __forceinline__ void add_values(struct found &found, const float *weight,
                                           const float *values, int D) {
    const int column = threadIdx.x % 32 * 4;
#pragma unroll 2
    for (int key = 0; key < KEYS; key += 4) {
        float4 w[OWN];
#pragma unroll
        for (int i = 0; i < OWN; i++) w[i] = *(const float4 *)(weight + i * KEYS + key);
#pragma unroll
        for (int c = 0; c < QUARTERS; c++) {
            if (column + c * 128 >= D) continue;
            const float *from = values + key * D + column + c * 128;
            const float4 v[4] = {*(const float4 *)from, *(const float4 *)(from + D),
                                 *(const float4 *)(from + 2 * D), *(const float4 *)(from + 3 * D)};
#pragma unroll
            for (int i = 0; i < OWN; i++) {
                add_product(found.o[i][c], w[i].x, v[0]);
                add_product(found.o[i][c], w[i].y, v[1]);
                add_product(found.o[i][c], w[i].z, v[2]);
                add_product(found.o[i][c], w[i].w, v[3]);
            }
        }
    }
}

__device__ __forceinline__ void write_found(const step &s, const struct found &found, int part) {
    const int lane = threadIdx.x % 32, D = s.a.D;
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        if (found.row[i] < 0) continue;
        const bool whole = s.parts == 1;
        float *to = whole ? (float *)s.a.out + ((size_t)found.row[i] * s.a.H + found.head[i]) * D
                          : stored_part(s.a, found.row[i], part, found.head[i]);
        const float share = whole ? 1 / found.sum[i] : 1;
#pragma unroll
        for (int c = 0; c < QUARTERS; c++) {
            const int column = lane * 4 + c * 128;
            if (column >= D) continue;
            const float4 o = times(found.o[i][c], share);
            to[column] = o.x; /* one by one: a part of D + 2 floats lies on 8 bytes */
            to[column + 1] = o.y;
            to[column + 2] = o.z;
            to[column + 3] = o.w;
        }
        if (!whole && lane == 0) {
            to[D] = found.top[i];
            to[D + 1] = found.sum[i];
        }
    }
}

/* See the top of the file. Block x: part x % parts of the rows, from the last rows to the first;
 * block y: the group, and which 16 of its heads. */
__global__ void __launch_bounds__(THREADS, BLOCKS) attention_f32(const step s) {
    extern __shared__ __align__(16) float shared[];
    const struct cuda_attention &a = s.a;
    const int D = a.D, per_group = a.H / a.G, portions = (per_group + s.heads - 1) / s.heads;
    float *q = shared, *k = q + QUERIES * D, *v = k + KEYS * (D + 4), *weights = v + KEYS * D;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int part = blockIdx.x % s.parts, group = blockIdx.y / portions;
    const int first_row = (gridDim.x - 1 - blockIdx.x) / s.parts * s.rows;
    const int last_row = min(first_row + s.rows, a.T);
    start_dependents();
    wait_for_inputs();

    struct found found;
    const float *own_q = q + warp * OWN * D;
    float *own_weights = weights + warp * OWN * KEYS;
    open_queries(s, found, q, first_row, last_row,
                 group * per_group + blockIdx.y % portions * s.heads, (group + 1) * per_group);

    for (int row = first_row, next; row < last_row; row = next) {
        /* Rows row to next - 1 are of one slot; they see positions begin to end - 1. */
        const int slot = a.slots[row];
        int begin = ALL_POSITIONS, end = 0, length[OWN], longest = 0;
        for (next = row; next < last_row && a.slots[next] == slot; next++) {
            begin = min(begin, first_seen(a, a.positions[next]));
            end = max(end, a.positions[next] + 1);
        }
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            const bool here = found.row[i] >= row && found.row[i] < next;
            length[i] = here ? a.positions[found.row[i]] + 1 : 0;
            longest = max(longest, length[i]);
        }
        const size_t cache = ((size_t)slot * a.G + group) * a.R * D;
        const int first_tile = begin / KEYS * KEYS;
        const int part_size = part_length(end - first_tile, s.parts);
        const int from = first_tile + part * part_size;
        if (from >= end) return; /* no such part: nobody will read it */
        const int to = min(from + part_size, end);

        for (int position = from; position < to; position += KEYS) {
            const size_t tile = cache + (size_t)(position % a.R) * D;
            __syncthreads(); /* every warp has read the tile before | the copies overwrite it */
            copy_tile(k, D + 4, (const float *)a.keys + tile, D, begin - position, to - position);
            copy_tile(v, D, (const float *)a.values + tile, D, begin - position, to - position);
            copy_async_commit();
            copy_async_wait<0>();
            __syncthreads(); /* the tile is written | every warp reads it */
            if (position >= longest) continue;
            float scores[OWN];
            int hidden[OWN], seen[OWN];
            score(scores, own_q, k + lane * (D + 4), D);
#pragma unroll
            for (int i = 0; i < OWN; i++) {
                hidden[i] = first_seen(a, length[i] - 1) - position;
                seen[i] = length[i] - position;
                if (a.cap > 0) scores[i] = a.cap * tanhf(scores[i] / a.cap);
            }
            weigh(found, scores, hidden, seen, own_weights);
            add_values(found, own_weights, v, D);
        }
    }
    write_found(s, found, part);
}

/* What      out[t, h] = the parts of a row, brought to one maximum, in ascending order.
 * Owners    block t H + h the query, a thread its columns. */
__global__ void __launch_bounds__(THREADS) attention_f32_merge(const step s) {
    const struct cuda_attention &a = s.a;
    const int row = blockIdx.x / a.H, head = blockIdx.x % a.H, D = a.D;
    const size_t stride = (size_t)a.H * (D + 2); /* from part to part */
    start_dependents();
    wait_for_inputs();

    const int seen = a.positions[row] + 1 - first_seen(a, a.positions[row]) / KEYS * KEYS;
    const int size = part_length(seen, s.parts), parts = (seen + size - 1) / size;
    const float *first = stored_part(a, row, 0, head);
    float top = -INFINITY, sum = 0;
    for (int p = 0; p < parts; p++) top = fmaxf(top, first[p * stride + D]);
    for (int p = 0; p < parts; p++)
        sum = fmaf(first[p * stride + D + 1], expf(first[p * stride + D] - top), sum);
    for (int d = threadIdx.x; d < D; d += THREADS) {
        float o = 0;
        for (int p = 0; p < parts; p++)
            o = fmaf(first[p * stride + d], expf(first[p * stride + D] - top), o);
        ((float *)a.out)[((size_t)row * a.H + head) * D + d] = o / sum;
    }
}

} // namespace

void cuda_attention_f32(struct cuda_backend *b, const struct cuda_attention *a) {
    if (a->D % 4 || a->D > MOST_D) {
        cuda_failed(b, "cuda_attention_f32: head size", cudaErrorInvalidValue);
        return;
    }
    const int per_group = a->H / a->G, heads = per_group < QUERIES ? per_group : QUERIES;
    const int portions = (per_group + heads - 1) / heads, blocks = a->T * a->G * portions;
    struct step s = {*a, QUERIES / heads, heads, 1};
    if (a->T <= CUDA_DECODE_ROWS) {
        const int wanted = BLOCKS * b->multiprocessors / blocks;
        const int most = (a->R + CUDA_PART_POSITIONS - 1) / CUDA_PART_POSITIONS;
        s.rows = 1;
        s.parts = wanted < most ? wanted : most;
        if (s.parts > CUDA_PARTS) s.parts = CUDA_PARTS;
        if (s.parts < 1) s.parts = 1;
    }
    const int tiles = (a->T + s.rows - 1) / s.rows;
    const size_t shared =
        ((size_t)QUERIES * a->D + KEYS * (a->D + 4) + KEYS * a->D + QUERIES * KEYS) * sizeof(float);
    cuda_launch(b, "attention_f32", attention_f32,
                dim3((unsigned)(tiles * s.parts), (unsigned)(a->G * portions)), THREADS, shared, s);
    if (s.parts > 1)
        cuda_launch(b, "attention_f32_merge", attention_f32_merge, dim3((unsigned)(a->T * a->H)),
                    THREADS, 0, s);
}
