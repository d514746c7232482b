#if defined(__x86_64__)
#define RAYCORE_WIDTH 8
#include "integer_linear.h"
#include "table.h"
RAYCORE_PART(kAvx2Integers, { RAYCORE_ADD_INTEGERS(kernels) })
#endif
