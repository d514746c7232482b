// What LoRA adapters add to the outputs of a linear layer: for each row, B (A x) with the A and B of its adapter. Both
// are packed in panels, like weights of linear layers. They are read once for each block of rows of the same adapter.
//
// A row's result doesn't depend on other rows.

#pragma once

#include "kernels.h"
#include "panel_linear.h"
#include "threads.h"
#include "vectors.h"

namespace {

using namespace raycore;

constexpr int64_t kLoraRows = 4 * kPanelRows;  // of one adapter that are computed together
constexpr int64_t kShrinkPanels = 2;           // of a task
constexpr int64_t kExpandPanels = 256;         // of a task, at most

// Calls function(adapter, first_row, num_rows) for each block of rows with the same adapter.
template <typename Function>
inline void for_blocks(const LoraArgs& args, const Function& function) {
  for (int64_t row = 0, end; row < args.num_rows; row = end) {
    for (end = row + 1; end < args.num_rows && end < row + kLoraRows && args.slots[end] == args.slots[row];) end++;
    const LoraAdapter& adapter = args.adapters[args.slots[row]];
    if (adapter.a) function(adapter, row, end - row);
  }
}

// Calls function(adapter, first_row, num_rows, task) for every task of every block. `tasks_of(adapter, num_rows)` is
// how many a block has.
template <typename TasksOf, typename Function>
inline void share_blocks(const LoraArgs& args, const Threads& threads, const TasksOf& tasks_of,
                         const Function& function) {
  int64_t num_tasks = 0;
  for_blocks(args, [&](const LoraAdapter& adapter, int64_t, int64_t num_rows) {
    num_tasks += tasks_of(adapter, num_rows);
  });
  share(num_tasks, threads, [&](int64_t task) {
    for_blocks(args, [&](const LoraAdapter& adapter, int64_t row, int64_t num_rows) {
      const int64_t own = tasks_of(adapter, num_rows);
      if (task >= 0 && task < own) function(adapter, row, num_rows, task);
      task -= own;
    });
  });
}

template <typename T>
void lora_shrink(const LoraArgs& args, const Threads& threads) {
  static_assert(kLoraRows <= kMaxBlockRows<T>);
  const auto tasks_of = [](const LoraAdapter& adapter, int64_t) {
    return (panels_of(adapter.num_rows) + kShrinkPanels - 1) / kShrinkPanels;
  };
  share_blocks(args, threads, tasks_of, [&](const LoraAdapter& adapter, int64_t row, int64_t num_rows, int64_t task) {
    const int64_t first = task * kShrinkPanels, num_panels = panels_of(adapter.num_rows) - first;
    const int64_t last = first + (num_panels < kShrinkPanels ? num_panels : kShrinkPanels);
    const int64_t* order = args.rows + row;
    bool is_run = true;
    for (int64_t r = 1; r < num_rows; r++) is_run = is_run && order[r] == order[0] + r;
    const T* x = static_cast<const T*>(args.x) + (is_run ? order[0] * args.x_stride : 0);
    alignas(64) float sums[kLoraRows * kShrinkPanels * kPanelOutputs];
    sum_panels<T, T>({x, args.x_stride, is_run ? nullptr : order, num_rows, args.num_inputs,
                      static_cast<const T*>(adapter.a), first, last},
                     sums);
    for (int64_t r = 0; r < num_rows; r++)
      for (int64_t o = first * kPanelOutputs; o < last * kPanelOutputs && o < adapter.num_rows; o += kWidth)
        store_up_to(static_cast<T*>(args.products) + (row + r) * args.width + o,
                    load(sums + r * (last - first) * kPanelOutputs + o - first * kPanelOutputs), adapter.num_rows - o);
  });
}

template <typename T>
void lora_expand(const LoraArgs& args, const Threads& threads) {
  const auto task_panels = [](int64_t num_rows) {
    const int64_t fitting = kTaskSums<T> / kPanelOutputs / num_rows;
    return fitting < kExpandPanels ? fitting : kExpandPanels;
  };
  const auto tasks_of_part = [&](const LoraAdapter::Part& part, int64_t num_rows) {
    return (panels_of(part.num_outputs) + task_panels(num_rows) - 1) / task_panels(num_rows);
  };
  const auto tasks_of = [&](const LoraAdapter& adapter, int64_t num_rows) {
    int64_t num_tasks = 0;
    for (const auto& part : adapter.parts) num_tasks += tasks_of_part(part, num_rows);
    return num_tasks;
  };
  share_blocks(args, threads, tasks_of, [&](const LoraAdapter& adapter, int64_t row, int64_t num_rows, int64_t task) {
    const LoraAdapter::Part* part = adapter.parts;
    for (; task >= tasks_of_part(*part, num_rows); part++) task -= tasks_of_part(*part, num_rows);
    const int64_t first = task * task_panels(num_rows), num_panels = panels_of(part->num_outputs) - first;
    const int64_t last = first + (num_panels < task_panels(num_rows) ? num_panels : task_panels(num_rows));
    alignas(64) float sums[kTaskSums<T>];
    sum_panels<T, T>({static_cast<const T*>(args.products) + row * args.width + part->first_row, args.width, nullptr,
                      num_rows, part->rank, static_cast<const T*>(part->b), first, last},
                     sums);
    for (int64_t r = 0; r < num_rows; r++) {
      T* y = static_cast<T*>(args.y) + args.rows[row + r] * args.y_stride + part->first_output;
      const float* own = sums + r * (last - first) * kPanelOutputs;
      for (int64_t o = first * kPanelOutputs; o < last * kPanelOutputs && o < part->num_outputs; o += kWidth)
        store_up_to(y + o, load_up_to(y + o, part->num_outputs - o) + load(own + o - first * kPanelOutputs),
                    part->num_outputs - o);
    }
  });
}

}  // namespace
