/* What surrounds the products of few rows (cuda_matmul_few.cu): the factor that a norm before them
 * left over, and what follows them: residual and the next norm's first half, activation, RoPE and
 * the cache.
 *
 * A norm (RMSNorm, arXiv 1910.07467) has no kernel here. Whoever writes x also writes x gamma,
 * rounded, and a part of the sum of x^2 from each of its blocks; the next product adds the parts up
 * beside its stream of weights. One buffer does for both: a kernel writes nothing before the one in
 * front of it has ended, and between two projections there is always the product that reads (qkv,
 * gate and up). */
#ifndef KERNELS_CUDA_MATMUL_FEW_CUH
#define KERNELS_CUDA_MATMUL_FEW_CUH

#include "kernels/cuda.h"
#include "kernels/cuda_wgmma.cuh"

namespace {

enum { FEW_CONSUMERS = 128 }; /* threads: a warpgroup */

/* Rows of W of an octet of pairs (QKV): 8 dimensions of a head and the 8 that turn with them, so
 * that a thread has both sums of a pair. */
enum { PAIRED = 16 };

/* A head past all: of warps that a tile has no head for. */
enum { NO_HEAD = 1 << 30 };

/* What the threads of a block share of the rows of the step. */
template <int ROWS> struct row_facts {
    float scale[ROWS];  /* the norm's factor */
    size_t place[ROWS]; /* QKV: of the row's position, in elements of a cache */
    float squares[FEW_CONSUMERS / 32][ROWS]; /* ADD: sums over a warp's units */
};

/* The facts of the rows, by one warp, while the others wait for W. Slots and positions may be read before the
 * wait (embed_kernel). */
template <int ROWS, enum epilogue E>
__device__ __forceinline__ void gather_facts(const product &p, row_facts<ROWS> &facts) {
    constexpr int ACROSS = ROWS < 32 ? ROWS : 32; /* rows side by side */
    constexpr int LANES = 32 / ACROSS;            /* of a row, which share its parts */
    /* Loads under way together, each round taking 0.6 us: 132 parts by the 4 lanes of 8 rows. */
    constexpr int BATCH = 34;
    const int lane = (int)threadIdx.x % 32;
    if constexpr (E == EPILOGUE_QKV)
        for (int row = lane; row < p.T; row += 32) {
            const heads &h = p.heads;
            const size_t slot = (size_t)__ldcg(h.slots + row) * h.G * h.R;
            facts.place[row] = (slot + (size_t)place_in_ring(__ldcg(h.positions + row), h.R)) * h.D;
        }
    const size_t step = (size_t)LANES * (size_t)p.squares_stride; /* between a lane's parts */
#pragma unroll 1
    for (int row = lane % ACROSS; row < ROWS; row += ACROSS) {
        const bool valid = row < p.T;
        const float *from = p.squares + (size_t)(lane / ACROSS) * (size_t)p.squares_stride + row;
        int left = valid ? p.parts - lane / ACROSS : 0;
        float sum = 0, scale = 1;
        wait_for_inputs(); /* after the first row's addresses; a second time it is over at once */
#pragma unroll 1
        for (; left > 0; left -= BATCH * LANES, from += BATCH * step) {
            float part[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; i++)
                part[i] = i * LANES < left ? __ldcg(from + i * step) : 0.0f;
#pragma unroll
            for (int i = 4; i < BATCH; i++) part[i % 4] += part[i];
            sum += (part[0] + part[1]) + (part[2] + part[3]);
        }
#pragma unroll
        for (int distance = ACROSS; distance < 32; distance *= 2)
            sum += __shfl_xor_sync(0xffffffffu, sum, distance);
        if (p.squares)
            scale = rsqrtf(sum / (float)p.K + p.eps);
        else if (p.scale && valid)
            scale = __ldcg(p.scale + row);
        if (lane < ACROSS) facts.scale[row] = scale;
    }
}

/* ---- results ----
 *
 * Result i of a thread: row t + i / 4 * 8 + i % 2, unit n or n + 8 as i / 2 % 2 says. */
__device__ __forceinline__ int row_of_result(int t, int i) {
    return t + i / 4 * 8 + i % 2;
}

/* ADD: the next norm's weights, and what a thread's results are added to: load() goes between the wait and the
 * tile's products. */
template <int ROWS> struct residual {
    float gamma[2], y[ROWS / 2];
    __device__ __forceinline__ residual(const product &p, int n, int last) {
#pragma unroll
        for (int half = 0; half < 2; half++)
            gamma[half] = p.gamma && n + 8 * half < last ? __ldcg(p.gamma + n + 8 * half) : 0.0f;
    }
    __device__ __forceinline__ void load(const product &p, int t, int n, int last) {
#pragma unroll
        for (int i = 0; i < ROWS / 2; i++) {
            const int row = row_of_result(t, i), unit = n + i / 2 % 2 * 8;
            y[i] = row < p.T && unit < last ? __ldcg(p.y + (size_t)row * p.y_stride + unit) : 0.0f;
        }
    }
};

/* QKV: the two dimensions of a head that a thread has: pair `index` of an octet. The first octets
 * are of dimensions that turn, `half` apart; then follow neighbouring ones, 8 apart. */
struct pair_of_head {
    int head, first, second;
    bool exists, turn;
    __device__ __forceinline__ pair_of_head(const heads &h, int octet, int head, int index)
        : head(head) {
        const bool apart = 8 * octet < h.half;
        first = octet * (apart ? 8 : (int)PAIRED) + index;
        second = first + (apart ? h.half : 8);
        exists = head < h.H + 2 * h.G;
        turn = apart && head < h.H + h.G && h.rope;
    }
};

/* QKV: the bias of the thread's pair, and the rows' cosines and sines: load() goes between the wait and the
 * tile's products. */
template <int ROWS> struct turns {
    float bias[2], cosine[ROWS / 4], sine[ROWS / 4];
    __device__ __forceinline__ turns(const product &p, const pair_of_head &pair) {
        const float *const biases = p.heads.bias + (size_t)pair.head * p.heads.D;
        const bool biased = p.heads.bias && pair.exists;
        bias[0] = biased ? __ldcg(biases + pair.first) : 0.0f;
        bias[1] = biased ? __ldcg(biases + pair.second) : 0.0f;
    }
    __device__ __forceinline__ void load(const product &p, int t, const pair_of_head &pair) {
        const int half = p.heads.half;
#pragma unroll
        for (int i = 0; i < ROWS / 4; i++) {
            const int row = row_of_result(t, 2 * i - i % 2);
            const float *from = p.heads.rope + (size_t)row * 2 * half + pair.first;
            const bool valid = pair.turn && row < p.T;
            cosine[i] = valid ? __ldcg(from) : 1.0f;
            sine[i] = valid ? __ldcg(from + half) : 0.0f;
        }
    }
};

/* y += s, and of the norm that follows y gamma and the thread's sums of squares: squares[i] is the
 * row of result 2 i - i % 2. */
template <int ROWS>
__device__ __forceinline__ void finish_add(const product &p, const float (&sums)[2][ROWS / 2],
                                           const residual<ROWS> &before,
                                           const row_facts<ROWS> &facts, float (&squares)[ROWS / 4],
                                           int t, int n, int last) {
#pragma unroll
    for (int i = 0; i < ROWS / 2; i++) {
        const int row = row_of_result(t, i), unit = n + i / 2 % 2 * 8;
        if (row >= p.T || unit >= last) continue;
        const float y = before.y[i] + facts.scale[row] * (sums[0][i] + sums[1][i]);
        p.y[(size_t)row * p.y_stride + unit] = y;
        if (!p.gamma) continue;
        ((bf16 *)p.next)[(size_t)row * p.N + unit] = from_float<bf16>(y * before.gamma[i / 2 % 2]);
        squares[i / 4 * 2 + i % 2] += y * y;
    }
}

/* q, or k and v into the cache. */
template <int ROWS>
__device__ __forceinline__ void finish_heads(const product &p, const float (&sums)[2][ROWS / 2],
                                             const turns<ROWS> &turns, const row_facts<ROWS> &facts,
                                             int t, const pair_of_head &pair) {
    const heads &h = p.heads;
    const bool query = pair.head < h.H, value = pair.head >= h.H + h.G;
    const int g = pair.head - h.H - (value ? h.G : 0); /* of what is no query */
    bf16 *const to = query ? (bf16 *)h.q + (size_t)pair.head * h.D
                           : (bf16 *)(value ? h.values : h.keys) + (size_t)g * h.R * h.D;
#pragma unroll
    for (int i = 0; i < ROWS / 4; i++) {
        const int result = 2 * i - i % 2, row = row_of_result(t, result);
        if (row >= p.T || !pair.exists) continue;
        float a = facts.scale[row] * (sums[0][result] + sums[1][result]) + turns.bias[0];
        float b = facts.scale[row] * (sums[0][result + 2] + sums[1][result + 2]) + turns.bias[1];
        if (pair.turn) {
            const float low = a;
            a = low * turns.cosine[i] - b * turns.sine[i];
            b = b * turns.cosine[i] + low * turns.sine[i];
        }
        bf16 *const at = to + (query ? (size_t)row * h.H * h.D : facts.place[row]);
        at[pair.first] = from_float<bf16>(a);
        at[pair.second] = from_float<bf16>(b);
    }
}

/* y = s, or h = act(gate) up. */
template <int ROWS, enum epilogue E>
__device__ __forceinline__ void finish_plain(const product &p, const float (&sums)[2][ROWS / 2],
                                             const row_facts<ROWS> &facts, int t, int n, int last) {
#pragma unroll
    for (int i = 0; i < ROWS / 2; i++) {
        const int row = row_of_result(t, i), unit = n + i / 2 % 2 * 8;
        if (row >= p.T || unit >= last) continue;
        const float scale = facts.scale[row];
        if (E == EPILOGUE_ACTIVATE)
            ((bf16 *)p.h)[(size_t)row * (p.N / 2) + unit] = from_float<bf16>(
                activate(scale * sums[0][i], p.activation == GELU_TANH) * (scale * sums[1][i]));
        else
            p.y[(size_t)row * p.y_stride + unit] = scale * (sums[0][i] + sums[1][i]);
    }
}

/* The block's part of the rows' sums of squares: over the lanes that have units of the same rows,
 * then over the warps. Barrier 1: facts.squares is written by each warp | read by a thread a
 * row. */
template <int ROWS>
__device__ __forceinline__ void leave_squares(const product &p, float (&squares)[ROWS / 4],
                                              row_facts<ROWS> &facts) {
    const int thread = (int)threadIdx.x, lane = thread % 32;
#pragma unroll
    for (int i = 0; i < ROWS / 4; i++) {
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2)
            squares[i] += __shfl_xor_sync(0xffffffffu, squares[i], distance);
        if (lane < 4)
            facts.squares[thread / 32][row_of_result(2 * lane, 2 * i - i % 2)] = squares[i];
    }
    named_barrier(1, FEW_CONSUMERS);
    if (thread >= p.T) return;
    float sum = 0;
    for (const float(&of_warp)[ROWS] : facts.squares) sum += of_warp[thread];
    p.next_squares[(size_t)blockIdx.x * p.squares_stride + thread] = sum;
}

} // namespace

#endif
