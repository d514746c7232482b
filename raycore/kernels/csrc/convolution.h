// The convolution of each channel over a sequence's latest inputs, some of which earlier steps have kept, and SiLU of it.

#pragma once

#include <utility>

#include "gate.h"
#include "kernels.h"
#include "vectors.h"

namespace {

using namespace raycore;

// Lane l of the result is number `Index::of(l)` of two vectors.
template <typename Index, int... lanes>
inline Floats choose(Floats a, Floats b, std::integer_sequence<int, lanes...>) {
  return RAYCORE_SHUFFLE(a, b, Index::of(lanes)...);
}

template <typename Index>
inline Floats choose(Floats a, Floats b) {
  return choose<Index>(a, b, std::make_integer_sequence<int, kWidth>());
}

// Where n numbers of each lane are, if vectors from `first` on, two of them, are side by side: of number i of a lane.
template <int n, int i, int first>
struct OfLane {
  static constexpr bool has(int lane) { return lane * n + i >= first * kWidth && lane * n + i < (first + 2) * kWidth; }
  static constexpr int of(int lane) { return has(lane) ? lane * n + i - first * kWidth : 0; }
};

// Of two vectors that have been chosen, which one has number i of a lane.
template <int n, int i>
struct OfChosen {
  static constexpr int of(int lane) { return lane + (lane * n + i < 2 * kWidth ? 0 : kWidth); }
};

// The inverse: where number `part` · kWidth + `lane` of [lanes, n] is, if vectors have one number of each lane.
template <int n, int part, int first>
struct OfNumber {
  static constexpr int number(int lane) { return (part * kWidth + lane) % n - first; }
  static constexpr int of(int lane) {
    return number(lane) < 0 || number(lane) > 1 ? 0 : number(lane) * kWidth + (part * kWidth + lane) / n;
  }
};

template <int n, int part>
struct OfChosenNumber {
  static constexpr int of(int lane) { return lane + ((part * kWidth + lane) % n < 2 ? 0 : kWidth); }
};

// Number i of each lane, of n: [lanes, n] in vectors.
template <int n, int i>
inline Floats number_of_lanes(const Floats* x) {
  static_assert(n <= 4);
  if constexpr (n == 1) return x[0];
  const Floats low = choose<OfLane<n, i, 0>>(x[0], x[n > 1]);
  if constexpr (n == 2) return low;
  const Floats high = choose<OfLane<n, i, 2>>(x[n > 2 ? 2 : 0], x[n - 1]);
  return choose<OfChosen<n, i>>(low, high);
}

// Vector `part` of [lanes, n].
template <int n, int part>
inline Floats numbers_side_by_side(const Floats* x) {
  static_assert(n <= 4);
  if constexpr (n == 1) return x[0];
  const Floats low = choose<OfNumber<n, part, 0>>(x[0], x[n > 1]);
  if constexpr (n == 2) return low;
  const Floats high = choose<OfNumber<n, part, 2>>(x[n > 2 ? 2 : 0], x[n - 1]);
  return choose<OfChosenNumber<n, part>>(low, high);
}

// n numbers of each lane, of which the first `num_lanes` count: [lanes, n] in memory, n vectors.
template <int n, typename T, int... i>
inline void load_by_lane(const T* from, int64_t num_lanes, Floats* to, std::integer_sequence<int, i...>) {
  Floats numbers[n];
  if (num_lanes >= kWidth) {
    for (int part = 0; part < n; part++) numbers[part] = load(from + part * kWidth);
  } else {
    T padded[n * kWidth] = {};
    std::memcpy(padded, from, num_lanes * n * sizeof(T));
    for (int part = 0; part < n; part++) numbers[part] = load(padded + part * kWidth);
  }
  ((to[i] = number_of_lanes<n, i>(numbers)), ...);
}

template <int n, typename T>
inline void load_by_lane(const T* from, int64_t num_lanes, Floats* to) {
  load_by_lane<n>(from, num_lanes, to, std::make_integer_sequence<int, n>());
}

template <int n, typename T, int... part>
inline void store_by_lane(T* to, int64_t num_lanes, const Floats* from, std::integer_sequence<int, part...>) {
  if (num_lanes >= kWidth) {
    (store(to + part * kWidth, numbers_side_by_side<n, part>(from)), ...);
  } else {
    T padded[n * kWidth];
    (store(padded + part * kWidth, numbers_side_by_side<n, part>(from)), ...);
    std::memcpy(to, padded, num_lanes * n * sizeof(T));
  }
}

template <int n, typename T>
inline void store_by_lane(T* to, int64_t num_lanes, const Floats* from) {
  store_by_lane<n>(to, num_lanes, from, std::make_integer_sequence<int, n>());
}

// The channels of a vector, from `first` on, of a layer with W taps.
template <typename T, int W>
class Channels {
 public:
  Channels(const RecurrenceArgs& args, int64_t first) : args_(args), first_(first), left_(args.num_channels() - first) {
    load_by_lane<W>(static_cast<const T*>(args.taps) + first * W, left_, taps_);
    if (args.conv_bias) bias_ = load_up_to(static_cast<const T*>(args.conv_bias) + first, left_);
  }

