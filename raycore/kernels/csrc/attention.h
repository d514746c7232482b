// Attention of a step's tokens to paged keys and values, where they lie.
//
// A task is one key-value head of some adjacent tokens of one sequence. Its rows are the queries of these tokens that
// share the head. Keys are visited in chunks, which begin at fixed positions, and a row's results are added up in the
// order of its keys. So their bits depend on its query and on the keys and values that it sees: not on the task's other
// rows, on other sequences, or on the number of threads.

#pragma once

#include "kernels.h"
#include "rotation.h"
#include "threads.h"
#include "vectors.h"

namespace {

using namespace raycore;

constexpr int64_t kMaxChunk = 256;  // keys
constexpr int64_t kRowStride = kMaxChunk + kWidth;  // a block's last vector may reach beyond the chunk
constexpr int kBlocksTogether = 4;  // whose values are added up in registers
constexpr int kGroupRows = kWidth == 16 ? 8 : 6;  // whose sums fit in the registers
constexpr int kScoreVectors = kWidth == 4 ? 4 : 2;  // enough sums to hide their latency
constexpr int kSliceVectors = 2;                    // of values that all rows of a task share
constexpr int64_t kMinTaskRows = 32, kMaxTaskRows = 128, kMaxTaskNumbers = kMaxTaskRows * 136;
constexpr int64_t kPreparedTokens = 16;  // of a task; their keys and values fit in a core's cache

// In a function that reads and writes the cache, T is the model's type, and C the cache's. Integers have scales.
template <typename C>
constexpr bool kHasScales = std::is_same<C, int8_t>::value;

// In place of C: there is no cache, and keys and values are those of the step.
struct Uncached {};
template <typename C>
constexpr bool kIsUncached = std::is_same<C, Uncached>::value;

// Where one head's keys and values of a block are.
template <typename C>
struct Block {
  C* keys;
  C* values;

  float* key_scales(const AttentionArgs& args) const { return scales(keys, args); }
  float* value_scales(const AttentionArgs& args) const { return scales(values, args); }

