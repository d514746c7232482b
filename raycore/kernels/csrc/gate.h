// What gated layers compute of a gate and of what it gates.

#pragma once

#include "kernels.h"
#include "vectors.h"

namespace {

using namespace raycore;

inline Floats silu(Floats x) {
  return x / (splat(1.0f) + exponential(-x));
}

// x times the probability that a normal random number is less than x. T: the type that the result is rounded to.
template <typename T>
inline Floats gelu(Floats x) {
  constexpr bool is_rough = std::is_same<T, BFloat16>::value;
  const Floats size = absolute(x), above = is_rough ? rough_upper_tail(size) : upper_tail(size);
  return x * (x > splat(0.0f) ? splat(1.0f) - above : above);
}

// The approximation of GELU by a hyperbolic tangent: 1 + tanh(z) is 2 / (1 + e^(-2 z)).
inline Floats gelu_tanh(Floats x) {
  const Floats doubled = x * multiply_add(x * x, splat(0.0713548163f), splat(1.59576912f));
  return x / (splat(1.0f) + exponential(-doubled));
}

// T: the type that the result is rounded to.
template <GateKind kind, typename T>
inline Floats gated(const Gate& gate, Floats x, Floats up) {
  static_assert(kind > kNoGate && kind < kNumGateKinds, "a gate");
  if constexpr (kind == kSilu) return silu(x) * up;
  if constexpr (kind == kGelu) return gelu<T>(x) * up;
  if constexpr (kind == kGeluTanh) return gelu_tanh(x) * up;
  if constexpr (kind == kSquaredRelu) {
    const Floats above = splat(0.0f) > x ? splat(0.0f) : x;
    return above * above * up;
  }
  if constexpr (kind == kClampedSwiglu) {
    const Floats limit = splat(gate.limit);
    x = x > limit ? limit : x;
    up = up > limit ? limit : -limit > up ? -limit : up;
    return x / (splat(1.0f) + exponential(splat(-gate.alpha) * x)) * (up + splat(1.0f));
  }
}

// Calls function(integral_constant<kind>) for the kind of a gate, which is `first` or a later one. To be called outside
// of loops over numbers: compilers keep in memory what such a function refers to.
template <int first, typename Function>
inline void with_gate(const Gate& gate, const Function& function) {
  if constexpr (first + 1 < kNumGateKinds)
    if (gate.kind != first) return with_gate<first + 1>(gate, function);
  function(std::integral_constant<GateKind, GateKind(first)>());
}

}  // namespace
