/* What every backend does alike with the plan and the weights. */
#include "kernels/ops.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

/* false: there is no such part of a layer. */
static bool set_in_layer(struct layer_weights *w, const char *part, const void *at) {
    if (!strcmp(part, "norm_attention"))
        w->norm_attention = at;
    else if (!strcmp(part, "qkv"))
        w->qkv = at;
    else if (!strcmp(part, "qkv_bias"))
        w->qkv_bias = at;
    else if (!strcmp(part, "norm_q"))
        w->norm_q = at;
    else if (!strcmp(part, "norm_k"))
        w->norm_k = at;
    else if (!strcmp(part, "out"))
        w->out = at;
    else if (!strcmp(part, "norm_after_attention"))
        w->after_attention = at;
    else if (!strcmp(part, "norm_after_ffn"))
        w->after_ffn = at;
    else if (!strcmp(part, "norm_ffn"))
        w->norm_ffn = at;
    else if (!strcmp(part, "gate_up"))
        w->gate_up = at;
    else if (!strcmp(part, "down"))
        w->down = at;
    else if (!strcmp(part, "norm_attention_bias"))
        w->norm_attention_bias = at;
    else if (!strcmp(part, "norm_after_attention_bias"))
        w->after_attention_bias = at;
    else if (!strcmp(part, "norm_ffn_bias"))
        w->norm_ffn_bias = at;
    else if (!strcmp(part, "norm_after_ffn_bias"))
        w->after_ffn_bias = at;
    else if (!strcmp(part, "out_bias"))
        w->out_bias = at;
    else if (!strcmp(part, "gate_up_bias"))
        w->gate_up_bias = at;
    else if (!strcmp(part, "down_bias"))
        w->down_bias = at;
    else
        return false;
    return true;
}

/* Which of the two sets of RoPE tables serves the planned context, where a model has two. */
static const float *choose_rope(const struct engine *e, const float *sets) {
    const struct config *c = e->config;
    const size_t set = (size_t)c->rope_tables * (size_t)c->rotary_dims / 2;
    return c->rope_original && e->plan.limits.context > c->rope_original ? sets + set : sets;
}

static bool set_in_engine(struct engine *e, const char *name, const void *at) {
    if (!strcmp(name, "rope"))
        e->rope = choose_rope(e, at);
    else if (!strcmp(name, "embed"))
        e->embed = at;
    else if (!strcmp(name, "positions"))
        e->positions = at;
    else if (!strcmp(name, "norm_final"))
        e->norm_final = at;
    else if (!strcmp(name, "norm_final_bias"))
        e->norm_final_bias = at;
    else if (!strcmp(name, "classifier"))
        e->classifier = at;
    else
        return false;
    return true;
}

int engine_locate_weights(struct engine *e, const struct tensor *tensors, uint64_t count,
                          struct error *error) {
    const char *weights = engine_region(e, REGION_WEIGHTS);
    for (uint64_t i = 0; i < count; i++) {
        const struct tensor *t = &tensors[i];
        int layer = 0, part = 0;
        bool known;
        if (sscanf(t->name, "layers.%d.%n", &layer, &part) == 1 && part > 0)
            known = layer >= 0 && layer < e->config->layers &&
                    set_in_layer(&e->layer[layer], t->name + part, weights + t->offset);
        else
            known = set_in_engine(e, t->name, weights + t->offset);
        if (!known)
            return fail(error, EXIT_INTERNAL, "tensor %s has no place in the engine", t->name);
    }
    if (e->config->tied) e->classifier = e->embed;
    return 0;
}

int engine_no_memory(const struct engine *e, const char *memory, size_t available,
                     struct error *error) {
    const struct plan *plan = &e->plan;
    const int fits = plan_largest_context(e->config, plan->region[REGION_WEIGHTS].bytes,
                                          plan->limits, available);
    char advice[64] = "not even a context of 1 fits";
    if (fits > 0) snprintf(advice, sizeof advice, "the longest context that fits is %d", fits);
    return fail(error, EXIT_MEMORY,
                "%s memory: %zu MiB needed for a context of %d, %zu MiB free: %s", memory,
                (plan->bytes >> 20) + 1, plan->limits.context, available >> 20, advice);
}

int engine_check_gaps(const struct model_file *file, const char *data, uint64_t from, size_t bytes,
                      struct error *error) {
    for (uint64_t i = 0; i < file->tensor_count; i++) {
        const struct tensor *t = &file->tensors[i];
        const uint64_t next = i + 1 < file->tensor_count ? file->tensors[i + 1].offset
                                                         : file->file_bytes - file->head_bytes;
        const uint64_t end = next < from + bytes ? next : from + bytes;
        uint64_t at = t->offset + t->bytes;
        for (at = at > from ? at : from; at < end; at++)
            if (data[at - from])
                return fail(error, EXIT_BAD_FILE,
                            "%s: byte %llu after tensor %s is 0x%02x, expected 0: the file is "
                            "damaged, export it again",
                            file->path, (unsigned long long)(file->head_bytes + at), t->name,
                            (unsigned char)data[at - from]);
    }
    return 0;
}
