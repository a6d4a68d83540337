// The passes over tensors, once more in C++: what each returns is said by the torch
// function of the same name. Vectors are the compiler's own (GCC and Clang), no header of
// torch is read, and the arithmetic is written out: no flag may reorder it.
// Input addresses come first, then the number of rows of 1024 elements, then the output.

#include <cstdint>
#include <cstring>
#include <limits>

typedef float F __attribute__((vector_size(32)));
typedef int32_t I __attribute__((vector_size(32)));
typedef float F4 __attribute__((vector_size(16)));
typedef double D __attribute__((vector_size(32)));
typedef int64_t L __attribute__((vector_size(32)));
typedef uint16_t H __attribute__((vector_size(16)));
typedef int16_t S __attribute__((vector_size(16)));

static const int LANES = 8;
static const int64_t ROW = 1024;
static const float INF = std::numeric_limits<float>::infinity();

// ---------------------------------------------------------------- elements, as fp32

struct Fp32 {
    typedef float Element;
    static constexpr float tiny = 0x1p-126f;
};
struct Bf16 {
    typedef uint16_t Element;
    static constexpr float tiny = 0x1p-126f;
};
struct Fp16 {
    typedef uint16_t Element;
    static constexpr float tiny = 0x1p-14f;
};

template <class To, class From> static inline To bits(From from) {
    To to;
    static_assert(sizeof to == sizeof from, "the same registers");
    std::memcpy(&to, &from, sizeof to);
    return to;
}

template <class V> static inline V read(const void *from) {
    V to;
    std::memcpy(&to, from, sizeof to);
    return to;
}

template <class T> static inline F load(const typename T::Element *x);

template <> inline F load<Fp32>(const float *x) { return read<F>(x); }

template <> inline F load<Bf16>(const uint16_t *x) {
    return bits<F>(__builtin_convertvector(read<H>(x), I) << 16);
}

template <> inline F load<Fp16>(const uint16_t *x) {
#ifdef __F16C__
    return __builtin_ia32_vcvtph2ps256(read<S>(x));
#else
    I code = __builtin_convertvector(read<H>(x), I);
    I size = (code & 0x7FFF) << 13;
    I value = bits<I>(bits<F>(size) * 0x1p112f);
    value |= (size >= 0x0F800000) & 0x7F800000; // NaN and Inf
    return bits<F>(value | (code & 0x8000) << 16);
#endif
}

// ------------------------------------------------------------------------- arithmetic

static inline F all(float x) { return F{} + x; }
static inline I all(int32_t x) { return I{} + x; }
static inline F magnitude(F x) { return bits<F>(bits<I>(x) & 0x7FFFFFFF); }
static inline D magnitude(D x) { return bits<D>(bits<L>(x) & 0x7FFFFFFFFFFFFFFF); }
// the second where one of them is NaN
template <class V> static inline V least(V a, V b) { return a < b ? a : b; }
template <class V> static inline V most(V a, V b) { return a > b ? a : b; }
struct Halves {
    D low, high;
};
static inline Halves wide(F x) {
    struct {
        F4 low, high;
    } half;
    std::memcpy(&half, &x, sizeof half);
    return {__builtin_convertvector(half.low, D), __builtin_convertvector(half.high, D)};
}
static inline D folded(F x) {
    Halves half = wide(x);
    return half.low + half.high;
}

// One number of the lanes of a vector. Not inlined: a vector whose elements are named
// would live in memory, through the loop before.
template <class E, class V, class Combine>
__attribute__((noinline)) static E reduced(V v, Combine combine) {
    E lanes[sizeof v / sizeof(E)];
    std::memcpy(lanes, &v, sizeof v);
    E result = lanes[0];
    for (unsigned k = 1; k < sizeof v / sizeof(E); k++) result = combine(result, lanes[k]);
    return result;
}

