// Attention of a step's tokens to paged keys and values, where they lie.
//
// A task is one key-value head of a few adjacent tokens of one sequence. Its rows are the queries of these tokens that
// share the head. Keys are visited in chunks, which begin at fixed positions. Each chunk gives a partial result, and
// partial results are merged in order. So the bits of a row's result depend on its query and on the keys and values
// that it sees: not on the task's other rows, on other sequences, or on the number of threads.

#pragma once

#include "kernels.h"
#include "rotation.h"
#include "threads.h"
#include "vectors.h"

namespace {

using namespace raycore;

constexpr int64_t kMaxChunk = 256;  // keys
constexpr int64_t kRowStride = kMaxChunk + kWidth;  // a block's last vector may reach beyond the chunk
constexpr int64_t kMaxHeadDim = 256;
constexpr int64_t kMinTaskRows = 32, kMaxTaskRows = 128;
constexpr int64_t kPreparedTokens = 16;  // of a task; their keys and values fit in a core's cache

// Where one head's keys and values of a block are.
template <typename T>
struct Block {
  T* keys;
  T* values;
};

template <typename T>
inline Block<T> block_of(const AttentionArgs& args, const int32_t* table, int64_t head, int64_t position) {
  const int64_t size = args.block_size * args.head_dim;
  T* block = static_cast<T*>(args.cache) + table[position / args.block_size] * 2 * args.num_kv_heads * size;
  return {block + head * size, block + (args.num_kv_heads + head) * size};
}

// Rotates a token's key, and stores key and value.
template <typename T>
inline void store_token(const AttentionArgs& args, const int32_t* table, T* row, int64_t position, int64_t head) {
  constexpr int P = kPair<T>;
  const int64_t N = args.num_heads, K = args.num_kv_heads, H = args.head_dim, S = args.block_size;
  const T* norm = static_cast<const T*>(args.norm);
  T* key = row + (N + head) * H;
  const T* value = key + K * H;
  turn_head(key, norm ? norm + (N + head) * H : nullptr, args.turns + position * H, H, args.eps);
  const Block<T> block = block_of<T>(args, table, head, position);
  const int64_t place = position % S;
  for (int64_t i = 0; i < H; i += P) std::memcpy(block.keys + i * S + place * P, key + i, P * sizeof(T));
  T* values = block.values + place / P * P * H + place % P;
  for (int64_t i = 0; i < H; i++) values[i * P] = value[i];
}

// Rotates the queries of one token that share a key-value head.
template <typename T>
inline void turn_queries(const AttentionArgs& args, T* row, int64_t position, int64_t head) {
  const int64_t G = args.num_heads / args.num_kv_heads, H = args.head_dim;
  const T* norm = static_cast<const T*>(args.norm);
  for (int64_t query = head * G; query < (head + 1) * G; query++)
    turn_head(row + query * H, norm ? norm + query * H : nullptr, args.turns + position * H, H, args.eps);
}

// The scores of R rows for the first `count` keys of V vectors. `q`: [R, H], scaled. The order of the sums is the same
// for every R and V.
template <typename T, int R, int V>
inline void score(const T* keys, int64_t count, int64_t block_size, const float* q, int64_t dim, float* scores) {
  Floats even[R][V] = {}, odd[R][V] = {};
  for (int64_t i = 0; i < dim; i += 2) {
    for (int v = 0; v < V; v++) {
      Floats first, second;
      if constexpr (kPair<T> == 2) {
        widen(keys + i * block_size + 2 * v * kWidth, count, first, second);
      } else {
        first = load_up_to(keys + i * block_size + v * kWidth, count);
        second = load_up_to(keys + (i + 1) * block_size + v * kWidth, count);
      }
      for (int r = 0; r < R; r++) {
        even[r][v] += first * splat(q[r * kMaxHeadDim + i]);
        odd[r][v] += second * splat(q[r * kMaxHeadDim + i + 1]);
      }
    }
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) store(scores + r * kRowStride + v * kWidth, even[r][v] + odd[r][v]);
}

// Adds the first `width` numbers of V vectors of `count` weighted values to the sums of R rows.
template <typename T, int R, int V>
inline void weigh(const T* values, int64_t width, int64_t dim, const float* weights, int64_t count, float* out) {
  Floats sums[R][V];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) sums[r][v] = load(out + r * kMaxHeadDim + v * kWidth);
  int64_t s = 0;
  if constexpr (kPair<T> == 2) {
    Floats first, second;
    for (; s + 2 <= count; s += 2)
      for (int v = 0; v < V; v++) {
        widen(values + s * dim + 2 * v * kWidth, width, first, second);
        for (int r = 0; r < R; r++) {
          sums[r][v] += first * splat(weights[r * kRowStride + s]);
          sums[r][v] += second * splat(weights[r * kRowStride + s + 1]);
        }
      }
    if (s < count)  // the second of the pair may be anything, even NaN
      for (int v = 0; v < V; v++) {
        widen(values + s * dim + 2 * v * kWidth, width, first, second);
        for (int r = 0; r < R; r++) sums[r][v] += first * splat(weights[r * kRowStride + s]);
      }
  } else {
    for (; s < count; s++)
      for (int v = 0; v < V; v++) {
        const Floats value = load_up_to(values + s * dim + v * kWidth, width);
        for (int r = 0; r < R; r++) sums[r][v] += value * splat(weights[r * kRowStride + s]);
      }
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) store(out + r * kMaxHeadDim + v * kWidth, sums[r][v]);
}

