/* Steps of few rows as graphs: captured at the first step of their kind, then replayed. What differs
 * between two steps lies in device memory (tokens, slots, positions), so a graph is never changed. */
#include "kernels/cuda_backend.h"

/* Records what forward launches and makes a graph of it. false: kept as the backend's failure. */
static bool capture(struct engine *e, struct rows rows,
                    void (*forward)(struct engine *, struct rows), cudaGraphExec_t *graph) {
    struct cuda_backend *b = backend_of(e);
    cudaGraph_t recorded = NULL;
    if (CUDA_TRY(b, cudaStreamBeginCapture(b->stream, cudaStreamCaptureModeThreadLocal)))
        return false;
    forward(e, rows);
    const cudaError_t status = cudaStreamEndCapture(b->stream, &recorded);
    if (!cuda_failed(b, "cudaStreamEndCapture", status))
        CUDA_TRY(b, cudaGraphInstantiate(graph, recorded, 0));
    if (recorded) cudaGraphDestroy(recorded);
    return !b->error.code;
}

void cuda_step(struct engine *e, struct rows rows,
               void (*forward)(struct engine *e, struct rows rows)) {
    struct cuda_backend *b = backend_of(e);
    if (b->error.code) return;
    if (!b->graphs || rows.count > CUDA_GRAPH_ROWS) {
        forward(e, rows);
        return;
    }
    cudaGraphExec_t *graph = &b->graph[rows.count][rows.classified];
    if (!*graph && !capture(e, rows, forward, graph)) return;
    CUDA_TRY(b, cudaGraphLaunch(*graph, b->stream));
}

void cuda_graphs_close(struct cuda_backend *b) {
    for (int rows = 0; rows <= CUDA_GRAPH_ROWS; rows++)
        for (int classified = 0; classified <= CUDA_GRAPH_ROWS; classified++) {
            if (b->graph[rows][classified]) cudaGraphExecDestroy(b->graph[rows][classified]);
            b->graph[rows][classified] = NULL;
        }
}