 private:
  static float* scales(C* numbers, const AttentionArgs& args) {
    return reinterpret_cast<float*>(numbers + args.block_size * args.head_dim);
  }
};

template <typename C>
inline Block<C> block_of(const AttentionArgs& args, const int32_t* table, int64_t head, int64_t position) {
  const int64_t size = args.block_size * (args.head_dim + (kHasScales<C> ? sizeof(float) : 0));
  C* block = static_cast<C*>(args.cache) + table[position / args.block_size] * 2 * args.num_kv_heads * size;
  return {block + head * size, block + (args.num_kv_heads + head) * size};
}

// Rounds a head to integers from -127 to 127. Returns their scale; NaN if a number isn't finite.
template <typename T>
inline float quantize_head(const T* from, int64_t dim, int8_t* to) {
  typedef int8_t Bytes __attribute__((vector_size(kWidth)));
  Floats top = {}, defect = {};
  for (int64_t i = 0; i < dim; i += kWidth) {
    const Floats x = load_up_to(from + i, dim - i);
    top = maximum(maximum(x, -x), top);
    defect += x - x;  // NaN, if x isn't finite
  }
  const float largest = maximum(top), factor = largest > 0 ? 127.0f / largest : 0.0f;
  for (int64_t i = 0; i < dim; i += kWidth) {
    const Floats rounded = multiply_add(load_up_to(from + i, dim - i), splat(factor), splat(kRounder));
    const Bytes bytes = __builtin_convertvector(bits_of<Ints>(rounded) - bits_of<Ints>(splat(kRounder)), Bytes);
    std::memcpy(to + i, &bytes, dim - i < kWidth ? dim - i : kWidth);
  }
  return largest / 127.0f + sum(defect);
}

// How many of a sequence's first `num_tokens` tokens the cache has. The token at a position that it has is the token
// with this index among those in the cache.
template <typename Args>
inline int64_t num_owned(const Args& args, int64_t num_tokens) {
  if (args.num_owners == 1) return num_tokens;
  const int64_t S = args.block_size, round = S * args.num_owners, rest = num_tokens % round - args.owner * S;
  return num_tokens / round * S + (rest < 0 ? 0 : rest < S ? rest : S);
}

template <typename Args>
inline bool is_owned(const Args& args, int64_t position) {
  return args.num_owners == 1 || position / args.block_size % args.num_owners == args.owner;
}

// How many heads a row of `qkv` has.
inline int64_t heads_per_row(const AttentionArgs& args) {
  return args.part == kAttending ? args.num_heads : args.num_heads + 2 * args.num_kv_heads;
}

// Stores a token's key and value.
template <typename C>
inline void store_numbers(const AttentionArgs& args, const Block<C>& block, int64_t offset, const C* key,
                          const C* value) {
  constexpr int P = kPair<C>;
  const int64_t H = args.head_dim, S = args.block_size;
  for (int64_t i = 0; i < H; i += P) std::memcpy(block.keys + i * S + offset * P, key + i, P * sizeof(C));
  C* values = block.values + offset / P * P * H + offset % P;
  for (int64_t i = 0; i < H; i++) values[i * P] = value[i];
}

// Rotates a token's key, and stores key and value, if they belong into the cache.
template <typename T, typename C>
inline void store_token(const AttentionArgs& args, const int32_t* table, T* row, const float* turns, int64_t position,
                        int64_t head) {
  if (!is_owned(args, position)) return;
  const int64_t N = args.num_heads, K = args.num_kv_heads, H = args.head_dim, offset = position % args.block_size;
  const T* norm = static_cast<const T*>(args.norm);
  T* key = row + (N + head) * H;
  const T* value = key + K * H;
  if (turns) turn_head(key, norm ? norm + (N + head) * H : nullptr, args.norm_offset, turns, H, args.eps);
  const Block<C> block = block_of<C>(args, table, head, num_owned(args, position));
  if constexpr (kHasScales<C>) {
    int8_t numbers[2][kMaxHeadDim];
    block.key_scales(args)[offset] = quantize_head(key, H, numbers[0]);
    block.value_scales(args)[offset] = quantize_head(value, H, numbers[1]);
    store_numbers(args, block, offset, numbers[0], numbers[1]);
  } else {
    store_numbers<C>(args, block, offset, key, value);
  }
}

// Rotates the queries of one token that share a key-value head.
template <typename T>
inline void turn_queries(const AttentionArgs& args, T* row, const float* turns, int64_t head) {
  const int64_t G = args.num_heads / args.num_kv_heads, H = args.head_dim;
  const T* norm = static_cast<const T*>(args.norm);
  if (!turns) return;
  for (int64_t query = head * G; query < (head + 1) * G; query++)
    turn_head(row + query * H, norm ? norm + query * H : nullptr, args.norm_offset, turns, H, args.eps);
}

template <typename C>
inline void fetch(const C* from, int64_t count) {
  for (int64_t i = 0; i < count; i += 64 / sizeof(C)) __builtin_prefetch(from + i);
}

// The scores of R rows for the first `count` keys of V vectors, as exponents of 2. A vector's components begin at its
// pointer in `keys`, and are `stride` apart. `q`: [R, q_stride], scaled. The sums' order is the same for every R and V.
// With `fetches`, fetches as much from the pointers in `next`.
template <typename C, int R, int V, bool fetches>
inline void score(const C* const (&keys)[V], const C* const (&next)[V], int64_t count, int64_t stride, const float* q,
                  int64_t q_stride, int64_t dim, float* scores) {
  Floats sums[R][V] = {};
  const auto add = [&](const Floats(&keys)[V], int64_t i) {
    for (int r = 0; r < R; r++)
      for (int v = 0; v < V; v++) sums[r][v] = multiply_add(keys[v], splat(q[r * q_stride + i]), sums[r][v]);
  };
  for (int64_t i = 0; i < dim; i += kPair<C>) {
    Floats even[V], odd[V];
    for (int v = 0; v < V; v++) {
      if constexpr (fetches) __builtin_prefetch(next[v] + i * stride);
      if constexpr (kPair<C> == 2) widen(keys[v] + i * stride, count, even[v], odd[v]);
      else even[v] = load_up_to(keys[v] + i * stride, count);
    }
    add(even, i);
    if constexpr (kPair<C> == 2) add(odd, i + 1);
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) store(scores + r * kRowStride + v * kWidth, sums[r][v]);
}

// Adds `count` weighted values to the sums of R rows: V vectors of them, from `first` on, of which the first `width`
// numbers count. The values are in blocks of `block_size`. Fetches the values of as many blocks at `next`, up to `end`.
template <typename C, int R, int V>
inline void weigh(const Block<C>* blocks, const Block<C>* next, const Block<C>* end, int64_t block_size,
                  int64_t first, int64_t width, int64_t dim, const float* weights, int64_t count, float* out,
                  int64_t out_stride) {
  Floats sums[R][V];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) sums[r][v] = load(out + r * out_stride + first + v * kWidth);
  const auto add = [&](const Floats(&values)[V], int64_t token) {
    for (int r = 0; r < R; r++)
      for (int v = 0; v < V; v++)
        sums[r][v] = multiply_add(values[v], splat(weights[r * kRowStride + token]), sums[r][v]);
  };
  for (; count > 0; blocks++, weights += block_size, count -= block_size) {
    const int64_t num_tokens = count < block_size ? count : block_size;
    const C* values = blocks->values + first * kPair<C>;
    const C* later = next < end ? next++->values : nullptr;
    for (int64_t s = 0; s < num_tokens; s += kPair<C>) {
      if (later) fetch(later + s * dim, kPair<C> * dim);
      Floats even[V], odd[V];
      for (int v = 0; v < V; v++) {
        if constexpr (kPair<C> == 2) widen(values + s * dim + 2 * v * kWidth, width, even[v], odd[v]);
        else even[v] = load_up_to(values + s * dim + v * kWidth, width);
      }
      add(even, s);
      if (kPair<C> == 2 && s + 1 < num_tokens) add(odd, s + 1);  // behind the last token, there may be a NaN
    }
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) store(out + r * out_stride + first + v * kWidth, sums[r][v]);
}

