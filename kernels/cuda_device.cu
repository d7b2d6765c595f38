/* The device: found and described, its memory taken, its errors kept, its roof measured. */
#include "kernels/cuda.h"
#include "kernels/cuda_backend.h"
#include "kernels/cuda_test.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

/* ---- errors ---- */

bool cuda_failed(struct cuda_backend *b, const char *call, cudaError_t status) {
    if (status == cudaSuccess) return b->error.code != 0;
    if (b->error.code) return true;
    const int name = (int)strcspn(call, "("); /* not the arguments as they stand in the source */
    if (status == cudaErrorMemoryAllocation)
        fail(&b->error, EXIT_MEMORY, "device memory, or pinned host memory: none left for %.*s",
             name, call);
    else
        fail(&b->error, EXIT_DEVICE, "CUDA: %.*s: %s (%s)", name, call, cudaGetErrorString(status),
             cudaGetErrorName(status));
    return true;
}

void cuda_launch_failed(struct cuda_backend *b, const char *kernel, dim3 grid, int threads,
                        size_t shared, cudaError_t status) {
    if (b->error.code) return;
    fail(&b->error, EXIT_DEVICE,
         "CUDA: kernel %s, grid %u x %u x %u, %d threads, %zu bytes of shared memory: %s (%s)",
         kernel, grid.x, grid.y, grid.z, threads, shared, cudaGetErrorString(status),
         cudaGetErrorName(status));
}

int cuda_report(const struct cuda_backend *b, struct error *error) {
    if (b->error.code) *error = b->error;
    return b->error.code;
}

/* ---- the device ---- */

bool cuda_usable(const struct config *config, int number, char why[160]) {
    int count = 0, major = 0, driver = 0;
    const cudaError_t status = cudaGetDeviceCount(&count);
    if (config && config->head_dim > CUDA_LARGEST_HEAD)
        snprintf(why, 160, "heads of %d dimensions: on a GPU at most %d can be run",
                 config->head_dim, CUDA_LARGEST_HEAD);
    else if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0)
        snprintf(why, 160, "no NVIDIA driver is installed");
    else if (status != cudaSuccess)
        snprintf(why, 160, "CUDA: %s", cudaGetErrorString(status));
    else if (number < 0 || number >= count)
        snprintf(why, 160, "there are %d GPUs, the first is cuda:0", count);
    else if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, number) || major < 8)
        snprintf(why, 160, "GPU %d has compute capability %d.x, 8.0 is needed", number, major);
    else
        return true;
    return false;
}

/* "NVIDIA H200, compute capability 9.0, 132 multiprocessors, 139.7 GiB, driver 13.0" */
static void describe(struct engine *e, const cudaDeviceProp *device) {
    int driver = 0;
    cudaDriverGetVersion(&driver);
    snprintf(e->device, sizeof e->device,
             "%.60s, compute capability %d.%d, %d multiprocessors, %.1f GiB, driver %d.%d",
             device->name, device->major, device->minor, device->multiProcessorCount,
             (double)device->totalGlobalMem / (1 << 30), driver / 1000, driver % 1000 / 10);
}

int cuda_open(struct engine *e, struct error *error) {
    struct cuda_backend *b = (struct cuda_backend *)calloc(1, sizeof *b);
    if (!b) return fail(error, EXIT_MEMORY, "host memory: none for the CUDA backend");
    e->backend = b;
    cudaDeviceProp device = {};
    if (CUDA_TRY(b, cudaSetDevice(e->device_number)) ||
        CUDA_TRY(b, cudaGetDeviceProperties(&device, e->device_number)) ||
        CUDA_TRY(b, cudaStreamCreateWithFlags(&b->stream, cudaStreamNonBlocking)))
        return cuda_report(b, error);
    b->multiprocessors = device.multiProcessorCount;
    b->capability = device.major * 10 + device.minor;
    b->shared_bytes = (int)device.sharedMemPerBlockOptin;
    describe(e, &device);
    if (!b->error.code && !cuda_has_code())
        fail(&b->error, EXIT_DEVICE,
             "this program has no code for compute capability %d.%d: build it with make "
             "CUDA_ARCHS=%d, or use --device cpu",
             device.major, device.minor, b->capability);
    cuda_draws_open(b);
    return cuda_report(b, error);
}

