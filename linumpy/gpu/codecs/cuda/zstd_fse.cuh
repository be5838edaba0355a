// FSE tables of the Zstandard format (RFC 8878), for encoding. Each function is for one lane.

constexpr u32 MOST_SYMBOLS = 64;  // of a table of sequences: 53 lengths of matches

// How a symbol leaves a state: `bits` gives the number of bits to write, `state` is where its next states are found.
struct Leaving {
    u32 bits;
    int state;
};

template <u32 STATES> struct FseEncoder {
    u16 states[STATES];
    Leaving leaving[MOST_SYMBOLS];
    u8 spread[STATES];
    short counts[MOST_SYMBOLS];  // of the states of each symbol; -1: one, at the end of the table
    u16 next[MOST_SYMBOLS];
};

__device__ inline u32 top_bit(u32 v) { return 31 - leading_zeros(v); }

// Share 2^log states among the symbols of a histogram, one at least to each. `different` of them occur, at most 2^log.
__device__ inline void share_states(const u32 *histogram, u32 symbols, u32 total, u32 log, short *counts) {
    int left = 1 << log;
    u32 largest = 0;
    for (u32 s = 0; s < symbols; ++s) {
        const u32 n = histogram[s];
        const u32 share = ((n << log) + total / 2) / total;
        counts[s] = static_cast<short>(n ? share ? share : 1 : 0);
        left -= counts[s];
        if (counts[s] > counts[largest]) largest = s;
    }
    if (left >= 0) counts[largest] = static_cast<short>(counts[largest] + left);
    for (; left < 0; ++left) {
        for (u32 s = 0; s < symbols; ++s)
            if (counts[s] > counts[largest]) largest = s;
        --counts[largest];
    }
}

// Describe a table; `symbols` ends with one that occurs.
__device__ inline void describe(const short *counts, u32 symbols, u32 log, BitWriter &out) {
    out.put(log - 5, 4);
    u32 left = (1u << log) + 1, threshold = 1u << log, width = log + 1;
    for (u32 s = 0; s < symbols;) {
        const u32 most = 2 * threshold - 1 - left;
        const bool none = counts[s] == 0;
        u32 value = counts[s++] + 1;
        left -= value ? value - 1 : 1;
        if (value >= threshold) value += most;
        out.put(value, value < most ? width - 1 : width);
        for (; left < threshold && threshold > 1; threshold /= 2) --width;
        if (!none) continue;
        u32 zeros = 0;
        for (; counts[s] == 0; ++s)
            if (++zeros == 3) {
                out.put(3, 2);
                zeros = 0;
            }
        out.put(zeros, 2);
    }
    out.finish();
}

// Make the table of `counts`.
template <u32 STATES> __device__ inline void make_encoder(FseEncoder<STATES> &fse, u32 symbols, u32 log) {
    const u32 size = 1u << log, step = (size >> 1) + (size >> 3) + 3;
    u32 high = size, total = 0;
    for (u32 s = 0; s < symbols; ++s) {
        const int n = fse.counts[s];
        fse.next[s] = static_cast<u16>(total);
        if (n < 0) fse.spread[--high] = static_cast<u8>(s);
        const u32 states = n < 0 ? 1 : n;
        const u32 bits = states > 1 ? log - top_bit(states - 1) : log;
        fse.leaving[s] = {(bits << 16) - (states > 1 ? states << bits : size), static_cast<int>(total - states)};
        total += states;
    }
    for (u32 s = 0, at = 0; s < symbols; ++s)
        for (int k = 0; k < fse.counts[s]; ++k) {
            fse.spread[at] = static_cast<u8>(s);
            do at = (at + step) & (size - 1);
            while (at >= high && high > 0);
        }
    for (u32 k = 0; k < size; ++k) fse.states[fse.next[fse.spread[k]]++] = static_cast<u16>(size + k);
}

// The state that a stream of symbols begins with, from its last symbol; it writes no bits.
template <u32 STATES> __device__ inline u32 first_state(const FseEncoder<STATES> &fse, u32 symbol) {
    const Leaving leaving = fse.leaving[symbol];
    const u32 bits = (leaving.bits + (1 << 15)) >> 16;
    return fse.states[static_cast<int>(((bits << 16) - leaving.bits) >> bits) + leaving.state];
}

// Go to the next state; `bits` of the last one are to be written.
template <u32 STATES> __device__ inline u32 next_state(const FseEncoder<STATES> &fse, u32 state, u32 symbol,
                                                       u32 &bits) {
    const Leaving leaving = fse.leaving[symbol];
    bits = (state + leaving.bits) >> 16;
    return fse.states[static_cast<int>(state >> bits) + leaving.state];
}