// Some rows of one sequence and key-value head: their queries, the keys that they see, and their results so far, which
// are weighted sums of values. A weight is 2 to the power of its score minus the highest score.
struct QueryRows {
  alignas(64) float q[kMaxTaskNumbers];     // [rows, stride]
  alignas(64) float sums[kMaxTaskNumbers];  // [rows, stride]
  alignas(64) float weights[kMaxTaskRows * kRowStride];  // of a chunk's keys; first their scores
  float highest[kMaxTaskRows], total[kMaxTaskRows];
  int64_t from[kMaxTaskRows], to[kMaxTaskRows];
  int64_t stride;
};

// The scales of a chunk's keys and values; 1 for those that nobody sees. Unused if the cache has none.
template <typename C>
struct ChunkScales {
  static constexpr int64_t kSize = kHasScales<C> ? kMaxChunk + kWidth : 1;
  alignas(64) float keys[kSize], values[kSize];

  void clear() {
    for (int64_t i = 0; i < kSize; i++) keys[i] = values[i] = 1.0f;
  }
  // Takes those of `count` tokens of a block, from `first` on, for the chunk's keys from `offset` on.
  void take(const AttentionArgs& args, const Block<C>& block, int64_t first, int64_t count, int64_t offset) {
    if constexpr (kHasScales<C>) {
      std::memcpy(keys + offset, block.key_scales(args) + first, count * sizeof(float));
      std::memcpy(values + offset, block.value_scales(args) + first, count * sizeof(float));
    }
  }
};

// A weight times the scale of its value. The product with a scale of NaN stays 0 for values that nobody sees.
inline Floats scaled_weight(Floats weight, Floats scale) {
  return weight == Floats{} ? weight : weight * scale;
}

// Adjacent keys and values of a sequence, at positions `begin` to `end`.
template <typename C>
struct KeyChunk {
  Block<C> blocks[kMaxChunk / 2];
  ChunkScales<C> scales;
  int64_t begin, end;
};

// The keys of a chunk that some adjacent rows see: `begin` to `end`, relative to the chunk. Their blocks begin at
// `first`.
struct SeenKeys {
  int64_t first, begin, end;
  SeenKeys(const QueryRows& rows, int64_t first_row, int64_t last_row, int64_t chunk_begin, int64_t chunk_end,
           int64_t block_size) {
    begin = rows.from[first_row] > chunk_begin ? rows.from[first_row] - chunk_begin : 0;
    const int64_t seen = rows.to[last_row - 1];
    end = (seen < chunk_end ? seen : chunk_end) - chunk_begin;
    first = begin / block_size * block_size;
  }
};

// The keys in the cache that a sequence's token of this step sees.
struct KeyRange {
  int64_t from, to;
  KeyRange(const AttentionArgs& args, const Sequence& sequence, int64_t token) {
    const int64_t position = sequence.start + token, end = position + 1, length = sequence.start + sequence.num_tokens;
    const bool is_near_end = !args.window || position + args.window >= length;
    const int64_t last = args.ends ? args.ends[sequence.first_row + token] : end;
    to = num_owned(args, !args.is_two_sided ? last : is_near_end ? length : position + args.window);
    from = args.window && end > args.window ? num_owned(args, end - args.window) : 0;
  }
};

// Stores the result of a row of `qkv`, for the query `query`.
template <typename T>
inline void store_result(const AttentionArgs& args, int64_t row, int64_t query, const float* sums, float highest,
                         float total) {
  const int64_t N = args.num_heads, H = args.head_dim, index = row * N + query;
  if (args.part == kAttending) {
    float* out = static_cast<float*>(args.out) + index * (H + 2);
    const PartOfWeights weights{highest, total};
    std::memcpy(out, sums, H * sizeof(float));
    std::memcpy(out + H, &weights, sizeof(weights));
    return;
  }
  T* out = static_cast<T*>(args.out) + index * H;
  const Floats factor = splat(1.0f / total);
  for (int64_t i = 0; i < H; i += kWidth) store_up_to(out + i, load(sums + i) * factor, H - i);
}

// What makes products of queries and keys exponents of two. Capped ones are.
inline float exponent_factor(const AttentionArgs& args) {
  return args.softcap ? 1.0f : args.scale * kLog2OfE;
}

// Caps a row's scores, which are products of queries and keys, and makes them exponents of two.
inline void cap_scores(const AttentionArgs& args, float* scores, int64_t begin, int64_t end) {
  const Floats factor = splat(args.scale / args.softcap), cap = splat(args.softcap * kLog2OfE);
  for (int64_t i = begin; i < end; i += kWidth)
    store(scores + i, hyperbolic_tangent(load(scores + i) * factor) * cap);
}

