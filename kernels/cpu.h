/* What the files of the CPU backend give to its operator table (cpu.c). Comments: ops.h. */
#ifndef KERNELS_CPU_H
#define KERNELS_CPU_H

#include "kernels/config.h"
#include "kernels/cpu_matmul.h"
#include "kernels/cpu_threads.h"
#include "kernels/ops.h"

size_t cpu_free_memory(const struct engine *e);
int cpu_allocate(struct engine *e, struct error *error);
int cpu_upload(struct engine *e, const struct model_file *file, struct error *error);
void cpu_close(struct engine *e);
void cpu_roof(struct engine *e, struct roof *roof);

/* The calling thread of a parallel region. */
static inline struct member this_member(const struct engine *e) {
    float *scratch = engine_region(e, REGION_THREADS);
    const size_t index = (size_t)omp_get_thread_num();
    return (struct member){index, (size_t)omp_get_num_threads(), scratch + index * THREAD_FLOATS};
}

#endif
