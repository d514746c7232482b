// A linear layer whose weight has integers of 4 or 8 bits, or numbers of 4 bits that stand for integers, in panels of 16
// outputs.
//
// Each row is rounded to integers: of 16 bits with a scale of its own, or of 8 bits with a scale for the row or for each
// block of inputs. Products of integers are exact, and a block's are added up exactly. Blocks are added up in float32, in
// their order. So a row's result depends only on that row, and has the same bits with every instruction set.

#pragma once

#include "kernels.h"
#include "panel_linear.h"
#include "threads.h"
#include "vectors.h"

namespace {

using namespace raycore;

constexpr int kQuad = 4;                  // inputs that a lane of a vector has of a weight in 8 bits
constexpr int64_t kRowBytes = 512 << 10;  // of a task's rows, which stay in a core's second cache

// How a quad of a row is stored.
enum class Form {
  kBytes,      // in 8 bits
  kDigits,     // the four high digits of 8 bits, then the low ones: few rows are multiplied with weights as they are
  kShorts,     // in 16 bits: inputs 0, 2, 1, 3. Weights are widened before they are multiplied
  kShortsOf8,  // the same, of integers of 8 bits
};

constexpr int quad_bytes(Form form) {
  return form == Form::kBytes ? kQuad : kQuad * 2;
}

// Whether blocks have factors: see `IntegerRows`.
constexpr bool has_factors(Form form) {
  return form == Form::kBytes || form == Form::kShortsOf8;
}

constexpr bool is_wide(Form form) {
  return form == Form::kShorts || form == Form::kShortsOf8;
}

// Sums of products: one for each digit.
constexpr int sums_each(Form form) {
  return form == Form::kDigits ? 2 : 1;
}

// What 4 or 8 bits of a weight say of its integer.
enum class Code {
  kMiddle,   // the integer itself; zero is the middle
  kZeros,    // the integer itself; there is a zero for each group
  kOffsets,  // the integer itself; there is an offset for each group, which is added to the scaled integer
  kE2M1,     // which one in `kE2M1Integers`
};
// Twice the numbers of E2M1, plus 12. First those above zero.
constexpr uint8_t kE2M1Integers[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

inline int32_t zero_of(const IntegerLinearArgs& args) {
  return args.is_e2m1 ? kE2M1Integers[0] : 1 << (args.bits - 1);
}

constexpr int kSumBytes = 4;
constexpr int64_t kAheadGroups = 4;  // of scales and offsets that are fetched ahead, with few rows

// The rows of a call in integers. Each row has its quads, then for each block the sum of its integers: times zero, if
// all weights have the same zero; in float32 and times the block's factor, if there are offsets. Rows of 8 bits then have
// a factor in float32 for each block: its scale, or 1 if the row has only one.
struct IntegerRows {
  char* data;
  float* scales;  // 1 if blocks have scales
  int64_t stride, num_blocks, block_inputs, sums_offset, factors_offset;
  int64_t num_groups, group_blocks;  // of a group
};

inline IntegerRows integer_rows(const IntegerLinearArgs& args, Form form) {
  IntegerRows rows;
  rows.block_inputs = integer_block_inputs(args);
  rows.num_blocks = (args.num_inputs + rows.block_inputs - 1) / rows.block_inputs;
  rows.num_groups = (args.num_inputs + args.group_size - 1) / args.group_size;
  rows.group_blocks = (args.group_size + rows.block_inputs - 1) / rows.block_inputs;
  rows.sums_offset = round_up(args.num_inputs, 16) * quad_bytes(form) / kQuad;
  rows.factors_offset = rows.sums_offset + rows.num_blocks * kSumBytes;
  rows.stride = integer_row_bytes(args);
  rows.scales = reinterpret_cast<float*>(args.scratch);
  rows.data = args.scratch + round_up(args.num_rows * sizeof(float), 64);
  return rows;
}

// Writes `kWidth` integers of a row.
inline void store_quads(Ints x, Form form, char* to) {
  typedef int8_t Bytes __attribute__((vector_size(kWidth)));
  if (form == Form::kBytes) {
    const Bytes bytes = __builtin_convertvector(x, Bytes);
    std::memcpy(to, &bytes, sizeof(bytes));
    return;
  }
  if (form == Form::kDigits) {
    const Ints high = (x + 128) >> 8;
    typedef int32_t Quads __attribute__((vector_size(kWidth)));
    const Quads first = bits_of<Quads>(__builtin_convertvector(high, Bytes)),
                second = bits_of<Quads>(__builtin_convertvector(x - (high << 8), Bytes));
#if RAYCORE_WIDTH == 16
    const Quads both[2] = {RAYCORE_SHUFFLE(first, second, 0, 4, 1, 5),
                           RAYCORE_SHUFFLE(first, second, 2, 6, 3, 7)};
    std::memcpy(to, both, sizeof(both));
#else
    for (int i = 0; i < kWidth / kQuad; i++) {
      const int32_t both[2] = {first[i], second[i]};
      std::memcpy(to + i * sizeof(both), both, sizeof(both));
    }
#endif
    return;
  }
  typedef int16_t Shorts __attribute__((vector_size(2 * kWidth)));
  typedef uint64_t Quads __attribute__((vector_size(2 * kWidth)));
  const Quads quads = bits_of<Quads>(__builtin_convertvector(x, Shorts));
  const Quads ordered = (quads & 0xffff00000000ffffull) | ((quads & 0xffff0000ull) << 16) |
                        ((quads >> 16) & 0xffff0000ull);
  std::memcpy(to, &ordered, sizeof(ordered));
}

// The largest size of some of a row's numbers. `poison` becomes NaN if one of them is NaN or infinity.
template <typename T>
inline float largest_of(const T* x, int64_t begin, int64_t end, int64_t num_inputs, Floats& poison) {
  Floats largest = {};
  for (int64_t i = begin; i < end; i += kWidth) {
    const Floats values = load_up_to(x + i, num_inputs - i);
    largest = maximum(values < splat(0.0f) ? -values : values, largest);
    poison += values * splat(0.0f);
  }
  return maximum(largest);
}

// Rounds a row to integers of 8 or 16 bits. A row with NaN or infinity gets a scale of NaN, and so a result of NaN.
template <typename T>
void round_row(const IntegerLinearArgs& args, const IntegerRows& rows, int64_t row, Form form) {
  const T* x = static_cast<const T*>(args.x) + row * args.x_stride;
  const int64_t I = args.num_inputs;
  const float limit = args.row_bits == 16 ? 32639 : 127;  // 127 · 256 + 127: both digits fit in 8 bits
  const float least = 1e-30f;
  const bool has_one_scale = args.row_group_size == I;
  Floats poison = {};
  float most = has_one_scale ? largest_of(x, 0, I, I, poison) : 0;
  Floats factor = splat(most < least ? 0 : limit / most);
  char* data = rows.data + row * rows.stride;
  char *sums = data + rows.sums_offset, *factors = data + rows.factors_offset;
  const int32_t zero = zero_of(args);
  for (int64_t block = 0, i = 0; block < rows.num_blocks; block++) {
    const int64_t end = i + rows.block_inputs < I ? i + rows.block_inputs : I;
    float scale = 1;
    if (!has_one_scale) {
      most = largest_of(x, i, end, I, poison);
      factor = splat(most < least ? 0 : limit / most);
      scale = most / limit;
    }
    Ints total = {};
    for (; i < end; i += kWidth, data += kWidth / kQuad * quad_bytes(form)) {
      const Floats rounded = multiply_add(load_up_to(x + i, I - i), factor, splat(kRounder)) - splat(kRounder);
      const Ints integers = __builtin_convertvector(rounded, Ints);
      store_quads(integers, form, data);
      total += integers;
    }
    int32_t all = 0;
    for (int lane = 0; lane < kWidth; lane++) all += total[lane];
    if (!args.zeros && !args.offsets) all *= zero;
    const float number = all * scale;  // exact without a scale: less than 2^24
    std::memcpy(sums + block * kSumBytes, args.offsets ? static_cast<const void*>(&number) : &all, kSumBytes);
    if (has_factors(form)) std::memcpy(factors + block * kSumBytes, &scale, kSumBytes);
  }
  rows.scales[row] = (has_one_scale ? most / limit : 1) + sum(poison);
}

#ifdef __AVXVNNI__
#define RAYCORE_VNNI_256(NAME) _mm256_##NAME##_avx_epi32
#else  // the same of AVX-512, which tests use on processors without AVX-VNNI
#define RAYCORE_VNNI_256(NAME) _mm256_##NAME##_epi32
#endif

// Adds the products of pairs of weights in 16 bits with a pair of a row.
inline Words add_pair(Words sums, Words weights, const char* x) {
  uint32_t pair;
  std::memcpy(&pair, x, sizeof(pair));
#if defined(RAYCORE_VNNI) && RAYCORE_WIDTH == 8
  return (Words)RAYCORE_VNNI_256(dpwssd)((__m256i)sums, (__m256i)weights, _mm256_set1_epi32(pair));
#elif defined(RAYCORE_VNNI)
  return (Words)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)weights, _mm512_set1_epi32(pair));
#elif RAYCORE_WIDTH == 16
  return sums + (Words)_mm512_madd_epi16((__m512i)weights, _mm512_set1_epi32(pair));
#elif RAYCORE_WIDTH == 8
  return sums + (Words)_mm256_madd_epi16((__m256i)weights, _mm256_set1_epi32(pair));
#else
  const uint32_t first = int16_t(pair), second = int16_t(pair >> 16);
  return sums + (Words)((Ints)(weights << 16) >> 16) * first + (Words)((Ints)weights >> 16) * second;
#endif
}

