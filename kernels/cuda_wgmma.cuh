/* What only sm_90a has, for kernels built on it: the tensor cores' asynchronous products (wgmma),
 * copies by tensor maps (cuda_tensor_map.h), clusters, and registers that warpgroups give each
 * other. A warpgroup is four neighbouring warps, the first a multiple of four. PTX names follow the
 * PTX ISA. */
#ifndef KERNELS_CUDA_WGMMA_CUH
#define KERNELS_CUDA_WGMMA_CUH

#include "kernels/cuda.cuh"

#include <cuda.h>

/* ---- operands in shared memory ---- */

/* A panel: rows of 64 bf16, 128 bytes each, as a tensor map with a box of 64 leaves them: chunk c
 * of 16 bytes of row r at c ^ (r mod 8). Panels start at multiples of 1024 bytes. */
constexpr int PANEL_DEPTH = 64, PANEL_ROW_BYTES = 128, PANEL_ALIGNMENT = 1024;

/* The first place for a panel from here on: a block's shared memory is aligned to less. */
__device__ __forceinline__ uint32_t panel_aligned(uint32_t address) {
    return (address + PANEL_ALIGNMENT - 1) / PANEL_ALIGNMENT * PANEL_ALIGNMENT;
}

/* wgmma's description of a panel. Its low bits are the address by 16, so a later row or column of
 * the same operand is an addition: 16 columns are WGMMA_COLUMNS_16, 8 rows WGMMA_ROWS_8.
 * next: bytes to the next panel of an operand whose rows are longer than one; only a transposed B
 * wider than 64 reads it. */
constexpr uint64_t WGMMA_COLUMNS_16 = 32 >> 4, WGMMA_ROWS_8 = 1024 >> 4;

__device__ __forceinline__ uint64_t wgmma_panel(uint32_t address, uint32_t next = 16) {
    constexpr uint64_t ROWS_8_APART = WGMMA_ROWS_8 << 32, SWIZZLE_128 = 1ull << 62;
    return SWIZZLE_128 | ROWS_8_APART | (uint64_t)(next >> 4) << 16 | (address & 0x3ffff) >> 4;
}

/* Four 8x8 matrices of bf16 to shared memory, a row's address per lane (stmatrix). */
__device__ __forceinline__ void store_matrices(uint32_t address, uint32_t r0, uint32_t r1,
                                               uint32_t r2, uint32_t r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address),
                 "r"(r0), "r"(r1), "r"(r2), "r"(r3)
                 : "memory");
}

/* ---- wgmma: sums[64, N] (+)= A[64, 16] B[N, 16]^T, bf16 with f32 sums ----
 *
 * Lane l of warp w of the warpgroup holds two rows, 16 w + l / 4 and that + 8, and of each 8
 * columns two, from 8 j + 2 (l % 4) on: sums[4 j + 0, 1] of the upper row, sums[4 j + 2, 3] of the
 * lower one. Order of calls: wgmma_fence, products, wgmma_commit; wgmma_wait; settle. Registers and
 * shared memory of a product must not be touched in between. */

/* What threads wrote to sums (or to A in registers) comes before the products. */
__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/* Until at most N committed groups are under way. */
template <int N> __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
/* Keeps the compiler from reading sums before the wait in front of this. */
template <int N> __device__ __forceinline__ void settle(float (&sums)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(sums[i])::"memory");
}

