/* roofline: runs a transformer language model from one file.
 *
 * Read from top to bottom, this is the path of a token: the forward pass, the machine made ready,
 * the prompt turned into ids, the ids into logits, a logit into the next id, the id into text. The
 * parts that it calls: model/ (what a model is), kernels/ (what it computes), tokenizer/, cli/. */
#define _POSIX_C_SOURCE 200809L
#include "cli/bench.h"
#include "cli/info.h"
#include "cli/options.h"
#include "cli/output.h"
#include "cli/prompt.h"
#include "cli/seconds.h"
#include "cli/threads.h"
#include "kernels/ops.h"
#include "model/file.h"
#include "model/sampler.h"
#include "tokenizer/chat.h"
#include "tokenizer/tokenizer.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct run {
    struct options options;
    struct model_file file;
    struct tokenizer *tokenizer; /* NULL: the model takes ids only */
    struct ids prompt;
    struct engine engine;
    struct sampler sampler;
    int32_t chat_end; /* --chat: ends the answer, whatever the model's own stops are */
    FILE *logits;     /* --logits writes here */
};

/* ---- the forward pass ---- */

/* One step: the rows set last go through every layer; the last rows.classified of them get logits.
 * Weights stream through once, whatever the number of rows. */
static void forward(struct engine *e, struct rows rows) {
    const struct ops *ops = e->ops;
    ops->embed(e, rows);
    for (int l = 0; l < e->config->layers; l++) {
        ops->qkv(e, l, rows);
        ops->attend(e, l, rows);
        ops->project(e, l, ATTENTION_OUT, rows);
        ops->gate_up(e, l, rows);
        ops->project(e, l, FEED_FORWARD_DOWN, rows);
    }
    if (rows.classified > 0) ops->classify(e, rows);
}

/* ---- signals and streams ---- */

/* While text is generated a signal ends the run between two steps, so that the text is whole; at any
 * other time it ends the program at once. */
static volatile sig_atomic_t signalled;

static void on_signal(int number) {
    signalled = number;
}

static void catch_signals(void) {
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = (int)SA_RESETHAND};
    sigaction(SIGINT, &action, NULL); /* the second one kills */
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGHUP, &action, NULL);
}

/* The exit code of a run that a signal ended, as a shell counts. */
static int interrupted(struct error *error) {
    *error = (struct error){.code = 128 + signalled};
    return error->code;
}

/* A standard stream that is closed would give its number to the next file opened. The place is taken
 * by one that can be used for nothing, so that it still counts as closed. */
static void prepare_streams(void) {
    signal(SIGPIPE, SIG_IGN); /* a closed stdout is seen by write; a closed stderr is no matter */
    signal(SIGXFSZ, SIG_IGN); /* a file that may grow no more, likewise */
    for (int i = STDIN_FILENO; i <= STDERR_FILENO; i++)
        if (fcntl(i, F_GETFD) < 0) open("/dev/null", i == STDIN_FILENO ? O_WRONLY : O_RDONLY);
}

/* ---- file and machine ---- */

static int open_tokenizer(struct run *r, struct error *error) {
    const int vocab = r->file.config.vocab;
    if (r->options.tokenizer)
        return tokenizer_open_file(&r->tokenizer, r->options.tokenizer, vocab, error);
    if (!r->file.tokenizer) return 0;
    int code =
        tokenizer_open(&r->tokenizer, r->file.tokenizer, r->file.tokenizer_bytes, vocab, error);
    if (!code) return 0;
    struct error inner = *error;
    return fail(error, code, "%s: tokenizer: %s", r->file.path, inner.text);
}

/* The positions to plan for: as asked, else the model's, cut to what fits into free memory. Positions
 * that are learned end with the model's context. */
