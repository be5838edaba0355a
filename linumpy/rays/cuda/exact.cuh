// Random numbers, and elementary functions as fixed sequences of IEEE operations: the math libraries of CPUs and GPUs
// round differently, and these functions give the same bits everywhere. Sources that include this file are compiled with
// -fmad=false, and -ffp-contract=off on the host.
typedef unsigned long long uint64;

struct Pcg32 { uint64 state, inc; };

__device__ inline unsigned next_number(Pcg32 &rng) {
    const uint64 old = rng.state;
    rng.state = old * 6364136223846793005ull + rng.inc;
    const unsigned shifted = static_cast<unsigned>(((old >> 18) ^ old) >> 27), turn = static_cast<unsigned>(old >> 59);
    return shifted >> turn | shifted << ((0u - turn) & 31u);
}

__device__ inline void advance(Pcg32 &rng, uint64 delta) {
    uint64 multiplier = 1, summand = 0, step_multiplier = 6364136223846793005ull, step_summand = rng.inc;
    for (; delta; delta >>= 1) {
        if (delta & 1) {
            multiplier *= step_multiplier;
            summand = summand * step_multiplier + step_summand;
        }
        step_summand *= step_multiplier + 1;
        step_multiplier *= step_multiplier;
    }
    rng.state = rng.state * multiplier + summand;
}

// A number in [0, 1), which represents the upper 24 bits exactly.
__device__ inline float as_unit_float(unsigned number) {
    return static_cast<float>(number >> 8) * 5.9604644775390625e-8f;
}

// For angles below 10^6 rad.
__device__ inline void sine_cosine(float x, float &sine, float &cosine) {
    const double angle = x, quarter = rint(angle * 0.63661977236758134308);
    const double reduced = (angle - quarter * 1.57079632673412561417) - quarter * 6.07710050650619224932e-11;
    const double q = reduced * reduced;
    const double of_sine =
        -1.0 / 6 +
        q * (1.0 / 120 + q * (-1.0 / 5040 + q * (1.0 / 362880 + q * (-1.0 / 39916800 + q * (1.0 / 6227020800)))));
    const double of_cosine =
        -0.5 + q * (1.0 / 24 +
                    q * (-1.0 / 720 +
                         q * (1.0 / 40320 + q * (-1.0 / 3628800 + q * (1.0 / 479001600 + q * (-1.0 / 87178291200))))));
    const double s = reduced + reduced * (q * of_sine), c = 1.0 + q * of_cosine;
    const int turn = static_cast<int>(static_cast<int64>(quarter) & 3);
    const float first = static_cast<float>(turn & 1 ? c : s), second = static_cast<float>(turn & 1 ? s : c);
    sine = turn & 2 ? -first : first;
    cosine = (turn + 1) & 2 ? -second : second;
}

// For -126 <= y <= 126.
__device__ inline float exact_exp2(float y) {
    const float whole = rintf(y), f = y - whole;
    const float p =
        0.69314718f +
        f * (0.24022651f + f * (0.055504109f + f * (0.0096181291f +
                                                    f * (0.0013333558f + f * (0.00015403530f + f * 0.000015252734f)))));
    return (1.0f + f * p) * __int_as_float((static_cast<int>(whole) + 127) << 23);
}

// For positive normal numbers.
__device__ inline float exact_log2(float x) {
    const int bits = __float_as_int(x);
    int exponent = (bits >> 23) - 127;
    float mantissa = __int_as_float((bits & 0x7FFFFF) | 0x3F800000);
    if (mantissa > 1.41421356f) mantissa *= 0.5f, ++exponent;
    const float f = (mantissa - 1.0f) / (mantissa + 1.0f), q = f * f;
    const float p = 2.88539008f + q * (0.961796694f + q * (0.577078016f + q * (0.412198583f + q * 0.320598898f)));
    return static_cast<float>(exponent) + f * p;
}