template <class E, class V> static inline E sum_of(V v) {
    return reduced<E>(v, [](E a, E b) { return a + b; });
}
template <class E, class V> static inline E least_of(V v) {
    return reduced<E>(v, [](E a, E b) { return b < a ? b : a; });
}
template <class E, class V> static inline E most_of(V v) {
    return reduced<E>(v, [](E a, E b) { return b > a ? b : a; });
}

// ------------------------------------------------------------------------- one tensor

template <class T> static bool has_nan(const typename T::Element *x, int64_t rows) {
    I unlike{};
    for (int64_t k = 0; k < rows * ROW; k += LANES) {
        F value = load<T>(x + k);
        unlike |= value != value;
    }
    return least_of<int32_t>(unlike) < 0;
}

template <class T>
static void sums(const typename T::Element *x, int64_t rows, double *out) {
    const int64_t QUARTER = ROW / 4;
    F low = all(INF), high = all(-INF), near = all(INF);
    D total{}, squares{};
    for (int64_t row = 0; row < rows; row++, x += ROW) {
        F added{}, squared{};
        for (int64_t k = 0; k < QUARTER; k += LANES) {
            F a = load<T>(x + k);
            F b = load<T>(x + k + QUARTER);
            F c = load<T>(x + k + 2 * QUARTER);
            F d = load<T>(x + k + 3 * QUARTER);
            low = least(least(least(a, b), least(c, d)), low);
            high = most(most(most(a, b), most(c, d)), high);
            F nearest = least(least(magnitude(a), magnitude(b)),
                              least(magnitude(c), magnitude(d)));
            near = least(nearest, near);
            added += (a + b) + (c + d);
            squared += (a * a + b * b) + (c * c + d * d);
        }
        total += folded(added);
        squares += folded(squared);
    }
    out[0] = least_of<float>(low);
    out[1] = most_of<float>(high);
    out[2] = sum_of<double>(total);
    out[3] = sum_of<double>(squares);
    out[4] = least_of<float>(near);
    // also a difference of infinities
    if (out[2] != out[2] && has_nan<T>(x - rows * ROW, rows)) {
        for (int k = 0; k < 5; k++) out[k] = std::numeric_limits<double>::quiet_NaN();
    }
}

template <class T>
static void counts(const typename T::Element *x, int64_t rows, double *out) {
    I zeros{}, small{};
    for (int64_t k = 0; k < rows * ROW; k += LANES) {
        F value = load<T>(x + k);
        zeros -= value == 0.0f;
        small -= magnitude(value) < T::tiny;
    }
    out[0] = sum_of<int32_t>(zeros);
    out[1] = sum_of<int32_t>(small);
}

template <class T>
static void masked_sums(const typename T::Element *x, const float *shift,
                        const float *scale, int64_t rows, double *out) {
    F low = all(INF), high = all(-INF);
    D total{}, squares{};
    I marks[6] = {};
    for (int64_t row = 0; row < rows; row++, x += ROW) {
        F added{}, squared{};
        for (int64_t k = 0; k < ROW; k += LANES) {
            F value = load<T>(x + k);
            F size = magnitude(value);
            I finite = size < INF;
            F y = finite ? value * *scale - *shift : F{};
            low = least(finite ? value : all(INF), low);
            high = most(finite ? value : all(-INF), high);
            added += y;
            squared += y * y;
            marks[0] -= finite;
            marks[1] -= value != value;
            marks[2] -= value == INF;
            marks[3] -= value == -INF;
            marks[4] -= value == 0.0f;
            marks[5] -= (size < T::tiny) & (value != 0.0f);
        }
        total += folded(added);
        squares += folded(squared);
    }
    out[0] = least_of<float>(low);
    out[1] = most_of<float>(high);
    out[2] = sum_of<double>(total);
    out[3] = sum_of<double>(squares);
    for (int k = 0; k < 6; k++) out[4 + k] = sum_of<int32_t>(marks[k]);
}

// ------------------------------------------------------------------------ two tensors

