/* Decode of one row on Hopper: the four products of a layer and the classifier as streams of
 * weights that never stop, with norm, RoPE, cache, residual and activation fused in.
 *
 * A step is a chain of kernels joined by programmatic dependent launch. Each has one block a
 * multiprocessor, and its producer warp fills a ring in shared memory with weights before the
 * kernel's input is ready, while the kernel before it drains. What is lost at a boundary is then
 * the hand-over of a few KB of activations and not the start of a stream. */
#include "kernels/cuda.cuh"
#include "kernels/cuda.h"

#include <algorithm>

namespace {

enum { WARPS = 8, CONSUMERS = WARPS * 32, THREADS = CONSUMERS + 32, MAX_STAGES = 32 };
enum mode { QKV, PROJECT, GATE_UP, CLASSIFY };

struct stream {
    const bf16 *W;        /* [rows, K] */
    const float *x;       /* f32 [K], with norm: QKV, GATE_UP, CLASSIFY */
    const float *gamma;   /* f32 [K] */
    const bf16 *in;       /* [K]: PROJECT */
    float *y;             /* f32: PROJECT x += [rows], CLASSIFY = [rows] */
    bf16 *h;              /* [F]: GATE_UP */
    int K, units, stages; /* a unit is a row, or a pair of rows: RoPE's, or gate and up */
    int in_flight;        /* stages asked for and not landed, at most */
    int partner;          /* GATE_UP: rows from gate to up, F */
    float eps;
    /* QKV */
    bf16 *q, *keys, *values; /* [H, D]; [slots, G, S, D] of this layer */
    const float *rope;       /* f32 [2, half] of row 0; NULL: none */
    const int32_t *slot, *position;
    int H, G, D, S, half;
};

/* How a kernel reads rows of K values: SLICES warps share a row, each lane holding VECTORS times 8
 * of its inputs, of which the last PARTIAL may lie past the end; WARPS / SLICES groups of warps
 * take ROWS rows of a stage each. */
template <int SLICES_, int VECTORS_, int ROWS_, int PARTIAL_ = 1> struct form {
    static constexpr int SLICES = SLICES_, VECTORS = VECTORS_, ROWS = ROWS_, PARTIAL = PARTIAL_;
    static constexpr int STAGE = WARPS / SLICES * ROWS; /* rows */
    static constexpr int PAIRS = (ROWS + 1) / 2;        /* that the tensor cores take at once */
    static_assert(WARPS % SLICES == 0 && (ROWS == 1 || ROWS == 2 || ROWS == 4),
                  "rows fold into lanes by halves");
};

/* Of a thread. A scheduler has 16384 registers, and three warps of each block: two blocks of the
 * chain and one of attention (128 registers, one warp) fit with 64, the two alone with 80, one with
 * 168. */
template <class F> constexpr int registers() {
    if (F::VECTORS > 7) return 168;
    if (F::VECTORS > 4) return 80;
    if (F::SLICES < 8) return 72;
    return F::VECTORS > 2 ? 64 : 56;
}

/* ---- units and rows ---- */

template <mode M> constexpr int rows_of_unit = M == QKV || M == GATE_UP ? 2 : 1;

/* The row of W that is a unit's first or second. In QKV a unit is two dimensions of a head that
 * turn together, j and j + half; dimensions that do not turn pair up with a neighbour. */
template <mode M> __device__ __forceinline__ size_t row_of(const stream &p, int unit, int which) {
    if (M == GATE_UP) return (size_t)unit + (size_t)which * p.partner;
    if (M == QKV) {
        const int head = unit / (p.D / 2), j = unit % (p.D / 2);
        return (size_t)head * p.D + (j < p.half ? j + which * p.half : 2 * j + which);
    }
    return (size_t)unit;
}

/* ---- the producer ---- */

/* Copies this block's rows, stage after stage; a lane takes one row of a stage. */
template <mode M, class F>
__device__ void produce(const stream &p, char *ring, uint64_t *full, uint64_t *empty,
                        int first_unit, int rows) {
    constexpr int U = rows_of_unit<M>;
    const int lane = threadIdx.x % 32, stages = (rows + F::STAGE - 1) / F::STAGE;
    const uint32_t row_bytes = (uint32_t)p.K * 2;
    for (int i = 0, s = 0, parity = 1, landed = 0, landed_parity = 0; i < stages; i++) {
        if (i >= p.stages) barrier_wait(shared_address(&empty[s]), parity);
        if (i >= p.in_flight) { /* more would queue ahead of the chain's activations */
            barrier_wait(shared_address(&full[landed]), landed_parity);
            if (++landed == p.stages) landed = 0, landed_parity ^= 1;
        }
        const int count = min(F::STAGE, rows - i * F::STAGE), row = i * F::STAGE + lane;
        const uint32_t barrier = shared_address(&full[s]);
        if (lane == 0) barrier_expect(barrier, (uint32_t)count * row_bytes);
        __syncwarp(); /* the bytes are expected | copied */
        if (lane < count)
            copy_bulk(shared_address(ring) + (uint32_t)(s * F::STAGE + lane) * row_bytes,
                      p.W + row_of<M>(p, first_unit + row / U, row % U) * p.K, row_bytes, barrier);
        if (++s == p.stages) s = 0, parity ^= 1;
    }
}

/* ---- inputs ---- */

/* This lane's inputs, two bf16 a word. Lanes past the end of a row hold zeros and look at its first
 * chunk, whose weights count for nothing. */
template <class F> struct inputs { uint32_t x[F::VECTORS * 4]; };

/* Which 8 inputs of a row are vector v of this lane, and whether the row has them. */
template <class F> __device__ __forceinline__ int chunk_of(int v, int K, bool *valid) {
    const int chunk =
        v * F::SLICES * 32 + (int)threadIdx.x / 32 % F::SLICES * 32 + (int)threadIdx.x % 32;
    *valid = v < F::VECTORS - F::PARTIAL || chunk < K / 8;
    return *valid ? chunk : 0;
}

/* 8 floats from `from` on. */
struct eight {
    float4 a, b;
    __device__ __forceinline__ float operator[](int i) const {
        const float4 &half = i < 4 ? a : b;
        return i % 4 == 0 ? half.x : i % 4 == 1 ? half.y : i % 4 == 2 ? half.z : half.w;
    }
};

/* x gamma, rounded to bf16; the partial sum of squares of x goes to squares[warp]. gamma does not
 * depend on other kernels and is there before the wait. */
template <class F>
__device__ __forceinline__ void load_normed(inputs<F> &in, const stream &p, float *squares) {
    eight gamma[F::VECTORS];
    float sum = 0;
    bool valid;
#pragma unroll
    for (int v = 0; v < F::VECTORS; v++) {
        const float4 *from = (const float4 *)p.gamma + chunk_of<F>(v, p.K, &valid) * 2;
        gamma[v] = {__ldg(from), __ldg(from + 1)};
    }
    wait_for_inputs();
#pragma unroll
    for (int v = 0; v < F::VECTORS; v++) {
        const float4 *from = (const float4 *)p.x + chunk_of<F>(v, p.K, &valid) * 2;
        const eight x = {__ldcg(from), __ldcg(from + 1)};
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
            if (valid) sum += x[i] * x[i] + x[i + 1] * x[i + 1];
            const uint32_t pair = pack_halves(x[i] * gamma[v][i], x[i + 1] * gamma[v][i + 1]);
            in.x[v * 4 + i / 2] = valid ? pair : 0;
        }
    }
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) squares[threadIdx.x / 32] = sum;
}

