#if defined(__x86_64__)
#define RAYCORE_WIDTH 16
#define RAYCORE_VNNI
#include "attention.h"
#include "bandwidth.h"
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
RAYCORE_TABLE(kAvx512VnniKernels, "avx512_vnni", (attention<BFloat16, BFloat16>), (attention<BFloat16, int8_t>),
              (uncached_attention<BFloat16>), (panel_linear<BFloat16, BFloat16>))
#endif
