/* The CUDA backend: the operators of the forward pass, in its order, and their table. An operator
 * chooses its kernels by the number of rows:
 *
 *   1 row           Hopper, bf16: cuda_decode.cu, with norm, RoPE, cache and activation in the products
 *   up to 64 rows   Hopper, bf16: cuda_matmul_few.cu (wgmma), with the same in the products; also
 *                   1 row of models that cuda_decode.cu does not take; not where W is small
 *                   and the rows are more than 32
 *   more            Hopper, bf16: cuda_matmul_hopper.cu (wgmma), with the same in the products
 *   1 to 4 rows     elsewhere: cuda_matvec.cu
 *   more            elsewhere: cuda_matmul.cu (bf16), cuda_matmul_f32.cu
 *
 * Numerics  an input of a product is rounded to m (bf16 or f32) in every regime at the same point: x gamma
 *           before the norm's factor, q, k, v, what attention found, the activation. So regimes differ by
 *           the order of f32 sums alone. */
#include "kernels/cuda_backend.h"

/* ---- regimes ---- */

/* Hopper's own path, which later data-centre chips take as well. */
static bool on_hopper(const struct engine *e) {
    const struct cuda_backend *b = backend_of(e);
    return b->capability >= 90 && b->shared_bytes >= CUDA_STREAM_SHARED && !b->general &&
           e->config->weight_dtype == BF16;
}

/* One row at the speed of memory. */
static bool streams(const struct engine *e, int T) {
    return T == 1 && on_hopper(e) && cuda_decode_takes(e->config);
}

static bool has_wgmma(const struct engine *e) {
    return on_hopper(e) && backend_of(e)->capability == 90;
}

/* Whether whoever writes x prepares the norm of the product after it, since all products of the
 * step are cuda_decode's, or cuda_matmul_hopper's, which takes every width of a model. A norm's kernel would
 * cost a stream of weights 3 us, and a prompt 2 % for x once more through memory. LayerNorms have one. One row
 * with a norm after a product goes another way (cuda_decode.cu). */
static bool prepares(const struct engine *e, int T) {
    if (streams(e, T)) return e->config->norm_placement == NORM_BEFORE;
    return has_wgmma(e) && e->config->norm == RMS_NORM;
}

static void multiply(const struct engine *e, const struct product *p) {
    struct cuda_backend *b = backend_of(e);
    if (has_wgmma(e) && cuda_matmul_hopper_takes(p))
        cuda_matmul_hopper(b, p);
    else if (p->squares || p->gamma)
        cuda_failed(b, "multiply: a norm that no kernel here takes part in", cudaErrorInvalidValue);
    else if (p->T <= CUDA_MATVEC_ROWS)
        cuda_matvec(b, p);
    else if (p->dtype == F32)
        cuda_matmul_f32(b, p);
    else
        cuda_matmul(b, p);
}

/* W [N, K] against the norm of T rows of x from `first` on, or against x where there is none. Its first half
 * may be there already; else it is made. */
static struct product product_of_norm(struct engine *e, struct norm_weights norm, int first,
                                      const void *W, int T, int N) {
    struct cuda_backend *b = backend_of(e);
    struct product p = {};
    p.dtype = e->config->weight_dtype;
    p.T = T;
    p.N = N;
    p.K = e->config->width;
    p.W = W;
    p.in = engine_region(e, REGION_PANELS);
    p.in_rows = plan_device_rows(&e->plan.limits);
    const bool ready = b->normed.gamma == norm.gamma && first + T <= b->normed.rows;
    if (ready) {
        p.in = (const char *)p.in + (size_t)first * (size_t)p.K * dtype_size(p.dtype);
        p.in_rows -= first;
    } else {
        b->normed.rows = 0; /* of REGION_PANELS */
        cuda_norm(e, norm, first, T);
    }
    if (ready && norm.gamma) {
        p.squares = (const float *)engine_region(e, REGION_SQUARES) + first;
        p.parts = b->normed.parts;
        p.squares_stride = b->normed.stride;
        p.eps = e->config->norm_eps;
    } else if (norm.gamma && !norm.bias) {
        p.scale = (const float *)engine_region(e, REGION_SCALES);
    }
    return p;
}

/* What a kernel that has whole rows of x prepares for the product after them, which begins with this norm
 * (NULL: with none). */
static struct prepared prepare(struct engine *e, int T, const float *gamma) {
    struct cuda_backend *b = backend_of(e);
    struct prepared next = {};
    if (!prepares(e, T)) return next;
    next.gamma = b->normed.gamma = gamma;
    next.in = engine_region(e, REGION_PANELS);
    next.squares = streams(e, T) ? NULL : (float *)engine_region(e, REGION_SQUARES);
    b->normed.rows = T;
    b->normed.parts = next.squares ? 1 : 0;
    b->normed.stride = cuda_squares_stride(T);
    return next;
}

/* ---- the operators ---- */

