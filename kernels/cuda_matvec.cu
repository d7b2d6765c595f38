/* The general product for 1 to 4 rows, bf16 and f32, on any device: each warp streams rows of W
 * past the inputs, which are in shared memory. */
#include "kernels/cuda.cuh"
#include "kernels/cuda.h"

namespace {

enum {
    /* Vectors of 16 bytes that a lane asks for at a time, of each of two rows, before it uses
     * those that it asked for before. */
    AHEAD = 4,
    PIECE = 32 * AHEAD, /* vectors of a row that a warp takes at a time: 2 KB */
    /* Inputs that stay in shared memory. More of them (T = 4 above K = 8192 in bf16) come in
     * windows, once for every round of pairs. */
    INPUT_BYTES = 64 << 10,
    /* More than half of Hopper's shared memory, so that two blocks never share a multiprocessor
     * (see cuda_matmul_few.cu). */
    ALONE_BYTES = 116 << 10
};

/* There is one block a multiprocessor, so its warps have the bytes under way: 32 KB by 8 warps, and twice
 * that while they change over. Hopper's memory needs 35 KB of it at all times, and far more only queues:
 * one row has registers for 12. */
template <int ROWS> constexpr int warps = ROWS == 1 ? 12 : 8;

/* The two rows of W that a warp takes together: neighbours; with ACTIVATE gate and up. */
struct row_pairs {
    int first, last; /* the block's pairs, which its warps take in turn */
    int step, below; /* rows from a pair to the next, from its upper row to its lower */
    int vectors;     /* of 16 bytes in a row */
};

__device__ __forceinline__ row_pairs pairs_of_block(const product &p, int vectors) {
    const bool activate = p.epilogue == EPILOGUE_ACTIVATE;
    const long long pairs = activate ? p.N / 2 : (p.N + 1LL) / 2;
    row_pairs own;
    own.first = (int)(pairs * blockIdx.x / gridDim.x);
    own.last = (int)(pairs * (blockIdx.x + 1) / gridDim.x);
    own.step = activate ? 1 : 2;
    own.below = activate ? p.N / 2 : 1;
    own.vectors = vectors;
    return own;
}

/* Where a warp reads: the vectors from this lane's on of both rows, and how many there are. */
struct pair_cursor {
    const uint4 *upper, *lower;
    int upper_left, lower_left;
};

__device__ __forceinline__ pair_cursor cursor_at(const product &p, const row_pairs &own, int pair,
                                                 int vector) {
    const int row = pair * own.step, left = pair < own.last ? own.vectors - vector : 0;
    pair_cursor at;
    at.upper = (const uint4 *)p.W + (size_t)row * own.vectors + vector;
    at.lower = at.upper + (size_t)own.below * own.vectors;
    at.upper_left = left;
    at.lower_left = row + own.below < p.N ? left : 0;
    return at;
}

/* One vector of both rows; zeros where there is none. */
__device__ __forceinline__ void load_pair(uint4 weights[2], const pair_cursor &at, int offset) {
    weights[0] = weights[1] = make_uint4(0, 0, 0, 0);
    if (offset < at.upper_left) weights[0] = __ldcs(at.upper + offset);
    if (offset < at.lower_left) weights[1] = __ldcs(at.lower + offset);
}

/* 16 bytes of m as f32. */
__device__ __forceinline__ void unpack(float x[4], uint4 v, float) {
    x[0] = __uint_as_float(v.x), x[1] = __uint_as_float(v.y);
    x[2] = __uint_as_float(v.z), x[3] = __uint_as_float(v.w);
}
__device__ __forceinline__ void unpack(float x[8], uint4 v, bf16) {
    x[0] = low_half(v.x), x[1] = high_half(v.x), x[2] = low_half(v.y), x[3] = high_half(v.y);
    x[4] = low_half(v.z), x[5] = high_half(v.z), x[6] = low_half(v.w), x[7] = high_half(v.w);
}

template <class M, int ROWS>
__device__ __forceinline__ void multiply_pair(float sums[2][ROWS], const uint4 weights[2],
                                              const uint4 *inputs, int window) {
    constexpr int ELEMENTS = 16 / sizeof(M);
    float upper[ELEMENTS], lower[ELEMENTS], x[ELEMENTS];
    unpack(upper, weights[0], M());
    unpack(lower, weights[1], M());
#pragma unroll
    for (int t = 0; t < ROWS; t++) {
        unpack(x, inputs[t * window], M());
#pragma unroll
        for (int i = 0; i < ELEMENTS; i++) {
            sums[0][t] = fmaf(upper[i], x[i], sums[0][t]);
            sums[1][t] = fmaf(lower[i], x[i], sums[1][t]);
        }
    }
}

/* staged[ROWS, window] = the inputs from vector `start` on, zeros past T and K. They were written
 * while this kernel ran already, so they come from L2. */
template <int ROWS>
__device__ __forceinline__ void stage_inputs(uint4 *staged, const product &p, int vectors,
                                             int start, int window) {
    for (int t = 0; t < ROWS; t++)
        for (int i = threadIdx.x; i < window; i += 32 * warps<ROWS>) {
            const bool inside = t < p.T && start + i < vectors;
            staged[t * window + i] =
                inside ? __ldcg((const uint4 *)p.in + (size_t)t * vectors + start + i)
                       : make_uint4(0, 0, 0, 0);
        }
}

/* Sums over the lanes; lane t ends row t of both rows of W. */
template <class M, int ROWS>
__device__ __forceinline__ void finish_pair(const product &p, const row_pairs &own,
                                            const float sums[2][ROWS], int pair, int lane) {
    float upper = 0, lower = 0;
#pragma unroll
    for (int t = 0; t < ROWS; t++) {
        const float sum_upper = warp_sum(sums[0][t]), sum_lower = warp_sum(sums[1][t]);
        if (lane == t) upper = sum_upper, lower = sum_lower;
    }
    if (lane >= p.T || pair >= own.last) return;
    const float scale = p.scale ? __ldcg(p.scale + lane) : 1;
    upper *= scale, lower *= scale;
    if (p.epilogue == EPILOGUE_ACTIVATE) {
        ((M *)p.h)[(size_t)lane * own.below + pair] =
            from_float<M>(activate(upper, p.activation == GELU_TANH) * lower);
        return;
    }
    const bool add = p.epilogue == EPILOGUE_ADD, both = 2 * pair + 1 < p.N;
    float *y = p.y + (size_t)lane * p.y_stride + 2 * pair;
    const float upper_before = add ? __ldcg(y) : 0, lower_before = add && both ? __ldcg(y + 1) : 0;
    y[0] = upper_before + upper;
    if (both) y[1] = lower_before + lower;
}

/* What      the contract of struct product, 1 to ROWS rows, any device.
 * Owners    block b the pairs [pairs b / grid, pairs (b + 1) / grid), its warps in turn.
 * Shared    staged m [ROWS, window]: the inputs, or a window of K of them.
 * Bound     bytes of W, read once by loads of 16 bytes, 4 of each of two rows ahead of use. Two
 *           rows, so that an input taken from shared memory serves both: at 4 rows 40 bytes a
 *           cycle of 128.
 * Numerics  f32 multiply-adds; a lane sums its vectors in ascending order, then the lanes are
 *           summed.
 * Order     the first weights are under way before the inputs are waited for.
 * Barriers  staged[] is written by all threads | read by all warps | overwritten by the next
 *           window. */
template <class M, int ROWS>
__global__ void __launch_bounds__(32 * warps<ROWS>, ROWS == 1 ? 1 : 2)
    matvec(product p, int window) {
    extern __shared__ uint4 staged[];
    start_dependents();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int vectors = p.K / (16 / (int)sizeof(M));
    const row_pairs own = pairs_of_block(p, vectors);
    uint4 ahead[AHEAD][2];
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
        load_pair(ahead[i], cursor_at(p, own, own.first + warp, lane), 32 * i);
    wait_for_inputs();

    for (int round = own.first; round < own.last; round += warps<ROWS>) {
        const int pair = round + warp;
        float sums[2][ROWS] = {};
        for (int start = 0; start < vectors; start += window) {
            if (round == own.first || window < vectors) {
                if (round != own.first || start > 0) __syncthreads();
                stage_inputs<ROWS>(staged, p, vectors, start, window);
                __syncthreads();
            }
            const int end = start + window < vectors ? start + window : vectors;
#pragma unroll 1
            for (int at = start; at < end; at += PIECE) {
                const bool more = at + PIECE < vectors;
                const pair_cursor next = cursor_at(p, own, more ? pair : pair + warps<ROWS>,
                                                   (more ? at + PIECE : 0) + lane);
#pragma unroll
                for (int i = 0; i < AHEAD; i++) {
                    const uint4 weights[2] = {ahead[i][0], ahead[i][1]};
                    load_pair(ahead[i], next, 32 * i);
                    if (at + 32 * i < end)
                        multiply_pair<M, ROWS>(sums, weights, staged + at - start + 32 * i + lane,
                                               window);
                }
            }
        }
        finish_pair<M, ROWS>(p, own, sums, pair, lane);
    }
}

template <class M, int ROWS> void launch_matvec(struct cuda_backend *b, const struct product *p) {
    /* Vectors of inputs in shared memory: whole pieces, or all of K, a warp's width at a time. */
    const int most = INPUT_BYTES / 16 / ROWS / PIECE * PIECE;
    const int all = (p->K / (16 / (int)sizeof(M)) + 31) / 32 * 32;
    const int window = all < most ? all : most;
    const int pairs = p->epilogue == EPILOGUE_ACTIVATE ? p->N / 2 : p->N / 2 + p->N % 2;
    const dim3 grid((unsigned)(pairs < b->multiprocessors ? pairs : b->multiprocessors));
    size_t bytes = (size_t)ROWS * window * 16;
    if (b->capability >= 90 && b->shared_bytes >= ALONE_BYTES) bytes = ALONE_BYTES;
    cuda_launch(b, "matvec", matvec<M, ROWS>, grid, 32 * warps<ROWS>, bytes, *p, window);
}

template <class M> void choose_rows(struct cuda_backend *b, const struct product *p) {
    if (p->T == 1)
        launch_matvec<M, 1>(b, p);
    else if (p->T == 2)
        launch_matvec<M, 2>(b, p);
    else
        launch_matvec<M, CUDA_MATVEC_ROWS>(b, p);
}

} // namespace

void cuda_matvec(struct cuda_backend *b, const struct product *p) {
    if (p->T < 1 || p->T > CUDA_MATVEC_ROWS || p->K % 8 || p->K < 8)
        cuda_failed(b, "cuda_matvec: 1 to 4 rows, K a multiple of 8", cudaErrorInvalidValue);
    else if (p->dtype == F32)
        choose_rows<float>(b, p);
    else
        choose_rows<bf16>(b, p);
}