size_t cuda_free_memory(const struct engine *e) {
    size_t available = 0, total = 0;
    (void)e;
    if (cudaMemGetInfo(&available, &total) != cudaSuccess) return 0;
    return available > CUDA_RESERVE ? available - CUDA_RESERVE : 0;
}

int cuda_allocate(struct engine *e, struct error *error) {
    struct cuda_backend *b = backend_of(e);
    const size_t available = cuda_free_memory(e);
    if (available == 0 && CUDA_TRY(b, cudaGetLastError())) return cuda_report(b, error);
    if (e->plan.bytes > available) return engine_no_memory(e, "device", available, error);
    e->layer = (struct layer_weights *)calloc((size_t)e->config->layers, sizeof *e->layer);
    b->slots = (int32_t *)calloc((size_t)e->plan.limits.chunk, sizeof *b->slots);
    b->positions = (int32_t *)calloc((size_t)e->plan.limits.chunk, sizeof *b->positions);
    if (!e->layer || !b->slots || !b->positions)
        return fail(error, EXIT_MEMORY, "host memory: none for tables of layers and rows");
    const cudaError_t status = cudaMalloc((void **)&e->arena, e->plan.bytes);
    if (status == cudaErrorMemoryAllocation)
        return fail(error, EXIT_MEMORY,
                    "device memory: the driver refused %zu MiB, though %zu MiB are free",
                    (e->plan.bytes >> 20) + 1, available >> 20);
    if (!cuda_failed(b, "cudaMalloc", status))
        CUDA_TRY(b, cudaMemsetAsync(engine_region(e, REGION_COUNTERS), 0,
                                    e->plan.region[REGION_COUNTERS].bytes, b->stream));
    return cuda_report(b, error);
}

void cuda_close(struct engine *e) {
    struct cuda_backend *b = backend_of(e);
    if (b) {
        if (b->stream) cudaStreamSynchronize(b->stream);
        cuda_draws_close(b);
        cuda_graphs_close(b);
        if (b->roof_memory) cudaFree(b->roof_memory);
        if (b->stream) cudaStreamDestroy(b->stream);
        free(b->slots);
        free(b->positions);
    }
    if (e->arena) cudaFree(e->arena); /* else it would make a context, only to free nothing */
    free(e->layer);
    free(b);
    e->backend = NULL;
    e->arena = NULL;
    e->layer = NULL;
}

int cuda_finish(struct engine *e, struct error *error) {
    struct cuda_backend *b = backend_of(e);
    CUDA_TRY(b, cudaStreamSynchronize(b->stream));
    return cuda_report(b, error);
}

/* ---- for tests ---- */

void cuda_general_path(struct engine *e, bool on) {
    cuda_graphs_close(backend_of(e));
    backend_of(e)->general = on;
    backend_of(e)->normed.rows = 0;
}

void cuda_one_tile(struct engine *e, int tile) {
    struct cuda_backend *b = backend_of(e);
    if (tile < CUDA_FEW || tile > cuda_tiles())
        cuda_failed(b, "cuda_one_tile", cudaErrorInvalidValue);
    b->tile = b->error.code ? 0 : tile;
}

void cuda_settle(struct engine *e) {
    cuda_decode_settle(e);
}

bool cuda_unfinished(const struct engine *e) {
    return backend_of(e)->pending.heads;
}

bool cuda_unadded(const struct engine *e) {
    return backend_of(e)->pending.product != NULL;
}

int cuda_prepared_rows(const struct engine *e, const float **gamma, int *parts, int *stride) {
    const struct cuda_backend *b = backend_of(e);
    *gamma = b->normed.gamma;
    *parts = b->normed.parts;
    *stride = b->normed.stride;
    return b->normed.rows;
}

int cuda_capability(const struct engine *e) {
    return backend_of(e)->capability;
}

void cuda_write(struct engine *e, void *to, const void *from, size_t bytes) {
    struct cuda_backend *b = backend_of(e);
    b->normed.rows = 0; /* x may be another one now */
    CUDA_TRY(b, cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, b->stream));
    CUDA_TRY(b, cudaStreamSynchronize(b->stream));
}

void cuda_read(struct engine *e, void *to, const void *from, size_t bytes) {
    struct cuda_backend *b = backend_of(e);
    CUDA_TRY(b, cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, b->stream));
    CUDA_TRY(b, cudaStreamSynchronize(b->stream));
}
