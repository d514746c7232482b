#if defined(__x86_64__)
#define RAYCORE_WIDTH 16
#define RAYCORE_VNNI
#include "integer_linear.h"
#include "table.h"
RAYCORE_PART(kAvx512Vnni, {
  kernels.name = "avx512_vnni";
  RAYCORE_ADD_INTEGERS(kernels)
})
#endif