/* The rows travel in stream order; the host's copy is free at once, since it is pageable memory. */
static void cuda_set_rows(struct engine *e, const int32_t *tokens, int count, int slot,
                          int position) {
    struct cuda_backend *b = backend_of(e);
    const size_t bytes = (size_t)count * sizeof *tokens;
    b->position = position;
    b->rows_set = true;
    for (int t = 0; t < count; t++) {
        b->slots[t] = slot;
        b->positions[t] = position + t;
    }
    const int32_t *const from[] = {tokens, b->slots, b->positions};
    for (int which = 0; which < 3; which++)
        CUDA_TRY(b, cudaMemcpyAsync(cuda_row_numbers(e, which), from[which], bytes,
                                    cudaMemcpyHostToDevice, b->stream));
}

static void cuda_embed(struct engine *e, struct rows rows) {
    struct cuda_backend *b = backend_of(e);
    b->normed.rows = 0;
    b->pending = {};
    const struct prepared next = prepare(e, rows.count, e->layer[0].norm_attention);
    cuda_embed_rows(e, rows, &next);
}

static void cuda_qkv(struct engine *e, int layer, struct rows rows) {
    const struct config *c = e->config;
    const struct layer_weights *w = &e->layer[layer];
    if (streams(e, rows.count)) {
        cuda_decode_qkv(e, layer);
        return;
    }
    const int N = (c->heads + 2 * c->kv_heads) * c->head_dim;
    struct product p =
        product_of_norm(e, {w->norm_attention, w->norm_attention_bias}, 0, w->qkv, rows.count, N);
    p.epilogue = c->qk_norm == QK_NORM_HEAD ? EPILOGUE_HEADS : EPILOGUE_QKV;
    p.heads = cuda_heads(e, layer);
    p.eps = c->norm_eps;
    if (c->qk_norm != QK_NORM_FULL && has_wgmma(e) && cuda_matmul_hopper_takes(&p)) {
        cuda_matmul_hopper(backend_of(e), &p);
        return;
    }
    p.epilogue = EPILOGUE_STORE;
    p.y = (float *)engine_region(e, REGION_QKV);
    p.y_stride = N;
    multiply(e, &p);
    cuda_finish_heads(e, layer, rows);
}

static void cuda_attend(struct engine *e, int layer, struct rows rows) {
    const struct config *c = e->config;
    struct cuda_backend *b = backend_of(e);
    struct cuda_attention a = {};
    a.q = engine_region(e, REGION_Q);
    a.out = engine_region(e, REGION_A);
    a.keys = cuda_layer_cache(e, REGION_KEYS, layer);
    a.values = cuda_layer_cache(e, REGION_VALUES, layer);
    a.slots = cuda_row_numbers(e, 1);
    a.positions = cuda_row_numbers(e, 2);
    a.parts = (float *)engine_region(e, REGION_PARTS);
    a.counters = (unsigned *)engine_region(e, REGION_COUNTERS);
    a.T = rows.count;
    a.H = c->heads;
    a.G = c->kv_heads;
    a.D = c->head_dim;
    a.R = cuda_ring(e, layer);
    a.window = c->layer[layer].window ? c->layer[layer].window : (int)ALL_POSITIONS;
    a.scale = c->attention_scale;
    a.cap = c->attention_cap;
    if (rows.count == 1 && b->pending.heads) {
        a.raw.qkv = (const float *)engine_region(e, REGION_QKV);
        a.raw.norm_q = e->layer[layer].norm_q;
        a.raw.norm_k = e->layer[layer].norm_k;
        a.raw.rope = cuda_turns(e, layer);
        a.raw.eps = c->norm_eps;
        b->pending.heads = false;
    }
    const bool near = cuda_is_short(e, rows.count) ||
                      a.window <= cuda_near(e, rows.count); /* speed alone depends on it */
    if (c->weight_dtype == F32)
        cuda_attention_f32(b, &a);
    else if (rows.count == 1 && near && on_hopper(e) && cuda_attention_near_takes(&a))
        cuda_attention_near(b, &a);
    else if (rows.count == 1 && on_hopper(e) && cuda_attention_far_takes(&a))
        cuda_attention_far(b, &a);
    else if (rows.count <= CUDA_DECODE_ROWS && near && on_hopper(e) &&
             cuda_attention_rows_takes(&a))
        cuda_attention_rows(b, &a);
    else if (rows.count <= CUDA_DECODE_ROWS && cuda_attention_decode_takes(a.D))
        cuda_attention_decode(b, &a);
    else if (has_wgmma(e) && cuda_attention_hopper_takes(&a))
        cuda_attention_hopper(b, &a);
    else
        cuda_attention_prefill(b, &a);
}

/* The weights of the norm that follows a projection. */
static const float *norm_after(const struct engine *e, int layer, enum projection which) {
    if (which == ATTENTION_OUT) return e->layer[layer].norm_ffn;
    return layer + 1 < e->config->layers ? e->layer[layer + 1].norm_attention : e->norm_final;
}

