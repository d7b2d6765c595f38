/* Times the CUDA backend on whole models with random weights.
 *
 *   bench_gpu [8B|Qwen3-8B|... (bench_models.h)] [--decode] [--steps] [--prefill] [--operators] [2048 ...]
 *
 * Without names some models, without flags all of it; numbers: decode after so many positions,
 * prompts of such lengths, and no others. A share is of the roof (ops->roof) measured in the
 * same run: of reading for steps of up to 64 rows, of multiply-adds (mma.sync) above. Bytes are those of
 * weights, once a step, and of the cache. */
#define _POSIX_C_SOURCE 200809L
#include "cli/seconds.h"
#include "kernels/config.h"
#include "kernels/cuda_test.h"
#include "tests/bench_models.h"

#include <time.h>

enum { CONTEXT = 131072 + 256, CHUNK = 8192, BURST = 64, ROUNDS = 7, LAUNCHES = 24 };
static const size_t block_bytes = (size_t)64 << 20;

/* What `run` does where nobody asks for anything else. */
static const struct sampling sampling = {.temperature = 0.8f,
                                         .top_k = 40,
                                         .top_p = 0.95f,
                                         .min_p = 0.05f,
                                         .repeat_penalty = 1,
                                         .seed = 42};
static const struct sampling greedy = {.top_p = 1, .repeat_penalty = 1};

/* ---- results ---- */

/* A line of the table. */
struct result {
    const char *model;
    char test[40], note[40];
    double seconds, tokens, bytes, flops; /* tokens 0: an operator */
    struct roof roof;
    bool bytes_bind;
};

static struct result results[512];
static int result_count;

static void keep(struct result result) {
    if (result_count == sizeof results / sizeof *results) return;
    results[result_count++] = result;
    fprintf(stderr, "%s %s: %.1f us\n", result.model, result.test, result.seconds * 1e6);
}

static void print_results(const char *device, int argc, char **argv) {
    char date[32];
    const time_t now = time(NULL);
    struct tm utc;
    strftime(date, sizeof date, "%Y-%m-%d", gmtime_r(&now, &utc));
    printf("%s, %s, bf16, random weights; commit %s:", date, device, COMMIT);
    for (int i = 0; i < argc; i++) printf(" %s", argv[i]);
    puts("");
    for (int i = 0; i < result_count; i++)
        if (!i || strcmp(results[i].model, results[i - 1].model) != 0)
            printf("roof beside %s: read %.2f TB/s, mma.sync %.0f TFLOP/s\n", results[i].model,
                   results[i].roof.bytes_per_second * 1e-12,
                   results[i].roof.flops_per_second * 1e-12);
    puts("| model | test | us | tokens/s | MB | GB/s | TFLOP/s | share of the roof | |");
    puts("|---|---|---|---|---|---|---|---|---|");
    for (int i = 0; i < result_count; i++) {
        const struct result *r = &results[i];
        const double share = r->bytes_bind ? r->bytes / r->seconds / r->roof.bytes_per_second
                                           : r->flops / r->seconds / r->roof.flops_per_second;
        char rate[32] = "";
        if (r->tokens > 0) snprintf(rate, sizeof rate, "%.1f", r->tokens / r->seconds);
        printf("| %s | %s | %.2f | %s | %.1f | %.0f | %.1f | %.1f %% | %s |\n", r->model, r->test,
               r->seconds * 1e6, rate, r->bytes * 1e-6, r->bytes / r->seconds * 1e-9,
               r->flops / r->seconds * 1e-12, 100 * share, r->note);
    }
}

/* ---- the engine ---- */

struct bench {
    const char *model;
    struct config config;
    struct engine engine;
    struct roof roof;
    int32_t tokens[CHUNK];
};

static void must(int code, const struct error *error) {
    if (!code) return;
    fprintf(stderr, "stopped: %s\n", error->text);
    exit(1);
}

/* Random numbers over a whole region, the same block again and again. */
static void fill(struct engine *e, enum region region, const char *block) {
    const size_t bytes = e->plan.region[region].bytes;
    for (size_t at = 0; at < bytes; at += block_bytes)
        cuda_write(e, (char *)engine_region(e, region) + at, block,
                   bytes - at < block_bytes ? bytes - at : block_bytes);
}

