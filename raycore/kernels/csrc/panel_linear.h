// A linear layer whose weight is packed in panels of 16 outputs.
//
// With few rows, a product waits for memory. Then more panels are read side by side, and each a little ahead: a core's
// own fetching ahead begins anew in each page, so that panel by panel it falls behind the memory. Zen 4 does not: with
// one or two rows, it reads a tenth to a quarter more panel by panel. What it fetches then passes by the caches, which
// keep what Python needs between kernels.
//
// A weight may be stored in fewer bits than the rows have. Then it is widened as it is read, so that results are the
// same as with the wide weight. Rows in 16 bits are widened, too, except in bfloat16 on processors that multiply its
// pairs. A row's result depends only on that row: its products are added up in the order of the inputs.

#pragma once

#include "gate.h"
#include "kernels.h"
#include "threads.h"
#include "vectors.h"

namespace {

using namespace raycore;

// The sums of kPanelRows rows and kGroupPanels panels fit in the registers, beside the weights of one input.
constexpr int kPanelRows = kWidth == 16 ? 12 : 6;
constexpr int kGroupPanels = kWidth == 16 ? 2 : 1;
// With many rows, as many panels as fill the registers beside half as many rows: fewer numbers are loaded for a
// product, which takes a tenth less time.
constexpr int kManyPanels = 2 * kGroupPanels;
constexpr int kLeastManyRows = kWidth == 16 ? 19 : 1 << 30;
constexpr int kVectors = kPanelOutputs / kWidth;       // of a panel
constexpr int64_t kLeastCycles = 20000;                // about 10 us, which makes another thread worth it
constexpr int kRegisters = kWidth == 8 ? 16 : 32;
constexpr int kMostPanels = 8;                         // that are read side by side
constexpr int64_t kAheadBytes = 1024;                  // of each of them, with few rows
constexpr int64_t kInOrderAheadBytes = 512;            // of one panel after the other
constexpr int kInOrderRows = 2;                        // with more, their inputs are loaded too often

template <typename T>
constexpr bool kIsFloat = std::is_same<T, float>::value;

#ifdef RAYCORE_BF16_PAIRS
template <typename X>
constexpr bool kMultipliesPairs = std::is_same<X, BFloat16>::value;
#else
template <typename X>
constexpr bool kMultipliesPairs = false;
#endif

// The type in which rows of type X are multiplied.
template <typename X>
using Factor = std::conditional_t<kMultipliesPairs<X>, X, float>;

// The rows whose sums for P panels are in registers.
template <int P>
constexpr int kRowsBeside = P == kManyPanels ? kPanelRows / 2 : kPanelRows;

// Inputs after which sums are stored, which takes a notable time. Of types that are widened, the weights of so many
// inputs stay in a core's first cache.
template <typename X>
constexpr int64_t kInnerBlock = kMultipliesPairs<X> ? 768 : kIsFloat<X> ? 256 : 256 / kGroupPanels;

// Rows whose inputs stay in a core's second cache.
template <typename X>
constexpr int64_t kMaxBlockRows = kMultipliesPairs<X> ? 120 : kIsFloat<X> ? 240 : 96;

// So many panels' sums of a few rows fit in the registers, beside some of the weights.
constexpr int panels_at_once(int64_t num_rows) {
  int panels = kMostPanels;
  while (panels > kGroupPanels && panels * kVectors * num_rows + 4 > kRegisters) panels /= 2;
  return panels;
}

// Up to so many rows have more panels side by side than kGroupPanels.
constexpr int kFewRows = (kRegisters - 4) / (2 * kGroupPanels * kVectors);

// Panels of a task, which share a copy of the rows. There are more if a task would take less time than kLeastCycles.
template <typename X>
constexpr int64_t kTaskPanels = kMultipliesPairs<X> ? 32 : 8;

template <typename X>
constexpr int64_t kTaskSums = (kMultipliesPairs<X> ? 120 * 32 : 240 * 4) * kPanelOutputs;

// Some rows' products with a block of inputs of some panels.
template <typename X>
struct PanelBlock {
  const Factor<X>* x;
  float* sums;
  const char* next;  // what is read after this block, in as many panels; it is fetched meanwhile. Not used for few rows
  int64_t num_rows, num_inputs, x_stride, sums_stride, next_stride;
  bool is_first;     // there are no sums yet
};

template <typename X, typename W, int P, int R>
void add_products(const PanelBlock<X>& block, int64_t row, const W* weight, int64_t panel_size, const char* next,
                  int64_t next_step) {
  constexpr int V = P * kVectors, fetched = P == kManyPanels ? 1 : P;
  const Factor<X>* x = block.x + row * block.x_stride;
  float* sums = block.sums + row * block.sums_stride;
  Floats own[R][V] = {};
  if (!block.is_first)  // not a choice for each vector: compilers would keep them in memory
    for (int r = 0; r < R; r++)
      for (int v = 0; v < V; v++) own[r][v] = load(sums + r * block.sums_stride + v * kWidth);
  for (int64_t i = 0; i < block.num_inputs; i += kPair<W>, next += next_step) {
    Floats first[V], second[V];
    for (int v = 0; v < V; v++) {
      const W* from = weight + v / kVectors * panel_size + i * kPanelOutputs + v % kVectors * kPair<W> * kWidth;
      if (v % kVectors == 0 && v / kVectors < fetched) __builtin_prefetch(next + v / kVectors * block.next_stride);
      if constexpr (kMultipliesPairs<X>) std::memcpy(&first[v], from, sizeof(Floats));
      else if constexpr (kPair<W> == 2) widen(from, kWidth, first[v], second[v]);
      else first[v] = load(from);
    }
    if constexpr (kMultipliesPairs<X>) {
      for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) own[r][v] = add_pairs(own[r][v], first[v], x + r * block.x_stride + i);
    } else {
      for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) own[r][v] = multiply_add(first[v], splat(x[r * block.x_stride + i]), own[r][v]);
      if constexpr (kPair<W> == 2)
        for (int r = 0; r < R; r++)
          for (int v = 0; v < V; v++)
            own[r][v] = multiply_add(second[v], splat(x[r * block.x_stride + i + 1]), own[r][v]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) store(sums + r * block.sums_stride + v * kWidth, own[r][v]);
}

// Fetches what is read soon after `from` of a panel.
template <bool in_order>
inline void fetch_ahead(const char* from) {
  if constexpr (in_order) __builtin_prefetch(from + kInOrderAheadBytes, 0, 0);
  else __builtin_prefetch(from + kAheadBytes);
}

template <typename X, typename W, int P, int R, bool in_order>
void add_few_products(const PanelBlock<X>& block, const W* weight, int64_t panel_size) {
  constexpr int V = P * kVectors;
  Floats own[R][V] = {};
  if (!block.is_first)
    for (int r = 0; r < R; r++)
      for (int v = 0; v < V; v++) own[r][v] = load(block.sums + r * block.sums_stride + v * kWidth);
  for (int64_t i = 0; i < block.num_inputs; i += kPair<W>)
    for (int v = 0; v < V; v++) {
      const W* from = weight + v / kVectors * panel_size + i * kPanelOutputs + v % kVectors * kPair<W> * kWidth;
      if (v % kVectors == 0) fetch_ahead<in_order>(reinterpret_cast<const char*>(from));
      Floats first, second;
      if constexpr (kMultipliesPairs<X>) std::memcpy(&first, from, sizeof(Floats));
      else if constexpr (kPair<W> == 2) widen(from, kWidth, first, second);
      else first = load(from);
      for (int r = 0; r < R; r++) {
        const Factor<X>* x = block.x + r * block.x_stride + i;
        if constexpr (kMultipliesPairs<X>) own[r][v] = add_pairs(own[r][v], first, x);
        else own[r][v] = multiply_add(first, splat(x[0]), own[r][v]);
        if constexpr (kPair<W> == 2 && !kMultipliesPairs<X>) own[r][v] = multiply_add(second, splat(x[1]), own[r][v]);
      }
    }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) store(block.sums + r * block.sums_stride + v * kWidth, own[r][v]);
}

