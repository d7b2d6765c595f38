/* What the files of the CPU backend give to its operator table (cpu.c). Comments: ops.h. */
#ifndef KERNELS_CPU_H
#define KERNELS_CPU_H

#include "kernels/config.h"
#include "kernels/cpu_team.h"
#include "kernels/ops.h"

int cpu_open(struct engine *e, struct error *error);
size_t cpu_free_memory(const struct engine *e);
int cpu_allocate(struct engine *e, struct error *error);
int cpu_upload(struct engine *e, const struct model_file *file, struct error *error);
void cpu_close(struct engine *e);
void cpu_roof(struct engine *e, struct roof *roof);

/* The engine's team of threads, while it is open. */
static inline struct team *team_of(const struct engine *e) {
    return e->backend;
}

#endif
