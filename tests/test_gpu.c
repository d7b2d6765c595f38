/* The CUDA backend: every operator against a plain fp64 computation, whole models against that and
 * against the CPU, the same bits from the same step, and the sampler.
 *
 *   test_gpu [--quick] [part of a test's name ...]
 *
 * --quick runs few shapes, for compute-sanitizer. Where there is no GPU nothing is tested. */
#define _POSIX_C_SOURCE 200809L
#include "cli/seconds.h"
#include "cli/threads.h"
#include "tests/gpu_draws.h"
#include "tests/gpu_steps.h"

static bool quick;

/* ---- every operator ---- */

/* Sizes around vectors of 8, tiles of 16, 64 and 128, odd vocabularies, groups of 1 to 7 heads. */
static const struct shape shapes[] = {
    {24, 1, 3, 1, 64, 40, 1001},     {576, 1, 9, 3, 64, 1536, 1001}, {104, 1, 6, 2, 96, 136, 331},
    {8, 1, 1, 1, 64, 8, 257},        {72, 1, 5, 1, 80, 56, 257},     {40, 2, 7, 1, 128, 200, 257},
    {136, 1, 3, 3, 256, 72, 129},    {64, 1, 5, 5, 128, 64, 1},      {256, 1, 14, 2, 64, 512, 1001},
    {1032, 1, 8, 1, 64, 1544, 515},  {520, 1, 5, 1, 256, 264, 77},   {128, 1, 16, 2, 80, 128, 255},
    {2048, 1, 8, 2, 64, 1024, 2051},
};
static const int rows[] = {1, 2, 3, 4, 5, 8, 15, 16, 17, 31, 33, 47, 64, 65, 129};
static const int positions[] = {0, 1, 63, 64, 65, 127, 500};
enum {
    SHAPES = sizeof shapes / sizeof *shapes,
    ROWS = sizeof rows / sizeof *rows,
    POSITIONS = sizeof positions / sizeof *positions
};

static void operators_on_ragged_shapes(void) {
    int n = 0;
    for (int i = 0; i < SHAPES; i += quick ? 5 : 1)
        for (int t = 0; t < ROWS; t += quick ? 4 : 1)
            for (int dtype = F32; dtype <= BF16; dtype++, n++)
                check_shape(shapes[i], (enum dtype)dtype, rows[t],
                            positions[(n / 2 + n / (2 * ROWS)) % POSITIONS]);
}

/* The flags of the families, windows that go round their rings among them. */
static void operators_with_every_flag(void) {
    static const int from[] = {0, 1, 64, 127, 500, 1500};
    int n = 0;
    for (int i = 0; i < SHAPES; i += quick ? 4 : 1)
        for (int t = 0; t < ROWS; t += quick ? 4 : 1)
            for (int dtype = F32; dtype <= BF16; dtype++, n++) {
                struct config c = random_config(shapes[i], (enum dtype)dtype);
                const int position = from[(n / 2 + i) % 6];
                if (c.width > 1000 && position > 500) continue;
                random_flags(&c, rows[t] + i, position);
                check_config(c, rows[t], position);
            }
}

/* One row of models with norms of heads, whose q and k attention finishes, but where RoPE turns half of a
 * head: every number of heads a group, near and far, with windows and without, norms after products. */
static void one_row_that_attention_finishes(void) {
    static const int ratios[] = {1, 2, 3, 4, 7, 8, 9, 14, 15, 16},
                     windows[] = {0, 512, 1, 1000, 100};
    static const int from[] = {0, 3, 63, 127, 128, 300, 511, 767, 768, 1023, 2500};
    int n = 0;
    for (int D = 128; D <= 256; D += 128)
        for (int i = 0; i < (D > 128 ? 6 : 10); i++)
            for (int p = i % 2; p < 11; p += quick ? 6 : 2, n++) {
                const struct shape shape = {40 + 8 * (n % 3), 1, 2 * ratios[i], 2, D, 24, 33};
                struct config c = random_config(shape, BF16);
                c.qk_norm = QK_NORM_HEAD;
                c.rope_tables = n % 5 > 0;
                c.rotary_dims = !c.rope_tables ? 0 : n % 7 ? D : D / 2;
                c.norm_placement = (enum norm_placement)(n % 3);
                c.layer[0].rope_table = c.rope_tables ? 0 : NO_ID;
                c.layer[0].window = windows[n % 5];
                check_config(c, 1, from[p]);
            }
}