// The result of some of a row's keys: sums of weighted values, the sum of the weights, and the highest score, relative
// to which the weights are.
struct Partial {
  float highest = -kInfinity, total = 0;
  alignas(64) float sums[kMaxHeadDim];
};

inline void merge(Partial& into, const Partial& part, int64_t dim) {
  if (part.highest == -kInfinity) return;
  const float highest = into.highest > part.highest ? into.highest : part.highest;
  const float old_share = __builtin_expf(into.highest - highest), new_share = __builtin_expf(part.highest - highest);
  into.total = into.total * old_share + part.total * new_share;
  into.highest = highest;
  for (int64_t i = 0; i < dim; i += kWidth)
    store(into.sums + i, load(into.sums + i) * splat(old_share) + load(part.sums + i) * splat(new_share));
}

// The queries of R rows, and which keys each row sees.
template <int R>
struct Rows {
  alignas(64) float q[R * kMaxHeadDim];
  int64_t from[R], to[R];
};

inline void prefetch(const void* from, int64_t num_bytes) {
  for (int64_t i = 0; i < num_bytes; i += 64) __builtin_prefetch(static_cast<const char*>(from) + i);
}

// R rows' results for the keys from `begin` to `end`, which are of one chunk.
template <typename T, int R>
void attend_chunk(const AttentionArgs& args, const int32_t* table, int64_t head, int64_t chunk, int64_t begin,
                  int64_t end, const Rows<R>& rows, Partial* parts) {
  const int64_t S = args.block_size, H = args.head_dim, num_bytes = S * H * sizeof(T), first = begin / S * S;
  alignas(64) float weights[R * kRowStride];
  alignas(64) float sums[R * kMaxHeadDim] = {};
  constexpr int V = kWidth == 16 && R <= 3 ? 2 : 1;  // enough sums to hide their latency, few enough for registers
  for (int64_t key = first; key < end; key += S) {
    const Block<T> block = block_of<T>(args, table, head, key);
    prefetch(key + S < end ? block_of<T>(args, table, head, key + S).keys
                           : block_of<T>(args, table, head, first).values, num_bytes);
    float* scores = weights + key - chunk;
    int64_t s = 0;
    for (; s + V * kWidth <= S; s += V * kWidth)
      score<T, R, V>(block.keys + s * kPair<T>, kWidth, S, rows.q, H, scores + s);
    for (; s < S; s += kWidth) score<T, R, 1>(block.keys + s * kPair<T>, S - s, S, rows.q, H, scores + s);
  }
  // vectors begin at multiples of kWidth, so that a key's weight is always added in the same lane
  const int64_t low = (first - chunk) / kWidth * kWidth, high = end - chunk;
  for (int r = 0; r < R; r++) {
    float* row = weights + r * kRowStride;
    const int64_t from = rows.from[r] > first ? rows.from[r] - chunk : first - chunk;
    const int64_t to = rows.to[r] < end ? rows.to[r] - chunk : high;
    for (int64_t i = low; i < from && i < high; i++) row[i] = -kInfinity;
    for (int64_t i = to > low ? to : low; i < high + kWidth; i++) row[i] = -kInfinity;
    Floats top = splat(-kInfinity);
    for (int64_t i = low; i < high; i += kWidth) top = maximum(load(row + i), top);
    parts[r].highest = maximum(top);
    const Floats shift = splat(parts[r].highest == -kInfinity ? 0.0f : parts[r].highest);
    Floats total = {};
    for (int64_t i = low; i < high; i += kWidth) {
      const Floats weight = exponential(load(row + i) - shift);
      store(row + i, weight);
      total += weight;
    }
    parts[r].total = sum(total);
  }
  constexpr int W = kWidth == 16 && R <= 3 ? 4 : 2;
  for (int64_t key = first; key < end; key += S) {
    const T* values = block_of<T>(args, table, head, key).values;
    if (key + S < end) prefetch(block_of<T>(args, table, head, key + S).values, num_bytes);
    const int64_t count = end - key < S ? end - key : S;
    const float* own = weights + key - chunk;
    int64_t i = 0;
    for (; i + W * kWidth <= H; i += W * kWidth)
      weigh<T, R, W>(values + i * kPair<T>, kWidth, H, own, count, sums + i);
    for (; i < H; i += kWidth) weigh<T, R, 1>(values + i * kPair<T>, H - i, H, own, count, sums + i);
  }
  for (int r = 0; r < R; r++) std::memcpy(parts[r].sums, sums + r * kMaxHeadDim, sizeof(parts[r].sums));
}

