// Latent attention: a token's query heads all attend to the same keys, whose first numbers are the values, too.
//
// A task has groups of rows: the query heads of one or of several adjacent tokens of a sequence. A group's rows are the
// lanes of vectors while scores are computed, so that each number of a key is read once for all of them. Keys are
// visited in chunks at fixed positions, and results are added up in parts, which begin at fixed positions, too. So a
// row's bits depend on its query and on the keys that it sees: not on the group's other rows, on other sequences, or on
// the number of threads.
//
// Numbers in 16 bits are widened when a chunk is read. Processors that multiply pairs of bfloat16 numbers do so instead:
// two numbers of a key with two of a query, and those of two keys with their weights, which are rounded before.

#pragma once

#include "attention.h"
#include "kernels.h"
#include "panel_linear.h"
#include "rotation.h"
#include "threads.h"
#include "vectors.h"

namespace {

using namespace raycore;

constexpr int kRowVectors = kLatentRows / kWidth;
constexpr int64_t kLatentChunk = 64;  // keys that a core's second cache holds beside a task's rows
constexpr int64_t kLatentPart = 512;  // keys that one thread visits, where a step has few rows
constexpr int64_t kTaskGroups = 2;
constexpr int64_t kPaddedWidth = kMaxLatentWidth + kWidth;
constexpr int kKeysTogether = kWidth == 16 ? 16 : kWidth == 8 ? 6 : 4;  // whose sums fit in the registers
constexpr int kRowsTogether = kWidth == 8 ? 4 : 8, kValueVectors = kWidth == 16 ? 3 : 2;

// A number in the type T, widened again.
template <typename T>
inline Floats rounded_as(Floats x) {
  T stored[kWidth];
  store(stored, x);
  return load(stored);
}

// Pairs of bfloat16 numbers, which those of both vectors are.
inline Floats side_by_side(Floats first, Floats second) {
  return bits_of<Floats>(bits_of<Words>(first) >> 16 | bits_of<Words>(second));
}

// So many numbers, rounded up to whole vectors.
inline int64_t padded(int64_t count) {
  return (count + kWidth - 1) / kWidth * kWidth;
}

// Some rows of a sequence. Row i is query i % N of the sequence's token i / N. Lanes without a row see no keys.
struct LatentGroup {
  alignas(64) float q[kMaxLatentWidth * kLatentRows];  // [W, lanes]; if pairs are multiplied, [W / 2, lanes, 2]
  alignas(64) int32_t to[kLatentRows];                 // the keys that a row sees end here
  int64_t first_row, num_rows, end;                    // the last row's end

