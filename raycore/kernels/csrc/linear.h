// A linear layer for a few rows, with the weight as it is. Such a product is bound by memory: it streams the weight
// once for every four rows.

#pragma once

#include "kernels.h"
#include "threads.h"
#include "vectors.h"

namespace {

using namespace raycore;

constexpr int64_t kOutputsPerTask = 256;

// The next `count` numbers, at most two vectors of them, in any order.
template <typename T>
inline void load_two(const T* from, int64_t count, Floats& first, Floats& second) {
  if constexpr (kPair<T> == 2) {
    widen(from, count / 2, first, second);
  } else {
    first = load_up_to(from, count);
    second = count > kWidth ? load_up_to(from + kWidth, count - kWidth) : Floats{};
  }
}

// Outputs `begin` to `end` of R rows.
template <typename T, int R>
void some_outputs(const LinearArgs& args, int64_t first_row, int64_t begin, int64_t end) {
  const int64_t I = args.num_inputs;
  const T* x[R];
  for (int r = 0; r < R; r++) x[r] = static_cast<const T*>(args.x) + (first_row + r) * args.x_stride;
  for (int64_t o = begin; o < end; o++) {
    const T* weight = static_cast<const T*>(args.weight) + o * I;
    Floats even[R] = {}, odd[R] = {};
    const auto add = [&](int64_t i, int64_t count) {
      Floats w0, w1, x0, x1;
      load_two(weight + i, count, w0, w1);
      for (int r = 0; r < R; r++) {
        load_two(x[r] + i, count, x0, x1);
        even[r] = multiply_add(w0, x0, even[r]);
        odd[r] = multiply_add(w1, x1, odd[r]);
      }
    };
    int64_t i = 0;
    for (; i + 2 * kWidth <= I; i += 2 * kWidth) add(i, 2 * kWidth);
    if (i < I) add(i, I - i);
    for (int r = 0; r < R; r++)
      store_first(static_cast<T*>(args.out) + (first_row + r) * args.num_outputs + o, splat(sum(even[r] + odd[r])), 1);
  }
}

// The number of inputs is even.
template <typename T>
void few_rows_linear(const LinearArgs& args, const Threads& threads) {
  share((args.num_outputs + kOutputsPerTask - 1) / kOutputsPerTask, threads, [&](int64_t task) {
    const int64_t begin = task * kOutputsPerTask, left = args.num_outputs - begin;
    const int64_t end = begin + (left < kOutputsPerTask ? left : kOutputsPerTask);
    int64_t row = 0;
    for (; row + 4 <= args.num_rows; row += 4) some_outputs<T, 4>(args, row, begin, end);
    switch (args.num_rows - row) {
      case 3: some_outputs<T, 3>(args, row, begin, end); break;
      case 2: some_outputs<T, 2>(args, row, begin, end); break;
      case 1: some_outputs<T, 1>(args, row, begin, end); break;
    }
  });
}

}  // namespace
