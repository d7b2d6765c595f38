/* Decode of one row on Hopper: the four products of a layer and the classifier as streams of
 * weights that never stop, with norm, RoPE, cache, residual and activation fused in.
 *
 * A step is a chain of kernels joined by programmatic dependent launch. Each has one block a
 * multiprocessor, and its producers fill a ring in shared memory with weights before the
 * kernel's input is ready, while the kernel before it drains. What is lost at a boundary is then
 * the hand-over of a few KB of activations and not the start of a stream. */
#include "kernels/cuda_decode.cuh"

#include <algorithm>

namespace {

/* ---- what follows a product ---- */

/* What a thread needs beside the product for a unit: locate() goes before the wait, load() after it. Of its
 * first unit both are there before the stream: hardly anything is left to do once the sums are there. */
template <mode M, bool AFTER> struct ahead {
    static constexpr bool ADDS = M == PROJECT && !AFTER;
    int unit;
    float residual, gamma; /* ADDS */
    __device__ __forceinline__ void locate(const stream &p, int u) {
        unit = unit_of_block(p, (unsigned)u);
        if (ADDS) gamma = __ldcg(p.next_gamma + unit);
    }
    __device__ __forceinline__ void load(const stream &p) {
        if (ADDS) residual = __ldcg(p.y + unit);
    }
};

/* Of a pair of dimensions of a head. */
template <bool AFTER> struct ahead<QKV, AFTER> {
    float cosine, sine, bias[2];
    int first, apart;   /* the first one of all heads'; from there to the second */
    bf16 *to;           /* q's first, or k's or v's in the cache; NULL: attention finishes it */
    const float *turns; /* its cosine; NULL: it does not turn */
    __device__ __forceinline__ void locate(const stream &p, int u) {
        const heads &h = p.heads;
        const int unit = unit_of_block(p, (unsigned)u), head = unit / (h.D / 2),
                  j = unit % (h.D / 2);
        const bool query = head < h.H, value = head >= h.H + h.G, pairs = j < h.half;
        const int dimension = pairs ? j : 2 * j; /* as in row_of, which would divide once more */
        first = head * h.D + dimension;
        apart = pairs ? h.half : 1;
        turns = pairs && h.rope && !value ? h.rope + j : NULL;
        bias[0] = h.bias ? __ldcg(h.bias + first) : 0.0f;
        bias[1] = h.bias ? __ldcg(h.bias + first + apart) : 0.0f;
        const int g = head - h.H - (value ? h.G : 0);
        const int place =
            (__ldcg(h.slots) * h.G + g) * h.R + place_in_ring(__ldcg(h.positions), h.R);
        to = query ? (bf16 *)h.q + first
                   : (bf16 *)(value ? h.values : h.keys) + (size_t)place * h.D + dimension;
        if (h.raw && !value) to = NULL;
    }
    __device__ __forceinline__ void load(const stream &p) {
        cosine = turns ? __ldcg(turns) : 1.0f;
        sine = turns ? __ldcg(turns + p.heads.half) : 0.0f;
    }
    __device__ __forceinline__ void finish(const stream &p, float a, float b) const {
        a += bias[0];
        b += bias[1];
        if (p.heads.raw) {
            p.heads.raw[first] = a;
            p.heads.raw[first + apart] = b;
            if (!to) return;
        }
        to[0] = __float2bfloat16_rn(turns ? a * cosine - b * sine : a);
        to[apart] = __float2bfloat16_rn(turns ? b * cosine + a * sine : b);
    }
};

/* A row's sum, of its slices in their order. */
template <class F> __device__ __forceinline__ float sum_of_slices(const float *partial, int row) {
    constexpr int N = F::SLICES < 4 ? F::SLICES : 4; /* that are read at once */
    float sum = 0;
#pragma unroll
    for (int i = 0; i < F::SLICES; i += N) {
        alignas(4 * N) float x[N];
        memcpy(x, __builtin_assume_aligned(partial + row * F::SLICES + i, 4 * N), sizeof x);
#pragma unroll
        for (int k = 0; k < N; k++) sum += x[k];
    }
    return sum;
}

/* What the sums become. A product whose sum of squares is wanted is left to one warp, which has it soonest. */
template <mode M, class F, bool AFTER>
__device__ __forceinline__ void finish(const stream &p, const float *partial, float factor,
                                       int units, const ahead<M, AFTER> &first) {
    constexpr int U = rows_of_unit<M>;
    constexpr bool SQUARES = M == PROJECT && AFTER;
    constexpr int TOGETHER = SQUARES ? 32 : CONSUMERS;
    if (threadIdx.x >= TOGETHER) return;
    float squares_left = 0;
#pragma unroll 1
    for (int u = threadIdx.x; u < units; u += TOGETHER) {
        float sum[2] = {0, 0};
        for (int r = 0; r < U; r++) sum[r] = factor * sum_of_slices<F>(partial, u * U + r);
        ahead<M, AFTER> own = first;
        if (u >= TOGETHER) own.locate(p, u), own.load(p);
        if constexpr (M == QKV) own.finish(p, sum[0], sum[1]);
        if constexpr (M == PROJECT) {
            /* Of long sums it is found anew: registers are short. */
            const int unit = F::VECTORS > 6 ? unit_of_block(p, (unsigned)u) : own.unit;
            const float y = AFTER ? sum[0] : own.residual + sum[0];
            p.y[unit] = y;
            if (!AFTER) p.next[unit] = __float2bfloat16_rn(y * own.gamma);
        }
        if constexpr (M == GATE_UP)
            p.h[own.unit] = __float2bfloat16_rn(activate(sum[0], p.gelu) * sum[1]);
        if constexpr (M == STORE) p.y[own.unit] = sum[0];
        if (SQUARES) squares_left += sum[0] * sum[0];
    }
    if (!SQUARES) return;
    squares_left = warp_sum(squares_left);
    if (threadIdx.x == 0) p.squares_left[blockIdx.x] = squares_left;
}

/* ---- the kernel ---- */

/* What      one row against a matrix, and what follows: q and the cache (QKV), x += (PROJECT),
 *           h = act(gate) up (GATE_UP), nothing (STORE: logits). AFTER: of a model with norms after its
 *           products, which struct stream explains.
 * Shapes    struct stream; K a multiple of 8 up to 256 SLICES VECTORS.
 * Owners    a block the units of unit_of_block. Eight warps consume: a lane keeps inputs in registers
 *           and reads every weight once, 16 bytes at a time. Four more produce: all begin to fill the ring,
 *           then one goes on and one finds the factor of the norm.
 * Shared    stages x F::STAGE rows of weights; partial f32 [rows][SLICES].
 * Bound     bytes: 2 K a row, each read once. A step of the 8B shape reaches 93 % of what reading
 *           memory does on an H200.
 * Numerics  inputs rounded to bf16, products exact, f32 sums in a fixed order: by part, over the
 *           parts, over the slices. The norm's factor is applied to the finished sums; its sum of squares
 *           is added up by thread, AFTER over the slices, by warp; PROJECT's by warp, over blocks.
 * Barriers  full[s]: a stage has landed | it is read. empty[s]: all threads have read it | it is
 *           overwritten. First __syncthreads: barriers are ready | used. squared, AFTER: squares[] is
 *           written | the warp that finds the factor reads it. SUMMED: partial[] and the factor are
 *           written | read by other threads.
 * Order     weights, the norms', slots and positions are asked for before the wait, all else after it.
 * Needs     a kernel of this step that waited before it let others start (embed), for slots and positions.
 * Form      a ring filled by the copy engine rather than loads into registers: it holds three times
 *           as many bytes and keeps filling while the warps wait for the kernel before. */
template <mode M, class F, bool AFTER>
__global__ void __maxnreg__((registers<M, F, AFTER>()))
    decode_kernel(const __grid_constant__ stream p) {
    extern __shared__ __align__(128) char ring[];
    __shared__ uint64_t full[MAX_STAGES], empty[MAX_STAGES], squared;
    __shared__ float squares[CONSUMERS], factor;
    constexpr int U = rows_of_unit<M>;
    const int units = p.least + ((int)blockIdx.x < p.more);
    /* Which one the warp is; below 0, a consumer. */
    const int producer = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0) - WARPS;
    start_dependents();
    if (threadIdx.x == 0) barrier_init(shared_address(&squared), CONSUMERS);
    if (producer >= 0 && threadIdx.x % 32 == 0) init_ring(producer, full, empty);
    __syncthreads();
    if (producer >= 0) {
        begin_ring<M, F>(p, producer, ring, full, units * U);
        if (producer == 0) produce<M, F>(p, ring, full, empty, units * U);
        if (producer == 1 && M != PROJECT) find_factor<F, AFTER>(p, squares, &squared, &factor);
        return;
    }
    float *partial = (float *)(ring + (size_t)p.stages * F::STAGE * p.K * 2);
    inputs<F> in;
    ahead<M, AFTER> ahead = {};
    if (threadIdx.x < units) ahead.locate(p, threadIdx.x);
    if (M != PROJECT && AFTER)
        load_normed<F>(in, p, squares, &squared);
    else
        load_plain<F>(in, p);
    if (threadIdx.x < units) ahead.load(p);
    consume<F>(in, p, ring, full, empty, partial, units * U);
    named_barrier(SUMMED, M == PROJECT ? CONSUMERS : NORMING);
    finish<M, F, AFTER>(p, partial, M == PROJECT ? 1.0f : factor, units, ahead);
}

