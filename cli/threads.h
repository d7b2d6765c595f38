/* How many threads a run uses where nobody says. */
#ifndef CLI_THREADS_H
#define CLI_THREADS_H

/* OMP_NUM_THREADS where it is set; else the physical cores among the processors that this process
 * may run on, no more than its cgroup's CPU quota (v2) allows: threads beyond that wait for one
 * another. At least 1. */
int default_threads(void);

/* Processors that this process may run on. */
int allowed_processors(void);

#endif