static void cuda_project(struct engine *e, int layer, enum projection which, struct rows rows) {
    const struct config *c = e->config;
    struct cuda_backend *b = backend_of(e);
    const struct layer_weights *w = &e->layer[layer];
    const bool out = which == ATTENTION_OUT;
    b->normed.rows = 0;
    if (streams(e, rows.count)) {
        const struct prepared next = prepare(e, 1, norm_after(e, layer, which));
        cuda_decode_project(e, layer, which, &next);
        return;
    }
    struct product p = {};
    p.epilogue = EPILOGUE_ADD;
    p.dtype = c->weight_dtype;
    p.T = rows.count;
    p.N = c->width;
    p.K = out ? c->heads * c->head_dim : c->ffn;
    p.W = out ? w->out : w->down;
    p.in = engine_region(e, out ? REGION_A : REGION_H);
    p.in_rows = plan_device_rows(&e->plan.limits);
    p.y_stride = c->width;
    const struct after after =
        out ? (struct after){w->out_bias, {w->after_attention, w->after_attention_bias}}
            : (struct after){w->down_bias, {w->after_ffn, w->after_ffn_bias}};
    if (after.bias || after.norm.gamma) {
        p.epilogue = EPILOGUE_STORE;
        p.y = (float *)engine_region(e, REGION_QKV);
        multiply(e, &p);
        const struct prepared next = prepare(e, rows.count, norm_after(e, layer, which));
        cuda_add(e, rows.count, (const float *)engine_region(e, REGION_X), p.y, after, &next);
        return;
    }
    p.y = (float *)engine_region(e, REGION_X);
    if (prepares(e, rows.count)) {
        p.gamma = norm_after(e, layer, which);
        p.next = engine_region(e, REGION_PANELS);
        p.next_squares = (float *)engine_region(e, REGION_SQUARES);
        p.squares_stride = cuda_squares_stride(rows.count);
        b->normed.gamma = p.gamma;
        b->normed.rows = rows.count;
        b->normed.parts = cuda_matmul_hopper_parts(b, &p);
        b->normed.stride = p.squares_stride;
    }
    multiply(e, &p);
}

static void cuda_gate_up(struct engine *e, int layer, struct rows rows) {
    const struct config *c = e->config;
    const struct layer_weights *w = &e->layer[layer];
    if (streams(e, rows.count)) {
        cuda_decode_gate_up(e, layer);
        return;
    }
    const int N = (c->gated ? 2 : 1) * c->ffn;
    struct product p =
        product_of_norm(e, {w->norm_ffn, w->norm_ffn_bias}, 0, w->gate_up, rows.count, N);
    if (!c->gated || c->ffn_bias || c->activation == GELU) {
        p.epilogue = EPILOGUE_STORE;
        p.y = (float *)engine_region(e, REGION_QKV);
        p.y_stride = N;
        multiply(e, &p);
        cuda_activate(e, layer, rows.count);
        return;
    }
    p.epilogue = EPILOGUE_ACTIVATE;
    p.h = engine_region(e, REGION_H);
    p.activation = c->activation;
    multiply(e, &p);
}

static void cuda_classify(struct engine *e, struct rows rows) {
    const struct config *c = e->config;
    if (rows.classified == 0) return;
    if (streams(e, rows.count)) {
        cuda_decode_classify(e);
    } else {
        struct product p =
            product_of_norm(e, {e->norm_final, e->norm_final_bias}, rows.count - rows.classified,
                            e->classifier, rows.classified, c->vocab_used);
        p.epilogue = EPILOGUE_STORE;
        p.y = (float *)engine_region(e, REGION_LOGITS);
        p.y_stride = c->vocab;
        multiply(e, &p);
    }
    if (c->final_cap > 0) cuda_cap_logits(e, rows);
}

/* ---- results ---- */

static int cuda_take_id(struct engine *e, int32_t *id, struct error *error) {
    return cuda_take(backend_of(e), id, error);
}

static int cuda_read_logits(struct engine *e, int row, float *logits, struct error *error) {
    struct cuda_backend *b = backend_of(e);
    CUDA_TRY(b, cudaMemcpyAsync(logits, cuda_logits(e, row),
                                (size_t)e->config->vocab_used * sizeof *logits,
                                cudaMemcpyDeviceToHost, b->stream));
    return cuda_finish(e, error);
}

/* ---- the table ---- */

extern "C" {
extern const struct ops cuda_ops = {
    "cuda",           1,
    cuda_open,        cuda_free_memory,
    cuda_allocate,    cuda_upload,
    cuda_close,       cuda_set_rows,
    cuda_step,        cuda_embed,
    cuda_qkv,         cuda_attend,
    cuda_project,     cuda_gate_up,
    cuda_classify,    cuda_take_id,
    cuda_read_logits, cuda_finish,
    cuda_roof,
};
}
