/* What is done to rows outside of products and attention: the embedding, a norm's first half before a
 * product, bias and norm after it, activations that no product has, the cap on logits. */
#include "kernels/cuda.cuh"
#include "kernels/cuda_backend.h"

namespace {

enum { ROW_THREADS = 256 };

/* The sum over the block in a fixed order.
 * Barrier   partial[] is written by each warp | all read it. */
__device__ __forceinline__ float block_sum(float x, float partial[ROW_THREADS / 32]) {
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = x;
    __syncthreads();
    float sum = 0;
    for (int i = 0; i < ROW_THREADS / 32; i++) sum += partial[i];
    return sum;
}

__device__ __forceinline__ float squares_of(float4 v) {
    return v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
}

/* in = x gamma, rounded, of four columns of a row. */
template <class M> __device__ __forceinline__ void scale_four(M *in, float4 v, const float *gamma) {
    const float4 g = gamma ? load_four(gamma) : make_float4(1, 1, 1, 1);
    store_four(in, make_float4(v.x * g.x, v.y * g.y, v.z * g.z, v.w * g.w));
}

/* Of four columns from c on of the row that begins at element `row`: what the next product reads. */
template <class M>
__device__ __forceinline__ void prepare(const prepared &next, size_t row, int c, float4 v) {
    if (next.in) scale_four((M *)next.in + row + c, v, next.gamma ? next.gamma + c : NULL);
}

/* ---- embed ---- */

struct embedding {
    const int32_t *tokens, *positions; /* [T] */
    const void *table;                 /* m [V, C] */
    const void *learned;               /* m [positions, C]; NULL: none */
    float *x;                          /* f32 [T, C] */
    prepared next;
    const float *frequencies; /* f32 [rope_tables, half] */
    float *rope;              /* f32 [rope_tables, chunk, 2, half] */
    int C, rope_tables, half, chunk;
    float embed_scale, rope_scale;
};

/* What      x[t] = table[token] embed_scale + learned[position]; rope[.., t] = cosines and sines of the
 *           position's angles; and what `prepared` says.
 * Owners    block t the row t.
 * Bound     latency: a few KB a row.
 * Numerics  f32; the angle is the f32 product of position and frequency, as on the CPU.
 * Order     the first kernel of a step: it waits before it lets the next one start. So all later kernels
 *           of the step may read tokens, slots, positions and older rows of the cache before their own
 *           wait: whatever wrote those had ended before they began. */
template <class M> __global__ void __launch_bounds__(ROW_THREADS) embed_kernel(embedding p) {
    __shared__ float partial[ROW_THREADS / 32];
    wait_for_inputs();
    start_dependents();
    const size_t t = blockIdx.x, C = (size_t)p.C;
    const M *from = (const M *)p.table + (size_t)p.tokens[t] * C;
    float squares = 0;
    for (int c = threadIdx.x * 4; c < p.C; c += ROW_THREADS * 4) {
        const float4 v = load_four(from + c);
        const float s = p.embed_scale;
        float4 x = make_float4(v.x * s, v.y * s, v.z * s, v.w * s);
        if (p.learned) {
            const float4 l = load_four((const M *)p.learned + p.positions[t] * C + c);
            x.x += l.x, x.y += l.y, x.z += l.z, x.w += l.w;
        }
        store_four(p.x + t * C + c, x);
        squares += squares_of(x);
        prepare<M>(p.next, t * C, c, x);
    }
    const float position = (float)p.positions[t];
    for (int i = threadIdx.x; i < p.rope_tables * p.half; i += ROW_THREADS) {
        const int table = i / p.half, j = i % p.half;
        float *turn = p.rope + ((size_t)table * p.chunk + t) * 2 * p.half + j;
        const float angle = position * p.frequencies[i];
        turn[0] = cosf(angle) * p.rope_scale;
        turn[p.half] = sinf(angle) * p.rope_scale;
    }
    if (!p.next.squares) return;
    squares = block_sum(squares, partial);
    if (threadIdx.x == 0) p.next.squares[t] = squares;
}

/* ---- norms ---- */

/* What a norm takes from a row, and what it then multiplies it by: of RMSNorm (arXiv 1910.07467) 0 and 1 /
 * sqrt(mean(x^2) + eps), of LayerNorm (arXiv 1607.06450) the mean and the same of x - mean. */
struct moments {
    float mean, scale;
};

/* Of the row whose columns c to c + 3 are four(c); by the whole block. Each thread sums its columns in
 * ascending order, then the warp, then the warps. */
template <class F>
__device__ __forceinline__ moments moments_of(F four, int C, float eps, bool centred,
                                              float (&partial)[2][ROW_THREADS / 32]) {
    moments m = {0, 0};
    float sum = 0, squares = 0;
    for (int c = (int)threadIdx.x * 4; centred && c < C; c += ROW_THREADS * 4) {
        const float4 v = four(c);
        sum += v.x + v.y + v.z + v.w;
    }
    if (centred) m.mean = block_sum(sum, partial[0]) / (float)C;
    for (int c = (int)threadIdx.x * 4; c < C; c += ROW_THREADS * 4) {
        const float4 v = four(c);
        squares += squares_of(make_float4(v.x - m.mean, v.y - m.mean, v.z - m.mean, v.w - m.mean));
    }
    m.scale = rsqrtf(block_sum(squares, partial[1]) / (float)C + eps);
    return m;
}

/* (v - mean) scale gamma + bias of four columns; norm: its weights of the first one. */
__device__ __forceinline__ float4 normalised(float4 v, const moments &m, const norm_weights &norm) {
    const float4 g = load_four(norm.gamma);
    const float4 b = norm.bias ? load_four(norm.bias) : make_float4(0, 0, 0, 0);
    return make_float4((v.x - m.mean) * m.scale * g.x + b.x, (v.y - m.mean) * m.scale * g.y + b.y,
                       (v.z - m.mean) * m.scale * g.z + b.z, (v.w - m.mean) * m.scale * g.w + b.w);
}
__device__ __forceinline__ norm_weights columns_of(const norm_weights &norm, int c) {
    return {norm.gamma + c, norm.bias ? norm.bias + c : NULL};
}

/* What      in[t] = x[t] gamma, rounded to m; scale[t] = 1 / sqrt(mean(x[t]^2) + eps): RMSNorm in two halves,
 *           as the product that follows multiplies its sums by scale. gamma NULL: in = x. With a bias in
 *           is the LayerNorm of x, and there is no scale.
 * Shapes    x f32 [T, C], gamma and bias f32 [C], in m [T, C], scale f32 [T]; C a multiple of 8.
 * Owners    block t the row t, a thread four neighbouring columns at a time.
 * Bound     bytes: 4 C + 2 C a row.
 * Numerics  f32. */
template <class M>
__global__ void __launch_bounds__(ROW_THREADS)
    norm_kernel(const float *x, const norm_weights norm, M *in, float *scale, int C, float eps) {
    __shared__ float partial[2][ROW_THREADS / 32];
    start_dependents();
    wait_for_inputs();
    const size_t row = (size_t)blockIdx.x * C;
    const moments m = moments_of([&](int c) { return load_four(x + row + c); }, C, eps,
                                 norm.bias != NULL, partial);
    for (int c = (int)threadIdx.x * 4; c < C; c += ROW_THREADS * 4) {
        const float4 v = load_four(x + row + c);
        if (norm.bias)
            store_four(in + row + c, normalised(v, m, columns_of(norm, c)));
        else
            scale_four(in + row + c, v, norm.gamma ? norm.gamma + c : NULL);
    }
    if (threadIdx.x == 0 && !norm.bias) scale[blockIdx.x] = m.scale;
}

/* ---- what follows a product before x takes it ---- */

/* What      x[t] = from[t] + norm(y[t] + bias); and what `prepared` says.
 * Shapes    x, from (which may be x), y f32 [T, C], bias f32 [C] or NULL, norm.gamma f32 [C] or NULL: none;
 *           C a multiple of 8.
 * Owners    block t the row t, a thread four neighbouring columns at a time.
 * Bound     bytes: 16 C + 2 C a row.
 * Numerics  f32; sums as moments_of's. */
template <class M>
__global__ void __launch_bounds__(ROW_THREADS)
    add_kernel(float *x, const float *from, const float *y, const float *bias,
               const norm_weights norm, int C, float eps, const prepared next) {
    __shared__ float partial[2][ROW_THREADS / 32], of_x[ROW_THREADS / 32];
    start_dependents();
    wait_for_inputs();
    const size_t t = blockIdx.x, row = t * C;
    const auto product = [&](int c) {
        const float4 v = load_four(y + row + c);
        if (!bias) return v;
        const float4 b = load_four(bias + c);
        return make_float4(v.x + b.x, v.y + b.y, v.z + b.z, v.w + b.w);
    };
    moments m = {0, 0};
    if (norm.gamma) m = moments_of(product, C, eps, norm.bias != NULL, partial);
    float squares = 0;
    for (int c = (int)threadIdx.x * 4; c < C; c += ROW_THREADS * 4) {
        float4 u = product(c), v = load_four(from + row + c);
        if (norm.gamma) u = normalised(u, m, columns_of(norm, c));
        v.x += u.x, v.y += u.y, v.z += u.z, v.w += u.w;
        store_four(x + row + c, v);
        squares += squares_of(v);
        prepare<M>(next, row, c, v);
    }
    if (!next.in) return;
    squares = block_sum(squares, of_x);
    if (threadIdx.x == 0) next.squares[t] = squares;
}

/* What      h[t] = act(y[t] + bias), or where it is gated act(gate + its bias) (up + its bias), gate and up
 *           the halves of y[t].
 * Shapes    y f32 [T, F] or [T, 2F], bias as a row of y or NULL, h m [T, F]; F a multiple of 8.
 * Owners    block (t, i) four columns a thread of row t.
 * Bound     bytes: 6 or 10 a column. */
template <class M>
__global__ void __launch_bounds__(ROW_THREADS)
    activate_kernel(const float *y, const float *bias, M *h, int F, bool gated,
                    enum activation kind) {
    start_dependents();
    wait_for_inputs();
    const int f = ((int)blockIdx.y * ROW_THREADS + (int)threadIdx.x) * 4;
    if (f >= F) return;
    alignas(16) float gate[4], up[4] = {1, 1, 1, 1}, of_gate[4] = {}, of_up[4] = {};
    y += (size_t)blockIdx.x * F * (gated ? 2 : 1) + f;
    store_four(gate, load_four(y));
    if (gated) store_four(up, load_four(y + F));
    if (bias) store_four(of_gate, load_four(bias + f));
    if (bias && gated) store_four(of_up, load_four(bias + F + f));
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float x = gate[i] + of_gate[i];
        /* GELU as it is defined, or as activate() has it. */
        const float exact = 0.5f * x * (1.0f + erff(x * 0.70710678f));
        gate[i] = (kind == GELU ? exact : activate(x, kind == GELU_TANH)) * (up[i] + of_up[i]);
    }
    store_four(h + (size_t)blockIdx.x * F + f, load_four(gate));
}

