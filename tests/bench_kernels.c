/* Times every operator of the CPU backend on the shapes of SmolLM2-135M with random weights.
 *
 *   bench_kernels [bf16|f32] [threads] [context] [T ...]
 *
 * A round is the roof, then one whole step of each T after `context` positions; printed are medians
 * over the rounds: microseconds a step, GB/s of weights and cache, GFLOP/s, and the share of that
 * round's roof (of reading or of multiply-adds, whichever binds). */
#define _POSIX_C_SOURCE 200809L
#include "cli/seconds.h"
#include "cli/threads.h"
#include "tests/random_engine.h"

static const struct shape smollm2 = {
    .C = 576, .L = 30, .H = 9, .G = 3, .D = 64, .F = 1536, .V = 49152};
static const int all_rows[] = {1,  2,  3,  4,  5,  6,  7,  8,  9,  10,  11,  12,
                               13, 14, 15, 16, 17, 24, 32, 48, 64, 128, 256, 512};

enum operator{ EMBED, QKV, ATTEND, OUT, GATE_UP, DOWN, CLASSIFY, STEP, OPERATORS };
static const char *const names[] = {"embed",   "qkv",  "attend",   "out",
                                    "gate_up", "down", "classify", "step"};
enum { ROUNDS = 15, MAX_TS = 64 };

struct sample {
    double seconds, share;
};

/* ---- what the work is ---- */

/* Bytes of weights and cache that an operator reads in a step of T rows at `context`. */
static double bytes_of(const struct config *c, enum operator o, int T, int context) {
    const double C = c->width, F = c->ffn, D = c->head_dim, H = c->heads, G = c->kv_heads;
    const double weight = (double)dtype_size(c->weight_dtype), layers = c->layers;
    switch (o) {
    case QKV: return layers * weight * (H + 2 * G) * D * C;
    case ATTEND: return layers * 8 * G * D * (context + T);
    case OUT: return layers * weight * C * H * D;
    case GATE_UP: return layers * weight * 2 * F * C;
    case DOWN: return layers * weight * F * C;
    case CLASSIFY: return weight * c->vocab * C;
    default: return 0;
    }
}

static double flops_of(const struct config *c, enum operator o, int T, int context) {
    const double weight = (double)dtype_size(c->weight_dtype);
    if (o == ATTEND)
        return 4.0 * c->layers * T * (context + (T + 1) / 2.0) * c->heads * c->head_dim;
    return 2 * bytes_of(c, o, 1, 0) / weight * (o == CLASSIFY ? 1 : T);
}

/* ---- timing ---- */

static double timed(struct engine *e, enum operator o, int layer, struct rows r) {
    const double start = seconds();
    switch (o) {
    case EMBED: e->ops->embed(e, r); break;
    case QKV: e->ops->qkv(e, layer, r); break;
    case ATTEND: e->ops->attend(e, layer, r); break;
    case OUT: e->ops->project(e, layer, ATTENTION_OUT, r); break;
    case GATE_UP: e->ops->gate_up(e, layer, r); break;
    case DOWN: e->ops->project(e, layer, FEED_FORWARD_DOWN, r); break;
    default: e->ops->classify(e, r);
    }
    return seconds() - start;
}

/* One step of T rows; the last of them gets logits. */
static void run_step(struct engine *e, int T, int context, const struct roof *roof,
                     struct sample sample[OPERATORS]) {
    static int32_t tokens[512];
    const struct rows r = {T, 1};
    double bytes = 0, flops = 0;
    for (int o = 0; o < OPERATORS; o++) sample[o].seconds = 0;
    for (int t = 0; t < T; t++) tokens[t] = (t * 7919 + 11) % e->config->vocab_used;
    const double start = seconds();
    e->ops->set_rows(e, tokens, T, 0, context);
    sample[EMBED].seconds = timed(e, EMBED, 0, r);
    for (int l = 0; l < e->config->layers; l++)
        for (int o = QKV; o <= DOWN; o++) sample[o].seconds += timed(e, (enum operator)o, l, r);
    sample[CLASSIFY].seconds = timed(e, CLASSIFY, 0, r);
    sample[STEP].seconds = seconds() - start;
    for (int o = 0; o < OPERATORS; o++) {
        double b = o == STEP ? bytes : bytes_of(e->config, (enum operator)o, T, context);
        double f = o == STEP ? flops : flops_of(e->config, (enum operator)o, T, context);
        bytes += b, flops += f;
        b /= roof->bytes_per_second * sample[o].seconds;
        f /= roof->flops_per_second * sample[o].seconds;
        sample[o].share = b > f ? b : f;
    }
}

static int ascending(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *values) {
    qsort(values, ROUNDS, sizeof *values, ascending);
    return values[ROUNDS / 2];
}

static void print_rows(const struct config *c, int T, int context,
                       struct sample sample[ROUNDS][OPERATORS]) {
    double bytes = 0, flops = 0;
    for (int o = 0; o < OPERATORS; o++) {
        double time[ROUNDS], share[ROUNDS];
        for (int i = 0; i < ROUNDS; i++)
            time[i] = sample[i][o].seconds, share[i] = sample[i][o].share;
        const double t = median(time), b = bytes_of(c, (enum operator)o, T, context);
        const double f = flops_of(c, (enum operator)o, T, context);
        bytes += b, flops += f;
        printf("%4d %-9s %10.1f us %7.2f GB/s %8.1f GFLOP/s %6.1f %%\n", T, names[o], t * 1e6,
               (o == STEP ? bytes : b) / t * 1e-9, (o == STEP ? flops : f) / t * 1e-9,
               100 * median(share));
    }
}

int main(int argc, char **argv) {
    static struct sample sample[MAX_TS][ROUNDS][OPERATORS];
    const enum dtype dtype = argc > 1 && !strcmp(argv[1], "f32") ? F32 : BF16;
    const int threads = argc > 2 ? atoi(argv[2]) : default_threads();
    const int context = argc > 3 ? atoi(argv[3]) : 16;
    int T[MAX_TS], count = 0;
    for (int i = 4; i < argc && count < MAX_TS; i++) T[count++] = atoi(argv[i]);
    if (argc < 5)
        for (; count < (int)(sizeof all_rows / sizeof *all_rows); count++)
            T[count] = all_rows[count];

    struct random_engine r;
    random_engine_open(&r, random_config(smollm2, dtype),
                       (struct limits){context + 512, 512, 1, 1, threads, false});
    struct engine *e = &r.engine;
    memset(engine_region(e, REGION_KEYS), 0, e->plan.region[REGION_KEYS].bytes);
    memset(engine_region(e, REGION_VALUES), 0, e->plan.region[REGION_VALUES].bytes);
    double read[ROUNDS], peak[ROUNDS];
    for (int i = -1; i < ROUNDS; i++) { /* the first round warms up */
        struct roof roof;
        const int round = i < 0 ? 0 : i;
        e->ops->roof(e, &roof);
        read[round] = roof.bytes_per_second, peak[round] = roof.flops_per_second;
        for (int j = 0; j < count; j++) run_step(e, T[j], context, &roof, sample[j][round]);
    }
    printf("SmolLM2-135M %s on %s after %d positions; roof %.1f GB/s, %.0f GFLOP/s\n",
           dtype_name(dtype), e->device, context, median(read) * 1e-9, median(peak) * 1e-9);
    for (int j = 0; j < count; j++) print_rows(e->config, T[j], context, sample[j]);
    random_engine_close(&r);
    return 0;
}