// Inputs 0 and 2, or 1 and 3, of quads of weights in 8 bits, in 16 bits.
inline Words pair_of(Words quads, int half) {
  return (half ? quads >> 8 : quads) & 0x00ff00ffu;
}

// Adds the products of quads of weights in 8 bits with a quad of a row. Without VNNI, sums are in 16 bits: those of
// inputs 0 and 1, and of 2 and 3.
inline Words add_bytes(Words sums, Words weights, int32_t quad) {
#if defined(RAYCORE_VNNI) && RAYCORE_WIDTH == 16
  return (Words)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, _mm512_set1_epi32(quad));
#elif defined(RAYCORE_VNNI)
  return (Words)RAYCORE_VNNI_256(dpbusd)((__m256i)sums, (__m256i)weights, _mm256_set1_epi32(quad));
#elif RAYCORE_WIDTH == 16
  return (Words)_mm512_add_epi16((__m512i)sums, _mm512_maddubs_epi16((__m512i)weights, _mm512_set1_epi32(quad)));
#elif RAYCORE_WIDTH == 8
  return (Words)_mm256_add_epi16((__m256i)sums, _mm256_maddubs_epi16((__m256i)weights, _mm256_set1_epi32(quad)));
#else
  return sums;  // not used
#endif
}

// The sums of `add_bytes` in 32 bits.
inline Words sums_of_bytes(Words sums) {
#if defined(RAYCORE_VNNI)
  return sums;
#elif RAYCORE_WIDTH == 16
  return (Words)_mm512_madd_epi16((__m512i)sums, _mm512_set1_epi16(1));
#elif RAYCORE_WIDTH == 8
  return (Words)_mm256_madd_epi16((__m256i)sums, _mm256_set1_epi16(1));
#else
  return sums;  // not used
#endif
}

