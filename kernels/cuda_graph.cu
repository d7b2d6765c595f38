/* Steps, and those of few rows as graphs: captured at the first step of their kind, then replayed. What
 * differs between two steps lies in device memory (tokens, slots, positions, the sampler's counters), so
 * a graph is never changed. */
#include "kernels/cuda_backend.h"

/* A draw from the last classified row. */
static void draw(struct engine *e, struct rows rows, const struct sampler *sampler) {
    struct cuda_draw d = {};
    d.logits = cuda_logits(e, rows.classified - 1);
    d.sampler = sampler;
    d.state = engine_region(e, REGION_DRAWS);
    d.tokens = cuda_row_numbers(e, 0);
    d.slots = cuda_row_numbers(e, 1);
    d.positions = cuda_row_numbers(e, 2);
    d.last_row = rows.count - 1;
    cuda_draw(backend_of(e), &d);
}

/* Records what the step launches and makes a graph of it. false: kept as the backend's failure. */
static bool capture(struct engine *e, struct rows rows,
                    void (*forward)(struct engine *, struct rows), const struct sampler *sampler,
                    cudaGraphExec_t *graph) {
    struct cuda_backend *b = backend_of(e);
    cudaGraph_t recorded = NULL;
    if (CUDA_TRY(b, cudaStreamBeginCapture(b->stream, cudaStreamCaptureModeThreadLocal)))
        return false;
    forward(e, rows);
    if (sampler) draw(e, rows, sampler);
    const cudaError_t status = cudaStreamEndCapture(b->stream, &recorded);
    if (!cuda_failed(b, "cudaStreamEndCapture", status))
        CUDA_TRY(b, cudaGraphInstantiate(graph, recorded, 0));
    if (recorded) cudaGraphDestroy(recorded);
    return !b->error.code;
}

void cuda_step(struct engine *e, struct rows rows,
               void (*forward)(struct engine *e, struct rows rows), struct sampler *sampler) {
    struct cuda_backend *b = backend_of(e);
    if (sampler) cuda_draw_begin(b, sampler, engine_region(e, REGION_DRAWS));
    if (b->error.code) return;
    if (forward != b->captured) cuda_graphs_close(b);
    if (rows.count > CUDA_GRAPH_ROWS) {
        forward(e, rows);
        if (sampler) draw(e, rows, sampler);
    } else {
        cudaGraphExec_t *graph =
            &b->graph[rows.count][rows.classified][sampler != NULL][cuda_is_short(e, rows.count)];
        if (!*graph && !capture(e, rows, forward, sampler, graph)) return;
        b->captured = forward;
        CUDA_TRY(b, cudaGraphLaunch(*graph, b->stream));
    }
    b->normed.rows = 0; /* what a replayed step leaves, the host does not follow */
    if (!sampler) return;
    cuda_draw_end(b);
    b->position += rows.count;
}

void cuda_graphs_close(struct cuda_backend *b) {
    cudaGraphExec_t *graphs = &b->graph[0][0][0][0];
    for (size_t i = 0; i < sizeof b->graph / sizeof *graphs; i++) {
        if (graphs[i]) cudaGraphExecDestroy(graphs[i]);
        graphs[i] = NULL;
    }
    b->captured = NULL;
}