/* One row streams weights by forms of which some have a norm after the product. */
static void check_width(struct shape shape, enum dtype dtype, int T) {
    struct config c = random_config(shape, dtype);
    check_config(c, T, 3);
    c.norm_placement = NORM_BEFORE_AND_AFTER;
    if (dtype == BF16 && T == 1) check_config(c, T, 3);
}

/* Sums of every length that one row, or a few, have a form for: at the ends of what a form
 * takes. */
static void operators_of_few_rows_at_every_width(void) {
    static const int widths[] = {8,     512,   520,   1016,  1024,  1032,  1536,  1544,
                                 2048,  2056,  3072,  3080,  4096,  4104,  6144,  6152,
                                 8192,  8200,  10240, 10248, 12288, 12296, 14336, 14344,
                                 20480, 20488, 28672, 28680, 65536};
    const int count = sizeof widths / sizeof *widths;
    for (int i = 0; i < count; i += quick ? 4 : 1)
        for (int dtype = F32; dtype <= BF16; dtype++)
            for (int T = 1; T <= 4; T += 3) {
                const int w = widths[i], heads = (w + 63) / 64;
                check_width((struct shape){w, 1, 1, 1, 64, 24, 33}, (enum dtype)dtype, T);
                check_width((struct shape){40, 1, 1, 1, 64, w, 33}, (enum dtype)dtype, T);
                check_width((struct shape){24, 1, heads, 1, 64, 40, 33}, (enum dtype)dtype, T);
            }
}

/* Few rows, around what each form of cuda_matmul_few.cu takes: their places in the cache go round its ring,
 * and their sums of squares come in as many parts as there are multiprocessors; qkv's in the second layer. */
static void few_rows_around_a_ring(void) {
    static const int few[] = {2, 8, 9, 16, 17, 32, 33, 64};
    for (int i = quick; i < (int)(sizeof few / sizeof *few); i += 1 + quick)
        for (int round = 1; round <= 2; round++) {
            struct config c = random_config((struct shape){1104, 2, 26, 2, 64, 1000, 33}, BF16);
            c.layer[0].window = c.layer[1].window = 100;
            const struct limits limits = {.context = 1024, .chunk = few[i] + few[i] % 3};
            const int R = plan_device_ring(&c, &limits, 0);
            check_config(c, few[i], round * R - few[i] / 2);
        }
}

/* A layer as wide as the 8B model's, whose configurations small shapes do not reach. */
static void operators_on_a_wide_layer(void) {
    static const int few[] = {1, 2, 4, 5, 16, 17, 48, 130};
    const struct shape wide = {4096, 1, 32, 8, 128, 14336, 1003};
    const int count = sizeof few / sizeof *few;
    for (int dtype = quick ? BF16 : F32; dtype <= BF16; dtype++) {
        struct gpu g;
        gpu_open(&g, random_config(wide, (enum dtype)dtype),
                 (struct limits){700, few[count - 1], 2, few[count - 1], 1, true});
        for (int t = 0; t < (quick ? 1 : count); t++)
            check_step(&g, few[t], positions[(t + 5) % POSITIONS], 61);
        gpu_close(&g);
    }
}

