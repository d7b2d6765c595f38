#include "model/plan.h"

#include "kernels/config.h"

static const char *const region_names[REGIONS] = {
    "weights",      "keys",    "values",    "rows",           "RoPE",     "residual stream",
    "qkv",          "queries", "attention", "feed-forward",   "logits",   "input panels",
    "norm factors", "squares", "parts",     "thread buffers", "counters", "sampler"};

const char *region_name(enum region region) {
    return region_names[region];
}

static uint64_t round_up(uint64_t n, uint64_t to) {
    return (n + to - 1) / to * to;
}
static uint64_t max(uint64_t a, uint64_t b) {
    return a > b ? a : b;
}
static uint64_t min(uint64_t a, uint64_t b) {
    return a < b ? a : b;
}

int plan_device_rows(const struct limits *limits) {
    return (int)round_up((uint64_t)limits->chunk, CUDA_TILE_ROWS);
}

int plan_device_ring(const struct config *config, const struct limits *limits, int layer) {
    const uint64_t window = (uint64_t)config->layer[layer].window;
    if (!window) return limits->context;
    const uint64_t seen = round_up(window + (uint64_t)limits->chunk - 1, CUDA_RING);
    return (int)min(seen, (uint64_t)limits->context);
}

/* Bytes of each region. No product can overflow: the limits of the config and of the context bound
 * every factor (2^10 layers x 2^10 slots x 2^10 heads x 2^22 positions x 2^9 x 4 bytes < 2^64). */
static void region_sizes(uint64_t bytes[REGIONS], const struct config *c, uint64_t weight_bytes,
                         struct limits limits) {
    const uint64_t width = (uint64_t)c->width, head_dim = (uint64_t)c->head_dim;
    const uint64_t heads = (uint64_t)c->heads, kv_heads = (uint64_t)c->kv_heads;
    const uint64_t ffn = (uint64_t)c->ffn, rows = (uint64_t)limits.chunk;
    /* A product whose bias or norm comes after it takes the place of q, k and v; on a device also gate and up
     * where their activation does. */
    const bool biased = limits.device && (c->out_bias || c->ffn_bias);
    const bool after = c->norm_placement != NORM_BEFORE || biased;
    const bool apart = limits.device && (!c->gated || c->ffn_bias || c->activation == GELU);
    const uint64_t product = max(after ? width : 0, apart ? (c->gated ? 2 : 1) * ffn : 0);
    const uint64_t positions = (uint64_t)limits.context;
    const uint64_t caches = (uint64_t)c->layers * (uint64_t)limits.slots * kv_heads;
    const uint64_t m = dtype_size(c->weight_dtype);

    bytes[REGION_WEIGHTS] = weight_bytes;
    bytes[REGION_ROWS] = 12 * rows;
    bytes[REGION_ROPE] = 4 * (uint64_t)c->rope_tables * rows * (uint64_t)c->rotary_dims;
    bytes[REGION_X] = 4 * rows * width;
    bytes[REGION_QKV] = 4 * rows * max((heads + 2 * kv_heads) * head_dim, product);
    bytes[REGION_LOGITS] = 4 * (uint64_t)limits.classified * (uint64_t)c->vocab;
    if (limits.device) {
        const uint64_t tiled = (uint64_t)plan_device_rows(&limits);
        uint64_t rings = 0;
        for (int l = 0; l < c->layers; l++) rings += (uint64_t)plan_device_ring(c, &limits, l);
        bytes[REGION_KEYS] = m * rings * (uint64_t)limits.slots * kv_heads * head_dim;
        bytes[REGION_VALUES] = bytes[REGION_KEYS];
        bytes[REGION_Q] = m * rows * heads * head_dim;
        bytes[REGION_A] = m * tiled * heads * head_dim;
        bytes[REGION_H] = m * tiled * ffn;
        bytes[REGION_PANELS] = m * tiled * width;
        bytes[REGION_SCALES] = 4 * rows;
        const uint64_t parts = width / CUDA_LEAST_TILE + 2;
        bytes[REGION_SQUARES] =
            4 * max(max(CUDA_SQUARES, parts) * CUDA_FEW_ROWS, parts * rows); /* whoever wrote x */
        bytes[REGION_PARTS] = 4 * min(rows, CUDA_DECODE_ROWS) * CUDA_PARTS * heads * (head_dim + 2);
        bytes[REGION_COUNTERS] = 4 * CUDA_COUNTERS;
        bytes[REGION_DRAWS] = 4 * (CUDA_DRAW_WORDS + 2 * (uint64_t)c->vocab);
    } else {
        bytes[REGION_KEYS] = 4 * caches * round_up(positions, CPU_PANEL) * head_dim;
        bytes[REGION_VALUES] = 4 * caches * positions * head_dim;
        bytes[REGION_A] = 4 * rows * heads * head_dim;
        bytes[REGION_H] = 4 * rows * (c->gated ? 2 : 1) * ffn;
        bytes[REGION_PANELS] =
            4 * round_up(rows, CPU_PANEL) * max(width, max(heads * head_dim, ffn));
        bytes[REGION_PARTS] = 4 * (round_up(positions, CPU_PART) / CPU_PART) *
                              min(rows, CPU_BRIEF) * heads * (head_dim + 2);
        bytes[REGION_THREADS] = 4 * (uint64_t)limits.threads * THREAD_FLOATS;
    }
}

int plan_make(struct plan *plan, const struct config *config, uint64_t weight_bytes,
              struct limits limits, struct error *error) {
    uint64_t bytes[REGIONS] = {0}, end = 0;
    region_sizes(bytes, config, weight_bytes, limits);
    plan->limits = limits;
    for (int r = 0; r < REGIONS; r++) {
        plan->region[r].offset = end;
        plan->region[r].bytes = bytes[r];
        if (bytes[r] > SIZE_MAX / 2 - PLAN_ALIGN || end > SIZE_MAX / 2)
            return fail(error, EXIT_MEMORY,
                        "the %s of this model do not fit in any memory: %llu bytes",
                        region_names[r], (unsigned long long)bytes[r]);
        end += round_up(bytes[r], PLAN_ALIGN);
    }
    plan->bytes = end;
    return 0;
}

int plan_chunk(const struct config *config, uint64_t weight_bytes, struct limits limits,
               size_t bytes) {
    enum { LEAST = 512, MOST = 8192 };
    const size_t most_of_rows = (size_t)1 << 30;
    for (int chunk = limits.device ? MOST : LEAST; chunk > LEAST; chunk /= 2) {
        struct plan one = {0}, all = {0};
        struct error ignored = {0};
        limits.chunk = 1;
        if (plan_make(&one, config, weight_bytes, limits, &ignored)) break;
        limits.chunk = chunk;
        if (!plan_make(&all, config, weight_bytes, limits, &ignored) && all.bytes <= bytes &&
            all.bytes - one.bytes <= most_of_rows)
            return chunk;
    }
    return LEAST;
}

int plan_largest_context(const struct config *config, uint64_t weight_bytes, struct limits limits,
                         size_t bytes) {
    int fits = 0, too_long = limits.context + 1;
    while (too_long - fits > 1) { /* the size grows with the context: bisection */
        struct plan plan = {0};
        struct error ignored = {0};
        limits.context = fits + (too_long - fits) / 2;
        if (plan_make(&plan, config, weight_bytes, limits, &ignored) || plan.bytes > bytes)
            too_long = limits.context;
        else
            fits = limits.context;
    }
    return fits;
}