// Turns a row's scores into weights, and scales its sums accordingly.
template <typename C>
inline void weigh_keys(const AttentionArgs& args, QueryRows& rows, int64_t row, const KeyChunk<C>& chunk,
                       const SeenKeys& seen) {
  float* scores = rows.weights + row * kRowStride;
  const int64_t chunk_begin = chunk.begin;
  // vectors begin at multiples of kWidth, so that a key's weight is always added in the same lane
  const int64_t low = seen.first / kWidth * kWidth, end = seen.end;
  const int64_t from = rows.from[row] - chunk_begin > seen.first ? rows.from[row] - chunk_begin : seen.first;
  const int64_t to = rows.to[row] - chunk_begin < end ? rows.to[row] - chunk_begin : end;
  if constexpr (kHasScales<C>)
    for (int64_t i = low; i < end; i += kWidth) store(scores + i, load(scores + i) * load(chunk.scales.keys + i));
  if (args.softcap) cap_scores(args, scores, low, end);
  for (int64_t i = low; i < from && i < end; i++) scores[i] = -kInfinity;
  for (int64_t i = to > low ? to : low; i < end + kWidth; i++) scores[i] = -kInfinity;
  Floats top = splat(rows.highest[row]);
  for (int64_t i = low; i < end; i += kWidth) top = maximum(load(scores + i), top);
  const float highest = maximum(top);
  const Floats shift = splat(highest == -kInfinity ? 0.0f : highest);
  Floats total = {};
  for (int64_t i = low; i < end; i += kWidth) {
    const Floats weight = power_of_two(load(scores + i) - shift);
    if constexpr (kHasScales<C>) store(scores + i, scaled_weight(weight, load(chunk.scales.values + i)));
    else store(scores + i, weight);
    total += weight;
  }
  const Floats kept = power_of_two(splat(rows.highest[row]) - shift);  // 0 before the first key
  rows.total[row] = rows.total[row] * kept[0] + sum(total);
  rows.highest[row] = highest;
  float* sums = rows.sums + row * rows.stride;
  for (int64_t i = 0; i < args.head_dim; i += kWidth) store(sums + i, load(sums + i) * kept);
}

// Adds a chunk to the results of the only R rows of a task.
template <typename C, int R>
void attend_few_rows(const AttentionArgs& args, const KeyChunk<C>& chunk, QueryRows& rows) {
  const int64_t S = args.block_size, H = args.head_dim;
  const SeenKeys seen(rows, 0, R, chunk.begin, chunk.end, S);
  if (seen.begin >= seen.end) return;
  const int64_t num_blocks = (seen.end - seen.first + S - 1) / S;
  const Block<C>* blocks = chunk.blocks + seen.first / S;
  // enough sums to hide their latency, in the registers
  constexpr int V = kWidth == 16 ? (R <= 4 ? 4 : 2) : kWidth == 8 && R > 1 ? 2 : 4;
  constexpr int W = kWidth == 8 ? (R <= 3 ? 4 : 2) : R <= 3 ? 8 : R <= 6 ? 4 : 2;
  const int64_t num_keys = num_blocks * S;
  // Where the vector of keys begins whose first key is `key`. Beyond the last key, where values begin that come next.
  const auto vector_at = [&](int64_t key) -> const C* {
    const bool is_key = key < num_keys;
    if (!is_key) key = key < 2 * num_keys ? key - num_keys : 0;
    return (is_key ? blocks[key / S].keys : blocks[key / S].values) + key % S * kPair<C>;
  };
  const auto score_vectors = [&](auto vectors, int64_t key, int64_t count) {
    constexpr int n = decltype(vectors)::value;
    const C *keys[n], *next[n];
    for (int v = 0; v < n; v++) {
      keys[v] = vector_at(key + v * kWidth);
      next[v] = vector_at(key + (n + v) * kWidth);
    }
    score<C, R, n, true>(keys, next, count, S, rows.q, rows.stride, H, rows.weights + seen.first + key);
  };
  for (int64_t key = 0, count; key < num_keys; key += count) {
    if (S % kWidth == 0 && key + V * kWidth <= num_keys) {
      score_vectors(std::integral_constant<int, V>(), key, kWidth);
      count = V * kWidth;
    } else {
      const int64_t left = S - key % S;  // of the block
      count = left < kWidth ? left : kWidth;
      score_vectors(std::integral_constant<int, 1>(), key, count);
    }
  }
  for (int row = 0; row < R; row++) weigh_keys(args, rows, row, chunk, seen);
  for (int64_t i = 0; i < num_blocks; i += kBlocksTogether) {
    const Block<C>*next = blocks + i + kBlocksTogether, *end = blocks + num_blocks;
    const int64_t key = seen.first + i * S, left = seen.end - key;
    const int64_t count = left < kBlocksTogether * S ? left : kBlocksTogether * S;
    int64_t h = 0;
    for (; h + W * kWidth <= H; h += W * kWidth, next = end)
      weigh<C, R, W>(blocks + i, next, end, S, h, kWidth, H, rows.weights + key, count, rows.sums, rows.stride);
    for (; h < H; h += kWidth, next = end)
      weigh<C, R, 1>(blocks + i, next, end, S, h, H - h, H, rows.weights + key, count, rows.sums, rows.stride);
  }
}

