// The numbers of two vectors at some indices, as in `__builtin_shufflevector`, which GCC has from version 12 on.

#pragma once

#include <cstdint>

namespace {

template <int bytes>
struct Indices {
  typedef int32_t Type __attribute__((vector_size(bytes)));
};

}  // namespace

#if defined(__clang__) || __GNUC__ >= 12
#define RAYCORE_SHUFFLE(A, B, ...) __builtin_shufflevector(A, B, __VA_ARGS__)
#else
#define RAYCORE_SHUFFLE(A, B, ...) __builtin_shuffle(A, B, typename ::Indices<sizeof(A)>::Type{__VA_ARGS__})
#endif
