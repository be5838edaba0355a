// Codes of the lengths of literal runs (LENGTH) and matches (MATCH) of the Zstandard format (RFC 8878): base and number
// of extra bits of each code. The format's predefined tables of these codes and of the codes of offsets (COUNTS).

__constant__ u32 LENGTH_BASE[36] = {0,  1,  2,   3,   4,   5,    6,    7,    8,    9,     10,    11,
                                    12, 13, 14,  15,  16,  18,   20,   22,   24,   28,    32,    40,
                                    48, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536};
__constant__ u8 LENGTH_EXTRA[36] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,  0,  0,  0,  0,  1,  1,
                                    1, 1, 2, 2, 3, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};
__constant__ u32 MATCH_BASE[53] = {3,  4,   5,   6,   7,    8,    9,    10,   11,    12,    13,   14, 15, 16,
                                   17, 18,  19,  20,  21,   22,   23,   24,   25,    26,    27,   28, 29, 30,
                                   31, 32,  33,  34,  35,   37,   39,   41,   43,    47,    51,   59, 67, 83,
                                   99, 131, 259, 515, 1027, 2051, 4099, 8195, 16387, 32771, 65539};
__constant__ u8 MATCH_EXTRA[53] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,  0,  0,  0,  0,  0,  0, 0,
                                   0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,  0,  0,  0,  1,  1,  1, 1,
                                   2, 2, 3, 3, 4, 4, 5, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};
__constant__ short LENGTH_COUNTS[36] = {4, 3, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 1, 1,  1,  2,  2,
                                        2, 2, 2, 2, 2, 2, 2, 3, 2, 1, 1, 1, 1, 1, -1, -1, -1, -1};
__constant__ short OFFSET_COUNTS[29] = {1, 1, 1, 1, 1, 1, 2, 2, 2, 1,  1,  1,  1,  1, 1,
                                        1, 1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1};
__constant__ short MATCH_COUNTS[53] = {1, 4, 3, 2, 2, 2, 2, 2, 2, 1, 1,  1,  1,  1,  1,  1,  1, 1,
                                       1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,  1,  1,  1,  1,  1,  1, 1,
                                       1, 1, 1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1};

__device__ inline int max_log(int kind) { return kind == OFFSET ? 8 : 9; }

__device__ inline int predefined_symbols(int kind) { return kind == LITERAL_LENGTH ? 36 : kind == OFFSET ? 29 : 53; }
__device__ inline int predefined_table_log(int kind) { return kind == OFFSET ? 5 : 6; }
__device__ inline const short *predefined_counts(int kind) {
    return kind == LITERAL_LENGTH ? LENGTH_COUNTS : kind == OFFSET ? OFFSET_COUNTS : MATCH_COUNTS;
}
