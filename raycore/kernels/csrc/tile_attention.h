// Attention in bfloat16, with instructions that multiply and add pairs of bfloat16 numbers.
//
// As in attention.h, keys are visited in chunks at fixed positions, and the chunks' results are merged in order, so
// that the bits of a row's result depend on its query and on the keys and values that it sees. But many more rows share
// what is read of a chunk, and weights are rounded to bfloat16 before they are multiplied with values.
//
// A class `Products` computes the matrix products: scores of tiles of 16 keys, and sums of weighted values, 16 or 32 at
// a step.

#pragma once

#include "amx.h"
#include "attention.h"

namespace {

constexpr int64_t kTileKeys = 16;
constexpr int64_t kMaxStep = 32;

// Some rows' queries, and what is computed of them for one chunk and for all chunks so far. Scores are multiplied with
// `log2_scale` before they are powers of two.
struct TileRows {
  int64_t num_rows, dim, from[kTileRows], to[kTileRows];
  float log2_scale;
  alignas(64) float highest[kTileRows], total[kTileRows], part_highest[kTileRows], part_total[kTileRows];
  alignas(64) BFloat16 q[kTileRows * kMaxHeadDim];           // [rows, H]
  alignas(64) float scores[kTileRows * kRowStride];          // [rows, kRowStride]
  alignas(64) BFloat16 weights[kTileRows * kMaxChunk];       // [rows, kMaxChunk]
  alignas(64) float part[kTileRows * kMaxHeadDim];           // [rows, H]
  alignas(64) float sums[kTileRows * kMaxHeadDim];           // [rows, H]
  alignas(64) BFloat16 last_values[kMaxStep * kMaxHeadDim];  // the last step's, with zeros after the last key
};

// Where a chunk's keys and values are.
struct ChunkPointers {
  int64_t num_tiles, num_steps, step_keys;
  const BFloat16* tiles[kMaxChunk / kTileKeys];  // [H / 2, 16, 2], the first dimension `block_size` pairs apart
  const BFloat16* steps[kMaxChunk / kTileKeys];  // [step_keys / 2, H, 2]
};

// The weights of a row, as powers of two of the scores relative to the highest one; and their sum. Key i is at the
// position `first` + i.
inline void weigh_scores(TileRows& rows, int64_t row, int64_t first, int64_t num_keys) {
  float* scores = rows.scores + row * kRowStride;
  BFloat16* weights = rows.weights + row * kMaxChunk;
  const int64_t from = rows.from[row] > first ? rows.from[row] - first : 0;
  const int64_t to = rows.to[row] - first < num_keys ? rows.to[row] - first : num_keys;
  rows.part_highest[row] = -kInfinity;
  rows.part_total[row] = 0;
  if (from >= to) {
    std::memset(weights, 0, num_keys * sizeof(BFloat16));
    return;
  }
  for (int64_t i = 0; i < from; i++) scores[i] = -kInfinity;
  for (int64_t i = to; i < num_keys; i++) scores[i] = -kInfinity;
  Floats top0 = splat(-kInfinity), top1 = top0;
  for (int64_t i = 0; i < num_keys; i += 2 * kWidth) {
    top0 = maximum(load(scores + i), top0);
    if (i + kWidth < num_keys) top1 = maximum(load(scores + i + kWidth), top1);
  }
  const float highest = maximum(maximum(top0, top1)) * rows.log2_scale;
  const Floats scale = splat(rows.log2_scale), shift = splat(highest);
  Floats total = {};
  for (int64_t i = 0; i < num_keys; i += kWidth) {
    const Floats weight = exp2(load(scores + i) * scale - shift);
    store(weights + i, weight);
    total += weight;
  }
  rows.part_highest[row] = highest;
  rows.part_total[row] = sum(total);
}

// Adds the results of a chunk to those of the chunks before it.
inline void merge_chunk(TileRows& rows) {
  alignas(64) float old_share[kTileRows], new_share[kTileRows];
  for (int64_t i = 0; i < rows.num_rows; i += kWidth) {
    const Floats old_highest = load(rows.highest + i), part = load(rows.part_highest + i);
    const Floats highest = maximum(old_highest, part);
    const Floats old_factor = exp2(old_highest - highest), new_factor = exp2(part - highest);
    store(rows.highest + i, highest);
    store(old_share + i, old_factor);
    store(new_share + i, new_factor);
  }
  for (int64_t row = 0; row < rows.num_rows; row++) {
    if (rows.part_total[row] == 0) continue;  // it sees none of these keys
    float* sums = rows.sums + row * rows.dim;
    const float* part = rows.part + row * rows.dim;
    if (rows.total[row] == 0) {
      std::memcpy(sums, part, rows.dim * sizeof(float));
      rows.total[row] = rows.part_total[row];
      continue;
    }
    rows.total[row] = rows.total[row] * old_share[row] + rows.part_total[row] * new_share[row];
    const Floats old_factor = splat(old_share[row]), new_factor = splat(new_share[row]);
    for (int64_t i = 0; i < rows.dim; i += kWidth)
      store(sums + i, load(sums + i) * old_factor + load(part + i) * new_factor);
  }
}

// The pointers of a chunk's keys from `begin` to `end`. What the cache has after `end` may be NaN, and its product with a
// weight of 0 would be NaN, too. So if the last step has such values, it is copied without them, to `last_values`.
inline ChunkPointers point_to(const AttentionArgs& args, const int32_t* table, int64_t head, int64_t begin, int64_t end,
                              int64_t step, BFloat16* last_values) {
  const int64_t S = args.block_size, H = args.head_dim;
  ChunkPointers pointers;
  pointers.step_keys = step;
  pointers.num_tiles = (end - begin + kTileKeys - 1) / kTileKeys;
  pointers.num_steps = (end - begin + step - 1) / step;
  for (int64_t i = 0; i < pointers.num_tiles; i++) {
    const int64_t key = begin + i * kTileKeys;
    pointers.tiles[i] = block_of<BFloat16>(args, table, head, key).keys + key % S * 2;
  }
  for (int64_t i = 0; i < pointers.num_steps; i++) {
    const int64_t key = begin + i * step, left = end - key;
    const BFloat16* values = block_of<BFloat16>(args, table, head, key).values + key % S * H;
    if (left < step) {
      std::memcpy(last_values, values, (left + 1) / 2 * 2 * H * sizeof(BFloat16));
      if (left % 2)
        for (int64_t h = 0; h < H; h++) last_values[(left / 2 * H + h) * 2 + 1] = {0};
      std::memset(last_values + (left + 1) / 2 * 2 * H, 0, (step - (left + 1) / 2 * 2) * H * sizeof(BFloat16));
      values = last_values;
    }
    pointers.steps[i] = values;
  }
  return pointers;
}

// Results of up to kTileRows rows of one sequence and key-value head.
template <class Products>
void attend_tile_rows(const AttentionArgs& args, const Sequence& sequence, int64_t head, int64_t first_row,
                      int64_t num_rows) {
  const int64_t N = args.num_heads, K = args.num_kv_heads, G = N / K, H = args.head_dim, S = args.block_size;
  const int32_t* table = args.tables + sequence.slot * args.table_stride;
  const BFloat16* qkv = static_cast<const BFloat16*>(args.qkv) + sequence.first_row * (N + 2 * K) * H;
  TileRows rows;
  rows.num_rows = num_rows;
  rows.dim = H;
  rows.log2_scale = args.scale * kLog2OfE;
  int64_t begin = INT64_MAX, end = 0;
  for (int64_t r = 0; r < num_rows; r++) {
    const int64_t token = (first_row + r) / G, query = head * G + (first_row + r) % G;
    std::memcpy(rows.q + r * H, qkv + token * (N + 2 * K) * H + query * H, H * sizeof(BFloat16));
    rows.to[r] = sequence.start + token + 1;
    rows.from[r] = args.window && rows.to[r] > args.window ? rows.to[r] - args.window : 0;
    begin = rows.from[r] < begin ? rows.from[r] : begin;
    end = rows.to[r] > end ? rows.to[r] : end;
  }
  for (int64_t r = 0; r < kTileRows; r++) rows.highest[r] = rows.part_highest[r] = -kInfinity, rows.total[r] = 0;
  const int64_t size = kMaxChunk / S * S, step = S % kMaxStep ? kTileKeys : kMaxStep;
  Products products(num_rows);
  for (int64_t chunk = begin / size * size; chunk < end; chunk += size) {
    // steps begin at fixed positions, too
    const int64_t first = chunk + (begin > chunk ? (begin - chunk) / step * step : 0);
    const int64_t last = chunk + size < end ? chunk + size : end;
    const ChunkPointers pointers = point_to(args, table, head, first, last, step, rows.last_values);
    products.score(rows, pointers, S);
    const int64_t num_keys = pointers.num_steps * pointers.step_keys;
    for (int64_t row = 0; row < num_rows; row++) weigh_scores(rows, row, first, num_keys);
    products.weigh(rows, pointers);
    merge_chunk(rows);
  }
  for (int64_t r = 0; r < num_rows; r++) {
    const int64_t token = (first_row + r) / G, query = head * G + (first_row + r) % G;
    BFloat16* out = static_cast<BFloat16*>(args.out) + (sequence.first_row + token) * N * H + query * H;
    const Floats factor = splat(1.0f / rows.total[r]);
    for (int64_t i = 0; i < H; i += kWidth) store(out + i, load(rows.sums + r * H + i) * factor);
  }
}

template <class Products>
void attend_tiles(const AttentionArgs& args, const Sequence& sequence, int64_t head, int64_t row, int64_t last_row) {
  for (; row < last_row; row += kTileRows)
    attend_tile_rows<Products>(args, sequence, head, row, last_row - row < kTileRows ? last_row - row : kTileRows);
}

template <class Products>
void tile_attention(const AttentionArgs& args, const Threads& threads) {
  if (args.head_dim % 32 || args.block_size % kTileKeys) attention<BFloat16>(args, threads);
  else attention<BFloat16>(args, threads, attend_tiles<Products>);
}

// Calls function(integral_constant<count>) for a count of 1 to R.
template <int R, typename Function>
inline void with_constant(int64_t count, const Function& function) {
  if constexpr (R > 1)
    if (count < R) return with_constant<R - 1>(count, function);
  function(std::integral_constant<int, R>{});
}

// Products by AVX-512's dot products of pairs.
class DotProducts {
 public:
  explicit DotProducts(int64_t) {}

