// A linear layer in bfloat16 with AMX. A panel of the weight is a column of tiles, whose rows have pairs of inputs.
//
// A row's result depends only on that row: its products are added up in the order of the inputs.

#pragma once

#include "amx.h"
#include "gate.h"
#include "kernels.h"
#include "panel_linear.h"
#include "threads.h"
#include "tile_attention.h"

namespace {

using namespace raycore;

constexpr int64_t kTileSize = kTileInner * kTileColumns;
constexpr int64_t kRowBlockBytes = 512 << 10;  // rows that stay in a core's cache
constexpr int64_t kTaskCycles = 20000;         // about 10 us, which makes another thread worth it

inline void fetch_tile(const BFloat16* tile) {
  for (int64_t i = 0; i < kTileSize; i += 32) _mm_prefetch(tile + i, _MM_HINT_T1);
}

// The results of up to kTileRows rows for one or two panels of outputs. With `fetches`, fetches the next two panels
// meanwhile.
template <bool has_lower, bool is_pair, bool fetches>
void multiply_tiles(const PanelLinearArgs& args, int64_t row, int64_t num_rows, int64_t panel) {
  const int64_t I = args.num_inputs, O = args.num_outputs;
  const BFloat16* x = static_cast<const BFloat16*>(args.x) + row * args.x_stride;
  const BFloat16* weight = static_cast<const BFloat16*>(args.packed) + panel * kTileColumns * I;
  alignas(64) float sums[kTileRows * 2 * kTileColumns];
  clear_tiles<has_lower, is_pair>();
  for (int64_t i = 0; i < I; i += kTileInner, weight += kTileSize) {
    if constexpr (fetches) {
      fetch_tile(weight + 2 * kTileColumns * I);
      fetch_tile(weight + 3 * kTileColumns * I);
    }
    if constexpr (has_lower)  // the processor fetches adjacent tiles by itself, but not rows that are far apart
      for (int64_t r = 0; r < kTileRows; r++) _mm_prefetch(x + r * args.x_stride + i + kTileInner, _MM_HINT_T0);
    add_tile_products<has_lower, is_pair>(x + i, args.x_stride, weight, weight + is_pair * kTileColumns * I,
                                          2 * kTileColumns);
  }
  store_tiles<has_lower, is_pair>(sums, 2 * kTileColumns);
  const BFloat16* bias = static_cast<const BFloat16*>(args.bias);
  const BFloat16* residual = static_cast<const BFloat16*>(args.residual);
  BFloat16* out = static_cast<BFloat16*>(args.out);
  if (args.gate.kind && !args.is_ungated) {
    const int64_t o = panel * kTileColumns;
    const Floats gate_offset = bias ? load(bias + o) : Floats{};
    const Floats offset = bias ? load(bias + o + kTileColumns) : Floats{};
    with_gate<kSilu>(args.gate, [&](auto kind) {
      for (int64_t r = 0; r < num_rows; r++) {
        const Floats x = load(sums + 2 * r * kTileColumns) + gate_offset;
        const Floats up = load(sums + (2 * r + 1) * kTileColumns) + offset;
        store(out + ((row + r) * O + o) / 2, gated<decltype(kind)::value, BFloat16>(args.gate, x, up));
      }
    });
    return;
  }
  with_gate<kNoGate>(args.gate, [&](auto kind) {
    for (int64_t half = 0; half <= is_pair; half++) {
      const int64_t o = (panel + half) * kTileColumns;
      const Floats offset = bias ? load(bias + o) : Floats{};
      for (int64_t r = 0; r < num_rows; r++) {
        Floats y = load(sums + (2 * r + half) * kTileColumns) + offset;
        if constexpr (decltype(kind)::value != kNoGate)
          y = gated<decltype(kind)::value, BFloat16>(args.gate, y, splat(1.0f));
        if (residual) y += load(residual + (row + r) * O + o);
        store(out + (row + r) * O + o, y);
      }
    }
  });
}

template <bool has_lower>
inline void multiply_pair(const PanelLinearArgs& args, int64_t row, int64_t num_rows, int64_t panel, bool is_pair,
                          bool fetches) {
  if (!is_pair) multiply_tiles<has_lower, false, false>(args, row, num_rows, panel);
  else if (fetches) multiply_tiles<has_lower, true, true>(args, row, num_rows, panel);
  else multiply_tiles<has_lower, true, false>(args, row, num_rows, panel);
}

inline void tile_linear(const PanelLinearArgs& args, const Threads& threads) {
  if (args.num_inputs % kTileInner || args.num_outputs % kTileColumns) {
    simpler.panel_linear[kBFloat16][kBFloat16](args, threads);
    return;
  }
  if (args.num_rows == 0) return;
  const int64_t I = args.num_inputs, num_panels = args.num_outputs / kTileColumns, num_pairs = (num_panels + 1) / 2;
  const int64_t fitting_rows = kRowBlockBytes / (I * int64_t(sizeof(BFloat16))) / kTileRows * kTileRows;
  const int64_t max_rows = fitting_rows < kTileRows ? kTileRows : fitting_rows;
  const int64_t num_blocks = (args.num_rows + max_rows - 1) / max_rows;
  const int64_t even_rows = (args.num_rows + num_blocks - 1) / num_blocks;
  const int64_t block_rows = (even_rows + kTileRows - 1) / kTileRows * kTileRows;
  const int64_t rows_each = args.num_rows < block_rows ? args.num_rows : block_rows;
  // a pair of panels is read once; then its tiles are multiplied with each 32 rows
  const int64_t pair_cycles = I / kTileInner * (100 + 64 * ((rows_each + kTileRows - 1) / kTileRows));
  const int64_t even_pairs = num_pairs * num_blocks / (kTasksEach * threads.count);
  const int64_t least_pairs = kTaskCycles / pair_cycles + 1;
  const int64_t task_pairs = even_pairs > least_pairs ? even_pairs : least_pairs;
  const int64_t tasks_each = (num_pairs + task_pairs - 1) / task_pairs;
  share(num_blocks * tasks_each, threads, [&](int64_t task) {
    const int64_t first_row = task / tasks_each * block_rows, first_pair = task % tasks_each * task_pairs;
    const int64_t last_row = first_row + block_rows < args.num_rows ? first_row + block_rows : args.num_rows;
    const int64_t last_pair = first_pair + task_pairs < num_pairs ? first_pair + task_pairs : num_pairs;
    TileShapes shapes;
    for (int64_t pair = first_pair; pair < last_pair; pair++) {
      const bool is_pair = 2 * pair + 1 < num_panels;
      for (int64_t row = first_row; row < last_row; row += kTileRows) {
        const int64_t num_rows = last_row - row < kTileRows ? last_row - row : kTileRows;
        shapes.set(num_rows, kTileInner);
        // with a single tile of rows, the processor fetches ahead by itself
        const bool fetches = row > first_row && row + kTileRows >= last_row && pair + 1 < last_pair;
        if (num_rows > 16) multiply_pair<true>(args, row, num_rows, 2 * pair, is_pair, fetches);
        else multiply_pair<false>(args, row, num_rows, 2 * pair, is_pair, fetches);
      }
    }
  });
}

}  // namespace
