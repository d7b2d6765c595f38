#define _POSIX_C_SOURCE 200809L
#include "model/file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

enum { HEADER_BYTES = 64, CONFIG_AT = 64, LAYERS_AT = 512, ENTRY_BYTES = 128, CHECKSUM_AT = 48 };
/* The largest head: 16,384 tensors, 1,024 layers, and a tokenizer of 2^20 pieces. */
static const uint64_t max_head_bytes = 1U << 30, max_tokenizer_bytes = 1U << 29;
static const unsigned char magic[8] = "ROOFLINE";

static uint64_t read_u64(const unsigned char *p) {
    uint64_t value = 0;
    for (int i = 7; i >= 0; i--) value = value << 8 | p[i];
    return value;
}

static uint32_t read_u32(const unsigned char *p) {
    return p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

/* pread until all is there. Returns the bytes read, or -1 with errno. */
static ssize_t read_at(int descriptor, void *to, size_t bytes, uint64_t offset) {
    size_t done = 0;
    while (done < bytes) {
        ssize_t n = pread(descriptor, (char *)to + done, bytes - done, (off_t)(offset + done));
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return -1;
        if (n == 0) break;
        done += (size_t)n;
    }
    return (ssize_t)done;
}

static int read_all(const struct model_file *file, void *to, uint64_t offset, size_t bytes,
                    struct error *error) {
    ssize_t got = read_at(file->descriptor, to, bytes, offset);
    if (got < 0)
        return fail(error, EXIT_BAD_FILE, "%s: reading at byte %llu: %s", file->path,
                    (unsigned long long)offset, strerror(errno));
    if ((size_t)got < bytes)
        return fail(error, EXIT_BAD_FILE,
                    "%s: the file ends at byte %llu, expected %llu more: it was cut short; copy or "
                    "export it again",
                    file->path, (unsigned long long)offset + (unsigned long long)got,
                    (unsigned long long)(bytes - (size_t)got));
    return 0;
}

/* Prefixes the path to a message of a part that does not know it. */
static int at_path(const struct model_file *file, int code, struct error *error) {
    struct error inner = *error;
    return fail(error, code, "%s: %s", file->path, inner.text);
}

/* ---- header ---- */

static int read_header(struct model_file *file, struct error *error) {
    unsigned char h[HEADER_BYTES] = {0};
    ssize_t got = read_at(file->descriptor, h, sizeof h, 0);
    if (got < 0)
        return fail(error, EXIT_BAD_FILE, "%s: cannot be read: %s", file->path, strerror(errno));
    if ((size_t)got < sizeof h || memcmp(h, magic, sizeof magic) != 0)
        return fail(error, EXIT_BAD_FILE,
                    "%s: not a roofline model: expected %d bytes or more that start with ROOFLINE, "
                    "found %llu that start with 0x%02x%02x%02x%02x; make one with: "
                    ".venv/bin/python -m export SOURCE -o model.bin",
                    file->path, HEADER_BYTES, (unsigned long long)file->file_bytes, h[0], h[1],
                    h[2], h[3]);
    if (read_u32(h + 8) != 1)
        return fail(error, EXIT_BAD_FILE,
                    "%s: format version %u, expected 1: export the model again", file->path,
                    read_u32(h + 8));
    if (read_u32(h + 12) != 0x01020304)
        return fail(error, EXIT_BAD_FILE, "%s: byte order 0x%08x, expected 0x01020304", file->path,
                    read_u32(h + 12));
    if (read_u64(h + 16) != file->file_bytes)
        return fail(error, EXIT_BAD_FILE,
                    "%s: %llu bytes long, expected the %llu that its header states: copy or export "
                    "it again",
                    file->path, (unsigned long long)file->file_bytes,
                    (unsigned long long)read_u64(h + 16));
    file->head_bytes = read_u64(h + 24);
    file->tokenizer_bytes = read_u64(h + 32);
    file->tensor_count = read_u64(h + 40);
    if (file->head_bytes > file->file_bytes || file->head_bytes > max_head_bytes ||
        file->head_bytes % 256 || file->head_bytes < LAYERS_AT)
        return fail(error, EXIT_BAD_FILE,
                    "%s: head_bytes is %llu, expected a multiple of 256 from 512 to %llu",
                    file->path, (unsigned long long)file->head_bytes,
                    (unsigned long long)(file->file_bytes < max_head_bytes ? file->file_bytes
                                                                           : max_head_bytes));
    if (file->tokenizer_bytes > max_tokenizer_bytes || file->tensor_count > MAX_TENSORS)
        return fail(error, EXIT_BAD_FILE,
                    "%s: tokenizer_bytes %llu and tensor_count %llu, expected up to %llu and %d",
                    file->path, (unsigned long long)file->tokenizer_bytes,
                    (unsigned long long)file->tensor_count, (unsigned long long)max_tokenizer_bytes,
                    MAX_TENSORS);
    if (read_u64(h + 56))
        return fail(error, EXIT_BAD_FILE, "%s: unknown data at byte 56 of the header", file->path);
    return 0;
}

static int read_head(struct model_file *file, struct error *error) {
    file->head = malloc(file->head_bytes);
    if (!file->head)
        return fail(error, EXIT_MEMORY, "host memory: no %llu bytes for the head of %s",
                    (unsigned long long)file->head_bytes, file->path);
    int code = read_all(file, file->head, 0, file->head_bytes, error);
    if (code) return code;
    uint64_t stated = read_u64(file->head + CHECKSUM_AT);
    memset(file->head + CHECKSUM_AT, 0, 8);
    uint64_t found = XXH64(file->head, file->head_bytes, 0);
    if (stated != found)
        return fail(error, EXIT_BAD_FILE,
                    "%s: the head's checksum is %016llx, expected %016llx: the file is damaged; "
                    "copy or export it again",
                    file->path, (unsigned long long)found, (unsigned long long)stated);
    return 0;
}

/* ---- tensor table ---- */

/* One entry against the tensor that the config demands there. */
static int check_entry(const struct model_file *file, const unsigned char *entry, struct tensor *t,
                       struct error *error) {
    char name[64];
    memcpy(name, entry, sizeof name);
    if (memcmp(name, t->name, sizeof name) != 0) {
        name[sizeof name - 1] = 0;
        return fail(error, EXIT_BAD_FILE, "%s: tensor %s, expected %s", file->path, name, t->name);
    }
    const struct {
        const char *what;
        uint64_t found, expected;
    } fields[] = {
        {"dtype", read_u32(entry + 64), t->dtype},
        {"number of dimensions", read_u32(entry + 68), (uint64_t)t->dims},
        {"first dimension", read_u64(entry + 72), t->shape[0]},
        {"second dimension", read_u64(entry + 80), t->shape[1]},
        {"third dimension", read_u64(entry + 88), 0},
        {"fourth dimension", read_u64(entry + 96), 0},
        {"offset", read_u64(entry + 104), file->head_bytes + t->offset},
        {"length", read_u64(entry + 112), t->bytes},
    };
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        if (fields[i].found != fields[i].expected)
            return fail(error, EXIT_BAD_FILE, "%s: the %s of tensor %s is %llu, expected %llu",
                        file->path, fields[i].what, t->name, (unsigned long long)fields[i].found,
                        (unsigned long long)fields[i].expected);
    t->checksum = read_u64(entry + 120);
    return 0;
}

static int read_table(struct model_file *file, struct error *error) {
    uint64_t total = 0, tokenizer_at = LAYERS_AT + 16 * (uint64_t)file->config.layers;
    uint64_t table_at = tokenizer_at + (file->tokenizer_bytes + 7) / 8 * 8;
    uint64_t table_end = table_at + ENTRY_BYTES * file->tensor_count;
    if ((table_end + 255) / 256 * 256 != file->head_bytes)
        return fail(error, EXIT_BAD_FILE,
                    "%s: the parts of the head take %llu bytes, expected %llu", file->path,
                    (unsigned long long)table_end, (unsigned long long)file->head_bytes);
    for (uint64_t i = tokenizer_at + file->tokenizer_bytes; i < table_at; i++)
        if (file->head[i])
            return fail(error, EXIT_BAD_FILE, "%s: unknown data after the tokenizer", file->path);
    for (uint64_t i = table_end; i < file->head_bytes; i++)
        if (file->head[i])
            return fail(error, EXIT_BAD_FILE, "%s: unknown data after the tensor table",
                        file->path);
    if (file->tokenizer_bytes) file->tokenizer = file->head + tokenizer_at;

    int expected = config_tensors(&file->config, NULL, &total);
    if (expected < 0 || (uint64_t)expected != file->tensor_count)
        return fail(error, EXIT_BAD_FILE, "%s: %llu tensors, expected %d for this config",
                    file->path, (unsigned long long)file->tensor_count, expected);
    if (total != file->file_bytes - file->head_bytes)
        return fail(error, EXIT_BAD_FILE,
                    "%s: %llu bytes of tensors, expected %llu for this config", file->path,
                    (unsigned long long)(file->file_bytes - file->head_bytes),
                    (unsigned long long)total);
    file->tensors = calloc((size_t)expected, sizeof *file->tensors);
    if (!file->tensors) return fail(error, EXIT_MEMORY, "host memory: none for the tensor table");
    config_tensors(&file->config, file->tensors, &total);
    for (int i = 0; i < expected; i++) {
        const unsigned char *entry = file->head + table_at + (size_t)i * ENTRY_BYTES;
        int code = check_entry(file, entry, &file->tensors[i], error);
        if (code) return code;
    }
    return 0;
}

static int open_regular(struct model_file *file, struct error *error) {
    struct stat status;
    file->descriptor = open(file->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* no wait on a FIFO */
    if (file->descriptor < 0)
        return fail(error, EXIT_BAD_FILE, "%s: cannot be opened: %s", file->path, strerror(errno));
    if (fstat(file->descriptor, &status) || !S_ISREG(status.st_mode))
        return fail(error, EXIT_BAD_FILE, "%s: %s, expected a model file", file->path,
                    S_ISDIR(status.st_mode) ? "a directory" : "not a regular file");
    file->file_bytes = (uint64_t)status.st_size;
    return 0;
}

static int open_and_check(struct model_file *file, struct error *error) {
    int code = open_regular(file, error);
    if (code) return code;
    if ((code = read_header(file, error))) return code;
    if ((code = read_head(file, error))) return code;
    if ((code = config_read(&file->config, file->head + CONFIG_AT, file->head_bytes - CONFIG_AT,
                            error)))
        return at_path(file, code, error);
    return read_table(file, error);
}

int model_open(struct model_file *file, const char *path, struct error *error) {
    *file = (struct model_file){.descriptor = -1, .path = path};
    int code = open_and_check(file, error);
    if (code) model_close(file);
    return code;
}

int model_read(const struct model_file *file, void *to, uint64_t offset, size_t bytes,
               struct error *error) {
    return read_all(file, to, file->head_bytes + offset, bytes, error);
}

void model_close(struct model_file *file) {
    if (file->path && file->descriptor >= 0) close(file->descriptor);
    free(file->head);
    free(file->tensors);
    *file = (struct model_file){.descriptor = -1};
}

/* ---- --check ---- */

/* The index of the first element that is not finite, or -1. */
static int64_t first_not_finite(const void *values, enum dtype dtype, size_t elements) {
    for (size_t i = 0; i < elements; i++) {
        uint32_t bits = dtype == F32 ? ((const uint32_t *)values)[i]
                                     : (uint32_t)((const uint16_t *)values)[i] << 16;
        if ((bits & 0x7f800000U) == 0x7f800000U) return (int64_t)i;
    }
    return -1;
}

/* One tensor and the gap after it, up to `end`, block by block. */
static int check_tensor(const struct model_file *file, const struct tensor *t, uint64_t end,
                        void *block, size_t block_bytes, XXH64_state_t *state,
                        struct error *error) {
    XXH64_reset(state, 0);
    for (uint64_t done = 0; done < t->bytes; done += block_bytes) {
        size_t bytes = t->bytes - done < block_bytes ? (size_t)(t->bytes - done) : block_bytes;
        int code = model_read(file, block, t->offset + done, bytes, error);
        if (code) return code;
        XXH64_update(state, block, bytes);
        size_t size = dtype_size(t->dtype);
        int64_t bad = first_not_finite(block, t->dtype, bytes / size);
        const uint64_t element = done / size + (uint64_t)bad;
        if (bad >= 0)
            return fail(error, EXIT_BAD_FILE, "%s: element %llu of tensor %s is not finite",
                        file->path, (unsigned long long)element, t->name);
    }
    if (XXH64_digest(state) != t->checksum)
        return fail(error, EXIT_BAD_FILE,
                    "%s: the checksum of tensor %s is %016llx, expected %016llx: the file is "
                    "damaged; copy or export it again",
                    file->path, t->name, (unsigned long long)XXH64_digest(state),
                    (unsigned long long)t->checksum);
    size_t gap = (size_t)(end - t->offset - t->bytes);
    int code = model_read(file, block, t->offset + t->bytes, gap, error);
    if (code) return code;
    for (size_t i = 0; i < gap; i++)
        if (((const char *)block)[i])
            return fail(error, EXIT_BAD_FILE, "%s: unknown data after tensor %s", file->path,
                        t->name);
    return 0;
}

static int check_tensors(const struct model_file *file, void *block, size_t block_bytes,
                         XXH64_state_t *state, struct error *error) {
    for (uint64_t i = 0; i < file->tensor_count; i++) {
        uint64_t end = i + 1 < file->tensor_count ? file->tensors[i + 1].offset
                                                  : file->file_bytes - file->head_bytes;
        int code = check_tensor(file, &file->tensors[i], end, block, block_bytes, state, error);
        if (code) return code;
    }
    return 0;
}

int model_check(const struct model_file *file, struct error *error) {
    const size_t block_bytes = 4U << 20;
    void *block = malloc(block_bytes);
    XXH64_state_t *state = XXH64_createState();
    int code = block && state ? check_tensors(file, block, block_bytes, state, error)
                              : fail(error, EXIT_MEMORY, "host memory: none for the check");
    XXH64_freeState(state);
    free(block);
    return code;
}