template <typename C, int R = kGroupRows>
inline void attend_up_to(int64_t num_rows, const AttentionArgs& args, const KeyChunk<C>& chunk, QueryRows& rows) {
  if (num_rows == R) attend_few_rows<C, R>(args, chunk, rows);
  else if constexpr (R > 1) attend_up_to<C, R - 1>(num_rows, args, chunk, rows);
}

// Calls function(R, first row) for groups of R rows: as many as fit in the registers, and the rest.
template <int R = kGroupRows, typename Function>
inline void for_groups(int64_t num_rows, const Function& function, int64_t row = 0) {
  for (; row + R <= num_rows; row += R) function(std::integral_constant<int, R>(), row);
  if constexpr (R > 1)
    if (row < num_rows) for_groups<R - 1>(num_rows, function, row);
}

// The scores of a task's rows for V vectors of keys, which begin at `first` of the chunk. A vector has `count` keys of
// one block.
template <typename C, int V>
inline void score_task(int64_t first, int64_t count, const AttentionArgs& args, const KeyChunk<C>& chunk,
                       QueryRows& rows, int64_t num_rows) {
  const int64_t H = args.head_dim, S = args.block_size;
  alignas(64) float wide[kMaxHeadDim * V * kWidth];  // [H, V vectors]
  const float* from = wide;
  int64_t stride = V * kWidth;
  if constexpr (std::is_same<C, float>::value)
    if (first % S + V * kWidth <= S) {  // they lie side by side already
      from = chunk.blocks[first / S].keys + first % S;
      stride = S;
    }
  for (int v = 0; v < V && from == wide; v++) {
    const int64_t key = first + v * kWidth;
    const C* keys = chunk.blocks[key / S].keys + key % S * kPair<C>;
    float* to = wide + v * kWidth;
    for (int64_t i = 0; i < H; i += kPair<C>) {
      if constexpr (kPair<C> == 1) {
        store(to + i * V * kWidth, load_up_to(keys + i * S, count));
      } else {
        Floats even, odd;
        widen(keys + i * S, count, even, odd);
        store(to + i * V * kWidth, even);
        store(to + (i + 1) * V * kWidth, odd);
      }
    }
  }
  for_groups(num_rows, [&](auto group_rows, int64_t row) {
    constexpr int R = decltype(group_rows)::value;
    const SeenKeys seen(rows, row, row + R, chunk.begin, chunk.end, S);
    if (first + V * kWidth <= seen.first || first >= seen.end) return;
    const float* vectors[V];
    for (int v = 0; v < V; v++) vectors[v] = from + v * kWidth;
    score<float, R, V, false>(vectors, vectors, kWidth, stride, rows.q + row * rows.stride, rows.stride, H,
                              rows.weights + row * kRowStride + first);
  });
}

// Adds a slice of a chunk's values to the sums of a task's rows: V vectors from `h` on, of which the first `width`
// numbers count.
template <typename C, int V>
inline void weigh_task(int64_t h, int64_t width, const AttentionArgs& args, const KeyChunk<C>& chunk, QueryRows& rows,
                       int64_t num_rows, const SeenKeys& seen_by_any) {
  const int64_t S = args.block_size, H = args.head_dim;
  alignas(64) float slice[kMaxChunk * V * kWidth];  // [keys, V vectors], side by side: a core's first cache holds them
  for (int64_t key = seen_by_any.first; key < seen_by_any.end; key += kPair<C>) {
    const C* values = chunk.blocks[key / S].values + key % S * H + h * kPair<C>;
    for (int v = 0; v < V; v++) {
      float* to = slice + (key * V + v) * kWidth;
      if constexpr (kPair<C> == 1) {
        store(to, load_up_to(values + v * kWidth, width));
      } else {
        Floats even, odd;
        widen(values + 2 * v * kWidth, width, even, odd);
        store(to, even);
        if (key + 1 < kMaxChunk) store(to + V * kWidth, odd);
      }
    }
  }
  for_groups(num_rows, [&](auto group_rows, int64_t row) {
    constexpr int R = decltype(group_rows)::value;
    const SeenKeys seen(rows, row, row + R, chunk.begin, chunk.end, S);
    const float* weights = rows.weights + row * kRowStride;
    float* out = rows.sums + row * rows.stride + h;
    Floats sums[R][V];
    for (int r = 0; r < R; r++)
      for (int v = 0; v < V; v++) sums[r][v] = load(out + r * rows.stride + v * kWidth);
    for (int64_t key = seen.first; key < seen.end; key++)
      for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++)
          sums[r][v] =
              multiply_add(load(slice + (key * V + v) * kWidth), splat(weights[r * kRowStride + key]), sums[r][v]);
    for (int r = 0; r < R; r++)
      for (int v = 0; v < V; v++) store(out + r * rows.stride + v * kWidth, sums[r][v]);
  });
}

