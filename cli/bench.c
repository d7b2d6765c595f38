#define _POSIX_C_SOURCE 200809L
#include "cli/bench.h"

#include "cli/output.h"
#include "cli/seconds.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef COMMIT
#error "the build passes -DCOMMIT"
#endif

/* ---- what to run ---- */

static int read_list(int *list, int *count, const char *name, const char *text, int low,
                     struct error *error) {
    *count = 0;
    for (const char *at = text; *at;) {
        char *end = NULL;
        errno = 0;
        long value = strtol(at, &end, 10);
        if (end == at || errno || value < low || value > 1 << 22 || (*end && *end != ','))
            return fail(error, EXIT_USAGE,
                        "--%s is %s, expected numbers from %d to %d with commas between", name,
                        text, low, 1 << 22);
        if (*count == MAX_BENCH_LIST)
            return fail(error, EXIT_USAGE, "--%s has more than %d entries", name, MAX_BENCH_LIST);
        list[(*count)++] = (int)value;
        at = *end ? end + 1 : end;
    }
    return 0;
}

int bench_read(struct bench_plan *plan, const struct options *options, struct error *error) {
    int code = read_list(plan->pp, &plan->pp_count, "pp", options->pp, 0, error);
    if (!code) code = read_list(plan->tg, &plan->tg_count, "tg", options->tg, 0, error);
    if (!code) code = read_list(plan->depth, &plan->depth_count, "depth", options->depth, 0, error);
    if (code) return code;
    int longest = 1, deepest = 0;
    for (int i = 0; i < plan->pp_count; i++)
        longest = plan->pp[i] > longest ? plan->pp[i] : longest;
    for (int i = 0; i < plan->tg_count; i++)
        longest = plan->tg[i] > longest ? plan->tg[i] : longest;
    for (int i = 0; i < plan->depth_count; i++)
        deepest = plan->depth[i] > deepest ? plan->depth[i] : deepest;
    plan->context = longest + deepest;
    return 0;
}

/* One line of the table: a prompt (pp) or an answer (tg) of `tokens` after `depth` positions. */
struct test {
    int tokens, depth;
    bool answer;
};

struct result {
    struct test test;
    char name[32];
    double rate, deviation;               /* tokens per second */
    double bytes_rate, flops_rate;        /* per second */
    double roof_bytes, roof_flops, share; /* of the roof that binds: bytes for tg, FLOPs for pp */
};

/* ---- what a run moves and computes ---- */

/* Bytes read from memory and FLOPs of one step whose first row is at `position`: every weight once,
 * the cache up to each row (once for the rows of a step), two FLOPs a multiply-add. */
static void step_work(const struct engine *e, struct rows rows, int position, double *bytes,
                      double *flops) {
    const struct config *c = e->config;
    const double width = c->width, vocab = c->vocab, layers = c->layers;
    const double queries = (double)c->heads * c->head_dim, keys = (double)c->kv_heads * c->head_dim;
    const double layer = (2 * queries + 2 * keys) * width + (c->gated ? 3.0 : 2.0) * c->ffn * width;
    const double classifier = rows.classified ? vocab * width : 0;
    const double cached = e->plan.limits.device ? (double)dtype_size(c->weight_dtype) : 4;
    const double last = (double)position + rows.count, before = position;
    const double pairs =
        (last * (last + 1) - before * (before + 1)) / 2; /* (row, position it sees) */
    *bytes += (layers * layer + classifier) * (double)dtype_size(c->weight_dtype) +
              layers * 2 * keys * last * cached;
    *flops += 2 * (layers * layer * rows.count + classifier * rows.classified) +
              4 * layers * queries * pairs;
}

/* ---- running ---- */

static void random_tokens(int32_t *tokens, int count, int vocab, uint32_t *state) {
    for (int i = 0; i < count; i++) {
        *state = *state * 1664525U + 1013904223U; /* Numerical Recipes' LCG */
        tokens[i] = (int32_t)((*state >> 8) % (uint32_t)vocab);
    }
}

/* A run of one test: the engine, its forward pass, and where random tokens come from. */
struct runner {
    struct engine *e;
    void (*forward)(struct engine *, struct rows);
    struct sampler greedy;
    int32_t *tokens; /* [chunk] */
    uint32_t state;
};

/* A prompt of test.tokens random tokens from `position` on; its last row gets logits. */
static int run_prompt(struct runner *r, struct test test, int position, struct error *error) {
    struct engine *e = r->e;
    const int chunk = e->plan.limits.chunk;
    for (int done = 0; done < test.tokens; done += chunk) {
        int count = test.tokens - done < chunk ? test.tokens - done : chunk;
        random_tokens(r->tokens, count, e->config->vocab_used, &r->state);
        e->ops->set_rows(e, r->tokens, count, 0, position + done);
        e->ops->step(e, (struct rows){count, done + count == test.tokens}, r->forward, NULL);
    }
    return e->ops->finish(e, error);
}