/* Caches so long that decode cuts them into parts, up to all of its parts and beyond. */
static void operators_after_long_caches(void) {
    static const int far[] = {1023, 1024, 2047, 4095, 4096, 4097, 5000, 9001};
    const int count = sizeof far / sizeof *far;
    const struct shape one = {24, 1, 7, 1, 64, 40, 17}, two = {32, 1, 8, 2, 128, 16, 17};
    for (int i = 0; i < (quick ? 1 : count); i++)
        for (int dtype = F32; dtype <= BF16; dtype++) {
            check_shape(one, (enum dtype)dtype, 1, far[i]);
            check_shape(two, (enum dtype)dtype, 2 + i, far[i] - 1);
            check_shape(one, (enum dtype)dtype, 17 + 8 * i, far[i] - 20);
        }
}

/* One row's parts of the cache, which clusters of blocks share up to some length: around their
 * sizes and that length, for heads of every kind and kv heads that leave a cluster 8, 4, 2 blocks
 * or 1. */
static void one_row_over_caches_of_any_length(void) {
    static const int lengths[] = {126, 127, 128, 191, 255,  256,  257,  511,  575,
                                  640, 766, 767, 768, 1023, 1024, 1535, 1536, 2049};
    static const struct shape heads[] = {
        {16, 1, 4, 1, 64, 8, 9},   {16, 1, 3, 1, 80, 8, 9},   {16, 1, 16, 2, 96, 8, 9},
        {16, 1, 8, 1, 128, 8, 9},  {16, 1, 2, 1, 256, 8, 9},  {16, 1, 9, 1, 128, 8, 9},
        {16, 1, 17, 1, 64, 8, 9},  {16, 1, 20, 20, 64, 8, 9}, {16, 1, 80, 40, 64, 8, 9},
        {16, 1, 80, 80, 64, 8, 9}, {16, 1, 9, 1, 256, 8, 9}};
    const int count = sizeof lengths / sizeof *lengths, kinds = sizeof heads / sizeof *heads;
    for (int i = 0; i < kinds; i += quick ? 3 : 1)
        for (int l = i % 2; l < count; l += quick ? 7 : 2) {
            struct config c = random_config(heads[i], BF16);
            c.layer[0].window = l % 3 == 1 ? 800 : 0;
            check_config(c, 1, lengths[l]);
        }
}

/* ---- prompts ---- */

/* Each tile of cuda_matmul_hopper.cu with all of its endings: heads, x += (C wide), gate and up (2F),
 * logits (V). Ragged in all dimensions. Those that cut K take `tall`, and go through their ring more than
 * once; the others take `large`, which gives both warpgroups of a multiprocessor several tiles each. */
static void prompts_on_every_tile(void) {
    static const struct prompt small = {{440, 1, 6, 2, 96, 216, 433}, 77, 3, 0, false},
                               middle = {{776, 1, 5, 1, 128, 408, 1333}, 333, 65, 0, false},
                               normed = {{776, 1, 9, 3, 128, 24, 33}, 1333, 65, 0, true},
                               tall = {{1928, 1, 9, 3, 64, 2104, 2883}, 129, 5, 0, false},
                               large = {{1928, 1, 27, 9, 64, 2104, 2883}, 2100, 0, 0, false};
    for (int tile = 1; tile <= cuda_tiles(); tile++) {
        check_prompt(small, 70, 1, OWN, tile);
        check_prompt(small, 70, 1, CHAINED, tile);
        if (quick && tile % 3 != 1) continue; /* of each kind one */
        check_prompt(middle, 130, 7, CHAINED, tile);
        check_prompt(normed, 1, 7, CHAINED, tile);
        check_prompt(tall, 70, 9, CHAINED, tile);
        check_prompt(large, 2099, quick ? 67 : 29, CHAINED, tile);
    }
}

