/* The command line: one table holds names, limits, defaults and help of every option. */
#ifndef CLI_OPTIONS_H
#define CLI_OPTIONS_H

#include "model/error.h"
#include "model/sampler.h"

#include <stdbool.h>
#include <stdint.h>

enum { MAX_STOP_TEXTS = 16, MAX_STOP_BYTES = 256 };
enum bos { BOS_AUTO, BOS_YES, BOS_NO };
enum bench_form { FORM_MD, FORM_CSV, FORM_JSON, FORM_JSONL };

struct options {
    const char *model;

    /* what to do; generation where none is set */
    bool bench, chat, tokenize, info, check, help, version;
    const char *logits;

    /* prompt */
    const char *prompt, *prompt_file, *ids, *system, *tokenizer;
    int bos; /* enum bos */
    bool special, echo;

    /* generation */
    int tokens, context, chunk;
    struct sampling sampling;
    const char *seed; /* NULL: random */
    const char *stop[MAX_STOP_TEXTS];
    int stop_count;
    bool ignore_eos;

    /* --bench */
    const char *pp, *tg, *depth;
    int repetitions;
    int form; /* enum bench_form */

    /* machine and messages */
    const char *device;
    int threads;
    bool quiet, verbose;
};

/* Fills *options from the defaults of the table, then from the arguments. EXIT_USAGE. */
int options_parse(struct options *options, int argc, char **argv, struct error *error);

void options_help(void);    /* on stdout */
void options_version(void); /* on stdout */

#endif
