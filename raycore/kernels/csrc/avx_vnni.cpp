#if defined(__x86_64__)
#define RAYCORE_WIDTH 8
#define RAYCORE_VNNI
#include "integer_linear.h"
#include "table.h"
RAYCORE_PART(kAvxVnni, {
  kernels.name = "avx_vnni";
  RAYCORE_ADD_INTEGERS(kernels)
})
#endif
