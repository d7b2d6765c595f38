#include "tokenizer/chat.h"

#include "tokenizer/white_space.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

/* ---- the shapes ---- */

enum place { OWN_TURN, FIRST_USER, LAST_USER };

struct shape {
    const char *system_open, *system_close;
    const char *user_open, *user_close;
    const char *answer_open; /* before each answer, and where the next one begins */
    const char *answer_lead; /* after it, before an answer that is there */
    const char *answer_close;
    const char *mark[6];  /* tokens of all its models, NULL after them; the first ends an answer */
    enum place system_in; /* a turn of its own, or the start of a user's text */
    bool system_always;   /* even where there is no text for it */
    bool trim_system;     /* of white space at both ends; likewise: */
    bool trim_user;
    bool trim_answer;
    bool trims_whole_turn; /* the user's with system text in it, not that text before */
    bool bos_each_turn;    /* not only at the start */
    bool drops_thoughts;   /* of earlier answers: all up to </think> */
};

#define CHATML                                                                                     \
    .system_open = "<|im_start|>system\n", .system_close = "<|im_end|>\n",                         \
    .user_open = "<|im_start|>user\n", .user_close = "<|im_end|>\n",                               \
    .answer_open = "<|im_start|>assistant\n", .answer_lead = "", .answer_close = "<|im_end|>\n",   \
    .mark = {"<|im_end|>", "<|im_start|>"}

#define LLAMA3_HEADER(role) "<|start_header_id|>" role "<|end_header_id|>\n\n"
#define LLAMA3                                                                                     \
    .system_close = "<|eot_id|>", .user_open = LLAMA3_HEADER("user"), .user_close = "<|eot_id|>",  \
    .answer_open = LLAMA3_HEADER("assistant"), .answer_lead = "", .answer_close = "<|eot_id|>",    \
    .mark = {"<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"}, .trim_system = true,       \
    .trim_user = true, .trim_answer = true

#define MISTRAL(before_user, after_user, before_answer)                                            \
    .user_open = (before_user), .user_close = (after_user), .answer_open = "",                     \
    .answer_lead = (before_answer), .answer_close = "</s>"
#define SYSTEM_AND_BLANK_LINE .system_open = "", .system_close = "\n\n"

static const struct shape shapes[CHAT_SHAPES] = {
    [CHAT_LLAMA2] = {.system_open = "<<SYS>>\n",
                     .system_close = "\n<</SYS>>\n\n",
                     .user_open = "[INST] ",
                     .user_close = " [/INST]",
                     .answer_open = "",
                     .answer_lead = " ",
                     .answer_close = " </s>",
                     .mark = {"</s>"},
                     .system_in = FIRST_USER,
                     .trim_user = true,
                     .trim_answer = true,
                     .trims_whole_turn = true,
                     .bos_each_turn = true},
    [CHAT_LLAMA3] = {LLAMA3, .system_open = LLAMA3_HEADER("system")},
    [CHAT_LLAMA3_1] = {LLAMA3,
                       .system_open = LLAMA3_HEADER("system") "Cutting Knowledge Date: December "
                                                              "2023\nToday Date: 26 Jul 2024\n\n",
                       .system_always = true},
    [CHAT_CHATML] = {CHATML},
    [CHAT_QWEN3] = {CHATML, .drops_thoughts = true},
    [CHAT_GEMMA] = {SYSTEM_AND_BLANK_LINE, .user_open = "<start_of_turn>user\n",
                    .user_close = "<end_of_turn>\n", .answer_open = "<start_of_turn>model\n",
                    .answer_lead = "", .answer_close = "<end_of_turn>\n",
                    .mark = {"<end_of_turn>", "<start_of_turn>"}, .system_in = FIRST_USER,
                    .trim_user = true, .trim_answer = true},
    [CHAT_PHI3] = {.system_open = "<|system|>\n",
                   .system_close = "<|end|>\n",
                   .user_open = "<|user|>\n",
                   .user_close = "<|end|>\n",
                   .answer_open = "<|assistant|>\n",
                   .answer_lead = "",
                   .answer_close = "<|end|>\n",
                   .mark = {"<|end|>", "<|system|>", "<|user|>", "<|assistant|>"}},
    [CHAT_PHI4] = {.system_open = "<|im_start|>system<|im_sep|>",
                   .system_close = "<|im_end|>",
                   .user_open = "<|im_start|>user<|im_sep|>",
                   .user_close = "<|im_end|>",
                   .answer_open = "<|im_start|>assistant<|im_sep|>",
                   .answer_lead = "",
                   .answer_close = "<|im_end|>",
                   .mark = {"<|im_end|>", "<|im_start|>", "<|im_sep|>"}},
    [CHAT_PHI4_MINI] = {.system_open = "<|system|>",
                        .system_close = "<|end|>",
                        .user_open = "<|user|>",
                        .user_close = "<|end|>",
                        .answer_open = "<|assistant|>",
                        .answer_lead = "",
                        .answer_close = "<|end|>",
                        .mark = {"<|end|>", "<|system|>", "<|user|>", "<|assistant|>"}},
    [CHAT_ZEPHYR] = {.system_open = "<|system|>\n",
                     .system_close = "</s>\n",
                     .user_open = "<|user|>\n",
                     .user_close = "</s>\n",
                     .answer_open = "<|assistant|>\n",
                     .answer_lead = "",
                     .answer_close = "</s>\n",
                     .mark = {"</s>"}},
    [CHAT_OLMO] = {.system_open = "<|system|>\n",
                   .system_close = "\n",
                   .user_open = "<|user|>\n",
                   .user_close = "\n",
                   .answer_open = "<|assistant|>\n",
                   .answer_lead = "",
                   .answer_close = "<|endoftext|>\n",
                   .mark = {"<|endoftext|>"}},
    [CHAT_MISTRAL] = {MISTRAL("[INST] ", " [/INST]", ""), SYSTEM_AND_BLANK_LINE, .mark = {"</s>"},
                      .system_in = FIRST_USER},
    [CHAT_MISTRAL_V1] = {MISTRAL(" [INST] ", " [/INST]", " "), SYSTEM_AND_BLANK_LINE,
                         .mark = {"</s>"}, .system_in = FIRST_USER},
    [CHAT_MISTRAL_V3] = {MISTRAL("[INST] ", "[/INST]", " "), SYSTEM_AND_BLANK_LINE,
                         .mark = {"</s>", "[INST]", "[/INST]"}, .system_in = LAST_USER,
                         .trim_answer = true},
    [CHAT_MISTRAL_TEKKEN] = {MISTRAL("[INST]", "[/INST]", ""), SYSTEM_AND_BLANK_LINE,
                             .mark = {"</s>", "[INST]", "[/INST]"}, .system_in = LAST_USER},
    [CHAT_MISTRAL_V7] = {MISTRAL("[INST]", "[/INST]", ""), .system_open = "[SYSTEM_PROMPT]",
                         .system_close = "[/SYSTEM_PROMPT]",
                         .mark = {"</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]",
                                  "[/SYSTEM_PROMPT]"}},
};