  void score(TileRows& rows, const ChunkPointers& chunk, int64_t block_size) const {
    for (int64_t row = 0; row < rows.num_rows; row += kMaxRows)
      with_constant<kMaxRows>(rows.num_rows - row,
                              [&](auto count) { score_rows<decltype(count)::value>(rows, chunk, block_size, row); });
  }

  void weigh(TileRows& rows, const ChunkPointers& chunk) const {
    for (int64_t row = 0; row < rows.num_rows; row += kMaxRows)
      with_constant<kMaxRows>(rows.num_rows - row,
                              [&](auto count) { weigh_rows<decltype(count)::value>(rows, chunk, row); });
  }

 private:
  static constexpr int64_t kMaxRows = 8;
  // Vectors for R rows: enough sums to hide their latency, few enough for registers.
  template <int R>
  static constexpr int kVectors = R <= 4 ? 4 : 2;

  template <int R>
  static void score_rows(TileRows& rows, const ChunkPointers& chunk, int64_t block_size, int64_t row) {
    for (int64_t t = 0; t < chunk.num_tiles; t += kVectors<R>)
      with_constant<kVectors<R>>(chunk.num_tiles - t, [&](auto count) {
        Floats sums[R][decltype(count)::value] = {};
        add_products(rows.q + row * rows.dim, rows.dim, rows.dim / 2, chunk.tiles + t, 2 * block_size, sums);
        store_sums(sums, rows.scores + row * kRowStride + t * kTileKeys, kRowStride);
      });
  }