template <class T>
static void errors(const typename T::Element *x, const double *reference, int64_t rows,
                   double *out) {
    D largest{}, top{}, squares{}, reference_squares{};
    for (int64_t row = 0; row < rows; row++, x += ROW, reference += ROW) {
        D squared{}, reference_squared{};
        auto add = [&](D value, const double *from) {
            D true_value = read<D>(from);
            D error = magnitude(value - true_value);
            D size = magnitude(true_value);
            largest = most(error, largest);
            top = most(size, top);
            squared += error * error;
            reference_squared += size * size;
        };
        for (int64_t k = 0; k < ROW; k += LANES) {
            Halves value = wide(load<T>(x + k));
            add(value.low, reference + k);
            add(value.high, reference + k + 4);
        }
        squares += squared;
        reference_squares += reference_squared;
    }
    out[0] = most_of<double>(largest);
    out[1] = sum_of<double>(squares);
    out[2] = most_of<double>(top);
    out[3] = sum_of<double>(reference_squares);
    if (out[1] != out[1]) out[0] = out[1];
    if (out[3] != out[3]) out[2] = out[3];
}

// Vectors of sums, of counts (by 1 or -1) and of maxima (of bits), as in metric_kernel.py
struct Piece {
    F sums[7];
    I counts[6]; // over, opposite, differ, lone, solid, wrapped
    I tops[3];   // error, relative error, distance
};

static inline Piece piece(F r, F c, I crossed, I apart, I distance, I wrapped, int32_t one) {
    F d = r - c;
    F error = magnitude(d);
    F size = magnitude(r);
    I error_bits = bits<I>(error);
    I solid = (bits<I>(size) != 0) & 1;
    I differ = (error_bits != 0) & 1;
    I rel = bits<I>(error / size) & -solid; // zero where r is
    F ulp = __builtin_convertvector(apart, F);
    return Piece{
        {r * r, c * c, d * d, d * (r + c), error, bits<F>(rel), ulp},
        {(one - bits<I>(ulp)) >> 31, crossed & (differ ^ 1), differ, differ & (solid ^ 1),
         solid, wrapped},
        {error_bits, rel, distance}};
}

static inline Piece added(const Piece &a, const Piece &b) {
    Piece sum;
    for (int k = 0; k < 7; k++) sum.sums[k] = a.sums[k] + b.sums[k];
    for (int k = 0; k < 6; k++) sum.counts[k] = a.counts[k] + b.counts[k];
    for (int k = 0; k < 3; k++) sum.tops[k] = most(a.tops[k], b.tops[k]);
    return sum;
}

// In place.
static inline void put(Piece &row, const Piece &next) { row = added(row, next); }

static Piece empty() {
    Piece none{};
    for (int k = 0; k < 3; k++) none.tops[k] = all(std::numeric_limits<int32_t>::min());
    return none;
}

// Write a column of the output, shape (15, rows); `turned` says that distances are in the
// order of unsigned numbers.
static void finish(const Piece &piece, int64_t count, bool turned, int64_t rows,
                   float *out) {
    float found[15];
    for (int k = 0; k < 7; k++) found[k] = sum_of<float>(piece.sums[k]);
    int32_t counted[6];
    for (int k = 0; k < 6; k++) counted[k] = sum_of<int32_t>(piece.counts[k]);
    int32_t over = counted[0], opposite = counted[1], differ = counted[2];
    int32_t tops[3];
    for (int k = 0; k < 3; k++) tops[k] = most_of<int32_t>(piece.tops[k]);
    if (turned) {
        tops[2] ^= std::numeric_limits<int32_t>::min();
        found[6] -= counted[5] * 4294967296.0f;
        over += counted[5];
    }
    found[7] = -over;
    found[8] = count - differ - opposite;
    found[9] = differ;
    found[10] = counted[3];
    found[11] = counted[4];
    found[12] = bits<float>(tops[0]);
    found[13] = bits<float>(tops[1]);
    found[14] = turned ? static_cast<float>(static_cast<uint32_t>(tops[2]))
                       : static_cast<float>(tops[2]);
    for (int k = 0; k < 15; k++) out[k * rows] = found[k];
}

