// Vectors of floats, as wide as the target's registers, and conversions from and to stored numbers.
//
// Each instruction set has a translation unit of its own. Everything in it is in an anonymous namespace, and nothing of
// the C++ library is used that the compiler might not inline: of equal functions in several units the linker keeps one,
// and that one might use instructions that this processor lacks.
//
// Compilers differ in which products and sums they compute with one rounding. So they are told to do that nowhere, and
// `multiply_add` does it: results have the same bits with every compiler.

#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if RAYCORE_WIDTH > 4
#include <immintrin.h>
#else
#include <arm_neon.h>
#endif

#include "shuffle.h"

namespace {

constexpr int kWidth = RAYCORE_WIDTH;
constexpr float kInfinity = __builtin_inff();
constexpr float kLog2OfE = 1.44269504f;

typedef float Floats __attribute__((vector_size(4 * kWidth)));
typedef int32_t Ints __attribute__((vector_size(4 * kWidth)));
typedef uint32_t Words __attribute__((vector_size(4 * kWidth)));
typedef uint16_t Halves __attribute__((vector_size(2 * kWidth)));

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

template <typename To, typename From>
inline To bits_of(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

inline Floats splat(float x) {
  return x - Floats{};  // minus zero changes no x, so nothing is computed
}

// a · b + c, rounded once.
inline Floats multiply_add(Floats a, Floats b, Floats c) {
#if RAYCORE_WIDTH == 16
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif RAYCORE_WIDTH == 8
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#endif
}

inline Floats load(const float* from) {
  Floats x;
  std::memcpy(&x, from, sizeof(x));
  return x;
}

inline Floats load(const BFloat16* from) {
  Halves x;
  std::memcpy(&x, from, sizeof(x));
  return bits_of<Floats>(__builtin_convertvector(x, Words) << 16);
}

inline void store(float* to, Floats x) {
  std::memcpy(to, &x, sizeof(x));
}

#ifdef RAYCORE_BF16_PAIRS
inline void store(BFloat16* to, Floats x) {
  _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh((__m512)x));
}
#else
inline void store(BFloat16* to, Floats x) {
  // round to the nearest, ties to even; NaN stays NaN
  const Words bits = bits_of<Words>(x);
  const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const Halves halves = __builtin_convertvector(x == x ? rounded : (bits >> 16) | 0x40, Halves);
  std::memcpy(to, &halves, sizeof(halves));
}
#endif

#if RAYCORE_WIDTH == 16
inline Floats load(const Float16* from) {
  return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
}
inline void store(Float16* to, Floats x) {
  _mm256_storeu_si256((__m256i*)to, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#elif RAYCORE_WIDTH == 8
inline Floats load(const Float16* from) {
  return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
}
inline void store(Float16* to, Floats x) {
  _mm_storeu_si128((__m128i*)to, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#elif defined(__aarch64__)
inline Floats load(const Float16* from) {
  __fp16 x __attribute__((vector_size(8)));
  std::memcpy(&x, from, sizeof(x));
  return __builtin_convertvector(x, Floats);
}
inline void store(Float16* to, Floats x) {
  __fp16 y __attribute__((vector_size(8))) = __builtin_convertvector(x, decltype(y));
  std::memcpy(to, &y, sizeof(y));
}
#endif

inline float to_float(float x) {
  return x;
}
inline float to_float(BFloat16 x) {
  return bits_of<float>(uint32_t(x.bits) << 16);
}
inline float to_float(Float16 x) {
  const Float16 numbers[kWidth] = {x};
  return load(numbers)[0];
}

// The first `count` numbers, and zeros.
template <typename T>
inline Floats load_first(const T* from, int64_t count) {
  T padded[kWidth] = {};
  std::memcpy(padded, from, count * sizeof(T));
  return load(padded);
}

template <typename T>
inline void store_first(T* to, Floats x, int64_t count) {
  T padded[kWidth];
  store(padded, x);
  std::memcpy(to, padded, count * sizeof(T));
}

// As many numbers as there are, up to kWidth.
template <typename T>
inline Floats load_up_to(const T* from, int64_t count) {
  return count >= kWidth ? load(from) : load_first(from, count);
}

template <typename T>
inline void store_up_to(T* to, Floats x, int64_t count) {
  if (count >= kWidth) store(to, x);
  else store_first(to, x, count);
}

// How many numbers are stored side by side that belong to one lane: bfloat16 pairs are cheap to widen, and integers of 8
// bits become such pairs.
template <typename T>
constexpr int kPair = std::is_same<T, BFloat16>::value || std::is_same<T, int8_t>::value ? 2 : 1;

// Two vectors of stored pairs: the first numbers of `count` pairs, and the second ones.
inline void widen(const BFloat16* from, int64_t count, Floats& first, Floats& second) {
  Words pairs = {};
  if (count >= kWidth) std::memcpy(&pairs, from, sizeof(pairs));
  else std::memcpy(&pairs, from, count * sizeof(uint32_t));
  first = bits_of<Floats>(pairs << 16);
  second = bits_of<Floats>(pairs & 0xffff0000u);
}

inline void widen(const int8_t* from, int64_t count, Floats& first, Floats& second) {
  Halves pairs = {};
  if (count >= kWidth) std::memcpy(&pairs, from, sizeof(pairs));
  else std::memcpy(&pairs, from, count * sizeof(uint16_t));
  const Words words = __builtin_convertvector(pairs, Words);
  first = __builtin_convertvector(bits_of<Ints>(words << 24) >> 24, Floats);
  second = __builtin_convertvector(bits_of<Ints>(words << 16) >> 24, Floats);
}

#ifdef RAYCORE_BF16_PAIRS
// kWidth pairs of bfloat16 numbers, which equal the numbers at `from`.
inline Floats load_pairs(const BFloat16* from) {
  Floats pairs;
  std::memcpy(&pairs, from, sizeof(pairs));
  return pairs;
}
inline Floats load_pairs(const int8_t* from) {
  const __m512 first = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
  const __m512 second = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(from + kWidth))));
  return (Floats)_mm512_cvtne2ps_pbh(second, first);
}
inline void store_pairs(BFloat16* to, Floats pairs) {
  std::memcpy(to, &pairs, sizeof(pairs));
}

// `sums` plus each lane's products: of a pair in `pairs` with the pair at `from`, which is the same for all lanes.
inline Floats add_pairs(Floats sums, Floats pairs, const BFloat16* from) {
  uint32_t pair;
  std::memcpy(&pair, from, sizeof(pair));
  return (Floats)_mm512_dpbf16_ps((__m512)sums, (__m512bh)pairs, (__m512bh)(Words{} + pair));
}
#endif

typedef float Quad __attribute__((vector_size(16)));

// One number from all lanes. Halves are combined until one number is left, so the order is fixed.
template <typename Vector, typename Combine>
inline float combine_lanes(Vector x, const Combine& combine) {
  constexpr int width = sizeof(Vector) / sizeof(float);
  if constexpr (width > 4) {
    typedef float Half __attribute__((vector_size(sizeof(Vector) / 2)));
    Half halves[2];
    std::memcpy(halves, &x, sizeof(x));
    return combine_lanes(combine(halves[0], halves[1]), combine);
  } else {
    const Quad pairs = combine(x, RAYCORE_SHUFFLE(x, x, 2, 3, 0, 1));
    return combine(pairs, RAYCORE_SHUFFLE(pairs, pairs, 1, 0, 3, 2))[0];
  }
}

// The numbers of two vectors in turn: of their first halves, and of their second ones.
inline void interleave(Floats a, Floats b, Floats& low, Floats& high) {
#if RAYCORE_WIDTH == 16
  low = RAYCORE_SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  high = RAYCORE_SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#elif RAYCORE_WIDTH == 8
  low = RAYCORE_SHUFFLE(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
  high = RAYCORE_SHUFFLE(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#else
  low = RAYCORE_SHUFFLE(a, b, 0, 4, 1, 5);
  high = RAYCORE_SHUFFLE(a, b, 2, 6, 3, 7);
#endif
}

// Exchanges rows and columns. Any 32 bits may be a number.
inline void transpose(Floats (&rows)[kWidth]) {
  for (int done = 1; done < kWidth; done *= 2) {
    Floats next[kWidth];
    for (int i = 0; i < kWidth / 2; i++) interleave(rows[i], rows[i + kWidth / 2], next[2 * i], next[2 * i + 1]);
    for (int i = 0; i < kWidth; i++) rows[i] = next[i];
  }
}

inline Floats absolute(Floats x) {
  return bits_of<Floats>(bits_of<Words>(x) & 0x7fffffffu);
}

inline Floats maximum(Floats a, Floats b) {
  return a > b ? a : b;
}

inline float sum(Floats x) {
  return combine_lanes(x, [](auto a, auto b) { return a + b; });
}

inline float maximum(Floats x) {
  return combine_lanes(x, [](auto a, auto b) { return a > b ? a : b; });
}

#if RAYCORE_WIDTH == 16
// 2 to the power of x, off by less than 8e-5 of it: for weights that are rounded to bfloat16.
inline Floats exp2(Floats x) {
  const Floats r = (Floats)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);  // 0 if infinite
  Floats y = splat(0.05517167f);
  y = multiply_add(y, r, splat(0.24261113f));
  y = multiply_add(y, r, splat(0.69326097f));
  y = multiply_add(y, r, splat(0.99992806f));
  return (Floats)_mm512_scalef_ps((__m512)y, (__m512)(x - r));
}
#endif

constexpr float kRounder = 12582912.0f;  // 1.5 · 2^23: added to a number, it leaves no bits for a fraction

// 2 to the power of x, for x <= 0: off by less than 3 units in the last place, and 0 for x <= -127. NaN gives NaN.
inline Floats power_of_two(Floats x) {
  x = splat(-127.0f) > x ? splat(-127.0f) : x;
  const Floats shifted = x + splat(kRounder), r = x - (shifted - splat(kRounder));
  Floats y = splat(0.00132647273f);
  y = multiply_add(y, r, splat(0.00967151299f));
  y = multiply_add(y, r, splat(0.0555073358f));
  y = multiply_add(y, r, splat(0.240222424f));
  y = multiply_add(y, r, splat(0.693147004f));
  y = multiply_add(y, r, splat(1.0f));
  return bits_of<Floats>(bits_of<Ints>(y) + (bits_of<Ints>(shifted) << 23));  // the other bits of kRounder are lost
}

// e to the power of r, less 1, for |r| <= ln 2 / 2.
inline Floats exponential_less_one(Floats r) {
  Floats y = splat(1.98756915e-4f);
  y = multiply_add(y, r, splat(1.39819995e-3f));
  y = multiply_add(y, r, splat(8.33345187e-3f));
  y = multiply_add(y, r, splat(4.16657959e-2f));
  y = multiply_add(y, r, splat(1.66666655e-1f));
  y = multiply_add(y, r, splat(0.5f));
  return multiply_add(y * r, r, r);
}

inline Floats exponential_near_zero(Floats r) {
  return exponential_less_one(r) + splat(1.0f);
}

// x - n ln 2, with ln 2 in two parts.
inline Floats without_multiples(Floats x, Floats n) {
  return multiply_add(n, splat(-1.42860677e-6f), multiply_add(n, splat(-0.693145752f), x));
}

// e to the power of x, off by less than 2 units in the last place; 0 far below -87, infinity far above 88. NaN gives
// NaN.
//
// x = n ln 2 + r with |r| <= ln 2 / 2; a polynomial for e^r; n goes into the exponent's bits.
#if RAYCORE_WIDTH == 16
inline Floats exponential(Floats x) {
  x = splat(-104.0f) > x ? splat(-104.0f) : x;
  x = splat(89.0f) < x ? splat(89.0f) : x;
  const __m512 n = _mm512_roundscale_ps((__m512)(x * splat(kLog2OfE)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return (Floats)_mm512_scalef_ps((__m512)exponential_near_zero(without_multiples(x, (Floats)n)), n);
}
#else
inline Floats exponential(Floats x) {
  const Floats shifted = multiply_add(x, splat(kLog2OfE), splat(kRounder));
  const Ints exponent = bits_of<Ints>(shifted) - bits_of<Ints>(splat(kRounder));
  const Floats y = exponential_near_zero(without_multiples(x, shifted - splat(kRounder)));
  const Floats scaled = bits_of<Floats>(bits_of<Ints>(y) + (exponent << 23));
  const Floats low = x < splat(-87.3f) ? splat(0.0f) : scaled;
  const Floats all = x > splat(88.3f) ? splat(kInfinity) : low;
  return x == x ? all : x;
}
#endif

// The hyperbolic tangent, off by less than 3 units in the last place. NaN gives NaN.
//
// It is y / (y + 2), where y is e to the power of 2 |x|, less 1; from 9.1 on, it is 1.
inline Floats hyperbolic_tangent(Floats x) {
  const Floats size = absolute(x), doubled = size > splat(9.1f) ? splat(18.2f) : size + size;
  const Floats shifted = multiply_add(doubled, splat(kLog2OfE), splat(kRounder));
  const Floats power = bits_of<Floats>(bits_of<Ints>(splat(1.0f)) + (bits_of<Ints>(shifted) << 23));
  const Floats rest = exponential_less_one(without_multiples(doubled, shifted - splat(kRounder)));
  const Floats y = multiply_add(rest, power, power - splat(1.0f));
  return bits_of<Floats>(bits_of<Words>(y / (y + splat(2.0f))) | (bits_of<Words>(x) & 0x80000000u));
}

// The probability that a normal random number is more than x, for x >= 0: off by less than 2e-6 of it for x up to 5, and
// by less than 8e-6 up to 13. NaN gives NaN.
//
// It is e to the power of -x²/2 times a polynomial of 1 / (1 + 0.35 x).
inline Floats upper_tail(Floats x) {
  const Floats t = splat(1.0f) / multiply_add(x, splat(0.35f), splat(1.0f));
  Floats y = splat(-0.029146139f);
  y = multiply_add(y, t, splat(0.14397271f));
  y = multiply_add(y, t, splat(-0.25571632f));
  y = multiply_add(y, t, splat(0.1591765f));
  y = multiply_add(y, t, splat(-0.023111418f));
  y = multiply_add(y, t, splat(0.10550866f));
  y = multiply_add(y, t, splat(0.1198327f));
  y = multiply_add(y, t, splat(0.1398619f));
  y = multiply_add(y, t, splat(0.1396214f));
  return y * t * exponential(x * x * splat(-0.5f));
}

#if RAYCORE_WIDTH == 16
// As `upper_tail`, in less than half of the time, but off by less than 3e-4 of it: for results that are rounded to
// bfloat16.
inline Floats rough_upper_tail(Floats x) {
  const Floats t = splat(1.0f) / multiply_add(x, splat(0.2975f), splat(1.0f));
  Floats y = splat(0.220048219f);
  y = multiply_add(y, t, splat(0.021922078f));
  y = multiply_add(y, t, splat(0.141560704f));
  y = multiply_add(y, t, splat(0.116560802f));
  return y * t * exp2(x * x * splat(-0.5f * kLog2OfE));
}
#else
inline Floats rough_upper_tail(Floats x) {
  return upper_tail(x);
}
#endif

}  // namespace