/* Operand text and constraints for 4 and for 8 i sums. */
#define WGMMA_TEXT_4   "%0,%1,%2,%3"
#define WGMMA_TEXT_8   WGMMA_TEXT_4 ",%4,%5,%6,%7"
#define WGMMA_TEXT_16  WGMMA_TEXT_8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define WGMMA_TEXT_24  WGMMA_TEXT_16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define WGMMA_TEXT_32  WGMMA_TEXT_24 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define WGMMA_TEXT_40  WGMMA_TEXT_32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define WGMMA_TEXT_48  WGMMA_TEXT_40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define WGMMA_TEXT_56  WGMMA_TEXT_48 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define WGMMA_TEXT_64  WGMMA_TEXT_56 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define WGMMA_TEXT_72  WGMMA_TEXT_64 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define WGMMA_TEXT_80  WGMMA_TEXT_72 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define WGMMA_TEXT_88  WGMMA_TEXT_80 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define WGMMA_TEXT_96  WGMMA_TEXT_88 ",%88,%89,%90,%91,%92,%93,%94,%95"
#define WGMMA_TEXT_104 WGMMA_TEXT_96 ",%96,%97,%98,%99,%100,%101,%102,%103"
#define WGMMA_TEXT_112 WGMMA_TEXT_104 ",%104,%105,%106,%107,%108,%109,%110,%111"
#define WGMMA_TEXT_120 WGMMA_TEXT_112 ",%112,%113,%114,%115,%116,%117,%118,%119"
#define WGMMA_TEXT_128 WGMMA_TEXT_120 ",%120,%121,%122,%123,%124,%125,%126,%127"

#define WGMMA_FOUR(i)  "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3])
#define WGMMA_SUMS_4   WGMMA_FOUR(0)
#define WGMMA_SUMS_8   WGMMA_SUMS_4, WGMMA_FOUR(4)
#define WGMMA_SUMS_16  WGMMA_SUMS_8, WGMMA_FOUR(8), WGMMA_FOUR(12)
#define WGMMA_SUMS_24  WGMMA_SUMS_16, WGMMA_FOUR(16), WGMMA_FOUR(20)
#define WGMMA_SUMS_32  WGMMA_SUMS_24, WGMMA_FOUR(24), WGMMA_FOUR(28)
#define WGMMA_SUMS_40  WGMMA_SUMS_32, WGMMA_FOUR(32), WGMMA_FOUR(36)
#define WGMMA_SUMS_48  WGMMA_SUMS_40, WGMMA_FOUR(40), WGMMA_FOUR(44)
#define WGMMA_SUMS_56  WGMMA_SUMS_48, WGMMA_FOUR(48), WGMMA_FOUR(52)
#define WGMMA_SUMS_64  WGMMA_SUMS_56, WGMMA_FOUR(56), WGMMA_FOUR(60)
#define WGMMA_SUMS_72  WGMMA_SUMS_64, WGMMA_FOUR(64), WGMMA_FOUR(68)
#define WGMMA_SUMS_80  WGMMA_SUMS_72, WGMMA_FOUR(72), WGMMA_FOUR(76)
#define WGMMA_SUMS_88  WGMMA_SUMS_80, WGMMA_FOUR(80), WGMMA_FOUR(84)
#define WGMMA_SUMS_96  WGMMA_SUMS_88, WGMMA_FOUR(88), WGMMA_FOUR(92)
#define WGMMA_SUMS_104 WGMMA_SUMS_96, WGMMA_FOUR(96), WGMMA_FOUR(100)
#define WGMMA_SUMS_112 WGMMA_SUMS_104, WGMMA_FOUR(104), WGMMA_FOUR(108)
#define WGMMA_SUMS_120 WGMMA_SUMS_112, WGMMA_FOUR(112), WGMMA_FOUR(116)
#define WGMMA_SUMS_128 WGMMA_SUMS_120, WGMMA_FOUR(120), WGMMA_FOUR(124)

/* A and B in shared memory, K contiguous in both. keep 0: sums = the product. */
template <int N>
__device__ __forceinline__ void wgmma(float (&sums)[N / 2], uint64_t A, uint64_t B, int keep);
/* A in registers, as multiply_add (cuda.cuh) has it for this warp's 16 rows; B[16, N] in shared
 * memory, N contiguous: the transposed form. */
template <int N>
__device__ __forceinline__ void wgmma_transposed(float (&sums)[N / 2], const uint32_t *A,
                                                 uint64_t B, int keep);

/* HALF: N / 2, the number of sums; P0 to P5: the numbers of the operands after them. One line for
 * every width in use. */