/* ---- launching ---- */

/* Bytes of weights that a block holds, by kernel. Two neighbours of the chain fit into a
 * multiprocessor together (227 KB), so that one fills its ring while the other drains; qkv,
 * attention over a short cache (37 KB, and 5 more where it finishes heads) and the product after it
 * all three. But no multiprocessor may have room for two blocks of a kernel when the first ones are
 * placed: others would get none, and the next kernels inherit that. So the kernel after attention,
 * which leaves multiprocessors empty, takes more than half (without that the 8B shape loses a quarter
 * of its speed), and down leaves room for one block of qkv, not for two (but of a few widths), here or in
 * its registers. Gate and up have what the product after attention leaves. */
enum {
    RING_QKV = 96 << 10,
    RING_QKV_SHORT = 64 << 10,
    RING_OUT = 112 << 10,
    LEAST_OUT = 113 << 10,
    RING_GATE_UP = 104 << 10,
    ROOM_GATE_UP = 110 << 10, /* for the sums too */
    RING_DOWN = 112 << 10,
    RING_STORE = 64 << 10,
    IN_FLIGHT = 52 << 10,
    STATIC_SHARED = 2 << 10 /* of a block, at most: barriers and the like */
};

template <mode M, bool AFTER, class F>
void launch_form(struct cuda_backend *b, stream p, size_t ring, size_t least) {
    const size_t stage = (size_t)F::STAGE * (size_t)p.K * 2;
    const size_t stages = std::min(std::max(ring / stage, (size_t)3), (size_t)MAX_STAGES);
    size_t blocks = 0, shared;
    do { /* several blocks a multiprocessor, where the sums of a huge vocabulary need the room */
        blocks = std::min(blocks + (size_t)b->multiprocessors, (size_t)p.units);
        const size_t rows = ((size_t)p.units + blocks - 1) / blocks * rows_of_unit<M>;
        shared = stages * stage + rows * F::SLICES * sizeof(float);
    } while (shared > (size_t)b->shared_bytes - STATIC_SHARED);
    p.least = p.units / (int)blocks;
    p.more = p.units % (int)blocks;
    p.in_turns = p.least / GRAIN * GRAIN;
    p.stages = (int)stages;
    p.in_flight = (int)std::min(std::max((size_t)IN_FLIGHT / stage, (size_t)2), stages);
    cuda_launch(b, "decode", decode_kernel<M, F, AFTER>, dim3((unsigned)blocks), THREADS,
                std::max(shared, least), p);
}

