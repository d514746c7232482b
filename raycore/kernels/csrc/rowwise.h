// Kernels in which each row is computed by itself: norms, gate, and the most likely token.

#pragma once

#include "gate.h"
#include "kernels.h"
#include "threads.h"
#include "vectors.h"

namespace {

using namespace raycore;

template <typename T>
inline float inverse_norm(const T* x, int64_t dim, float eps) {
  Floats a = {}, b = {};
  int64_t i = 0;
  for (; i + 2 * kWidth <= dim; i += 2 * kWidth) {
    const Floats x0 = load(x + i), x1 = load(x + i + kWidth);
    a = multiply_add(x0, x0, a);
    b = multiply_add(x1, x1, b);
  }
  for (; i < dim; i += kWidth) {
    const Floats x0 = load_up_to(x + i, dim - i);
    a = multiply_add(x0, x0, a);
  }
  return 1.0f / __builtin_sqrtf(sum(a + b) / dim + eps);
}

template <typename T>
void rms_norm(const NormArgs& args, const Threads& threads) {
  for_rows(args.num_rows, rows_per_thread(args.dim), threads, [&](int64_t row) {
    const T* x = static_cast<const T*>(args.x) + row * args.x_stride;
    const T* weight = static_cast<const T*>(args.weight);
    T* out = static_cast<T*>(args.out) + row * args.dim;
    const Floats factor = splat(inverse_norm(x, args.dim, args.eps)), offset = splat(args.offset);
    const auto normalize = [&](const auto& whole) {
      for (int64_t i = 0; i < args.dim; i += kWidth) {
        const int64_t left = args.dim - i;
        store_up_to(out + i, load_up_to(x + i, left) * factor * whole(load_up_to(weight + i, left)), left);
      }
    };
    if (args.offset) normalize([&](Floats weight) { return weight + offset; });
    else normalize([](Floats weight) { return weight; });
  });
}

// The sum of `map` of a row's numbers, which must be 0 for lanes that have none.
template <typename T, typename Map>
inline float sum_of(const T* x, int64_t dim, const Map& map) {
  Floats a = {}, b = {};
  int64_t i = 0;
  for (; i + 2 * kWidth <= dim; i += 2 * kWidth) {
    a += map(load(x + i), kWidth);
    b += map(load(x + i + kWidth), kWidth);
  }
  for (; i < dim; i += kWidth) a += map(load_up_to(x + i, dim - i), dim - i);
  return sum(a + b);
}

// Calls store(i, left, y) with each vector of a row's normalized numbers.
template <typename X, typename T, typename Store>
inline void normalize(const X* x, const T* weight, const T* bias, int64_t dim, float eps, const Store& store) {
  Ints lanes = {};
  for (int i = 0; i < kWidth; i++) lanes[i] = i;
  const Floats mean = splat(sum_of(x, dim, [](Floats x, int64_t) { return x; }) / dim);
  const float squares = sum_of(x, dim, [&](Floats x, int64_t left) {
    const Floats own = x - mean, rest = lanes < int32_t(left) ? own : Floats{};
    return rest * rest;
  });
  const Floats factor = splat(1.0f / __builtin_sqrtf(squares / dim + eps));
  for (int64_t i = 0; i < dim; i += kWidth) {
    const int64_t left = dim - i;
    Floats y = (load_up_to(x + i, left) - mean) * factor * load_up_to(weight + i, left);
    if (bias) y += load_up_to(bias + i, left);
    store(i, left, y);
  }
}

template <typename T>
void layer_norm(const LayerNormArgs& args, const Threads& threads) {
  for_rows(args.num_rows, rows_per_thread(args.dim), threads, [&](int64_t row) {
    const T* x = static_cast<const T*>(args.x) + row * args.x_stride;
    T* out = static_cast<T*>(args.out) + row * args.dim;
    normalize(x, static_cast<const T*>(args.weight), static_cast<const T*>(args.bias), args.dim, args.eps,
              [&](int64_t i, int64_t left, Floats y) { store_up_to(out + i, y, left); });
  });
}

template <typename T>
void add_layer_norm(const AddLayerNormArgs& args, const Threads& threads) {
  for_rows(args.num_rows, rows_per_thread(args.dim), threads, [&](int64_t row) {
    float* residual = args.residual + row * args.dim;
    T* x = static_cast<T*>(args.x) + row * args.dim;
    for (int64_t i = 0; i < args.dim; i += kWidth) {
      const int64_t left = args.dim - i;
      store_up_to(residual + i, load_up_to(residual + i, left) + load_up_to(x + i, left), left);
    }
    normalize(residual, static_cast<const T*>(args.weight), static_cast<const T*>(args.bias), args.dim, args.eps,
              [&](int64_t i, int64_t left, Floats y) {
                store_up_to(x + i, y, left);
                if (!args.keeps_sum) store_up_to(residual + i, y, left);
              });
  });
}

template <typename T>
void gate_and_mul(const GateArgs& args, const Threads& threads) {
  with_gate<kSilu>(args.gate, [&](auto kind) {
    for_rows(args.num_rows, rows_per_thread(args.dim), threads, [&](int64_t row) {
      const T* gate = static_cast<const T*>(args.gate_up) + row * 2 * args.dim;
      const T* up = gate + args.dim;
      T* out = static_cast<T*>(args.out) + row * args.dim;
      for (int64_t i = 0; i < args.dim; i += kWidth) {
        const int64_t left = args.dim - i;
        const Floats x = load_up_to(gate + i, left);
        store_up_to(out + i, gated<decltype(kind)::value, T>(args.gate, x, load_up_to(up + i, left)), left);
      }
    });
  });
}

template <typename T>
void most_likely(const PickArgs& args, const Threads& threads) {
  for_rows(args.num_rows, 1, threads, [&](int64_t row) {
    const T* logits = static_cast<const T*>(args.logits) + row * args.stride;
    Floats best = splat(-kInfinity);
    Ints where = {}, here;
    for (int i = 0; i < kWidth; i++) here[i] = i;
    int64_t i = 0;
    for (; i + kWidth <= args.dim; i += kWidth, here += kWidth) {
      const Floats x = load(logits + i);
      where = x > best ? here : where;
      best = maximum(x, best);
    }
    float top = -kInfinity;
    int64_t found = 0;
    for (int lane = 0; lane < kWidth; lane++)
      if (best[lane] > top || (best[lane] == top && where[lane] < found)) top = best[lane], found = where[lane];
    const Floats rest = load_first(logits + i, args.dim - i);
    for (int lane = 0; i + lane < args.dim; lane++)
      if (rest[lane] > top) top = rest[lane], found = i + lane;
    args.out[row] = found;
  });
}

}  // namespace