// Results of R rows of one sequence and key-value head. Row i is query i % G of the sequence's token i / G.
template <typename T, int R>
void attend_rows(const AttentionArgs& args, const Sequence& sequence, int64_t head, int64_t first_row) {
  const int64_t N = args.num_heads, K = args.num_kv_heads, G = N / K, H = args.head_dim;
  const int32_t* table = args.tables + sequence.slot * args.table_stride;
  Rows<R> rows;
  Partial results[R], parts[R];
  int64_t begin = INT64_MAX, end = 0;
  for (int r = 0; r < R; r++) {
    const int64_t token = (first_row + r) / G, query = head * G + (first_row + r) % G;
    const T* q = static_cast<const T*>(args.qkv) + (sequence.first_row + token) * (N + 2 * K) * H + query * H;
    for (int64_t i = 0; i < H; i += kWidth)
      store(rows.q + r * kMaxHeadDim + i, load_up_to(q + i, H - i) * splat(args.scale));
    rows.to[r] = sequence.start + token + 1;
    rows.from[r] = args.window && rows.to[r] > args.window ? rows.to[r] - args.window : 0;
    begin = rows.from[r] < begin ? rows.from[r] : begin;
    end = rows.to[r] > end ? rows.to[r] : end;
    std::memset(results[r].sums, 0, sizeof(results[r].sums));
  }
  const int64_t size = kMaxChunk / args.block_size * args.block_size;
  for (int64_t chunk = begin / size * size; chunk < end; chunk += size) {
    attend_chunk<T, R>(args, table, head, chunk, chunk > begin ? chunk : begin, chunk + size < end ? chunk + size : end,
                       rows, parts);
    for (int r = 0; r < R; r++) merge(results[r], parts[r], H);
  }
  for (int r = 0; r < R; r++) {
    const int64_t token = (first_row + r) / G, query = head * G + (first_row + r) % G;
    T* out = static_cast<T*>(args.out) + (sequence.first_row + token) * N * H + query * H;
    const Floats factor = splat(1.0f / results[r].total);
    for (int64_t i = 0; i < H; i += kWidth) store_up_to(out + i, load(results[r].sums + i) * factor, H - i);
  }
}