// Adds the products of R rows with up to P of `left` panels. Returns how many these are.
template <typename X, typename W, int R, int P = panels_at_once(R)>
int add_first_panels(const PanelBlock<X>& block, const W* weight, int64_t panel_size, int64_t left) {
  if constexpr (R <= kInOrderRows)
    if (reads_in_order) {
      add_few_products<X, W, 1, R, true>(block, weight, panel_size);
      return 1;
    }
  if constexpr (P > 1)
    if (left < P) return add_first_panels<X, W, R, P / 2>(block, weight, panel_size, left);
  add_few_products<X, W, P, R, false>(block, weight, panel_size);
  return P;
}

template <typename X, typename W, int R = kFewRows>
int add_few_rows(const PanelBlock<X>& block, const W* weight, int64_t panel_size, int64_t left) {
  if constexpr (R > 1)
    if (block.num_rows < R) return add_few_rows<X, W, R - 1>(block, weight, panel_size, left);
  return add_first_panels<X, W, R>(block, weight, panel_size, left);
}

template <typename X, typename W, int P, int R = kRowsBeside<P>>
inline void add_some_products(int64_t num_rows, const PanelBlock<X>& block, int64_t row, const W* weight,
                              int64_t panel_size, const char* next, int64_t next_step) {
  if (num_rows >= R)
    add_products<X, W, P, R>(block, row, weight, panel_size, next, next_step);
  else if constexpr (R > 1)
    add_some_products<X, W, P, R - 1>(num_rows, block, row, weight, panel_size, next, next_step);
}

