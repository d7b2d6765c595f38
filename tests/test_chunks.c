/* Whole random models, cut into steps in many ways, against a plain fp64 forward pass; and the team
 * of threads that runs them. */
#define _POSIX_C_SOURCE 200809L
#include "kernels/cpu_team.h"
#include "tests/random_step.h"

#include <stdatomic.h>
#include <time.h>

/* ---- whole models ---- */

/* logits[n, V] of a sequence that goes through a fresh engine in chunks of these sizes, repeated.
 */
static float *logits_in_chunks(struct config c, const int32_t *tokens, int n, const int *chunks,
                               int threads) {
    struct random_engine r;
    const size_t V = (size_t)c.vocab;
    float *logits = malloc((size_t)n * V * sizeof *logits);
    assert_non_null(logits);
    random_engine_open(&r, c, (struct limits){n, n, 1, n, threads, false});
    for (int done = 0, i = 0; done < n; i = chunks[i + 1] ? i + 1 : 0) {
        const int count = n - done < chunks[i] ? n - done : chunks[i];
        r.engine.ops->set_rows(&r.engine, tokens + done, count, 0, done);
        forward(&r.engine, (struct rows){count, count});
        for (int t = 0; t < count; t++)
            r.engine.ops->read_logits(&r.engine, t, logits + (size_t)(done + t) * V,
                                      &(struct error){0});
        done += count;
    }
    random_engine_close(&r);
    return logits;
}

/* One layer of the whole sequence: x[T, C] becomes the next layer's. */
static void reference_layer(const struct step *s, int layer, struct both *x) {
    const struct engine *e = &s->r->engine;
    const struct layer_weights *w = &e->layer[layer];
    const enum dtype dtype = e->config->weight_dtype;
    const size_t T = s->T, D = s->D, heads = s->H + 2 * s->G, KV = T * D;
    struct both *normed = both_new(T * s->C), *qkv = both_new(T * s->qkv);
    struct both *a = both_new(T * s->H * D), *k = both_new(KV), *v = both_new(KV);
    reference_any_norm(normed, x, w->norm_attention, w->norm_attention_bias, e->config->norm_eps, T,
                       s->C);
    reference_product(qkv, normed, w->qkv, dtype, T, s->qkv, s->C);
    for (size_t t = 0; t < T; t++) reference_heads(e, layer, qkv + t * s->qkv, (int)t);
    for (size_t i = 0; i < s->H; i++) {
        const size_t g = i / (s->H / s->G);
        for (size_t j = 0; j < KV; j++) {
            k[j] = qkv[(j / D * heads + s->H + g) * D + j % D];
            v[j] = qkv[(j / D * heads + s->H + s->G + g) * D + j % D];
        }
        for (size_t t = 0; t < T; t++)
            reference_attend(a + (t * s->H + i) * D, qkv + (t * heads + i) * D,
                             k + first_seen(e->config, layer, t) * D,
                             v + first_seen(e->config, layer, t) * D,
                             t + 1 - first_seen(e->config, layer, t), D, e->config->attention_scale,
                             e->config->attention_cap);
    }
    reference_residual(s, layer, ATTENTION_OUT, x, a);
    struct both *h = reference_hidden(s, layer, x);
    reference_residual(s, layer, FEED_FORWARD_DOWN, x, h);
    free(normed);
    free(qkv);
    free(a);
    free(h);
    free(k);
    free(v);
}

static struct both *reference_logits(struct config c, const int32_t *tokens, int n) {
    struct random_engine r;
    random_engine_open(&r, c, (struct limits){n, n, 1, n, 1, false});
    const struct step s = step_of(&r, (struct rows){n, n});
    struct both *x = both_new(s.T * s.C), *logits = both_new(s.T * s.V);
    for (size_t i = 0; i < s.T * s.C; i++)
        x[i] = reference_embedding(&r.engine, tokens[i / s.C], (int)(i / s.C), i % s.C);
    for (int l = 0; l < c.layers; l++) reference_layer(&s, l, x);
    reference_any_norm(x, x, r.engine.norm_final, r.engine.norm_final_bias, c.norm_eps, s.T, s.C);
    reference_product(logits, x, r.engine.classifier, c.weight_dtype, s.T, s.V, s.C);
    random_engine_close(&r);
    free(x);
    return logits;
}

/* However a sequence is cut into steps, and by however many threads: its logits are right, and the same
 * to the bit. */