// Adds the products of a quad of weights in 8 bits with a quad of a row.
template <Form form>
inline void add_quads(Words (&sums)[sums_each(form)], Words weights, const char* x) {
  if constexpr (is_wide(form)) {
    for (int half = 0; half < 2; half++) sums[0] = add_pair(sums[0], pair_of(weights, half), x + half * 4);
  } else {
    for (int digit = 0; digit < sums_each(form); digit++) {
      int32_t quad;
      std::memcpy(&quad, x + digit * kQuad, kQuad);
      sums[digit] = add_bytes(sums[digit], weights, quad);
    }
  }
}

template <Form form>
inline Words all_digits(const Words (&sums)[sums_each(form)]) {
  if constexpr (form == Form::kDigits) return (sums[0] << 8) + sums[1];
  else if constexpr (form == Form::kBytes) return sums_of_bytes(sums[0]);
  else return sums[0];
}

// The integers of numbers in E2M1, of which each byte has one in its lower half and zeros in its upper half.
inline Words e2m1_integers(Words numbers) {
#if RAYCORE_WIDTH > 4
  const __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(kE2M1Integers));
#endif
#if RAYCORE_WIDTH == 16
  return (Words)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), (__m512i)numbers);
#elif RAYCORE_WIDTH == 8
  return (Words)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), (__m256i)numbers);
#else
  return bits_of<Words>(vqtbl1q_u8(vld1q_u8(kE2M1Integers), bits_of<uint8x16_t>(numbers)));
#endif
}

// The integers in 8 bits of some words: those of `part` 0 or 1, of words that have two of 4 bits in each byte.
template <int bits, Code code>
inline Words quads_of(Words words, int part) {
  if (bits == 8) return words;
  const Words quads = (part ? words >> 4 : words) & 0x0f0f0f0fu;
  return code == Code::kE2M1 ? e2m1_integers(quads) : quads;
}

