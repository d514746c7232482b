// A linear layer for each head of a row, with weights in panels as in panel_linear.h. A row's result depends only on
// that row.

#pragma once

#include "panel_linear.h"

namespace {

using namespace raycore;

template <typename X, typename W>
void head_linear(const HeadLinearArgs& args, const Threads& threads) {
  if (args.num_rows == 0) return;
  constexpr int64_t max_rows = kMaxBlockRows<X>;
  const int64_t T = args.num_rows, I = args.num_inputs, O = args.num_outputs, num_panels = panels_of(O);
  const int64_t num_blocks = (T + max_rows - 1) / max_rows, block_rows = (T + num_blocks - 1) / num_blocks;
  const int64_t most = kTaskSums<X> / kPanelOutputs / block_rows / 2 * 2;
  const int64_t task_panels = kTaskPanels<X> < most ? kTaskPanels<X> : most;
  const int64_t tasks_each = (num_panels + task_panels - 1) / task_panels;
  share(args.num_heads * num_blocks * tasks_each, threads, [&](int64_t task) {
    const int64_t head = task / (num_blocks * tasks_each), first_row = task / tasks_each % num_blocks * block_rows;
    const int64_t first_panel = task % tasks_each * task_panels;
    const int64_t last_panel = first_panel + task_panels < num_panels ? first_panel + task_panels : num_panels;
    const int64_t num_rows = first_row + block_rows < T ? block_rows : T - first_row;
    const int64_t width = (last_panel - first_panel) * kPanelOutputs;
    alignas(64) float sums[kTaskSums<X>];
    sum_panels<X, W>({static_cast<const X*>(args.x) + first_row * args.x_stride + head * args.x_head_stride,
                      args.x_stride, nullptr, num_rows, I,
                      static_cast<const W*>(args.packed) + head * num_panels * kPanelOutputs * I, first_panel,
                      last_panel},
                     sums);
    for (int64_t row = 0; row < num_rows; row++) {
      X* out = static_cast<X*>(args.out) + (first_row + row) * args.out_stride + head * args.out_head_stride;
      for (int64_t o = first_panel * kPanelOutputs; o < last_panel * kPanelOutputs && o < O; o += kWidth)
        store_up_to(out + o, load(sums + row * width + o - first_panel * kPanelOutputs), O - o);
    }
  });
}

}  // namespace
