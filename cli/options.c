#include "cli/options.h"

#include <errno.h>
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef VERSION
#error "the build passes -DVERSION"
#endif

enum kind { HEADING, FLAG, INTEGER, REAL, TEXT, STOP_TEXT, CHOICE };

struct option {
    enum kind kind;
    const char *letters; /* one-letter forms, each an alias */
    const char *name;    /* without the two dashes; the heading's text */
    size_t member;       /* of struct options */
    const char *initial; /* default, as a user would type it; NULL: unset */
    double low, high;    /* INTEGER and REAL */
    const char *value;   /* what help calls the value; CHOICE: the choices with | between */
    const char *help;
};

#define TO(member)  offsetof(struct options, member)
#define LARGEST_INT 2147483647.0

static const struct option table[] = {
    {HEADING, "", "What to do (generate text where none is given)", 0, NULL, 0, 0, "", ""},
    {FLAG, "", "chat", TO(chat), NULL, 0, 0, "",
     "answer the prompt as a user's turn, in the model's own chat shape"},
    {FLAG, "", "bench", TO(bench), NULL, 0, 0, "",
     "measure tokens per second and share of the roof"},
    {TEXT, "", "logits", TO(logits), NULL, 0, 0, "FILE",
     "write the fp32 logits of every prompt position: positions x vocabulary"},
    {FLAG, "", "tokenize", TO(tokenize), NULL, 0, 0, "", "print the ids of the prompt"},
    {FLAG, "", "info", TO(info), NULL, 0, 0, "", "print what the model file holds and needs"},
    {FLAG, "", "check", TO(check), NULL, 0, 0, "",
     "read all of the file: checksums, finite values"},
    {FLAG, "h", "help", TO(help), NULL, 0, 0, "", "print this"},
    {FLAG, "", "version", TO(version), NULL, 0, 0, "", "print the version"},

    {HEADING, "", "Prompt", 0, NULL, 0, 0, "", ""},
    {TEXT, "pi", "prompt", TO(prompt), NULL, 0, 0, "TEXT",
     "the prompt (none: BOS alone); - reads standard input"},
    {TEXT, "f", "file", TO(prompt_file), NULL, 0, 0, "FILE",
     "the prompt from a file, byte for byte"},
    {TEXT, "y", "system", TO(system), NULL, 0, 0, "TEXT",
     "the system message of --chat (the model's default)"},
    {TEXT, "", "ids", TO(ids), NULL, 0, 0, "\"1 2 3\"", "the prompt as ids, taken as they are"},
    {CHOICE, "", "bos", TO(bos), "auto", 0, 0, "auto|yes|no", "begin with the model's BOS"},
    {FLAG, "", "special", TO(special), NULL, 0, 0, "",
     "text such as <|im_end|> in the prompt is that token"},
    {FLAG, "", "echo", TO(echo), NULL, 0, 0, "", "print the prompt before the answer"},
    {TEXT, "z", "tokenizer", TO(tokenizer), NULL, 0, 0, "FILE",
     "tokenizer of another model.bin, or a sentencepiece .model"},

    {HEADING, "", "Generation", 0, NULL, 0, 0, "", ""},
    {INTEGER, "n", "tokens", TO(tokens), "256", -1, LARGEST_INT, "N",
     "new tokens; -1: until the context is full or a stop token comes"},
    {INTEGER, "c", "context", TO(context), "0", 0, 1 << 22, "N",
     "positions of prompt and answer; 0: the model's, or what fits in memory"},
    {REAL, "t", "temp", TO(sampling.temperature), "0.8", 0, 1e9, "T",
     "temperature; 0: always the likeliest token"},
    {INTEGER, "", "top-k", TO(sampling.top_k), "40", 0, LARGEST_INT, "K",
     "draw from the K likeliest tokens; 0: off"},
    {REAL, "", "top-p", TO(sampling.top_p), "0.95", 0, 1, "P",
     "draw from the likeliest tokens that reach P together; 1: off"},
    {REAL, "", "min-p", TO(sampling.min_p), "0.05", 0, 1, "P",
     "leave out tokens less likely than P times the likeliest; 0: off"},
    {REAL, "", "repeat-penalty", TO(sampling.repeat_penalty), "1", 1e-3, 1e3, "X",
     "divide the logits of recent tokens by X; 1: off"},
    {INTEGER, "", "repeat-last-n", TO(sampling.repeat_last), "64", 0, 4096, "N",
     "how many tokens count as recent"},
    {TEXT, "s", "seed", TO(seed), NULL, 0, 0, "N", "0 to 2^64 - 1; same seed, same text (random)"},
    {STOP_TEXT, "", "stop", TO(stop), NULL, 0, 0, "TEXT", "end before this text; may be repeated"},
    {FLAG, "", "ignore-eos", TO(ignore_eos), NULL, 0, 0, "", "go on after a stop token"},

    {HEADING, "", "Benchmark", 0, NULL, 0, 0, "", ""},
    {TEXT, "", "pp", TO(pp), "512", 0, 0, "LIST", "prompt lengths, such as 128,512; 0: none"},
    {TEXT, "", "tg", TO(tg), "128", 0, 0, "LIST", "numbers of tokens to generate; 0: none"},
    {TEXT, "", "depth", TO(depth), "0", 0, 0, "LIST", "positions already in the cache"},
    {INTEGER, "r", "repetitions", TO(repetitions), "5", 1, 1000, "N",
     "of each test, after one that is dropped"},
    {CHOICE, "o", "output", TO(form), "md", 0, 0, "md|csv|json|jsonl", "form of the table"},

    {HEADING, "", "Machine and messages", 0, NULL, 0, 0, "", ""},
    {TEXT, "", "device", TO(device), "auto", 0, 0, "NAME",
     "auto (a GPU where one can be used, else the CPU), cpu, cuda or cuda:N"},
    {INTEGER, "", "threads", TO(threads), "0", 0, 1024, "N",
     "0: OMP_NUM_THREADS, else the cores this process may use"},
    {INTEGER, "", "chunk", TO(chunk), "0", 0, 65536, "N",
     "prompt tokens of one step; 0: 512, on a GPU up to 8192"},
    {FLAG, "", "quiet", TO(quiet), NULL, 0, 0, "", "nothing on stderr but errors"},
    {FLAG, "", "verbose", TO(verbose), NULL, 0, 0, "", "say more on stderr"},
};
enum { OPTIONS = sizeof table / sizeof *table };