/* Norms of ones and the usual frequencies, where the random block has made no sense of them. */
static void write_vector(struct engine *e, const struct tensor *t) {
    const size_t count = t->bytes / 4;
    float *values = malloc(t->bytes);
    if (t->dtype != F32 || !values) abort();
    for (size_t i = 0; i < count; i++)
        values[i] = strcmp(t->name, "rope") != 0 ? 1 : 1 / (float)(1 + 3 * i);
    cuda_write(e, (char *)engine_region(e, REGION_WEIGHTS) + t->offset, values, t->bytes);
    free(values);
}

static void bench_open(struct bench *b, int model, const char *block) {
    struct error error;
    uint64_t bytes = 0;
    struct tensor *tensors = malloc(MAX_TENSORS * sizeof *tensors);
    if (!tensors) abort();
    *b = (struct bench){.model = bench_models[model].name,
                        .config = bench_config(&bench_models[model])};
    for (int i = 0; i < CHUNK; i++) b->tokens[i] = (i * 7919 + 11) % b->config.vocab_used;
    struct engine *e = &b->engine;
    e->config = &b->config;
    e->ops = &cuda_ops;
    const int count = config_tensors(&b->config, tensors, &bytes);
    if (count < 0) abort();
    must(plan_make(&e->plan, &b->config, bytes,
                   (struct limits){CONTEXT, CHUNK, 1, CUDA_GRAPH_ROWS, 1, true}, &error),
         &error);
    must(e->ops->open(e, &error), &error);
    must(e->ops->allocate(e, &error), &error);
    must(engine_locate_weights(e, tensors, (uint64_t)count, &error), &error);
    fill(e, REGION_WEIGHTS, block);
    fill(e, REGION_KEYS, block);
    fill(e, REGION_VALUES, block);
    for (int i = 0; i < count; i++)
        if (tensors[i].dims == 1 || strstr(tensors[i].name, "norm") ||
            !strcmp(tensors[i].name, "rope"))
            write_vector(e, &tensors[i]);
    free(tensors);
    e->ops->roof(e, &b->roof);
    must(e->ops->finish(e, &error), &error);
}

static void finish(struct engine *e) {
    struct error error;
    must(e->ops->finish(e, &error), &error);
}

/* ---- timing ---- */

static int ascending(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double values[ROUNDS]) {
    qsort(values, ROUNDS, sizeof *values, ascending);
    return values[ROUNDS / 2];
}

/* Seconds of one of `repeats` steps. */
static double seconds_of_step(struct engine *e, struct rows rows, int repeats,
                              void (*work)(struct engine *, struct rows)) {
    double taken[ROUNDS];
    e->ops->step(e, rows, work, NULL); /* captured, and warm */
    for (int round = 0; round < ROUNDS; round++) {
        finish(e);
        const double start = seconds();
        for (int i = 0; i < repeats; i++) e->ops->step(e, rows, work, NULL);
        finish(e);
        taken[round] = (seconds() - start) / repeats;
    }
    return median(taken);
}

/* Numbers among the arguments: positions before decode and lengths of prompts, all others are left out. */
static int wanted[8], wanted_count;

static bool want(const char *argument) {
    char *end;
    const long number = strtol(argument, &end, 10);
    if (end == argument || *end || number < 1 || wanted_count == 8) return false;
    wanted[wanted_count++] = (int)number;
    return true;
}

static bool is_wanted(int number) {
    for (int i = 0; i < wanted_count; i++)
        if (wanted[i] == number) return true;
    return wanted_count == 0;
}

/* ---- decode ---- */

/* The host loop, one draw ahead: seconds a token. */
static double burst(struct bench *b, int context, struct sampler *sampler) {
    struct engine *e = &b->engine;
    const struct rows one = {1, 1};
    struct error error;
    int32_t id;
    e->ops->set_rows(e, b->tokens, 1, 0, context);
    finish(e);
    const double start = seconds();
    e->ops->step(e, one, forward, sampler);
    for (int i = 0; i < BURST; i++) {
        if (i + 1 < BURST) e->ops->step(e, one, forward, sampler);
        must(e->ops->take(e, &id, &error), &error);
    }
    return (seconds() - start) / BURST;
}

