// Reads memory as fast as all threads can: what kernels that wait for memory are compared with.

#pragma once

#include "kernels.h"
#include "panel_linear.h"
#include "threads.h"
#include "vectors.h"

namespace {

using namespace raycore;

// Adjacent pages that are read side by side: see panel_linear.h.
constexpr int64_t kReadPages = 8, kReadPageBytes = 4096;

// Adds up all numbers but the last ones, which don't fill kReadPages pages.
inline void read_floats(const float* from, int64_t count, const Threads& threads) {
  constexpr int64_t page = kReadPageBytes / sizeof(float), pages = kReadPages * page, task_numbers = 64 * pages;
  share((count + task_numbers - 1) / task_numbers, threads, [&](int64_t task) {
    const int64_t end = (task + 1) * task_numbers < count ? (task + 1) * task_numbers : count;
    Floats sums[kReadPages] = {};
    for (int64_t i = task * task_numbers; i + pages <= end; i += pages)
      for (int64_t j = i; j < i + page; j += kWidth)
        for (int64_t p = 0; p < kReadPages; p++) {
          __builtin_prefetch(from + j + p * page + kAheadBytes / sizeof(float));
          sums[p] += load(from + j + p * page);
        }
    for (int64_t p = 1; p < kReadPages; p++) sums[0] += sums[p];
    const float total = sum(sums[0]);
    asm volatile("" ::"g"(total));  // or the compiler would read nothing
  });
}

}  // namespace
