// What a state is updated with: the convolution of a step's tokens, norms of queries and keys, and decays.

#pragma once

#include "convolution.h"
#include "kernels.h"
#include "threads.h"
#include "vectors.h"

namespace {

using namespace raycore;

constexpr int64_t kStateTokens = 16;  // of a prompt that are prepared together
constexpr int64_t kStateDecodes = 8;  // sequences with one token that are prepared together
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
    const Floats share =
        is_delta ? splat(args.largest_share) / (splat(1.0f) + exponential(-load_up_to(x + i, left))) : time;
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
    const StateSave* in_place = nullptr;  // is written last, because the others may need what it overwrites
    for (const StateSave* each = save; each < last_save; each++) {
      if (each->row == sequence.read_row) in_place = each;
      else channels.keep(sequence, each->num_tokens, each->row);
    }
    channels.keep(sequence, sequence.num_tokens, sequence.write_row);
    if (in_place) channels.keep(sequence, in_place->num_tokens, in_place->row);
  });
}

}  // namespace