#define WGMMA_SHARED(N, HALF, P0, P1, P2)                                                          \
    template <>                                                                                    \
    __device__ __forceinline__ void wgmma<N>(float(&sums)[HALF], uint64_t A, uint64_t B,           \
                                             int keep) {                                           \
        asm volatile("{\n"                                                                         \
                     ".reg .pred keep;\n"                                                          \
                     "setp.ne.b32 keep, %" #P2 ", 0;\n"                                            \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 "                   \
                     "{" WGMMA_TEXT_##HALF "}, %" #P0 ", %" #P1 ", keep, 1, 1, 0, 0;\n"            \
                                           "}"                                                     \
                     : WGMMA_SUMS_##HALF                                                           \
                     : "l"(A), "l"(B), "r"(keep));                                                 \
    }
#define WGMMA_REGISTERS(N, HALF, P0, P1, P2, P3, P4, P5)                                           \
    template <>                                                                                    \
    __device__ __forceinline__ void wgmma_transposed<N>(float(&sums)[HALF], const uint32_t *A,     \
                                                        uint64_t B, int keep) {                    \
        asm volatile("{\n"                                                                         \
                     ".reg .pred keep;\n"                                                          \
                     "setp.ne.b32 keep, %" #P5 ", 0;\n"                                            \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 "                   \
                     "{" WGMMA_TEXT_##HALF "}, {%" #P0 ",%" #P1 ",%" #P2 ",%" #P3 "}, %" #P4       \
                                           ", keep, 1, 1, 1;\n"                                    \
                                           "}"                                                     \
                     : WGMMA_SUMS_##HALF                                                           \
                     : "r"(A[0]), "r"(A[1]), "r"(A[2]), "r"(A[3]), "l"(B), "r"(keep));             \
    }
WGMMA_SHARED(8, 4, 4, 5, 6)
WGMMA_SHARED(16, 8, 8, 9, 10)
WGMMA_SHARED(32, 16, 16, 17, 18)
WGMMA_SHARED(64, 32, 32, 33, 34)
WGMMA_SHARED(96, 48, 48, 49, 50)
WGMMA_SHARED(128, 64, 64, 65, 66)
WGMMA_SHARED(176, 88, 88, 89, 90)
WGMMA_SHARED(192, 96, 96, 97, 98)
WGMMA_SHARED(224, 112, 112, 113, 114)
WGMMA_SHARED(256, 128, 128, 129, 130)
WGMMA_REGISTERS(64, 32, 32, 33, 34, 35, 36, 37)
WGMMA_REGISTERS(80, 40, 40, 41, 42, 43, 44, 45)
WGMMA_REGISTERS(96, 48, 48, 49, 50, 51, 52, 53)
WGMMA_REGISTERS(128, 64, 64, 65, 66, 67, 68, 69)
WGMMA_REGISTERS(256, 128, 128, 129, 130, 131, 132, 133)

/* ---- copies by tensor maps, into shared memory ----
 *
 * One thread asks; the barrier counts the whole box's bytes. x, y, z, ..: the first element of the
 * box, the contiguous dimension first. What lies outside of the tensor arrives as zeros. policy:
 * L2's, READ_ONCE (cuda.cuh) or these. */

constexpr uint64_t READ_NORMALLY = 0x1000000000000000, READ_AGAIN = 0x14F0000000000000;

__device__ __forceinline__ void prefetch_map(const CUtensorMap *map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap *map, uint32_t barrier,
                                         uint64_t policy, int x, int y) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".L2::cache_hint [%0], [%1, {%4, %5}], [%2], %3;" ::"r"(to),
                 "l"(map), "r"(barrier), "l"(policy), "r"(x), "r"(y)
                 : "memory");
}
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap *map, uint32_t barrier,
                                         uint64_t policy, int x, int y, int z) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".L2::cache_hint [%0], [%1, {%4, %5, %6}], [%2], %3;" ::"r"(to),
                 "l"(map), "r"(barrier), "l"(policy), "r"(x), "r"(y), "r"(z)
                 : "memory");
}
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap *map, uint32_t barrier,
                                         uint64_t policy, int x, int y, int z, int w) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".L2::cache_hint [%0], [%1, {%4, %5, %6, %7}], [%2], %3;" ::"r"(to),
                 "l"(map), "r"(barrier), "l"(policy), "r"(x), "r"(y), "r"(z), "r"(w)
                 : "memory");
}
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap *map, uint32_t barrier,
                                         uint64_t policy, int x, int y, int z, int w, int v) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".L2::cache_hint [%0], [%1, {%4, %5, %6, %7, %8}], [%2], %3;" ::"r"(to),
                 "l"(map), "r"(barrier), "l"(policy), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v)
                 : "memory");
}
/* copy_box to the same place of each block of the cluster in `blocks`, a bit each, where the
 * barrier of the same address counts. */