template <class F> __device__ __forceinline__ void load_plain(inputs<F> &in, const stream &p) {
    wait_for_inputs();
#pragma unroll
    for (int v = 0; v < F::VECTORS; v++) {
        bool valid;
        const uint4 w = __ldcg((const uint4 *)p.in + chunk_of<F>(v, p.K, &valid));
        const uint32_t pairs[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
        for (int i = 0; i < 4; i++) in.x[v * 4 + i] = valid ? pairs[i] : 0;
    }
}

/* ---- the consumers ---- */

/* Dot products on the tensor cores. Four neighbouring lanes hold a part of two rows and the same
 * part of the inputs: as operand A, row p is part p of the first row of W and row p + 8 that of the
 * second; as operand B, column p is part p of the inputs. Of their products those count where both
 * are the same part. Seven eighths are for nothing, but it is a sixteenth of the instructions that
 * multiply-adds would take, and a stage that lies there is done sooner: so a block that fell behind
 * catches up.
 *
 * sums[pair][0] takes the first two words of both rows, sums[pair][1] the other two. A single row
 * is cut in two instead: rows p are its first and third word, which sums[0][0] takes, rows p + 8
 * the others. */
template <class F>
__device__ __forceinline__ void multiply(float sums[F::PAIRS][2][4], const uint32_t x[4],
                                         const uint4 w[F::ROWS]) {
    if constexpr (F::ROWS == 1) {
        const uint32_t both[4] = {w[0].x, w[0].y, w[0].z, w[0].w};
        multiply_add(sums[0][0], both, x[0], x[2]);
        multiply_add(sums[0][1], both, x[1], x[3]);
    } else {
#pragma unroll
        for (int pair = 0; pair < F::PAIRS; pair++) {
            const uint4 a = w[2 * pair], b = w[2 * pair + 1];
            const uint32_t even[4] = {a.x, b.x, a.y, b.y}, odd[4] = {a.z, b.z, a.w, b.w};
            multiply_add(sums[pair][0], even, x[0], x[1]);
            multiply_add(sums[pair][1], odd, x[2], x[3]);
        }
    }
}

/* Adds up the parts: part p's sums lie in lane 4 p + p / 2. Rows fold into halves of the parts
 * first. Returns the sum of row `part` in the lane of part 0 to ROWS - 1. */
template <class F> __device__ __forceinline__ float fold(const float sums[F::PAIRS][2][4]) {
    const int part = threadIdx.x % 32 / 4;
    float sum[F::PAIRS];
#pragma unroll
    for (int pair = 0; pair < F::PAIRS; pair++) {
        const float(*s)[4] = sums[pair];
        const float a = part % 2 ? s[0][1] : s[0][0], b = part % 2 ? s[0][3] : s[0][2];
        const float c = part % 2 ? s[1][1] : s[1][0], d = part % 2 ? s[1][3] : s[1][2];
        const float first = a + c, second = b + d; /* rows; of the cut one, a + d */
        const float keep = F::ROWS == 1 ? a + d : part % 2 ? second : first;
        const float send = F::ROWS == 1 ? a + d : part % 2 ? first : second;
        sum[pair] = keep + __shfl_xor_sync(0xffffffffu, send, 4);
    }
    const bool upper = F::PAIRS > 1 && part & 2;
    const float low = sum[0], high = sum[F::PAIRS - 1];
    const float keep = upper ? high : low, send = upper ? low : high;
    const float sum_of_four = keep + __shfl_xor_sync(0xffffffffu, send, 9);
    return sum_of_four + __shfl_xor_sync(0xffffffffu, sum_of_four, 18);
}

/* Gives a stage back for this thread, once it has the weights in registers. An arrive alone may
 * overtake reads of shared memory, so it is made to depend on them: seen has bits of everything that
 * was read, and one more that is always set. */
__device__ __forceinline__ void give_back(uint64_t *empty, uint32_t seen) {
    if (seen != 0) barrier_arrive(shared_address(empty));
}

/* Every row of the block against the inputs: partial[slice][row]. The sums of a stage are added up
 * while the weights of the next one are on their way from shared memory. */
template <class F>
__device__ __forceinline__ void consume(const inputs<F> &in, const stream &p, const char *ring,
                                        uint64_t *full, uint64_t *empty, float *partial, int rows) {
    constexpr int BATCH =
        F::VECTORS > 4 || F::ROWS == 2 ? 2 : 4 / F::ROWS; /* vectors that are read at once */
    const int warp = threadIdx.x / 32, part = threadIdx.x % 32 / 4;
    const int slice = warp % F::SLICES, first = warp / F::SLICES * F::ROWS, row_bytes = p.K * 2;
    const bool holds_sum = part < F::ROWS && threadIdx.x % 4 == part / 2;
    float sums[F::PAIRS][2][4];
    int row = first - F::STAGE + part; /* of the stage before: whose sum this lane holds */
    auto store = [&] {
        const float sum = fold<F>(sums);
        if (holds_sum && row < rows) partial[slice * rows + row] = sum;
    };
#pragma unroll 1
    for (int i = 0, s = 0, parity = 0; i * F::STAGE < rows; i++, row += F::STAGE) {
        const char *at = ring + (size_t)(s * F::STAGE + first) * row_bytes;
        uint32_t seen = (uint32_t)p.stages;
        barrier_wait(shared_address(&full[s]), parity);
#pragma unroll
        for (int v0 = 0; v0 < F::VECTORS; v0 += BATCH) {
            uint4 w[BATCH][F::ROWS];
#pragma unroll
            for (int v = v0; v < v0 + BATCH && v < F::VECTORS; v++) {
                bool valid;
                const char *from = at + chunk_of<F>(v, p.K, &valid) * 16;
#pragma unroll
                for (int r = 0; r < F::ROWS; r++)
                    w[v - v0][r] = *(const uint4 *)(from + r * row_bytes);
            }
            if (v0 == 0) {
                if (i > 0) store();
#pragma unroll
                for (int k = 0; k < F::PAIRS * 8; k++) sums[k / 8][k / 4 % 2][k % 4] = 0;
            }
#pragma unroll
            for (int v = v0; v < v0 + BATCH && v < F::VECTORS; v++) {
                multiply<F>(sums, in.x + 4 * v, w[v - v0]);
#pragma unroll
                for (int r = 0; r < F::ROWS; r++) seen |= w[v - v0][r].x;
            }
        }
        give_back(&empty[s], seen);
        if (++s == p.stages) s = 0, parity ^= 1;
    }
    if (rows > 0) store();
}

/* ---- what follows a product ---- */

/* q, or k and v into the cache: a pair of values that turn together. */
__device__ __forceinline__ void finish_qkv(const stream &p, int unit, float a, float b,
                                           const float *turn) {
    const int head = unit / (p.D / 2), j = unit % (p.D / 2);
    const bool turns = head < p.H + p.G && j < p.half && p.rope;
    const int first = j < p.half ? j : 2 * j, second = j < p.half ? j + p.half : 2 * j + 1;
    if (turns) {
        const float c = turn[0], s = turn[1], low = a;
        a = low * c - b * s;
        b = b * c + low * s;
    }
    bf16 *to = p.q + (size_t)head * p.D;
    if (head >= p.H) {
        const int g = head - p.H - (head >= p.H + p.G ? p.G : 0);
        to = (head >= p.H + p.G ? p.values : p.keys) +
             (((size_t)*p.slot * p.G + g) * p.S + *p.position) * p.D;
    }
    to[first] = __float2bfloat16_rn(a);
    to[second] = __float2bfloat16_rn(b);
}

/* What a thread needs of other kernels for its first unit, asked for before the stream is awaited:
 * the residual, or the angle's cosine and sine. */
template <mode M> struct ahead {
    float value[2];
    __device__ __forceinline__ void load(const stream &p, int unit) {
        if (M == PROJECT) value[0] = __ldcg(p.y + unit);
        const int j = M == QKV ? unit % (p.D / 2) : 0;
        if (M == QKV && p.rope && j < p.half) {
            value[0] = __ldcg(p.rope + j);
            value[1] = __ldcg(p.rope + p.half + j);
        }
    }
};

template <mode M, class F>
__device__ __forceinline__ void finish(const stream &p, const float *partial, const float *squares,
                                       int first_unit, int units, ahead<M> first) {
    constexpr int U = rows_of_unit<M>;
    float factor = 1;
    if (M != PROJECT) {
        float sum = 0;
        for (int i = 0; i < F::SLICES; i++) sum += squares[i];
        factor = rsqrtf(sum / (float)p.K + p.eps);
    }
#pragma unroll 1
    for (int u = threadIdx.x; u < units; u += CONSUMERS) {
        const int unit = first_unit + u;
        float sum[2] = {0, 0};
        for (int r = 0; r < U; r++) {
            for (int i = 0; i < F::SLICES; i++) sum[r] += partial[(i * units + u) * U + r];
            sum[r] *= factor;
        }
        ahead<M> own = first;
        if (u >= CONSUMERS) own.load(p, unit);
        if (M == QKV) finish_qkv(p, unit, sum[0], sum[1], own.value);
        if (M == PROJECT) p.y[unit] = own.value[0] + sum[0];
        if (M == GATE_UP) p.h[unit] = __float2bfloat16_rn(silu(sum[0]) * sum[1]);
        if (M == CLASSIFY) p.y[unit] = sum[0];
    }
}

/* ---- the kernel ---- */

/* What      one row against a matrix, and what follows: q and the cache (QKV), x += (PROJECT),
 *           h = silu(gate) up (GATE_UP), logits (CLASSIFY).
 * Shapes    struct stream; K a multiple of 8 up to 256 SLICES VECTORS.
 * Owners    block b the units from units b / blocks on. Eight warps consume: a lane keeps inputs in
 *           registers and reads every weight once, 16 bytes at a time. The ninth warp produces.
 * Shared    stages x F::STAGE rows of weights; partial f32 [SLICES][rows].
 * Bound     bytes: 2 K a row, each read once. A step of the 8B shape reaches 91 % of what reading
 *           memory does on an H200.
 * Numerics  inputs rounded to bf16, products exact, f32 sums in a fixed order: by part, over the
 *           parts, over the slices. The norm's factor is applied to the finished sums.
 * Barriers  full[s]: a stage has landed | it is read. empty[s]: all threads have read it | it is
 *           overwritten. First __syncthreads: barriers are ready | used. Barrier 1: partial[] and
 *           squares[] are written | read by other threads.
 * Order     weights, and the norm's, are asked for before the wait, everything else after it.
 * Form      a ring filled by the copy engine rather than loads into registers: it holds three times
 *           as many bytes and keeps filling while the warps wait for the kernel before. */
template <mode M, class F>
__global__ void __maxnreg__(registers<F>()) decode_kernel(const __grid_constant__ stream p) {
    extern __shared__ __align__(128) char ring[];
    __shared__ uint64_t full[MAX_STAGES], empty[MAX_STAGES];
    __shared__ float squares[WARPS];
    constexpr int U = rows_of_unit<M>;
    float *partial = (float *)(ring + (size_t)p.stages * F::STAGE * p.K * 2);
    const int first = (int)((long long)p.units * blockIdx.x / gridDim.x);
    const int units = (int)((long long)p.units * (blockIdx.x + 1) / gridDim.x) - first;
    start_dependents();
    if (threadIdx.x == 0) {
        for (int s = 0; s < p.stages; s++) {
            barrier_init(shared_address(&full[s]), 1);
            barrier_init(shared_address(&empty[s]), CONSUMERS);
        }
        barriers_ready();
    }
    __syncthreads();
    if (threadIdx.x >= CONSUMERS) {
        produce<M, F>(p, ring, full, empty, first, units * U);
        return;
    }
    inputs<F> in;
    if (M == PROJECT)
        load_plain<F>(in, p);
    else
        load_normed<F>(in, p, squares);
    ahead<M> ahead = {};
    if (threadIdx.x < units) ahead.load(p, first + (int)threadIdx.x);
    consume<F>(in, p, ring, full, empty, partial, units * U);
    named_barrier(1, CONSUMERS);
    finish<M, F>(p, partial, squares, first, units, ahead);
}

/* ---- launching ---- */

/* Bytes of weights that a block holds, by kernel. Two neighbours of the chain fit into a
 * multiprocessor together (227 KB), so that one fills its ring while the other drains; qkv,
 * attention over a short cache (37 KB) and the product after it all three. But no multiprocessor
 * may have room for two blocks of a kernel when the first ones are placed: others would get none,
 * and the next kernels inherit that. So the kernel after attention, which leaves multiprocessors
 * empty, takes more than half (without that the 8B shape loses a quarter of its speed), and down
 * leaves room for one block of qkv, not for two. */
enum {
    RING_QKV = 96 << 10,
    RING_QKV_SHORT = 64 << 10,
    RING_OUT = 112 << 10,
    LEAST_OUT = 116 << 10,
    RING_GATE_UP = 96 << 10,
    RING_DOWN = 112 << 10,
    RING_CLASSIFY = 64 << 10,
    IN_FLIGHT = 48 << 10,
    STATIC_SHARED = 1 << 10 /* of a block, at most: barriers and the like */
};

template <mode M, class F>
void launch_form(struct cuda_backend *b, stream p, size_t ring, size_t least) {
    const size_t stage = (size_t)F::STAGE * (size_t)p.K * 2;
    const size_t stages = std::min(std::max(ring / stage, (size_t)3), (size_t)MAX_STAGES);
    size_t blocks = 0, shared;
    do { /* several blocks a multiprocessor, where the sums of a huge vocabulary need the room */
        blocks += (size_t)b->multiprocessors;
        const size_t rows = ((size_t)p.units + blocks - 1) / blocks * rows_of_unit<M>;
        shared = stages * stage + rows * F::SLICES * sizeof(float);
    } while (shared > (size_t)b->shared_bytes - STATIC_SHARED);
    p.stages = (int)stages;
    p.in_flight = (int)std::min(std::max((size_t)IN_FLIGHT / stage, (size_t)3), stages);
    cuda_launch(b, "decode", decode_kernel<M, F>, dim3((unsigned)blocks), THREADS,
                std::max(shared, least), p);
}

/* The form by K. Slices: few for short rows, whose lanes would idle. Rows: stages of some 16 KB. */
template <mode M>
void launch(struct cuda_backend *b, const stream &p, size_t ring, size_t least = 0) {
    if (p.K <= 1024) return launch_form<M, form<2, 2, 4, 2>>(b, p, ring, least);
    if (p.K <= 1536) return launch_form<M, form<2, 3, 2>>(b, p, ring, least);
    if (p.K <= 2048) return launch_form<M, form<8, 1, 4>>(b, p, ring, least);
    if (p.K <= 4096) return launch_form<M, form<8, 2, 2>>(b, p, ring, least);
    if (p.K <= 6144) return launch_form<M, form<8, 3, 1>>(b, p, ring, least);
    if (p.K <= 8192 || M != PROJECT) return launch_form<M, form<8, 4, 1>>(b, p, ring, least);
    if (p.K <= 10240) return launch_form<PROJECT, form<8, 5, 1>>(b, p, ring, least);
    if (p.K <= 12288) return launch_form<PROJECT, form<8, 6, 1>>(b, p, ring, least);
    if (p.K <= 14336) return launch_form<PROJECT, form<8, 7, 1>>(b, p, ring, least);
    if (p.K <= 20480) return launch_form<PROJECT, form<8, 10, 1, 3>>(b, p, ring, least);
    return launch_form<PROJECT, form<8, 14, 1, 4>>(b, p, ring, least);
}

/* The input of a product after a norm. */
stream normed(const struct engine *e, const void *W, const float *gamma) {
    stream p = {};
    p.W = (const bf16 *)W;
    p.x = (const float *)engine_region(e, REGION_X);
    p.gamma = gamma;
    p.K = e->config->width;
    p.eps = e->config->norm_eps;
    return p;
}

} // namespace