/* ---- caps ---- */

/* What      logits = cap tanh(logits / cap), f32 [rows, stride], columns below `count`.
 * Owners    a thread a logit.
 * Bound     bytes: 8 a logit. */
__global__ void __launch_bounds__(ROW_THREADS)
    cap_kernel(float *logits, int count, int stride, float cap) {
    start_dependents();
    wait_for_inputs();
    const int i = (int)blockIdx.y * ROW_THREADS + (int)threadIdx.x;
    float *at = logits + (size_t)blockIdx.x * stride + i;
    if (i < count) *at = cap * tanhf(*at / cap);
}

} // namespace

bool cuda_has_code() {
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, embed_kernel<bf16>) == cudaSuccess;
}

/* ---- launchers ---- */

void cuda_embed_rows(struct engine *e, struct rows rows, const struct prepared *next) {
    const struct config *c = e->config;
    struct embedding p = {};
    p.tokens = cuda_row_numbers(e, 0);
    p.positions = cuda_row_numbers(e, 2);
    p.table = e->embed;
    p.learned = e->positions;
    p.x = (float *)engine_region(e, REGION_X);
    p.next = *next;
    p.frequencies = e->rope;
    p.rope = (float *)engine_region(e, REGION_ROPE);
    p.C = c->width;
    p.rope_tables = c->rope_tables;
    p.half = c->rotary_dims / 2;
    p.chunk = e->plan.limits.chunk;
    p.embed_scale = c->embed_scale;
    p.rope_scale = c->rope_scale;
    cuda_launch(backend_of(e), "embed",
                c->weight_dtype == F32 ? embed_kernel<float> : embed_kernel<bf16>,
                dim3((unsigned)rows.count), ROW_THREADS, 0, p);
}

