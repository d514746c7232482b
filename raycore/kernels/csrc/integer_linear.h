// A linear layer whose weight has integers of 4 or 8 bits, or numbers of 4 bits that stand for integers, in panels of 16
// outputs.
//
// Each row is rounded to integers of 8 or 16 bits, with a scale of its own. Products of integers are exact, and those of
// a block of inputs are added up exactly. Blocks are added up in float32, in their order. So a row's result depends
// only on that row, and has the same bits with every instruction set.

#pragma once

#include "kernels.h"
#include "panel_linear.h"
#include "threads.h"
#include "vectors.h"

namespace {

using namespace raycore;

constexpr int kQuad = 4;                  // inputs that a lane of a vector has of a weight in 8 bits
constexpr int64_t kRowBytes = 512 << 10;  // of a task's rows, which stay in a core's second cache

#ifdef RAYCORE_VNNI
// A quad of a row is stored as its digits: four of the high ones, if there are two, and four of the low ones.
constexpr int quad_bytes(int digits) {
  return kQuad * digits;
}
constexpr int kSumsEach = 2;  // of products: one for each digit
#else
// A quad of a row is stored in 16 bits each: inputs 0, 2, 1, 3.
constexpr int quad_bytes(int) {
  return kQuad * 2;
}
constexpr int kSumsEach = 1;
#endif

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
// all weights have the same zero, and in float32, if there are offsets.
struct IntegerRows {
  char* data;
  float* scales;
  int64_t stride, num_blocks, block_inputs, sums_offset;
};

inline IntegerRows integer_rows(const IntegerLinearArgs& args) {
  IntegerRows rows;
  rows.block_inputs = args.group_size < kMaxBlockInputs ? args.group_size : kMaxBlockInputs;
  rows.num_blocks = (args.num_inputs + rows.block_inputs - 1) / rows.block_inputs;
  rows.sums_offset = round_up(args.num_inputs, 16) * 2;
  rows.stride = integer_row_bytes(args.num_inputs, args.group_size);
  rows.scales = reinterpret_cast<float*>(args.scratch);
  rows.data = args.scratch + round_up(args.num_rows * sizeof(float), 64);
  return rows;
}

// Writes `kWidth` integers of a row.
inline void store_quads(Ints x, int digits, char* to) {
#ifdef RAYCORE_VNNI
  typedef int8_t Bytes __attribute__((vector_size(kWidth)));
  const Ints high = (x + 128) >> 8;
  const Bytes parts[2] = {__builtin_convertvector(digits == 2 ? high : x, Bytes),
                          __builtin_convertvector(x - (high << 8), Bytes)};
  if (digits == 1) {
    std::memcpy(to, parts, sizeof(Bytes));
    return;
  }
  typedef int32_t Quads __attribute__((vector_size(kWidth)));
  const Quads first = bits_of<Quads>(parts[0]), second = bits_of<Quads>(parts[1]);
  const Quads both[2] = {RAYCORE_SHUFFLE(first, second, 0, 4, 1, 5),
                         RAYCORE_SHUFFLE(first, second, 2, 6, 3, 7)};
  std::memcpy(to, both, sizeof(both));
#else
  typedef int16_t Shorts __attribute__((vector_size(2 * kWidth)));
  typedef uint64_t Quads __attribute__((vector_size(2 * kWidth)));
  const Quads quads = bits_of<Quads>(__builtin_convertvector(x, Shorts));
  const Quads ordered = (quads & 0xffff00000000ffffull) | ((quads & 0xffff0000ull) << 16) |
                        ((quads >> 16) & 0xffff0000ull);
  std::memcpy(to, &ordered, sizeof(ordered));
#endif
}

// Rounds a row to integers of 8 bits, or of 16 bits if there are two digits. A row with NaN or infinity gets a scale of
// NaN, and so a result of NaN.
template <typename T>
void round_row(const IntegerLinearArgs& args, const IntegerRows& rows, int64_t row, int digits) {
  const T* x = static_cast<const T*>(args.x) + row * args.x_stride;
  const int64_t I = args.num_inputs;
  Floats largest = {}, poison = {};
  for (int64_t i = 0; i < I; i += kWidth) {
    const Floats values = load_up_to(x + i, I - i);
    largest = maximum(values < splat(0.0f) ? -values : values, largest);
    poison += values * splat(0.0f);
  }
  const float limit = digits == 2 ? 32639 : 127;  // 127 · 256 + 127: both digits fit in 8 bits
  const float most = maximum(largest), least = 1e-30f;
  const Floats factor = splat(most < least ? 0 : limit / most);
  rows.scales[row] = most / limit + sum(poison);
  char* data = rows.data + row * rows.stride;
  char* sums = data + rows.sums_offset;
  const int32_t zero = zero_of(args);
  for (int64_t block = 0, i = 0; block < rows.num_blocks; block++) {
    const int64_t end = i + rows.block_inputs < I ? i + rows.block_inputs : I;
    Ints total = {};
    for (; i < end; i += kWidth, data += kWidth / kQuad * quad_bytes(digits)) {
      const Floats rounded = multiply_add(load_up_to(x + i, I - i), factor, splat(kRounder)) - splat(kRounder);
      const Ints integers = __builtin_convertvector(rounded, Ints);
      store_quads(integers, digits, data);
      total += integers;
    }
    int32_t all = 0;
    for (int lane = 0; lane < kWidth; lane++) all += total[lane];
    if (!args.zeros && !args.offsets) all *= zero;
    const float number = all;  // exact: less than 2^24
    std::memcpy(sums + block * kSumBytes, args.offsets ? static_cast<const void*>(&number) : &all, kSumBytes);
  }
}

// Adds the products of a quad of weights in 8 bits with a quad of a row.
template <int digits>
inline void add_quads(Words (&sums)[kSumsEach], Words weights, const char* x) {
#ifdef RAYCORE_VNNI
  for (int digit = 0; digit < digits; digit++) {
    int32_t quad;
    std::memcpy(&quad, x + digit * kQuad, kQuad);
    sums[digit] = (Words)_mm512_dpbusd_epi32((__m512i)sums[digit], (__m512i)weights, _mm512_set1_epi32(quad));
  }
#elif RAYCORE_WIDTH > 4
  for (int half = 0; half < 2; half++) {
    uint32_t pair;
    std::memcpy(&pair, x + half * 4, 4);
    const Words two = (half ? weights >> 8 : weights) & 0x00ff00ffu;
#if RAYCORE_WIDTH == 16
    sums[0] += (Words)_mm512_madd_epi16((__m512i)two, _mm512_set1_epi32(pair));
#else
    sums[0] += (Words)_mm256_madd_epi16((__m256i)two, _mm256_set1_epi32(pair));
#endif
  }
#else
  int16_t quad[kQuad];
  std::memcpy(quad, x, sizeof(quad));
  const int order[kQuad] = {0, 2, 1, 3};
  for (int i = 0; i < kQuad; i++) sums[0] += (weights >> (8 * order[i]) & 0xff) * uint32_t(int32_t(quad[i]));
#endif
}

template <int digits>
inline Words all_digits(const Words (&sums)[kSumsEach]) {
#ifdef RAYCORE_VNNI
  return digits == 2 ? (sums[0] << 8) + sums[1] : sums[0];
#else
  return sums[0];
#endif
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

inline Words load_zeros(const uint8_t* from) {
  typedef uint8_t Bytes __attribute__((vector_size(kWidth)));
  Bytes zeros;
  std::memcpy(&zeros, from, sizeof(zeros));
  return __builtin_convertvector(zeros, Words);
}

// The results of R rows for P panels, without the rows' scales. They are `results_stride` apart.
template <int bits, int digits, Code code, int R, int P>
void multiply_integers(const IntegerLinearArgs& args, const IntegerRows& rows, int64_t row, int64_t panel,
                       float* results, int64_t results_stride) {
  constexpr int V = P * kVectors;
  constexpr bool fetches = R < 6;  // few rows are bound by memory
  constexpr int inputs_each = kQuad * 8 / bits, word_bytes = kPanelOutputs * kQuad;
  const int64_t I = args.num_inputs, num_groups = (I + args.group_size - 1) / args.group_size;
  const int64_t group_blocks = (args.group_size + rows.block_inputs - 1) / rows.block_inputs;
  const int64_t panel_bytes = I / inputs_each * word_bytes, x_stride = rows.stride;
  const uint8_t* weight = args.packed + panel * panel_bytes;
  const uint8_t *panel_end = weight + panel_bytes, *ahead = weight + kAheadBytes;
  const char* x = rows.data + row * x_stride;
  const char* x_sums = x + rows.sums_offset;
  Floats own[R][V] = {};
  for (int64_t block = 0, group = 0, group_end = group_blocks; block < rows.num_blocks; block++) {
    if (block == group_end) {
      group++;
      group_end += group_blocks;
    }
    const int64_t begin = block * rows.block_inputs;
    const int64_t end = begin + rows.block_inputs < I ? begin + rows.block_inputs : I;
    Words sums[R][V][kSumsEach];  // cleared and read one by one, so that they stay in registers
    for (int r = 0; r < R; r++)
      for (int v = 0; v < V; v++)
        for (int digit = 0; digit < kSumsEach; digit++) sums[r][v][digit] = Words{};
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
      for (int part = 0; part < 8 / bits; part++, x += quad_bytes(digits)) {
        Words quads[V];
        for (int v = 0; v < V; v++) quads[v] = bits == 8 ? words[v] : (part ? words[v] >> 4 : words[v]) & 0x0f0f0f0fu;
        if constexpr (code == Code::kE2M1)
          for (int v = 0; v < V; v++) quads[v] = e2m1_integers(quads[v]);
        for (int r = 0; r < R; r++)
          for (int v = 0; v < V; v++) add_quads<digits>(sums[r][v], quads[v], x + r * x_stride);
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
        uint32_t x_sum;
        std::memcpy(&x_sum, x_sums + r * x_stride + block * kSumBytes, kSumBytes);
        Words exact = all_digits<digits>(sums[r][v]);
        if constexpr (code == Code::kZeros) exact -= zeros * x_sum;
        else if constexpr (code != Code::kOffsets) exact -= x_sum;
        own[r][v] = multiply_add(__builtin_convertvector(bits_of<Ints>(exact), Floats), scales, own[r][v]);
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
constexpr int kIntegerRows = kWidth == 16 ? (kSumsEach == 2 ? 6 : 12) : 4;
constexpr int kIntegerPanels = kWidth == 16 ? 2 : 1;
// With fewer rows, more panels are read side by side: see panel_linear.h.
constexpr int kFewIntegerRows = kWidth == 16 ? 2 : 1;
constexpr int kFewRowsPanels = kWidth == 16 ? 4 : kWidth == 8 ? 8 : 2;

template <int bits, int digits, Code code, int P, int R = kIntegerRows>
inline void multiply_some_integers(int64_t num_rows, const IntegerLinearArgs& args, const IntegerRows& rows,
                                   int64_t row, int64_t panel, float* results, int64_t results_stride) {
  if (num_rows >= R)
    multiply_integers<bits, digits, code, R, P>(args, rows, row, panel, results, results_stride);
  else if constexpr (R > 1)
    multiply_some_integers<bits, digits, code, P, R - 1>(num_rows, args, rows, row, panel, results, results_stride);
}

template <typename T, int bits, int digits, Code code>
void multiply_integer_panels(const IntegerLinearArgs& args, const IntegerRows& rows, int64_t first_row,
                             int64_t last_row, int64_t first_panel, int64_t last_panel) {
  constexpr int64_t stride = kFewRowsPanels * kPanelOutputs;
  alignas(64) float results[kIntegerRows * stride];
  const bool are_few = last_row - first_row <= kFewIntegerRows;
  const int64_t step = are_few ? kFewRowsPanels : 2;
  for (int64_t panel = first_panel; panel < last_panel; panel += step) {
    const int64_t num_panels = last_panel - panel < step ? last_panel - panel : step;
    for (int64_t row = first_row; row < last_row; row += kIntegerRows) {
      const int64_t num_rows = last_row - row < kIntegerRows ? last_row - row : kIntegerRows;
      for (int64_t i = 0; i < num_panels;) {
        const auto multiply = [&](auto panels, auto most_rows) {
          constexpr int P = decltype(panels)::value, R = decltype(most_rows)::value;
          multiply_some_integers<bits, digits, code, P, R>(num_rows, args, rows, row, panel + i,
                                                           results + i * kPanelOutputs, stride);
          i += P;
        };
        if (are_few && num_panels - i >= kFewRowsPanels) multiply(Int<kFewRowsPanels>(), Int<kFewIntegerRows>());
        else if (num_panels - i >= kIntegerPanels) multiply(Int<kIntegerPanels>(), Int<kIntegerRows>());
        else multiply(Int<1>(), Int<kIntegerRows>());
      }
      with_gate<kNoGate>(args.gate, [&](auto kind) {
        for (int64_t r = 0; r < num_rows; r++)
          store_results<T, decltype(kind)::value>(args, row + r, panel, panel + num_panels, [&](int64_t i) {
            return load(results + r * stride + i) * splat(rows.scales[row + r]);
          });
      });
    }
  }
}

template <typename T, int bits, int digits, Code code>
void integer_linear_of(const IntegerLinearArgs& args, const Threads& threads) {
  const IntegerRows rows = integer_rows(args);
  for_rows(args.num_rows, rows_per_thread(args.num_inputs), threads,
           [&](int64_t row) { round_row<T>(args, rows, row, digits); });
  const int64_t num_pairs = (args.num_outputs + 2 * kPanelOutputs - 1) / (2 * kPanelOutputs);
  const int64_t num_panels = panels_of(args.num_outputs);
  const int64_t fitting_rows = kRowBytes / rows.stride / kIntegerRows * kIntegerRows;
  const int64_t max_rows = fitting_rows < kIntegerRows ? kIntegerRows : fitting_rows;
  const int64_t num_blocks = (args.num_rows + max_rows - 1) / max_rows;
  const int64_t block_rows = round_up((args.num_rows + num_blocks - 1) / num_blocks, kIntegerRows);
  const int64_t rows_each = args.num_rows < block_rows ? args.num_rows : block_rows;
  // a quad of each digit is multiplied in a cycle, or 8 bytes are read
  const int64_t pair_cycles = args.num_inputs * (rows_each * digits * kVectors / 2 + bits / 2);
  const int64_t even_pairs = num_pairs * num_blocks / (kTasksEach * threads.count);
  const int64_t least_pairs = kLeastCycles / pair_cycles + 1;
  const int64_t multiple = panels_each(num_panels, rows_each <= kFewIntegerRows ? kFewRowsPanels : 2, threads) / 2;
  const int64_t task_pairs = round_up(even_pairs > least_pairs ? even_pairs : least_pairs, multiple);
  const int64_t tasks_each = (num_pairs + task_pairs - 1) / task_pairs;
  share(num_blocks * tasks_each, threads, [&](int64_t task) {
    const int64_t first_row = task / tasks_each * block_rows, first_panel = task % tasks_each * task_pairs * 2;
    const int64_t last_row = first_row + block_rows < args.num_rows ? first_row + block_rows : args.num_rows;
    const int64_t last_panel = first_panel + task_pairs * 2 < num_panels ? first_panel + task_pairs * 2 : num_panels;
    multiply_integer_panels<T, bits, digits, code>(args, rows, first_row, last_row, first_panel, last_panel);
  });
}

template <typename T, int bits, int digits>
void integer_linear_of(const IntegerLinearArgs& args, const Threads& threads) {
  if constexpr (bits == 4)
    if (args.is_e2m1) return integer_linear_of<T, bits, digits, Code::kE2M1>(args, threads);
  if (args.offsets) integer_linear_of<T, bits, digits, Code::kOffsets>(args, threads);
  else if (args.zeros) integer_linear_of<T, bits, digits, Code::kZeros>(args, threads);
  else integer_linear_of<T, bits, digits, Code::kMiddle>(args, threads);
}

template <typename T>
void integer_linear(const IntegerLinearArgs& args, const Threads& threads) {
  if (args.num_rows == 0) return;
  if (args.bits == 4)
    args.row_bits == 8 ? integer_linear_of<T, 4, 1>(args, threads) : integer_linear_of<T, 4, 2>(args, threads);
  else
    args.row_bits == 8 ? integer_linear_of<T, 8, 1>(args, threads) : integer_linear_of<T, 8, 2>(args, threads);
}

}  // namespace
