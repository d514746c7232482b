// AMX: registers that are tiles of up to 16 rows of 64 bytes, and products of such tiles.
//
// Tiles 0 to 3 have results: 0 and 1 of up to 16 rows, 2 and 3 of up to 16 more. Tiles 4 and 5 have these rows' left
// operands, 6 and 7 two right operands of 16 columns. Each has pairs of bfloat16 numbers in 4 bytes: of a row, in the
// left operands, and of a column, in the right ones.

#pragma once

#include "vectors.h"

namespace {

constexpr int64_t kTileRows = 32;  // of two left operands
constexpr int64_t kTileColumns = 16;
constexpr int64_t kTileInner = 32;  // numbers of a row of the left operand

// The shapes of the tiles. Puts back the shapes that were in use before, because oneDNN expects to find its own.
class TileShapes {
 public:
  TileShapes() { _tile_storeconfig(&before_); }
  TileShapes(const TileShapes&) = delete;
  ~TileShapes() { before_.palette ? _tile_loadconfig(&before_) : _tile_release(); }

  // Prepares for left operands of `num_rows` rows, up to 32, and `inner` numbers.
  void set(int64_t num_rows, int64_t inner) {
    if (num_rows == num_rows_ && inner == inner_) return;
    num_rows_ = num_rows;
    inner_ = inner;
    Shapes shapes;
    shapes.palette = 1;
    const int64_t upper = num_rows < 16 ? num_rows : 16, lower = num_rows > 16 ? num_rows - 16 : upper;
    for (int tile = 0; tile < 8; tile++) {
      const bool is_lower = tile == 2 || tile == 3 || tile == 5;
      shapes.row_bytes[tile] = tile == 4 || tile == 5 ? 2 * inner : 64;
      shapes.num_rows[tile] = tile >= 6 ? inner / 2 : is_lower ? lower : upper;
    }
    _tile_loadconfig(&shapes);
  }

 private:
  struct alignas(64) Shapes {
    uint8_t palette = 0, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t num_rows[16] = {};
  };

  Shapes before_;
  int64_t num_rows_ = 0, inner_ = 0;
};

// Sets the results to zero.
template <bool has_lower, bool is_pair>
inline void clear_tiles() {
  _tile_zero(0);
  if constexpr (is_pair) _tile_zero(1);
  if constexpr (has_lower) _tile_zero(2);
  if constexpr (has_lower && is_pair) _tile_zero(3);
}

// Sets the results to numbers in memory.
template <bool has_lower, bool is_pair>
inline void load_tiles(const float* from, int64_t stride) {
  _tile_loadd(0, from, stride * sizeof(float));
  if constexpr (is_pair) _tile_loadd(1, from + 16, stride * sizeof(float));
  if constexpr (has_lower) _tile_loadd(2, from + 16 * stride, stride * sizeof(float));
  if constexpr (has_lower && is_pair) _tile_loadd(3, from + 16 * stride + 16, stride * sizeof(float));
}

// Adds the products of `left`, whose rows are `left_stride` numbers apart, with `right` and `other_right`, whose rows
// of pairs are `right_stride` numbers apart.
template <bool has_lower, bool is_pair>
inline void add_tile_products(const BFloat16* left, int64_t left_stride, const BFloat16* right,
                              const BFloat16* other_right, int64_t right_stride) {
  _tile_loadd(4, left, left_stride * sizeof(BFloat16));
  if constexpr (has_lower) _tile_loadd(5, left + 16 * left_stride, left_stride * sizeof(BFloat16));
  _tile_loadd(6, right, right_stride * sizeof(BFloat16));
  if constexpr (is_pair) _tile_loadd(7, other_right, right_stride * sizeof(BFloat16));
  _tile_dpbf16ps(0, 4, 6);
  if constexpr (is_pair) _tile_dpbf16ps(1, 4, 7);
  if constexpr (has_lower) _tile_dpbf16ps(2, 5, 6);
  if constexpr (has_lower && is_pair) _tile_dpbf16ps(3, 5, 7);
}

template <bool has_lower, bool is_pair>
inline void store_tiles(float* to, int64_t stride) {
  _tile_stored(0, to, stride * sizeof(float));
  if constexpr (is_pair) _tile_stored(1, to + 16, stride * sizeof(float));
  if constexpr (has_lower) _tile_stored(2, to + 16 * stride, stride * sizeof(float));
  if constexpr (has_lower && is_pair) _tile_stored(3, to + 16 * stride + 16, stride * sizeof(float));
}

}  // namespace
