/* The sampler on the GPU against that of the CPU: on logits that are written there, and in the host
 * loop that is one draw ahead. */
#ifndef TESTS_GPU_DRAWS_H
#define TESTS_GPU_DRAWS_H

#include "tests/gpu_models.h"

static inline struct sampler sampler_of(struct sampling sampling, int vocab) {
    struct sampler sampler;
    struct error error;
    gpu_must(sampler_open(&sampler, sampling, vocab, &error), &error);
    return sampler;
}

/* Logits of several kinds: spread over +-scale, many equal ones, some -inf, nearly all the same. */
static inline void random_logits(uint64_t *state, float *logits, int vocab, int kind, float scale) {
    for (int i = 0; i < vocab; i++) {
        logits[i] = random_float(state) * scale;
        if (kind % 4 == 1) logits[i] = (float)(int)logits[i];
        if (kind % 4 == 2 && i % 3 != 1) logits[i] = -INFINITY;
        if (kind % 4 == 3) logits[i] = 17 + logits[i] * 1e-3f;
    }
}

static inline void write_logits(struct gpu *g, int row, const float *logits) {
    const size_t V = (size_t)g->host.config.vocab, used = (size_t)g->host.config.vocab_used;
    float *to = (float *)engine_region(&g->device, REGION_LOGITS) + (size_t)row * V;
    cuda_write(&g->device, to, logits, used * sizeof *logits);
}

static inline struct config drawing_config(int vocab) {
    struct config c = random_config((struct shape){8, 1, 1, 1, 64, 8, vocab}, BF16);
    c.vocab_used = vocab - vocab % 2; /* an odd vocabulary has one id that is not in use */
    return c;
}

/* Some draws in a row with these settings, each on logits of its own: the ids of the CPU's sampler. The
 * drawn row is the last classified one; its id and next position become row 0's. */
static inline void check_draws(int vocab, struct sampling sampling, int draws, float scale) {
    struct gpu g;
    struct error error = {0};
    const struct rows rows = {3, 2};
    gpu_open(&g, drawing_config(vocab), (struct limits){64, 4, 2, 2, 1, true});
    const int used = g.host.config.vocab_used;
    struct sampler asked = sampler_of(sampling, used), twin = sampler_of(sampling, used);
    float *logits = allocated((size_t)used * sizeof *logits);
    const int32_t tokens[] = {1, 2, 3};
    for (int i = 0; i < 70; i++) { /* a prompt, for the penalty */
        const int32_t id = some_token(&g.host);
        sampler_accept(&asked, id);
        sampler_accept(&twin, id);
    }
    for (int i = 0; i < draws; i++) {
        int32_t id = NO_ID, right = NO_ID, row0[3];
        g.device.ops->set_rows(&g.device, tokens, 3, 1, 10 + i);
        random_logits(&g.host.state, logits, used, i, scale);
        write_logits(&g, 1, logits);
        g.device.ops->step(&g.device, rows, no_operators, &asked);
        const int code = g.device.ops->take(&g.device, &id, &error);
        gpu_must(sampler_draw(&twin, logits, &right, &error), &error);
        sampler_accept(&asked, id);
        sampler_accept(&twin, right);
        for (int n = 0; n < 3; n++)
            cuda_read(&g.device, &row0[n],
                      (int32_t *)engine_region(&g.device, REGION_ROWS) +
                          n * g.device.plan.limits.chunk,
                      sizeof row0[n]);
        check(!code && id == right && row0[0] == id && row0[1] == 1 && row0[2] == 13 + i,
              "V %d, temperature %g, top-k %d, top-p %g, min-p %g, penalty %g over %d, draw %d: id "
              "%d, expected %d; row 0 is (%d, %d, %d), expected (%d, 1, %d); %s",
              vocab, (double)sampling.temperature, sampling.top_k, (double)sampling.top_p,
              (double)sampling.min_p, (double)sampling.repeat_penalty, sampling.repeat_last, i, id,
              right, row0[0], row0[1], row0[2], right, 13 + i, code ? error.text : "");
        if (code || id != right) break; /* the samplers part here */
    }
    sampler_close(&asked);
    sampler_close(&twin);
    free(logits);
    gpu_close(&g);
}

/* What cannot be drawn from is refused in the CPU's words. */
static inline void check_refusal(int vocab, float bad, int at) {
    struct gpu g;
    struct error error = {0}, right = {0};
    gpu_open(&g, drawing_config(vocab), (struct limits){64, 4, 1, 1, 1, true});
    const int used = g.host.config.vocab_used;
    struct sampler sampler = sampler_of((struct sampling){.top_p = 1, .repeat_penalty = 1}, used);
    float *logits = allocated((size_t)used * sizeof *logits);
    int32_t id = NO_ID;
    random_logits(&g.host.state, logits, used, 0, 3);
    for (int i = 0; i < used; i++)
        if (i == at || at < 0) logits[i] = bad;
    g.device.ops->set_rows(&g.device, &(int32_t){1}, 1, 0, 0);
    write_logits(&g, 0, logits);
    g.device.ops->step(&g.device, (struct rows){1, 1}, no_operators, &sampler);
    const int code = g.device.ops->take(&g.device, &id, &error);
    const int expected = sampler_draw(&sampler, logits, &id, &right);
    check(code == expected && !strcmp(error.text, right.text),
          "V %d, logit %d is %g: take says %d \"%s\", expected %d \"%s\"", vocab, at, (double)bad,
          code, error.text, expected, right.text);
    sampler_close(&sampler);
    free(logits);
    gpu_close(&g);
}

/* ---- the host loop ---- */

enum { PROMPT = 9, ANSWER = 64, LOOP_CONTEXT = 80 };

