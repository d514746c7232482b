#if defined(__x86_64__)
#define RAYCORE_WIDTH 16
#define RAYCORE_BF16_PAIRS
#include "head_linear.h"
#include "latent_attention.h"
#include "lora.h"
#include "pair_rate.h"
#include "panel_linear.h"
#include "rowwise.h"
#include "tile_attention.h"

RAYCORE_PART(kAvx512Bf16, {
  simpler = kernels;
  kernels.name = "avx512_bf16";
  kernels.rms_norm[kBFloat16] = rms_norm<BFloat16>;
  kernels.layer_norm[kBFloat16] = layer_norm<BFloat16>;
  kernels.add_layer_norm[kBFloat16] = add_layer_norm<BFloat16>;
  kernels.gate_and_mul[kBFloat16] = gate_and_mul<BFloat16>;
  kernels.attention[kBFloat16] = tile_attention<DotProducts, BFloat16>;
  kernels.int8_attention[kBFloat16] = tile_attention<DotProducts, int8_t>;
  kernels.uncached_attention[kBFloat16] = uncached_tile_attention<DotProducts>;
  kernels.latent_attention[kBFloat16] = latent_attention<BFloat16>;
  kernels.lora_shrink[kBFloat16] = lora_shrink<BFloat16>;
  kernels.lora_expand[kBFloat16] = lora_expand<BFloat16>;
  kernels.panel_linear[kBFloat16][kBFloat16] = panel_linear<BFloat16, BFloat16>;
  kernels.head_linear[kBFloat16][kBFloat16] = head_linear<BFloat16, BFloat16>;
})

namespace raycore {
static bool are_pairs_faster() {
  const __m512 x = _mm512_set1_ps(1.0f);
  const uint64_t pairs =
      fewest_cycles([&](__m512 sum) { return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)x); });
  const uint64_t singles = fewest_cycles([&](__m512 sum) { return _mm512_fmadd_ps(x, x, sum); });
  return pairs < 2 * singles;
}

__attribute__((constructor)) static void note_pairs() {
  pairs_are_faster = are_pairs_faster;
}
}  // namespace raycore
#endif
