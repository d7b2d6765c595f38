/* Decode of one row on Hopper, how a kernel's weights stream past its inputs: units and rows, the producers
 * that fill a ring with weights, the inputs in registers, the dot products. cuda_decode.cu has what follows
 * these, and the kernel. */
#ifndef KERNELS_CUDA_DECODE_CUH
#define KERNELS_CUDA_DECODE_CUH

#include "kernels/cuda.cuh"
#include "kernels/cuda.h"

namespace {

enum {
    WARPS = 8,
    CONSUMERS = WARPS * 32,
    /* Warps: all ask for the first stages, then one goes on and one finds the norm's factor. With fewer than
     * eleven warps a block SmolLM2 takes 5 % longer. */
    PRODUCERS = 4,
    NORMING = CONSUMERS + 32, /* who meet at SUMMED: consumers, and the warp with the factor */
    THREADS = CONSUMERS + 32 * PRODUCERS,
    MAX_STAGES = 32,
    GRAIN = 2, /* units (unit_of_block) */
    SUMMED = 1 /* named barrier: sums, and the norm's factor, are written | read */
};
static_assert(MAX_STAGES % PRODUCERS == 0, "producers share the barriers");
enum mode { QKV, PROJECT, GATE_UP, STORE };

struct stream {
    const bf16 *W;      /* [rows, K] */
    const bf16 *in;     /* [K]: PROJECT's, the others' x gamma; but not theirs AFTER a norm */
    const float *x;     /* f32 [K]: QKV, GATE_UP, STORE */
    const float *gamma; /* f32 [K]: of the norm of x; NULL: none */
    float *y;           /* f32 [rows]: PROJECT, STORE */
    bf16 *h;            /* [F]: GATE_UP */
    /* PROJECT without norms after products: y += product, and the next kernel's in, y next_gamma. */
    const float *next_gamma; /* f32 [rows] */
    bf16 *next;              /* [rows] */
    /* AFTER, a model with norms after products. PROJECT: y = product, whose sum of squares it leaves in parts,
     * of a block each. The next kernel adds: x_after = x + RMSNorm(added), and that is its x. added NULL:
     * nothing to add. */
    float *squares_left;        /* f32 [blocks] */
    const float *added, *after; /* f32 [K], the product and the norm's weights */
    const float *squares;       /* f32 [parts] */
    float *x_after;             /* f32 [K] */
    int parts;
    bool gelu;
    int K, units, stages; /* a unit is a row, or a pair of rows: RoPE's, or gate and up */
    int least, more;      /* units of a block; blocks that have one more */
    int in_turns;         /* of a block's units: those in whole grains (unit_of_block) */
    int in_flight;        /* stages asked for and not landed, at most */
    int partner;          /* GATE_UP: rows from gate to up, F */
    float eps, inverse_K; /* 1 / K */
    /* QKV */
    struct heads heads; /* of row 0 */
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
 * chain and one of attention (128 registers, one warp) fit with 64, the two alone with 80, with 96 and 72, or
 * 104 and 64; one with 168. */
template <mode M, class F, bool AFTER> constexpr int registers() {
    if (F::VECTORS > 10) return 168;
    if (F::VECTORS > 7) return 104;
    if (AFTER && M != PROJECT && F::VECTORS < 5)
        return F::VECTORS > 2 ? 128 : F::VECTORS > 1 ? 96 : 72;
    if (F::VECTORS > 4) return F::VECTORS > 5 ? 80 : 72;
    if (F::SLICES < 8 || (F::VECTORS == 2 && F::ROWS == 4)) return 72;
    return M == QKV && F::VECTORS > 3 ? 72 : 64;
}

/* ---- units and rows ---- */

template <mode M> constexpr int rows_of_unit = M == QKV || M == GATE_UP ? 2 : 1;

/* The unit that is a block's u-th. Blocks take GRAIN neighbours in turn, and what is left one by one, so that
 * all of them read one region of W as it passes: memory answers that 0.5 to 2 % faster than as many streams far
 * apart. */
__device__ __forceinline__ int unit_of_block(const stream &p, unsigned u) {
    const unsigned turn = u / GRAIN * gridDim.x + blockIdx.x;
    return (int)((int)u < p.in_turns ? turn * GRAIN + u % GRAIN : u * gridDim.x + blockIdx.x);
}

/* The row of W that is a unit's first or second. In QKV a unit is two dimensions of a head that
 * turn together, j and j + half; dimensions that do not turn pair up with a neighbour. */
template <mode M> __device__ __forceinline__ unsigned row_of(const stream &p, int unit, int which) {
    if (M == GATE_UP) return (unsigned)(unit + which * p.partner);
    if (M == QKV) {
        const heads &h = p.heads;
        const int head = unit / (h.D / 2), j = unit % (h.D / 2);
        return (unsigned)(head * h.D + (j < h.half ? j + which * h.half : 2 * j + which));
    }
    return (unsigned)unit;
}

/* ---- the producers ---- */

/* The ring's barriers, also those of places that it does not have; by one thread of every producer. */
__device__ __forceinline__ void init_ring(int producer, uint64_t *full, uint64_t *empty) {
#pragma unroll
    for (int i = 0; i < MAX_STAGES / PRODUCERS; i++) {
        barrier_init(shared_address(&full[producer + i * PRODUCERS]), 1);
        barrier_init(shared_address(&empty[producer + i * PRODUCERS]), CONSUMERS);
    }
    barriers_ready();
}

/* Where a row comes from and goes to. */
struct copy {
    const bf16 *from;
    uint32_t to, barrier;
};

/* Of row r of the block's stage i, in place s of the ring. */
template <mode M, class F>
__device__ __forceinline__ copy copy_of(const stream &p, const char *ring, const uint64_t *full,
                                        int i, int s, int r) {
    constexpr int U = rows_of_unit<M>;
    const int row = i * F::STAGE + r, unit = unit_of_block(p, (unsigned)(row / U));
    copy c;
    c.from = p.W + (size_t)row_of<M>(p, unit, row % U) * (unsigned)p.K;
    c.to = shared_address(ring) + (uint32_t)((s * F::STAGE + r) * p.K * 2);
    c.barrier = shared_address(&full[s]);
    return c;
}

/* By a warp: lanes below `count` copy a row each. expected: rows of the stage, said once. Bytes may come before
 * they are expected: the arrival that expects them is still missing. */
__device__ __forceinline__ void ask(const stream &p, const copy &c, int count, int expected) {
    const int lane = threadIdx.x % 32;
    const uint32_t row_bytes = (uint32_t)p.K * 2;
    if (lane == 0 && expected > 0) barrier_expect(c.barrier, (uint32_t)expected * row_bytes);
    if (lane < count) copy_bulk(c.to, c.from, row_bytes, c.barrier);
}

/* As many stages as may be in flight; the producers take some rows of a stage each in turn. The sooner a ring
 * begins to fill the less memory rests while the kernel before it hands over: 1B 1 %, Gemma-3-4B 0.5 to 1 %. */
template <mode M, class F>
__device__ __forceinline__ void begin_ring(const stream &p, int producer, const char *ring,
                                           uint64_t *full, int rows) {
    constexpr int SOME = F::STAGE < 4 ? F::STAGE : 4; /* 16 by one warp: Qwen3-0.6B 2 % slower */
    static_assert(F::STAGE % SOME == 0, "rows that are taken together lie in one stage");
    const int lane = threadIdx.x % 32, end = min(rows, p.in_flight * F::STAGE);
#pragma unroll 1
    for (int row = producer * SOME; row < end; row += PRODUCERS * SOME) {
        const int s = row / F::STAGE, first = row % F::STAGE;
        ask(p, copy_of<M, F>(p, ring, full, s, s, first + lane), min(SOME, end - row),
            first == 0 ? min(F::STAGE, rows - row) : 0);
    }
}

/* Copies the block's other rows, stage after stage, a lane a row. Where it lies is worked out before the waits,
 * after which a copy should be asked for at once. */
template <mode M, class F>
__device__ __forceinline__ void produce(const stream &p, const char *ring, uint64_t *full,
                                        uint64_t *empty, int rows) {
    const int lane = threadIdx.x % 32;
    int s = p.in_flight, parity = 1, landed = 0, landed_parity = 0;
    if (s == p.stages) s = 0, parity = 0;
#pragma unroll 1
    for (int i = p.in_flight; i * F::STAGE < rows; i++) {
        const int count = min(F::STAGE, rows - i * F::STAGE);
        copy c = copy_of<M, F>(p, ring, full, i, s, lane);
        asm volatile("" : "+l"(c.from), "+r"(c.to), "+r"(c.barrier)); /* not after the waits */
        if (i >= p.stages) barrier_wait(shared_address(&empty[s]), parity);
        /* More in flight would queue ahead of the chain's activations. */
        barrier_wait(shared_address(&full[landed]), landed_parity);
        if (++landed == p.stages) landed = 0, landed_parity ^= 1;
        ask(p, c, count, count);
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

/* 8 floats of an array, written by other kernels or constant. */
__device__ __forceinline__ eight load_eight(const float *from, int chunk) {
    const float4 *at = (const float4 *)from + chunk * 2;
    return {__ldcg(at), __ldcg(at + 1)};
}
/* to += factor x weights; x weights does not wait for the factor. */
__device__ __forceinline__ void add_scaled(float4 &to, float factor, float4 x, float4 weights) {
    to.x += factor * (x.x * weights.x), to.y += factor * (x.y * weights.y);
    to.z += factor * (x.z * weights.z), to.w += factor * (x.w * weights.w);
}

/* Of a lane, parts of a product's sum of squares: every 32nd. Where they are is known before the wait. */
struct parts {
    const float *first;
    int left; /* from the first on */
    __device__ __forceinline__ parts(const stream &p) {
        first = p.squares + threadIdx.x % 32;
        left = p.parts - (int)threadIdx.x % 32;
        asm volatile("" : "+l"(first), "+r"(left)); /* not after the wait */
    }
};

/* x += RMSNorm of the product before, whose sum of squares every warp adds up from its parts. Block 0 keeps
 * the new x. after: the norm's weights. */
template <class F>
__device__ __forceinline__ void add_normed(eight (&x)[F::VECTORS], const stream &p,
                                           const parts &parts, const eight (&after)[F::VECTORS]) {
    constexpr int AT_ONCE = 5; /* those of 160 multiprocessors */
    eight added[F::VECTORS];
    float part[AT_ONCE], sum = 0;
    bool valid;
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++)
        part[i] = 32 * i < parts.left ? __ldcg(parts.first + 32 * i) : 0.0f;
#pragma unroll
    for (int v = 0; v < F::VECTORS; v++)
        added[v] = load_eight(p.added, chunk_of<F>(v, p.K, &valid));
#pragma unroll 1
    for (int i = 32 * AT_ONCE; i < parts.left; i += 32) sum += __ldcg(parts.first + i);
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) sum += part[i];
    const float factor = rsqrtf(warp_sum(sum) * p.inverse_K + p.eps);
    const bool keeps = blockIdx.x == 0 && threadIdx.x / 32 < F::SLICES; /* others have the same */
#pragma unroll
    for (int v = 0; v < F::VECTORS; v++) {
        add_scaled(x[v].a, factor, added[v].a, after[v].a);
        add_scaled(x[v].b, factor, added[v].b, after[v].b);
        float4 *const to = (float4 *)p.x_after + chunk_of<F>(v, p.K, &valid) * 2;
        if (keeps && valid) to[0] = x[v].a, to[1] = x[v].b;
    }
}

/* x gamma, rounded to bf16, where x is what the norm after a product makes of it; this lane's sum of squares of
 * x goes to squares[thread]. What does not depend on other kernels is there before the wait. */
template <class F>
__device__ __forceinline__ void load_normed(inputs<F> &in, const stream &p, float *squares,
                                            uint64_t *squared) {
    eight gamma[F::VECTORS], after[F::VECTORS], x[F::VECTORS];
    constexpr bool EARLY = F::VECTORS < 3; /* else registers are short */
    const eight ones = {{1, 1, 1, 1}, {1, 1, 1, 1}};
    float sum = 0;
    bool valid;
#pragma unroll
    for (int v = 0; v < F::VECTORS; v++) {
        const int chunk = chunk_of<F>(v, p.K, &valid);
        if (EARLY) gamma[v] = p.gamma ? load_eight(p.gamma, chunk) : ones;
        if (p.added) after[v] = load_eight(p.after, chunk);
    }
    const parts parts(p);
    wait_for_inputs();
#pragma unroll
    for (int v = 0; v < F::VECTORS; v++) x[v] = load_eight(p.x, chunk_of<F>(v, p.K, &valid));
    if (p.added) add_normed<F>(x, p, parts, after);
#pragma unroll
    for (int v = 0; v < F::VECTORS; v++) {
        const int chunk = chunk_of<F>(v, p.K, &valid);
        if (!EARLY) gamma[v] = p.gamma ? load_eight(p.gamma, chunk) : ones;
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
            if (valid) sum += x[v][i] * x[v][i] + x[v][i + 1] * x[v][i + 1];
            const uint32_t pair = pack_halves(x[v][i] * gamma[v][i], x[v][i + 1] * gamma[v][i + 1]);
            in.x[v * 4 + i / 2] = valid ? pair : 0;
        }
    }
    squares[threadIdx.x] = sum;
    barrier_arrive(shared_address(squared));
}

/* The factor of the norm, found by a producer that has nothing else to do by then: from x, or AFTER a norm,
 * which makes x, from squares[], of which those of SLICES warps are x's. */
template <class F, bool AFTER>
__device__ __forceinline__ void find_factor(const stream &p, const float *squares,
                                            uint64_t *squared, float *factor) {
    constexpr int READS = 8; /* at once */
    const int lane = threadIdx.x % 32;
    float sum = 0;
    if constexpr (AFTER) {
        barrier_wait(shared_address(squared), 0);
#pragma unroll
        for (int i = 0; i < F::SLICES; i++) sum += squares[i * 32 + lane];
    } else {
        const float4 *x = (const float4 *)p.x, none = {0, 0, 0, 0};
        wait_for_inputs();
#pragma unroll 1
        for (int first = lane; first < p.K / 4; first += 32 * READS) {
            float4 some[READS];
#pragma unroll
            for (int i = 0; i < READS; i++)
                some[i] = first + 32 * i < p.K / 4 ? __ldcg(x + first + 32 * i) : none;
#pragma unroll
            for (int i = 0; i < READS; i++)
                sum += some[i].x * some[i].x + some[i].y * some[i].y + some[i].z * some[i].z +
                       some[i].w * some[i].w;
        }
    }
    sum = warp_sum(sum);
    if (lane == 0) *factor = p.gamma ? rsqrtf(sum * p.inverse_K + p.eps) : 1.0f;
    named_barrier(SUMMED, NORMING);
}

template <class F> __device__ __forceinline__ void load_plain(inputs<F> &in, const stream &p) {
    bool valid;
    uint4 w[F::VECTORS];
    wait_for_inputs();
#pragma unroll
    for (int v = 0; v < F::VECTORS; v++)
        w[v] = __ldcg((const uint4 *)p.in + chunk_of<F>(v, p.K, &valid));
#pragma unroll
    for (int v = 0; v < F::VECTORS; v++) {
        const uint32_t pairs[4] = {w[v].x, w[v].y, w[v].z, w[v].w};
        chunk_of<F>(v, p.K, &valid);
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

/* Every row of the block, of which there are some, against the inputs: partial[row][slice]. The sums of a stage
 * are added up while the weights of the next one are on their way from shared memory. */
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
        if (holds_sum && row < rows) partial[row * F::SLICES + slice] = sum;
    };
    int i = 0, s = 0, parity = 0;
#pragma unroll 1
    do {
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
        row += F::STAGE;
    } while (++i * F::STAGE < rows);
    store();
}

} // namespace

#endif