inline Words load_zeros(const uint8_t* from) {
  typedef uint8_t Bytes __attribute__((vector_size(kWidth)));
  Bytes zeros;
  std::memcpy(&zeros, from, sizeof(zeros));
  return __builtin_convertvector(zeros, Words);
}

// What a row has of a block: see `IntegerRows`.
template <typename T>
inline T number_at(const char* numbers, int64_t block) {
  T number;
  std::memcpy(&number, numbers + block * kSumBytes, kSumBytes);
  return number;
}

// The results of R rows for P panels, without the rows' scales. They are `results_stride` apart.
template <int bits, Form form, Code code, int R, int P>
void multiply_integers(const IntegerLinearArgs& args, const IntegerRows& rows, int64_t row, int64_t panel,
                       float* results, int64_t results_stride) {
  constexpr int V = P * kVectors;
  constexpr bool fetches = R < 6;  // few rows are bound by memory
  constexpr int inputs_each = kQuad * 8 / bits, word_bytes = kPanelOutputs * kQuad;
  const int64_t I = args.num_inputs, num_groups = rows.num_groups, group_blocks = rows.group_blocks;
  const int64_t panel_bytes = I / inputs_each * word_bytes, x_stride = rows.stride;
  const uint8_t* weight = args.packed + panel * panel_bytes;
  const uint8_t *panel_end = weight + panel_bytes, *ahead = weight + kAheadBytes;
  const char* x = rows.data + row * x_stride;
  const char *x_sums = x + rows.sums_offset, *x_factors = x + rows.factors_offset;
  Floats own[R][V] = {};
  for (int64_t block = 0, group = 0, group_end = group_blocks; block < rows.num_blocks; block++) {
    if (block == group_end) {
      group++;
      group_end += group_blocks;
    }
    const int64_t begin = block * rows.block_inputs;
    const int64_t end = begin + rows.block_inputs < I ? begin + rows.block_inputs : I;
    Words sums[R][V][sums_each(form)];  // cleared and read one by one, so that they stay in registers
    for (int r = 0; r < R; r++)
      for (int v = 0; v < V; v++)
        for (int digit = 0; digit < sums_each(form); digit++) sums[r][v][digit] = Words{};
    for (int64_t i = begin; i < end; i += inputs_each, weight += word_bytes, ahead += word_bytes) {
      Words words[V];
      if constexpr (fetches) {
        if (ahead == panel_end) ahead += (P - 1) * panel_bytes;  // the panels that are read next
        for (int p = 0; p < P; p++) __builtin_prefetch(ahead + p * panel_bytes);
      }
      for (int v = 0; v < V; v++)
        std::memcpy(&words[v],
                    weight + v / kVectors * panel_bytes + v % kVectors * (word_bytes / kVectors),
                    sizeof(Words));
      for (int part = 0; part < 8 / bits; part++, x += quad_bytes(form)) {
        Words quads[V];
        for (int v = 0; v < V; v++) quads[v] = quads_of<bits, code>(words[v], part);
        for (int r = 0; r < R; r++)
          for (int v = 0; v < V; v++) add_quads<form>(sums[r][v], quads[v], x + r * x_stride);
      }
    }
    for (int v = 0; v < V; v++) {
      const int64_t of_outputs = ((panel + v / kVectors) * num_groups + group) * kPanelOutputs +
                                 v % kVectors * kWidth;
      if (fetches && v % kVectors == 0) {
        const int64_t next = group + kAheadGroups < num_groups ? 0 : (P - 1) * num_groups;
        const int64_t later = of_outputs + (kAheadGroups + next) * kPanelOutputs;
        __builtin_prefetch(args.scales + later);
        if constexpr (code == Code::kOffsets) __builtin_prefetch(args.offsets + later);
      }
      const Floats scales = load(args.scales + of_outputs);
      Words zeros;
      if constexpr (code == Code::kZeros) zeros = load_zeros(args.zeros + of_outputs);
      Floats offsets;
      if constexpr (code == Code::kOffsets) offsets = load(args.offsets + of_outputs);
      for (int r = 0; r < R; r++) {
        const uint32_t x_sum = number_at<uint32_t>(x_sums + r * x_stride, block);
        Words exact = all_digits<form>(sums[r][v]);
        if constexpr (code == Code::kZeros) exact -= zeros * x_sum;
        else if constexpr (code != Code::kOffsets) exact -= x_sum;
        Floats products = __builtin_convertvector(bits_of<Ints>(exact), Floats);
        if constexpr (has_factors(form)) products *= splat(number_at<float>(x_factors + r * x_stride, block));
        own[r][v] = multiply_add(products, scales, own[r][v]);
        if constexpr (code == Code::kOffsets)
          own[r][v] = multiply_add(splat(bits_of<float>(x_sum)), offsets, own[r][v]);
      }
    }
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) store(results + r * results_stride + v * kWidth, own[r][v]);
}