// Adds a chunk to the results of many rows: keys and values are read, and widened, once for all of them.
template <typename C>
void attend_many_rows(const AttentionArgs& args, const KeyChunk<C>& chunk, QueryRows& rows, int64_t num_rows) {
  const int64_t S = args.block_size, H = args.head_dim;
  constexpr int V = kScoreVectors, W = kSliceVectors;
  const SeenKeys seen_by_any(rows, 0, num_rows, chunk.begin, chunk.end, S);
  for (int64_t first = seen_by_any.first, count; first < seen_by_any.end; first += count) {
    if (S % kWidth == 0 && first + (V - 1) * kWidth < seen_by_any.end) {
      score_task<C, V>(first, kWidth, args, chunk, rows, num_rows);
      count = V * kWidth;
    } else {
      const int64_t left = S - first % S;  // of the block
      count = left < kWidth ? left : kWidth;
      score_task<C, 1>(first, count, args, chunk, rows, num_rows);
    }
  }
  for_groups(num_rows, [&](auto group_rows, int64_t row) {
    constexpr int R = decltype(group_rows)::value;
    const SeenKeys seen(rows, row, row + R, chunk.begin, chunk.end, S);
    if (seen.begin < seen.end)
      for (int r = 0; r < R; r++) weigh_keys(args, rows, row + r, chunk, seen);
  });
  int64_t h = 0;
  for (; h + W * kWidth <= H; h += W * kWidth) weigh_task<C, W>(h, kWidth, args, chunk, rows, num_rows, seen_by_any);
  for (; h < H; h += kWidth) weigh_task<C, 1>(h, H - h, args, chunk, rows, num_rows, seen_by_any);
}

// Copies of a step's keys and values, in blocks as a cache of float32 has them.
template <bool is_needed>
struct CopiedBlocks {
  static constexpr int64_t kSize = is_needed ? kMaxChunk * kMaxHeadDim : 1;
  alignas(64) float keys[kSize], values[kSize];

  // Copies `count` tokens of a sequence, from `first` on, to the block with this index. The others get zeros.
  template <typename T>
  Block<float> take(const AttentionArgs& args, const Sequence& sequence, int64_t head, int64_t first, int64_t count,
                    int64_t index) {
    const int64_t H = args.head_dim, S = args.block_size, row_size = 3 * args.num_heads * H;
    const T* from = static_cast<const T*>(args.qkv) + (sequence.first_row + first) * row_size;
    const T* key = from + (args.num_heads + head) * H;
    const T* value = key + args.num_heads * H;
    const Block<float> to{keys + index * S * H, values + index * S * H};
    for (int64_t t = 0; t < S; t += kWidth)
      for (int64_t i = 0; i < H; i += kWidth) {
        Floats square[kWidth];
        for (int64_t j = 0; j < kWidth; j++)
          square[j] = t + j < count ? load_up_to(key + (t + j) * row_size + i, H - i) : Floats{};
        transpose(square);
        for (int64_t j = 0; j < kWidth && i + j < H; j++) store(to.keys + (i + j) * S + t, square[j]);
      }
    for (int64_t t = 0; t < S; t++)
      for (int64_t i = 0; i < H; i += kWidth)
        store_up_to(to.values + t * H + i, t < count ? load_up_to(value + t * row_size + i, H - i) : Floats{}, H - i);
    return to;
  }
};