/* ---- a conversation as a text of parts ---- */

/* What is written and not yet encoded, with room for all of the conversation. */
struct draft {
    char *text;
    size_t bytes;
    struct text_part *part; /* the shape's and others', in turn */
    int parts;
};

static void add(struct draft *d, const char *text, size_t bytes, bool from_shape) {
    if (bytes == 0) return;
    memcpy(d->text + d->bytes, text, bytes);
    d->bytes += bytes;
    if (d->parts == 0 || d->part[d->parts - 1].parse_special != from_shape)
        d->part[d->parts++].parse_special = from_shape;
    d->part[d->parts - 1].end = d->bytes;
}

static void add_literal(struct draft *d, const char *text) {
    add(d, text, strlen(text), true);
}

/* Bytes of the white space, as Python's strip has it, that text[at..end) starts or ends with. */
static size_t stripped_after(const char *text, size_t at, size_t end) {
    if (at < end && text[at] >= 0x1c && text[at] <= 0x1f) return 1;
    return white_after(text, at, end);
}
static size_t stripped_before(const char *text, size_t at, size_t end) {
    if (at < end && text[end - 1] >= 0x1c && text[end - 1] <= 0x1f) return 1;
    return white_before(text, at, end);
}

static void add_said(struct draft *d, const char *text, size_t bytes, bool trim_start,
                     bool trim_end) {
    size_t start = 0, end = bytes, white = 1;
    while (trim_start && (white = stripped_after(text, start, end)) > 0) start += white;
    while (trim_end && (white = stripped_before(text, start, end)) > 0) end -= white;
    add(d, text + start, end - start, false);
}

static void add_system(struct draft *d, const struct shape *shape,
                       const struct chat_message *system) {
    add_literal(d, shape->system_open);
    add_said(d, system->text, system->bytes, shape->trim_system, shape->trim_system);
    add_literal(d, shape->system_close);
}

/* An answer that was given before: some models are not to see again what they thought. */
static void add_answer(struct draft *d, const struct shape *shape,
                       const struct chat_message *message) {
    static const char thought[] = "</think>";
    enum { THOUGHT_BYTES = sizeof thought - 1 };
    size_t start = 0;
    for (size_t at = message->bytes; shape->drops_thoughts && start == 0 && at >= THOUGHT_BYTES;
         at--)
        if (!memcmp(message->text + at - THOUGHT_BYTES, thought, THOUGHT_BYTES)) start = at;
    while (start > 0 && start < message->bytes && message->text[start] == '\n') start++;
    add_literal(d, shape->answer_open);
    add_literal(d, shape->answer_lead);
    add_said(d, message->text + start, message->bytes - start, shape->trim_answer,
             shape->trim_answer);
    add_literal(d, shape->answer_close);
}

/* Encodes what is written and starts anew. */
static int finish(struct draft *d, struct tokenizer *tokenizer, struct ids *ids,
                  struct error *error) {
    int code = tokenizer_encode_parts(tokenizer, d->text, d->part, d->parts, ids, error);
    d->bytes = 0;
    d->parts = 0;
    return code;
}

/* ---- from outside ---- */

