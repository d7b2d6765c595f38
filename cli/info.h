/* --info: what a model file holds and what it needs. */
#ifndef CLI_INFO_H
#define CLI_INFO_H

#include "model/file.h"
#include "model/plan.h"
#include "tokenizer/tokenizer.h"

/* Prints to stdout. tokenizer may be NULL. limits: those of a run; the context is varied. */
void info_print(const struct model_file *file, const struct tokenizer *tokenizer,
                struct limits limits);

#endif
