/* OpenMP, or one thread where the compiler has none: then the pragmas say nothing. */
#ifndef KERNELS_CPU_THREADS_H
#define KERNELS_CPU_THREADS_H

#ifdef _OPENMP
#include <omp.h>
#else
#pragma GCC diagnostic ignored "-Wunknown-pragmas"
static inline int omp_get_thread_num(void) {
    return 0;
}
static inline int omp_get_num_threads(void) {
    return 1;
}
#endif

/* Waits for all threads of the parallel region; what they wrote before it is visible after it. */
static inline void barrier(void) {
#pragma omp barrier
}

#endif
