// Layers that keep a state of [K, H] for each head instead of keys and values: the gated delta rule, and Mamba-2.
//
// First, tokens are prepared: the convolution of their channels, norms, decays. Then a task computes one head of one
// sequence, or some columns of it, token by token, because columns don't depend on each other. Sums are added up in the
// order of the rows. So a token's bits depend on its own sequence only, and neither on how that is divided into steps
// nor on the number of threads.

#pragma once

#include "kernels.h"
#include "prepared_tokens.h"
#include "threads.h"
#include "vectors.h"

namespace {

using namespace raycore;

constexpr int kDecodeVectors = kWidth == 8 ? 4 : 8;  // of a state's row: two sums of each fit in the registers
constexpr int kTileVectors = kWidth == 8 ? 2 : 4;    // of a state's row, for prompts: a tile fits in a core's cache

// Some columns of one head's states: V vectors of them.
template <int V>
struct Columns {
  Floats numbers[V];
};

template <int V>
inline Columns<V> load_columns(const float* from) {
  Columns<V> columns;
  for (int v = 0; v < V; v++) columns.numbers[v] = load(from + v * kWidth);
  return columns;
}

// One head of a sequence.
template <typename T, bool is_delta>
class Head {
 public:
  Head(const RecurrenceArgs& args, const StateSequence& sequence, int64_t head)
      : args_(args),
        sequence_(sequence),
        places_(args),
        head_(head),
        group_(head / (args.num_v_heads / args.num_k_heads)) {}

  float* state(int64_t row) const {
    return args_.states + (row * args_.num_v_heads + head_) * args_.k_dim * args_.v_dim;
  }
  int64_t row_of(int64_t token) const { return sequence_.first_row + token; }
  const float* query(int64_t token) const { return channels(token) + places_.q + group_ * args_.k_dim; }
  const float* key(int64_t token) const { return channels(token) + places_.k + group_ * args_.k_dim; }

  // Computes the results of some columns of a token, given the sums of the state's rows times the key, and times the
  // query. Makes of the former what the key is multiplied by in the state's update. `width`: of the columns that count.
  template <int V>
  void finish(int64_t token, int64_t column, int64_t width, Columns<V>& by_key, const Columns<V>& by_query) const {
    const TokenFactors factors(args_, row_of(token));
    const Floats decay = splat(factors.decays[head_]), share = splat(factors.shares[head_]);
    const Floats product = splat(factors.products[group_]);
    const float* values = channels(token) + places_.v + head_ * args_.v_dim + column;
    T* out = static_cast<T*>(args_.out) + (row_of(token) * args_.num_v_heads + head_) * args_.v_dim + column;
    for (int v = 0; v < V; v++) {
      const int64_t left = width - v * kWidth;
      if (left <= 0) {
        by_key.numbers[v] = Floats{};
        continue;
      }
      const Floats value = load_up_to(values + v * kWidth, left);
      const Floats change = (is_delta ? multiply_add(-decay, by_key.numbers[v], value) : value) * share;
      Floats result = multiply_add(product, change, by_query.numbers[v] * decay);
      if (!is_delta) result = multiply_add(splat(args_.skip[head_]), value, result);
      store_up_to(out + v * kWidth, result, left);
      by_key.numbers[v] = change;
    }
  }

  float decay(int64_t token) const { return TokenFactors(args_, row_of(token)).decays[head_]; }

 private:
  const float* channels(int64_t token) const { return args_.scratch + row_of(token) * args_.channels_stride(); }

