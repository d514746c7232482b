#if defined(__x86_64__)
#define RAYCORE_WIDTH 16
#define RAYCORE_VNNI
#define RAYCORE_BF16_PAIRS
#include "bandwidth.h"
#include "head_linear.h"
#include "integer_linear.h"
#include "latent_attention.h"
#include "linear.h"
#include "lora.h"
#include "pair_rate.h"
#include "panel_linear.h"
#include "recurrence.h"
#include "rowwise.h"
#include "sampling.h"
#include "table.h"
#include "tile_attention.h"
#include "tile_linear.h"
RAYCORE_TABLE(kAvx512Bf16Kernels, "avx512_bf16", (tile_attention<DotProducts, BFloat16>),
              (tile_attention<DotProducts, int8_t>), (uncached_tile_attention<DotProducts>),
              (panel_linear<BFloat16, BFloat16>))
RAYCORE_TABLE(kAmxKernels, "amx", (tile_attention<AmxProducts, BFloat16>), (tile_attention<AmxProducts, int8_t>),
              (uncached_tile_attention<AmxProducts>), tile_linear)
namespace raycore {
bool pairs_are_faster() {
  const __m512 x = _mm512_set1_ps(1.0f);
  const uint64_t pairs =
      fewest_cycles([&](__m512 sum) { return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)x); });
  const uint64_t singles = fewest_cycles([&](__m512 sum) { return _mm512_fmadd_ps(x, x, sum); });
  return pairs < 2 * singles;
}
}  // namespace raycore
#endif