/* Prompts as the engine chooses; heads of 80 turn in a kernel of their own. */
static void prompts_of_any_width(void) {
    static const struct prompt prompts[] = {{{584, 1, 3, 1, 80, 312, 669}, 331, 65, 0, false},
                                            {{1144, 1, 2, 2, 128, 520, 1333}, 649, 3, 0, false},
                                            {{2312, 1, 3, 1, 96, 1208, 2459}, 1085, 1, 0, false},
                                            {{2488, 1, 29, 1, 80, 1240, 2491}, 1087, 0, 0, false}};
    for (int i = 0; i < (int)(sizeof prompts / sizeof *prompts); i += quick ? 3 : 1)
        for (int path = OWN; path <= CHAINED; path += CHAINED - OWN)
            check_prompt(prompts[i], 7, 11, (enum path)path, 0);
}

/* Each tile of cuda_matmul.cu, as 132 multiprocessors choose it: heads and logits of the first prompt take
 * `paired`, its gate and up `wide`; of the second `narrow` and, x += `square`; of the third `widest`. */
static void prompts_on_every_general_tile(void) {
    static const struct prompt prompts[] = {{{1928, 1, 27, 9, 64, 2104, 2883}, 2099, 0, 0, false},
                                            {{1928, 1, 27, 9, 64, 2104, 2883}, 700, 3, 0, false},
                                            {{72, 1, 2, 1, 64, 2040, 4077}, 1001, 1, 0, false}};
    for (int i = 0; i < (int)(sizeof prompts / sizeof *prompts); i++)
        check_prompt(prompts[i], prompts[i].T, quick ? 67 : 29, GENERAL, 0);
}

/* Attention of prompts: every size and grouping of heads. Then so many rows and heads that an
 * H200's multiprocessors get several tiles each, of two consumers and of three. */
static void prompts_of_every_head(void) {
    static const int sizes[] = {64, 80, 96, 128, 256}, ratios[] = {1, 3, 4, 7, 8};
    static const int lengths[] = {130, 161, 193, 225, 258}, starts[] = {0, 77, 0, 300, 129};
    for (int d = 0; d < 5; d++)
        for (int r = 0; r < 5; r += quick ? 5 : 1) {
            const int G = 1 + (d + r) % 3, T = lengths[(d + r) % 5],
                      start = starts[(d + 2 * r) % 5];
            const struct shape shape = {24, 1, ratios[r] * G, G, sizes[d], 16, 9};
            check_prompt((struct prompt){shape, T, start, 0, r % 2}, 1, 1, OWN, 0);
        }
    static const struct prompt large[] = {
        /* two consumers */
        {{24, 1, 42, 6, 128, 16, 9}, 560, 0, 0, false},
        {{24, 1, 39, 13, 256, 16, 9}, 430, 100, 0, false},
        /* three */
        {{24, 1, 90, 90, 64, 16, 9}, 390, 5, 0, false},
        {{24, 1, 96, 12, 64, 16, 9}, 550, 0, 0, false},
        {{24, 1, 98, 14, 80, 16, 9}, 545, 40, 0, false},
        {{24, 1, 90, 30, 96, 16, 9}, 550, 0, 0, false},
        {{24, 1, 136, 34, 128, 16, 9}, 385, 150, 0, false},
    };
    for (size_t i = 0; i < sizeof large / sizeof *large; i += quick ? 4 : 1)
        check_prompt(large[i], 1, 1, OWN, 0);
}

/* The same behind windows, which begin in the prompt or before it, at the ends of tiles and within them; over
 * caches that are rings. */
static void prompts_behind_windows(void) {
    static const int sizes[] = {64, 80, 96, 128, 256}, windows[] = {1, 7, 64, 127, 128, 129, 300};
    static const int starts[] = {0, 1, 129, 700, 1500};
    int n = 0;
    for (int d = 0; d < 5; d++)
        for (int w = 0; w < 7; w += quick ? 5 : 1, n++)
            for (int general = 0; general < 2; general++) {
                const struct shape shape = {24, 1, (1 + n % 7) * 2, 2, sizes[d], 16, 9};
                const struct prompt p = {shape, 65 + 59 * (n % 5), starts[(n + d) % 5], windows[w],
                                         n % 2};
                check_prompt(p, 1, 1, general ? GENERAL : OWN, 0);
            }
}

