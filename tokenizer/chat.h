/* Conversations as ids, in the shape that a model was trained on. The shapes are fixed code, since a
 * template from a file is a program. What they say is a trusted text and names control tokens; what
 * people and models said is plain text, in which "<|im_end|>" is ten letters. */
#ifndef TOKENIZER_CHAT_H
#define TOKENIZER_CHAT_H

#include "model/config.h"
#include "tokenizer/tokenizer.h"

enum chat_role { CHAT_SYSTEM, CHAT_USER, CHAT_ASSISTANT };

struct chat_message {
    enum chat_role role;
    const char *text; /* any bytes */
    size_t bytes;
};

/* Appends the ids of a conversation up to where the next answer begins. message[0..count): a system
 * message or none, then user and assistant in turn; the last is the user's. Without a system message
 * the tokenizer's default stands there, if it has one. bos is put where the shape has it; NO_ID:
 * nowhere. The ids are those of transformers' apply_chat_template, but for control tokens in what was
 * said, and for dates: Llama 3.1's "Today" is 26 Jul 2024, its template's default. EXIT_USAGE where
 * the shape is CHAT_NONE, the tokenizer lacks its tokens, or roles are out of order; EXIT_MEMORY,
 * EXIT_INTERNAL. */
int chat_encode(struct tokenizer *tokenizer, enum chat_shape shape, int32_t bos,
                const struct chat_message *message, int count, struct ids *ids,
                struct error *error);

/* The id that ends an answer in this shape. EXIT_USAGE where the tokenizer lacks it, or another token
 * that all models of the shape have: it is of another model, and would read the token as text. */
int chat_end(struct tokenizer *tokenizer, enum chat_shape shape, int32_t *id, struct error *error);

#endif
