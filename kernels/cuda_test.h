/* What tests and benchmarks ask of the CUDA backend beside its operators. */
#ifndef KERNELS_CUDA_TEST_H
#define KERNELS_CUDA_TEST_H

#include "kernels/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Every operator through the kernels of the general path, whatever the device can do. Graphs that were
 * captured are forgotten. */
void cuda_general_path(struct engine *e, bool on);
/* How many tiles cuda_matmul_hopper.cu has for products of many rows; and all those by one of them, 1 to
 * so many, where it takes the shape and what follows the product; 0: the engine chooses. With a tile also
 * 33 to 64 rows count as many, and with CUDA_FEW as few. */
enum { CUDA_FEW = -1 };
int cuda_tiles(void);
void cuda_one_tile(struct engine *e, int tile);
/* Between two operators: does what is left for the next one, so that REGION_X is x, REGION_Q q, and the
 * cache has the keys. And whether q and k are left, or the norm of a product and x +=. */
void cuda_settle(struct engine *e);
bool cuda_unfinished(const struct engine *e);
bool cuda_unadded(const struct engine *e);
/* Rows of x that whoever wrote it has prepared for the product after it: m [rows, C] in REGION_PANELS, x
 * times the norm's weights f32 [C] (NULL: x itself); 0: none. And their sums of squares in REGION_SQUARES, f32
 * [*parts, *stride]; *parts 0: none. */
int cuda_prepared_rows(const struct engine *e, const float **gamma, int *parts, int *stride);
/* The device's compute capability: 90 for 9.0. */
int cuda_capability(const struct engine *e);
/* Copy between the host and the engine's arena; wait for it. Failures are the backend's: finish tells. */
void cuda_write(struct engine *e, void *to, const void *from, size_t bytes);
void cuda_read(struct engine *e, void *to, const void *from, size_t bytes);

#ifdef __cplusplus
}
#endif

#endif