/* ---- rows that differ ---- */

/* Rows of a step that belong to different sequences, also at neighbouring and at falling
 * positions. */
static void rows_of_several_slots(void) {
    static const int slots[] = {0, 0, 1, 2, 2, 2, 2, 1}, at[] = {3, 4, 5, 300, 299, 301, 303, 6};
    for (int i = 0; i < (quick ? 1 : 9); i++)
        for (int T = 1; T <= 8; T++)
            for (int general = 0; general < 2; general++) {
                struct gpu g;
                gpu_open(&g, random_config(shapes[i], T % 3 ? BF16 : F32),
                         (struct limits){310, 8, 3, 8, 1, true});
                struct step s = step_of(&g, (struct rows){T, T}, 1);
                for (int t = 0; t < T; t++) {
                    row_numbers(&s, 0)[t] = some_token(&g.host);
                    row_numbers(&s, 1)[t] = slots[(t + i) % 8];
                    row_numbers(&s, 2)[t] = at[(t + i) % 8];
                }
                fill_cache(&s, 0, 4);
                fill_cache(&s, 1, 6);
                fill_cache(&s, 2, 303);
                cuda_general_path(&g.device, general);
                gpu_put_all(&g);
                name_step(&s, general ? GENERAL : OWN);
                strcat(s.name, ", three slots");
                check_operators(&s);
                gpu_close(&g);
            }
}

static void a_nan_row_stays_alone(void) {
    for (int i = 0; i < (quick ? 2 : SHAPES); i++)
        for (int T = 2; T < 150; T += 1 + T / 3)
            for (int general = 0; general < 2; general++)
                check_nan_row(shapes[i], (T + i) % 2 ? F32 : BF16, T, general);
}

/* ---- whole models ---- */

static void models_in_any_chunks(void) {
    static const int chunks[] = {1, 7, 16, 64, 150};
    static const struct shape models[] = {
        {576, 2, 9, 3, 64, 1536, 1001}, {72, 2, 6, 2, 96, 88, 131}, {256, 2, 7, 1, 128, 520, 257}};
    for (int i = 0; i < (quick ? 1 : 3); i++)
        for (int dtype = F32; dtype <= BF16; dtype++)
            check_chunks(random_config(models[i], (enum dtype)dtype), quick ? 20 : 150, chunks,
                         quick ? 2 : 5);
}

/* Of a family, past its windows: on the kernels of heads of 64, and of 128 and 256, where one row's
 * attention finishes q and k; near and far. */
static void family_in_any_chunks(enum family family) {
    static const int chunks[] = {1, 16, 5, 129};
    static const struct shape models[] = {
        {264, 3, 6, 3, 64, 536, 331}, {136, 2, 6, 2, 128, 88, 131}, {72, 2, 4, 1, 256, 88, 131}};
    const int step = !quick ? 1 : family == GEMMA ? 5 : 3; /* of f32 and of bf16 one */
    for (int i = 0; i < 6; i += step) {
        struct config c = random_config(models[i / 2], (enum dtype)(i % 2));
        random_family(&c, family);
        if (i / 2 > 0) c.attention_cap = 0;
        if (quick) c.layer[0].window = 12;
        check_chunks(c, quick ? 20 : 600 + 300 * (i / 2 == 1), chunks, quick ? 2 : 4);
    }
}
static void families_qwen(void) {
    family_in_any_chunks(QWEN);
}
static void families_qwen3(void) {
    family_in_any_chunks(QWEN3);
}
static void families_gemma(void) {
    family_in_any_chunks(GEMMA);
}
static void families_olmo(void) {
    family_in_any_chunks(OLMO);
}
static void families_gpt2(void) {
    family_in_any_chunks(GPT2);
}
static void families_centred(void) {
    family_in_any_chunks(CENTRED);
}