/* An answer of test.tokens tokens, drawn and taken as generation does it. */
static int run_answer(struct runner *r, struct test test, int position, struct error *error) {
    struct engine *e = r->e;
    int code = 0, taken = 0;
    int32_t id;
    random_tokens(r->tokens, 1, e->config->vocab_used, &r->state);
    e->ops->set_rows(e, r->tokens, 1, 0, position);
    for (int asked = 1; asked <= test.tokens && !code; asked++) {
        e->ops->step(e, (struct rows){1, 1}, r->forward, &r->greedy);
        for (; taken < asked - e->ops->ahead && !code; taken++) code = e->ops->take(e, &id, error);
    }
    for (; taken < test.tokens && !code; taken++) code = e->ops->take(e, &id, error);
    return code;
}

static void test_work(const struct engine *e, struct test test, double *bytes, double *flops) {
    const int step = test.answer ? 1 : e->plan.limits.chunk;
    *bytes = *flops = 0;
    for (int done = 0; done < test.tokens; done += step) {
        int count = test.tokens - done < step ? test.tokens - done : step;
        struct rows rows = {count, test.answer || done + count == test.tokens};
        step_work(e, rows, test.depth + done, bytes, flops);
    }
}

/* Repetitions of one test, the roof measured beside each. */
static int run_test(struct runner *runner, struct test test, const struct options *options,
                    struct result *result, struct error *error) {
    struct engine *e = runner->e;
    const int repetitions = options->repetitions;
    double bytes = 0, flops = 0, sum = 0, squares = 0;
    runner->state = 1;
    *result = (struct result){.test = test};
    snprintf(result->name, sizeof result->name, test.depth ? "%s%d @ d%d" : "%s%d",
             test.answer ? "tg" : "pp", test.tokens, test.depth);
    test_work(e, test, &bytes, &flops);
    for (int r = -1; r < repetitions; r++) { /* run -1 warms up */
        struct roof roof;
        struct test fill = {.tokens = test.depth};
        int code = run_prompt(runner, fill, 0, error);
        if (code) return code;
        e->ops->roof(e, &roof);
        double start = seconds();
        code = (test.answer ? run_answer : run_prompt)(runner, test, test.depth, error);
        double taken = seconds() - start;
        if (code) return code;
        if (r < 0) continue;
        double rate = test.tokens / taken;
        sum += rate;
        squares += rate * rate;
        result->roof_bytes += roof.bytes_per_second / repetitions;
        result->roof_flops += roof.flops_per_second / repetitions;
        result->share +=
            (test.answer ? bytes / roof.bytes_per_second : flops / roof.flops_per_second) / taken /
            repetitions;
    }
    result->rate = sum / repetitions;
    if (repetitions > 1)
        result->deviation = sqrt(fmax(0, (squares - sum * result->rate) / (repetitions - 1)));
    result->bytes_rate = bytes / test.tokens * result->rate;
    result->flops_rate = flops / test.tokens * result->rate;
    return 0;
}

/* ---- printing ---- */

struct model_line {
    char name[64], size[32], params[32];
};

static struct model_line describe(const struct engine *e) {
    struct model_line line;
    const struct config *c = e->config;
    snprintf(line.name, sizeof line.name, "%.48s %s", c->name, dtype_name(c->weight_dtype));
    snprintf(line.size, sizeof line.size, "%.1f MB",
             (double)e->plan.region[REGION_WEIGHTS].bytes * 1e-6);
    snprintf(line.params, sizeof line.params, "%.2f M", (double)config_parameters(c) * 1e-6);
    return line;
}

/* A string for JSON or CSV: quotes, backslashes and control characters made harmless. */
static void print_quoted(const char *text, const char *quote) {
    putchar('"');
    for (; *text; text++) {
        if (*text == '"') fputs(quote, stdout);
        if (*text == '\\' && quote[0] == '\\') putchar('\\');
        putchar((unsigned char)*text < 0x20 ? ' ' : *text);
    }
    putchar('"');
}

static void print_md(const struct result *r, const struct engine *e) {
    struct model_line line = describe(e);
    const bool bytes_bind = r->test.answer;
    printf("| %s | %s | %s | %s | %d | %s | ", line.name, line.size, line.params, e->ops->name,
           e->plan.limits.threads, r->name);
    printf("%.2f ± %.2f | %.2f | %.2f | %.1f %% of %.1f %s |\n", r->rate, r->deviation,
           r->bytes_rate * 1e-9, r->flops_rate * 1e-9, 100 * r->share,
           (bytes_bind ? r->roof_bytes : r->roof_flops) * 1e-9, bytes_bind ? "GB/s" : "GFLOP/s");
}

