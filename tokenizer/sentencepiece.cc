extern "C" {
#include "tokenizer/sentencepiece.h"
}

#include <cstdlib>
#include <exception>
#include <new>
#include <sentencepiece_processor.h>
#include <string>
#include <unistd.h>
#include <vector>

/* Of the library, but not in the public header of version 0.1.97. */
namespace sentencepiece::logging {
void SetMinLogLevel(int level);
}

struct sp {
    sentencepiece::SentencePieceProcessor start; /* for the start of a text */
    sentencepiece::SentencePieceProcessor later; /* if dummy_prefix: the same without that space */
    bool dummy_prefix;
    std::vector<int> ids; /* of the last call, kept for its room */
};

namespace {

constexpr int log_nothing = 4; /* above FATAL: errors are reported by us */

/* Only the last part of a message counts where two set the same field: this one, appended to a
 * model, sets normalizer_spec.add_dummy_prefix to false. */
constexpr char no_dummy_prefix[] = {0x1a, 0x02, 0x18, 0x00};

int load(sentencepiece::SentencePieceProcessor &processor, const std::string &model,
         struct error *error) {
    const auto status = processor.LoadFromSerializedProto(model);
    if (status.ok()) return 0;
    return fail(error, EXIT_BAD_FILE, "tokenizer: sentencepiece refuses the model: %s",
                status.error_message());
}

int load_both(struct sp &sp, std::string model, struct error *error) {
    int code = load(sp.start, model, error);
    if (code || !sp.dummy_prefix) return code;
    model.append(no_dummy_prefix, sizeof no_dummy_prefix);
    return load(sp.later, model, error);
}

/* To be called in a catch block. */
int caught(const char *action, struct error *error) {
    try {
        throw;
    } catch (const std::exception &exception) {
        return fail(error, EXIT_INTERNAL, "tokenizer: sentencepiece failed to %s: %s", action,
                    exception.what());
    } catch (...) {
        return fail(error, EXIT_INTERNAL, "tokenizer: sentencepiece failed to %s", action);
    }
}

[[noreturn]] void end_program() {
    static const char line[] =
        "run: out of memory in sentencepiece: free some, or give less text\n";
    ssize_t written = write(STDERR_FILENO, line, sizeof line - 1);
    (void)written; /* there is nowhere else to say it */
    std::_Exit(EXIT_MEMORY);
}

/* While it lives, a failed allocation ends the program. std::bad_alloc would not do: the library's
 * protobuf crashes when it is thrown through objects that are half made. */
class NoBadAlloc {
  public:
    NoBadAlloc() : before(std::set_new_handler(end_program)) {}
    ~NoBadAlloc() { std::set_new_handler(before); }
    NoBadAlloc(const NoBadAlloc &) = delete;
    NoBadAlloc &operator=(const NoBadAlloc &) = delete;

  private:
    std::new_handler before;
};

} // namespace

extern "C" int sp_open(struct sp **sp, const unsigned char *model, size_t bytes,
                       const struct sp_model *parsed, struct error *error) {
    *sp = nullptr;
    NoBadAlloc no_bad_alloc;
    try {
        sentencepiece::logging::SetMinLogLevel(log_nothing);
        *sp = new struct sp();
        (*sp)->dummy_prefix = parsed->dummy_prefix;
        return load_both(**sp, std::string(reinterpret_cast<const char *>(model), bytes), error);
    } catch (...) { return caught("load the model", error); }
}

extern "C" void sp_close(struct sp *sp) {
    delete sp; /* destructors throw nothing */
}

extern "C" int sp_encode(struct sp *sp, const char *text, size_t bytes, bool text_start,
                         struct ids *ids, struct error *error) {
    NoBadAlloc no_bad_alloc;
    try {
        const auto &processor = text_start || !sp->dummy_prefix ? sp->start : sp->later;
        const auto status = processor.Encode(std::string_view(text, bytes), &sp->ids);
        if (!status.ok())
            return fail(error, EXIT_INTERNAL, "tokenizer: sentencepiece failed to encode: %s",
                        status.error_message());
        for (int id : sp->ids)
            if (int code = ids_append(ids, id, error)) return code;
        return 0;
    } catch (...) { return caught("encode a text", error); }
}
