/* The CPU backend's life cycle: its threads and its memory; what is free, the arena, and the weights read
 * into it. */
#define _GNU_SOURCE /* madvise */
#include "kernels/cpu.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { HUGE_PAGE = 2 << 20, READ_BLOCK = 4 << 20, CGROUP_NAME = 4096 };
static const char cgroups[] = "/sys/fs/cgroup";

/* ---- the device ---- */

#if defined __AVX512F__
#define VECTORS "AVX-512"
#elif defined __AVX2__ && defined __FMA__
#define VECTORS "AVX2"
#elif defined __AVX__
#define VECTORS "AVX"
#elif defined __SSE2__
#define VECTORS "SSE2"
#else
#define VECTORS "generic vectors"
#endif

/* "AMD EPYC 7763, 2 threads, AVX2": the processor's name as Linux knows it. */
int cpu_open(struct engine *e, struct error *error) {
    char line[256], name[96] = "CPU";
    FILE *f = fopen("/proc/cpuinfo", "r");
    while (f && fgets(line, sizeof line, f))
        if (sscanf(line, "model name : %95[^\n]", name) == 1) break;
    if (f) fclose(f);
    const int threads = e->plan.limits.threads;
    snprintf(e->device, sizeof e->device, "%s, %d threads, %s", name, threads, VECTORS);
    struct team *team = NULL;
    const int code = team_open(&team, threads, error);
    e->backend = team; /* closed by cpu_close, whatever became of it */
    return code;
}

/* ---- how much is free ---- */

/* The number after `name` (or at the start of the file where name is "") in a text file of the
 * kernel's. false: no such file, no such name, no number ("max"). */
static bool read_number(const char *path, const char *name, uint64_t *value) {
    char line[256];
    unsigned long long number = 0;
    bool found = false;
    FILE *f = fopen(path, "r");
    while (f && !found && fgets(line, sizeof line, f))
        found =
            !strncmp(line, name, strlen(name)) && sscanf(line + strlen(name), "%llu", &number) == 1;
    if (f) fclose(f);
    *value = number;
    return found;
}

/* What a cgroup may still take: its limit less what it holds, page cache not counted. UINT64_MAX:
 * no limit. */
static uint64_t cgroup_room(const char *cgroup) {
    char path[CGROUP_NAME + 64];
    uint64_t limit, used, inactive = 0, active = 0;
    snprintf(path, sizeof path, "%s%s/memory.max", cgroups, cgroup);
    if (!read_number(path, "", &limit)) return UINT64_MAX;
    snprintf(path, sizeof path, "%s%s/memory.current", cgroups, cgroup);
    if (!read_number(path, "", &used)) return UINT64_MAX;
    snprintf(path, sizeof path, "%s%s/memory.stat", cgroups, cgroup);
    read_number(path, "inactive_file ", &inactive);
    read_number(path, "active_file ", &active);
    used -= inactive + active < used ? inactive + active : used;
    return limit > used ? limit - used : 0;
}

/* The least of what the machine has available and what the process's cgroups (version 2), from its
 * own up to the root, leave. */
size_t cpu_free_memory(const struct engine *e) {
    (void)e;
    char line[CGROUP_NAME] = "";
    uint64_t least = UINT64_MAX, kib;
    if (read_number("/proc/meminfo", "MemAvailable:", &kib)) least = kib * 1024;
    FILE *f = fopen("/proc/self/cgroup", "r");
    while (f && fgets(line, sizeof line, f) && strncmp(line, "0::/", 4) != 0) line[0] = 0;
    if (f) fclose(f);
    char *cgroup = line + strlen("0::");
    if (strncmp(line, "0::/", 4) == 0)
        for (cgroup[strcspn(cgroup, "\n")] = 0;; *strrchr(cgroup, '/') = 0) {
            const uint64_t room = cgroup_room(cgroup);
            if (room < least) least = room;
            if (!strchr(cgroup, '/')) break;
        }
    return least < SIZE_MAX ? (size_t)least : SIZE_MAX;
}

/* ---- the arena ---- */

int cpu_allocate(struct engine *e, struct error *error) {
    const size_t available = cpu_free_memory(e);
    if (e->plan.bytes > available) return engine_no_memory(e, "host", available, error);
    const size_t bytes = (e->plan.bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    e->arena = aligned_alloc(HUGE_PAGE, bytes);
    e->layer = calloc((size_t)e->config->layers, sizeof *e->layer);
    if (!e->arena || !e->layer)
        return fail(error, EXIT_MEMORY,
                    "host memory: the system refused %zu MiB, though %zu MiB are free: is there a "
                    "limit on the address space (ulimit -v)?",
                    (e->plan.bytes >> 20) + 1, available >> 20);
    madvise(e->arena, bytes, MADV_HUGEPAGE); /* advice: 4 KB pages are right, too */
    return 0;
}

void cpu_close(struct engine *e) {
    team_close(e->backend);
    free(e->arena);
    free(e->layer);
    e->backend = NULL;
    e->arena = NULL;
    e->layer = NULL;
}

/* ---- the weights ---- */

/* The weights being read: blocks are taken in turn, whoever is free. */
struct reading {
    const struct model_file *file;
    char *to;
    size_t bytes;
    atomic_size_t next;    /* block */
    pthread_mutex_t mutex; /* of failed and error */
    size_t failed;         /* the lowest block that cannot be read */
    struct error *error;
};

static void read_blocks(struct member me, void *job) {
    struct reading *r = job;
    (void)me;
    for (size_t from; (from = READ_BLOCK * atomic_fetch_add(&r->next, 1)) < r->bytes;) {
        const size_t left = r->bytes - from;
        struct error own;
        if (!model_read(r->file, r->to + from, from, left < READ_BLOCK ? left : READ_BLOCK, &own))
            continue;
        pthread_mutex_lock(&r->mutex);
        if (from < r->failed) r->failed = from, *r->error = own;
        pthread_mutex_unlock(&r->mutex);
    }
}

/* All threads read blocks of the file straight into the arena; that is also the first touch of its
 * pages. The error of the lowest block is reported. */
int cpu_upload(struct engine *e, const struct model_file *file, struct error *error) {
    struct reading reading = {.file = file,
                              .to = engine_region(e, REGION_WEIGHTS),
                              .bytes = file->file_bytes - file->head_bytes,
                              .failed = SIZE_MAX,
                              .error = error};
    pthread_mutex_init(&reading.mutex, NULL);
    team_run(team_of(e), read_blocks, &reading);
    pthread_mutex_destroy(&reading.mutex);
    if (reading.failed < SIZE_MAX) return error->code;
    const int code = engine_check_gaps(file, reading.to, 0, reading.bytes, error);
    return code ? code : engine_locate_weights(e, file->tensors, file->tensor_count, error);
}
