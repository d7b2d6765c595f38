/* Where the weights lie, found by the names of the tensors (model/format.md): the same for every
 * backend. */
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
    else if (!strcmp(part, "out"))
        w->out = at;
    else if (!strcmp(part, "norm_ffn"))
        w->norm_ffn = at;
    else if (!strcmp(part, "gate_up"))
        w->gate_up = at;
    else if (!strcmp(part, "down"))
        w->down = at;
    else
        return false;
    return true;
}

static bool set_in_engine(struct engine *e, const char *name, const void *at) {
    if (!strcmp(name, "rope"))
        e->rope = at;
    else if (!strcmp(name, "embed"))
        e->embed = at;
    else if (!strcmp(name, "norm_final"))
        e->norm_final = at;
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
