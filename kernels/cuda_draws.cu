/* The host's side of draws: pinned memory that results arrive in, what a sampler brings to the device,
 * and waiting for an id. */
#include "kernels/cuda_backend.h"
#include "kernels/cuda_draws.h"

#include <stdlib.h>
#include <string.h>

/* ---- memory ---- */

void cuda_draws_open(struct cuda_backend *b) {
    if (b->error.code) return;
    struct cuda_draws *draws = (struct cuda_draws *)calloc(1, sizeof *draws);
    b->draws = draws;
    if (!draws) {
        fail(&b->error, EXIT_MEMORY, "host memory: no %zu bytes for draws", sizeof *draws);
        return;
    }
    if (CUDA_TRY(b, cudaHostAlloc((void **)&draws->drawn, DRAW_WAITING * sizeof *draws->drawn,
                                  cudaHostAllocMapped)))
        return;
    if (CUDA_TRY(b, cudaHostGetDevicePointer((void **)&draws->drawn_device, draws->drawn, 0)))
        return;
    for (int i = 0; i < DRAW_WAITING; i++)
        if (CUDA_TRY(b, cudaEventCreateWithFlags(&draws->event[i], cudaEventDisableTiming))) return;
}

void cuda_draws_close(struct cuda_backend *b) {
    struct cuda_draws *draws = b->draws;
    if (!draws) return;
    cudaStreamSynchronize(b->stream); /* draws that nobody takes still write */
    for (int i = 0; i < DRAW_WAITING; i++)
        if (draws->event[i]) cudaEventDestroy(draws->event[i]);
    cudaFreeHost(draws->drawn);
    free(draws);
    b->draws = NULL;
}

/* ---- draws ---- */

/* Brings what the sampler has accepted. A copy from pageable memory has read it when it returns. */
static void start(struct cuda_backend *b, const struct sampler *sampler, struct draw_state *state) {
    struct cuda_draws *draws = b->draws;
    const struct draw_counters counters = {sampler->draws, (unsigned)draws->enqueued,
                                           sampler->recent_count};
    CUDA_TRY(b, cudaMemsetAsync(state, 0, sizeof *state, b->stream));
    CUDA_TRY(b, cudaMemcpyAsync(&state->counters, &counters, sizeof counters,
                                cudaMemcpyHostToDevice, b->stream));
    if (has_penalty(&sampler->sampling))
        CUDA_TRY(b, cudaMemcpyAsync(state->recent, sampler->recent,
                                    (size_t)sampler->sampling.repeat_last * sizeof(int32_t),
                                    cudaMemcpyHostToDevice, b->stream));
    b->rows_set = false;
}

void cuda_draw_begin(struct cuda_backend *b, struct sampler *sampler, void *state) {
    if (b->error.code) return;
    struct cuda_draws *draws = b->draws;
    const struct sampling *sampling = &sampler->sampling;
    if (sampling->repeat_last > DRAW_RECENT)
        fail(&b->error, EXIT_INTERNAL, "the penalty looks back on %d ids, the device on at most %d",
             sampling->repeat_last, DRAW_RECENT);
    else if (draws->enqueued - draws->taken == DRAW_WAITING)
        fail(&b->error, EXIT_INTERNAL, "%d draws wait to be taken, and there is room for no more",
             DRAW_WAITING);
    if (b->error.code) return;
    if (draws->vocab != sampler->vocab || memcmp(&draws->sampling, sampling, sizeof *sampling)) {
        cuda_graphs_close(b);
        draws->vocab = sampler->vocab;
        draws->sampling = *sampling;
    }
    if (b->rows_set) start(b, sampler, (struct draw_state *)state);
    if (sampling->temperature > 0) sampler->draws++; /* as sampler_draw does */
}

void cuda_draw_end(struct cuda_backend *b) {
    struct cuda_draws *draws = b->draws;
    if (b->error.code) return;
    CUDA_TRY(b, cudaEventRecord(draws->event[draws->enqueued % DRAW_WAITING], b->stream));
    if (!b->error.code) draws->enqueued++;
}

int cuda_take(struct cuda_backend *b, int32_t *id, struct error *error) {
    struct cuda_draws *draws = b->draws;
    if (!b->error.code && draws->enqueued == draws->taken)
        fail(&b->error, EXIT_INTERNAL, "no draw was made that could be taken");
    if (!b->error.code)
        CUDA_TRY(b, cudaEventSynchronize(draws->event[draws->taken % DRAW_WAITING]));
    if (b->error.code) return cuda_report(b, error);
    const struct drawn drawn = draws->drawn[draws->taken++ % DRAW_WAITING];
    if (drawn.outcome == NOT_A_NUMBER)
        return fail(error, EXIT_INTERNAL,
                    "the logit of id %d is %f, expected a number: are the weights finite? "
                    "--check tells",
                    drawn.id, (double)drawn.logit);
    if (drawn.outcome == NOTHING_FINITE)
        return fail(error, EXIT_INTERNAL, "every logit is -inf: nothing to draw from");
    *id = drawn.id;
    return 0;
}