  Ints ends(int v) const {
    Ints x;
    std::memcpy(&x, to + v * kWidth, sizeof(x));
    return x;
  }
};

template <typename T>
void take_rows(const LatentArgs& args, const Sequence& sequence, int64_t first_row, int64_t num_rows,
               LatentGroup& group) {
  const int64_t N = args.num_heads, W = args.width, heads_per_row = args.part == kAttending ? N : N + 1;
  group.first_row = first_row;
  group.num_rows = num_rows;
  std::memset(group.to, 0, sizeof(group.to));
  if (num_rows < kLatentRows) std::memset(group.q, 0, W * kLatentRows * sizeof(float));
  for (int64_t row = 0; row < num_rows; row++) {
    const int64_t token = (first_row + row) / N, head = (first_row + row) % N;
    const T* q = static_cast<const T*>(args.qkv) + ((sequence.first_row + token) * heads_per_row + head) * W;
    if constexpr (kMultipliesPairs<T>) {
      for (int64_t w = 0; w < W; w += 2) std::memcpy(group.q + w / 2 * kLatentRows + row, q + w, 2 * sizeof(T));
    } else {
      for (int64_t w = 0; w < W; w++) group.q[w * kLatentRows + row] = to_float(q[w]);
    }
    group.to[row] = num_owned(args, sequence.start + token + 1);
  }
  group.end = group.to[num_rows - 1];
}

// Results of some keys for a group's rows. Of a row that has seen no key, the highest score is minus infinity.
inline void clear(LatentSums& sums, int64_t stride) {
  for (int64_t i = 0; i < kLatentRows; i++) sums.highest[i] = -kInfinity;
  std::memset(sums.total, 0, sizeof(sums.total));
  std::memset(sums.values, 0, kLatentRows * stride * sizeof(float));
}

// What scores are compared with: the highest one, or 0 if there is none.
inline Floats reference(Floats highest) {
  return highest == splat(-kInfinity) ? Floats{} : highest;
}

// Adds the results of later keys to those of earlier ones.
inline void merge(LatentSums& sums, const LatentSums& later, int64_t num_rows, int64_t stride) {
  alignas(64) float kept[kLatentRows], added[kLatentRows];
  for (int64_t i = 0; i < kLatentRows; i += kWidth) {
    const Floats before = load(sums.highest + i), own = load(later.highest + i), highest = maximum(own, before);
    const Floats keep = power_of_two(before - reference(highest)), add = power_of_two(own - reference(highest));
    store(sums.total + i, load(sums.total + i) * keep + load(later.total + i) * add);
    store(sums.highest + i, highest);
    store(kept + i, keep);
    store(added + i, add);
  }
  for (int64_t row = 0; row < num_rows; row++)
    for (int64_t i = row * stride; i < (row + 1) * stride; i += kWidth)
      store(sums.values + i, load(sums.values + i) * splat(kept[row]) + load(later.values + i) * splat(added[row]));
}

// Keys that are visited together.
template <typename T>
struct LatentChunk {
  alignas(64) Factor<T> keys[kLatentChunk * kPaddedWidth];  // [keys, W], W rounded up to whole vectors
  // the values of two keys side by side, if pairs are multiplied: [keys / 2, R, 2], R rounded up to whole vectors
  alignas(64) float pairs[kMultipliesPairs<T> ? kLatentChunk / 2 * kMaxLatentRank : 1];
};

template <typename T>
void take_keys(const LatentArgs& args, const int32_t* table, int64_t first, int64_t count, LatentChunk<T>& chunk) {
  const int64_t W = args.width, S = args.block_size, stride = padded(W);
  for (int64_t key = 0; key < count; key++) {
    const int64_t position = first + key;
    const T* from = static_cast<const T*>(args.cache) + (table[position / S] * S + position % S) * W;
    Factor<T>* to = chunk.keys + key * stride;
    if constexpr (kMultipliesPairs<T>) std::memcpy(to, from, W * sizeof(T));
    else for (int64_t w = 0; w < W; w += kWidth) store(to + w, load_up_to(from + w, W - w));
  }
  if constexpr (kMultipliesPairs<T>)
    for (int64_t key = 0; key < count; key += 2)
      for (int64_t i = 0; i < padded(args.rank); i += kWidth) {
        const Floats even = load(chunk.keys + key * stride + i);
        const Floats odd = key + 1 < count ? load(chunk.keys + (key + 1) * stride + i) : Floats{};
        store(chunk.pairs + key / 2 * padded(args.rank) + i, side_by_side(even, odd));
      }
}

// The scores of a group's rows for K keys: [K, lanes].
template <typename T, int K>
void score_latents(const Factor<T>* keys, int64_t stride, const float* q, int64_t width, float* scores) {
  Floats own[K][kRowVectors] = {};
  for (int64_t w = 0; w < width; w += kMultipliesPairs<T> ? 2 : 1, q += kLatentRows) {
    Floats x[kRowVectors];
    for (int v = 0; v < kRowVectors; v++) x[v] = load(q + v * kWidth);
    for (int k = 0; k < K; k++)
      for (int v = 0; v < kRowVectors; v++) {
        if constexpr (kMultipliesPairs<T>) own[k][v] = add_pairs(own[k][v], x[v], keys + k * stride + w);
        else own[k][v] = multiply_add(x[v], splat(keys[k * stride + w]), own[k][v]);
      }
  }
  for (int k = 0; k < K; k++)
    for (int v = 0; v < kRowVectors; v++) store(scores + k * kLatentRows + v * kWidth, own[k][v]);
}

template <typename T, int K = kKeysTogether>
void score_some_latents(int64_t count, const Factor<T>* keys, int64_t stride, const float* q, int64_t width,
                        float* scores) {
  for (; count >= K; count -= K, keys += K * stride, scores += K * kLatentRows)
    score_latents<T, K>(keys, stride, q, width, scores);
  if constexpr (K > 1)
    if (count) score_some_latents<T, K / 2>(count, keys, stride, q, width, scores);
}

// Adds weighted keys to the sums of R rows, whose earlier sums are multiplied by factors: C vectors of their numbers.
// With pairs, `keys` and `weights` have two keys side by side.
template <typename T, int R, int C>
void weigh_latents(const float* keys, int64_t count, int64_t stride, const float* weights, const float* factors,
                   float* sums, int64_t sums_stride) {
  Floats own[R][C];
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) own[r][c] = load(sums + r * sums_stride + c * kWidth) * splat(factors[r]);
  for (int64_t key = 0; key < count; key++) {
    Floats x[C];
    for (int c = 0; c < C; c++) x[c] = load(keys + key * stride + c * kWidth);
    for (int r = 0; r < R; r++)
      for (int c = 0; c < C; c++) {
        const float* weight = weights + key * kLatentRows + r;
        if constexpr (kMultipliesPairs<T>)
          own[r][c] = add_pairs(own[r][c], x[c], reinterpret_cast<const BFloat16*>(weight));
        else own[r][c] = multiply_add(x[c], splat(*weight), own[r][c]);
      }
  }
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) store(sums + r * sums_stride + c * kWidth, own[r][c]);
}