/* Also as a graph: all numbers of rows that are captured, and those beside them. */
static void the_same_bits_again(void) {
    static const int many[] = {17, 33, 65, 129};
    for (int i = 0; i < (quick ? 1 : 3); i++)
        for (int dtype = F32; dtype <= BF16; dtype++) {
            struct gpu g;
            gpu_open(&g, random_config(shapes[i], (enum dtype)dtype),
                     (struct limits){700, 129, 1, 16, 1, true});
            for (int general = 0; general < 2; general++) {
                cuda_general_path(&g.device, general);
                for (int T = 1; T <= 16; T += quick ? 15 : 1)
                    for (int n = 0; n < 3; n++)
                        check_repeats(&g, (struct rows){T, n == 2 ? T : n},
                                      positions[(T + n) % POSITIONS], T % 5 == 1 ? 20 : 2);
                for (int t = 0; t < (quick ? 1 : 4); t++)
                    check_repeats(&g, (struct rows){many[t], 1}, 500 * (t % 2), 20);
            }
            gpu_close(&g);
        }
}

/* Prompts whose products give both warpgroups several tiles, or that cut K. */
static void the_same_bits_of_a_prompt(void) {
    static const struct shape shape = {1928, 1, 27, 9, 64, 2104, 2883};
    for (int tile = 1; tile <= cuda_tiles(); tile += quick ? 5 : 1)
        for (int T = 129; T <= 2100; T += 2100 - 129) {
            struct gpu g;
            gpu_open(&g, random_config(shape, BF16), (struct limits){T, T, 1, 70, 1, true});
            cuda_one_tile(&g.device, tile);
            check_repeats(&g, (struct rows){T, 70}, 0, quick ? 2 : 8);
            gpu_close(&g);
        }
}

/* ---- draws ---- */

static const struct sampling samplings[] = {
    {.temperature = 0, .top_p = 1, .repeat_penalty = 1},
    {.temperature = 0, .top_p = 1, .repeat_penalty = 1.3f, .repeat_last = 64},
    {.temperature = 0.8f, .top_k = 40, .top_p = 0.95f, .min_p = 0.05f, .repeat_penalty = 1},
    {.temperature = 0.8f, .top_k = 40, .top_p = 0.9f, .repeat_penalty = 1.1f, .repeat_last = 64},
    {.temperature = 1, .top_k = 1, .top_p = 1, .repeat_penalty = 1},
    {.temperature = 1, .top_k = 256, .top_p = 1, .repeat_penalty = 1.2f, .repeat_last = 7},
    {.temperature = 1.5f, .top_k = 2000, .top_p = 0.99f, .repeat_penalty = 1},
    {.temperature = 1, .top_p = 1, .repeat_penalty = 1},
    {.temperature = 2, .top_p = 0.9f, .min_p = 0.02f, .repeat_penalty = 1.1f, .repeat_last = 4096},
};
enum { SAMPLINGS = sizeof samplings / sizeof *samplings };

static void draws_as_the_cpu_makes_them(void) {
    static const int vocabularies[] = {3, 257, 1001, 32000, 49152, 128256, 128257};
    for (int v = 0; v < 7; v += quick ? 2 : 1)
        for (int i = 0; i < SAMPLINGS; i++) {
            struct sampling sampling = samplings[i];
            sampling.seed = 42 + (uint64_t)i;
            check_draws(vocabularies[v], sampling, quick ? 4 : 16, 3);
            check_draws(vocabularies[v], sampling, quick ? 2 : 8, 30);
        }
}

static void logits_that_are_not_numbers(void) {
    static const float bad[] = {NAN, INFINITY};
    for (int i = 0; i < 2; i++) {
        check_refusal(257, bad[i], 0);
        check_refusal(1001, bad[i], 999);
        check_refusal(128256, bad[i], 128255);
        check_refusal(128256, bad[i], 70001);
    }
    check_refusal(1001, -INFINITY, -1);
}

