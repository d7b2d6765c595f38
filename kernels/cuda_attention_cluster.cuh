/* Merging within a cluster, on Hopper: the blocks of a cluster send what they found straight into each
 * other's shared memory. By way of global memory that takes 2.5 us longer, as fences and counters wait
 * behind the stream of weights. */
#ifndef KERNELS_CUDA_ATTENTION_CLUSTER_CUH
#define KERNELS_CUDA_ATTENTION_CLUSTER_CUH

#include "kernels/cuda_attention_tile.cuh"

enum { CLUSTER = 8 }; /* blocks at most: what every device grants */

/* Positions of a part: a tile for each warp at least; and what they are a multiple of. */
template <class S> constexpr int part_least = WARPS *S::tile;
enum { PART_ROUND = 64 };

/* What of four dims travels to the block that merges them. */
enum { EXCHANGED = sizeof(float4) + sizeof(float2) };

/* Shared memory for what the others send. */
static inline size_t exchange_bytes(int quads) {
    return (size_t)(quads + CLUSTER) * EXCHANGED;
}

/* ---- the cluster's barrier ---- */

/* Orders no memory but what barriers_ready made visible: the other form waits for all of a block's
 * stores. */
static __device__ __forceinline__ void cluster_arrive_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}
static __device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}
static __device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

/* ---- the exchange ---- */

/* The mbarrier on which what the others send arrives. The cluster's barrier must follow. */
static __device__ __forceinline__ void open_exchange(uint64_t *received) {
    if (threadIdx.x != 0) return;
    barrier_init(shared_address(received), 1);
    barriers_ready();
}

/* The blocks' results become the output. Four dims of a query are a quad: quad i of each part goes to
 * block i % count, which merges them in the parts' order. received: f32 [count, share, 4], then
 * [count, share, 2] of maximum and sum. parity: of the barrier's phase. */
template <class S>
static __device__ __forceinline__ void exchange(const struct cuda_attention &a,
                                                const struct work &w, const float *results,
                                                char *received, uint64_t *barrier, int parity) {
    const int quads = (w.last - w.first) * (S::D / 4), share = divide_up(quads, w.count);
    const int mine = (quads - w.index + w.count - 1) / w.count;
    float4 *values = (float4 *)received;
    float2 *sums = (float2 *)(values + w.count * share);
    auto out = [&](int quad) {
        return (bf16 *)a.out + w.at(a, w.first + quad / (S::D / 4)) + 4 * (quad % (S::D / 4));
    };
    if (threadIdx.x == 0 && w.count > 1)
        barrier_expect(shared_address(barrier), (uint32_t)(mine * w.count * EXCHANGED));
#pragma unroll 1
    for (int i = threadIdx.x; i < quads; i += THREADS) {
        const struct merged m = merge_results<S>(results, w, i / (S::D / 4), 4 * (i % (S::D / 4)));
        if (w.count == 1) {
            write_out(out(i), m);
            continue;
        }
        const int to = i % w.count, place = w.index * share + i / w.count;
        const uint32_t there = address_in(to, shared_address(barrier));
        send(address_in(to, shared_address(values + place)), m.values, there);
        send(address_in(to, shared_address(sums + place)), make_float2(m.maximum, m.sum), there);
    }
    if (w.count == 1) return;
    barrier_wait(shared_address(barrier), parity);
#pragma unroll 1
    for (int i = threadIdx.x; i < mine; i += THREADS) {
        struct merged m = {-INFINITY, 0.0f, make_float4(0.0f, 0.0f, 0.0f, 0.0f)};
        float2 of_part[CLUSTER];
#pragma unroll
        for (int part = 0; part < CLUSTER; part++) {
            const bool exists = part < w.count;
            of_part[part] = exists ? sums[part * share + i] : make_float2(-INFINITY, 0.0f);
            m.maximum = fmaxf(m.maximum, of_part[part].x);
        }
#pragma unroll
        for (int part = 0; part < CLUSTER; part++) {
            if (part >= w.count) continue;
            const float factor = weight_of(of_part[part].x, m.maximum);
            m.sum += factor * of_part[part].y;
            add_scaled(m.values, factor, values[part * share + i]);
        }
        write_out(out(i * w.count + w.index), m);
    }
}

#endif
