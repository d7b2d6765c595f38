#include "tokenizer/bpe.h"

#include "tokenizer/nfc.h"
#include "tokenizer/presplit.h"

#include <stdlib.h>
#include <string.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

/* From the bytes of a piece to its id: open addressing, at most half full. */
struct slot {
    uint32_t tag; /* high half of the hash: most others are told apart without reading their text */
    int32_t id;   /* NO_PIECE: the slot is empty */
};
enum { MAX_PROBES = 128 };

/* One piece of text while it is merged: a linked list of symbols, each known by the offset of its
 * first byte, and a heap of the merges that could be made. */
struct work {
    uint64_t *heap;           /* [2 capacity] of id << 32 | offset of the left symbol; owns all */
    uint32_t *next, *before;  /* [capacity] offset of the neighbouring symbol */
    int32_t *symbol, *merged; /* [capacity] id of the symbol, and of it joined with the next */
    char *text;               /* [capacity] the piece, where bytes had to be left out */
    size_t heap_count, capacity;
};

struct bpe {
    const struct section *section;
    struct presplit *presplit;
    struct slot *slot;
    size_t slot_mask, longest; /* slots - 1; bytes of the longest piece */
    int32_t byte_id[256];      /* NO_PIECE: text is encoded as if it did not hold that byte */
    bool lacks_bytes;
    struct work work;
};

static size_t grow_to(size_t capacity, size_t needed) {
    while (capacity < needed) capacity *= 2;
    return capacity;
}

static int32_t find_piece(const struct bpe *bpe, const char *text, size_t bytes) {
    if (bytes > bpe->longest) return NO_PIECE;
    uint64_t hash = XXH3_64bits(text, bytes);
    for (size_t probe = 0; probe < MAX_PROBES; probe++) {
        const struct slot *slot = &bpe->slot[(hash + probe) & bpe->slot_mask];
        if (slot->id == NO_PIECE) return NO_PIECE;
        if (slot->tag != (uint32_t)(hash >> 32)) continue;
        const struct section_piece *piece = &bpe->section->piece[slot->id];
        if (piece->bytes == bytes && !memcmp(piece->text, text, bytes)) return slot->id;
    }
    return NO_PIECE;
}

/* A file could hold pieces that are chosen to share a hash. So that no lookup takes more than
 * MAX_PROBES steps, none of its pieces may; honest vocabularies stay far below. */
static int insert_piece(struct bpe *bpe, int32_t id, struct error *error) {
    const struct section_piece *piece = &bpe->section->piece[id];
    uint64_t hash = XXH3_64bits(piece->text, piece->bytes);
    for (size_t probe = 0; probe < MAX_PROBES; probe++) {
        struct slot *slot = &bpe->slot[(hash + probe) & bpe->slot_mask];
        if (slot->id != NO_PIECE) continue;
        *slot = (struct slot){(uint32_t)(hash >> 32), id};
        if (piece->bytes > bpe->longest) bpe->longest = piece->bytes;
        return 0;
    }
    return fail(error, EXIT_BAD_FILE,
                "tokenizer: piece %d shares its hash with %d others: the vocabulary was made to "
                "slow this program down",
                id, MAX_PROBES);
}

static int fill_table(struct bpe *bpe, struct error *error) {
    const struct section *section = bpe->section;
    size_t slots = grow_to(512, 2 * (size_t)section->piece_count);
    bpe->slot = malloc(slots * sizeof *bpe->slot);
    if (!bpe->slot)
        return fail(error, EXIT_MEMORY, "tokenizer: no memory for a table of %zu pieces", slots);
    bpe->slot_mask = slots - 1;
    for (size_t i = 0; i < slots; i++) bpe->slot[i].id = NO_PIECE;
    for (int32_t id = 0; id < section->piece_count; id++) {
        const struct section_piece *piece = &section->piece[id];
        /* Of several with the same bytes the first wins. */
        if (piece->bytes == 0 || find_piece(bpe, piece->text, piece->bytes) != NO_PIECE) continue;
        int code = insert_piece(bpe, id, error);
        if (code) return code;
    }
    for (int byte = 0; byte < 256; byte++) {
        char text = (char)byte;
        bpe->byte_id[byte] = find_piece(bpe, &text, 1);
        if (bpe->byte_id[byte] == NO_PIECE) bpe->lacks_bytes = true;
    }
    return 0;
}

int bpe_open(struct bpe **bpe, const struct section *section, struct error *error) {
    struct bpe *opened = *bpe = calloc(1, sizeof *opened);
    if (!opened) return fail(error, EXIT_MEMORY, "tokenizer: no memory for byte-level BPE");
    opened->section = section;
    int code = fill_table(opened, error);
    if (!code) code = presplit_open(&opened->presplit, section->pattern, error);
    return code;
}

void bpe_close(struct bpe *bpe) {
    if (!bpe) return;
    presplit_close(bpe->presplit);
    free(bpe->work.heap);
    free(bpe->slot);
    free(bpe);
}

int32_t bpe_byte(const struct bpe *bpe, unsigned char byte) {
    return bpe->byte_id[byte];
}