// Results of `num_rows` rows of one sequence and key-value head. Row i is query i % G of the sequence's token i / G.
template <typename T, typename C>
void attend_query_rows(const AttentionArgs& args, const Sequence& sequence, int64_t head, int64_t first_row,
                       int64_t num_rows) {
  using Stored = std::conditional_t<kIsUncached<C>, float, C>;
  const int64_t N = args.num_heads, K = args.num_kv_heads, G = N / K, H = args.head_dim, S = args.block_size;
  const int32_t* table = args.tables + sequence.slot * args.table_stride;
  const auto offset = [&](int64_t row, int64_t num_heads) {
    const int64_t token = (first_row + row) / G, query = head * G + (first_row + row) % G;
    return ((sequence.first_row + token) * num_heads + query) * H;
  };
  QueryRows rows;
  rows.stride = (H + kWidth - 1) / kWidth * kWidth;
  for (int64_t row = 0; row < num_rows; row++) {
    const T* q = static_cast<const T*>(args.qkv) + offset(row, heads_per_row(args));
    for (int64_t i = 0; i < H; i += kWidth) {
      store(rows.q + row * rows.stride + i, load_up_to(q + i, H - i) * splat(exponent_factor(args)));
      store(rows.sums + row * rows.stride + i, Floats{});
    }
    rows.highest[row] = args.sinks ? args.sinks[head * G + (first_row + row) % G] * kLog2OfE : -kInfinity;
    rows.total[row] = args.sinks ? 1 : 0;
    const KeyRange seen(args, sequence, (first_row + row) / G);
    rows.from[row] = seen.from;
    rows.to[row] = seen.to;
  }
  const int64_t size = kMaxChunk / S * S, end = rows.to[num_rows - 1];
  KeyChunk<Stored> chunk;
  CopiedBlocks<kIsUncached<C>> copies;
  for (chunk.begin = rows.from[0] / size * size; chunk.begin < end; chunk.begin += size) {
    chunk.end = chunk.begin + size < end ? chunk.begin + size : end;
    chunk.scales.clear();
    for (int64_t key = chunk.begin; key < chunk.end; key += S) {
      const int64_t index = (key - chunk.begin) / S, count = chunk.end - key < S ? chunk.end - key : S;
      if constexpr (kIsUncached<C>) {
        chunk.blocks[index] = copies.template take<T>(args, sequence, head, key, count, index);
      } else {
        const Block<C> block = block_of<C>(args, table, head, key);
        chunk.blocks[index] = block;
        if (key + S > rows.from[0]) chunk.scales.take(args, block, 0, count, key - chunk.begin);
      }
    }
    if (num_rows <= kGroupRows) attend_up_to<Stored>(num_rows, args, chunk, rows);
    else attend_many_rows<Stored>(args, chunk, rows, num_rows);
  }
  for (int64_t row = 0; row < num_rows; row++)
    store_result<T>(args, sequence.first_row + (first_row + row) / G, head * G + (first_row + row) % G,
                    rows.sums + row * rows.stride, rows.highest[row], rows.total[row]);
}

// How many rows fit in a task, as whole groups of them.
inline int64_t fitting_rows(int64_t head_dim) {
  const int64_t fitting = kMaxTaskNumbers / (head_dim + kWidth);
  return (fitting < kMaxTaskRows ? fitting : kMaxTaskRows) / kGroupRows * kGroupRows;
}

template <typename T, typename C>
void attend_rows(const AttentionArgs& args, const Sequence& sequence, int64_t head, int64_t row, int64_t last_row) {
  const int64_t most = fitting_rows(args.head_dim);
  for (; row < last_row; row += most)
    attend_query_rows<T, C>(args, sequence, head, row, last_row - row < most ? last_row - row : most);
}

// Computes the results of some rows of one sequence and key-value head.
typedef void (*Attend)(const AttentionArgs&, const Sequence&, int64_t head, int64_t row, int64_t last_row);

// Calls function(sequence, head, first token, last token) for `num_heads` heads of all tokens, some tokens at a time.
// A head's tasks are adjacent, because they read the same keys. The last tokens come first: they see the most keys.
template <typename Args, typename Function>
void share_tokens(const Args& args, int64_t num_heads, int64_t task_tokens, const Threads& threads,
                  const Function& function) {
  const auto num_ranges = [&](const Sequence& sequence) {
    return (sequence.num_tokens + task_tokens - 1) / task_tokens;
  };
  int64_t num_tasks = 0;
  for (int64_t i = 0; i < args.num_sequences; i++) num_tasks += num_ranges(args.sequences[i]) * num_heads;
  share(num_tasks, threads, [&](int64_t task) {
    const Sequence* sequence = args.sequences;
    for (; task >= num_ranges(*sequence) * num_heads; sequence++) task -= num_ranges(*sequence) * num_heads;
    const int64_t ranges = num_ranges(*sequence), first = (ranges - 1 - task % ranges) * task_tokens;
    const int64_t left = sequence->num_tokens - first;
    function(*sequence, task / ranges, first, first + (left < task_tokens ? left : task_tokens));
  });
}