/* The form by K. Slices: few for short rows, whose lanes would idle; four at least where lanes have x and its
 * norms to find, or each had more of that to do before it can begin. Rows: stages of some 16 KB; a stage takes
 * 0.15 us to read, so that of few rows larger ones are done sooner (down of Qwen3-0.6B: 1 % of a step). QKV has
 * small ones, so that attention and the product after it find room beside it. */
template <mode M, bool AFTER>
void launch(struct cuda_backend *b, const stream &p, size_t ring, size_t least) {
    if constexpr (M == PROJECT || (M != QKV && !AFTER)) {
        if (p.K <= 1024) return launch_form<M, AFTER, form<2, 2, 4, 2>>(b, p, ring, least);
        if (p.K <= 1536) return launch_form<M, AFTER, form<2, 3, 2>>(b, p, ring, least);
        if (p.K > 2048 && p.K <= 3072)
            return launch_form<M, AFTER, form<8, 2, 4>>(b, p, ring, least);
    } else if (p.K <= 1024) {
        return launch_form<M, AFTER, form<4, 1, 4>>(b, p, ring, least);
    }
    if (p.K <= 2048) return launch_form<M, AFTER, form<8, 1, 4>>(b, p, ring, least);
    if (p.K <= 4096) return launch_form<M, AFTER, form<8, 2, 2>>(b, p, ring, least);
    if (p.K <= 6144) return launch_form<M, AFTER, form<8, 3, 1>>(b, p, ring, least);
    if (p.K <= 8192 || M != PROJECT) return launch_form<M, AFTER, form<8, 4, 1>>(b, p, ring, least);
    if (p.K <= 10240) return launch_form<PROJECT, AFTER, form<8, 5, 1>>(b, p, ring, least);
    if (p.K <= 12288) return launch_form<PROJECT, AFTER, form<8, 6, 1>>(b, p, ring, least);
    if (p.K <= 14336) return launch_form<PROJECT, AFTER, form<8, 7, 1>>(b, p, ring, least);
    if (p.K <= 20480) return launch_form<PROJECT, AFTER, form<8, 10, 1, 3>>(b, p, ring, least);
    return launch_form<PROJECT, AFTER, form<8, 14, 1, 4>>(b, p, ring, least);
}

