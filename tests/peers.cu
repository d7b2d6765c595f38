/* Ours and cuBLAS as C functions of device pointers and a stream, for tests/bench_peers.py. They only
 * launch, so they may be captured into a graph. What is negative has failed, and peers_error() says why.
 * cuBLAS is loaded while running: a machine without it still has the rest. */
#include "kernels/cuda.h"

#include <cstdio>
#include <cublasLt.h>
#include <dlfcn.h>

static struct cuda_backend backend;
static char failure[256];

static int failed(const char *call, const char *why) {
    snprintf(failure, sizeof failure, "%s: %s", call, why);
    return -1;
}

/* ---- what cuda_device.cu gives to launches in the engine ---- */

bool cuda_failed(struct cuda_backend *b, const char *call, cudaError_t status) {
    if (status != cudaSuccess && !b->error.code) {
        b->error.code = EXIT_DEVICE;
        failed(call, cudaGetErrorString(status));
    }
    return b->error.code != 0;
}

void cuda_launch_failed(struct cuda_backend *b, const char *kernel, dim3, int, size_t,
                        cudaError_t status) {
    cuda_failed(b, kernel, status);
}

/* The failure since the last call is reported, and does not stay. */
static int outcome() {
    const int result = backend.error.code ? -1 : 0;
    backend.error.code = 0;
    if (result) cudaGetLastError();
    return result;
}

/* ---- ours ---- */

extern "C" const char *peers_error() {
    return failure;
}

/* The first device, in the context that the process has there. */
extern "C" int peers_open() {
    cudaDeviceProp device = {};
    if (CUDA_TRY(&backend, cudaSetDevice(0)) || CUDA_TRY(&backend, cudaFree(NULL)) ||
        CUDA_TRY(&backend, cudaGetDeviceProperties(&device, 0)))
        return outcome();
    backend.multiprocessors = device.multiProcessorCount;
    backend.capability = device.major * 10 + device.minor;
    backend.shared_bytes = (int)device.sharedMemPerBlockOptin;
    if (backend.capability != 90) return failed("wgmma", "compute capability 9.0 alone has it");
    return outcome();
}

/* From now on the kernels of the general path, or not. They have no QKV and no gamma. */
extern "C" int peers_general(int on) {
    backend.general = on;
    return 0;
}

/* The epilogues of struct product, as a step of the engine has them. in: T rows, and memory up to whole
 * CUDA_TILE_ROWS. out: STORE and ADD f32 [T, N], ACTIVATE bf16 [T, N/2], QKV bf16 [T, H, D] of q, [G, T,
 * D] of keys and as much of values, one after the other. ADD: gamma f32 [N], next bf16 [T, N], squares f32 [max(256, N/64 + 2), max(T, 64)]. QKV:
 * slots (zeros) and positions (0 to T - 1) i32 [T], rope f32 [T, 2, D/2]. */
extern "C" int peers_product(cudaStream_t stream, int epilogue, int T, int N, int K, const void *in,
                             const void *W, void *out, const float *gamma, void *next,
                             float *squares, int H, int G, int D, const int32_t *slots,
                             const int32_t *positions, const float *rope) {
    struct product p = {};
    p.epilogue = (enum epilogue)epilogue;
    p.dtype = BF16;
    p.T = T;
    p.N = N;
    p.K = K;
    p.W = W;
    p.in = in;
    p.in_rows = divide_up(T, (int)CUDA_TILE_ROWS) * CUDA_TILE_ROWS;
    p.y = (float *)out;
    p.y_stride = N;
    p.h = out;
    p.gamma = gamma;
    p.next = next;
    p.next_squares = squares;
    p.squares_stride = cuda_squares_stride(T);
    __nv_bfloat16 *const keys = (__nv_bfloat16 *)out + (size_t)T * H * D;
    __nv_bfloat16 *const values = keys + (size_t)G * T * D;
    p.heads = {out,  keys, values, slots, positions, NULL, NULL, NULL,
               NULL, rope, H,      G,     D,         T,    D / 2};
    if (backend.general ? p.epilogue == EPILOGUE_QKV || p.gamma : !cuda_matmul_hopper_takes(&p))
        return failed("product", "not of this shape");
    backend.stream = stream;
    if (backend.general)
        cuda_matmul(&backend, &p);
    else
        cuda_matmul_hopper(&backend, &p);
    return outcome();
}

/* q, out bf16 [T, H, D]; keys, values bf16 [slots, G, S, D]; slots, positions i32 [T]; counters u32
 * [CUDA_COUNTERS], zero. */
extern "C" int peers_attention(cudaStream_t stream, int T, int H, int G, int D, int S, float scale,
                               const void *q, const void *keys, const void *values,
                               const int32_t *slots, const int32_t *positions, unsigned *counters,
                               void *out) {
    struct cuda_attention a = {};
    a.q = q;
    a.out = out;
    a.keys = keys;
    a.values = values;
    a.slots = slots;
    a.positions = positions;
    a.counters = counters;
    a.T = T;
    a.H = H;
    a.G = G;
    a.D = D;
    a.R = S;
    a.window = ALL_POSITIONS;
    a.scale = scale;
    if (!backend.general && !cuda_attention_hopper_takes(&a))
        return failed("attention", "not of this shape");
    backend.stream = stream;
    if (backend.general)
        cuda_attention_prefill(&backend, &a);
    else
        cuda_attention_hopper(&backend, &a);
    return outcome();
}