  template <int R>
  static void weigh_rows(TileRows& rows, const ChunkPointers& chunk, int64_t row) {
    for (int64_t h = 0; h < rows.dim; h += kVectors<R> * kWidth)
      with_constant<kVectors<R>>((rows.dim - h) / kWidth, [&](auto count) {
        constexpr int V = decltype(count)::value;
        Floats sums[R][V] = {};
        for (int64_t step = 0; step < chunk.num_steps; step++) {
          const BFloat16* columns[V];
          for (int v = 0; v < V; v++) columns[v] = chunk.steps[step] + 2 * (h + v * kWidth);
          add_products(rows.weights + row * kMaxChunk + step * chunk.step_keys, kMaxChunk, chunk.step_keys / 2, columns,
                       2 * rows.dim, sums);
        }
        store_sums(sums, rows.part + row * rows.dim + h, rows.dim);
      });
  }

  // Adds the products of `num_pairs` pairs of each of R rows `a` with those of V columns.
  template <int R, int V>
  static void add_products(const BFloat16* a, int64_t a_stride, int64_t num_pairs, const BFloat16* const* columns,
                           int64_t column_stride, Floats (&sums)[R][V]) {
    for (int64_t i = 0; i < num_pairs; i++) {
      __m512i b[V];
      for (int v = 0; v < V; v++) b[v] = _mm512_loadu_si512(columns[v] + i * column_stride);
      for (int r = 0; r < R; r++) {
        int32_t pair;
        std::memcpy(&pair, a + r * a_stride + 2 * i, sizeof(pair));
        const __m512i pairs = _mm512_set1_epi32(pair);
        for (int v = 0; v < V; v++)
          sums[r][v] = (Floats)_mm512_dpbf16_ps((__m512)sums[r][v], (__m512bh)pairs, (__m512bh)b[v]);
      }
    }
  }

