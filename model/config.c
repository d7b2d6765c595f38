#include "model/config.h"

#include "tokenizer/utf8.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

enum { CONFIG_BYTES = 448, LAYER_BYTES = 16 };

static const char *const dtype_names[DTYPES] = {"f32", "bf16"};
static const char *const chat_shape_names[CHAT_SHAPES] = {
    "none",   "llama2",     "llama3",     "chatml",         "gemma",     "phi3",
    "zephyr", "mistral",    "llama3_1",   "qwen3",          "phi4",      "phi4_mini",
    "olmo",   "mistral_v1", "mistral_v3", "mistral_tekken", "mistral_v7"};

size_t dtype_size(enum dtype dtype) {
    return dtype == F32 ? 4 : 2;
}
const char *dtype_name(enum dtype dtype) {
    return dtype_names[dtype];
}
const char *chat_shape_name(enum chat_shape shape) {
    return chat_shape_names[shape];
}

static uint32_t read_u32(const unsigned char *p) {
    return p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static float read_f32(const unsigned char *p) {
    uint32_t bits = read_u32(p);
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* ---- the fields of format.md, Config, with their limits ---- */

struct integer_field {
    const char *name;
    int offset;
    uint32_t low, high;
    size_t member; /* an int of struct config */
};
#define INTEGER(field, offset, low, high)                                                          \
    { #field, offset, low, high, offsetof(struct config, field) }

static const struct integer_field integer_fields[] = {
    INTEGER(width, 64, 8, 65536),
    INTEGER(layers, 68, 1, MAX_LAYERS),
    INTEGER(heads, 72, 1, 1024),
    INTEGER(kv_heads, 76, 1, 1024),
    INTEGER(head_dim, 80, 8, 512),
    INTEGER(ffn, 84, 8, 1 << 20),
    INTEGER(vocab, 88, 1, 1 << 20),
    INTEGER(vocab_used, 92, 1, 1 << 20),
    INTEGER(context, 96, 1, 1 << 22),
    INTEGER(weight_dtype, 100, 0, DTYPES - 1),
    INTEGER(norm, 104, 0, LAYER_NORM),
    INTEGER(norm_placement, 108, 0, NORM_AFTER),
    INTEGER(qkv_bias, 116, 0, 1),
    INTEGER(out_bias, 120, 0, 1),
    INTEGER(ffn_bias, 124, 0, 1),
    INTEGER(qk_norm, 128, 0, QK_NORM_FULL),
    INTEGER(gated, 132, 0, 1),
    INTEGER(activation, 136, 0, GELU),
    INTEGER(learned_positions, 140, 0, 1),
    INTEGER(rotary_dims, 144, 0, 512),
    INTEGER(rope_tables, 148, 0, 2),
    INTEGER(tied, 172, 0, 1),
    INTEGER(experts, 176, 0, 1024),
    INTEGER(experts_used, 180, 0, 1024),
    INTEGER(experts_renormalised, 184, 0, 1),
    INTEGER(add_bos, 192, 0, 1),
    INTEGER(stop_count, 204, 0, MAX_STOPS),
    INTEGER(chat_shape, 272, 0, CHAT_SHAPES - 1),
    INTEGER(chat_bos, 276, 0, 1),
    INTEGER(rope_original, 280, 0, 1 << 22),
};

static const struct float_field {
    const char *name;
    int offset;
    float low, high;
    size_t member;
} float_fields[] = {
    {"norm_eps", 112, 1e-12F, 1e-1F, offsetof(struct config, norm_eps)},
    {"rope_scale", 152, 1e-6F, 1e6F, offsetof(struct config, rope_scale)},
    {"attention_scale", 156, 1e-6F, 1e6F, offsetof(struct config, attention_scale)},
    {"attention_cap", 160, 0, 1e6F, offsetof(struct config, attention_cap)},
    {"final_cap", 164, 0, 1e6F, offsetof(struct config, final_cap)},
    {"embed_scale", 168, 1e-6F, 1e6F, offsetof(struct config, embed_scale)},
};

static int read_fields(struct config *c, const unsigned char *data, struct error *error) {
    for (size_t i = 0; i < sizeof integer_fields / sizeof *integer_fields; i++) {
        const struct integer_field *f = &integer_fields[i];
        uint32_t value = read_u32(data + f->offset);
        if (value < f->low || value > f->high)
            return fail(error, EXIT_BAD_FILE, "config: %s is %u, expected %u to %u", f->name, value,
                        f->low, f->high);
        int as_int = (int)value;
        memcpy((char *)c + f->member, &as_int, sizeof as_int);
    }
    for (size_t i = 0; i < sizeof float_fields / sizeof *float_fields; i++) {
        const struct float_field *f = &float_fields[i];
        float value = read_f32(data + f->offset);
        if (!(value >= f->low && value <= f->high)) /* a NaN fails */
            return fail(error, EXIT_BAD_FILE, "config: %s is %g, expected %g to %g", f->name,
                        (double)value, (double)f->low, (double)f->high);
        memcpy((char *)c + f->member, &value, sizeof value);
    }
    return 0;
}
_Static_assert(sizeof(enum dtype) == sizeof(int), "enums are read as ints");

/* An id below V, or none. */
static int read_id(int32_t *id, const unsigned char *p, const char *name, int vocab,
                   struct error *error) {
    uint32_t value = read_u32(p);
    if (value != UINT32_MAX && value >= (uint32_t)vocab)
        return fail(error, EXIT_BAD_FILE, "config: %s is id %u, expected one below vocab %d", name,
                    value, vocab);
    *id = value == UINT32_MAX ? NO_ID : (int32_t)value;
    return 0;
}

static int read_ids(struct config *c, const unsigned char *data, struct error *error) {
    int code = 0;
    if ((code = read_id(&c->bos, data + 188, "bos", c->vocab, error))) return code;
    if ((code = read_id(&c->pad, data + 196, "pad", c->vocab, error))) return code;
    if ((code = read_id(&c->unk, data + 200, "unk", c->vocab, error))) return code;
    if ((c->add_bos || c->chat_bos) && c->bos == NO_ID)
        return fail(error, EXIT_BAD_FILE, "config: %s is 1, but bos is none",
                    c->add_bos ? "add_bos" : "chat_bos");
    for (int i = 0; i < MAX_STOPS; i++) {
        if ((code = read_id(&c->stops[i], data + 208 + 4 * (size_t)i, "a stop", c->vocab, error)))
            return code;
        if ((c->stops[i] != NO_ID) != (i < c->stop_count))
            return fail(error, EXIT_BAD_FILE, "config: stop_count is %d, but stop %d is %s",
                        c->stop_count, i, c->stops[i] == NO_ID ? "none" : "set");
    }
    return 0;
}

/* What the fields demand of one another. */
static int check_fields(const struct config *c, struct error *error) {
    if (c->width % 8 || c->head_dim % 8 || c->ffn % 8)
        return fail(error, EXIT_BAD_FILE,
                    "config: width %d, head_dim %d and ffn %d must be multiples of 8", c->width,
                    c->head_dim, c->ffn);
    if (c->heads % c->kv_heads)
        return fail(error, EXIT_BAD_FILE, "config: heads %d is not a multiple of kv_heads %d",
                    c->heads, c->kv_heads);
    if (c->vocab_used > c->vocab)
        return fail(error, EXIT_BAD_FILE, "config: vocab_used %d exceeds vocab %d", c->vocab_used,
                    c->vocab);
    if (c->rotary_dims % 2 || c->rotary_dims > c->head_dim)
        return fail(error, EXIT_BAD_FILE,
                    "config: rotary_dims is %d, expected an even number up to head_dim %d",
                    c->rotary_dims, c->head_dim);
    if ((c->rotary_dims == 0) != (c->rope_tables == 0))
        return fail(error, EXIT_BAD_FILE, "config: rotary_dims is %d, but rope_tables is %d",
                    c->rotary_dims, c->rope_tables);
    if (c->rope_original && c->rope_tables == 0)
        return fail(error, EXIT_BAD_FILE, "config: rope_original is %d, but rope_tables is 0",
                    c->rope_original);
    if (c->experts_used > c->experts || (c->experts > 0 && c->experts_used == 0))
        return fail(error, EXIT_BAD_FILE, "config: experts_used is %d of %d experts",
                    c->experts_used, c->experts);
    return 0;
}

static int read_layers(struct config *c, const unsigned char *data, struct error *error) {
    for (int l = 0; l < c->layers; l++) {
        const unsigned char *p = data + (size_t)l * LAYER_BYTES;
        uint32_t window = read_u32(p), table = read_u32(p + 4);
        if (window > 1U << 22)
            return fail(error, EXIT_BAD_FILE, "config: window of layer %d is %u, expected up to %u",
                        l, window, 1U << 22);
        if (table != UINT32_MAX && table >= (uint32_t)c->rope_tables)
            return fail(error, EXIT_BAD_FILE, "config: layer %d uses rope table %u of %d", l, table,
                        c->rope_tables);
        if (read_u32(p + 8) || read_u32(p + 12))
            return fail(error, EXIT_BAD_FILE, "config: unknown data in the entry of layer %d", l);
        c->layer[l].window = (int)window;
        c->layer[l].rope_table = table == UINT32_MAX ? NO_ID : (int)table;
    }
    return 0;
}

/* Printable UTF-8: a name is shown on terminals and in tables. */
static bool is_printable(const char *name) {
    const size_t bytes = strlen(name);
    if (utf8_valid(name, bytes) != bytes) return false;
    for (const char *c = name; *c; c++) {
        const bool c1 = (unsigned char)c[0] == 0xc2 && (unsigned char)c[1] < 0xa0;
        if ((unsigned char)*c < 0x20 || *c == 0x7f || c1) return false;
    }
    return true;
}

int config_read(struct config *config, const unsigned char *data, uint64_t bytes,
                struct error *error) {
    int code = 0;
    if (bytes < CONFIG_BYTES)
        return fail(error, EXIT_BAD_FILE, "config: %llu bytes left, expected %d",
                    (unsigned long long)bytes, CONFIG_BYTES);
    memset(config, 0, sizeof *config);
    memcpy(config->name, data, sizeof config->name);
    if (config->name[sizeof config->name - 1])
        return fail(error, EXIT_BAD_FILE, "config: the name does not end within its %zu bytes",
                    sizeof config->name);
    if (!is_printable(config->name))
        return fail(error, EXIT_BAD_FILE, "config: the name is not printable UTF-8");
    for (int i = 284; i < CONFIG_BYTES; i++)
        if (data[i]) return fail(error, EXIT_BAD_FILE, "config: unknown data at its byte %d", i);
    if ((code = read_fields(config, data, error))) return code;
    if ((code = check_fields(config, error))) return code;
    if ((code = read_ids(config, data, error))) return code;
    if ((bytes - CONFIG_BYTES) / LAYER_BYTES < (uint64_t)config->layers)
        return fail(error, EXIT_BAD_FILE, "config: %d layers do not fit into the head",
                    config->layers);
    return read_layers(config, data + CONFIG_BYTES, error);
}

int config_supported(const struct config *c, struct error *error) {
    const struct {
        const char *what;
        int used;
    } flags[] = {
        {"biases before a norm of all of q (qkv_bias, qk_norm)",
         c->qkv_bias && c->qk_norm == QK_NORM_FULL},
        {"experts", c->experts != 0},
    };
    for (size_t i = 0; i < sizeof flags / sizeof *flags; i++)
        if (flags[i].used)
            return fail(error, EXIT_BAD_FILE,
                        "the model uses %s, which this version does not implement", flags[i].what);
    return 0;
}

/* ---- the tensors that a config demands ---- */

struct tensor_list {
    struct tensor *tensors; /* or NULL: only count */
    int count;
    uint64_t end, parameters;
    int overflow;
};

/* Adds a tensor [rows, columns]; rows = 0: a vector [columns]. */
static void add(struct tensor_list *list, const char *name, enum dtype dtype, uint64_t rows,
                uint64_t columns) {
    uint64_t elements = columns, bytes = 0, end = 0;
    if (rows && __builtin_mul_overflow(rows, columns, &elements)) list->overflow = 1;
    if (__builtin_mul_overflow(elements, dtype_size(dtype), &bytes)) list->overflow = 1;
    if (__builtin_add_overflow(list->end, bytes, &end) || end > UINT64_MAX - 255)
        list->overflow = 1;
    if (list->overflow) return;
    if (list->tensors) {
        struct tensor *t = &list->tensors[list->count];
        *t = (struct tensor){
            .dtype = dtype, .dims = rows ? 2 : 1, .offset = list->end, .bytes = bytes};
        snprintf(t->name, sizeof t->name, "%s", name);
        t->shape[0] = rows ? rows : columns;
        t->shape[1] = rows ? columns : 0;
    }
    list->count++;
    if (strcmp(name, "rope") != 0) list->parameters += elements;
    list->end = (end + 255) / 256 * 256;
}

static void add_layer(struct tensor_list *list, const struct config *c, int layer) {
    const uint64_t width = (uint64_t)c->width, ffn = (uint64_t)c->ffn,
                   head_dim = (uint64_t)c->head_dim;
    const uint64_t heads = (uint64_t)c->heads, all_heads = heads + 2 * (uint64_t)c->kv_heads;
    const bool whole = c->qk_norm == QK_NORM_FULL;
    const uint64_t norm = c->qk_norm == QK_NORM_NONE ? 0 : head_dim;
    const uint64_t before = c->norm_placement == NORM_AFTER ? 0 : width;
    const uint64_t after = c->norm_placement == NORM_BEFORE ? 0 : width;
    const bool centred = c->norm == LAYER_NORM;
    const uint64_t up = (c->gated ? 2 : 1) * ffn;
    const struct {
        const char *name;
        enum dtype dtype;
        uint64_t rows, columns; /* no columns: the model has no such tensor */
    } parts[] = {
        {"norm_attention", F32, 0, before},
        {"norm_attention_bias", F32, 0, centred ? before : 0},
        {"qkv", c->weight_dtype, all_heads * head_dim, width},
        {"qkv_bias", F32, 0, c->qkv_bias ? all_heads * head_dim : 0},
        {"norm_q", F32, 0, whole ? heads * norm : norm},
        {"norm_k", F32, 0, whole ? (uint64_t)c->kv_heads * norm : norm},
        {"out", c->weight_dtype, width, heads * head_dim},
        {"out_bias", F32, 0, c->out_bias ? width : 0},
        {"norm_after_attention", F32, 0, after},
        {"norm_after_attention_bias", F32, 0, centred ? after : 0},
        {"norm_ffn", F32, 0, before},
        {"norm_ffn_bias", F32, 0, centred ? before : 0},
        {"gate_up", c->weight_dtype, up, width},
        {"gate_up_bias", F32, 0, c->ffn_bias ? up : 0},
        {"down", c->weight_dtype, width, ffn},
        {"down_bias", F32, 0, c->ffn_bias ? width : 0},
        {"norm_after_ffn", F32, 0, after},
        {"norm_after_ffn_bias", F32, 0, centred ? after : 0},
    };
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        char name[64];
        if (!parts[i].columns) continue;
        snprintf(name, sizeof name, "layers.%d.%s", layer, parts[i].name);
        add(list, name, parts[i].dtype, parts[i].rows, parts[i].columns);
    }
}

static struct tensor_list list_tensors(const struct config *c, struct tensor *tensors) {
    struct tensor_list list = {.tensors = tensors};
    const uint64_t vocab = (uint64_t)c->vocab, width = (uint64_t)c->width;
    const uint64_t sets = c->rope_original ? 2 : 1;
    if (c->rope_tables)
        add(&list, "rope", F32, sets * (uint64_t)c->rope_tables, (uint64_t)c->rotary_dims / 2);
    add(&list, "embed", c->weight_dtype, vocab, width);
    if (c->learned_positions) add(&list, "positions", c->weight_dtype, (uint64_t)c->context, width);
    for (int l = 0; l < c->layers; l++) add_layer(&list, c, l);
    add(&list, "norm_final", F32, 0, width);
    if (c->norm == LAYER_NORM) add(&list, "norm_final_bias", F32, 0, width);
    if (!c->tied) add(&list, "classifier", c->weight_dtype, vocab, width);
    return list;
}

int config_tensors(const struct config *c, struct tensor *tensors, uint64_t *total) {
    const struct tensor_list list = list_tensors(c, tensors);
    *total = list.end;
    return list.overflow ? -1 : list.count;
}

uint64_t config_parameters(const struct config *c) {
    return list_tensors(c, NULL).parameters;
}
