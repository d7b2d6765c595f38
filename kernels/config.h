/* Launch configurations as data: the decode and the prefill form of each operator side by side,
 * with the reason for each number. */
#ifndef KERNELS_CONFIG_H
#define KERNELS_CONFIG_H

/* ---- CPU ---- */
enum {
    CPU_LANES = 8,     /* floats of a vector: 256 bits */
    CPU_LINE = 64,     /* bytes of a cache line */
    CPU_L1 = 32 << 10, /* bytes of the first-level cache, or fewer */
    CPU_PANEL = 16,    /* rows (or cached positions) side by side in a panel: two vectors, a line */
    /* Decode: T up to which weights meet the rows as dot products. 16 rows fill a panel, and there
     * the two forms cross (measured on Zen 4). */
    CPU_DECODE_ROWS = 15,
    /* Decode: bytes ahead of use that weights are asked for. Up to 20 % faster where one thread
     * does not fill the memory's queues, and nothing lost where two do. */
    CPU_AHEAD = 256,
    /* Decode: floats of input up to which each thread prepares all of it for itself, since that
     * costs less than the barrier of sharing it. */
    CPU_PRIVATE = 4096,
    /* Prefill: rows of W converted at a time, a multiple of 6 and of 8, and inputs at a time: 24 x
     * 768 floats stay in L2. */
    CPU_TILE_ROWS = 24,
    CPU_TILE_DEPTH = 768,
    /* Prefill: columns of gate and up that are finished before the next ones, two tiles: the
     * activation finds them in L2. */
    CPU_ACTIVATE = 48,
    CPU_KEYS = 128,  /* cached positions of one block of the online softmax */
    CPU_QUERIES = 6, /* queries of one attention tile: 6 x 2 vectors of sums */
    /* Attention: cached positions that are summed up before they meet the others, whatever the
     * number of rows, so that every step rounds alike. Steps of up to 4 rows share the parts among
     * the threads; longer ones have tiles enough. */
    CPU_PART = 512,
    CPU_BRIEF = 4
};

/* Floats that one thread keeps to itself (REGION_THREADS). */
enum { THREAD_FLOATS = CPU_TILE_ROWS * CPU_TILE_DEPTH };

/* ---- CUDA ---- */
enum {
    /* Rows of a step that is captured as a graph and replayed: above, a launch costs less than 1 % of
     * what its kernel does. */
    CUDA_GRAPH_ROWS = 16,
    /* Rows up to which attention splits the cache of each row. */
    CUDA_DECODE_ROWS = 16,
    /* Rows up to which products on sm_90 have them as the narrow side of the tensor cores' products
     * and W as the 64-row side; above CUDA_LEAST_ROWS only where W has more than CUDA_SMALL_WEIGHTS bytes.
     * 48 rows of SmolLM2 (W of 0.7 to 3.5 MB): 1175 us, and 1008 as many rows; of 1B (8 to 67 MB): 1228 and
     * 1292; of 8B 4832 and 5265. */
    CUDA_FEW_ROWS = 64,
    CUDA_LEAST_ROWS = 32,
    CUDA_SMALL_WEIGHTS = 4 << 20,
    /* Parts of a row's sum of squares. Of few rows one a block, at most CUDA_SQUARES (sm_90 has 144
     * multiprocessors at most); of many one a tile along the columns, of which a tile has CUDA_LEAST_TILE
     * at least. */
    CUDA_SQUARES = 256,
    CUDA_LEAST_TILE = 64,
    /* Rows that the tiles of a cluster have at most, in products of many rows. */
    CUDA_TILE_ROWS = 256,
    /* Rows of the general matrix-vector product: their inputs fit into shared memory together. */
    CUDA_MATVEC_ROWS = 4,
    /* Parts that attention of few rows cuts a row's positions into, at most, and the least positions of
     * one in f32; in bf16 each kernel has its own. */
    CUDA_PARTS = 64,
    CUDA_PART_POSITIONS = 64,
    /* Positions up to which the cache counts as short: on Hopper attention then takes little memory of a
     * multiprocessor rather than keep many bytes under way, and its parts meet within a cluster. */
    CUDA_NEAR = 2048,
    /* The same for one row, times the head size: 768 positions of 128, 1536 of 64. 8B (128) after 500,
     * 1000, 2000: 3702, 3734, 3816 us a step against 3705 at 1000 and 3759 at 2000 with a form for long
     * ones; 1B (64): 705, 714, 735 against 742 and 756. */
    CUDA_NEAR_VALUES = 96 << 10,
    /* What a ring of cached positions is a multiple of: the tiles of attention of many rows, which begin at
     * multiples of their length and so lie in one piece. */
    CUDA_RING = 128,
    /* Shared memory that a block must be able to take for the streams of cuda_decode.cu and
     * cuda_matmul_few.cu: data-centre chips from Hopper on have 227 KB, others of their age 99. */
    CUDA_STREAM_SHARED = 200 << 10,
    /* Device memory that a plan leaves free, for what the driver takes later: kernels' code, graphs. */
    CUDA_RESERVE = 256 << 20,
    /* The largest head size: attention keeps its sums of a head in registers. */
    CUDA_LARGEST_HEAD = 256,
    /* u32 that kernels count in: zero between kernels. */
    CUDA_COUNTERS = 4096,
    /* u32 of the sampler beside two for each id: the ids that the repetition penalty looks back on (at
     * most 4096), and its counters. */
    CUDA_DRAW_WORDS = 16384
};

#endif
