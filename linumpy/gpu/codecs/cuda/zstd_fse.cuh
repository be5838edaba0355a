// FSE tables of the Zstandard format (RFC 8878), for encoding. Each function is for one lane.

constexpr u32 MAX_SYMBOLS = 64;  // of a table of sequences, which has up to 53 symbols

// The transition of a symbol: (state + bits) >> 16 is the number of bits to write; `state` is the offset in `states` of
// the symbol's next states.
struct Transition {
    u32 bits;
    int state;
};

template <u32 STATES> struct FseEncoder {
    u16 states[STATES];
    Transition transitions[MAX_SYMBOLS];
    u8 spread[STATES];
    short counts[MAX_SYMBOLS];  // number of states of each symbol; -1: one state, at the end of the table
    u16 next[MAX_SYMBOLS];
};

__device__ inline u32 top_bit(u32 v) { return 31 - leading_zeros(v); }

// Distribute 2^log states among the symbols of a histogram, at least one to each symbol that occurs. At most 2^log
// symbols may occur.
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

// Write the description of a table. The last symbol must occur.
__device__ inline void describe(const short *counts, u32 symbols, u32 log, BitWriter &out) {
    out.put(log - 5, 4);
    u32 left = (1u << log) + 1, threshold = 1u << log, width = log + 1;
    for (u32 s = 0; s < symbols;) {
        const u32 short_values = 2 * threshold - 1 - left;  // values that take one bit less
        const bool none = counts[s] == 0;
        u32 value = counts[s++] + 1;
        left -= value ? value - 1 : 1;
        if (value >= threshold) value += short_values;
        out.put(value, value < short_values ? width - 1 : width);
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

// Make the table from `fse.counts`.
template <u32 STATES> __device__ inline void make_encoder(FseEncoder<STATES> &fse, u32 symbols, u32 log) {
    const u32 size = 1u << log, step = (size >> 1) + (size >> 3) + 3;
    u32 high = size, total = 0;
    for (u32 s = 0; s < symbols; ++s) {
        const int n = fse.counts[s];
        fse.next[s] = static_cast<u16>(total);
        if (n < 0) fse.spread[--high] = static_cast<u8>(s);
        const u32 states = n < 0 ? 1 : n;
        const u32 bits = states > 1 ? log - top_bit(states - 1) : log;
        fse.transitions[s] = {(bits << 16) - (states > 1 ? states << bits : size), static_cast<int>(total - states)};
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

// The first state of the encoder, from the stream's last symbol, for which no bits are written.
template <u32 STATES> __device__ inline u32 first_state(const FseEncoder<STATES> &fse, u32 symbol) {
    const Transition transition = fse.transitions[symbol];
    const u32 bits = (transition.bits + (1 << 15)) >> 16;
    return fse.states[static_cast<int>(((bits << 16) - transition.bits) >> bits) + transition.state];
}

// The next state; the caller writes the lowest `bits` bits of the previous one.
template <u32 STATES> __device__ inline u32 next_state(const FseEncoder<STATES> &fse, u32 state, u32 symbol,
                                                       u32 &bits) {
    const Transition transition = fse.transitions[symbol];
    bits = (state + transition.bits) >> 16;
    return fse.states[static_cast<int>(state >> bits) + transition.state];
}