static int choose_context(struct run *r, struct limits *limits, struct error *error) {
    const struct config *c = &r->file.config;
    if (c->learned_positions && limits->context > c->context)
        return fail(
            error, EXIT_USAGE,
            "a context of %d is asked for, but the model has learned %d positions and has no "
            "others",
            limits->context, c->context);
    if (limits->context > c->context)
        note(&r->options, "context %d is longer than the %d that the model was made for",
             limits->context, c->context);
    if (limits->context > 0) return 0;
    limits->context = c->context;
    int fits = plan_largest_context(c, r->file.file_bytes - r->file.head_bytes, *limits,
                                    r->engine.ops->free_memory(&r->engine));
    if (fits < 1) return 0; /* allocate says what is missing */
    if (fits < limits->context) {
        note(&r->options, "context %d instead of %d: more does not fit in memory", fits,
             limits->context);
        limits->context = fits;
    }
    return (size_t)limits->context >= r->prompt.count
               ? 0
               : fail(error, EXIT_USAGE, "the prompt has %zu tokens, but only a context of %d fits",
                      r->prompt.count, limits->context);
}

static int choose_threads(const struct options *options) {
    int threads = options->threads ? options->threads : default_threads(),
        cores = allowed_processors();
    if (threads <= cores) return threads;
    note(options, "%d threads on %d processors would wait for one another: using %d", threads,
         cores, cores);
    return cores;
}

/* --device: a GPU where there is a usable one, unless the user says which. */
static int choose_device(struct run *r, struct error *error) {
    struct engine *e = &r->engine;
    const char *asked = r->options.device;
    char why[160] = "this build has no CUDA: build it where nvcc is";
    e->ops = &cpu_ops;
    if (!strcmp(asked, "cpu")) return 0;
    const bool automatic = !strcmp(asked, "auto");
    if (strchr(asked, ':')) e->device_number = (int)strtol(strchr(asked, ':') + 1, NULL, 10);
#ifdef WITH_CUDA
    if (cuda_usable(e->config, e->device_number, why)) {
        e->ops = &cuda_ops;
        return 0;
    }
    if (automatic) note(&r->options, "running on the CPU: %s", why);
#endif
    return automatic ? 0 : fail(error, EXIT_DEVICE, "--device %s: %s", asked, why);
}

/* Device, plan, one allocation, weights. */
static int start_engine(struct run *r, struct limits limits, struct error *error) {
    struct engine *e = &r->engine;
    const uint64_t weight_bytes = r->file.file_bytes - r->file.head_bytes;
    e->config = &r->file.config;
    int code = choose_device(r, error);
    if (code) return code;
    limits.device = e->ops != &cpu_ops;
    limits.threads = limits.device ? 1 : choose_threads(&r->options);
    e->plan.limits = limits; /* open reads the number of threads */
    code = e->ops->open(e, error);
    const bool any_chunk = limits.chunk == 0;
    if (any_chunk) {
        struct limits wanted = limits;
        if (wanted.context == 0) wanted.context = e->config->context;
        limits.chunk = plan_chunk(e->config, weight_bytes, wanted, SIZE_MAX);
    }
    if (!code) code = choose_context(r, &limits, error);
    if (code) return code;
    if (any_chunk) /* a context that was asked for may leave less room */
        limits.chunk = plan_chunk(e->config, weight_bytes, limits, e->ops->free_memory(e));
    if (limits.chunk > limits.context) limits.chunk = limits.context;
    if (limits.classified > limits.chunk) limits.classified = limits.chunk;
    code = plan_make(&e->plan, e->config, weight_bytes, limits, error);
    if (!code) code = e->ops->allocate(e, error);
    double start = seconds();
    if (!code) code = e->ops->upload(e, &r->file, error);
    if (code) return code;
    if (!r->options.verbose) return 0;
    double taken = seconds() - start;
    note(&r->options, "%s; context %d, chunks of %d tokens", e->device, limits.context,
         limits.chunk);
    note(&r->options, "weights loaded in %.3f s, %.1f GB/s", taken,
         (double)weight_bytes / taken * 1e-9);
    for (int i = 0; i < REGIONS; i++)
        note(&r->options, "  %-16s %10.2f MB", region_name((enum region)i),
             (double)e->plan.region[i].bytes * 1e-6);
    return 0;
}

