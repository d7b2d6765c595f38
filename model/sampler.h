/* From logits to an id: repetition penalty, top-k, top-p, min-p, temperature, in this order, then
 * one draw. The random number of a draw is a function of (seed, draws so far), so the same seed
 * gives the same ids whatever else happens. */
#ifndef MODEL_SAMPLER_H
#define MODEL_SAMPLER_H

#include "model/error.h"

#include <stddef.h>
#include <stdint.h>

struct sampling {
    float temperature;    /* 0: the largest logit, the lowest id of equals */
    int top_k;            /* 0: off */
    float top_p;          /* 1: off */
    float min_p;          /* 0: off */
    float repeat_penalty; /* 1: off; CTRL (arXiv 1909.05858): positive logits divided, others
                             multiplied */
    int repeat_last;      /* ids that the penalty looks back on */
    uint64_t seed;
};

struct candidate {
    float value; /* a logit */
    int32_t id;
};

struct sampler {
    struct sampling sampling;
    uint64_t draws;
    int vocab;
    struct candidate *candidates; /* [vocab] */
    int32_t *recent;              /* ring of the last repeat_last ids */
    int recent_count;             /* accepted so far */
};

/* vocab: the number of ids that may be drawn. EXIT_MEMORY. */
int sampler_open(struct sampler *sampler, struct sampling sampling, int vocab, struct error *error);
void sampler_close(struct sampler *sampler);

/* Remembers an id of the prompt or of the answer for the penalty. */
void sampler_accept(struct sampler *sampler, int32_t id);

/* Draws from logits[0..vocab); may change them. EXIT_INTERNAL where one is NaN or +inf, or none is
 * finite: the message names the first such id. */
int sampler_draw(struct sampler *sampler, float *logits, int32_t *id, struct error *error);

#endif