bool cuda_decode_takes(const struct config *c) {
    return c->width <= 8192 && c->heads * c->head_dim <= 28672 && c->ffn <= 28672;
}

void cuda_decode_qkv(struct engine *e, int layer) {
    const struct config *c = e->config;
    stream p = normed(e, e->layer[layer].qkv, e->layer[layer].norm_attention);
    p.H = c->heads;
    p.G = c->kv_heads;
    p.D = c->head_dim;
    p.S = e->plan.limits.context;
    p.half = c->rotary_dims / 2;
    p.units = (p.H + 2 * p.G) * p.D / 2;
    p.q = (bf16 *)engine_region(e, REGION_Q);
    p.keys = (bf16 *)cuda_layer_cache(e, REGION_KEYS, layer);
    p.values = (bf16 *)cuda_layer_cache(e, REGION_VALUES, layer);
    p.slot = cuda_row_numbers(e, 1);
    p.position = cuda_row_numbers(e, 2);
    p.rope = cuda_turns(e, layer);
    launch<QKV>(backend_of(e), p, cuda_is_short(e, 1) ? RING_QKV_SHORT : RING_QKV);
}

void cuda_decode_project(struct engine *e, int layer, enum projection which) {
    const struct config *c = e->config;
    const bool out = which == ATTENTION_OUT;
    stream p = {};
    p.W = (const bf16 *)(out ? e->layer[layer].out : e->layer[layer].down);
    p.in = (const bf16 *)engine_region(e, out ? REGION_A : REGION_H);
    p.y = (float *)engine_region(e, REGION_X);
    p.K = out ? c->heads * c->head_dim : c->ffn;
    p.units = c->width;
    launch<PROJECT>(backend_of(e), p, out ? (size_t)RING_OUT : (size_t)RING_DOWN,
                    out ? (size_t)LEAST_OUT : 0);
}

void cuda_decode_gate_up(struct engine *e, int layer) {
    stream p = normed(e, e->layer[layer].gate_up, e->layer[layer].norm_ffn);
    p.h = (bf16 *)engine_region(e, REGION_H);
    p.units = p.partner = e->config->ffn;
    launch<GATE_UP>(backend_of(e), p, RING_GATE_UP);
}

void cuda_decode_classify(struct engine *e) {
    stream p = normed(e, e->classifier, e->norm_final);
    p.y = (float *)engine_region(e, REGION_LOGITS);
    p.units = e->config->vocab_used;
    launch<CLASSIFY>(backend_of(e), p, RING_CLASSIFY);
}