// Adds a chunk of keys, which begins at position `first`, to the results of a group.
template <typename T>
void add_chunk(const LatentArgs& args, const LatentGroup& group, const LatentChunk<T>& chunk, int64_t first,
               int64_t count, LatentSums& sums) {
  const int64_t stride = padded(args.width), sums_stride = padded(args.rank);
  const Floats scale = splat(args.scale * kLog2OfE);
  alignas(64) float weights[kLatentChunk * kLatentRows], factors[kLatentRows];
  score_some_latents<T>(count, chunk.keys, stride, group.q, args.width, weights);
  for (int v = 0; v < kRowVectors; v++) {
    float* own = weights + v * kWidth;
    const Ints ends = group.ends(v);
    Floats top = splat(-kInfinity);
    for (int64_t key = 0; key < count; key++) {
      const Floats score = load(own + key * kLatentRows) * scale;
      const Floats seen = (Ints{} + int32_t(first + key)) < ends ? score : splat(-kInfinity);
      store(own + key * kLatentRows, seen);
      top = maximum(seen, top);
    }
    const Floats before = load(sums.highest + v * kWidth), highest = maximum(top, before);
    const Floats least = reference(highest), factor = power_of_two(before - least);
    Floats total = load(sums.total + v * kWidth) * factor;
    const auto weight = [&](int64_t key) {
      const Floats exact = power_of_two(load(own + key * kLatentRows) - least);
      const Floats x = kMultipliesPairs<T> ? rounded_as<T>(exact) : exact;
      total += x;
      return x;
    };
    if constexpr (kMultipliesPairs<T>) {
      for (int64_t key = 0; key < count; key += 2) {
        const Floats even = weight(key), odd = key + 1 < count ? weight(key + 1) : Floats{};
        store(own + key / 2 * kLatentRows, side_by_side(even, odd));
      }
    } else {
      for (int64_t key = 0; key < count; key++) store(own + key * kLatentRows, weight(key));
    }
    store(sums.highest + v * kWidth, highest);
    store(sums.total + v * kWidth, total);
    store(factors + v * kWidth, factor);
  }
  constexpr int R = kRowsTogether, C = kValueVectors;
  const float* values;
  if constexpr (kMultipliesPairs<T>) values = chunk.pairs;
  else values = chunk.keys;
  const int64_t values_stride = kMultipliesPairs<T> ? sums_stride : stride;
  const int64_t num_values = kMultipliesPairs<T> ? (count + 1) / 2 : count;
  for (int64_t row = 0; row < group.num_rows; row += R) {
    float* to = sums.values + row * sums_stride;
    int64_t i = 0;
    for (; i + C * kWidth <= sums_stride; i += C * kWidth)
      weigh_latents<T, R, C>(values + i, num_values, values_stride, weights + row, factors + row, to + i, sums_stride);
    for (; i < sums_stride; i += kWidth)
      weigh_latents<T, R, 1>(values + i, num_values, values_stride, weights + row, factors + row, to + i, sums_stride);
  }
}