/* ---- the prompt through the model ---- */

/* Runs the prompt in chunks; every row gets logits, or the last row of the last chunk alone, from which
 * the answer's first id is drawn. each (may be NULL) is called after every chunk, with its number of
 * rows. */
static int prefill(struct run *r, bool classify_all, int (*each)(struct run *, int, struct error *),
                   struct error *error) {
    struct engine *e = &r->engine;
    const int total = (int)r->prompt.count, chunk = e->plan.limits.chunk;
    for (int done = 0; done < total; done += chunk) {
        if (signalled) return interrupted(error);
        int count = total - done < chunk ? total - done : chunk;
        bool last = done + count == total;
        e->ops->set_rows(e, r->prompt.id + done, count, 0, done);
        e->ops->step(e, (struct rows){count, classify_all ? count : last}, forward,
                     last && !classify_all ? &r->sampler : NULL);
        int code = each ? each(r, count, error) : 0;
        if (code) return code;
    }
    return 0;
}

/* ---- generation ---- */

static bool is_stop(const struct run *r, int32_t id) {
    const struct config *c = &r->file.config;
    if (r->options.chat && id == r->chat_end) return true;
    for (int i = 0; i < c->stop_count; i++)
        if (c->stops[i] == id) return true;
    return false;
}

/* The text of one id, or its number where the model has no tokenizer. */
static size_t text_of(const struct run *r, struct decoder *decoder, int32_t id,
                      char text[DECODER_ROOM]) {
    if (r->tokenizer) return decoder_next(decoder, r->tokenizer, id, text);
    return (size_t)snprintf(text, DECODER_ROOM, "%" PRId32 " ", id);
}

static int print_prompt(struct run *r, struct decoder *decoder, struct output *output,
                        struct error *error) {
    for (size_t i = 0; i < r->prompt.count; i++) {
        char text[DECODER_ROOM];
        size_t bytes = text_of(r, decoder, r->prompt.id[i], text);
        int code = signalled ? interrupted(error) : output_unchecked(output, text, bytes, error);
        if (code) return code;
    }
    return 0;
}

/* Draws and prints until one of the ends: n tokens, a stop token, a stop text, a full context, a
 * signal. The prompt's last step has drawn the first id; each further step starts from the id drawn
 * last, which need not have come back for that: where the device works beside the host, it is one draw
 * ahead of the printing. Returns the tokens drawn through *drawn. */
static int answer(struct run *r, struct decoder *decoder, struct output *output, int *drawn,
                  struct error *error) {
    struct engine *e = &r->engine;
    const struct options *o = &r->options;
    const int context = e->plan.limits.context;
    int position = (int)r->prompt.count; /* of the id drawn last */
    int asked = 1;                       /* draws so far, taken or not */
    int32_t id = NO_ID;
    for (*drawn = 0; o->tokens < 0 || *drawn < o->tokens; ++*drawn) {
        if (signalled) return interrupted(error);
        while (asked <= *drawn + e->ops->ahead && (o->tokens < 0 || asked < o->tokens) &&
               position < context) {
            e->ops->step(e, (struct rows){1, 1}, forward, &r->sampler);
            position++, asked++;
        }
        if (asked == *drawn) {
            note(o, "\nthe context of %d positions is full; -c sets it", context);
            return 0;
        }
        int code = e->ops->take(e, &id, error);
        if (code) return code;
        if (is_stop(r, id) && !o->ignore_eos) return 0;
        sampler_accept(&r->sampler, id);
        char text[DECODER_ROOM];
        size_t bytes = text_of(r, decoder, id, text);
        if ((code = output_text(output, text, bytes, error))) return code;
        if (output->stopped) return 0;
    }
    return 0;
}