static int check_roles(const struct chat_message *message, int count, struct error *error) {
    int first = count > 0 && message[0].role == CHAT_SYSTEM;
    bool good = (count - first) % 2 == 1;
    for (int i = first; i < count; i++)
        good = good && message[i].role == ((i - first) % 2 ? CHAT_ASSISTANT : CHAT_USER);
    return good ? 0
                : fail(error, EXIT_USAGE,
                       "chat: expected a system message or none, then user and assistant in turn, "
                       "the user last");
}

/* The id of a token by its text. One id alone proves nothing: it may stand for what is unknown. */
static int find_mark(struct tokenizer *tokenizer, enum chat_shape shape, const char *mark,
                     int32_t *id, struct error *error) {
    const size_t bytes = strlen(mark);
    struct ids ids = {0};
    int code = tokenizer_encode(tokenizer, mark, bytes, true, &ids, error);
    size_t name_bytes = 0;
    const char *name = ids.count == 1 ? tokenizer_name(tokenizer, ids.id[0], &name_bytes) : NULL;
    if (!code && (!name || name_bytes != bytes || memcmp(name, mark, bytes) != 0))
        code = fail(error, EXIT_USAGE, "chat: the tokenizer has no %s, which the shape %s needs",
                    mark, chat_shape_name(shape));
    if (!code) *id = ids.id[0];
    free(ids.id);
    return code;
}

int chat_end(struct tokenizer *tokenizer, enum chat_shape shape, int32_t *id, struct error *error) {
    const char *const *mark = shapes[shape].mark;
    int32_t ignored;
    int code = find_mark(tokenizer, shape, *mark, id, error);
    while (!code && *++mark) code = find_mark(tokenizer, shape, *mark, &ignored, error);
    return code;
}

/* Room for every message between all that the shape can put around one. */
static int open_draft(struct draft *d, const struct shape *shape, size_t said, int count,
                      struct error *error) {
    const char *const literals[] = {shape->system_open, shape->system_close, shape->user_open,
                                    shape->user_close,  shape->answer_open,  shape->answer_lead,
                                    shape->answer_close};
    size_t around = 0;
    for (size_t i = 0; i < sizeof literals / sizeof *literals; i++) around += strlen(literals[i]);
    size_t room = said + ((size_t)count + 1) * around;
    *d = (struct draft){.text = malloc(room),
                        .part = malloc((2 * (size_t)count + 3) * sizeof(struct text_part))};
    return d->text && d->part
               ? 0
               : fail(error, EXIT_MEMORY, "chat: no memory for %zu bytes of conversation", room);
}

/* The turns from message[0], which is the user's; system is NULL where no turn holds it. */
static int add_turns(struct draft *d, struct tokenizer *tokenizer, const struct shape *shape,
                     int32_t bos, const struct chat_message *system,
                     const struct chat_message *message, int count, struct ids *ids,
                     struct error *error) {
    int code = 0;
    for (int i = 0; i < count && !code; i++) {
        if (message[i].role == CHAT_ASSISTANT) {
            add_answer(d, shape, &message[i]);
            continue;
        }
        if (i > 0 && shape->bos_each_turn) {
            code = finish(d, tokenizer, ids, error);
            if (!code && bos != NO_ID) code = ids_append(ids, bos, error);
        }
        bool with_system = system && i == (shape->system_in == LAST_USER ? count - 1 : 0);
        add_literal(d, shape->user_open);
        if (with_system) add_system(d, shape, system);
        bool trim_start = shape->trim_user && !(with_system && shape->trims_whole_turn);
        add_said(d, message[i].text, message[i].bytes, trim_start, shape->trim_user);
        add_literal(d, shape->user_close);
    }
    add_literal(d, shape->answer_open);
    return code ? code : finish(d, tokenizer, ids, error);
}

int chat_encode(struct tokenizer *tokenizer, enum chat_shape shape_name, int32_t bos,
                const struct chat_message *message, int count, struct ids *ids,
                struct error *error) {
    if (shape_name == CHAT_NONE)
        return fail(error, EXIT_USAGE, "chat: the model has no chat shape");
    int32_t end;
    int code = check_roles(message, count, error);
    if (!code) code = chat_end(tokenizer, shape_name, &end, error);
    if (code) return code;

    const struct shape *shape = &shapes[shape_name];
    struct chat_message system = {.role = CHAT_SYSTEM};
    system.text = tokenizer_system(tokenizer, &system.bytes);
    int first = message[0].role == CHAT_SYSTEM;
    if (first) system = message[0];
    bool has_system = first || system.bytes > 0 || shape->system_always;
    size_t said = system.bytes;
    for (int i = first; i < count; i++) said += message[i].bytes;

    struct draft draft;
    code = open_draft(&draft, shape, said, count, error);
    if (!code && bos != NO_ID) code = ids_append(ids, bos, error);
    if (!code && has_system && shape->system_in == OWN_TURN) add_system(&draft, shape, &system);
    if (!code)
        code = add_turns(&draft, tokenizer, shape, bos,
                         has_system && shape->system_in != OWN_TURN ? &system : NULL,
                         message + first, count - first, ids, error);
    free(draft.text);
    free(draft.part);
    return code;
}
