// The tables of kernels, for the instruction set that this translation unit is compiled for.

// All kernels but those of panels and integers.
#define RAYCORE_TABLE(TEXT)                                                                       \
  Kernels{TEXT,                                                                                   \
          read_floats,                                                                            \
          {rms_norm<float>, rms_norm<BFloat16>, rms_norm<Float16>},                               \
          {layer_norm<float>, layer_norm<BFloat16>, layer_norm<Float16>},                         \
          {add_layer_norm<float>, add_layer_norm<BFloat16>, add_layer_norm<Float16>},             \
          {gate_and_mul<float>, gate_and_mul<BFloat16>, gate_and_mul<Float16>},                   \
          {attention<float, float>, attention<BFloat16, BFloat16>, attention<Float16, Float16>},  \
          {attention<float, int8_t>, attention<BFloat16, int8_t>, attention<Float16, int8_t>},    \
          {uncached_attention<float>, uncached_attention<BFloat16>, uncached_attention<Float16>}, \
          {latent_attention<float>, latent_attention<BFloat16>, latent_attention<Float16>},       \
          {merge_parts<float>, merge_parts<BFloat16>, merge_parts<Float16>},                      \
          {few_rows_linear<float>, few_rows_linear<BFloat16>, few_rows_linear<Float16>},          \
          mask_logits,                                                                            \
          {most_likely<float>, most_likely<BFloat16>, most_likely<Float16>},                      \
          {draw<float>, draw<BFloat16>, draw<Float16>},                                           \
          {logprobs<float>, logprobs<BFloat16>, logprobs<Float16>},                               \
          {gated_delta<float>, gated_delta<BFloat16>, gated_delta<Float16>},                      \
          {mamba2<float>, mamba2<BFloat16>, mamba2<Float16>}}

// panel_linear.h, head_linear.h, float8_linear.h and lora.h
#define RAYCORE_ADD_PANELS(KERNELS)                                              \
  KERNELS.panel_linear[kFloat32][kFloat32] = panel_linear<float, float>;         \
  KERNELS.panel_linear[kFloat32][kBFloat16] = panel_linear<float, BFloat16>;     \
  KERNELS.panel_linear[kFloat32][kFloat16] = panel_linear<float, Float16>;       \
  KERNELS.panel_linear[kBFloat16][kBFloat16] = panel_linear<BFloat16, BFloat16>; \
  KERNELS.panel_linear[kFloat16][kFloat16] = panel_linear<Float16, Float16>;     \
  KERNELS.head_linear[kFloat32][kFloat32] = head_linear<float, float>;           \
  KERNELS.head_linear[kFloat32][kBFloat16] = head_linear<float, BFloat16>;       \
  KERNELS.head_linear[kFloat32][kFloat16] = head_linear<float, Float16>;         \
  KERNELS.head_linear[kBFloat16][kBFloat16] = head_linear<BFloat16, BFloat16>;   \
  KERNELS.head_linear[kFloat16][kFloat16] = head_linear<Float16, Float16>;       \
  KERNELS.float8_linear[kFloat32] = float8_linear<float>;                        \
  KERNELS.float8_linear[kBFloat16] = float8_linear<BFloat16>;                    \
  KERNELS.float8_linear[kFloat16] = float8_linear<Float16>;                      \
  KERNELS.lora_shrink[kFloat32] = lora_shrink<float>;                            \
  KERNELS.lora_shrink[kBFloat16] = lora_shrink<BFloat16>;                        \
  KERNELS.lora_shrink[kFloat16] = lora_shrink<Float16>;                          \
  KERNELS.lora_expand[kFloat32] = lora_expand<float>;                            \
  KERNELS.lora_expand[kBFloat16] = lora_expand<BFloat16>;                        \
  KERNELS.lora_expand[kFloat16] = lora_expand<Float16>;

// integer_linear.h
#define RAYCORE_ADD_INTEGERS(KERNELS)                           \
  KERNELS.integer_linear[kFloat32] = integer_linear<float>;     \
  KERNELS.integer_linear[kBFloat16] = integer_linear<BFloat16>; \
  KERNELS.integer_linear[kFloat16] = integer_linear<Float16>;