/* Whether the model has norms after its products. */
bool has_norms_after(const struct engine *e) {
    return e->config->norm_placement != NORM_BEFORE;
}

template <mode M> void launch(struct engine *e, const stream &p, size_t ring, size_t least = 0) {
    if (has_norms_after(e))
        launch<M, true>(backend_of(e), p, ring, least);
    else
        launch<M, false>(backend_of(e), p, ring, least);
}

/* What the sums of gate and up leave of their room. */
size_t ring_of_gate_up(const struct engine *e) {
    const size_t blocks = (size_t)backend_of(e)->multiprocessors, room = ROOM_GATE_UP;
    const size_t units = ((size_t)e->config->ffn + blocks - 1) / blocks; /* of a block */
    const size_t sums = units * rows_of_unit<GATE_UP> * WARPS * sizeof(float);
    return std::min(room - std::min(sums, room), (size_t)RING_GATE_UP);
}

/* Where x lies, between a norm after a product and the next: two places in turn, since the kernel that adds
 * has blocks that still read the old one. The second place, and the product, are in REGION_PANELS, which
 * has room for 128 rows of C floats at least. */
float *place_of_x(const struct engine *e, bool moved) {
    return (float *)engine_region(e, moved ? REGION_PANELS : REGION_X);
}

/* The input of a product after a norm. Without norms after products whoever wrote x has prepared it, or it
 * is done here. */
stream normed(struct engine *e, const void *W, const float *gamma) {
    struct cuda_backend *b = backend_of(e);
    stream p = {};
    const bool ready = has_norms_after(e) || (b->normed.rows == 1 && b->normed.gamma == gamma);
    if (!ready) {
        b->normed.rows = 0; /* of REGION_PANELS */
        cuda_norm(e, {gamma, NULL}, 0, 1);
    }
    p.W = (const bf16 *)W;
    p.in = (const bf16 *)engine_region(e, REGION_PANELS);
    p.x = place_of_x(e, b->pending.moved);
    p.gamma = gamma;
    p.K = e->config->width;
    p.inverse_K = 1.0f / (float)p.K;
    p.eps = e->config->norm_eps;
    if (!b->pending.product) return p;
    p.added = b->pending.product;
    p.after = b->pending.gamma;
    p.squares = (const float *)engine_region(e, REGION_SQUARES);
    p.parts = std::min(b->multiprocessors, p.K); /* blocks of PROJECT */
    p.x_after = place_of_x(e, !b->pending.moved);
    b->pending.product = NULL;
    b->pending.moved = !b->pending.moved;
    return p;
}

} // namespace