static void bench_decode(struct bench *b) {
    static const struct {
        int context;
        const struct sampling *how;
        const char *note;
        bool general;
    } cases[] = {{16, &greedy, "", false},
                 {16, &sampling, "top-k 40", false},
                 {1000, &greedy, "", false},
                 {4096, &greedy, "", false},
                 {32768, &greedy, "", false},
                 {16, &greedy, "general path", true},
                 {1000, &greedy, "general path", true}};
    for (int i = 0; i < (int)(sizeof cases / sizeof *cases); i++) {
        double taken[ROUNDS];
        struct sampler sampler;
        struct error error;
        struct result r = {.model = b->model, .tokens = 1, .roof = b->roof, .bytes_bind = true};
        if (!is_wanted(cases[i].context)) continue;
        must(sampler_open(&sampler, *cases[i].how, b->config.vocab_used, &error), &error);
        cuda_general_path(&b->engine, cases[i].general);
        burst(b, cases[i].context, &sampler);
        for (int round = 0; round < ROUNDS; round++)
            taken[round] = burst(b, cases[i].context, &sampler);
        snprintf(r.test, sizeof r.test, "decode after %d", cases[i].context);
        snprintf(r.note, sizeof r.note, "%s", cases[i].note);
        r.seconds = median(taken);
        step_work(&b->config, 1, 1, cases[i].context + BURST / 2, &r.bytes, &r.flops);
        keep(r);
        sampler_close(&sampler);
    }
    cuda_general_path(&b->engine, false);
}

/* ---- steps of several rows ---- */

/* Around every change of kernels (kernels/config.h). */
static void bench_steps(struct bench *b) {
    static const int rows[] = {1,  2,  4,   8,   16,  17,  24,  32,  48,  64, 65,
                               96, 97, 128, 129, 192, 193, 256, 257, 384, 512};
    enum { AFTER = 1000 };
    double one = 0;
    for (int i = 0; i < (int)(sizeof rows / sizeof *rows); i++) {
        const int T = rows[i], classified = T < CUDA_GRAPH_ROWS ? T : CUDA_GRAPH_ROWS;
        struct result r = {
            .model = b->model, .tokens = T, .roof = b->roof, .bytes_bind = T <= CUDA_FEW_ROWS};
        b->engine.ops->set_rows(&b->engine, b->tokens, T, 0, AFTER);
        r.seconds = seconds_of_step(&b->engine, (struct rows){T, classified},
                                    T > CUDA_GRAPH_ROWS ? 4 : LAUNCHES, forward);
        if (T == 1) one = r.seconds;
        snprintf(r.test, sizeof r.test, "step of %d after %d", T, AFTER);
        snprintf(r.note, sizeof r.note, "%.2f times one row", r.seconds / one);
        step_work(&b->config, T, classified, AFTER, &r.bytes, &r.flops);
        keep(r);
    }
}

/* ---- prefill ---- */

/* A prompt of T tokens goes in steps of up to CHUNK rows. */
static int rows_at(int T, int at) {
    return T - at < CHUNK ? T - at : CHUNK;
}

/* Its last row alone is classified. */
static void read_prompt(struct bench *b, int T) {
    struct engine *e = &b->engine;
    for (int at = 0; at < T; at += CHUNK) {
        e->ops->set_rows(e, b->tokens, rows_at(T, at), 0, at);
        e->ops->step(e, (struct rows){rows_at(T, at), at + CHUNK >= T}, forward, NULL);
    }
}

/* From the prompt to the token that follows it, in the host's hands, beside the decode step that a
 * token takes. */
static void bench_first_token(struct bench *b) {
    enum { PROMPT = 16 };
    double taken[ROUNDS], steps[ROUNDS];
    struct sampler sampler;
    struct engine *e = &b->engine;
    struct error error;
    struct result r = {.model = b->model, .tokens = PROMPT, .roof = b->roof, .bytes_bind = true};
    must(sampler_open(&sampler, greedy, b->config.vocab_used, &error), &error);
    for (int round = -1; round < ROUNDS; round++) { /* the first one captures */
        int32_t id;
        const double step = burst(b, PROMPT, &sampler), start = seconds();
        e->ops->set_rows(e, b->tokens, PROMPT, 0, 0);
        e->ops->step(e, (struct rows){PROMPT, 1}, forward, &sampler);
        must(e->ops->take(e, &id, &error), &error);
        if (round < 0) continue;
        steps[round] = step;
        taken[round] = seconds() - start;
    }
    r.seconds = median(taken);
    snprintf(r.test, sizeof r.test, "first token of a prompt of %d", PROMPT);
    snprintf(r.note, sizeof r.note, "%.2f times a decode step", r.seconds / median(steps));
    step_work(&b->config, PROMPT, 1, 0, &r.bytes, &r.flops);
    keep(r);
    sampler_close(&sampler);
}

