/* Threads that run one operator together, and their shares of its work. */
#ifndef KERNELS_CPU_TEAM_H
#define KERNELS_CPU_TEAM_H

#include "model/error.h"

#include <stddef.h>

struct team;

/* One thread of a team, for the length of a task. Member 0 is the caller's thread. */
struct member {
    size_t index, count;
    struct team *team;
};

/* What every member of the team does; job is the caller's. */
typedef void team_task(struct member me, void *job);

/* Starts threads - 1 threads. EXIT_DEVICE. */
int team_open(struct team **team, int threads, struct error *error);
void team_close(struct team *team); /* NULL is fine */

/* Runs the task on all members and returns when all of them have finished it. */
void team_run(struct team *team, team_task *task, void *job);

/* Within a task: waits for all members; what they wrote before it is visible after it. */
void team_barrier(struct member me);

struct span {
    size_t first, last; /* first <= i < last */
};

/* A member's share of 0..count in units of `unit`; the last share takes what is left over. */
struct span share(struct member me, size_t count, size_t unit);

#endif