/* One draw ahead: a step is asked for before the id that it starts from has come back. */
static inline void draw_ahead(struct gpu *g, const int32_t *prompt, struct sampling sampling,
                              int32_t ids[ANSWER]) {
    struct engine *e = &g->device;
    struct error error;
    struct sampler sampler = sampler_of(sampling, g->host.config.vocab_used);
    for (int i = 0; i < PROMPT; i++) sampler_accept(&sampler, prompt[i]);
    gpu_put_all(g);
    e->ops->set_rows(e, prompt, PROMPT, 0, 0);
    e->ops->step(e, (struct rows){PROMPT, 1}, forward, &sampler);
    for (int i = 0; i < ANSWER; i++) {
        if (i + 1 < ANSWER) e->ops->step(e, (struct rows){1, 1}, forward, &sampler);
        gpu_must(e->ops->take(e, &ids[i], &error), &error);
        sampler_accept(&sampler, ids[i]);
    }
    sampler_close(&sampler);
}

/* The same without draws on the device: the logits come to the host each time. */
static inline void draw_on_the_host(struct gpu *g, const int32_t *prompt, struct sampling sampling,
                                    int32_t ids[ANSWER]) {
    struct engine *e = &g->device;
    struct error error;
    struct sampler sampler = sampler_of(sampling, g->host.config.vocab_used);
    float *logits = allocated((size_t)g->host.config.vocab * sizeof *logits);
    for (int i = 0; i < PROMPT; i++) sampler_accept(&sampler, prompt[i]);
    gpu_put_all(g);
    e->ops->set_rows(e, prompt, PROMPT, 0, 0);
    e->ops->step(e, (struct rows){PROMPT, 1}, forward, NULL);
    for (int i = 0; i < ANSWER; i++) {
        gpu_must(e->ops->read_logits(e, 0, logits, &error), &error);
        gpu_must(sampler_draw(&sampler, logits, &ids[i], &error), &error);
        sampler_accept(&sampler, ids[i]);
        if (i + 1 == ANSWER) break;
        e->ops->set_rows(e, &ids[i], 1, 0, PROMPT + i);
        e->ops->step(e, (struct rows){1, 1}, forward, NULL);
    }
    free(logits);
    sampler_close(&sampler);
}

static inline void check_loop(struct shape shape, enum dtype dtype, struct sampling sampling) {
    struct gpu g;
    int32_t prompt[PROMPT], ahead[ANSWER], right[ANSWER];
    gpu_open(&g, random_config(shape, dtype), (struct limits){LOOP_CONTEXT, 16, 1, 1, 1, true});
    for (int i = 0; i < PROMPT; i++) prompt[i] = some_token(&g.host);
    draw_on_the_host(&g, prompt, sampling, right);
    draw_ahead(&g, prompt, sampling, ahead);
    int same = 0;
    while (same < ANSWER && ahead[same] == right[same]) same++;
    check(same == ANSWER, "C %d %s, temperature %g: token %d of the loop is %d, expected %d",
          shape.C, dtype_name(dtype), (double)sampling.temperature, same,
          ahead[same < ANSWER ? same : 0], right[same < ANSWER ? same : 0]);
    gpu_close(&g);
}

/* The same answer, however often. */
static inline void check_answers(struct shape shape, int repeats) {
    struct gpu g;
    const struct sampling greedy = {.top_p = 1, .repeat_penalty = 1};
    int32_t prompt[PROMPT], first[ANSWER], again[ANSWER];
    gpu_open(&g, random_config(shape, BF16), (struct limits){LOOP_CONTEXT, 16, 1, 1, 1, true});
    for (int i = 0; i < PROMPT; i++) prompt[i] = some_token(&g.host);
    draw_ahead(&g, prompt, greedy, first);
    int other = 0;
    for (int n = 1; n < repeats; n++) {
        draw_ahead(&g, prompt, greedy, again);
        other += memcmp(first, again, sizeof first) != 0;
    }
    check(!other, "C %d: %d of %d answers of %d tokens differ from the first", shape.C, other,
          repeats, ANSWER);
    gpu_close(&g);
}

/* What the backend takes from the device is its plan, whatever it has done. */
static inline void check_memory(struct shape shape) {
    enum { SLACK = 64 << 20, ROWS = 512 };
    struct gpu g;
    const size_t before = cuda_ops.free_memory(NULL);
    gpu_open(&g, random_config(shape, BF16), (struct limits){8192, ROWS, 1, 1, 1, true});
    int32_t tokens[ROWS];
    struct error error;
    struct sampler sampler = sampler_of((struct sampling){.temperature = 1, .top_p = 0.9f}, 256);
    for (int i = 0; i < ROWS; i++) tokens[i] = some_token(&g.host);
    for (int T = 1; T <= ROWS; T *= 2) {
        g.device.ops->set_rows(&g.device, tokens, T, 0, 0);
        g.device.ops->step(&g.device, (struct rows){T, 1}, forward, NULL);
    }
    for (int i = 0; i < 8; i++) {
        int32_t id;
        g.device.ops->step(&g.device, (struct rows){1, 1}, forward, &sampler);
        gpu_must(g.device.ops->take(&g.device, &id, &error), &error);
    }
    const size_t used = before - cuda_ops.free_memory(NULL), planned = g.device.plan.bytes;
    printf("device memory: planned %.1f MiB, used %.1f MiB\n", (double)planned / (1 << 20),
           (double)used / (1 << 20));
    check(used + SLACK >= planned && used <= planned + SLACK,
          "C %d: %zu bytes of device memory are used, %zu were planned", shape.C, used, planned);
    sampler_close(&sampler);
    gpu_close(&g);
}

#endif
