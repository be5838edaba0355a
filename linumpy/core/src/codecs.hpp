// Decoders of one chunk: zstd, LZ4 as numcodecs writes it, zlib, gzip, Blosc 1, byte shuffle, CRC-32C.
//
// The decoders accept and refuse the same streams as zarr-python with numcodecs. The memory of a decoder depends on the
// size of the chunk, not on what a header says.
#pragma once

#include <memory>
#include <span>
#include <stdexcept>

#include "common.hpp"

struct ZSTD_DCtx_s;

namespace lc {

// The stored bytes are not a valid encoding of a chunk.
struct DecodeError : std::runtime_error { using std::runtime_error::runtime_error; };

struct FreeZstd { void operator()(ZSTD_DCtx_s *context) const; };

// Memory of one decoding thread, reused from chunk to chunk.
struct DecodeScratch {
    Buffer filtered, block, shuffled;
    std::unique_ptr<ZSTD_DCtx_s, FreeZstd> zstd;  // created for the first zstd stream
    // Free each buffer that exceeds `max_nbytes`.
    void trim(i64 max_nbytes) {
        filtered.trim(max_nbytes);
        block.trim(max_nbytes);
        shuffled.trim(max_nbytes);
    }
};

// Decode a chunk that must fill `out`; throws DecodeError.
void decode_chunk(const lc_chain &chain, std::span<const u8> stored, std::span<u8> out, DecodeScratch &scratch);

// Maximum scratch memory in bytes that decoding a chunk needs.
i64 decode_scratch_nbytes(const lc_chain &chain, i64 chunk_nbytes);

u32 crc32c(const u8 *data, size_t nbytes);

}  // namespace lc
