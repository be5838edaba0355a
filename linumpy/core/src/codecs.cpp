#include "codecs.hpp"

#include <algorithm>
#include <array>
#include <cstdio>
#include <memory>

#include "libraries.hpp"
#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace lc {
namespace {

using Bytes = std::span<const u8>;
using Target = std::span<u8>;

[[noreturn]] void refuse(const char *text) { throw DecodeError(text); }

template <class... Args> [[noreturn]] void refuse(const char *format, Args... args) {
    char text[256];
    std::snprintf(text, sizeof text, format, args...);
    throw DecodeError(text);
}

template <class T> T little(const u8 *p) {
    T value = 0;
    for (size_t k = 0; k < sizeof(T); ++k) value |= static_cast<T>(static_cast<T>(p[k]) << (8 * k));
    return value;
}

void check_size(size_t decoded, size_t expected) {
    if (decoded != expected) refuse("%zu bytes were decoded, and a chunk has %zu", decoded, expected);
}

constexpr std::array<u32, 256> crc_table() {
    std::array<u32, 256> table{};
    for (u32 n = 0; n < 256; ++n) {
        u32 value = n;
        for (int k = 0; k < 8; ++k) value = value & 1 ? (value >> 1) ^ 0x82f63b78u : value >> 1;
        table[n] = value;
    }
    return table;
}

u32 crc32c_by_table(u32 value, const u8 *data, size_t nbytes) {
    static constexpr auto TABLE = crc_table();
    for (size_t n = 0; n < nbytes; ++n) value = TABLE[(value ^ data[n]) & 255] ^ (value >> 8);
    return value;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) u32 crc32c_by_sse(u32 value, const u8 *data, size_t nbytes) {
    u64 crc = value;
    for (; nbytes >= 8; nbytes -= 8, data += 8) {
        u64 word;
        std::memcpy(&word, data, 8);
        crc = _mm_crc32_u64(crc, word);
    }
    value = static_cast<u32>(crc);
    for (; nbytes; --nbytes, ++data) value = _mm_crc32_u8(value, *data);
    return value;
}
#endif

Bytes without_checksum(Bytes data, const char *name) {
    if (data.size() < 4) refuse("%zu bytes are too few for a checksum", data.size());
    const Bytes body = data.first(data.size() - 4);
    const u32 stored = little<u32>(body.data() + body.size()), computed = crc32c(body.data(), body.size());
    if (stored != computed) refuse("the checksum of the %s is %#010x and must be %#010x", name, stored, computed);
    return body;
}

// zstd

// Maximum window of a frame of unknown size: numcodecs decodes such frames as streams, whose window zstd limits.
constexpr u64 ZSTD_WINDOW = (u64(1) << 27) + 1;

// The window of a frame of unknown size; format: RFC 8878, "Window_Descriptor".
u64 zstd_window(Bytes frame) {
    const u8 descriptor = frame[5];
    const u64 base = u64(1) << (10 + (descriptor >> 3));
    return base + base / 8 * (descriptor & 7);
}

bool is_zstd(Bytes stored) {
    const u32 magic = little<u32>(stored.data());
    return magic == 0xfd2fb528u || (magic & 0xfffffff0u) == 0x184d2a50u;  // the latter: frames to skip
}

// Check before decoding that the sizes of all frames add up to a chunk, as far as the frames state them.
void check_zstd_frames(Bytes stored, size_t expected) {
    u64 total = 0;
    bool all_known = true, too_wide = false;
    while (!stored.empty()) {
        if (stored.size() >= 4 && !is_zstd(stored)) refuse("the stored bytes are no zstd frame");
        const u64 content = zstd().content_size(stored.data(), stored.size());  // 0 for frames to skip
        const size_t nbytes = zstd().frame_nbytes(stored.data(), stored.size());
        if (content == Zstd::INVALID || zstd().is_error(nbytes)) refuse("a zstd frame is broken or cut off");
        if (content == Zstd::UNKNOWN) {
            all_known = false;
            too_wide |= zstd_window(stored) > ZSTD_WINDOW;
        } else {
            total += content;
        }
        stored = stored.subspan(nbytes);
    }
    if (all_known) check_size(total, expected);
    else if (too_wide) refuse("a zstd frame whose size is not known has a window of more than 128 MiB");
}

void decode_zstd_frames(Bytes stored, Target out, DecodeScratch &scratch) {
    const Zstd &library = zstd();
    if (!scratch.zstd) scratch.zstd.reset(library.create());
    if (!scratch.zstd) throw std::bad_alloc();
    const size_t decoded = library.decompress(scratch.zstd.get(), out.data(), out.size(), stored.data(), stored.size());
    if (library.is_error(decoded)) refuse("Zstd decompression error: %s", library.error_name(decoded));
    check_size(decoded, out.size());
}

void decode_zstd(Bytes stored, Target out, DecodeScratch &scratch) {
    if (zstd().content_size(stored.data(), stored.size()) != out.size()) check_zstd_frames(stored, out.size());
    decode_zstd_frames(stored, out, scratch);
}

// LZ4

void decode_lz4_block(Bytes stored, Target out) {
    if (stored.size() > INT32_MAX || out.size() > INT32_MAX) refuse("%zu bytes are too many for LZ4", stored.size());
    const int got =
        lz4().decompress(reinterpret_cast<const char *>(stored.data()), reinterpret_cast<char *>(out.data()),
                         static_cast<int>(stored.size()), static_cast<int>(out.size()));
    if (got < 0) refuse("LZ4 decompression error: %d", got);
    check_size(static_cast<size_t>(got), out.size());
}

void decode_lz4(Bytes stored, Target out) {
    if (stored.size() < 4) refuse("%zu bytes are too few for the header that numcodecs puts before LZ4", stored.size());
    check_size(little<u32>(stored.data()), out.size());
    decode_lz4_block(stored.subspan(4), out);
}

// zlib and gzip

struct Inflater {
    const Zlib &library = zlib();
    ZlibStream stream{};
    explicit Inflater(int window) {
        if (library.init(&stream, window, Zlib::VERSION, sizeof stream) != Zlib::OK) throw std::bad_alloc();
    }
    ~Inflater() { library.end(&stream); }
    Inflater(const Inflater &) = delete;
    Inflater &operator=(const Inflater &) = delete;
};

// Inflate one stream into `out` from byte `done` on, and advance `done`. Returns the number of input bytes consumed.
// `ended`: whether the end of the stream was reached; else the input is cut off.
size_t inflate_stream(Inflater &inflater, Bytes stored, Target out, size_t &done, bool &ended) {
    constexpr size_t MAX_STEP = 1u << 30;
    ZlibStream &stream = inflater.stream;
    size_t consumed = 0;
    ended = false;
    u8 beyond;  // zlib needs space to find the end of a stream; a byte written here exceeds the chunk
    while (!ended) {
        const size_t input = std::min(MAX_STEP, stored.size() - consumed),
                     space = std::min(MAX_STEP, out.size() - done);
        stream.next_in = stored.data() + consumed;
        stream.avail_in = static_cast<unsigned>(input);
        stream.next_out = space ? out.data() + done : &beyond;
        stream.avail_out = space ? static_cast<unsigned>(space) : 1;
        const int state = inflater.library.inflate(&stream, 0);
        consumed += input - stream.avail_in;
        const size_t produced = (space ? space : 1) - stream.avail_out;
        if (!space && produced) refuse("more than %zu bytes were decoded, and a chunk has %zu", out.size(), out.size());
        done += space ? produced : 0;
        ended = state == Zlib::STREAM_END;
        if (state == Zlib::BUFFER_ERROR || (state == Zlib::OK && consumed == stored.size() && !produced)) break;
        if (state != Zlib::OK && !ended) refuse("zlib: %s", stream.msg ? stream.msg : inflater.library.error(state));
    }
    return consumed;
}

void decode_zlib(Bytes stored, Target out) {
    Inflater inflater(15);
    size_t done = 0;
    bool ended;
    inflate_stream(inflater, stored, out, done, ended);
    check_size(done, out.size());
    if (!ended) refuse("the stored bytes are cut off");
}

// Decode all gzip members. As in Python's gzip module, zero bytes may follow each member.
void decode_gzip(Bytes stored, Target out) {
    size_t done = 0;
    while (!stored.empty()) {
        Inflater inflater(15 + 16);
        bool ended;
        const size_t consumed = inflate_stream(inflater, stored, out, done, ended);
        if (!ended) refuse("Compressed file ended before the end-of-stream marker was reached");
        stored = stored.subspan(consumed);
        while (!stored.empty() && stored[0] == 0) stored = stored.subspan(1);
    }
    check_size(done, out.size());
}

// Blosc 1; format: README_CHUNK_FORMAT.rst of the C-Blosc project

constexpr size_t BLOSC_HEAD = 16, MAX_SPLITS = 16, MIN_SPLIT_NBYTES = 128;
enum BloscFlag { BYTE_SHUFFLE = 1, MEMCPYED = 2, BIT_SHUFFLE = 4, NOT_SPLIT = 16 };

// Undo the byte shuffle, in which byte k of all elements is contiguous.
void unshuffle_bytes(const u8 *from, u8 *to, size_t nbytes, size_t size) {
    const size_t count = nbytes / size;
    if (size == 2) {
        for (size_t n = 0; n < count; ++n) {
            to[2 * n] = from[n];
            to[2 * n + 1] = from[count + n];
        }
    } else if (size == 4) {
        for (size_t n = 0; n < count; ++n)
            for (size_t k = 0; k < 4; ++k) to[4 * n + k] = from[k * count + n];
    } else {
        constexpr size_t TILE = 256;  // elements; a tile at a time, so that the written bytes stay in the cache
        for (size_t first = 0; first < count; first += TILE)
            for (size_t k = 0; k < size; ++k)
                for (size_t n = first; n < std::min(count, first + TILE); ++n) to[n * size + k] = from[k * count + n];
    }
    std::memcpy(to + count * size, from + count * size, nbytes - count * size);
}

// Eight bytes as rows of an 8 × 8 matrix of bits, transposed: bit k of byte j becomes bit j of byte k.
u64 transposed(u64 x) {
    u64 t = (x ^ (x >> 7)) & 0x00aa00aa00aa00aaull;
    x ^= t ^ (t << 7);
    t = (x ^ (x >> 14)) & 0x0000cccc0000ccccull;
    x ^= t ^ (t << 14);
    t = (x ^ (x >> 28)) & 0x00000000f0f0f0f0ull;
    return x ^ t ^ (t << 28);
}

// Byte k of row j becomes byte j of row k, in 8 rows of 8 bytes.
void transpose_bytes(u64 *rows) {
    constexpr u64 MASKS[3] = {0x00ff00ff00ff00ffull, 0x0000ffff0000ffffull, 0x00000000ffffffffull};
    for (int level = 0; level < 3; ++level) {
        const int apart = 1 << level, shift = 8 << level;
        for (int n = 0; n < 8; ++n) {
            if (n & apart) continue;
            const u64 t = (rows[n] >> shift ^ rows[n + apart]) & MASKS[level];
            rows[n + apart] ^= t;
            rows[n] ^= t << shift;
        }
    }
}

// Join eight bit planes of `plane` bytes each: the elements' bits 0 to 7 of one byte → that byte of each element.
void join_planes(const u8 *from, u8 *to, size_t plane) {
    size_t group = 0;  // of eight elements
    for (; group + 8 <= plane; group += 8) {
        u64 rows[8];
        for (size_t i = 0; i < 8; ++i) std::memcpy(&rows[i], from + i * plane + group, 8);
        transpose_bytes(rows);
        for (size_t i = 0; i < 8; ++i) rows[i] = transposed(rows[i]);
        std::memcpy(to + 8 * group, rows, 64);
    }
    for (; group < plane; ++group) {
        u64 row = 0;
        for (size_t i = 0; i < 8; ++i) row |= static_cast<u64>(from[i * plane + group]) << (8 * i);
        row = transposed(row);
        std::memcpy(to + 8 * group, &row, 8);
    }
}

// Undo the bit shuffle, in which bit k of all elements is contiguous. If the number of elements is not a multiple of
// eight, Blosc does not shuffle.
void unshuffle_bits(const u8 *from, u8 *to, size_t nbytes, size_t size, Buffer &sorted) {
    const size_t count = nbytes / size;
    if (count % 8 || !count) {
        std::memcpy(to, from, nbytes);
        return;
    }
    u8 *bytes = size == 1 ? to : sorted.reserve(static_cast<i64>(count * size));
    for (size_t b = 0; b < size; ++b) join_planes(from + b * count, bytes + b * count, count / 8);
    if (size > 1) unshuffle_bytes(bytes, to, count * size, size);
    std::memcpy(to + count * size, from + count * size, nbytes - count * size);
}

// BloscLZ, the default compressor of C-Blosc, in a frame of an array whose metadata name another one; its code in a frame.
constexpr i64 BLOSCLZ = -1;

// Runs of literals, and matches of 3 bytes or more, whose distances above 8191 take two further bytes.
void decode_blosclz(Bytes stored, Target out) {
    constexpr size_t MAX_NEAR = 8191;
    size_t at = 0, done = 0;
    const auto next = [&]() -> size_t {
        if (at == stored.size()) refuse("the BloscLZ stream is cut off");
        return stored[at++];
    };
    for (bool is_first = true; at < stored.size(); is_first = false) {
        const size_t control = is_first ? next() & 31 : next();
        if (control < 32) {
            const size_t count = control + 1;
            if (count > stored.size() - at || count > out.size() - done) refuse("the BloscLZ stream is broken");
            std::memcpy(out.data() + done, stored.data() + at, count);
            at += count;
            done += count;
            continue;
        }
        size_t length = (control >> 5) + 2, more = length == 9 ? 255 : 0;
        while (more == 255) length += more = next();
        const size_t high = control & 31, low = next();
        size_t distance = (high << 8) + low + 1;
        if (high == 31 && low == 255) {
            distance = next() << 8;
            distance += next() + MAX_NEAR + 1;
        }
        if (distance > done || length > out.size() - done) refuse("the BloscLZ stream is broken");
        for (; length; --length, ++done) out[done] = out[done - distance];
    }
    check_size(done, out.size());
}

void decode_blosc_stream(i64 codec, Bytes stored, Target out, DecodeScratch &scratch) {
    if (stored.size() == out.size()) std::memcpy(out.data(), stored.data(), out.size());
    else if (codec == LC_LZ4) decode_lz4_block(stored, out);
    else if (codec == BLOSCLZ) decode_blosclz(stored, out);
    else if (codec == LC_ZSTD) decode_zstd_frames(stored, out, scratch);
    else {
        unsigned long got = out.size();
        const int state = zlib().uncompress(out.data(), &got, stored.data(), stored.size());
        if (state != Zlib::OK) refuse("zlib: %s", zlib().error(state));
        check_size(got, out.size());
    }
}

void decode_blosc(Bytes stored, Target out, DecodeScratch &scratch) {
    if (stored.size() < BLOSC_HEAD) refuse("%zu bytes are too few for a Blosc header", stored.size());
    const u32 flags = stored[2], size = stored[3];
    const u64 nbytes = little<u32>(&stored[4]), block = little<u32>(&stored[8]), total = little<u32>(&stored[12]);
    if (total > stored.size())
        refuse("Blosc header says %u compressed bytes; the chunk has %zu", static_cast<u32>(total), stored.size());
    check_size(nbytes, out.size());
    if (stored[0] != 2) refuse("Blosc format version %u is not known", static_cast<unsigned>(stored[0]));
    if (!nbytes) return;
    if (!size || !block || block > nbytes || total < BLOSC_HEAD) refuse("the Blosc header is broken");
    stored = stored.first(total);
    if (flags & MEMCPYED) {
        if (total != nbytes + BLOSC_HEAD) refuse("the Blosc header is broken");
        std::memcpy(out.data(), stored.data() + BLOSC_HEAD, nbytes);
        return;
    }
    const u32 format = flags >> 5;
    constexpr i64 CODECS[8] = {BLOSCLZ, LC_LZ4, LC_NONE, LC_ZLIB, LC_ZSTD, LC_NONE, LC_NONE, LC_NONE};
    const i64 codec = CODECS[format];
    if (codec == LC_NONE) refuse("Blosc with compressor %u inside is not decoded", format);
    const u64 blocks = (nbytes - 1) / block + 1;
    if (BLOSC_HEAD + 4 * blocks > total) refuse("the Blosc blocks are cut off");
    const bool by_byte = flags & BYTE_SHUFFLE && size > 1, by_bit = !by_byte && flags & BIT_SHUFFLE && block >= size;
    const bool splits = !(flags & NOT_SPLIT) && size <= MAX_SPLITS && block / size >= MIN_SPLIT_NBYTES;
    u8 *temporary = by_byte || by_bit ? scratch.block.reserve(static_cast<i64>(block)) : nullptr;
    for (u64 number = 0; number < blocks; ++number) {
        const u64 length = std::min(block, nbytes - number * block);
        const u64 parts = splits && length == block ? size : 1, part = length / parts;
        if (part * parts != length) refuse("the Blosc header is broken");
        u8 *to = temporary ? temporary : out.data() + number * block;
        u64 offset = little<u32>(stored.data() + BLOSC_HEAD + 4 * number);
        if (offset < BLOSC_HEAD + 4 * blocks) refuse("Blosc block %u lies in the header", static_cast<u32>(number));
        for (u64 k = 0; k < parts; ++k) {
            if (offset + 4 > total) refuse("the Blosc blocks are cut off");
            const u64 packed = little<u32>(stored.data() + offset);
            offset += 4;
            if (!packed || packed > total - offset) refuse("the Blosc blocks are cut off");
            decode_blosc_stream(codec, stored.subspan(offset, packed), Target(to + k * part, part), scratch);
            offset += packed;
        }
        if (by_byte) unshuffle_bytes(temporary, out.data() + number * block, length, size);
        if (by_bit) unshuffle_bits(temporary, out.data() + number * block, length, size, scratch.shuffled);
    }
}

void decompress(const lc_chain &chain, Bytes stored, Target out, DecodeScratch &scratch) {
    switch (chain.compressor) {
        case LC_ZSTD:
            return decode_zstd(stored, out, scratch);
        case LC_LZ4:
            return decode_lz4(stored, out);
        case LC_ZLIB:
            return decode_zlib(stored, out);
        case LC_GZIP:
            return decode_gzip(stored, out);
        case LC_BLOSC:
            return decode_blosc(stored, out, scratch);
        default:
            check_size(stored.size(), out.size());
            std::memcpy(out.data(), stored.data(), out.size());
    }
}

}  // namespace

