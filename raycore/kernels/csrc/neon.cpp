#if defined(__aarch64__)
#define RAYCORE_WIDTH 4
#include "attention.h"
#include "bandwidth.h"
#include "float8_linear.h"
#include "head_linear.h"
#include "integer_linear.h"
#include "latent_attention.h"
#include "linear.h"
#include "lora.h"
#include "panel_linear.h"
#include "recurrence.h"
#include "rowwise.h"
#include "sampling.h"
#include "table.h"
namespace raycore {
const Kernels kNeonKernels = [] {
  Kernels kernels = RAYCORE_TABLE("neon");
  RAYCORE_ADD_PANELS(kernels)
  RAYCORE_ADD_INTEGERS(kernels)
  return kernels;
}();
}  // namespace raycore
#endif
