#if defined(__x86_64__)
#define RAYCORE_WIDTH 16
#define RAYCORE_BF16_PAIRS
#include "tile_attention.h"
#include "tile_linear.h"

RAYCORE_PART(kAmx, {
  simpler = kernels;
  kernels.name = "amx";
  kernels.attention[kBFloat16] = tile_attention<AmxProducts, BFloat16>;
  kernels.int8_attention[kBFloat16] = tile_attention<AmxProducts, int8_t>;
  kernels.uncached_attention[kBFloat16] = uncached_tile_attention<AmxProducts>;
  kernels.panel_linear[kBFloat16][kBFloat16] = tile_linear;
})
#endif