__device__ __forceinline__ void copy_box_to(uint32_t to, const CUtensorMap *map, uint32_t barrier,
                                            uint64_t policy, uint16_t blocks, int x, int y) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".multicast::cluster.L2::cache_hint [%0], [%1, {%5, %6}], [%2], %4, %3;" ::"r"(to),
                 "l"(map), "r"(barrier), "l"(policy), "h"(blocks), "r"(x), "r"(y)
                 : "memory");
}
__device__ __forceinline__ void copy_box_to(uint32_t to, const CUtensorMap *map, uint32_t barrier,
                                            uint64_t policy, uint16_t blocks, int x, int y, int z) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".multicast::cluster.L2::cache_hint [%0], [%1, {%5, %6, %7}], [%2], %4, "
                 "%3;" ::"r"(to),
                 "l"(map), "r"(barrier), "l"(policy), "h"(blocks), "r"(x), "r"(y), "r"(z)
                 : "memory");
}
__device__ __forceinline__ void copy_box_to(uint32_t to, const CUtensorMap *map, uint32_t barrier,
                                            uint64_t policy, uint16_t blocks, int x, int y, int z,
                                            int w, int v) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".multicast::cluster.L2::cache_hint [%0], [%1, {%5, %6, %7, %8, %9}], [%2], %4, "
                 "%3;" ::"r"(to),
                 "l"(map), "r"(barrier), "l"(policy), "h"(blocks), "r"(x), "r"(y), "r"(z), "r"(w),
                 "r"(v)
                 : "memory");
}

/* ---- copies by tensor maps, out of shared memory ---- */

/* What this thread wrote to shared memory comes before what copy engine and tensor cores do with
 * it. */
__device__ __forceinline__ void fence_for_copies() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
/* A box to global memory; what lies outside of the tensor is not written. The thread that asks
 * commits, and waits: until its boxes are read, or written. */
__device__ __forceinline__ void store_box(const CUtensorMap *map, uint32_t from, int x, int y,
                                          int z, int w) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], "
                 "[%1];" ::"l"(map),
                 "r"(from), "r"(x), "r"(y), "r"(z), "r"(w)
                 : "memory");
}
__device__ __forceinline__ void commit_boxes() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
__device__ __forceinline__ void wait_for_boxes_read() {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
__device__ __forceinline__ void wait_for_boxes_written() {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

/* ---- clusters ---- */

__device__ __forceinline__ int cluster_rank() {
    int rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
/* __syncthreads for all blocks of the cluster. Relaxed: it orders no memory but what barriers_ready
 * made visible, and spares the GPU-wide fence of the other form. */
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\n"
                 "barrier.cluster.wait.aligned;" ::
                     : "memory");
}
/* barrier_arrive at the same address in another block of the cluster. Relaxed: for a stage that was
 * only read, by products that wgmma_wait has seen end; the release form is a GPU-wide fence each time
 * (1.6 to 2 times slower products). */
__device__ __forceinline__ void barrier_arrive_at(uint32_t barrier, int rank) {
    asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(
                     address_in(rank, barrier))
                 : "memory");
}

/* ---- registers ---- */

/* All warps of a warpgroup: N registers a thread from now on, which others must have given back. */
template <int N> __device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> __device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

/* ---- warpgroups that wait for each other ---- */

/* The other half of named_barrier (cuda.cuh): counts towards it and goes on. */
__device__ __forceinline__ void named_arrive(int number, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

#endif
