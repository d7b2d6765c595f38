/* The device's roof, measured when it is asked for: what --bench and the benchmarks compare with. */
#include "kernels/cuda.cuh"
#include "kernels/cuda_backend.h"

#include <algorithm>

namespace {

enum { ROOF_THREADS = 512, READS = 8, PRODUCTS = 2048, CHAINS = 8, ROUNDS = 3 };
const size_t roof_bytes = (size_t)4 << 30; /* of memory: L2 holds 1.5 % of it */

/* What      reads `count` vectors of 16 bytes once; a thread has READS of them in flight.
 * Owners    blocks take neighbouring pieces in turn. sink is written if all bits of a sum are zero, which
 *           random memory does not give: it keeps the reads. */
__global__ void __launch_bounds__(ROOF_THREADS)
    read_kernel(const uint4 *from, size_t count, uint32_t *sink) {
    const size_t stride = (size_t)gridDim.x * ROOF_THREADS * READS;
    uint32_t all = 1;
    for (size_t i = (size_t)blockIdx.x * ROOF_THREADS * READS + threadIdx.x; i < count;
         i += stride) {
        uint4 v[READS];
#pragma unroll
        for (int r = 0; r < READS; r++)
            v[r] = __ldcs(from + min(i + (size_t)r * ROOF_THREADS, count - 1));
#pragma unroll
        for (int r = 0; r < READS; r++) all |= v[r].x | v[r].y | v[r].z | v[r].w;
    }
    if (all == 0) *sink = all;
}

/* What      fills memory with numbers of all kinds: a roof over zeros would be too high. */
__global__ void __launch_bounds__(ROOF_THREADS) fill_kernel(uint32_t *to, size_t count) {
    const size_t stride = (size_t)gridDim.x * ROOF_THREADS;
    for (size_t i = (size_t)blockIdx.x * ROOF_THREADS + threadIdx.x; i < count; i += stride)
        to[i] = (uint32_t)i * 2654435761u ^ (uint32_t)(i >> 7) * 40503u;
}

/* What      CHAINS independent chains of m16n8k16 products in each warp, operands in registers: the peak of
 *           mma.sync in bf16 with f32 sums. */
__global__ void __launch_bounds__(ROOF_THREADS) multiply_kernel(float *sink) {
    float c[CHAINS][4] = {};
    uint32_t a[4], b[CHAINS][2];
    for (int i = 0; i < 4; i++) a[i] = pack_halves(0.37f * threadIdx.x - i, 1.7f * i - threadIdx.x);
    for (int i = 0; i < CHAINS; i++)
        for (int j = 0; j < 2; j++) b[i][j] = pack_halves(0.11f * i - threadIdx.x, 0.3f * j + i);
#pragma unroll 1
    for (int n = 0; n < PRODUCTS; n++)
#pragma unroll
        for (int i = 0; i < CHAINS; i++) multiply_add(c[i], a, b[i][0], b[i][1]);
    float sum = 0;
    for (int i = 0; i < CHAINS; i++) sum += c[i][0] + c[i][1] + c[i][2] + c[i][3];
    if (sum == 0.1234567f) *sink = sum;
}

/* Seconds of the fastest of ROUNDS launches of `work`. */
template <class W> double fastest(struct cuda_backend *b, W work) {
    cudaEvent_t start = NULL, end = NULL;
    float least = 0;
    CUDA_TRY(b, cudaEventCreate(&start));
    CUDA_TRY(b, cudaEventCreate(&end));
    for (int round = 0; round <= ROUNDS && !b->error.code; round++) { /* the first one warms up */
        float milliseconds = 0;
        CUDA_TRY(b, cudaEventRecord(start, b->stream));
        work();
        CUDA_TRY(b, cudaEventRecord(end, b->stream));
        CUDA_TRY(b, cudaEventSynchronize(end));
        CUDA_TRY(b, cudaEventElapsedTime(&milliseconds, start, end));
        if (round == 1 || (round > 1 && milliseconds < least)) least = milliseconds;
    }
    if (start) cudaEventDestroy(start);
    if (end) cudaEventDestroy(end);
    return least > 0 ? least * 1e-3 : 1;
}

} // namespace

/* Reading takes memory of its own, up to 4 GB of what is free, once: the model may be smaller than L2. */
void cuda_roof(struct engine *e, struct roof *roof) {
    struct cuda_backend *b = backend_of(e);
    *roof = {};
    if (b->error.code) return;
    if (!b->roof_memory) {
        b->roof_bytes = std::min(roof_bytes, cuda_free_memory(e) / 2) / 16 * 16;
        if (CUDA_TRY(b, cudaMalloc(&b->roof_memory, b->roof_bytes))) return;
        fill_kernel<<<b->multiprocessors * 4, ROOF_THREADS, 0, b->stream>>>(
            (uint32_t *)b->roof_memory, b->roof_bytes / 4);
        CUDA_TRY(b, cudaGetLastError());
    }
    uint4 *memory = (uint4 *)b->roof_memory;
    const int blocks = b->multiprocessors * 4;
    const double reading = fastest(b, [&] {
        read_kernel<<<blocks, ROOF_THREADS, 0, b->stream>>>(memory, b->roof_bytes / 16,
                                                            (uint32_t *)memory);
        CUDA_TRY(b, cudaGetLastError());
    });
    const double multiplying = fastest(b, [&] {
        multiply_kernel<<<blocks, ROOF_THREADS, 0, b->stream>>>((float *)memory);
        CUDA_TRY(b, cudaGetLastError());
    });
    roof->bytes_per_second = (double)b->roof_bytes / reading;
    roof->flops_per_second =
        2.0 * 16 * 8 * 16 * CHAINS * PRODUCTS * (ROOF_THREADS / 32) * blocks / multiplying;
}
