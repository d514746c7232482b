// Work that torch's threads share.

#pragma once

#include "kernels.h"

namespace {

using namespace raycore;

// Rows of `dim` numbers below which a kernel isn't worth another thread: about 16 KB of float32.
inline int64_t rows_per_thread(int64_t dim) {
  const int64_t rows = 8192 / dim;
  return rows < 1 ? 1 : rows;
}

constexpr int64_t kTasksEach = 8;  // of each thread: so few that they are worth it, so many that threads end together

inline int64_t round_up(int64_t x, int64_t multiple) {
  return (x + multiple - 1) / multiple * multiple;
}

inline int64_t clamp(int64_t x, int64_t low, int64_t high) {
  return x < low ? low : x > high ? high : x;
}

// Calls function(row) for every row. Each thread gets `grain` adjacent rows or more.
template <typename Function>
void for_rows(int64_t num_rows, int64_t grain, const Threads& threads, const Function& function) {
  threads.for_range(
      num_rows, grain,
      [](int64_t begin, int64_t end, void* context) {
        for (; begin < end; begin++) (*static_cast<const Function*>(context))(begin);
      },
      const_cast<Function*>(&function));
}

// Calls function(task, worker) for every task. Each of up to `threads.count` workers takes the next task when it is
// free.
template <typename Function>
void share_with_workers(int64_t num_tasks, const Threads& threads, const Function& function) {
  struct Context {
    int64_t next, num_tasks;
    const Function& function;
  } context{0, num_tasks, function};
  threads.for_range(
      num_tasks < threads.count ? num_tasks : threads.count, 1,
      [](int64_t begin, int64_t end, void* pointer) {
        Context& context = *static_cast<Context*>(pointer);
        for (int64_t worker = begin; worker < end; worker++)
          for (int64_t task; (task = __atomic_fetch_add(&context.next, 1, __ATOMIC_RELAXED)) < context.num_tasks;)
            context.function(task, worker);
      },
      &context);
}

// Calls function(task) for every task. Each thread takes the next task when it is free.
template <typename Function>
void share(int64_t num_tasks, const Threads& threads, const Function& function) {
  share_with_workers(num_tasks, threads, [&](int64_t task, int64_t) { function(task); });
}

}  // namespace
