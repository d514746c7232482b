// Whether products of pairs of bfloat16 numbers are faster than those of the same numbers in float32.
//
// Not on every processor that has instructions for pairs. An Emerald Rapids takes two cycles for a vector of pairs, and
// half a cycle for one of float32 numbers, so that it computes half as many products of pairs.

#pragma once

#include <immintrin.h>

#include <cstdint>

namespace {

constexpr int kRateSums = 12;     // whose additions don't wait for each other
constexpr int kRateRounds = 100;  // some microseconds
constexpr int kRateTries = 24;    // other processes and slow clocks disturb some of them

// The fewest cycles of the processor's clock that kRateRounds · kRateSums products take.
template <typename Product>
inline uint64_t fewest_cycles(const Product& product) {
  uint64_t fewest = ~uint64_t(0);
  for (int t = 0; t < kRateTries; t++) {
    __m512 sums[kRateSums];
    for (int i = 0; i < kRateSums; i++) sums[i] = _mm512_set1_ps(i);
    const uint64_t begin = __rdtsc();
    for (int round = 0; round < kRateRounds; round++)
      for (int i = 0; i < kRateSums; i++) sums[i] = product(sums[i]);
    const uint64_t cycles = __rdtsc() - begin;
    for (int i = 1; i < kRateSums; i++) sums[0] = _mm512_add_ps(sums[0], sums[i]);
    asm volatile("" ::"x"(sums[0]));  // or the compiler would compute nothing
    if (cycles < fewest) fewest = cycles;
  }
  return fewest;
}

}  // namespace