static void the_loop_is_one_draw_ahead(void) {
    for (int i = 0; i < SAMPLINGS; i += quick ? 3 : 1)
        for (int dtype = F32; dtype <= BF16; dtype++) {
            struct sampling sampling = samplings[i];
            sampling.seed = 7;
            check_loop(shapes[i % 3], (enum dtype)dtype, sampling);
        }
}

static const struct shape smollm2 = {
    .C = 576, .L = 30, .H = 9, .G = 3, .D = 64, .F = 1536, .V = 49152};

static void a_thousand_answers(void) {
    check_answers(smollm2, quick ? 3 : 1000);
}

static void memory_is_as_planned(void) {
    check_memory(smollm2);
}

/* ---- the runner ---- */

static const struct {
    const char *name;
    void (*run)(void);
} tests[] = {
    {"operators_on_ragged_shapes", operators_on_ragged_shapes},
    {"operators_on_a_wide_layer", operators_on_a_wide_layer},
    {"operators_with_every_flag", operators_with_every_flag},
    {"one_row_that_attention_finishes", one_row_that_attention_finishes},
    {"operators_of_few_rows_at_every_width", operators_of_few_rows_at_every_width},
    {"few_rows_around_a_ring", few_rows_around_a_ring},
    {"operators_after_long_caches", operators_after_long_caches},
    {"one_row_over_caches_of_any_length", one_row_over_caches_of_any_length},
    {"prompts_on_every_tile", prompts_on_every_tile},
    {"prompts_of_any_width", prompts_of_any_width},
    {"prompts_on_every_general_tile", prompts_on_every_general_tile},
    {"prompts_of_every_head", prompts_of_every_head},
    {"prompts_behind_windows", prompts_behind_windows},
    {"rows_of_several_slots", rows_of_several_slots},
    {"a_nan_row_stays_alone", a_nan_row_stays_alone},
    {"models_in_any_chunks", models_in_any_chunks},
    {"families_qwen_in_any_chunks", families_qwen},
    {"families_qwen3_in_any_chunks", families_qwen3},
    {"families_gemma_in_any_chunks", families_gemma},
    {"families_olmo_in_any_chunks", families_olmo},
    {"families_gpt2_in_any_chunks", families_gpt2},
    {"families_centred_in_any_chunks", families_centred},
    {"the_same_bits_again", the_same_bits_again},
    {"the_same_bits_of_a_prompt", the_same_bits_of_a_prompt},
    {"draws_as_the_cpu_makes_them", draws_as_the_cpu_makes_them},
    {"logits_that_are_not_numbers", logits_that_are_not_numbers},
    {"the_loop_is_one_draw_ahead", the_loop_is_one_draw_ahead},
    {"a_thousand_answers", a_thousand_answers},
    {"memory_is_as_planned", memory_is_as_planned},
};

/* Whether one of the arguments is part of the name; without any, all are asked for. */
static bool asked_for(const char *name, int argc, char **argv) {
    bool any = false;
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--quick")) continue;
        if (strstr(name, argv[i])) return true;
        any = true;
    }
    return !any;
}

int main(int argc, char **argv) {
    char why[160];
    struct error error;
    for (int i = 1; i < argc; i++) quick |= !strcmp(argv[i], "--quick");
    if (!cuda_usable(NULL, 0, why)) {
        printf("skipped: %s\n", why);
        return 0;
    }
    gpu_must(team_open(&team, default_threads(), &error), &error);
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++) {
        if (!asked_for(tests[i].name, argc, argv)) continue;
        const int passed = tally.passed, failed = tally.failed;
        const double start = seconds();
        tests[i].run();
        printf("%-38s %6d passed, %d failed, %.1f s\n", tests[i].name, tally.passed - passed,
               tally.failed - failed, seconds() - start);
        fflush(stdout);
    }
    team_close(team);
    printf("%d passed, %d failed\n", tally.passed, tally.failed);
    return tally.failed > 0 || tally.passed == 0;
}
