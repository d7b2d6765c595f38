#include "cli/info.h"

#include <inttypes.h>
#include <stdio.h>

/* Text from a file, without what could steer a terminal. */
static void print_text(const char *text, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) {
        unsigned char c = (unsigned char)text[i];
        putchar(c < 0x20 || c == 0x7f ? '?' : c);
    }
}

static void print_id(const char *label, int32_t id, const struct tokenizer *tokenizer) {
    printf("  %-18s ", label);
    if (id == NO_ID) {
        puts("none");
        return;
    }
    printf("%" PRId32, id);
    if (tokenizer) {
        size_t bytes = 0;
        const char *name = tokenizer_name(tokenizer, id, &bytes);
        putchar(' ');
        print_text(name, bytes);
    }
    putchar('\n');
}

/* Each window and how many layers have it, at the first that does. */
static void print_windows(const struct config *c) {
    for (int first = 0; first < c->layers; first++) {
        const int window = c->layer[first].window;
        int before = 0, count = 0;
        for (int l = 0; l < c->layers; l++) {
            before += l < first && c->layer[l].window == window;
            count += c->layer[l].window == window;
        }
        if (window && !before)
            printf("window               %d position%s in %d of %d layers\n", window,
                   window > 1 ? "s" : "", count, c->layers);
    }
}

/* Positions: learned, RoPE and windows, which layers may have or not. */
static void print_layers(const struct config *c) {
    int still = 0;
    for (int l = 0; l < c->layers; l++) still += c->layer[l].rope_table == NO_ID;
    if (c->learned_positions) printf("positions            learned, %d of them\n", c->context);
    if (c->rotary_dims) {
        printf("RoPE                 %d dimensions of a head", c->rotary_dims);
        if (still) printf(", not in %d layer%s", still, still > 1 ? "s" : "");
        if (c->rope_scale != 1) printf(", factor %g", (double)c->rope_scale);
        putchar('\n');
    }
    if (c->rope_original)
        printf("RoPE frequencies     two sets: for contexts (-c) up to %d, and for longer ones\n",
               c->rope_original);
    print_windows(c);
}

static void print_config(const struct config *c) {
    static const char *const norms[] = {"", ", also after the block's halves",
                                        ", after the block's halves"};
    static const char *const qk_norms[] = {"", ", queries and keys with norms",
                                           ", all queries and all keys with a norm"};
    static const char *const activations[] = {"SiLU", "GELU", "GELU by erf"};
    printf("name                 ");
    for (const char *at = c->name; *at; at++) print_text(at, 1);
    printf("\nparameters           %.2f M\n", (double)config_parameters(c) * 1e-6);
    printf("layers               %d\nwidth                %d\n", c->layers, c->width);
    printf("heads                %d of %d, %d for keys and values%s%s%s\n", c->heads, c->head_dim,
           c->kv_heads, c->qkv_bias ? ", with biases" : "",
           c->out_bias ? ", a bias on what they give" : "", qk_norms[c->qk_norm]);
    print_layers(c);
    printf("feed-forward         %d, %s%s%s\n", c->ffn, c->gated ? "gated, " : "",
           activations[c->activation], c->ffn_bias ? ", with biases" : "");
    printf("vocabulary           %d rows, %d used, classifier %s\n", c->vocab, c->vocab_used,
           c->tied ? "tied to the embedding" : "of its own");
    printf("context              %d\nnorm                 %s%s, epsilon %g\n", c->context,
           c->norm == RMS_NORM ? "RMS" : "LayerNorm", norms[c->norm_placement],
           (double)c->norm_eps);
    printf("attention scale      %g\n", (double)c->attention_scale);
    if (c->attention_cap != 0) printf("cap on scores        %g\n", (double)c->attention_cap);
    if (c->final_cap != 0) printf("cap on logits        %g\n", (double)c->final_cap);
    if (c->embed_scale != 1) printf("embedding factor     %g\n", (double)c->embed_scale);
    printf("matrices             %s\n", dtype_name(c->weight_dtype));
}

static void print_tokens(const struct config *c, const struct tokenizer *tokenizer) {
    char text[160] = "none: the model takes ids only";
    if (tokenizer) tokenizer_describe(tokenizer, text, sizeof text);
    printf("tokenizer            %s\n", text);
    print_id("bos", c->bos, tokenizer);
    printf("  %-18s %s\n", "bos added", c->add_bos ? "yes" : "no");
    for (int i = 0; i < c->stop_count; i++) print_id("stop", c->stops[i], tokenizer);
    printf("chat shape           %s%s\n", chat_shape_name(c->chat_shape),
           c->chat_bos ? ", after bos" : "");
}

static void print_tensors(const struct model_file *file) {
    printf("tensors              %" PRIu64 "\n", file->tensor_count);
    for (uint64_t i = 0; i < file->tensor_count; i++) {
        const struct tensor *t = &file->tensors[i];
        printf("  %-28s %-5s [%" PRIu64, t->name, dtype_name(t->dtype), t->shape[0]);
        if (t->dims > 1) printf(", %" PRIu64, t->shape[1]);
        puts("]");
    }
}

void info_print(const struct model_file *file, const struct tokenizer *tokenizer,
                struct limits limits) {
    const struct config *c = &file->config;
    const uint64_t weight_bytes = file->file_bytes - file->head_bytes;
    print_config(c);
    print_tokens(c, tokenizer);
    print_tensors(file);
    puts("memory by context    CPU          GPU");
    limits.context = 0;
    for (int context = 512; limits.context < c->context; context *= 2) {
        struct plan plan;
        struct error ignored = {0};
        limits.context = context < c->context ? context : c->context;
        printf("  %-8d", limits.context);
        for (int device = 0; device < 2; device++) {
            struct limits own = limits;
            own.device = device;
            if (!own.chunk) own.chunk = plan_chunk(c, weight_bytes, own, SIZE_MAX);
            own.chunk = own.chunk < own.context ? own.chunk : own.context;
            if (plan_make(&plan, c, weight_bytes, own, &ignored)) break;
            printf(" %10.1f MB", (double)plan.bytes * 1e-6);
        }
        puts("");
    }
}