// `most_rows`: of an attention task.
template <typename T, typename C>
void attention(const AttentionArgs& args, const Threads& threads, Attend attend, int64_t most_rows) {
  const int64_t N = args.num_heads, K = args.num_kv_heads, G = N / K, H = args.head_dim;
  // Rotates a token's key and the queries that share it. Stores key and value.
  const auto prepare = [&](const Sequence& sequence, int64_t token, int64_t head) {
    const int64_t index = sequence.first_row + token, position = sequence.start + token;
    T* row = static_cast<T*>(args.qkv) + index * (N + 2 * K) * H;
    const float* turns = args.turns ? args.turns + (args.turns_are_of_rows ? index : position) * H : nullptr;
    turn_queries(args, row, turns, head);
    store_token<T, C>(args, args.tables + sequence.slot * args.table_stride, row, turns, position, head);
  };
  bool are_decodes = true;
  int64_t num_rows = 0;
  for (int64_t i = 0; i < args.num_sequences; i++) {
    are_decodes &= args.sequences[i].num_tokens == 1;
    num_rows += args.sequences[i].num_tokens * N;
  }
  if (are_decodes && args.part != kStoring) {
    // a sequence's heads lie side by side, so that one thread reads several of them faster
    const int64_t heads_each = clamp(args.num_sequences * K / (kTasksEach * threads.count), 1, K);
    const int64_t tasks_each = (K + heads_each - 1) / heads_each;
    share(args.num_sequences * tasks_each, threads, [&](int64_t task) {
      const Sequence& sequence = args.sequences[task / tasks_each];
      const int64_t first = task % tasks_each * heads_each, last = first + heads_each < K ? first + heads_each : K;
      for (int64_t head = first; head < last; head++) {
        if (args.part == kWhole) prepare(sequence, 0, head);
        attend(args, sequence, head, 0, G);
      }
    });
    return;
  }
  if (args.part != kAttending)
    share_tokens(args, 1, kPreparedTokens, threads,
                 [&](const Sequence& sequence, int64_t, int64_t first, int64_t last) {
                   for (int64_t token = first; token < last; token++)
                     for (int64_t head = 0; head < K; head++) prepare(sequence, token, head);
                 });
  if (args.part == kStoring) return;
  const int64_t even_rows = num_rows / (kTasksEach * threads.count) / kMinTaskRows * kMinTaskRows;
  const int64_t rows = clamp(even_rows, kMinTaskRows, most_rows) / kGroupRows * kGroupRows;
  share_tokens(args, K, G < rows ? rows / G : 1, threads,
               [&](const Sequence& sequence, int64_t head, int64_t first, int64_t last) {
                 attend(args, sequence, head, first * G, last * G);
               });
}

template <typename T, typename C>
void attention(const AttentionArgs& args, const Threads& threads) {
  attention<T, C>(args, threads, attend_rows<T, C>, fitting_rows(args.head_dim));
}

// Attention without a cache. Heads have their own keys and values.
template <typename T>
void uncached_attention(const AttentionArgs& args, const Threads& threads, Attend attend, int64_t most_rows) {
  const int64_t N = args.num_heads, H = args.head_dim;
  if (args.turns)
    share_tokens(args, 1, kPreparedTokens, threads,
                 [&](const Sequence& sequence, int64_t, int64_t first, int64_t last) {
                   for (int64_t token = first; token < last; token++)
                     for (int64_t head = 0; head < 2 * N; head++)
                       turn_head<T>(static_cast<T*>(args.qkv) + ((sequence.first_row + token) * 3 * N + head) * H,
                                    nullptr, 0, args.turns + (sequence.start + token) * H, H, 0);
                 });
  share_tokens(args, N, most_rows / kGroupRows * kGroupRows, threads,
               [&](const Sequence& sequence, int64_t head, int64_t first, int64_t last) {
                 attend(args, sequence, head, first, last);
               });
}

template <typename T>
void uncached_attention(const AttentionArgs& args, const Threads& threads) {
  uncached_attention<T>(args, threads, attend_rows<T, Uncached>, fitting_rows(args.head_dim));
}

// Parts are added up in their order, so that the bits of a result depend on nothing but its own parts.
template <typename T>
void merge_parts(const MergeArgs& args, const Threads& threads) {
  const int64_t P = args.num_parts, N = args.num_heads, H = args.head_dim, stride = args.num_rows * N * (H + 2);
  for_rows(args.num_rows * N, rows_per_thread(P * H), threads, [&](int64_t row) {
    const float* first = args.parts + row * (H + 2);
    const auto weights_of = [&](int64_t part) {
      PartOfWeights weights;
      std::memcpy(&weights, first + part * stride + H, sizeof(weights));
      return weights;
    };
    const float sink = args.sinks ? args.sinks[row % N] * kLog2OfE : -kInfinity;
    float highest = sink;
    for (int64_t part = 0; part < P; part++)
      if (weights_of(part).highest > highest) highest = weights_of(part).highest;
    Floats sums[kMaxLatentRank / kWidth];
    for (int64_t i = 0; i < H; i += kWidth) sums[i / kWidth] = Floats{};
    float total = args.sinks ? power_of_two(splat(sink - highest))[0] : 0;
    for (int64_t part = 0; part < P; part++) {
      const Floats factor = power_of_two(splat(weights_of(part).highest - highest));
      total += weights_of(part).total * factor[0];
      for (int64_t i = 0; i < H; i += kWidth)
        sums[i / kWidth] = multiply_add(load_up_to(first + part * stride + i, H - i), factor, sums[i / kWidth]);
    }
    T* out = static_cast<T*>(args.out) + row * H;
    for (int64_t i = 0; i < H; i += kWidth) store_up_to(out + i, sums[i / kWidth] * splat(1.0f / total), H - i);
  });
}

}  // namespace
