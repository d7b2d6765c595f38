/* Launch configurations as data: the decode and the prefill form of each operator side by side,
 * with the reason for each number. */
#ifndef KERNELS_CONFIG_H
#define KERNELS_CONFIG_H

/* ---- CPU ---- */
enum {
    CPU_LANES = 8,        /* floats of a vector: 256 bits */
    CPU_LINE = 64,        /* bytes of a cache line */
    CPU_L1 = 32 << 10,    /* bytes of the first-level cache, or less */
    CPU_PANEL = 16,       /* rows (or cached positions) side by side in a panel: two vectors */
    CPU_DECODE_ROWS = 15, /* T up to which weights meet the rows as dot products; 16 rows fill a
                             panel, and there the two forms cross (measured on Zen 4) */
    CPU_AHEAD = 256,      /* bytes ahead of use that a decode product asks for weights: up to 20 %
                             faster where one thread does not fill the memory's queues */
    CPU_TILE_ROWS = 24,   /* rows of W that prefill converts at a time: a multiple of 6 and of 8 */
    CPU_TILE_DEPTH =
        768, /* inputs of W that prefill handles at a time: 24 x 768 floats stay in L2 */
    CPU_PRIVATE =
        4096,        /* floats of input up to which each thread prepares all of a decode product's
                        input for itself: that costs less than the barrier of sharing it */
    CPU_KEYS = 128,  /* cached positions of one block of the online softmax */
    CPU_QUERIES = 6, /* queries of one attention tile: 6 x 2 vectors of sums */
    CPU_SPLITS = 8,  /* parts of the cache that a short step attends to apart, times T */
    CPU_SPLIT_KEYS = 256 /* cached positions of such a part, at least */
};

/* Floats that one thread keeps to itself (REGION_THREADS). */
enum { THREAD_FLOATS = CPU_TILE_ROWS * CPU_TILE_DEPTH };

#endif
