#define _GNU_SOURCE /* sched_getaffinity */
#include "cli/threads.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The first hardware thread of the core that `processor` belongs to; itself where unknown. */
static int first_sibling(int processor) {
    char path[96];
    int first = processor;
    snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list",
             processor);
    FILE *file = fopen(path, "r");
    if (!file) return processor;
    if (fscanf(file, "%d", &first) != 1) first = processor;
    fclose(file);
    return first;
}

static int physical_cores(void) {
    cpu_set_t allowed, cores;
    CPU_ZERO(&cores);
    if (sched_getaffinity(0, sizeof allowed, &allowed)) return 1;
    for (size_t i = 0; i < CPU_SETSIZE; i++)
        if (CPU_ISSET(i, &allowed)) CPU_SET((size_t)first_sibling((int)i), &cores);
    return CPU_COUNT(&cores);
}

int allowed_processors(void) {
    cpu_set_t allowed;
    return sched_getaffinity(0, sizeof allowed, &allowed) ? 1 : CPU_COUNT(&allowed);
}

/* Whole processors that one cpu.max file grants, or `limit` where it says more or "max". */
static int quota_of(const char *folder, int limit) {
    char path[4200];
    long quota = 0, period = 0;
    snprintf(path, sizeof path, "/sys/fs/cgroup%s/cpu.max", folder);
    FILE *file = fopen(path, "r");
    if (!file) return limit;
    int fields = fscanf(file, "%ld %ld", &quota, &period);
    fclose(file);
    if (fields != 2 || period <= 0 || quota / period >= limit) return limit;
    return quota / period < 1 ? 1 : (int)(quota / period);
}

/* The smallest quota of this process's cgroup (v2) and of those above it. */
static int cgroup_quota(int limit) {
    char folder[4096] = "";
    FILE *file = fopen("/proc/self/cgroup", "r");
    if (!file) return limit;
    while (fgets(folder, sizeof folder, file) && strncmp(folder, "0::", 3) != 0) folder[0] = 0;
    fclose(file);
    if (!folder[0]) return limit;
    char *path = folder + 3;
    path[strcspn(path, "\n")] = 0;
    for (;;) {
        limit = quota_of(path, limit);
        char *slash = strrchr(path, '/');
        if (!slash) return limit;
        *slash = 0;
    }
}

int default_threads(void) {
    const char *asked = getenv("OMP_NUM_THREADS");
    char *end = NULL;
    long threads_asked = asked ? strtol(asked, &end, 10) : 0;
    int threads = asked && *end == 0 && threads_asked <= 1024 ? (int)threads_asked : 0;
    if (threads < 1) threads = cgroup_quota(physical_cores());
    return threads < 1 ? 1 : threads;
}