/* ---- parsing ---- */

/* The option that an argument names: -x, --name or --name=value (then *value is set). */
static const struct option *find(const char *argument, const char **value) {
    *value = NULL;
    if (argument[0] != '-' || !argument[1]) return NULL;
    for (int i = 0; i < OPTIONS; i++) {
        if (table[i].kind == HEADING) continue;
        if (argument[1] != '-') {
            if (argument[2] == 0 && strchr(table[i].letters, argument[1])) return &table[i];
            continue;
        }
        size_t length = strlen(table[i].name);
        if (strncmp(argument + 2, table[i].name, length) != 0) continue;
        if (argument[2 + length] == '=') *value = argument + 3 + length;
        if (argument[2 + length] == 0 || argument[2 + length] == '=') return &table[i];
    }
    return NULL;
}

static int parse_number(double *number, const struct option *option, const char *text,
                        struct error *error) {
    char *end = NULL;
    errno = 0;
    *number = strtod(text, &end);
    bool whole = option->kind != INTEGER || *number == floor(*number);
    if (end == text || *end || errno || !whole ||
        !(*number >= option->low && *number <= option->high))
        return fail(error, EXIT_USAGE, "--%s is %s, expected %s from %.10g to %.10g", option->name,
                    text, option->kind == INTEGER ? "a whole number" : "a number", option->low,
                    option->high);
    return 0;
}

/* The index of text among the choices "a|b|c". */
static int parse_choice(int *index, const struct option *option, const char *text,
                        struct error *error) {
    size_t length = strlen(text);
    *index = 0;
    for (const char *choice = option->value; choice; (*index)++) {
        const char *bar = strchr(choice, '|');
        size_t choice_length = bar ? (size_t)(bar - choice) : strlen(choice);
        if (choice_length == length && memcmp(choice, text, length) == 0) return 0;
        choice = bar ? bar + 1 : NULL;
    }
    return fail(error, EXIT_USAGE, "--%s is %s, expected %s", option->name, text, option->value);
}

static int add_stop(struct options *options, const char *text, struct error *error) {
    size_t length = strlen(text);
    if (length == 0 || length > MAX_STOP_BYTES)
        return fail(error, EXIT_USAGE, "--stop has %zu bytes, expected 1 to %d", length,
                    MAX_STOP_BYTES);
    if (options->stop_count == MAX_STOP_TEXTS)
        return fail(error, EXIT_USAGE, "--stop is given more than %d times", MAX_STOP_TEXTS);
    options->stop[options->stop_count++] = text;
    return 0;
}

/* Stores one value. The member has the type that the kind says. */
static int store(struct options *options, const struct option *option, const char *text,
                 struct error *error) {
    void *member = (char *)options + option->member;
    double number = 0;
    float real = 0;
    int whole = 0, code = 0;
    switch (option->kind) {
    case HEADING: return 0;
    case FLAG: *(bool *)member = true; return 0;
    case TEXT: memcpy(member, &text, sizeof text); return 0;
    case STOP_TEXT: return add_stop(options, text, error);
    case REAL:
        code = parse_number(&number, option, text, error);
        real = (float)number;
        memcpy(member, &real, sizeof real);
        return code;
    case INTEGER:
        code = parse_number(&number, option, text, error);
        whole = code ? 0 : (int)number;
        memcpy(member, &whole, sizeof whole);
        return code;
    case CHOICE:
        code = parse_choice(&whole, option, text, error);
        memcpy(member, &whole, sizeof whole);
        return code;
    }
    return fail(error, EXIT_INTERNAL, "option --%s has no kind", option->name);
}