  const RecurrenceArgs& args_;
  const StateSequence& sequence_;
  const Places<is_delta> places_;
  const int64_t head_, group_;
};

// The sums of a state's rows times the key, and times the query.
template <bool is_delta, int V>
inline void sum_rows(const float* state, int64_t stride, const float* key, const float* query, int64_t num_rows,
                     Columns<V>& by_key, Columns<V>& by_query) {
  by_key = by_query = {};
  for (int64_t row = 0; row < num_rows; row++) {
    const Columns<V> now = load_columns<V>(state + row * stride);
    for (int v = 0; v < V; v++) {
      if (is_delta) by_key.numbers[v] = multiply_add(splat(key[row]), now.numbers[v], by_key.numbers[v]);
      by_query.numbers[v] = multiply_add(splat(query[row]), now.numbers[v], by_query.numbers[v]);
    }
  }
}

// Updates a state by a token, from `from` to `to`.
template <int V>
inline void update_rows(const float* from, float* to, int64_t stride, const float* key, float decay,
                        const Columns<V>& change, int64_t num_rows) {
  for (int64_t row = 0; row < num_rows; row++)
    for (int v = 0; v < V; v++) {
      const Floats kept = load(from + row * stride + v * kWidth) * splat(decay);
      store(to + row * stride + v * kWidth, multiply_add(splat(key[row]), change.numbers[v], kept));
    }
}

// Updates a state by a token, and sums up its new rows for the next token, as the two functions above do.
template <bool is_delta, int V>
inline void update_and_sum_rows(float* state, const float* key, float decay, const float* next_key,
                                const float* next_query, int64_t num_rows, Columns<V>& by_key, Columns<V>& by_query) {
  const Columns<V> change = by_key;
  Columns<V> by_next_key = {}, by_next_query = {};
  for (int64_t row = 0; row < num_rows; row++)
    for (int v = 0; v < V; v++) {
      float* place = state + (row * V + v) * kWidth;
      const Floats now = multiply_add(splat(key[row]), change.numbers[v], load(place) * splat(decay));
      store(place, now);
      if (is_delta) by_next_key.numbers[v] = multiply_add(splat(next_key[row]), now, by_next_key.numbers[v]);
      by_next_query.numbers[v] = multiply_add(splat(next_query[row]), now, by_next_query.numbers[v]);
    }
  by_key = by_next_key;
  by_query = by_next_query;
}

// Computes a sequence with one token, whose state is updated where it lies.
template <typename T, bool is_delta, int V = kDecodeVectors>
void decode(const RecurrenceArgs& args, const StateSequence& sequence, int64_t index, int64_t column = 0) {
  const int64_t K = args.k_dim, H = args.v_dim;
  const Head<T, is_delta> head(args, sequence, index);
  for (; column + V * kWidth <= H; column += V * kWidth) {
    const float* from = head.state(sequence.read_row) + column;
    Columns<V> by_key, by_query;
    sum_rows<is_delta, V>(from, H, head.key(0), head.query(0), K, by_key, by_query);
    head.template finish<V>(0, column, V * kWidth, by_key, by_query);
    update_rows<V>(from, head.state(sequence.write_row) + column, H, head.key(0), head.decay(0), by_key, K);
  }
  if constexpr (V > 1)
    if (column < H) decode<T, is_delta, V / 2>(args, sequence, index, column);
}

// Computes some columns of a sequence, from `column` on: with a copy of the state that stays in a core's cache.
template <typename T, bool is_delta>
void compute_columns(const RecurrenceArgs& args, const StateSequence& sequence, const StateSave* save,
                     const StateSave* last_save, int64_t index, int64_t column) {
  constexpr int V = kTileVectors;
  constexpr int64_t stride = V * kWidth;
  const int64_t K = args.k_dim, H = args.v_dim, width = H - column < stride ? H - column : stride;
  const Head<T, is_delta> head(args, sequence, index);
  alignas(64) float tile[kMaxKeyDim * stride];
  std::memset(tile, 0, K * stride * sizeof(float));
  if (sequence.read_row >= 0)
    for (int64_t row = 0; row < K; row++)
      std::memcpy(tile + row * stride, head.state(sequence.read_row) + row * H + column, width * sizeof(float));
  const auto write = [&](int64_t state) {
    for (int64_t row = 0; row < K; row++)
      std::memcpy(head.state(state) + row * H + column, tile + row * stride, width * sizeof(float));
  };
  Columns<V> by_key, by_query;
  sum_rows<is_delta, V>(tile, stride, head.key(0), head.query(0), K, by_key, by_query);
  for (int64_t token = 0; token + 1 < sequence.num_tokens; token++) {
    head.template finish<V>(token, column, width, by_key, by_query);
    update_and_sum_rows<is_delta, V>(tile, head.key(token), head.decay(token), head.key(token + 1),
                                     head.query(token + 1), K, by_key, by_query);
    if (save < last_save && save->num_tokens == token + 1) write((save++)->row);
  }
  const int64_t last = sequence.num_tokens - 1;
  head.template finish<V>(last, column, width, by_key, by_query);
  update_rows<V>(tile, tile, stride, head.key(last), head.decay(last), by_key, K);
  write(sequence.write_row);
}

template <typename T, bool is_delta>
void recurrence(const RecurrenceArgs& args, const Threads& threads) {
  int64_t num_decodes = 0;
  while (num_decodes < args.num_sequences && args.sequences[num_decodes].num_tokens == 1) num_decodes++;
  prepare<T, is_delta>(args, num_decodes, threads);
  const int64_t N = args.num_v_heads, width = kTileVectors * kWidth, tiles = (args.v_dim + width - 1) / width;
  const int64_t decode_tasks = num_decodes * N, prompt_tasks = 1 + N * tiles;
  const bool is_whole = args.v_dim % kWidth == 0;
  share(decode_tasks + (args.num_sequences - num_decodes) * prompt_tasks, threads, [&](int64_t task) {
    if (task < decode_tasks) {
      const StateSequence& sequence = args.sequences[task / N];
      if (is_whole && sequence.read_row >= 0) decode<T, is_delta>(args, sequence, task % N);
      else
        for (int64_t column = 0; column < args.v_dim; column += width)
          compute_columns<T, is_delta>(args, sequence, nullptr, nullptr, task % N, column);
      return;
    }
    task -= decode_tasks;
    const int64_t index = num_decodes + task / prompt_tasks, part = task % prompt_tasks - 1;
    const StateSave *save = args.saves, *end = args.saves + args.num_saves;
    while (save < end && save->sequence < index) save++;
    const StateSave* last_save = save;
    while (last_save < end && last_save->sequence == index) last_save++;
    const StateSequence& sequence = args.sequences[index];
    if (part < 0) keep_inputs<T>(args, sequence, save, last_save);
    else compute_columns<T, is_delta>(args, sequence, save, last_save, part / tiles, part % tiles * width);
  });
}

template <typename T>
void gated_delta(const RecurrenceArgs& args, const Threads& threads) {
  recurrence<T, true>(args, threads);
}

template <typename T>
void mamba2(const RecurrenceArgs& args, const Threads& threads) {
  recurrence<T, false>(args, threads);
}

}  // namespace