template <typename T>
void attend_rows(const AttentionArgs& args, const Sequence& sequence, int64_t head, int64_t row, int64_t last_row) {
  for (; row + 4 <= last_row; row += 4) attend_rows<T, 4>(args, sequence, head, row);
  switch (last_row - row) {
    case 3: attend_rows<T, 3>(args, sequence, head, row); break;
    case 2: attend_rows<T, 2>(args, sequence, head, row); break;
    case 1: attend_rows<T, 1>(args, sequence, head, row); break;
  }
}

// Computes the results of some rows of one sequence and key-value head.
typedef void (*Attend)(const AttentionArgs&, const Sequence&, int64_t head, int64_t row, int64_t last_row);

// Calls function(sequence, head, first token, last token) for `num_heads` heads of all tokens, some tokens at a time.
// A head's tasks are adjacent, because they read the same keys. The last tokens come first: they see the most keys.
template <typename Function>
void share_tokens(const AttentionArgs& args, int64_t num_heads, int64_t task_tokens, const Threads& threads,
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

template <typename T>
void attention(const AttentionArgs& args, const Threads& threads, Attend attend) {
  const int64_t N = args.num_heads, K = args.num_kv_heads, G = N / K, H = args.head_dim;
  // Rotates a token's key and the queries that share it. Stores key and value.
  const auto prepare = [&](const Sequence& sequence, int64_t token, int64_t head) {
    T* row = static_cast<T*>(args.qkv) + (sequence.first_row + token) * (N + 2 * K) * H;
    turn_queries(args, row, sequence.start + token, head);
    store_token(args, args.tables + sequence.slot * args.table_stride, row, sequence.start + token, head);
  };
  bool are_decodes = true;
  int64_t num_rows = 0;
  for (int64_t i = 0; i < args.num_sequences; i++) {
    are_decodes &= args.sequences[i].num_tokens == 1 && args.sequences[i].attends;
    num_rows += args.sequences[i].num_tokens * N;
  }
  if (are_decodes) {
    // a sequence's heads lie side by side, so that one thread reads several of them faster
    const int64_t heads_each = clamp(args.num_sequences * K / (kTasksEach * threads.count), 1, K);
    const int64_t tasks_each = (K + heads_each - 1) / heads_each;
    share(args.num_sequences * tasks_each, threads, [&](int64_t task) {
      const Sequence& sequence = args.sequences[task / tasks_each];
      const int64_t first = task % tasks_each * heads_each, last = first + heads_each < K ? first + heads_each : K;
      for (int64_t head = first; head < last; head++) {
        prepare(sequence, 0, head);
        attend(args, sequence, head, 0, G);
      }
    });
    return;
  }
  share_tokens(args, 1, kPreparedTokens, threads, [&](const Sequence& sequence, int64_t, int64_t first, int64_t last) {
    for (int64_t token = first; token < last; token++)
      for (int64_t head = 0; head < K; head++) prepare(sequence, token, head);
  });
  const int64_t even_rows = num_rows / (kTasksEach * threads.count) / kMinTaskRows * kMinTaskRows;
  const int64_t rows = clamp(even_rows, kMinTaskRows, kMaxTaskRows);
  share_tokens(args, K, G < rows ? rows / G : 1, threads,
               [&](const Sequence& sequence, int64_t head, int64_t first, int64_t last) {
                 if (sequence.attends) attend(args, sequence, head, first * G, last * G);
               });
}

template <typename T>
void attention(const AttentionArgs& args, const Threads& threads) {
  attention<T>(args, threads, attend_rows<T>);
}

}  // namespace
