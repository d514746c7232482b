// A linear layer whose weight has numbers in 8 bits, in the floating-point format E4M3, in panels of 16 outputs, and a
// scale for each group of inputs.
//
// Numbers are multiplied with their scales as they are read, and rounded to float32 once. So results have the bits of
// panel_linear.h with that weight in float32. A row's result depends only on that row.

#pragma once

#include "kernels.h"
#include "panel_linear.h"
#include "threads.h"
#include "vectors.h"

namespace {

using namespace raycore;

constexpr int kFloat8Panels = kManyPanels;    // that are computed together: gates and what they gate are among them
constexpr int64_t kFloat8Inputs = 64;         // whose numbers are widened before many rows are multiplied with them
constexpr int64_t kFloat8FewInputs = 1024;    // of few rows that are copied at a time
constexpr int kFloat8FewRows = kWidth == 16 ? 4 : 2;  // few rows are multiplied with numbers in registers
constexpr int64_t kFloat8MaxRows = 96;        // of a task: their sums stay in a core's second cache
constexpr int64_t kFloat8Unrolled = 4;        // inputs of a panel in a line of the cache; groups are a multiple
constexpr float kFloat8Factor = 256.0f;       // by which `load_float8` has numbers too small

// Numbers in E4M3, divided by kFloat8Factor: as the upper bits of numbers in float16, whose exponents are so much less.
// NaN becomes another number.
inline Floats load_float8(const uint8_t* from) {
  typedef uint8_t Bytes __attribute__((vector_size(kWidth)));
  typedef int16_t Shorts __attribute__((vector_size(2 * kWidth)));
  Bytes bytes;
  std::memcpy(&bytes, from, sizeof(bytes));
  const Halves high = __builtin_convertvector(bytes, Halves) << 8;
  const Halves halves = bits_of<Halves>(bits_of<Shorts>(high) >> 1) & 0xbf80;  // the sign, and seven bits after a zero
#if RAYCORE_WIDTH == 16
  return (Floats)_mm512_cvtph_ps((__m256i)halves);
#elif RAYCORE_WIDTH == 8
  return (Floats)_mm256_cvtph_ps((__m128i)halves);
#else
  Float16 numbers[kWidth];
  std::memcpy(numbers, &halves, sizeof(halves));
  return load(numbers);
#endif
}

// Some inputs of rows and of panels, with the same scales.
struct Float8Block {
  const float* x;
  const uint8_t* weight;  // of the first panel
  const float* scales;    // the same
  float* sums;            // [rows, kFloat8Panels · 16]
  int64_t num_rows, num_inputs, x_stride, panel_bytes, panel_scales;
  bool is_first;          // there are no sums yet
};

constexpr int64_t kFloat8SumsStride = kFloat8Panels * kPanelOutputs;

template <int P, int R>
void add_few_float8(const Float8Block& block) {
  constexpr int V = P * kVectors;
  Floats own[R][V] = {}, scales[V];
  if (!block.is_first)
    for (int r = 0; r < R; r++)
      for (int v = 0; v < V; v++) own[r][v] = load(block.sums + r * kFloat8SumsStride + v * kWidth);
  for (int v = 0; v < V; v++)
    scales[v] = load(block.scales + v / kVectors * block.panel_scales + v % kVectors * kWidth) * splat(kFloat8Factor);
  for (int64_t i = 0; i < block.num_inputs; i += kFloat8Unrolled)
    for (int p = 0; p < P; p++) {
      const uint8_t* panel = block.weight + p * block.panel_bytes + i * kPanelOutputs;
      __builtin_prefetch(panel + kAheadBytes);
      for (int j = 0; j < kFloat8Unrolled; j++)
        for (int v = 0; v < kVectors; v++) {
          const int at = p * kVectors + v;
          const Floats weight = load_float8(panel + j * kPanelOutputs + v * kWidth) * scales[at];
          for (int r = 0; r < R; r++)
            own[r][at] = multiply_add(weight, splat(block.x[r * block.x_stride + i + j]), own[r][at]);
        }
    }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) store(block.sums + r * kFloat8SumsStride + v * kWidth, own[r][v]);
}

template <int P, int R = kFloat8FewRows>
inline void add_few_float8_rows(const Float8Block& block) {
  if constexpr (R > 1)
    if (block.num_rows < R) return add_few_float8_rows<P, R - 1>(block);
  add_few_float8<P, R>(block);
}

// Adds the products of any number of rows with the numbers of P panels, which are widened once for all of them.
template <int P>
void add_many_float8(const Float8Block& block) {
  constexpr int64_t wide_size = kFloat8Inputs * kPanelOutputs;
  alignas(64) float wide[P * wide_size];
  for (int p = 0; p < P; p++)
    for (int v = 0; v < kVectors; v++) {
      const Floats scales = load(block.scales + p * block.panel_scales + v * kWidth) * splat(kFloat8Factor);
      const uint8_t* from = block.weight + p * block.panel_bytes + v * kWidth;
      float* to = wide + p * wide_size + v * kWidth;
      for (int64_t i = 0; i < block.num_inputs * kPanelOutputs; i += kPanelOutputs)
        store(to + i, load_float8(from + i) * scales);
    }
  PanelBlock<float> products;
  products.x = block.x;
  products.sums = block.sums;
  products.next = reinterpret_cast<const char*>(block.weight + block.num_inputs * kPanelOutputs);
  products.num_rows = block.num_rows;
  products.num_inputs = block.num_inputs;
  products.x_stride = block.x_stride;
  products.sums_stride = kFloat8SumsStride;
  products.next_stride = block.panel_bytes;
  products.is_first = block.is_first;
  add_block<float, float, P>(products, wide, wide_size, kPanelOutputs);
}