template <int value>
using Int = std::integral_constant<int, value>;

// So many rows' and panels' sums fit in the registers.
constexpr int integer_rows_at_once(Form form) {
  if (kWidth == 16) return is_wide(form) ? 12 : 6;
  return form == Form::kDigits ? 3 : form == Form::kBytes ? 6 : 4;
}
// Fewer rows are computed in another form.
constexpr int least_integer_rows(Form form) {
#ifdef RAYCORE_VNNI
  if (form == Form::kShorts) return integer_rows_at_once(Form::kDigits) + 1;
#endif
  return 1;
}
constexpr int kIntegerPanels = kWidth == 16 ? 2 : 1;
// Rows at once of a single panel: where panels are multiplied in pairs, the last one of an odd number.
constexpr int single_panel_rows(Form form) {
  return kWidth == 16 ? 4 : integer_rows_at_once(form);
}
// With fewer rows, more panels are read side by side: see panel_linear.h.
constexpr int kFewIntegerRows = kWidth == 16 ? 2 : 1;
#if RAYCORE_WIDTH == 8 && !defined(RAYCORE_VNNI)
constexpr int kFewRowsPanels = 8;
#else
constexpr int kFewRowsPanels = kWidth == 4 ? 2 : 4;
#endif

// `num_rows`: `least` to R.
template <int bits, Form form, Code code, int P, int R, int least = 1>
inline void multiply_some_integers(int64_t num_rows, const IntegerLinearArgs& args, const IntegerRows& rows,
                                   int64_t row, int64_t panel, float* results, int64_t results_stride) {
  if (num_rows >= R)
    multiply_integers<bits, form, code, R, P>(args, rows, row, panel, results, results_stride);
  else if constexpr (R > least)
    multiply_some_integers<bits, form, code, P, R - 1, least>(num_rows, args, rows, row, panel, results,
                                                              results_stride);
}

// Stores the results of some rows, which are `results_stride` apart, for some panels.
template <typename T>
void store_integer_results(const IntegerLinearArgs& args, const IntegerRows& rows, int64_t row, int64_t num_rows,
                           int64_t panel, int64_t num_panels, const float* results, int64_t results_stride) {
  with_gate<kNoGate>(args.gate, [&](auto kind) {
    for (int64_t r = 0; r < num_rows; r++)
      store_results<T, decltype(kind)::value>(args, row + r, panel, panel + num_panels, [&](int64_t i) {
        return load(results + r * results_stride + i) * splat(rows.scales[row + r]);
      });
  });
}

using RoundRow = void (*)(const IntegerLinearArgs&, const IntegerRows&, int64_t row, Form form);
using StoreResults = void (*)(const IntegerLinearArgs&, const IntegerRows&, int64_t row, int64_t num_rows,
                              int64_t panel, int64_t num_panels, const float* results, int64_t results_stride);

// What depends on the type of the rows. So the rest is compiled once for all types.
struct RowFunctions {
  RoundRow round;
  StoreResults store;
};

template <int bits, Form form, Code code>
void multiply_integer_panels(const IntegerLinearArgs& args, const IntegerRows& rows, StoreResults store,
                             int64_t first_row, int64_t last_row, int64_t first_panel, int64_t last_panel) {
  constexpr int64_t stride = kFewRowsPanels * kPanelOutputs;
  constexpr int most_rows = integer_rows_at_once(form);
  alignas(64) float results[most_rows * stride];
  const bool are_few = last_row - first_row <= kFewIntegerRows;
  const int64_t step = are_few ? kFewRowsPanels : 2;
  for (int64_t panel = first_panel; panel < last_panel; panel += step) {
    const int64_t num_panels = last_panel - panel < step ? last_panel - panel : step;
    for (int64_t row = first_row; row < last_row; row += most_rows) {
      const int64_t num_rows = last_row - row < most_rows ? last_row - row : most_rows;
      for (int64_t i = 0; i < num_panels;) {
        const auto multiply = [&](auto panels, auto rows_at_once, auto least_rows) {
          constexpr int P = decltype(panels)::value, R = decltype(rows_at_once)::value;
          constexpr int least = decltype(least_rows)::value;
          for (int64_t r = 0; r < num_rows; r += R)
            multiply_some_integers<bits, form, code, P, R, least>(num_rows - r < R ? num_rows - r : R, args, rows,
                                                                  row + r, panel + i,
                                                                  results + r * stride + i * kPanelOutputs, stride);
          i += P;
        };
        if (are_few && num_panels - i >= kFewRowsPanels)
          multiply(Int<kFewRowsPanels>(), Int<kFewIntegerRows>(), Int<1>());
        else if (kIntegerPanels > 1 && num_panels - i >= kIntegerPanels)
          multiply(Int<kIntegerPanels>(), Int<most_rows>(), Int<least_integer_rows(form)>());
        else multiply(Int<1>(), Int<single_panel_rows(form)>(), Int<1>());
      }
      store(args, rows, row, num_rows, panel, num_panels, results, stride);
    }
  }
}