u32 crc32c(const u8 *data, size_t nbytes) {
#if defined(__x86_64__)
    static const bool fast = __builtin_cpu_supports("sse4.2");
    if (fast) return ~crc32c_by_sse(~0u, data, nbytes);
#endif
    return ~crc32c_by_table(~0u, data, nbytes);
}

i64 decode_scratch_nbytes(const lc_chain &chain, i64 chunk_nbytes) {
    i64 nbytes = chain.decoded_checksum || chain.shuffle > 1 ? chunk_nbytes + 4 : 0;
    if (chain.compressor == LC_BLOSC) nbytes += 2 * chunk_nbytes;
    return nbytes;
}

void FreeZstd::operator()(ZSTD_DCtx_s *context) const { zstd().free(context); }

void decode_chunk(const lc_chain &chain, Bytes stored, Target out, DecodeScratch &scratch) {
    if (chain.stored_checksum) stored = without_checksum(stored, "stored bytes");
    if (!chain.decoded_checksum && chain.shuffle <= 1) return decompress(chain, stored, out, scratch);
    const size_t nbytes = out.size() + (chain.decoded_checksum ? 4 : 0);
    const Target decoded(scratch.filtered.reserve(static_cast<i64>(nbytes)), nbytes);
    decompress(chain, stored, decoded, scratch);
    Bytes body = decoded;
    if (chain.decoded_checksum) body = without_checksum(body, "decoded bytes");
    if (chain.shuffle <= 1) {
        std::memcpy(out.data(), body.data(), out.size());
        return;
    }
    const size_t size = static_cast<size_t>(chain.shuffle);
    if (out.size() % size)
        refuse("%zu bytes are no whole number of the elements of %zu that were shuffled", out.size(), size);
    unshuffle_bytes(body.data(), out.data(), out.size(), size);
}

}  // namespace lc
