// What LoRA adapters add to the outputs of a linear layer: for each row, B (A x) with the A and B of its adapter. For a
// few rows of each adapter: both products are bound by memory, which has each A and B once for every four rows.
//
// A row's result doesn't depend on other rows.

#pragma once

#include "kernels.h"
#include "linear.h"
#include "threads.h"
#include "vectors.h"

namespace {

using namespace raycore;

constexpr int64_t kLoraRows = 4;        // adjacent rows of one adapter that are computed together
constexpr int64_t kLoraRowsOfA = 16;    // of a task
constexpr int64_t kLoraOutputs = 4096;  // of a task: the processor fetches long stretches of B's rows ahead

// Calls function(adapter, first_row, num_rows) for each block of adjacent rows with the same adapter.
template <typename Function>
inline void for_blocks(const LoraArgs& args, const Function& function) {
  for (int64_t row = 0, end; row < args.num_rows; row = end) {
    for (end = row + 1; end < args.num_rows && end < row + kLoraRows && args.places[end] == args.places[row];) end++;
    const LoraAdapter& adapter = args.adapters[args.places[row]];
    if (adapter.a) function(adapter, row, end - row);
  }
}

// Calls function(adapter, first_row, num_rows, task) for every task of every block. `tasks_of(adapter)` is how many
// a block has.
template <typename TasksOf, typename Function>
inline void share_blocks(const LoraArgs& args, const Threads& threads, const TasksOf& tasks_of,
                         const Function& function) {
  int64_t num_tasks = 0;
  for_blocks(args, [&](const LoraAdapter& adapter, int64_t, int64_t) { num_tasks += tasks_of(adapter); });
  share(num_tasks, threads, [&](int64_t task) {
    for_blocks(args, [&](const LoraAdapter& adapter, int64_t row, int64_t num_rows) {
      const int64_t own = tasks_of(adapter);
      if (task >= 0 && task < own) function(adapter, row, num_rows, task);
      task -= own;
    });
  });
}

template <typename T>
void lora_shrink(const LoraArgs& args, const Threads& threads) {
  share_blocks(
      args, threads, [](const LoraAdapter& adapter) { return (adapter.num_rows + kLoraRowsOfA - 1) / kLoraRowsOfA; },
      [&](const LoraAdapter& adapter, int64_t row, int64_t num_rows, int64_t task) {
        const int64_t begin = task * kLoraRowsOfA, left = adapter.num_rows - begin;
        const int64_t end = begin + (left < kLoraRowsOfA ? left : kLoraRowsOfA);
        const LinearArgs product = {args.x, adapter.a, args.products, args.num_rows, args.num_inputs, args.width,
                                    args.x_stride};
        switch (num_rows) {
          case 4: some_outputs<T, 4>(product, row, begin, end); break;
          case 3: some_outputs<T, 3>(product, row, begin, end); break;
          case 2: some_outputs<T, 2>(product, row, begin, end); break;
          case 1: some_outputs<T, 1>(product, row, begin, end); break;
        }
      });
}

// Adds outputs `begin` to `end` of a part to R rows. With V vectors at a time: the rows of B may be a multiple of 4 KB
// apart, so that few of them stay in a core's first cache, and lines should be read whole.
template <typename T, int R, int V>
void add_outputs(const LoraArgs& args, const LoraAdapter::Part& part, int64_t first_row, int64_t begin, int64_t end) {
  const T* b = static_cast<const T*>(part.b);
  const T* a_x[R];
  T* y[R];
  for (int r = 0; r < R; r++) {
    a_x[r] = static_cast<const T*>(args.products) + (first_row + r) * args.width + part.first_row;
    y[r] = static_cast<T*>(args.y) + args.rows[first_row + r] * args.y_stride + part.first_output;
  }
  int64_t o = begin;
  for (; o + V * kWidth <= end; o += V * kWidth) {
    Floats sums[R][V] = {};
    for (int64_t i = 0; i < part.rank; i++) {
      const T* weights = b + i * part.num_outputs + o;
      for (int v = 0; v < V; v++) {
        const Floats weight = load(weights + v * kWidth);
        for (int r = 0; r < R; r++) sums[r][v] += splat(to_float(a_x[r][i])) * weight;
      }
    }
    for (int r = 0; r < R; r++)
      for (int v = 0; v < V; v++) store(y[r] + o + v * kWidth, load(y[r] + o + v * kWidth) + sums[r][v]);
  }
  for (; o < end; o += kWidth) {
    const int64_t left = end - o;
    Floats sums[R] = {};
    for (int64_t i = 0; i < part.rank; i++) {
      const Floats weight = load_up_to(b + i * part.num_outputs + o, left);
      for (int r = 0; r < R; r++) sums[r] += splat(to_float(a_x[r][i])) * weight;
    }
    for (int r = 0; r < R; r++) store_up_to(y[r] + o, load_up_to(y[r] + o, left) + sums[r], left);
  }
}

template <typename T>
void lora_expand(const LoraArgs& args, const Threads& threads) {
  const auto chunks_of = [](const LoraAdapter::Part& part) {
    return (part.num_outputs + kLoraOutputs - 1) / kLoraOutputs;
  };
  share_blocks(
      args, threads,
      [&](const LoraAdapter& adapter) {
        int64_t num_tasks = 0;
        for (const auto& part : adapter.parts) num_tasks += chunks_of(part);
        return num_tasks;
      },
      [&](const LoraAdapter& adapter, int64_t row, int64_t num_rows, int64_t task) {
        const LoraAdapter::Part* part = adapter.parts;
        for (; task >= chunks_of(*part); part++) task -= chunks_of(*part);
        const int64_t begin = task * kLoraOutputs, left = part->num_outputs - begin;
        const int64_t end = begin + (left < kLoraOutputs ? left : kLoraOutputs);
        switch (num_rows) {
          case 4: add_outputs<T, 4, 2>(args, *part, row, begin, end); break;
          case 3: add_outputs<T, 3, 2>(args, *part, row, begin, end); break;
          case 2: add_outputs<T, 2, 4>(args, *part, row, begin, end); break;
          case 1: add_outputs<T, 1, 4>(args, *part, row, begin, end); break;
        }
      });
}

}  // namespace