static void bench_prefill(struct bench *b) {
    static const int lengths[] = {512, 2048, CHUNK, 4 * CHUNK};
    bench_first_token(b);
    for (int i = 0; i < (int)(sizeof lengths / sizeof *lengths); i++) {
        const int T = lengths[i], repeats = T < CHUNK ? 4 : 1;
        if (!is_wanted(T)) continue;
        double taken[ROUNDS];
        struct result r = {.model = b->model, .tokens = T, .roof = b->roof};
        read_prompt(b, T); /* warm */
        for (int round = 0; round < ROUNDS; round++) {
            finish(&b->engine);
            const double start = seconds();
            for (int repeat = 0; repeat < repeats; repeat++) read_prompt(b, T);
            finish(&b->engine);
            taken[round] = (seconds() - start) / repeats;
        }
        r.seconds = median(taken);
        snprintf(r.test, sizeof r.test, "prompt of %d", T);
        if (T > CHUNK) snprintf(r.note, sizeof r.note, "in steps of %d", CHUNK);
        for (int at = 0; at < T; at += CHUNK)
            step_work(&b->config, rows_at(T, at), at + CHUNK >= T, at, &r.bytes, &r.flops);
        keep(r);
    }
}

/* ---- operators ---- */

/* What time_launches launches: one operator, layer after layer. */
static enum operator timed;

static void time_launches(struct engine *e, struct rows rows) {
    for (int i = 0; i < LAUNCHES; i++) {
        const int layer = i % e->config->layers;
        switch (timed) {
        case EMBED: e->ops->embed(e, rows); break;
        case QKV: e->ops->qkv(e, layer, rows); break;
        case ATTEND: e->ops->attend(e, layer, rows); break;
        case OUT: e->ops->project(e, layer, ATTENTION_OUT, rows); break;
        case GATE_UP: e->ops->gate_up(e, layer, rows); break;
        case DOWN: e->ops->project(e, layer, FEED_FORWARD_DOWN, rows); break;
        default: e->ops->classify(e, rows);
        }
    }
}

static void bench_draw(struct bench *b, const struct sampling *how, const char *name) {
    struct engine *e = &b->engine;
    const struct rows one = {1, 1};
    struct result r = {.model = b->model, .roof = b->roof, .bytes_bind = true};
    struct sampler sampler;
    struct error error;
    double taken[ROUNDS];
    int32_t id;
    must(sampler_open(&sampler, *how, b->config.vocab_used, &error), &error);
    for (int round = -1; round < ROUNDS; round++) { /* the first one warms up */
        e->ops->set_rows(e, b->tokens, 1, 0, 0);
        e->ops->step(e, one, forward, NULL);
        finish(e);
        const double start = seconds();
        e->ops->step(e, one, no_operators, &sampler);
        for (int i = 1; i < LAUNCHES; i++) {
            e->ops->step(e, one, no_operators, &sampler);
            must(e->ops->take(e, &id, &error), &error);
        }
        must(e->ops->take(e, &id, &error), &error);
        if (round >= 0) taken[round] = (seconds() - start) / LAUNCHES;
    }
    snprintf(r.test, sizeof r.test, "draw, %s", name);
    r.seconds = median(taken);
    r.bytes = 4.0 * b->config.vocab_used;
    keep(r);
    sampler_close(&sampler);
}