static void report_speed(const struct options *o, const char *what, int tokens, double taken) {
    if (tokens > 0 && taken > 0)
        note(o, "%s: %d tokens, %.1f tokens/s", what, tokens, tokens / taken);
    else
        note(o, "%s: %d tokens, n/a tokens/s", what, tokens);
}

static int generate(struct run *r, struct error *error) {
    /* A first space is the tokenizer's own only where the text starts here: after BOS at most, or as
     * an answer. */
    struct decoder decoder = {.started =
                                  !r->options.echo && !r->options.chat && r->prompt.count > 1};
    struct output output;
    int drawn = 0, code = 0;
    catch_signals();
    output_open(&output, &r->options);
    if (r->options.echo && (code = print_prompt(r, &decoder, &output, error))) return code;
    for (size_t i = 0; i < r->prompt.count; i++) sampler_accept(&r->sampler, r->prompt.id[i]);
    double start = seconds();
    if (r->options.chat &&
        (code = chat_end(r->tokenizer, r->file.config.chat_shape, &r->chat_end, error)))
        return code;
    if ((code = prefill(r, false, NULL, error))) return code;
    if ((code = r->engine.ops->finish(&r->engine, error))) return code;
    double prompt_done = seconds();
    code = answer(r, &decoder, &output, &drawn, error);
    double end = seconds();
    if (code == 0 || code > 128) { /* done, or interrupted: the text so far is whole */
        char text[DECODER_ROOM];
        struct error ignored = {0};
        struct error *later = code ? &ignored : error;
        int ended = output_text(&output, text, decoder_end(&decoder, text), later);
        if (!ended) ended = output_end(&output, later);
        if (!code) code = ended;
    }
    if (code) return code;
    report_speed(&r->options, "prompt", (int)r->prompt.count, prompt_done - start);
    report_speed(&r->options, "answer", drawn, end - prompt_done);
    return 0;
}

static int generation(struct run *r, struct error *error) {
    struct sampling *sampling = &r->options.sampling;
    int code = choose_seed(&sampling->seed, r->options.seed, error);
    if (code) return code;
    code = sampler_open(&r->sampler, *sampling, r->file.config.vocab_used, error);
    struct limits limits = {
        .context = r->options.context, .chunk = r->options.chunk, .slots = 1, .classified = 1};
    if (!code) code = start_engine(r, limits, error);
    if (code) return code;
    if (sampling->temperature > 0) note(&r->options, "seed %" PRIu64, sampling->seed);
    return generate(r, error);
}

/* ---- the other things that run does ---- */

static int write_logits(struct run *r, int rows, struct error *error) {
    const size_t vocab = (size_t)r->file.config.vocab_used;
    float *row = malloc(vocab * sizeof *row);
    if (!row) return fail(error, EXIT_MEMORY, "host memory: none for a row of logits");
    int code = 0;
    for (int i = 0; i < rows && !code; i++) {
        code = r->engine.ops->read_logits(&r->engine, i, row, error);
        if (!code && fwrite(row, sizeof *row, vocab, r->logits) != vocab)
            code = fail(error, EXIT_INTERNAL, "%s: cannot be written: %s", r->options.logits,
                        strerror(errno));
    }
    free(row);
    return code;
}

/* --logits: every position of the prompt, teacher-forced. */
static int logits(struct run *r, struct error *error) {
    enum { CHUNK = 512 }; /* logits of so many rows are kept */
    const int count = (int)r->prompt.count, chunk = r->options.chunk ? r->options.chunk : CHUNK;
    struct limits limits = {.context = r->options.context ? r->options.context : count,
                            .chunk = chunk,
                            .slots = 1,
                            .classified = chunk};
    int code = start_engine(r, limits, error);
    if (code) return code;
    struct stat model, target;
    if (fstat(r->file.descriptor, &model) == 0 && stat(r->options.logits, &target) == 0 &&
        model.st_dev == target.st_dev && model.st_ino == target.st_ino)
        return fail(error, EXIT_USAGE, "--logits %s would overwrite the model", r->options.logits);
    r->logits = fopen(r->options.logits, "wb");
    if (!r->logits)
        return fail(error, EXIT_USAGE, "--logits %s: cannot be opened: %s", r->options.logits,
                    strerror(errno));
    code = prefill(r, true, write_logits, error);
    if (fclose(r->logits) && !code)
        code = fail(error, EXIT_INTERNAL, "%s: cannot be written: %s", r->options.logits,
                    strerror(errno));
    return code;
}