constexpr int kWideRows = kWidth == 16 ? 8 : 6;  // whose sums fit in the registers, beside weights and a row's pair
constexpr int64_t kMaxWideRows = 120;            // of a task: their results stay in a core's first cache

// What many rows share of P panels: the weights of up to kMaxBlockInputs inputs in 16 bits, without their zeros. A pair
// of inputs has V vectors.
template <int P>
struct WideWeights {
  static constexpr int V = P * kVectors;
  int64_t panel, first_block, last_block;
  alignas(64) Words pairs[kMaxBlockInputs / 2 * V];
};

template <int bits, Code code, int P>
void widen_integers(const IntegerLinearArgs& args, const IntegerRows& rows, WideWeights<P>& wide) {
  typedef uint16_t Halves __attribute__((vector_size(sizeof(Words))));
  constexpr int V = WideWeights<P>::V, inputs_each = kQuad * 8 / bits, word_bytes = kPanelOutputs * kQuad;
  const int64_t I = args.num_inputs, panel_bytes = I / inputs_each * word_bytes;
  Words* to = wide.pairs;
  for (int64_t block = wide.first_block; block < wide.last_block; block++) {
    const int64_t begin = block * rows.block_inputs;
    const int64_t end = begin + rows.block_inputs < I ? begin + rows.block_inputs : I;
    Words zeros[V];
    for (int v = 0; v < V; v++) {
      zeros[v] = Words{} + uint32_t(code == Code::kOffsets ? 0 : zero_of(args));
      if constexpr (code == Code::kZeros)
        zeros[v] = load_zeros(args.zeros + (wide.panel + v / kVectors) * rows.num_groups * kPanelOutputs +
                              block / rows.group_blocks * kPanelOutputs + v % kVectors * kWidth);
      zeros[v] |= zeros[v] << 16;
    }
    for (int64_t i = begin; i < end; i += inputs_each)
      for (int v = 0; v < V; v++) {
        Words words;
        std::memcpy(&words,
                    args.packed + (wide.panel + v / kVectors) * panel_bytes + i / inputs_each * word_bytes +
                        v % kVectors * (word_bytes / kVectors),
                    sizeof(words));
        for (int part = 0; part < 8 / bits; part++)
          for (int half = 0; half < 2; half++)
            to[((i - begin) / 2 + part * 2 + half) * V + v] = bits_of<Words>(
                bits_of<Halves>(pair_of(quads_of<bits, code>(words, part), half)) - bits_of<Halves>(zeros[v]));
      }
    to += (end - begin) / 2 * V;
  }
}

// Calls function(Int<0>()) to function(Int<count - 1>()). Of arrays whose indices are constants from the start,
// compilers keep all elements in registers.
template <int count, int done = 0, typename Function>
inline __attribute__((always_inline)) void repeat(const Function& function) {
  if constexpr (done < count) {
    function(Int<done>());
    repeat<count, done + 1>(function);
  }
}

