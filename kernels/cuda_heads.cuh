/* What becomes of a head of q or k between the product and attention: bias, norm, RoPE. */
#ifndef KERNELS_CUDA_HEADS_CUH
#define KERNELS_CUDA_HEADS_CUH

#include "kernels/cuda.cuh"
#include "kernels/cuda.h"

/* N neighbouring dims of a head: 4, or 1 where halves do not divide into fours. */
template <int N> struct dims {
    alignas(4 * N) float x[N];
    __device__ __forceinline__ void load(const float *from) {
        if constexpr (N == 4)
            store_four(x, __ldcg((const float4 *)from));
        else
            x[0] = __ldcg(from);
    }
    __device__ __forceinline__ void add(const float *from) {
        dims other;
        other.load(from);
#pragma unroll
        for (int i = 0; i < N; i++) x[i] += other.x[i];
    }
    __device__ __forceinline__ void multiply(float factor, const dims &weights) {
#pragma unroll
        for (int i = 0; i < N; i++) x[i] *= factor * weights.x[i];
    }
    __device__ __forceinline__ float squares() const {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < N; i++) sum += x[i] * x[i];
        return sum;
    }
    template <class M> __device__ __forceinline__ void store(M *to) const {
        if constexpr (N == 4)
            store_four(to, load_four(x));
        else
            to[0] = from_float<M>(x[0]);
    }
};

/* Dims that a thread has together: those that turn, half a turn apart; of the others neighbours. */
template <int N> struct pair_of_dims {
    int first, second;
    bool exists, turns;
    __device__ __forceinline__ pair_of_dims(int D, int half, int pair) {
        turns = pair * N < half;
        exists = pair * N < D / 2;
        first = turns ? pair * N : 2 * pair * N;
        second = turns ? first + half : first + N;
    }
};

/* A head of which a thread has every `lanes`-th pair, ROUNDS of them. */
template <int N, int ROUNDS> struct head_of_lanes {
    dims<N> low[ROUNDS], high[ROUNDS]; /* first and second of a pair */
    dims<N> weight_low[ROUNDS], weight_high[ROUNDS], cosine[ROUNDS], sine[ROUNDS];
    int D, half, lane, lanes;
    __device__ __forceinline__ head_of_lanes(int D, int half, int lane, int lanes)
        : D(D), half(half), lane(lane), lanes(lanes) {}

    template <class F> __device__ __forceinline__ void each(F of_pair) {
#pragma unroll
        for (int i = 0; i < ROUNDS; i++) {
            const pair_of_dims<N> pair(D, half, lane + i * lanes);
            if (pair.exists) of_pair(i, pair);
        }
    }
    /* The norm's weights f32 [D]. */
    __device__ __forceinline__ void load_weights(const float *weights) {
        each([&](int i, const pair_of_dims<N> &pair) {
            weight_low[i].load(weights + pair.first);
            weight_high[i].load(weights + pair.second);
        });
    }
    /* The head f32 [D], and where they are not NULL cosines and sines f32 [2, half], all at once. */
    __device__ __forceinline__ void load(const float *from, const float *turns) {
        each([&](int i, const pair_of_dims<N> &pair) {
            low[i].load(from + pair.first);
            high[i].load(from + pair.second);
            if (turns && pair.turns) cosine[i].load(turns + pair.first);
            if (turns && pair.turns) sine[i].load(turns + pair.second);
        });
    }
    __device__ __forceinline__ void add(const float *bias) {
        each([&](int i, const pair_of_dims<N> &pair) {
            low[i].add(bias + pair.first);
            high[i].add(bias + pair.second);
        });
    }
    /* The factor of RMSNorm (arXiv 1910.07467), 1 / sqrt(mean(x^2) + eps); by all lanes. */
    __device__ __forceinline__ float factor(bool some, float eps) {
        float sum = 0;
        if (some)
            each([&](int i, const pair_of_dims<N> &) {
                sum += low[i].squares() + high[i].squares();
            });
        for (int distance = lanes / 2; distance > 0; distance /= 2)
            sum += __shfl_xor_sync(0xffffffffu, sum, distance);
        return rsqrtf(sum / (float)D + eps);
    }
    __device__ __forceinline__ void normalise(float factor) {
        each([&](int i, const pair_of_dims<N> &) {
            low[i].multiply(factor, weight_low[i]);
            high[i].multiply(factor, weight_high[i]);
        });
    }
    /* RoPE (arXiv 2104.09864). */
    __device__ __forceinline__ void turn() {
        each([&](int i, const pair_of_dims<N> &pair) {
            if (!pair.turns) return;
#pragma unroll
            for (int k = 0; k < N; k++) {
                const float x = low[i].x[k], y = high[i].x[k];
                low[i].x[k] = x * cosine[i].x[k] - y * sine[i].x[k];
                high[i].x[k] = y * cosine[i].x[k] + x * sine[i].x[k];
            }
        });
    }
    template <class M> __device__ __forceinline__ void store(M *to) {
        each([&](int i, const pair_of_dims<N> &pair) {
            low[i].store(to + pair.first);
            high[i].store(to + pair.second);
        });
    }
};

#endif
