/* Attention of the CPU backend over the cache of one layer. */
#ifndef KERNELS_CPU_ATTENTION_H
#define KERNELS_CPU_ATTENTION_H

#include "kernels/cpu_team.h"

#include <stdint.h>

struct attention {
    const float *q; /* [T, H, D], rows q_stride floats apart */
    size_t q_stride;
    const float *keys;   /* [slots, G, S/16, D, 16], S rounded up to 16 */
    const float *values; /* [slots, G, S, D] */
    float *out;          /* [T, H, D] */
    float *partial; /* [S/CPU_PART, rounded up, T, H, D + 2] where T <= CPU_BRIEF; else unused */
    const int32_t *slots, *positions; /* [T] */
    size_t T, H, G, D, S;
    size_t window; /* positions that a row sees, its own included; 0: all */
    float scale;
    float cap; /* c: scores s become c tanh(s / c); 0: none */
};

/* All members of a team call it. out[t, h] = softmax(q[t, h] K^T scale) V over the
 * positions up to the row's own, in its slot, as far back as the window goes. */
void cpu_attend(const struct attention *a, struct member me);

/* The thread that attends to the newest positions of a group in a step of one row: the one that
 * should append them, since a line of the cache that two cores write and read costs more than its
 * work. */
size_t attention_owner(size_t group, size_t threads);

#endif