// Adds the products of R rows with widened weights to their results, which are `results_stride` apart.
template <Form form, bool has_offsets, int P, int R>
void add_wide_products(const IntegerLinearArgs& args, const IntegerRows& rows, int64_t row, const WideWeights<P>& wide,
                       float* results, int64_t results_stride) {
  constexpr int V = WideWeights<P>::V;
  const int64_t I = args.num_inputs, x_stride = rows.stride;
  const char* x = rows.data + row * x_stride + wide.first_block * rows.block_inputs * 2;
  const char* x_sums = rows.data + row * x_stride + rows.sums_offset;
  const char* x_factors = rows.data + row * x_stride + rows.factors_offset;
  const Words* weights = wide.pairs;
  const int64_t first_group = wide.first_block / rows.group_blocks;
  int64_t group = wide.panel * rows.num_groups + first_group, group_end = (first_group + 1) * rows.group_blocks;
  for (int64_t block = wide.first_block; block < wide.last_block; block++) {
    if (block == group_end) {
      group++;
      group_end += rows.group_blocks;
    }
    const int64_t begin = block * rows.block_inputs;
    const int64_t end = begin + rows.block_inputs < I ? begin + rows.block_inputs : I;
    Words sums[R][V];
    repeat<R>([&](auto r) { repeat<V>([&](auto v) { sums[r][v] = Words{}; }); });
    for (int64_t i = begin; i < end; i += 2, weights += V, x += 4)
      repeat<R>([&](auto r) {
        repeat<V>([&](auto v) { sums[r][v] = add_pair(sums[r][v], weights[v], x + r * x_stride); });
      });
    asm volatile("" ::: "memory");  // or compilers would keep copies of all results from one block to the next
    repeat<V>([&](auto v) {
      const int64_t of_outputs = (group + v / kVectors * rows.num_groups) * kPanelOutputs + v % kVectors * kWidth;
      const Floats scales = load(args.scales + of_outputs);
      Floats offsets;
      if constexpr (has_offsets) offsets = load(args.offsets + of_outputs);
      repeat<R>([&](auto r) {
        float* result = results + r * results_stride + v * kWidth;
        Floats products = __builtin_convertvector(bits_of<Ints>(sums[r][v]), Floats);
        if constexpr (has_factors(form)) products *= splat(number_at<float>(x_factors + r * x_stride, block));
        Floats own = multiply_add(products, scales, load(result));
        if constexpr (has_offsets)
          own = multiply_add(splat(number_at<float>(x_sums + r * x_stride, block)), offsets, own);
        store(result, own);
      });
    });
  }
}

template <Form form, bool has_offsets, int P, int R = kWideRows>
inline void add_some_wide_products(int64_t num_rows, const IntegerLinearArgs& args, const IntegerRows& rows,
                                   int64_t row, const WideWeights<P>& wide, float* results, int64_t results_stride) {
  if (num_rows >= R)
    add_wide_products<form, has_offsets, P, R>(args, rows, row, wide, results, results_stride);
  else if constexpr (R > 1)
    add_some_wide_products<form, has_offsets, P, R - 1>(num_rows, args, rows, row, wide, results, results_stride);
}

template <int bits, Form form, Code code>
void multiply_wide_panels(const IntegerLinearArgs& args, const IntegerRows& rows, StoreResults store,
                          int64_t first_row, int64_t last_row, int64_t first_panel, int64_t last_panel) {
  constexpr int64_t stride = 2 * kPanelOutputs;
  alignas(64) float results[kMaxWideRows * stride];
  const int64_t num_rows = last_row - first_row, num_groups = (num_rows + kWideRows - 1) / kWideRows;
  const int64_t group_rows = (num_rows + num_groups - 1) / num_groups;
  const int64_t chunk_blocks = kMaxBlockInputs / rows.block_inputs;
  for (int64_t panel = first_panel; panel < last_panel; panel += 2) {
    const int64_t num_panels = last_panel - panel < 2 ? last_panel - panel : 2;
    std::memset(results, 0, num_rows * stride * sizeof(float));
    const auto add = [&](auto panels, int64_t i, int64_t first_block, int64_t last_block) {
      constexpr int P = decltype(panels)::value;
      WideWeights<P> wide;
      wide.panel = panel + i;
      wide.first_block = first_block;
      wide.last_block = last_block;
      widen_integers<bits, code, P>(args, rows, wide);
      for (int64_t r = 0; r < num_rows; r += group_rows)
        add_some_wide_products<form, code == Code::kOffsets, P>(
            num_rows - r < group_rows ? num_rows - r : group_rows, args, rows, first_row + r, wide,
            results + r * stride + i * kPanelOutputs, stride);
    };
    for (int64_t block = 0; block < rows.num_blocks; block += chunk_blocks) {
      const int64_t end = block + chunk_blocks < rows.num_blocks ? block + chunk_blocks : rows.num_blocks;
      if (num_panels == kIntegerPanels) add(Int<kIntegerPanels>(), 0, block, end);
      else
        for (int64_t i = 0; i < num_panels; i++) add(Int<1>(), i, block, end);
    }
    store(args, rows, first_row, num_rows, panel, num_panels, results, stride);
  }
}