// Adds all products of a block. `next_bytes`: what is to be fetched of each panel for one input.
template <typename X, typename W, int P>
void add_block(const PanelBlock<X>& block, const W* weight, int64_t panel_size, int64_t next_bytes) {
  constexpr int rows = kRowsBeside<P>;
  const int64_t num_groups = (block.num_rows + rows - 1) / rows;
  // of many panels, a group of rows fetches a part of one
  const int64_t num_parts = P == kManyPanels ? num_groups / P : num_groups;
  const int64_t next_step = (next_bytes * kPair<W> + num_parts - 1) / num_parts;
  const char* next = block.next;
  for (int64_t group = 0; group < num_groups; group++) {
    if (P == kManyPanels && group % num_parts == 0) next = block.next + group / num_parts * block.next_stride;
    add_some_products<X, W, P>(block.num_rows - group * rows, block, group * rows, weight, panel_size, next, next_step);
    next += block.num_inputs / kPair<W> * next_step;
  }
}

// Writes a panel's weights for some inputs as float32: [inputs, 16].
template <typename W>
void widen_panel(const W* panel, int64_t num_inputs, float* to) {
  for (int64_t i = 0; i < num_inputs; i += kPair<W>)
    for (int v = 0; v < kVectors; v++) {
      const W* from = panel + i * kPanelOutputs + v * kPair<W> * kWidth;
      float* out = to + i * kPanelOutputs + v * kWidth;
      if constexpr (kPair<W> == 2) {
        Floats first, second;
        widen(from, kWidth, first, second);
        store(out, first);
        store(out + kPanelOutputs, second);
      } else {
        store(out, load(from));
      }
    }
}

template <typename X, typename W, int P>
void add_panels(const PanelBlock<X>& block, const W* weight, int64_t panel_size) {
  if constexpr (!kIsFloat<W> && !kMultipliesPairs<X>)
    if (block.num_rows > kPanelRows) {  // widened once for all groups of rows
      constexpr int64_t wide_size = kInnerBlock<X> * kPanelOutputs;
      alignas(64) float wide[P * wide_size];
      for (int p = 0; p < P; p++)
        widen_panel(weight + p * panel_size, block.num_inputs, wide + p * wide_size);
      add_block<X, float, P>(block, wide, wide_size, kPanelOutputs * sizeof(W));
      return;
    }
  add_block<X, W, P>(block, weight, panel_size, kPanelOutputs * sizeof(W));
}