static inline Piece pair(F x, F y, float scale, int32_t one) {
    const int32_t SIGN = std::numeric_limits<int32_t>::min();
    I i = bits<I>(x * scale);
    I j = bits<I>(y * scale);
    I crossed = (i ^ j) >> 31;
    I p = i & 0x7FFFFFFF;
    I q = j & 0x7FFFFFFF;
    I apart = most(p, q) - ((least(p, q) ^ crossed) - crossed);
    return piece(x, y, crossed, apart, apart ^ SIGN, apart >> 31, one);
}

template <int PIECES>
static void pairs_row(const float *r, const float *c, float scale, int32_t one,
                      int64_t rows, float *out) {
    Piece row = empty();
    for (int64_t k = 0; k < ROW; k += LANES) {
        Piece at = pair(read<F>(r + k), read<F>(c + k), scale, one);
        for (int p = 1; p < PIECES; p++) {
            put(at, pair(read<F>(r + p * ROW + k), read<F>(c + p * ROW + k), scale, one));
        }
        put(row, at);
    }
    finish(row, PIECES * ROW, true, rows, out);
}

static inline Piece half(I i, I j) {
    I crossed = (i ^ j) >> 31;
    I p = (i >> 16) & 0x7FFF;
    I q = (j >> 16) & 0x7FFF;
    I apart = p - ((q ^ crossed) - crossed);
    apart = (apart ^ (apart >> 31)) - (apart >> 31);
    return piece(bits<F>(i), bits<F>(j), crossed, apart, apart, I{}, 0x3F800000);
}

static inline Piece halves(const int32_t *r, const int32_t *c) {
    I x = read<I>(r);
    I y = read<I>(c);
    return added(half(x & -65536, y & -65536), half(x << 16, y << 16));
}

// ------------------------------------------------------------------- what is exported

#define OF_ONE_TYPE(NAME, TYPE)                                                         \
    extern "C" void sums_##NAME(const TYPE::Element *x, int64_t rows, double *out) {    \
        sums<TYPE>(x, rows, out);                                                       \
    }                                                                                   \
    extern "C" void counts_##NAME(const TYPE::Element *x, int64_t rows, double *out) {  \
        counts<TYPE>(x, rows, out);                                                     \
    }                                                                                   \
    extern "C" void masked_sums_##NAME(const TYPE::Element *x, const float *shift,      \
                                       const float *scale, int64_t rows, double *out) { \
        masked_sums<TYPE>(x, shift, scale, rows, out);                                  \
    }                                                                                   \
    extern "C" void errors_##NAME(const TYPE::Element *x, const double *reference,      \
                                  int64_t rows, double *out) {                          \
        errors<TYPE>(x, reference, rows, out);                                          \
    }

OF_ONE_TYPE(float32, Fp32)
OF_ONE_TYPE(bfloat16, Bf16)
OF_ONE_TYPE(float16, Fp16)

extern "C" void pairs(const float *r, const float *c, const float *scale,
                      const int32_t *one, int64_t rows, float *out) {
    for (int64_t row = 0; row < rows; row++) {
        pairs_row<1>(r + row * ROW, c + row * ROW, *scale, *one, rows, out + row);
    }
}

extern "C" void pairs_wide(const float *r, const float *c, const float *scale,
                           const int32_t *one, int64_t rows, float *out, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; row++) {
        const int64_t start = row * 4 * ROW;
        pairs_row<4>(r + start, c + start, *scale, *one, rows, out + row);
    }
}

extern "C" void packed_wide(const int32_t *r, const int32_t *c, int64_t rows, float *out,
                            int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; row++) {
        const int64_t start = row * 2 * ROW;
        Piece total = empty();
        for (int64_t k = start; k < start + ROW; k += LANES) {
            put(total, added(halves(r + k, c + k), halves(r + ROW + k, c + ROW + k)));
        }
        finish(total, 4 * ROW, false, rows, out + row);
    }
}
