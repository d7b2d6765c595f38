/* What the kernels share on the device: numbers, warps, dependent launch, copies, tensor cores.
 * PTX names follow the PTX ISA; what each instruction does is said once, here. */
#ifndef KERNELS_CUDA_CUH
#define KERNELS_CUDA_CUH

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdint.h>

typedef __nv_bfloat16 bf16;

/* ---- numbers ---- */

/* Two bf16 in a word, the first in the low half, as f32. */
__device__ __forceinline__ float low_half(uint32_t pair) {
    return __uint_as_float(pair << 16);
}
__device__ __forceinline__ float high_half(uint32_t pair) {
    return __uint_as_float(pair & 0xffff0000u);
}
__device__ __forceinline__ uint32_t pack_halves(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t *>(&pair);
}

__device__ __forceinline__ float to_float(float x) {
    return x;
}
__device__ __forceinline__ float to_float(bf16 x) {
    return __bfloat162float(x);
}
template <class M> __device__ __forceinline__ M from_float(float x);
template <> __device__ __forceinline__ float from_float<float>(float x) {
    return x;
}
template <> __device__ __forceinline__ bf16 from_float<bf16>(float x) {
    return __float2bfloat16_rn(x);
}

/* Four neighbours at once, at a multiple of four. */
__device__ __forceinline__ float4 load_four(const float *from) {
    return *(const float4 *)from;
}
__device__ __forceinline__ float4 load_four(const bf16 *from) {
    const uint2 w = *(const uint2 *)from;
    return make_float4(low_half(w.x), high_half(w.x), low_half(w.y), high_half(w.y));
}
__device__ __forceinline__ void store_four(float *to, float4 x) {
    *(float4 *)to = x;
}
__device__ __forceinline__ void store_four(bf16 *to, float4 x) {
    *(uint2 *)to = make_uint2(pack_halves(x.x, x.y), pack_halves(x.z, x.w));
}

/* SiLU, x / (1 + e^-x), or GELU (arXiv 1606.08415) by the tanh that it is nearly: 0.5 x (1 + tanh u) =
 * x / (1 + e^-2u). */
__device__ __forceinline__ float activate(float x, bool gelu) {
    const float two_u = 1.5957691216f * (x + 0.044715f * x * x * x);
    return __fdividef(x, 1.0f + __expf(gelu ? -two_u : -x));
}

/* 2^x to 2 ulp; -inf gives 0. */
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

constexpr float LOG2_E = 1.4426950408889634f; /* e^x = 2^(x log2 e) */

/* cap tanh(x / cap), to about cap 2^-22. */
__device__ __forceinline__ float capped(float x, float cap) {
    return cap - 2.0f * cap * __fdividef(1.0f, 1.0f + exp2_fast(x * (2.0f * LOG2_E / cap)));
}

/* ---- warps ---- */

/* The sum over all lanes, in every lane, in one fixed order. */
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
        x += __shfl_xor_sync(0xffffffffu, x, distance);
    return x;
}

/* ---- dependent launch ---- */

/* Until every kernel before this one has ended and its writes are visible. Every block of every kernel
 * calls it, also one without work, before it touches anything but weights and what embed_kernel's card
 * allows. */
__device__ __forceinline__ void wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* The next kernel's blocks may start where there is room. */
__device__ __forceinline__ void start_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* ---- blocks that count ---- */

/* Counts up to last, then back to zero. Releases what this block has written, acquires what those
 * that counted before have. */
__device__ __forceinline__ unsigned count_up(unsigned *counter, unsigned last) {
    unsigned before;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(counter), "r"(last)
                 : "memory");
    return before;
}

/* ---- shared memory, asynchronous copies (sm_80) ---- */

/* L2's policy for what is read once: evicted first. */
constexpr uint64_t READ_ONCE = 0x12F0000000000000;

__device__ __forceinline__ uint32_t shared_address(const void *p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* 16 bytes from global to shared memory, past L1; zeros where valid is false (the source is not read). */
__device__ __forceinline__ void copy_async_16(uint32_t to, const void *from, bool valid) {
    const int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void copy_async_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
/* Until at most N of this thread's groups are under way. */
template <int N> __device__ __forceinline__ void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

/* ---- tensor cores (sm_80) ---- */

/* Four 8x8 matrices of bf16 from shared memory, a row's address per lane (ldmatrix). */
__device__ __forceinline__ void load_matrices(uint32_t r[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(uint32_t r[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

/* c[16, 8] += a[16, 16] b[16, 8], bf16 with f32 sums. Lane l holds of c: rows l/4 and l/4 + 8, columns
 * 2 (l%4) and the next; of a: the same rows, columns 2 (l%4), +1, then +8, +9 (a[0] row, a[1] row + 8,
 * a[2] row and columns + 8, a[3] both); of b: column l/4, rows 2 (l%4), +1 (b0) and +8, +9 (b1). */
__device__ __forceinline__ void multiply_add(float c[4], const uint32_t a[4], uint32_t b0,
                                             uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* ---- barriers of some warps ---- */

/* __syncthreads for `threads` threads, by number 1 to 15. */
__device__ __forceinline__ void named_barrier(int number, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

/* ---- mbarriers (sm_90) ---- */

__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
/* After barrier_init, in the thread that did it: the copy engine may see the barriers. */
__device__ __forceinline__ void barriers_ready() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
/* Until the phase of this parity has completed. */
__device__ __forceinline__ void barrier_wait(uint32_t barrier, int parity) {
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n"
                 "}" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
/* Arrives, and `bytes` of bulk copies count towards the phase. */
__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

/* ---- shared memory of a cluster's other blocks (sm_90) ---- */

/* The address of a block's copy of a shared variable. */
__device__ __forceinline__ uint32_t address_in(int block, uint32_t address) {
    uint32_t there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(block));
    return there;
}

/* Stores that count on the barrier of the block where they arrive. */
__device__ __forceinline__ void send(uint32_t to, float4 x, uint32_t barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], "
                 "{%1, %2, %3, %4}, [%5];" ::"r"(to),
                 "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(barrier)
                 : "memory");
}
__device__ __forceinline__ void send(uint32_t to, float2 x, uint32_t barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, "
                 "[%3];" ::"r"(to),
                 "f"(x.x), "f"(x.y), "r"(barrier)
                 : "memory");
}

/* ---- bulk copies (sm_90) ---- */

/* A multiple of 16 bytes from global to shared memory, completing on the barrier; read once, so evicted
 * from L2 first. */
__device__ __forceinline__ void copy_bulk(uint32_t to, const void *from, uint32_t bytes,
                                          uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1], %2, [%3], %4;" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier), "l"(READ_ONCE)
                 : "memory");
}

/* What this thread sees in global memory, its bulk copies see as well. */
__device__ __forceinline__ void copies_see_writes() {
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

#endif