template <int bits, Form form, Code code>
void integer_linear_of(const IntegerLinearArgs& args, const RowFunctions& functions, const Threads& threads) {
  const IntegerRows rows = integer_rows(args, form);
  for_rows(args.num_rows, rows_per_thread(args.num_inputs), threads,
           [&](int64_t row) { functions.round(args, rows, row, form); });
  const bool widens = is_wide(form) && args.num_rows > integer_rows_at_once(form);
  const int64_t rows_at_once = widens ? kWideRows : integer_rows_at_once(form);
  const int64_t num_pairs = (args.num_outputs + 2 * kPanelOutputs - 1) / (2 * kPanelOutputs);
  const int64_t num_panels = panels_of(args.num_outputs);
  int64_t max_rows = kRowBytes / rows.stride / rows_at_once * rows_at_once;
  if (max_rows < rows_at_once) max_rows = rows_at_once;
  if (widens && max_rows > kMaxWideRows) max_rows = kMaxWideRows;
  const int64_t num_blocks = (args.num_rows + max_rows - 1) / max_rows;
  const int64_t block_rows = round_up((args.num_rows + num_blocks - 1) / num_blocks, rows_at_once);
  const int64_t rows_each = args.num_rows < block_rows ? args.num_rows : block_rows;
  // eight products are computed in a cycle for each of a vector's lanes, or four of 16 bits, or 8 bytes are read
  const int64_t pair_cycles = args.num_inputs * (rows_each * args.row_bits / 8 * kVectors / 2 + bits / 2);
  const int64_t even_pairs = num_pairs * num_blocks / (kTasksEach * threads.count);
  const int64_t least_pairs = kLeastCycles / pair_cycles + 1;
  const int64_t multiple = panels_each(num_panels, rows_each <= kFewIntegerRows ? kFewRowsPanels : 2, threads) / 2;
  const int64_t task_pairs = round_up(even_pairs > least_pairs ? even_pairs : least_pairs, multiple);
  const int64_t tasks_each = (num_pairs + task_pairs - 1) / task_pairs;
  share(num_blocks * tasks_each, threads, [&](int64_t task) {
    const int64_t first_row = task / tasks_each * block_rows, first_panel = task % tasks_each * task_pairs * 2;
    const int64_t last_row = first_row + block_rows < args.num_rows ? first_row + block_rows : args.num_rows;
    const int64_t last_panel = first_panel + task_pairs * 2 < num_panels ? first_panel + task_pairs * 2 : num_panels;
    auto multiply = multiply_integer_panels<bits, form, code>;
    if constexpr (is_wide(form))
      if (widens) multiply = multiply_wide_panels<bits, form, code>;
    multiply(args, rows, functions.store, first_row, last_row, first_panel, last_panel);
  });
}

template <int bits, Form form>
void integer_linear_of(const IntegerLinearArgs& args, const RowFunctions& functions, const Threads& threads) {
  if constexpr (bits == 4)
    if (args.is_e2m1) return integer_linear_of<bits, form, Code::kE2M1>(args, functions, threads);
  if (args.offsets) integer_linear_of<bits, form, Code::kOffsets>(args, functions, threads);
  else if (args.zeros) integer_linear_of<bits, form, Code::kZeros>(args, functions, threads);
  else integer_linear_of<bits, form, Code::kMiddle>(args, functions, threads);
}

template <Form form>
void integer_linear_of(const IntegerLinearArgs& args, const RowFunctions& functions, const Threads& threads) {
  if (args.bits == 4) integer_linear_of<4, form>(args, functions, threads);
  else integer_linear_of<8, form>(args, functions, threads);
}

template <typename T>
void integer_linear(const IntegerLinearArgs& args, const Threads& threads) {
  if (args.num_rows == 0) return;
  constexpr RowFunctions functions = {round_row<T>, store_integer_results<T>};
#ifdef RAYCORE_VNNI
  if (args.row_bits == 8) return integer_linear_of<Form::kBytes>(args, functions, threads);
  if (args.num_rows <= integer_rows_at_once(Form::kDigits))
    return integer_linear_of<Form::kDigits>(args, functions, threads);
#else
#if RAYCORE_WIDTH > 4
  // a block's sums of `add_bytes` fit in 16 bits: 32 / 4 · 2 · 15 · 127 < 2^15
  if (args.row_bits == 8 && args.bits == 4 && !args.is_e2m1 && integer_block_inputs(args) <= 32)
    return integer_linear_of<4, Form::kBytes>(args, functions, threads);
#endif
  if (args.row_bits == 8) return integer_linear_of<Form::kShortsOf8>(args, functions, threads);
#endif
  integer_linear_of<Form::kShorts>(args, functions, threads);
}

}  // namespace
