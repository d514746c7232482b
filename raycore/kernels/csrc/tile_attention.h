// Attention in bfloat16, with instructions that multiply and add pairs of bfloat16 numbers.
//
// As in attention.h, keys are visited in chunks at fixed positions, so that the bits of a row's result depend on its
// query and on the keys and values that it sees. But many more rows share what is read of a chunk, and weights are
// rounded to bfloat16 before they are multiplied with values. A chunk's weighted values are added to those of the
// chunks before it, which are scaled first if this chunk has a higher score.
//
// Integers of 8 bits become the bfloat16 numbers that they equal: in registers for few rows, in copies for many. Scores
// and weights are multiplied with their scales.
//
// A class `Products` computes the matrix products: scores of tiles of 16 keys, and sums of weighted values, kStep at a
// time.

#pragma once

#include "amx.h"
#include "attention.h"

namespace {

constexpr int64_t kTileKeys = 16;
constexpr int64_t kMaxTiles = kMaxTaskRows / kTileRows;
constexpr int64_t kKeyUnit = 2 * kWidth;  // a weight is always added in the same lane of two vectors

// The queries of some rows, and their results for all chunks so far: sums of weighted values, the sum of the weights,
// and the highest score, relative to which the weights are. Scores are multiplied with `log2_scale` before they are
// powers of two.
struct TileRows {
  int64_t num_rows, dim, from[kTileRows], to[kTileRows];
  int64_t begin, end;  // of the keys that any row sees
  float log2_scale, highest[kTileRows], total[kTileRows];
  alignas(64) BFloat16 q[kTileRows * kMaxHeadDim];  // [rows, H]
  alignas(64) float sums[kTileRows * kMaxHeadDim];  // [rows, H]
};

// Where a chunk's keys and values are, as numbers of type P, and what is computed of them for a tile of rows. C is the
// cache's type.
template <typename C, typename P>
struct Chunk {
  int64_t first, num_tiles, num_steps;
  int64_t seen;                                         // where the first block begins that any row sees
  int64_t low, high;                                    // of the keys that the tile of rows sees, from `first` on
  int64_t key_stride;                                   // between pairs of a key's components
  const P* tiles[kMaxChunk / kTileKeys];                // [H / 2, 16, 2], the first dimension `key_stride` apart
  const P* steps[kMaxChunk / kTileKeys];                // [kStep / 2, H, 2]
  int64_t num_next, next_stride;                        // of the next chunk's tiles
  const C* next[kMaxChunk / kTileKeys];                 // where the cache has these
  alignas(64) float scores[kTileRows * kRowStride];     // [rows, kRowStride]
  alignas(64) BFloat16 weights[kTileRows * kMaxChunk];  // [rows, kMaxChunk]
  ChunkScales<C> scales;
  // copies of what can't be read where it is
  alignas(64) P keys[std::is_same<C, P>::value ? 1 : kMaxChunk * kMaxHeadDim];
  alignas(64) P values[std::is_same<P, int8_t>::value ? 1 : kMaxChunk * kMaxHeadDim];
};

// The weights of a row: powers of two of the scores, relative to the highest one so far. `chunk.high`: a multiple of 16.
template <typename C, typename P>
inline void weigh_scores(const AttentionArgs& args, TileRows& rows, Chunk<C, P>& chunk, int64_t row) {
  float* scores = chunk.scores + row * kRowStride;
  BFloat16* weights = chunk.weights + row * kMaxChunk;
  const int64_t from = rows.from[row] > chunk.first ? rows.from[row] - chunk.first : 0;
  const int64_t to = rows.to[row] - chunk.first < chunk.high ? rows.to[row] - chunk.first : chunk.high;
  if (from >= to) {
    std::memset(weights + chunk.low, 0, (chunk.high - chunk.low) * sizeof(BFloat16));
    return;
  }
  // two vectors at a time; those between `low` and `high` have keys that the row sees
  constexpr int64_t W = kKeyUnit;
  const int64_t low = from / W * W, high = round_up(to, W);
  std::memset(weights + chunk.low, 0, (low - chunk.low) * sizeof(BFloat16));
  if (high < chunk.high) std::memset(weights + high, 0, (chunk.high - high) * sizeof(BFloat16));
  if constexpr (kHasScales<C>)
    for (int64_t i = low; i < high; i += kWidth) store(scores + i, load(scores + i) * load(chunk.scales.keys + i));
  if (args.softcap) cap_scores(args, scores, low, high);
  for (int64_t i = low; i < from; i++) scores[i] = -kInfinity;
  for (int64_t i = to; i < high; i++) scores[i] = -kInfinity;
  Floats top0 = splat(-kInfinity), top1 = top0;
  for (int64_t i = low; i < high; i += W) {
    top0 = maximum(load(scores + i), top0);
    top1 = maximum(load(scores + i + kWidth), top1);
  }
  const float top = maximum(maximum(top0, top1)) * rows.log2_scale, old = rows.highest[row];
  if (top > old) {
    const Floats factor = exp2(splat(old - top));
    float* sums = rows.sums + row * rows.dim;
    for (int64_t i = 0; i < rows.dim; i += kWidth) store(sums + i, load(sums + i) * factor);
    rows.total[row] *= factor[0];
    rows.highest[row] = top;
  }
  const Floats scale = splat(rows.log2_scale), shift = splat(rows.highest[row]);
  Floats total0 = {}, total1 = {};
  for (int64_t i = low; i < high; i += W) {
    Floats weight0 = exp2(multiply_add(load(scores + i), scale, -shift));
    Floats weight1 = exp2(multiply_add(load(scores + i + kWidth), scale, -shift));
    total0 += weight0;
    total1 += weight1;
    if constexpr (kHasScales<C>) {
      weight0 = scaled_weight(weight0, load(chunk.scales.values + i));
      weight1 = scaled_weight(weight1, load(chunk.scales.values + i + kWidth));
    }
    _mm512_storeu_si512(weights + i, (__m512i)_mm512_cvtne2ps_pbh((__m512)weight1, (__m512)weight0));
  }
  rows.total[row] += sum(total0 + total1);
}

// Prepares for the keys from `chunk.first` to `end`. What the cache has after `end` may be NaN, and so may blocks before
// `chunk.seen`, which other sequences may have by now. The product with a weight of 0 would be NaN, too. So a step with
// such values is copied without them, like one whose values aren't adjacent in the cache.
template <int64_t kStep>
void find_chunk(const AttentionArgs& args, const Sequence& sequence, int64_t head, int64_t end,
                Chunk<BFloat16, BFloat16>& chunk) {
  const int32_t* table = args.tables + sequence.slot * args.table_stride;
  const int64_t S = args.block_size, H = args.head_dim, num_keys = end - chunk.first;
  chunk.num_tiles = (num_keys + kTileKeys - 1) / kTileKeys;
  chunk.num_steps = (num_keys + kStep - 1) / kStep;
  chunk.key_stride = 2 * S;
  for (int64_t i = 0; i < chunk.num_tiles; i++) {
    const int64_t key = chunk.first + i * kTileKeys;
    chunk.tiles[i] = block_of<BFloat16>(args, table, head, key).keys + key % S * 2;
  }
  const auto values_of = [&](int64_t key) {
    return block_of<BFloat16>(args, table, head, key).values + key % S * H;
  };
  for (int64_t i = 0; i < chunk.num_steps; i++) {
    const int64_t key = chunk.first + i * kStep;
    if (key >= chunk.seen && key + kStep <= end && S % kStep == 0) {
      chunk.steps[i] = values_of(key);
      continue;
    }
    BFloat16* to = chunk.values + i * kStep * H;
    chunk.steps[i] = to;
    for (int64_t k = key; k < key + kStep; k += kTileKeys, to += kTileKeys * H) {
      const int64_t left = k < chunk.seen ? 0 : end - k;
      const int64_t copied = left <= 0 ? 0 : left < kTileKeys ? (left + 1) / 2 * 2 : kTileKeys;
      if (copied) std::memcpy(to, values_of(k), copied * H * sizeof(BFloat16));
      if (copied > left && left > 0)
        for (int64_t h = 0; h < H; h++) to[(left / 2 * H + h) * 2 + 1] = {0};
      std::memset(to + copied * H, 0, (kTileKeys - copied) * H * sizeof(BFloat16));
    }
  }
}

// The same for integers, which are read where they are or, if P is BFloat16, copied. None of them is NaN, but a scale
// may be.
template <int64_t kStep, typename P>
void find_chunk(const AttentionArgs& args, const Sequence& sequence, int64_t head, int64_t end,
                Chunk<int8_t, P>& chunk) {
  const int32_t* table = args.tables + sequence.slot * args.table_stride;
  const int64_t S = args.block_size, H = args.head_dim, num_keys = end - chunk.first;
  chunk.num_tiles = (num_keys + kTileKeys - 1) / kTileKeys;
  chunk.num_steps = (num_keys + kStep - 1) / kStep;
  chunk.key_stride = std::is_same<P, int8_t>::value ? 2 * S : 2 * kTileKeys;
  chunk.scales.clear();
  for (int64_t i = 0; i < chunk.num_tiles; i++) {
    const int64_t key = chunk.first + i * kTileKeys, left = end - key;
    const Block<int8_t> block = block_of<int8_t>(args, table, head, key);
    const int8_t* keys = block.keys + key % S * 2;
    const int8_t* values = block.values + key % S * H;
    chunk.scales.take(args, block, key % S, left < kTileKeys ? left : kTileKeys, i * kTileKeys);
    if constexpr (std::is_same<P, int8_t>::value) {
      static_assert(kStep == kTileKeys, "what is behind the last key of a step has to be in its block");
      chunk.tiles[i] = keys;
      chunk.steps[i] = values;
    } else {
      BFloat16* const copies[] = {chunk.keys + i * kTileKeys * H, chunk.values + i * kTileKeys * H};
      chunk.tiles[i] = copies[0];
      for (int64_t h = 0; h < H; h += 2) store_pairs(copies[0] + h * kTileKeys, load_pairs(keys + h * S));
      for (int64_t j = 0; j < kTileKeys * H; j += 2 * kWidth) store_pairs(copies[1] + j, load_pairs(values + j));
    }
  }
  if constexpr (!std::is_same<P, int8_t>::value) {
    for (int64_t i = 0; i < chunk.num_steps; i++) chunk.steps[i] = chunk.values + i * kStep * H;
    const int64_t num_copied = chunk.num_tiles * kTileKeys;
    std::memset(chunk.values + num_copied * H, 0, (chunk.num_steps * kStep - num_copied) * H * sizeof(BFloat16));
  }
}

// The same for keys and values of the step, which are copied.
template <int64_t kStep>
void find_chunk(const AttentionArgs& args, const Sequence& sequence, int64_t head, int64_t end,
                Chunk<Uncached, BFloat16>& chunk) {
  const int64_t N = args.num_heads, H = args.head_dim, num_keys = end - chunk.first;
  const BFloat16* from = static_cast<const BFloat16*>(args.qkv) + (sequence.first_row + chunk.first) * 3 * N * H;
  const auto key_of = [&](int64_t token) { return from + ((token * 3 + 1) * N + head) * H; };
  chunk.num_tiles = (num_keys + kTileKeys - 1) / kTileKeys;
  chunk.num_steps = (num_keys + kStep - 1) / kStep;
  chunk.key_stride = 2 * kTileKeys;
  for (int64_t i = 0; i < chunk.num_tiles; i++) {
    BFloat16* to = chunk.keys + i * kTileKeys * H;
    chunk.tiles[i] = to;
    for (int64_t h = 0; h < H; h += 2 * kTileKeys) {
      Floats pairs[kWidth];
      for (int64_t t = 0, token = i * kTileKeys; t < kTileKeys; t++, token++)
        pairs[t] = token < num_keys ? load_pairs(key_of(token) + h) : Floats{};
      transpose(pairs);
      for (int64_t j = 0; j < kTileKeys; j++) store_pairs(to + (h / 2 + j) * chunk.key_stride, pairs[j]);
    }
  }
  for (int64_t i = 0; i < chunk.num_steps; i++) chunk.steps[i] = chunk.values + i * kStep * H;
  for (int64_t token = 0; token < chunk.num_steps * kStep; token += 2) {
    BFloat16* to = chunk.values + token * H;
    for (int64_t h = 0; h < H; h += kWidth) {
      Words first = {}, second = {};
      if (token < num_keys) first = bits_of<Words>(load(key_of(token) + N * H + h));
      if (token + 1 < num_keys) second = bits_of<Words>(load(key_of(token + 1) + N * H + h));
      store_pairs(to + 2 * h, bits_of<Floats>(first >> 16 | second));
    }
  }
}

// Finds the tiles of the chunk after `chunk`, of keys from `first` to `end`.
template <typename C, typename P>
void find_next(const AttentionArgs& args, const Sequence& sequence, int64_t head, int64_t first, int64_t end,
               Chunk<C, P>& chunk) {
  const int32_t* table = args.tables + sequence.slot * args.table_stride;
  chunk.next_stride = 2 * args.block_size;
  for (int64_t key = first; key < end && key < first + kMaxChunk; key += kTileKeys)
    chunk.next[chunk.num_next++] = block_of<C>(args, table, head, key).keys + key % args.block_size * 2;
}

// Has `count` rows of 32 numbers, `stride` apart, read into a core's second cache. Processors read ahead by themselves,
// but not into the next block.
template <typename C>
inline void fetch_ahead(const C* from, int64_t count, int64_t stride) {
  const int64_t each = stride * sizeof(C) < 64 ? 2 : 1;  // rows in a cache line
  for (int64_t i = 0; i < count; i += each) __builtin_prefetch(from + i * stride, 0, 2);
}

// Results of up to kMaxTaskRows rows of one sequence and key-value head. C is the cache's type, and P the type of the
// keys and values that products are computed of. P makes no difference to the results.
template <class Products, typename C, typename P>
void attend_task(const AttentionArgs& args, const Sequence& sequence, int64_t head, int64_t first_row,
                 int64_t num_rows) {
  const int64_t N = args.num_heads, K = args.num_kv_heads, G = N / K, H = args.head_dim;
  const int64_t row_size = heads_per_row(args) * H;
  const BFloat16* qkv = static_cast<const BFloat16*>(args.qkv) + sequence.first_row * row_size;
  const int64_t num_tiles = (num_rows + kTileRows - 1) / kTileRows;
  TileRows tiles[kMaxTiles];
  Chunk<C, P> chunk;
  int64_t begin = INT64_MAX, end = 0;
  for (int64_t t = 0; t < num_tiles; t++) {
    TileRows& rows = tiles[t];
    rows.num_rows = num_rows - t * kTileRows < kTileRows ? num_rows - t * kTileRows : kTileRows;
    rows.dim = H;
    rows.begin = INT64_MAX;
    rows.end = 0;
    rows.log2_scale = exponent_factor(args);
    for (int64_t r = 0; r < rows.num_rows; r++) {
      const int64_t row = first_row + t * kTileRows + r, query = head * G + row % G;
      std::memcpy(rows.q + r * H, qkv + row / G * row_size + query * H, H * sizeof(BFloat16));
      const KeyRange seen(args, sequence, row / G);
      rows.from[r] = seen.from;
      rows.to[r] = seen.to;
      rows.highest[r] = args.sinks ? args.sinks[query] * kLog2OfE : -kInfinity;
      rows.total[r] = args.sinks ? 1 : 0;
      rows.begin = seen.from < rows.begin ? seen.from : rows.begin;
      rows.end = seen.to > rows.end ? seen.to : rows.end;
    }
    begin = rows.begin < begin ? rows.begin : begin;
    end = rows.end > end ? rows.end : end;
    std::memset(rows.sums, 0, rows.num_rows * H * sizeof(float));
  }
  chunk.seen = begin / args.block_size * args.block_size;
  constexpr int64_t kStep = Products::kStep;
  Products products;
  for (int64_t first = begin / kKeyUnit * kKeyUnit, next; first < end; first = next) {
    next = (first / kMaxChunk + 1) * kMaxChunk;
    chunk.first = first;
    find_chunk<kStep>(args, sequence, head, next < end ? next : end, chunk);
    chunk.num_next = 0;
    if constexpr (Products::kReadsAhead && !kIsUncached<C>) find_next(args, sequence, head, next, end, chunk);
    for (int64_t t = 0; t < num_tiles; t++) {
      // with a window, a tile's rows see some of a task's keys
      const int64_t keys = chunk.num_steps * kStep, seen = round_up(tiles[t].end - first, kKeyUnit);
      chunk.low = tiles[t].begin > first ? (tiles[t].begin - first) / kKeyUnit * kKeyUnit : 0;
      chunk.high = seen < keys ? seen : keys;
      if (chunk.low >= chunk.high) continue;
      products.score(tiles[t], chunk);
      for (int64_t r = 0; r < tiles[t].num_rows; r++) weigh_scores(args, tiles[t], chunk, r);
      products.weigh(tiles[t], chunk);
    }
  }
  for (int64_t t = 0; t < num_tiles; t++) {
    const TileRows& rows = tiles[t];
    for (int64_t r = 0; r < rows.num_rows; r++) {
      const int64_t row = first_row + t * kTileRows + r;
      store_result<BFloat16>(args, sequence.first_row + row / G, head * G + row % G, rows.sums + r * H, rows.highest[r],
                             rows.total[r]);
    }
  }
}

template <class Products, typename C>
void attend_tiles(const AttentionArgs& args, const Sequence& sequence, int64_t head, int64_t row, int64_t last_row) {
  if constexpr (kHasScales<C> && Products::kMaxIntegerRows > 0)
    if (last_row - row <= Products::kMaxIntegerRows)
      return attend_task<Products, C, C>(args, sequence, head, row, last_row - row);
  for (; row < last_row; row += kMaxTaskRows)
    attend_task<Products, C, BFloat16>(args, sequence, head, row,
                                       last_row - row < kMaxTaskRows ? last_row - row : kMaxTaskRows);
}

Kernels simpler;  // the table before this part is added to it: what computes shapes that tiles don't fit

template <class Products, typename C>
void tile_attention(const AttentionArgs& args, const Threads& threads) {
  const auto& others = kHasScales<C> ? simpler.int8_attention : simpler.attention;
  if (args.head_dim % 32 || args.block_size % kTileKeys) others[kBFloat16](args, threads);
  else attention<BFloat16, C>(args, threads, attend_tiles<Products, C>, kMaxTaskRows);
}

template <class Products>
void uncached_tile_attention(const AttentionArgs& args, const Threads& threads) {
  if (args.head_dim % 32) simpler.uncached_attention[kBFloat16](args, threads);
  else uncached_attention<BFloat16>(args, threads, attend_tiles<Products, Uncached>, kMaxTaskRows);
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
  static constexpr int64_t kStep = kTileKeys;
  static constexpr bool kReadsAhead = true;
  static constexpr int64_t kMaxIntegerRows = 8;  // more would widen the same integers again

  template <typename C, typename P>
  void score(const TileRows& rows, Chunk<C, P>& chunk) const {
    for (int64_t row = 0; row < rows.num_rows; row += kMaxRows)
      with_constant<kMaxRows>(rows.num_rows - row,
                              [&](auto count) { score_rows<decltype(count)::value>(rows, chunk, row); });
  }

  template <typename C, typename P>
  void weigh(TileRows& rows, const Chunk<C, P>& chunk) const {
    for (int64_t row = 0; row < rows.num_rows; row += kMaxRows)
      with_constant<kMaxRows>(rows.num_rows - row,
                              [&](auto count) { weigh_rows<decltype(count)::value>(rows, chunk, row); });
  }

 private:
  static constexpr int64_t kMaxRows = 8;
  // Vectors for R rows: enough sums to hide their latency, few enough for registers.
  template <int R>
  static constexpr int kVectors = R <= 4 ? 4 : 2;

  template <int R, typename C, typename P>
  static void score_rows(const TileRows& rows, Chunk<C, P>& chunk, int64_t row) {
    const int64_t last = chunk.high / kTileKeys;
    for (int64_t t = chunk.low / kTileKeys; t < last; t += kVectors<R>)
      with_constant<kVectors<R>>(last - t, [&](auto count) {
        if constexpr (std::is_same<C, P>::value)  // copies are in the cache already
          if (row == 0)
            for (int64_t i = t; i < t + decltype(count)::value; i++)
              fetch_ahead(chunk.steps[i], rows.dim / 2, 2 * kTileKeys);
        Floats sums[R][decltype(count)::value] = {};
        add_products(rows.q + row * rows.dim, rows.dim, rows.dim / 2, chunk.tiles + t, chunk.key_stride, sums);
        store_sums(sums, chunk.scores + row * kRowStride + t * kTileKeys, kRowStride);
      });
  }

  // Not inlined: with GCC 12 on Zen 4, attention of prompts of some 40 tokens takes a tenth longer otherwise.
  template <int R, typename C, typename P>
  static __attribute__((noinline)) void weigh_rows(TileRows& rows, const Chunk<C, P>& chunk, int64_t row) {
    for (int64_t h = 0; h < rows.dim; h += kVectors<R> * kWidth)
      with_constant<kVectors<R>>((rows.dim - h) / kWidth, [&](auto count) {
        constexpr int V = decltype(count)::value;
        float* to = rows.sums + row * rows.dim + h;
        Floats sums[R][V];
        for (int r = 0; r < R; r++)
          for (int v = 0; v < V; v++) sums[r][v] = load(to + r * rows.dim + v * kWidth);
        for (int64_t step = chunk.low / kStep; step < chunk.high / kStep; step++) {
          if (row == 0 && h == 0 && step < chunk.num_next)
            fetch_ahead(chunk.next[step], rows.dim / 2, chunk.next_stride);
          const P* columns[V];
          for (int v = 0; v < V; v++) columns[v] = chunk.steps[step] + 2 * (h + v * kWidth);
          add_products(chunk.weights + row * kMaxChunk + step * kStep, kMaxChunk, kStep / 2, columns, 2 * rows.dim,
                       sums);
        }
        store_sums(sums, to, rows.dim);
      });
  }

  // Adds the products of `num_pairs` pairs of each of R rows `a` with those of V columns.
  template <int R, int V, typename P>
  static void add_products(const BFloat16* a, int64_t a_stride, int64_t num_pairs, const P* const* columns,
                           int64_t column_stride, Floats (&sums)[R][V]) {
    for (int64_t i = 0; i < num_pairs; i++) {
      Floats b[V];
      for (int v = 0; v < V; v++) b[v] = load_pairs(columns[v] + i * column_stride);
      for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) sums[r][v] = add_pairs(sums[r][v], b[v], a + r * a_stride + 2 * i);
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
  static constexpr int64_t kStep = kTileInner;
  static constexpr bool kReadsAhead = false;
  static constexpr int64_t kMaxIntegerRows = 0;  // tiles are loaded from copies

  template <typename C>
  void score(const TileRows& rows, Chunk<C, BFloat16>& chunk) {
    shapes_.set(rows.num_rows, kTileInner);
    rows.num_rows > 16 ? score_tiles<true>(rows, chunk) : score_tiles<false>(rows, chunk);
  }

  template <typename C>
  void weigh(TileRows& rows, const Chunk<C, BFloat16>& chunk) {
    shapes_.set(rows.num_rows, kTileInner);
    rows.num_rows > 16 ? weigh_tiles<true>(rows, chunk) : weigh_tiles<false>(rows, chunk);
  }

 private:
  template <bool has_lower, typename C>
  static void score_tiles(const TileRows& rows, Chunk<C, BFloat16>& chunk) {
    const int64_t seen = chunk.high / kTileKeys, last = seen < chunk.num_tiles ? seen : chunk.num_tiles;
    int64_t t = chunk.low / kTileKeys;
    for (; t + 2 <= last; t += 2) score_columns<has_lower, true>(rows, chunk, t);
    if (t < last) score_columns<has_lower, false>(rows, chunk, t);
  }

  template <bool has_lower, bool is_pair, typename C>
  static void score_columns(const TileRows& rows, Chunk<C, BFloat16>& chunk, int64_t t) {
    clear_tiles<has_lower, is_pair>();
    for (int64_t i = 0; i < rows.dim; i += kTileInner)
      add_tile_products<has_lower, is_pair>(rows.q + i, rows.dim, chunk.tiles[t] + i / 2 * chunk.key_stride,
                                            chunk.tiles[t + is_pair] + i / 2 * chunk.key_stride, chunk.key_stride);
    store_tiles<has_lower, is_pair>(chunk.scores + t * kTileKeys, kRowStride);
  }

  template <bool has_lower, typename C>
  static void weigh_tiles(TileRows& rows, const Chunk<C, BFloat16>& chunk) {
    for (int64_t h = 0; h < rows.dim; h += 2 * kTileColumns) {
      load_tiles<has_lower, true>(rows.sums + h, rows.dim);
      for (int64_t step = chunk.low / kStep; step < chunk.high / kStep; step++) {
        const BFloat16* values = chunk.steps[step] + 2 * h;
        add_tile_products<has_lower, true>(chunk.weights + step * kStep, kMaxChunk, values, values + 2 * kTileColumns,
                                           2 * rows.dim);
      }
      store_tiles<has_lower, true>(rows.sums + h, rows.dim);
    }
  }

  TileShapes shapes_;
};

}  // namespace
