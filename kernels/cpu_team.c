/* A team of threads that wait by spinning, for a little while.
 *
 * Why     a token of a small model takes 150 operators of 5 to 70 us. OpenMP's parallel region costs
 *         1.1 us with two threads and its barrier 0.55 us; these cost 0.15 us each, 3 % of a token
 *         with 2 threads, 10 to 20 % with 16 (SmolLM2-135M). And OpenMP spins for milliseconds:
 *         beside one busy program on two processors that made 4 tokens/s of 120; this makes 30.
 * How     the caller's counter `calls` moves when a task begins or a barrier opens, each worker's
 *         counter `arrivals` when it reaches a barrier or the end of a task. Every counter has one
 *         writer and its own pair of cache lines, so that a signal is one line that changes hands.
 * Sleep   a worker that has spun for some 30 us sleeps until the next call: another program gets
 *         the processor, and an engine that waits for its user costs nothing. */
#define _POSIX_C_SOURCE 200809L
#include "kernels/cpu_team.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

enum { SPINS = 2000, APART = 128 };

struct worker {
    _Alignas(APART) atomic_uint arrivals;
    unsigned seen; /* calls that it has answered */
    size_t index;
    struct team *team;
    pthread_t thread;
};

struct team {
    _Alignas(APART) atomic_uint calls;
    _Alignas(APART) unsigned expected; /* arrivals that the caller waits for next */
    team_task *task;                   /* NULL: the end */
    void *job;
    size_t count, started;
    atomic_int sleepers;
    pthread_mutex_t mutex; /* of sleepers falling asleep and being woken */
    pthread_cond_t called;
    struct worker workers[]; /* [count]; the caller's, 0, has no thread */
};

static void pause_briefly(void) {
#if defined __x86_64__ || defined __i386__
    __builtin_ia32_pause();
#endif
}

/* ---- workers ---- */

/* sleepers is raised before calls is read again, and calls before sleepers is read: whichever comes
 * second sees the other, so no call is slept through. */
static void sleep_until_called(struct team *team, unsigned seen) {
    pthread_mutex_lock(&team->mutex);
    atomic_fetch_add(&team->sleepers, 1);
    while (atomic_load(&team->calls) == seen) pthread_cond_wait(&team->called, &team->mutex);
    atomic_fetch_sub(&team->sleepers, 1);
    pthread_mutex_unlock(&team->mutex);
}

static void wait_for_call(struct worker *w) {
    struct team *team = w->team;
    for (int spins = 0; atomic_load_explicit(&team->calls, memory_order_acquire) == w->seen;
         spins++)
        if (spins < SPINS)
            pause_briefly();
        else
            sleep_until_called(team, w->seen);
    w->seen++;
}

static void arrive(struct worker *w) {
    const unsigned before = atomic_load_explicit(&w->arrivals, memory_order_relaxed);
    atomic_store_explicit(&w->arrivals, before + 1, memory_order_release);
}

static void *work(void *argument) {
    struct worker *w = argument;
    struct team *team = w->team;
    for (wait_for_call(w); team->task; wait_for_call(w)) {
        team->task((struct member){w->index, team->count, team}, team->job);
        arrive(w);
    }
    return NULL;
}

/* ---- the caller ---- */

static void call(struct team *team) {
    atomic_fetch_add(&team->calls, 1);
    if (atomic_load(&team->sleepers) == 0) return;
    pthread_mutex_lock(&team->mutex);
    pthread_cond_broadcast(&team->called);
    pthread_mutex_unlock(&team->mutex);
}

/* Where a worker does not get a processor, the caller lets others have its own. */
static void wait_for_all(struct team *team) {
    team->expected++;
    for (size_t i = 1; i < team->count; i++)
        for (int spins = 0; atomic_load_explicit(&team->workers[i].arrivals,
                                                 memory_order_acquire) != team->expected;
             spins++)
            if (spins < SPINS)
                pause_briefly();
            else
                sched_yield();
}

int team_open(struct team **opened, int threads, struct error *error) {
    const size_t count = (size_t)threads;
    const size_t bytes = sizeof(struct team) + count * sizeof(struct worker);
    struct team *team = aligned_alloc(APART, (bytes + APART - 1) / APART * APART);
    if (!team) return fail(error, EXIT_MEMORY, "host memory: none for %d threads", threads);
    memset(team, 0, bytes);
    team->count = count;
    pthread_mutex_init(&team->mutex, NULL);
    pthread_cond_init(&team->called, NULL);
    *opened = team;
    for (size_t i = 1; i < count; i++) {
        struct worker *w = &team->workers[i];
        w->index = i;
        w->team = team;
        const int code = pthread_create(&w->thread, NULL, work, w);
        if (code)
            return fail(error, EXIT_DEVICE, "thread %zu of %zu cannot be started: %s", i + 1, count,
                        strerror(code));
        team->started = i;
    }
    return 0;
}

void team_close(struct team *team) {
    if (!team) return;
    team->task = NULL;
    call(team);
    for (size_t i = 1; i <= team->started; i++) pthread_join(team->workers[i].thread, NULL);
    pthread_cond_destroy(&team->called);
    pthread_mutex_destroy(&team->mutex);
    free(team);
}

void team_run(struct team *team, team_task *task, void *job) {
    team->task = task;
    team->job = job;
    call(team);
    task((struct member){0, team->count, team}, job);
    wait_for_all(team);
}

void team_barrier(struct member me) {
    if (me.index > 0) {
        struct worker *w = &me.team->workers[me.index];
        arrive(w);
        wait_for_call(w);
    } else {
        wait_for_all(me.team);
        call(me.team);
    }
}

struct span share(struct member me, size_t count, size_t unit) {
    const size_t units = count / unit;
    struct span own = {units * me.index / me.count * unit,
                       units * (me.index + 1) / me.count * unit};
    if (me.index + 1 == me.count) own.last = count;
    return own;
}