/* ---- cuBLAS ---- */

#define CUBLAS_FUNCTIONS(X)                                                                        \
    X(cublasLtGetVersion)                                                                          \
    X(cublasLtCreate)                                                                              \
    X(cublasLtMatmulDescCreate)                                                                    \
    X(cublasLtMatmulDescSetAttribute)                                                              \
    X(cublasLtMatmulPreferenceCreate)                                                              \
    X(cublasLtMatmulPreferenceSetAttribute)                                                        \
    X(cublasLtMatrixLayoutCreate)                                                                  \
    X(cublasLtMatrixLayoutDestroy)                                                                 \
    X(cublasLtMatmulAlgoGetHeuristic)                                                              \
    X(cublasLtMatmul)

#define TEXT(x)    #x
#define TEXT_OF(x) TEXT(x)

enum { HEURISTICS = 10 };
static const size_t workspace_bytes = (size_t)64 << 20;

/* The library, and the product that was opened last: out [M, N] = in [M, K] W [N, K]^T. cuBLAS reads
 * matrices by columns: W and in are K high, out is N high. */
static struct {
#define MEMBER(f) decltype(&::f) f;
    CUBLAS_FUNCTIONS(MEMBER)
#undef MEMBER
    cublasLtHandle_t handle;
    cublasLtMatmulDesc_t product;
    cublasLtMatmulPreference_t preference;
    void *workspace;
    cublasLtMatrixLayout_t W, in, out;
    cublasLtMatmulHeuristicResult_t found[HEURISTICS];
} cublas;

/* Its version; 0: this machine does not have it. Workspace and handle are made here, since neither may
 * be while a stream is captured. */
extern "C" int64_t cublas_load() {
    void *library = dlopen("libcublasLt.so." TEXT_OF(CUBLAS_VER_MAJOR), RTLD_NOW | RTLD_LOCAL);
    if (!library) library = dlopen("libcublasLt.so", RTLD_NOW | RTLD_LOCAL);
    if (!library) return 0;
#define FIND(f)                                                                                    \
    if (!(cublas.f = (decltype(cublas.f))dlsym(library, #f))) return 0;
    CUBLAS_FUNCTIONS(FIND)
#undef FIND
    const cublasOperation_t transposed = CUBLAS_OP_T;
    if (CUDA_TRY(&backend, cudaMalloc(&cublas.workspace, workspace_bytes))) return outcome();
    if (cublas.cublasLtCreate(&cublas.handle) ||
        cublas.cublasLtMatmulDescCreate(&cublas.product, CUBLAS_COMPUTE_32F, CUDA_R_32F) ||
        cublas.cublasLtMatmulDescSetAttribute(cublas.product, CUBLASLT_MATMUL_DESC_TRANSA,
                                              &transposed, sizeof transposed) ||
        cublas.cublasLtMatmulPreferenceCreate(&cublas.preference) ||
        cublas.cublasLtMatmulPreferenceSetAttribute(cublas.preference,
                                                    CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                    &workspace_bytes, sizeof workspace_bytes))
        return failed("cuBLAS", "it could not be set up");
    return (int64_t)cublas.cublasLtGetVersion();
}

/* How many ways its heuristic offers, up to HEURISTICS, the best one first as it thinks. */
extern "C" int cublas_open(int M, int N, int K) {
    int count = 0;
    cublasLtMatrixLayout_t *const layouts[] = {&cublas.W, &cublas.in, &cublas.out};
    const uint64_t height[] = {(uint64_t)K, (uint64_t)K, (uint64_t)N};
    const uint64_t columns[] = {(uint64_t)N, (uint64_t)M, (uint64_t)M};
    for (int i = 0; i < 3; i++) {
        if (*layouts[i]) cublas.cublasLtMatrixLayoutDestroy(*layouts[i]);
        *layouts[i] = NULL;
        if (cublas.cublasLtMatrixLayoutCreate(layouts[i], CUDA_R_16BF, height[i], columns[i],
                                              (int64_t)height[i]))
            return failed("cuBLAS", "a layout could not be made");
    }
    if (cublas.cublasLtMatmulAlgoGetHeuristic(cublas.handle, cublas.product, cublas.W, cublas.in,
                                              cublas.out, cublas.out, cublas.preference, HEURISTICS,
                                              cublas.found, &count))
        return failed("cuBLAS", "it has nothing for this shape");
    return count;
}

/* Way i of the product that was opened last; out is bf16. */
extern "C" int cublas_product(cudaStream_t stream, int i, const void *in, const void *W,
                              void *out) {
    const float one = 1, zero = 0;
    if (i < 0 || i >= HEURISTICS) return failed("cuBLAS", "no such way");
    const cublasStatus_t status = cublas.cublasLtMatmul(
        cublas.handle, cublas.product, &one, W, cublas.W, in, cublas.in, &zero, out, cublas.out,
        out, cublas.out, &cublas.found[i].algo, cublas.workspace, workspace_bytes, stream);
    char why[32];
    snprintf(why, sizeof why, "status %d", (int)status);
    return status ? failed("cublasLtMatmul", why) : 0;
}