void cuda_norm(struct engine *e, struct norm_weights norm, int first, int count) {
    const int C = e->config->width;
    const float *x = (const float *)engine_region(e, REGION_X) + (size_t)first * (size_t)C;
    float *scale = (float *)engine_region(e, REGION_SCALES);
    void *in = engine_region(e, REGION_PANELS);
    const dim3 grid((unsigned)count);
    if (e->config->weight_dtype == F32)
        cuda_launch(backend_of(e), "norm", norm_kernel<float>, grid, ROW_THREADS, 0, x, norm,
                    (float *)in, scale, C, e->config->norm_eps);
    else
        cuda_launch(backend_of(e), "norm", norm_kernel<bf16>, grid, ROW_THREADS, 0, x, norm,
                    (bf16 *)in, scale, C, e->config->norm_eps);
}

void cuda_add(struct engine *e, int rows, const float *from, const float *y, struct after after,
              const struct prepared *next) {
    const struct config *c = e->config;
    cuda_launch(backend_of(e), "add", c->weight_dtype == F32 ? add_kernel<float> : add_kernel<bf16>,
                dim3((unsigned)rows), ROW_THREADS, 0, (float *)engine_region(e, REGION_X), from, y,
                after.bias, after.norm, c->width, c->norm_eps, *next);
}

void cuda_activate(struct engine *e, int layer, int rows) {
    const struct config *c = e->config;
    const float *y = (const float *)engine_region(e, REGION_QKV),
                *bias = e->layer[layer].gate_up_bias;
    void *h = engine_region(e, REGION_H);
    const dim3 grid((unsigned)rows, (unsigned)divide_up(c->ffn, 4 * ROW_THREADS));
    if (c->weight_dtype == F32)
        cuda_launch(backend_of(e), "activate", activate_kernel<float>, grid, ROW_THREADS, 0, y,
                    bias, (float *)h, c->ffn, c->gated != 0, c->activation);
    else
        cuda_launch(backend_of(e), "activate", activate_kernel<bf16>, grid, ROW_THREADS, 0, y, bias,
                    (bf16 *)h, c->ffn, c->gated != 0, c->activation);
}

void cuda_cap_logits(struct engine *e, struct rows rows) {
    const struct config *c = e->config;
    const dim3 grid((unsigned)rows.classified, (unsigned)divide_up(c->vocab_used, ROW_THREADS));
    cuda_launch(backend_of(e), "cap", cap_kernel, grid, ROW_THREADS, 0, cuda_logits(e, 0),
                c->vocab_used, c->vocab, c->final_cap);
}