/* One option and its value; *at moves past what was used. */
static int parse_option(struct options *options, int argc, char **argv, int *at,
                        struct error *error) {
    const char *value = NULL, *ignored = NULL;
    const char *argument = argv[(*at)++];
    const struct option *option = find(argument, &value);
    if (!option)
        return fail(error, EXIT_USAGE, "unknown option %s; --help lists them all", argument);
    if (option->kind == FLAG) {
        if (value)
            return fail(error, EXIT_USAGE, "--%s takes no value, found %s", option->name, value);
        return store(options, option, NULL, error);
    }
    if (!value) {
        if (*at == argc)
            return fail(error, EXIT_USAGE, "%s needs a value: %s", argument, option->value);
        value = argv[(*at)++];
        if (find(value, &ignored))
            return fail(
                error, EXIT_USAGE,
                "%s needs a value, found the option %s; if that is the value, write --%s=%s",
                argument, value, option->name, value);
    }
    return store(options, option, value, error);
}

/* auto, cpu, cuda, or cuda: and a number of up to three digits. */
static bool is_device(const char *name) {
    if (!strcmp(name, "auto") || !strcmp(name, "cpu") || !strcmp(name, "cuda")) return true;
    const size_t digits = strncmp(name, "cuda:", 5) ? 0 : strspn(name + 5, "0123456789");
    return digits > 0 && digits <= 3 && !name[5 + digits];
}

/* What the options demand of one another. */
static int check_together(const struct options *o, struct error *error) {
    int modes = o->bench + o->tokenize + o->info + o->check + (o->logits != NULL);
    if (modes > 1)
        return fail(error, EXIT_USAGE,
                    "more than one of --bench, --logits, --tokenize, --info and --check");
    if ((o->prompt != NULL) + (o->prompt_file != NULL) + (o->ids != NULL) > 1)
        return fail(error, EXIT_USAGE, "more than one of --prompt, --file and --ids");
    if (o->chat && (o->bench || o->info || o->check || o->logits || o->ids || o->special))
        return fail(error, EXIT_USAGE,
                    "--chat with --bench, --info, --check, --logits, --ids or --special");
    if (o->chat && !o->prompt && !o->prompt_file)
        return fail(error, EXIT_USAGE, "--chat needs what the user says, as -p or -f");
    if (o->system && !o->chat)
        return fail(error, EXIT_USAGE, "--system is for --chat, which is not given");
    if (!o->model)
        return fail(error, EXIT_USAGE, "no model; try: ./run model.bin -p \"Once upon a time\"");
    if (o->tokenize && o->ids) return fail(error, EXIT_USAGE, "--tokenize needs text, found --ids");
    if (!is_device(o->device))
        return fail(error, EXIT_USAGE, "--device is %s, expected auto, cpu, cuda or cuda:N",
                    o->device);
    return 0;
}

int options_parse(struct options *options, int argc, char **argv, struct error *error) {
    *options = (struct options){0};
    for (int i = 0; i < OPTIONS; i++) {
        int code = table[i].initial ? store(options, &table[i], table[i].initial, error) : 0;
        if (code) return code;
    }
    for (int at = 1; at < argc;) {
        if (argv[at][0] == '-' && argv[at][1]) {
            int code = parse_option(options, argc, argv, &at, error);
            if (code) return code;
        } else if (!options->model) {
            options->model = argv[at++];
        } else {
            return fail(error, EXIT_USAGE, "a second model, %s, after %s; a prompt needs -p",
                        argv[at], options->model);
        }
    }
    return options->help || options->version ? 0 : check_together(options, error);
}

/* ---- help ---- */

void options_help(void) {
    puts("run: transformer inference at the hardware's limit\n\n"
         "  ./run MODEL -p TEXT         continues the text\n"
         "  ./run MODEL --chat -p TEXT  answers it\n"
         "  ./run MODEL --bench         measures tokens per second\n\n"
         "MODEL is a model.bin; make one with: .venv/bin/python -m export SOURCE -o model.bin");
    for (int i = 0; i < OPTIONS; i++) {
        const struct option *o = &table[i];
        if (o->kind == HEADING) {
            printf("\n%s\n", o->name);
            continue;
        }
        char names[64] = "";
        for (const char *letter = o->letters; *letter; letter++)
            snprintf(names + strlen(names), sizeof names - strlen(names), "-%c, ", *letter);
        snprintf(names + strlen(names), sizeof names - strlen(names), "--%s %s", o->name, o->value);
        printf("  %-32s %s", names, o->help);
        if (o->initial) printf(" (%s)", o->initial);
        putchar('\n');
    }
    puts(
        "\nGenerated text alone goes to stdout, messages go to stderr.\n"
        "Exit codes: 0 done, 1 internal, 2 usage, 3 bad model or tokenizer file, 4 out of memory,\n"
        "5 device, 128 + n ended by signal n (130: interrupted), 141 stdout closed.");
}

void options_version(void) {
    puts("roofline " VERSION);
}