static void print_number(const char *key, double value, bool csv) {
    if (!csv) printf("\"%s\": ", key);
    printf(csv ? "%.6g," : "%.6g, ", value);
}

static void print_record(const struct result *r, const struct engine *e, bool csv) {
    const char *quote = csv ? "\"" : "\\";
    const struct {
        const char *key;
        const char *text;
    } texts[] = {{"model", e->config->name},
                 {"dtype", dtype_name(e->config->weight_dtype)},
                 {"backend", e->ops->name},
                 {"device", e->device},
                 {"commit", COMMIT}};
    fputs(csv ? "" : "{\"test\": ", stdout);
    print_quoted(r->name, quote);
    fputs(csv ? "," : ", ", stdout);
    print_number("tokens_per_second", r->rate, csv);
    print_number("stddev", r->deviation, csv);
    print_number("bytes_per_second", r->bytes_rate, csv);
    print_number("flops_per_second", r->flops_rate, csv);
    print_number("roof_bytes_per_second", r->roof_bytes, csv);
    print_number("roof_flops_per_second", r->roof_flops, csv);
    print_number("roof_share", r->share, csv);
    print_number("params", (double)config_parameters(e->config), csv);
    print_number("threads", e->plan.limits.threads, csv);
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        if (!csv) printf("\"%s\": ", texts[i].key);
        print_quoted(texts[i].text, quote);
        if (i + 1 < sizeof texts / sizeof *texts) fputs(csv ? "," : ", ", stdout);
    }
    fputs(csv ? "\n" : "}", stdout);
}

static void print_head(const struct engine *e, const struct options *options) {
    if (options->form == FORM_MD)
        puts("| model | size | params | backend | threads | test | t/s | GB/s | GFLOP/s | of the "
             "roof "
             "|\n|---|---|---|---|---|---|---|---|---|---|");
    if (options->form == FORM_CSV)
        puts("test,tokens_per_second,stddev,bytes_per_second,flops_per_second,"
             "roof_bytes_per_second,roof_flops_per_second,roof_share,params,threads,model,dtype,"
             "backend,device,commit");
    if (options->form == FORM_JSON) fputs("[", stdout);
    note(options, "%s; %d repetitions after one that is dropped", e->device, options->repetitions);
}

static void print_result(const struct result *r, const struct engine *e,
                         const struct options *options, bool first) {
    switch (options->form) {
    case FORM_MD: print_md(r, e); break;
    case FORM_CSV: print_record(r, e, true); break;
    case FORM_JSON:
        fputs(first ? "" : ",\n ", stdout);
        print_record(r, e, false);
        break;
    default: print_record(r, e, false); putchar('\n');
    }
    fflush(stdout);
}

/* Every test of the plan, in its order. */
static int run_tests(struct runner *runner, const struct bench_plan *plan,
                     const struct options *options, struct error *error) {
    const int tests = plan->pp_count + plan->tg_count;
    bool first = true;
    for (int d = 0; d < plan->depth_count; d++) {
        for (int i = 0; i < tests; i++) {
            bool answer = i >= plan->pp_count;
            struct test test = {.tokens = answer ? plan->tg[i - plan->pp_count] : plan->pp[i],
                                .depth = plan->depth[d],
                                .answer = answer};
            struct result result = {0};
            if (test.tokens == 0) continue; /* as users of llama-bench switch a test off */
            int code = run_test(runner, test, options, &result, error);
            if (code) return code;
            print_result(&result, runner->e, options, first);
            first = false;
        }
    }
    return 0;
}

int bench_run(struct engine *e, const struct bench_plan *plan, const struct options *options,
              void (*forward)(struct engine *, struct rows), struct error *error) {
    struct runner runner = {.e = e, .forward = forward};
    const struct sampling greedy = {.top_p = 1, .repeat_penalty = 1};
    int code = sampler_open(&runner.greedy, greedy, e->config->vocab_used, error);
    if (code) return code;
    runner.tokens = calloc((size_t)e->plan.limits.chunk, sizeof *runner.tokens);
    if (!runner.tokens)
        code = fail(error, EXIT_MEMORY, "host memory: none for %d tokens", e->plan.limits.chunk);
    print_head(e, options);
    if (!code) code = run_tests(&runner, plan, options, error);
    free(runner.tokens);
    sampler_close(&runner.greedy);
    if (code) return code;
    if (options->form == FORM_JSON) puts("]");
    if (options->form == FORM_MD) printf("\nbuild: %s\n", COMMIT);
    return 0;
}