bool cuda_decode_takes(const struct config *c) {
    const bool known =
        c->norm == RMS_NORM && !c->out_bias && !c->ffn_bias && c->gated && c->activation != GELU;
    return known && c->width <= 8192 && c->heads * c->head_dim <= 28672 && c->ffn <= 28672;
}

void cuda_decode_qkv(struct engine *e, int layer) {
    /* Attention's registers let no product start beside it where heads are wider. */
    const bool three = cuda_is_short(e, 1) && e->config->head_dim <= 128;
    const size_t ring = three ? RING_QKV_SHORT : RING_QKV;
    stream p = normed(e, e->layer[layer].qkv, e->layer[layer].norm_attention);
    p.heads = cuda_heads(e, layer);
    const int rows = (p.heads.H + 2 * p.heads.G) * p.heads.D;
    float *raw = (float *)engine_region(e, REGION_QKV);
    const bool finishes = cuda_attention_finishes(e->config);
    if (e->config->qk_norm == QK_NORM_NONE || finishes) {
        p.units = rows / 2;
        p.heads.raw = finishes ? raw : NULL;
        backend_of(e)->pending.heads = finishes;
        backend_of(e)->pending.layer = layer;
        launch<QKV>(e, p, ring);
        return;
    }
    p.units = rows;
    p.y = raw;
    launch<STORE>(e, p, ring);
    cuda_finish_heads(e, layer, (struct rows){1, 0});
}

void cuda_decode_project(struct engine *e, int layer, enum projection which,
                         const struct prepared *next) {
    const struct config *c = e->config;
    const struct layer_weights *w = &e->layer[layer];
    const bool out = which == ATTENTION_OUT;
    stream p = {};
    p.W = (const bf16 *)(out ? w->out : w->down);
    p.in = (const bf16 *)engine_region(e, out ? REGION_A : REGION_H);
    p.K = out ? c->heads * c->head_dim : c->ffn;
    p.units = c->width;
    if (has_norms_after(e)) {
        p.y = place_of_x(e, true) + c->width;
        p.squares_left = (float *)engine_region(e, REGION_SQUARES);
        backend_of(e)->pending.product = p.y;
        backend_of(e)->pending.gamma = out ? w->after_attention : w->after_ffn;
    } else {
        p.y = (float *)engine_region(e, REGION_X);
        p.next = (bf16 *)next->in;
        p.next_gamma = next->gamma;
    }
    launch<PROJECT>(e, p, out ? (size_t)RING_OUT : (size_t)RING_DOWN, out ? (size_t)LEAST_OUT : 0);
}

void cuda_decode_gate_up(struct engine *e, int layer) {
    stream p = normed(e, e->layer[layer].gate_up, e->layer[layer].norm_ffn);
    p.h = (bf16 *)engine_region(e, REGION_H);
    p.units = p.partner = e->config->ffn;
    p.gelu = e->config->activation == GELU_TANH;
    launch<GATE_UP>(e, p, ring_of_gate_up(e));
}

void cuda_decode_classify(struct engine *e) {
    stream p = normed(e, e->classifier, e->norm_final);
    p.y = (float *)engine_region(e, REGION_LOGITS);
    p.units = e->config->vocab_used;
    launch<STORE>(e, p, RING_STORE);
}

void cuda_decode_settle(struct engine *e) {
    struct cuda_backend *b = backend_of(e);
    const struct prepared nothing = {};
    if (b->pending.heads) cuda_finish_heads(e, b->pending.layer, (struct rows){1, 0});
    b->pending.heads = false;
    if (!b->pending.product) return;
    cuda_add(e, 1, place_of_x(e, b->pending.moved), b->pending.product,
             {NULL, {b->pending.gamma, NULL}}, &nothing);
    b->pending = {};
}