// Stores a row's results for some panels, with bias and residual, gated, or with an activation. `sum(i)`: the products'
// sums of a vector of outputs, which begins at output i of the first of these panels.
template <typename X, GateKind kind, typename Args, typename Sum>
void store_results(const Args& args, int64_t row, int64_t first_panel, int64_t last_panel, const Sum& sum) {
  const int64_t O = args.num_outputs, first = first_panel * kPanelOutputs, last = last_panel * kPanelOutputs;
  const X* bias = static_cast<const X*>(args.bias);
  const X* residual = static_cast<const X*>(args.residual);
  X* out = static_cast<X*>(args.out);
  const auto result = [&](int64_t o) {
    const Floats y = sum(o - first);
    return bias ? y + load_up_to(bias + o, O - o) : y;
  };
  if (kind != kNoGate && !args.is_ungated) {
    if constexpr (kind != kNoGate)
      for (int64_t gates = first; gates < last; gates += 2 * kPanelOutputs)
        for (int64_t i = 0; i < kPanelOutputs; i += kWidth) {
          const Floats x = result(gates + i), up = result(gates + kPanelOutputs + i);
          store(out + (row * O + gates) / 2 + i, gated<kind, X>(args.gate, x, up));
        }
  } else {
    for (int64_t o = first; o < last && o < O; o += kWidth) {
      Floats y = result(o);
      if constexpr (kind != kNoGate) y = gated<kind, X>(args.gate, y, splat(1.0f));
      if (residual) y += load_up_to(residual + row * O + o, O - o);
      store_up_to(out + row * O + o, y, O - o);
    }
  }
}

// Whether rows are copied before they are multiplied: to change their type, or because so many rows, all a multiple of
// 4 KB apart, don't stay in a core's first cache. Few panels aren't worth the copy.
template <typename X>
constexpr bool is_copied(int64_t num_rows, int64_t x_stride, int64_t num_panels) {
  if (kMultipliesPairs<X>) return num_rows > kFewRows && x_stride * sizeof(X) % 4096 == 0 && num_panels >= 8;
  return !kIsFloat<X>;
}

// Copies some inputs of a row in the type in which they are multiplied.
template <typename X>
void copy_inputs(const X* from, int64_t count, Factor<X>* to) {
  if constexpr (std::is_same<X, Factor<X>>::value) std::memcpy(to, from, count * sizeof(X));
  else for (int64_t i = 0; i < count; i += kWidth) store(to + i, load_up_to(from + i, count - i));
}

// Some rows, and some panels of a weight, that are to be multiplied.
template <typename X, typename W>
struct PanelSums {
  const X* x;
  int64_t x_stride;
  const int64_t* order;  // of each row, which row of x it is; null: the first ones
  int64_t num_rows, num_inputs;
  const W* packed;
  int64_t first_panel, last_panel;
};

// Writes the sums of the products, [rows, outputs of the panels].
template <typename X, typename W>
void sum_panels(const PanelSums<X, W>& args, float* sums) {
  const int64_t I = args.num_inputs, panel_size = kPanelOutputs * I, num_panels = args.last_panel - args.first_panel;
  const W* packed = args.packed;
  constexpr int64_t copied = kMaxBlockRows<X> * kInnerBlock<X>;
  alignas(64) Factor<X> copy[copied];
  const bool are_few = args.num_rows <= kFewRows;
  const int64_t most_inputs = are_few ? copied / kFewRows / kPanelOutputs * kPanelOutputs : kInnerBlock<X>;
  for (int64_t i = 0; i < I; i += most_inputs) {
    PanelBlock<X> block;
    block.num_rows = args.num_rows;
    block.is_first = i == 0;
    block.num_inputs = I - i < most_inputs ? I - i : most_inputs;
    if (args.order || is_copied<X>(args.num_rows, args.x_stride, num_panels)) {
      for (int64_t row = 0; row < args.num_rows; row++)
        copy_inputs(args.x + (args.order ? args.order[row] : row) * args.x_stride + i, block.num_inputs,
                    copy + row * most_inputs);
      block.x = copy;
      block.x_stride = most_inputs;
    } else if constexpr (std::is_same<X, Factor<X>>::value) {
      block.x = args.x + i;
      block.x_stride = args.x_stride;
    }
    block.sums_stride = num_panels * kPanelOutputs;
    if (are_few) {
      for (int64_t panel = args.first_panel; panel < args.last_panel;) {
        block.sums = sums + (panel - args.first_panel) * kPanelOutputs;
        panel += add_few_rows<X, W>(block, packed + panel * panel_size + i * kPanelOutputs, panel_size,
                                    args.last_panel - panel);
      }
      continue;
    }
    block.next_stride = panel_size * sizeof(W);
    const int64_t most_panels = args.num_rows < kLeastManyRows ? kGroupPanels : kManyPanels;
    for (int64_t panel = args.first_panel, count; panel < args.last_panel; panel += count) {
      const W* weight = packed + panel * panel_size + i * kPanelOutputs;
      const int64_t left = args.last_panel - panel;
      count = left >= most_panels ? most_panels : left >= kGroupPanels ? kGroupPanels : 1;
      const bool is_last = count == left, is_end = i + kInnerBlock<X> >= I;
      block.next = reinterpret_cast<const char*>(!is_last ? weight + count * panel_size
                                                 : is_end ? packed + args.last_panel * panel_size
                                                          : packed + args.first_panel * panel_size +
                                                                (i + kInnerBlock<X>) * kPanelOutputs);
      block.sums = sums + (panel - args.first_panel) * kPanelOutputs;
      if constexpr (kWidth == 16)
        if (count == kManyPanels) {
          add_panels<X, W, kManyPanels>(block, weight, panel_size);
          continue;
        }
      if (count == kGroupPanels) add_panels<X, W, kGroupPanels>(block, weight, panel_size);
      else add_panels<X, W, 1>(block, weight, panel_size);
    }
  }
}