static int print_tokens(const struct run *r, struct error *error) {
    char line[4096];
    size_t used = 0;
    int code = 0;
    for (size_t i = 0; i < r->prompt.count && !code; i++) {
        used += (size_t)snprintf(line + used, sizeof line - used, "%s%" PRId32, i ? " " : "",
                                 r->prompt.id[i]);
        if (used < sizeof line - 16) continue; /* room for one more */
        code = output_raw(line, used, error);
        used = 0;
    }
    line[used++] = '\n';
    return code ? code : output_raw(line, used, error);
}

static int bench(struct run *r, struct error *error) {
    struct bench_plan plan;
    int code = bench_read(&plan, &r->options, error);
    if (code) return code;
    struct limits limits = {
        .context = plan.context, .chunk = r->options.chunk, .slots = 1, .classified = 1};
    code = start_engine(r, limits, error);
    return code ? code : bench_run(&r->engine, &plan, &r->options, forward, error);
}

static int check(const struct run *r, struct error *error) {
    int code = model_check(&r->file, error);
    if (code) return code;
    printf("%s: %" PRIu64 " tensors, %" PRIu64
           " bytes: every checksum right, every value finite%s\n",
           r->file.path, r->file.tensor_count, r->file.file_bytes,
           r->tokenizer ? ", tokenizer sound" : "");
    return 0;
}

/* ---- from the command line down ---- */

static int run(struct run *r, struct error *error) {
    const struct options *o = &r->options;
    int code = model_open(&r->file, o->model, error);
    if (!code) code = open_tokenizer(r, error);
    if (code) return code;
    if (o->info) {
        struct limits limits = {.context = 1,
                                .chunk = o->chunk,
                                .slots = 1,
                                .classified = 1,
                                .threads = choose_threads(o)};
        info_print(&r->file, r->tokenizer, limits);
        return 0;
    }
    if (o->check) return check(r, error);
    if ((code = config_supported(&r->file.config, error))) {
        struct error inner = *error;
        return fail(error, code, "%s: %s", r->file.path, inner.text);
    }
    if (o->bench) return bench(r, error);
    if ((code = prompt_ids(&r->prompt, o, &r->file.config, r->tokenizer, error))) return code;
    if (o->tokenize) return print_tokens(r, error);
    return o->logits ? logits(r, error) : generation(r, error);
}

int main(int argc, char **argv) {
    static struct run r; /* all of it zero; the config alone is 8 KB */
    struct error error = {0};
    prepare_streams();
    int code = options_parse(&r.options, argc, argv, &error);
    if (!code && r.options.help)
        options_help();
    else if (!code && r.options.version)
        options_version();
    else if (!code)
        code = run(&r, &error);
    if (!code && (fflush(stdout) || ferror(stdout)))
        code = errno == EPIPE || errno == EBADF
                   ? EXIT_CLOSED_PIPE
                   : fail(&error, EXIT_INTERNAL, "stdout: cannot be written: %s", strerror(errno));
    if (error.text[0]) fprintf(stderr, "run: %s\n", error.text);
    sampler_close(&r.sampler);
    if (r.engine.ops) r.engine.ops->close(&r.engine);
    tokenizer_close(r.tokenizer);
    free(r.prompt.id);
    model_close(&r.file);
    return code;
}
