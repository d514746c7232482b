#if defined(__x86_64__)
#define RAYCORE_WIDTH 8
#include "float8_linear.h"
#include "head_linear.h"
#include "lora.h"
#include "panel_linear.h"
#include "table.h"
RAYCORE_PART(kAvx2Panels, { RAYCORE_ADD_PANELS(kernels) })
#endif