// Computes the results of some rows for some panels.
template <typename X, typename W>
void multiply_panels(const PanelLinearArgs& args, int64_t first_row, int64_t last_row, int64_t first_panel,
                     int64_t last_panel) {
  const int64_t num_rows = last_row - first_row, width = (last_panel - first_panel) * kPanelOutputs;
  alignas(64) float sums[kTaskSums<X>];
  sum_panels<X, W>({static_cast<const X*>(args.x) + first_row * args.x_stride, args.x_stride, nullptr, num_rows,
                    args.num_inputs, static_cast<const W*>(args.packed), first_panel, last_panel},
                   sums);
  with_gate<kNoGate>(args.gate, [&](auto kind) {
    for (int64_t row = 0; row < num_rows; row++)
      store_results<X, decltype(kind)::value>(args, first_row + row, first_panel, last_panel,
                                              [&](int64_t i) { return load(sums + row * width + i); });
  });
}

// A task's panels are a multiple of this: of 2, which are gates and what they gate; of those that are read side by
// side, if all threads get some.
inline int64_t panels_each(int64_t num_panels, int64_t side_by_side, const Threads& threads) {
  return side_by_side > 2 && num_panels >= 2 * side_by_side * threads.count ? side_by_side : 2;
}

template <typename X, typename W>
void panel_linear(const PanelLinearArgs& args, const Threads& threads) {
  if (args.num_rows == 0) return;
  constexpr int64_t max_rows = kMaxBlockRows<X>;
  const int64_t num_panels = panels_of(args.num_outputs);
  const int64_t num_blocks = (args.num_rows + max_rows - 1) / max_rows;
  const int64_t even_rows = (args.num_rows + num_blocks - 1) / num_blocks;
  const int64_t block_rows = round_up(even_rows, kPanelRows);
  const int64_t rows_each = args.num_rows < block_rows ? args.num_rows : block_rows;
  // two products in a cycle, or 8 bytes of the weight
  const int64_t panel_cycles = args.num_inputs * (rows_each * kVectors / 2 + 2 * int64_t(sizeof(W)));
  const int64_t least = kLeastCycles / panel_cycles + 1, most = kTaskSums<X> / kPanelOutputs / rows_each / 2 * 2;
  const int64_t even_panels = num_panels * num_blocks / (kTasksEach * threads.count);
  const int64_t wanted = clamp(even_panels, least, kTaskPanels<X> > least ? kTaskPanels<X> : least);
  const bool in_order = reads_in_order && args.num_rows <= kInOrderRows;
  const int64_t side_by_side = args.num_rows <= kFewRows && !in_order ? panels_at_once(args.num_rows) : 2;
  const int64_t multiple = panels_each(num_panels, side_by_side, threads);
  const int64_t task_panels = round_up(wanted < most ? wanted : most, multiple);
  const int64_t tasks_each = (num_panels + task_panels - 1) / task_panels;
  share(num_blocks * tasks_each, threads, [&](int64_t task) {
    const int64_t first_row = task / tasks_each * block_rows, first_panel = task % tasks_each * task_panels;
    const int64_t last_row = first_row + block_rows < args.num_rows ? first_row + block_rows : args.num_rows;
    const int64_t last_panel = first_panel + task_panels < num_panels ? first_panel + task_panels : num_panels;
    if (first_row < last_row) multiply_panels<X, W>(args, first_row, last_row, first_panel, last_panel);
  });
}

}  // namespace
