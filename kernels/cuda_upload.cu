/* The weights on their way from the file to the device: threads that read blocks of it into pinned
 * memory, from where the copy engine takes them while the next ones are read. A pageable copy runs at a
 * sixth of the link's speed (8 of 55 GB/s), a single reading thread at a third. */
#include "kernels/cuda_backend.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace {

enum { READERS = 6, BLOCK = 8 << 20, BUFFERS = 2 };

struct upload {
    const struct model_file *file;
    char *to;
    size_t bytes;
    std::atomic<size_t> next;   /* block */
    std::mutex mutex;           /* of error */
    std::atomic<size_t> failed; /* the lowest block that cannot be read; none above is begun */
    struct error *error;
};

void keep_failure(struct upload *u, size_t from, const struct error &own) {
    const std::lock_guard<std::mutex> lock(u->mutex);
    if (from < u->failed) u->failed = from, *u->error = own;
}

/* One thread: blocks in turn, whoever is free, through two buffers of its own. */
void read_blocks(struct upload *u, int device, char *pinned) {
    struct cuda_backend own = {}; /* this thread's stream and its first failure */
    cudaEvent_t copied[BUFFERS] = {};
    CUDA_TRY(&own, cudaSetDevice(device));
    CUDA_TRY(&own, cudaStreamCreateWithFlags(&own.stream, cudaStreamNonBlocking));
    for (cudaEvent_t &event : copied)
        CUDA_TRY(&own, cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    size_t from = 0;
    for (int i = 0; !own.error.code; i++) {
        from = BLOCK * u->next.fetch_add(1);
        if (from >= std::min(u->bytes, u->failed.load())) break;
        const size_t left = u->bytes - from, bytes = std::min(left, (size_t)BLOCK);
        char *buffer = pinned + (size_t)(i % BUFFERS) * BLOCK;
        CUDA_TRY(&own, cudaEventSynchronize(copied[i % BUFFERS])); /* its last copy has left it */
        if (own.error.code || model_read(u->file, buffer, from, bytes, &own.error) ||
            engine_check_gaps(u->file, buffer, from, bytes, &own.error))
            break;
        CUDA_TRY(&own,
                 cudaMemcpyAsync(u->to + from, buffer, bytes, cudaMemcpyHostToDevice, own.stream));
        CUDA_TRY(&own, cudaEventRecord(copied[i % BUFFERS], own.stream));
    }
    if (own.stream) CUDA_TRY(&own, cudaStreamSynchronize(own.stream));
    if (own.error.code) keep_failure(u, from, own.error);
    for (cudaEvent_t event : copied)
        if (event) cudaEventDestroy(event);
    if (own.stream) cudaStreamDestroy(own.stream);
}

} // namespace

int cuda_upload(struct engine *e, const struct model_file *file, struct error *error) {
    struct cuda_backend *b = backend_of(e);
    char *pinned = NULL;
    struct upload u = {};
    u.file = file;
    u.to = (char *)engine_region(e, REGION_WEIGHTS);
    u.bytes = file->file_bytes - file->head_bytes;
    u.failed = SIZE_MAX;
    u.error = error;
    if (CUDA_TRY(b, cudaMallocHost((void **)&pinned, (size_t)READERS * BUFFERS * BLOCK)))
        return cuda_report(b, error);
    std::vector<std::thread> threads;
    try {
        for (int i = 1; i < READERS; i++)
            threads.emplace_back(read_blocks, &u, e->device_number,
                                 pinned + (size_t)i * BUFFERS * BLOCK);
    } catch (const std::system_error &) { /* no more threads to be had: fewer do it, too */
    }
    read_blocks(&u, e->device_number, pinned);
    for (std::thread &thread : threads) thread.join();
    CUDA_TRY(b, cudaFreeHost(pinned));
    if (u.failed < SIZE_MAX) return error->code;
    const int code = engine_locate_weights(e, file->tensors, file->tensor_count, error);
    return code ? code : cuda_report(b, error);
}