// Adds the keys of a part that the groups see to their results, which are cleared before.
template <typename T>
void attend_part(const LatentArgs& args, const Sequence& sequence, const LatentGroup* groups, int64_t num_groups,
                 int64_t first, LatentSums* sums) {
  const int32_t* table = args.tables + sequence.slot * args.table_stride;
  const int64_t most = first + kLatentPart, last = groups[num_groups - 1].end, end = last < most ? last : most;
  LatentChunk<T> chunk;
  for (int64_t group = 0; group < num_groups; group++) clear(sums[group], padded(args.rank));
  for (; first < end; first += kLatentChunk) {
    const int64_t count = end - first < kLatentChunk ? end - first : kLatentChunk;
    take_keys<T>(args, table, first, count, chunk);
    for (int64_t group = 0; group < num_groups; group++) {
      const int64_t left = groups[group].end - first;
      if (left > 0) add_chunk<T>(args, groups[group], chunk, first, left < count ? left : count, sums[group]);
    }
  }
}

template <typename T>
void store_latents(const LatentArgs& args, const Sequence& sequence, const LatentGroup& group,
                   const LatentSums& sums) {
  const int64_t N = args.num_heads, R = args.rank, stride = padded(R);
  for (int64_t row = 0; row < group.num_rows; row++) {
    const int64_t place = sequence.first_row * N + group.first_row + row;
    if (args.part == kAttending) {
      float* part = static_cast<float*>(args.out) + place * (R + 2);
      for (int64_t i = 0; i < R; i += kWidth) store_up_to(part + i, load(sums.values + row * stride + i), R - i);
      const PartOfWeights weights = {sums.highest[row], sums.total[row]};
      std::memcpy(part + R, &weights, sizeof(weights));
      continue;
    }
    T* out = static_cast<T*>(args.out) + place * R;
    const Floats factor = splat(1.0f / sums.total[row]);
    for (int64_t i = 0; i < R; i += kWidth) store_up_to(out + i, load(sums.values + row * stride + i) * factor, R - i);
  }
}

// Calls function(sequence, first row, number of rows) for each `task_rows` rows of a sequence, or fewer.
template <typename Function>
void with_rows(const LatentArgs& args, int64_t task, int64_t task_rows, const Function& function) {
  const Sequence* sequence = args.sequences;
  const auto num_tasks = [&] { return (sequence->num_tokens * args.num_heads + task_rows - 1) / task_rows; };
  for (; task >= num_tasks(); sequence++) task -= num_tasks();
  // the last ones first: they see the most keys
  const int64_t first = (num_tasks() - 1 - task) * task_rows, left = sequence->num_tokens * args.num_heads - first;
  function(*sequence, first, left < task_rows ? left : task_rows);
}

inline int64_t num_row_tasks(const LatentArgs& args, int64_t task_rows) {
  int64_t count = 0;
  for (int64_t i = 0; i < args.num_sequences; i++)
    count += (args.sequences[i].num_tokens * args.num_heads + task_rows - 1) / task_rows;
  return count;
}

// Each thread attends for some rows to all of their keys.
template <typename T>
void attend_by_rows(const LatentArgs& args, int64_t num_groups, const Threads& threads) {
  const int64_t task_rows = clamp(num_groups / (kTasksEach * threads.count), 1, kTaskGroups) * kLatentRows;
  share(num_row_tasks(args, task_rows), threads, [&](int64_t task) {
    with_rows(args, task, task_rows, [&](const Sequence& sequence, int64_t first_row, int64_t num_rows) {
      LatentGroup groups[kTaskGroups];
      LatentSums sums[kTaskGroups], part[kTaskGroups];
      int64_t count = 0;
      for (int64_t row = 0; row < num_rows; row += kLatentRows, count++) {
        const int64_t left = num_rows - row;
        take_rows<T>(args, sequence, first_row + row, left < kLatentRows ? left : kLatentRows, groups[count]);
        clear(sums[count], padded(args.rank));
      }
      for (int64_t first = 0; first < groups[count - 1].end; first += kLatentPart) {
        attend_part<T>(args, sequence, groups, count, first, part);
        for (int64_t i = 0; i < count; i++) merge(sums[i], part[i], groups[i].num_rows, padded(args.rank));
      }
      for (int64_t i = 0; i < count; i++) store_latents<T>(args, sequence, groups[i], sums[i]);
    });
  });
}

