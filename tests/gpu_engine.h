/* A random model on the GPU, with the device's whole arena a second time on the host: there it is
 * prepared, and there stands what every byte of it must be after an operator. The tests' tally. */
#ifndef TESTS_GPU_ENGINE_H
#define TESTS_GPU_ENGINE_H

#include "kernels/cuda_test.h"
#include "tests/random_engine.h"

#include <stdarg.h>
#include <stdbool.h>

/* ---- the tally ---- */

static struct { int passed, failed; } tally;

/* Counts a case, and prints a line for one that failed. Returns ok. */
__attribute__((format(printf, 2, 3))) static inline bool check(bool ok, const char *format, ...) {
    if (ok) {
        tally.passed++;
        return true;
    }
    tally.failed++;
    va_list arguments;
    va_start(arguments, format);
    vprintf(format, arguments);
    va_end(arguments);
    putchar('\n');
    fflush(stdout);
    return false;
}

/* ---- the engine ---- */

/* Bytes `from` to `to` of the arena. */
struct stretch {
    size_t from, to;
};

struct gpu {
    struct random_engine host; /* the same plan and the same bytes, in host memory; runs nothing */
    struct engine device;
    char *now; /* the device's arena as it was last read */
    struct stretch kept[REGIONS];
    int kept_count; /* all of the arena but weights and scratch */
};

/* What an operator may leave there is nobody's. */
static inline bool is_scratch(enum region region) {
    return region == REGION_QKV || region == REGION_PANELS || region == REGION_SCALES ||
           region == REGION_SQUARES || region == REGION_PARTS || region == REGION_DRAWS;
}

static inline size_t region_end(const struct plan *plan, enum region region) {
    return plan->region[region].offset + plan->region[region].bytes;
}

static inline void *region_now(const struct gpu *g, enum region region) {
    return g->now + g->device.plan.region[region].offset;
}

static inline void *allocated(size_t bytes) {
    void *memory = malloc(bytes ? bytes : 1);
    if (!memory) abort();
    return memory;
}

static inline void gpu_must(int code, const struct error *error) {
    if (!code) return;
    printf("stopped: %s\n", error->text);
    exit(1);
}

static inline void find_kept(struct gpu *g) {
    const struct plan *plan = &g->device.plan;
    size_t from = region_end(plan, REGION_WEIGHTS);
    for (int r = REGION_WEIGHTS + 1; r <= REGIONS; r++) {
        const bool last = r == REGIONS;
        if (!last && !is_scratch((enum region)r)) continue;
        const size_t to = last ? plan->bytes : plan->region[r].offset;
        g->kept[g->kept_count++] = (struct stretch){from, to};
        if (!last) from = region_end(plan, (enum region)r);
    }
}

/* Host to device: a region. */
static inline void gpu_put(struct gpu *g, enum region region) {
    cuda_write(&g->device, engine_region(&g->device, region),
               engine_region(&g->host.engine, region), g->device.plan.region[region].bytes);
}

static inline void gpu_poison(struct gpu *g, enum region region) {
    memset(engine_region(&g->host.engine, region), POISON, g->device.plan.region[region].bytes);
    gpu_put(g, region);
}

/* Everything but the weights is poison again on the host, and the counters are zero. gpu_put_all
 * brings it to the device. */
static inline void gpu_reset(struct gpu *g) {
    const struct plan *plan = &g->device.plan;
    const size_t from = region_end(plan, REGION_WEIGHTS);
    memset(g->host.engine.arena + from, POISON, plan->bytes - from);
    memset(engine_region(&g->host.engine, REGION_COUNTERS), 0, plan->region[REGION_COUNTERS].bytes);
}

static inline void gpu_put_all(struct gpu *g) {
    const size_t from = region_end(&g->device.plan, REGION_WEIGHTS);
    cuda_write(&g->device, g->device.arena + from, g->host.engine.arena + from,
               g->device.plan.bytes - from);
}

