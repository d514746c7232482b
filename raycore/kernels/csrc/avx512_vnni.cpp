#if defined(__x86_64__)
#define RAYCORE_WIDTH 16
#define RAYCORE_VNNI
#include "integer_linear.h"

namespace raycore {
void add_vnni(Kernels& kernels) {
  kernels.name = "avx512_vnni";
  kernels.integer_linear[kFloat32] = integer_linear<float>;
  kernels.integer_linear[kBFloat16] = integer_linear<BFloat16>;
  kernels.integer_linear[kFloat16] = integer_linear<Float16>;
}
}  // namespace raycore
#endif