// Threads share the keys of each group of rows, some parts at a time.
template <typename T>
void attend_by_parts(const LatentArgs& args, int64_t num_groups, const Threads& threads) {
  const int64_t parts_together = 2 * threads.count / num_groups, stride = padded(args.rank);
  LatentSums* parts = args.scratch + num_groups;
  int64_t end = 1;  // results are stored even if the cache has none of the keys
  for (int64_t i = 0; i < args.num_sequences; i++) {
    const int64_t own = num_owned(args, args.sequences[i].start + args.sequences[i].num_tokens);
    end = own > end ? own : end;
  }
  for (int64_t first = 0; first < end; first += parts_together * kLatentPart) {
    share(num_groups * parts_together, threads, [&](int64_t task) {
      const int64_t begin = first + task % parts_together * kLatentPart;
      with_rows(args, task / parts_together, kLatentRows, [&](const Sequence& sequence, int64_t row, int64_t num_rows) {
        LatentGroup group;
        take_rows<T>(args, sequence, row, num_rows, group);
        attend_part<T>(args, sequence, &group, 1, begin, parts + task);
      });
    });
    share(num_groups, threads, [&](int64_t task) {
      with_rows(args, task, kLatentRows, [&](const Sequence& sequence, int64_t row, int64_t num_rows) {
        LatentSums& sums = args.scratch[task];
        if (first == 0) clear(sums, stride);
        for (int64_t i = 0; i < parts_together; i++)
          merge(sums, parts[task * parts_together + i], num_rows, stride);
        if (first + parts_together * kLatentPart < end) return;
        LatentGroup group;
        group.first_row = row;
        group.num_rows = num_rows;
        store_latents<T>(args, sequence, group, sums);
      });
    });
  }
}

// Rotates a token's queries and its key, normalizes its latent, and stores both, if they belong into the cache.
template <typename T>
void prepare_latent(const LatentArgs& args, const Sequence& sequence, int64_t token) {
  const int64_t N = args.num_heads, R = args.rank, W = args.width, S = args.block_size;
  const int64_t position = sequence.start + token;
  T* row = static_cast<T*>(args.qkv) + (sequence.first_row + token) * (N + 1) * W;
  const float* turns = args.turns + position * (W - R);
  for (int64_t head = 0; head <= N; head++)
    turn_head(row + head * W + R, static_cast<const T*>(nullptr), 0.0f, turns, W - R, args.eps);
  if (!is_owned(args, position)) return;
  T* key = row + N * W;
  const T* weight = static_cast<const T*>(args.norm);
  const Floats factor = splat(inverse_norm(key, R, args.eps));
  for (int64_t i = 0; i < R; i += kWidth)
    store_up_to(key + i, load_up_to(key + i, R - i) * factor * load_up_to(weight + i, R - i), R - i);
  const int64_t block = args.tables[sequence.slot * args.table_stride + num_owned(args, position) / S];
  std::memcpy(static_cast<T*>(args.cache) + (block * S + position % S) * W, key, W * sizeof(T));
}

template <typename T>
void latent_attention(const LatentArgs& args, const Threads& threads) {
  const auto prepare = [&](const Sequence& sequence, int64_t, int64_t first, int64_t last) {
    for (int64_t token = first; token < last; token++) prepare_latent<T>(args, sequence, token);
  };
  if (args.part != kAttending) share_tokens(args, 1, kPreparedTokens, threads, prepare);
  if (args.part == kStoring) return;
  const int64_t num_groups = num_row_tasks(args, kLatentRows);
  if (args.scratch) attend_by_parts<T>(args, num_groups, threads);
  else attend_by_rows<T>(args, num_groups, threads);
}

}  // namespace