// Writes the sums of products of some rows for up to kFloat8Panels panels, from `first_panel` on.
template <typename X>
void sum_float8_panels(const IntegerLinearArgs& args, int64_t first_row, int64_t num_rows, int64_t first_panel,
                       int64_t num_panels, float* sums) {
  const int64_t I = args.num_inputs, num_groups = (I + args.group_size - 1) / args.group_size;
  const X* x = static_cast<const X*>(args.x) + first_row * args.x_stride;
  const bool are_few = num_rows <= kFloat8FewRows;
  const int64_t most_inputs = are_few ? kFloat8FewInputs : kFloat8Inputs;
  alignas(64) float copy[kFloat8FewRows * kFloat8FewInputs > kFloat8MaxRows * kFloat8Inputs
                             ? kFloat8FewRows * kFloat8FewInputs
                             : kFloat8MaxRows * kFloat8Inputs];
  Float8Block block;
  block.num_rows = num_rows;
  block.panel_bytes = I * kPanelOutputs;
  block.panel_scales = num_groups * kPanelOutputs;
  for (int64_t begin = 0; begin < I; begin += most_inputs) {
    const int64_t end = begin + most_inputs < I ? begin + most_inputs : I;
    const float* rows = copy;
    block.x_stride = most_inputs;
    if constexpr (kIsFloat<X>) {
      rows = x + begin;
      block.x_stride = args.x_stride;
    } else {
      for (int64_t row = 0; row < num_rows; row++)
        for (int64_t i = begin; i < end; i += kWidth)
          store(copy + row * most_inputs + i - begin, load_up_to(x + row * args.x_stride + i, I - i));
    }
    for (int64_t i = begin, next; i < end; i = next) {
      const int64_t group = i / args.group_size;
      next = (group + 1) * args.group_size < end ? (group + 1) * args.group_size : end;
      block.x = rows + i - begin;
      block.num_inputs = next - i;
      block.is_first = i == 0;
      for (int64_t panel = 0; panel < num_panels;) {
        block.weight = args.packed + (first_panel + panel) * block.panel_bytes + i * kPanelOutputs;
        block.scales = args.scales + (first_panel + panel) * block.panel_scales + group * kPanelOutputs;
        block.sums = sums + panel * kPanelOutputs;
        const auto add = [&](auto panels) {
          constexpr int P = decltype(panels)::value;
          if (are_few) add_few_float8_rows<P>(block);
          else add_many_float8<P>(block);
          panel += P;
        };
        if (num_panels - panel >= kFloat8Panels && (are_few || (kWidth == 16 && num_rows >= kLeastManyRows)))
          add(std::integral_constant<int, kFloat8Panels>());
        else if (num_panels - panel >= kGroupPanels) add(std::integral_constant<int, kGroupPanels>());
        else add(std::integral_constant<int, 1>());
      }
    }
  }
}

template <typename X>
void float8_linear(const IntegerLinearArgs& args, const Threads& threads) {
  if (args.num_rows == 0) return;
  const int64_t num_panels = panels_of(args.num_outputs);
  const int64_t num_blocks = (args.num_rows + kFloat8MaxRows - 1) / kFloat8MaxRows;
  const int64_t block_rows = (args.num_rows + num_blocks - 1) / num_blocks;
  // two products in a cycle, and some more cycles for each vector of numbers
  const int64_t panel_cycles = args.num_inputs * kVectors * (block_rows / 2 + 3);
  const int64_t even_panels = num_panels * num_blocks / (kTasksEach * threads.count);
  const int64_t least_panels = kLeastCycles / panel_cycles + 1;
  const int64_t task_panels = round_up(even_panels > least_panels ? even_panels : least_panels, kFloat8Panels);
  const int64_t tasks_each = (num_panels + task_panels - 1) / task_panels;
  share(num_blocks * tasks_each, threads, [&](int64_t task) {
    const int64_t first_row = task / tasks_each * block_rows, left_rows = args.num_rows - first_row;
    const int64_t num_rows = left_rows < block_rows ? left_rows : block_rows;
    const int64_t begin = task % tasks_each * task_panels;
    const int64_t end = begin + task_panels < num_panels ? begin + task_panels : num_panels;
    if (num_rows <= 0) return;
    alignas(64) float sums[kFloat8MaxRows * kFloat8SumsStride];
    for (int64_t panel = begin; panel < end; panel += kFloat8Panels) {
      const int64_t count = end - panel < kFloat8Panels ? end - panel : kFloat8Panels;
      sum_float8_panels<X>(args, first_row, num_rows, panel, count, sums);
      with_gate<kNoGate>(args.gate, [&](auto kind) {
        for (int64_t row = 0; row < num_rows; row++)
          store_results<X, decltype(kind)::value>(args, first_row + row, panel, panel + count, [&](int64_t i) {
            return load(sums + row * kFloat8SumsStride + i);
          });
      });
    }
  });
}

}  // namespace