/* One operator in a step of T rows after `context` positions. */
static void bench_operator(struct bench *b, enum operator o, int T, int context) {
    enum { L2_BYTES = 60 << 20 };
    struct engine *e = &b->engine;
    struct result r = {.model = b->model, .roof = b->roof, .bytes_bind = T <= CUDA_GRAPH_ROWS};
    const struct rows rows = {T, o == CLASSIFY ? T : 1};
    const int layers = b->config.layers < LAUNCHES ? b->config.layers : LAUNCHES;
    timed = o;
    cuda_general_path(e, false);
    r.seconds = seconds_of_step(e, rows, T <= CUDA_GRAPH_ROWS ? 8 : 1, time_launches) / LAUNCHES;
    snprintf(r.test, sizeof r.test, "%s, T %d after %d", names[o], T, context);
    r.bytes = bytes_of(&b->config, 0, o, T, context);
    r.flops = flops_of(&b->config, 0, o, T, context);
    const bool normed = o == QKV || o == GATE_UP || o == CLASSIFY;
    /* In a step of Hopper's own path whoever wrote x has prepared it. */
    if (normed && (T > 1 || b->config.norm_placement == NORM_BEFORE))
        snprintf(r.note, sizeof r.note, "and its norm");
    if (r.bytes * (o == CLASSIFY ? 1 : layers) < L2_BYTES)
        snprintf(r.note, sizeof r.note, "stays in L2");
    keep(r);
}

/* The graphs that steps have captured are forgotten before and after: what is captured here is one
 * operator. */
static void bench_operators(struct bench *b) {
    static const int rows[] = {1, 4, 16, 512, 2048}, far[] = {32768, 131072};
    enum { AFTER = 1000 };
    struct engine *e = &b->engine;
    bench_draw(b, &greedy, "greedy");
    bench_draw(b, &sampling, "top-k 40");
    for (int i = 0; i < (int)(sizeof rows / sizeof *rows); i++) {
        const int T = rows[i];
        e->ops->set_rows(e, b->tokens, T, 0, AFTER);
        e->ops->step(e, (struct rows){T, 1}, forward, NULL); /* valid inputs for every operator */
        for (int o = EMBED; o < OPERATORS; o++)
            if (o != CLASSIFY || T <= CUDA_GRAPH_ROWS) /* else the last row alone, as above */
                bench_operator(b, (enum operator)o, T, AFTER);
    }
    for (int i = 0; i < 2; i++) {
        e->ops->set_rows(e, b->tokens, 1, 0, far[i]);
        bench_operator(b, ATTEND, 1, far[i]);
    }
    cuda_general_path(e, false);
}

/* ---- from the command line down ---- */

static bool has(int argc, char **argv, const char *argument) {
    for (int i = 1; i < argc; i++)
        if (!strcmp(argv[i], argument)) return true;
    return false;
}

int main(int argc, char **argv) {
    static const struct {
        const char *flag;
        void (*run)(struct bench *b);
    } parts[] = {{"--decode", bench_decode},
                 {"--steps", bench_steps},
                 {"--prefill", bench_prefill},
                 {"--operators", bench_operators}};
    enum { PARTS = sizeof parts / sizeof *parts };
    static struct bench b;
    char why[160], device[160] = "";
    bool some_parts = false, some_models = false;
    for (int i = 1; i < argc; i++) {
        bool known = false;
        for (int p = 0; p < PARTS; p++) known |= !strcmp(argv[i], parts[p].flag);
        for (int m = 0; m < BENCH_MODELS; m++) known |= !strcmp(argv[i], bench_models[m].name);
        if (known || want(argv[i])) continue;
        fprintf(stderr, "bench_gpu: %s is no model and no flag of its first lines\n", argv[i]);
        return 2;
    }
    for (int i = 0; i < PARTS; i++) some_parts |= has(argc, argv, parts[i].flag);
    for (int i = 0; i < BENCH_MODELS; i++) some_models |= has(argc, argv, bench_models[i].name);
    if (!cuda_usable(NULL, 0, why)) {
        printf("skipped: %s\n", why);
        return 0;
    }
    uint64_t state = 1;
    char *block = malloc(block_bytes);
    if (!block) abort();
    random_weights(&state, block, BF16, block_bytes / 2, 0.03f);
    for (int m = 0; m < BENCH_MODELS; m++) {
        if (some_models ? !has(argc, argv, bench_models[m].name) : !bench_models[m].chosen)
            continue;
        bench_open(&b, m, block);
        snprintf(device, sizeof device, "%s", b.engine.device);
        for (int i = 0; i < PARTS; i++)
            if (!some_parts || has(argc, argv, parts[i].flag)) parts[i].run(&b);
        b.engine.ops->close(&b.engine);
    }
    free(block);
    print_results(device, argc, argv);
    return 0;
}
