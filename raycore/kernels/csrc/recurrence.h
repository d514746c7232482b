// Layers that keep a state of [K, H] for each head instead of keys and values: the gated delta rule, and Mamba-2.
//
// First, tokens are prepared: the convolution of their channels, norms, decays. Then a task computes one head of one
// sequence, or some columns of it, token by token, because columns don't depend on each other. Sums are added up in the
// order of the rows. So a token's bits depend on its own sequence only, and neither on how that is divided into steps
// nor on the number of threads.

#pragma once

#include "convolution.h"
#include "kernels.h"
#include "threads.h"
#include "vectors.h"

namespace {

using namespace raycore;

constexpr int64_t kStateTokens = 16;                 // of a prompt that are prepared together
constexpr int64_t kStateDecodes = 8;                 // sequences with one token that are prepared together
constexpr int kDecodeVectors = kWidth == 8 ? 4 : 8;  // of a state's row: two sums of each fit in the registers
constexpr int kTileVectors = kWidth == 8 ? 2 : 4;    // of a state's row, for prompts: a tile fits in a core's cache
constexpr float kNormEps = 1e-6f;

// The logarithm of 1 + e^x, off by less than 4 units in the last place. NaN gives NaN.
//
// log(1 + y) is 2 artanh(y / (y + 2)), and y is at most 1 here.
inline Floats softplus(Floats x) {
  const Floats y = exponential(-absolute(x)), s = y / (y + splat(2.0f)), s2 = s * s;
  Floats sum = splat(1.0f / 15);
  sum = multiply_add(sum, s2, splat(1.0f / 13));
  sum = multiply_add(sum, s2, splat(1.0f / 11));
  sum = multiply_add(sum, s2, splat(1.0f / 9));
  sum = multiply_add(sum, s2, splat(1.0f / 7));
  sum = multiply_add(sum, s2, splat(1.0f / 5));
  sum = multiply_add(sum, s2, splat(1.0f / 3));
  sum = multiply_add(sum * s2, s, s);
  return sum + sum + (x > splat(0.0f) ? x : x != x ? x : splat(0.0f));
}

inline float dot(const float* a, const float* b, int64_t dim) {
  Floats total = {};
  for (int64_t i = 0; i < dim; i += kWidth)
    total = multiply_add(load_up_to(a + i, dim - i), load_up_to(b + i, dim - i), total);
  return sum(total);
}

inline void scale(float* x, float factor, int64_t dim) {
  for (int64_t i = 0; i < dim; i += kWidth) store_up_to(x + i, load_up_to(x + i, dim - i) * splat(factor), dim - i);
}

// Where a token's queries, keys and values begin among the channels.
template <bool is_delta>
struct Places {
  const int64_t q, k, v;
  explicit Places(const RecurrenceArgs& args)
      : q(is_delta ? 0 : args.num_v_heads * args.v_dim + args.num_k_heads * args.k_dim),
        k(is_delta ? args.num_k_heads * args.k_dim : args.num_v_heads * args.v_dim),
        v(is_delta ? 2 * args.num_k_heads * args.k_dim : 0) {}
};

// What a token does to its states, beside its channels: [N] decays, [N] shares that are written, [G] products of
// queries and keys.
struct TokenFactors {
  float *decays, *shares, *products;
  TokenFactors(const RecurrenceArgs& args, int64_t row)
      : decays(args.scratch + args.num_tokens * args.channels_stride() + row * args.num_factors()),
        shares(decays + args.num_v_heads),
        products(shares + args.num_v_heads) {}
};

template <typename T, bool is_delta>
inline void prepare_token(const RecurrenceArgs& args, int64_t row) {
  const int64_t N = args.num_v_heads, G = args.num_k_heads, K = args.k_dim;
  const TokenFactors factors(args, row);
  const T* x = static_cast<const T*>(args.x) + row * args.x_stride + args.num_channels();
  const T* times = x + (is_delta ? N : 0);
  for (int64_t i = 0; i < N; i += kWidth) {
    const int64_t left = N - i;
    Floats time = softplus(load_up_to(times + i, left) + load_up_to(args.bias + i, left));
    if (!is_delta) {
      time = time < splat(args.least_time) ? splat(args.least_time) : time;
      time = time > splat(args.longest_time) ? splat(args.longest_time) : time;
    }
    store_up_to(factors.decays + i, exponential(-exponential(load_up_to(args.decay + i, left)) * time), left);
    const Floats share = is_delta ? splat(1.0f) / (splat(1.0f) + exponential(-load_up_to(x + i, left))) : time;
    store_up_to(factors.shares + i, share, left);
  }
  float* channels = args.scratch + row * args.channels_stride();
  const Places<is_delta> places(args);
  for (int64_t head = 0; head < G; head++) {
    float *q = channels + places.q + head * K, *k = channels + places.k + head * K;
    if (is_delta) {
      scale(q, 1.0f / __builtin_sqrtf((dot(q, q, K) + kNormEps) * K), K);
      scale(k, 1.0f / __builtin_sqrtf(dot(k, k, K) + kNormEps), K);
    }
    factors.products[head] = dot(q, k, K);
  }
}

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

// Prepares all tokens, and keeps the convolution's inputs of sequences with one token.
template <typename T, bool is_delta>
void prepare(const RecurrenceArgs& args, int64_t num_decodes, const Threads& threads) {
  const int64_t decode_tasks = (num_decodes + kStateDecodes - 1) / kStateDecodes;
  int64_t num_tasks = decode_tasks;
  const auto tasks_of = [](const StateSequence& sequence) {
    return (sequence.num_tokens + kStateTokens - 1) / kStateTokens;
  };
  for (int64_t i = num_decodes; i < args.num_sequences; i++) num_tasks += tasks_of(args.sequences[i]);
  share(num_tasks, threads, [&](int64_t task) {
    const StateSequence *sequence = args.sequences + task * kStateDecodes, *end = args.sequences + num_decodes;
    if (task < decode_tasks) {
      end = end - sequence < kStateDecodes ? end : sequence + kStateDecodes;
      for_channels<T>(args, [&](const auto& channels) {
        for (const StateSequence* each = sequence; each < end; each++) channels.convolve_one(*each);
      });
      for (; sequence < end; sequence++) prepare_token<T, is_delta>(args, sequence->first_row);
      return;
    }
    task -= decode_tasks;
    for (sequence = end; task >= tasks_of(*sequence); sequence++) task -= tasks_of(*sequence);
    const int64_t first = task * kStateTokens, left = sequence->num_tokens - first;
    const int64_t last = first + (left < kStateTokens ? left : kStateTokens);
    for_channels<T>(args, [&](const auto& channels) { channels.convolve(*sequence, first, last); });
    for (int64_t token = first; token < last; token++) prepare_token<T, is_delta>(args, sequence->first_row + token);
  });
}

// Keeps the convolution's inputs of a prompt: where it saves its state, and at its end.
template <typename T>
void keep_inputs(const RecurrenceArgs& args, const StateSequence& sequence, const StateSave* save,
                 const StateSave* last_save) {
  for_channels<T>(args, [&](const auto& channels) {
    for (const StateSave* each = save; each < last_save; each++) channels.keep(sequence, each->num_tokens, each->row);
    channels.keep(sequence, sequence.num_tokens, sequence.write_row);
  });
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