static int work_reserve(struct work *work, size_t bytes, struct error *error) {
    if (bytes <= work->capacity) return 0;
    size_t capacity = grow_to(256, bytes);
    uint64_t *heap = malloc(capacity * (2 * sizeof(uint64_t) + 4 * sizeof(uint32_t) + 1));
    if (!heap)
        return fail(error, EXIT_MEMORY, "tokenizer: no memory to merge a piece of %zu bytes",
                    bytes);
    free(work->heap);
    work->heap = heap;
    work->next = (uint32_t *)(heap + 2 * capacity);
    work->before = work->next + capacity;
    work->symbol = (int32_t *)(work->before + capacity);
    work->merged = work->symbol + capacity;
    work->text = (char *)(work->merged + capacity);
    work->capacity = capacity;
    return 0;
}

static void heap_push(struct work *work, uint64_t key) {
    uint64_t *heap = work->heap;
    size_t at = work->heap_count++;
    for (; at > 0 && heap[(at - 1) / 2] > key; at = (at - 1) / 2) heap[at] = heap[(at - 1) / 2];
    heap[at] = key;
}

static uint64_t heap_pop(struct work *work) {
    uint64_t *heap = work->heap, top = heap[0], last = heap[--work->heap_count];
    size_t at = 0;
    for (;;) {
        size_t child = 2 * at + 1;
        if (child >= work->heap_count) break;
        if (child + 1 < work->heap_count && heap[child + 1] < heap[child]) child++;
        if (last <= heap[child]) break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = last;
    return top;
}

/* Looks up what the symbol at `left` makes with the next one, and offers that merge. */
static void offer(struct bpe *bpe, const char *text, size_t bytes, uint32_t left) {
    struct work *work = &bpe->work;
    uint32_t right = work->next[left];
    work->merged[left] = NO_PIECE;
    if (right == bytes) return;
    int32_t id = find_piece(bpe, text + left, work->next[right] - left);
    if (id == NO_PIECE || bpe->section->piece[id].unmergeable) return;
    work->merged[left] = id;
    heap_push(work, (uint64_t)id << 32 | left);
}

/* Merges the best pair until there is none: lowest id first, leftmost first among equals. Each
 * merge takes one entry off the heap and offers at most two, so it holds less than 2 bytes entries.
 */
static void merge(struct bpe *bpe, const char *text, size_t bytes) {
    struct work *work = &bpe->work;
    work->heap_count = 0;
    for (uint32_t at = 0; at < bytes; at++) {
        work->next[at] = at + 1;
        work->before[at] = at - 1;
        work->symbol[at] = bpe->byte_id[(unsigned char)text[at]];
    }
    for (uint32_t at = 0; at < bytes; at++) offer(bpe, text, bytes, at);
    while (work->heap_count > 0) {
        uint64_t best = heap_pop(work);
        uint32_t left = (uint32_t)best;
        int32_t id = (int32_t)(best >> 32);
        if (work->merged[left] != id) continue; /* one of the two is part of another merge by now */
        uint32_t right = work->next[left], after = work->next[right];
        work->symbol[left] = id;
        work->merged[right] = NO_PIECE;
        work->next[left] = after;
        if (after < bytes) work->before[after] = left;
        offer(bpe, text, bytes, left);
        if (left > 0) offer(bpe, text, bytes, work->before[left]);
    }
}

/* Copies text without the bytes that have no piece. Returns the bytes that are left. */
static size_t keep_known(struct bpe *bpe, const char *text, size_t bytes) {
    size_t kept = 0;
    for (size_t at = 0; at < bytes; at++)
        if (bpe->byte_id[(unsigned char)text[at]] != NO_PIECE) bpe->work.text[kept++] = text[at];
    return kept;
}

/* One piece of the pre-split. */
static int encode_piece(struct bpe *bpe, const char *text, size_t bytes, struct ids *ids,
                        struct error *error) {
    if (bpe->section->ignore_merges) {
        int32_t id = find_piece(bpe, text, bytes);
        if (id != NO_PIECE) return ids_append(ids, id, error);
    }
    int code = work_reserve(&bpe->work, bytes, error);
    if (code) return code;
    if (bpe->lacks_bytes) {
        bytes = keep_known(bpe, text, bytes);
        text = bpe->work.text;
    }
    merge(bpe, text, bytes);
    for (uint32_t at = 0; at < bytes && !code; at = bpe->work.next[at])
        code = ids_append(ids, bpe->work.symbol[at], error);
    return code;
}

static int encode_pieces(struct bpe *bpe, const char *text, size_t bytes, struct ids *ids,
                         struct error *error) {
    int code = 0;
    for (size_t at = 0, end = 0; at < bytes && !code; at = end) {
        code = presplit_next(bpe->presplit, text, bytes, at, &end, error);
        if (!code) code = encode_piece(bpe, text + at, end - at, ids, error);
    }
    return code;
}

int bpe_encode(struct bpe *bpe, const char *text, size_t bytes, struct ids *ids,
               struct error *error) {
    char *normal = NULL;
    if (bpe->section->nfc) {
        int code = nfc(text, bytes, &normal, &bytes, error);
        if (code) return code;
    }
    int code = encode_pieces(bpe, normal ? normal : text, bytes, ids, error);
    free(normal);
    return code;
}