/* The same weights as random_engine_open makes of this config. */
static inline void gpu_open(struct gpu *g, struct config config, struct limits limits) {
    struct error error;
    uint64_t bytes;
    struct tensor *tensors = allocated(MAX_TENSORS * sizeof *tensors);
    *g = (struct gpu){.host = {.config = config, .state = 1}};
    struct engine *host = &g->host.engine, *device = &g->device;
    limits.device = true;
    host->config = device->config = &g->host.config;
    device->ops = &cuda_ops;
    const int count = config_tensors(&config, tensors, &bytes);
    if (count < 0) abort();
    gpu_must(plan_make(&device->plan, &config, bytes, limits, &error), &error);
    for (int i = 0; i < REGIONS; i++) device->plan.region[i].offset += (size_t)(i + 1) * PLAN_GUARD;
    device->plan.bytes += (REGIONS + 1) * PLAN_GUARD;
    g->host.arena_bytes = device->plan.bytes;
    host->plan = device->plan;
    host->arena = allocated(device->plan.bytes);
    host->layer = calloc((size_t)config.layers, sizeof *host->layer);
    if (!host->layer) abort();
    g->now = allocated(device->plan.bytes);
    gpu_must(device->ops->open(device, &error), &error);
    gpu_must(device->ops->allocate(device, &error), &error);
    gpu_must(engine_locate_weights(device, tensors, (uint64_t)count, &error), &error);
    gpu_must(engine_locate_weights(host, tensors, (uint64_t)count, &error), &error);
    memset(host->arena, POISON, region_end(&host->plan, REGION_WEIGHTS));
    for (int i = 0; i < count; i++) random_tensor(&g->host, &tensors[i]);
    gpu_reset(g);
    cuda_write(device, device->arena, host->arena, device->plan.bytes);
    find_kept(g);
    free(tensors);
}

/* Where the weights, or the guard before them, differ from the host's; SIZE_MAX: nowhere. */
static inline size_t gpu_changed_weight(struct gpu *g) {
    const size_t end = region_end(&g->device.plan, REGION_WEIGHTS), block = 16 << 20;
    for (size_t from = 0; from < end; from += block) {
        const size_t bytes = end - from < block ? end - from : block;
        cuda_read(&g->device, g->now, g->device.arena + from, bytes);
        if (!memcmp(g->now, g->host.engine.arena + from, bytes)) continue;
        for (size_t i = 0; i < bytes; i++)
            if (g->now[i] != g->host.engine.arena[from + i]) return from + i;
    }
    return SIZE_MAX;
}

static inline void gpu_close(struct gpu *g) {
    const size_t at = gpu_changed_weight(g);
    check(at == SIZE_MAX, "C %d, V %d: something wrote among the weights, at byte %zu",
          g->host.config.width, g->host.config.vocab, at);
    g->device.ops->close(&g->device);
    free(g->host.engine.arena);
    free(g->host.engine.layer);
    free(g->now);
}

/* ---- what an operator did ---- */

/* Device to `now`: all but weights and scratch. Returns whether the device is well. */
static inline bool gpu_read(struct gpu *g, const char *name, const char *what) {
    struct error error = {0};
    const int code = g->device.ops->finish(&g->device, &error);
    if (code) check(false, "%s: %s: %s", name, what, error.text);
    for (int i = 0; i < g->kept_count && !code; i++) {
        const struct stretch k = g->kept[i];
        cuda_read(&g->device, g->now + k.from, g->device.arena + k.from, k.to - k.from);
    }
    return !code;
}

/* Bytes at `from`, a place in `now`, were the operator's to write. */
static inline void gpu_allow(struct gpu *g, const void *from, size_t bytes) {
    memcpy(g->host.engine.arena + ((const char *)from - g->now), from, bytes);
}

/* Nothing else has changed. */
static inline void gpu_unchanged(struct gpu *g, const char *name, const char *what) {
    size_t changed = 0, first = 0;
    for (int i = 0; i < g->kept_count; i++) {
        const struct stretch k = g->kept[i];
        char *right = g->host.engine.arena;
        if (!memcmp(right + k.from, g->now + k.from, k.to - k.from)) continue;
        for (size_t at = k.from; at < k.to; at++)
            if (right[at] != g->now[at] && !changed++) first = at;
        memcpy(right + k.from, g->now + k.from, k.to - k.from);
    }
    int r = REGIONS - 1;
    while (r > 0 && g->device.plan.region[r].offset > first) r--;
    check(!changed,
          "%s: %s wrote %zu bytes that are not its own, the first %zu bytes into %s (%zu)", name,
          what, changed, first - g->device.plan.region[r].offset, region_name((enum region)r),
          g->device.plan.region[r].bytes);
}

#endif
