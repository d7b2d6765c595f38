/* What the files of the CUDA backend give to its operator table (cuda.cu). Comments: ops.h. */
#ifndef KERNELS_CUDA_BACKEND_H
#define KERNELS_CUDA_BACKEND_H

#include "kernels/cuda.h"

/* Whether the program holds kernels for the current device. */
bool cuda_has_code();

int cuda_open(struct engine *e, struct error *error);
size_t cuda_free_memory(const struct engine *e);
int cuda_allocate(struct engine *e, struct error *error);
int cuda_upload(struct engine *e, const struct model_file *file, struct error *error);
void cuda_close(struct engine *e);
int cuda_finish(struct engine *e, struct error *error);
void cuda_roof(struct engine *e, struct roof *roof);
void cuda_step(struct engine *e, struct rows rows,
               void (*forward)(struct engine *e, struct rows rows), struct sampler *sampler);
/* Forgets every captured graph. */
void cuda_graphs_close(struct cuda_backend *b);

/* The first failure of the backend, if there is one: its code, and its line. */
int cuda_report(const struct cuda_backend *b, struct error *error);

#endif
