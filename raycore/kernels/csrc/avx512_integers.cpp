#if defined(__x86_64__)
#define RAYCORE_WIDTH 16
#include "integer_linear.h"
#include "table.h"
RAYCORE_PART(kAvx512Integers, { RAYCORE_ADD_INTEGERS(kernels) })
#endif
