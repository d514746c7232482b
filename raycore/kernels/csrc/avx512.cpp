#if defined(__x86_64__)
#define RAYCORE_WIDTH 16
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
RAYCORE_TABLE(kAvx512Kernels, "avx512")
#endif
