// Rotary position embedding of one head, with its norm.

#pragma once

#include "rowwise.h"
#include "vectors.h"

namespace {

// Rotates interleaved pairs: (x, y) becomes (x cos - y sin, y cos + x sin). `turns` has the cosine and sine of each
// pair.
inline Floats rotated(Floats x, Floats turns) {
#if RAYCORE_WIDTH == 16
  const Floats other = RAYCORE_SHUFFLE(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
  const Floats cosine = RAYCORE_SHUFFLE(turns, turns, 0, 0, 2, 2, 4, 4, 6, 6, 8, 8, 10, 10, 12, 12, 14, 14);
  const Floats sine = RAYCORE_SHUFFLE(turns, turns, 1, 1, 3, 3, 5, 5, 7, 7, 9, 9, 11, 11, 13, 13, 15, 15);
#elif RAYCORE_WIDTH == 8
  const Floats other = RAYCORE_SHUFFLE(x, x, 1, 0, 3, 2, 5, 4, 7, 6);
  const Floats cosine = RAYCORE_SHUFFLE(turns, turns, 0, 0, 2, 2, 4, 4, 6, 6);
  const Floats sine = RAYCORE_SHUFFLE(turns, turns, 1, 1, 3, 3, 5, 5, 7, 7);
#else
  const Floats other = RAYCORE_SHUFFLE(x, x, 1, 0, 3, 2);
  const Floats cosine = RAYCORE_SHUFFLE(turns, turns, 0, 0, 2, 2);
  const Floats sine = RAYCORE_SHUFFLE(turns, turns, 1, 1, 3, 3);
#endif
  Words signs = {};
  for (int i = 0; i < kWidth; i += 2) signs[i] = 0x80000000u;
  return multiply_add(x, cosine, other * bits_of<Floats>(bits_of<Words>(sine) ^ signs));
}

// Normalizes and rotates one head in place. `norm` may be null.
template <typename T>
inline void turn_head(T* head, const T* norm, float norm_offset, const float* turns, int64_t dim, float eps) {
  const auto turn = [&](const auto& normalized) {
    for (int64_t i = 0; i < dim; i += kWidth) {
      const int64_t left = dim - i;
      const Floats x = normalized(load_up_to(head + i, left), i);
      store_up_to(head + i, rotated(x, load_up_to(turns + i, left)), left);
    }
  };
  if (!norm) return turn([](Floats x, int64_t) { return x; });
  const Floats factor = splat(inverse_norm(head, dim, eps)), offset = splat(norm_offset);
  if (norm_offset) turn([&](Floats x, int64_t i) { return x * factor * (load_up_to(norm + i, dim - i) + offset); });
  else turn([&](Floats x, int64_t i) { return x * factor * load_up_to(norm + i, dim - i); });
}

}  // namespace