  template <int R, int V>
  static void store_sums(const Floats (&sums)[R][V], float* to, int64_t stride) {
    for (int r = 0; r < R; r++)
      for (int v = 0; v < V; v++) store(to + r * stride + v * kWidth, sums[r][v]);
  }
};

// Products by AMX.
class AmxProducts {
 public:
  explicit AmxProducts(int64_t num_rows) : num_rows_(num_rows) {}

  void score(TileRows& rows, const ChunkPointers& chunk, int64_t block_size) {
    shapes_.set(num_rows_, kTileInner);
    num_rows_ > 16 ? score_tiles<true>(rows, chunk, block_size) : score_tiles<false>(rows, chunk, block_size);
  }

  void weigh(TileRows& rows, const ChunkPointers& chunk) {
    shapes_.set(num_rows_, chunk.step_keys);
    num_rows_ > 16 ? weigh_tiles<true>(rows, chunk) : weigh_tiles<false>(rows, chunk);
  }

 private:
  template <bool has_lower>
  static void score_tiles(TileRows& rows, const ChunkPointers& chunk, int64_t block_size) {
    int64_t t = 0;
    for (; t + 2 <= chunk.num_tiles; t += 2) score_columns<has_lower, true>(rows, chunk, block_size, t);
    if (t < chunk.num_tiles) score_columns<has_lower, false>(rows, chunk, block_size, t);
  }

  template <bool has_lower, bool is_pair>
  static void score_columns(TileRows& rows, const ChunkPointers& chunk, int64_t block_size, int64_t t) {
    clear_tiles<has_lower, is_pair>();
    for (int64_t i = 0; i < rows.dim; i += kTileInner)
      add_tile_products<has_lower, is_pair>(rows.q + i, rows.dim, chunk.tiles[t] + i * block_size,
                                            chunk.tiles[t + is_pair] + i * block_size, 2 * block_size);
    store_tiles<has_lower, is_pair>(rows.scores + t * kTileKeys, kRowStride);
  }

  template <bool has_lower>
  static void weigh_tiles(TileRows& rows, const ChunkPointers& chunk) {
    for (int64_t h = 0; h < rows.dim; h += 2 * kTileColumns) {
      clear_tiles<has_lower, true>();
      for (int64_t step = 0; step < chunk.num_steps; step++) {
        const BFloat16* values = chunk.steps[step] + 2 * h;
        add_tile_products<has_lower, true>(rows.weights + step * chunk.step_keys, kMaxChunk, values,
                                           values + 2 * kTileColumns, 2 * rows.dim);
      }
      store_tiles<has_lower, true>(rows.part + h, rows.dim);
    }
  }

  int64_t num_rows_;
  TileShapes shapes_;
};

}  // namespace