  // Computes a sequence's tokens `begin` to `end`.
  void convolve(const StateSequence& sequence, int64_t begin, int64_t end) const {
    Floats inputs[W];
    load_inputs(sequence, begin - 1, inputs + 1);
    for (int64_t token = begin; token < end; token++) {
      for (int i = 0; i + 1 < W; i++) inputs[i] = inputs[i + 1];
      inputs[W - 1] = input(sequence, token);
      finish(sequence, token, inputs);
    }
  }

  // Computes a sequence's first token, and keeps what the next token needs.
  void convolve_one(const StateSequence& sequence) const {
    Floats inputs[W];
    load_inputs(sequence, -1, inputs);
    inputs[W - 1] = input(sequence, 0);
    finish(sequence, 0, inputs);
    store_by_lane<W - 1>(state(sequence.write_row), left_, inputs + 1);
  }

  // Keeps what the next token needs after a sequence's first `num_tokens` in a row of the states.
  void keep(const StateSequence& sequence, int64_t num_tokens, int64_t row) const {
    Floats inputs[W - 1];
    load_inputs(sequence, num_tokens - 1, inputs);
    store_by_lane<W - 1>(state(row), left_, inputs);
  }

 private:
  T* state(int64_t row) const {
    return static_cast<T*>(args_.conv_states) + (row * args_.num_channels() + first_) * (W - 1);
  }

  void finish(const StateSequence& sequence, int64_t token, const Floats* inputs) const {
    Floats y = bias_;
    for (int i = 0; i < W; i++) y = multiply_add(inputs[i], taps_[i], y);
    store(args_.scratch + (sequence.first_row + token) * args_.channels_stride() + first_, silu(y));
  }

  Floats input(const StateSequence& sequence, int64_t token) const {
    return load_up_to(static_cast<const T*>(args_.x) + (sequence.first_row + token) * args_.x_stride + first_, left_);
  }

  // The inputs of W - 1 tokens, of which `last` is the last one. Those before the first token are in the state.
  void load_inputs(const StateSequence& sequence, int64_t last, Floats* inputs) const {
    Floats earlier[W - 1] = {};
    if (last < W - 2 && sequence.read_row >= 0) load_by_lane<W - 1>(state(sequence.read_row), left_, earlier);
    for (int i = 0; i < W - 1; i++) {
      const int64_t token = last - (W - 2) + i;
      inputs[i] = token >= 0 ? input(sequence, token) : earlier[W - 1 + token];
    }
  }

  const RecurrenceArgs& args_;
  const int64_t first_, left_;
  Floats taps_[W], bias_ = {};
};

// Calls function(channels) for all channels, a vector at a time.
template <typename T, typename Function>
inline void for_channels(const RecurrenceArgs& args, const Function& function) {
  const auto for_each = [&](auto size) {
    for (int64_t first = 0; first < args.num_channels(); first += kWidth)
      function(Channels<T, decltype(size)::value>(args, first));
  };
  if (args.conv_size == 2) for_each(std::integral_constant<int, 2>());
  else if (args.conv_size == 3) for_each(std::integral_constant<int, 3>());
  else for_each(std::integral_constant<int, 4>());
}

}  // namespace