static void check_chunks(struct shape shape, enum family family, enum dtype dtype, int n,
                         const int (*ways)[4], int count) {
    struct random_engine r = {.config = random_config(shape, dtype), .state = 7};
    random_family(&r.config, family);
    r.config.context = n;
    struct step s = {.r = &r, .V = (size_t)shape.V};
    const size_t bytes = (size_t)n * s.V * sizeof(float);
    int32_t *tokens = malloc((size_t)n * sizeof *tokens);
    assert_non_null(tokens);
    for (int i = 0; i < n; i++) tokens[i] = some_token(&r);
    struct both *right = reference_logits(r.config, tokens, n);
    float *whole = logits_in_chunks(r.config, tokens, n, (const int[]){n, 0}, 1);
    snprintf(s.name, sizeof s.name, "%d positions at once, C %d, %s, family %d", n, shape.C,
             dtype_name(dtype), (int)family);
    compare(&s, "logits", whole, s.V, right, (size_t)n, s.V);
    for (int i = 0; i < count; i++)
        for (int threads = 1; threads <= 3; threads++) {
            float *again = logits_in_chunks(r.config, tokens, n, ways[i], threads);
            if (memcmp(again, whole, bytes) != 0)
                fail_msg("%s: other bits in chunks of %d, %d, ... with %d threads", s.name,
                         ways[i][0], ways[i][1], threads);
            free(again);
        }
    free(whole);
    free(right);
    free(tokens);
}

static void a_model_in_any_chunks(void **state) {
    (void)state;
    static const int ways[][4] = {{50},   {1},  {2},  {3, 5},   {4},  {6},
                                  {7, 1}, {13}, {16}, {17, 33}, {24}, {32, 1}};
    const struct shape small = {72, 3, 6, 2, 16, 88, 131}, deep = {776, 1, 3, 1, 8, 1544, 29};
    for (int dtype = F32; dtype <= BF16; dtype++) {
        const enum family families[] = {dtype == F32 ? OLMO : GEMMA, dtype == F32 ? CENTRED : GPT2};
        for (int i = 0; i < 2; i++) {
            check_chunks(small, families[i], (enum dtype)dtype, 50, ways,
                         sizeof ways / sizeof *ways);
            check_chunks(deep, families[i], (enum dtype)dtype, 34, ways,
                         sizeof ways / sizeof *ways);
        }
    }
}

/* Past several parts of the cache and many of its panels. */
static void a_long_sequence_in_any_chunks(void **state) {
    (void)state;
    static const int ways[][4] = {{1}, {3}, {15, 16}, {100, 1, 7}, {513}, {512}};
    check_chunks((struct shape){24, 1, 7, 1, 8, 16, 9}, GEMMA, BF16, 1100, ways,
                 sizeof ways / sizeof *ways);
    check_chunks((struct shape){16, 1, 2, 2, 24, 16, 9}, QWEN, F32, 1100, ways, 3);
    check_chunks((struct shape){16, 1, 2, 2, 24, 16, 9}, GPT2, F32, 1100, ways, 3);
}

/* ---- the team ---- */

struct relay {
    size_t rounds, members;
    int *hands; /* [2, members]: what each member saw, twice by turns */
    atomic_int wrong;
};

/* Each member passes on what its neighbour wrote in the round before. */
static void pass_on(struct member me, void *job) {
    struct relay *r = job;
    for (size_t i = 0; i < r->rounds; i++) {
        const int *from = r->hands + i % 2 * r->members;
        int *to = r->hands + (i + 1) % 2 * r->members;
        to[me.index] = from[(me.index + 1) % r->members] + 1;
        if (to[me.index] != (int)i + 1) atomic_fetch_add(&r->wrong, 1);
        team_barrier(me);
    }
}

/* Barriers and tasks order what members write, also after the workers have fallen asleep. */
static void a_team_waits_for_all(void **state) {
    (void)state;
    for (int threads = 1; threads <= 5; threads++) {
        struct team *team = NULL;
        struct error error;
        int hands[10];
        assert_int_equal(team_open(&team, threads, &error), 0);
        for (int i = 0; i < 300; i++) {
            struct relay relay = {(size_t)i % 7, (size_t)threads, hands, 0};
            memset(hands, 0, sizeof hands);
            if (i % 50 == 0) nanosleep(&(struct timespec){0, 3000000}, NULL);
            team_run(team, pass_on, &relay);
            assert_int_equal(atomic_load(&relay.wrong), 0);
        }
        team_close(team);
    }
    team_close(NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_team_waits_for_all),
        cmocka_unit_test(a_model_in_any_chunks),
        cmocka_unit_test(a_long_sequence_in_any_chunks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
