#if defined(__x86_64__)
#define RAYCORE_WIDTH 8
#include "attention.h"
#include "bandwidth.h"
#include "latent_attention.h"
#include "linear.h"
#include "recurrence.h"
#include "rowwise.h"
#include "sampling.h"
#include "table.h"
RAYCORE_PART(kAvx2, { kernels = RAYCORE_TABLE("avx2"); })
#endif
