// The kernels of one instruction set, as a table of functions. `ops.cpp` checks arguments and calls them.
//
// Shapes: T tokens, D hidden size, N query heads, K key-value heads, G = N / K, H elements of a head, S tokens of a
// cache block, F feed-forward size, V vocabulary, R rows, I and O inputs and outputs of a linear layer. Sums are in
// float32, whatever the storage. Layers that keep a state have shapes of their own, at `RecurrenceArgs`.

#pragma once

#include <cstdint>

namespace raycore {

enum DType : int32_t { kFloat32, kBFloat16, kFloat16, kNumDTypes };

// Whether this processor reads weights faster from beginning to end than several panels side by side: see
// panel_linear.h.
extern bool reads_in_order;

typedef void (*RangeFunction)(int64_t begin, int64_t end, void* context);

// Torch's threads.
struct Threads {
  int64_t count;
  // Calls function(begin, end, context) for ranges of `grain` or more that together cover 0 to `count`.
  void (*for_range)(int64_t count, int64_t grain, RangeFunction function, void* context);
};

struct NormArgs {
  const void* x;       // [T, D], rows `x_stride` apart
  const void* weight;  // [D]
  void* out;           // [T, D]
  int64_t num_rows, dim, x_stride;
  float eps, offset;  // the offset is added to the weight
};

struct LayerNormArgs {
  const void* x;       // [T, D], rows `x_stride` apart
  const void* weight;  // [D]
  const void* bias;    // [D], or null
  void* out;           // [T, D]
  int64_t num_rows, dim, x_stride;
  float eps;
};

// Adds a block's result to the residual stream, and normalizes the sum.
struct AddLayerNormArgs {
  float* residual;     // [T, D]; becomes the sum, or the normalized sum
  void* x;             // [T, D]: what is added; becomes the normalized sum
  const void* weight;  // [D], of the type of x
  const void* bias;    // [D], or null
  int64_t num_rows, dim;
  float eps;
  bool keeps_sum;
};

enum GateKind : int32_t { kNoGate, kSilu, kGelu, kGeluTanh, kSquaredRelu, kClampedSwiglu, kNumGateKinds };

// What a gated layer computes of its two halves, like `Gate` in raycore/models/spec.py.
struct Gate {
  GateKind kind;
  float alpha, limit;  // of a clamped one
};

struct GateArgs {
  const void* gate_up;  // [T, 2F]: gate, then up
  void* out;            // [T, F]
  int64_t num_rows, dim;
  Gate gate;
};

// A sequence's tokens in this step.
struct Sequence {
  int32_t slot;       // its row in `tables`
  int32_t first_row;  // of its tokens in qkv
  int32_t num_tokens;
  int32_t start;      // position of the first of these tokens
};

constexpr int64_t kCopiedBlock = 32;  // tokens of the step whose keys and values are copied side by side

// What is computed of attention. Workers that each have some of the keys exchange queries between the two parts.
enum AttentionPart : int32_t {
  kWhole,
  kStoring,    // normalizes and rotates queries and keys, and stores keys and values
  kAttending,  // the rest
};

constexpr int64_t kMaxHeadDim = 512;

struct AttentionArgs {
  AttentionPart part = kWhole;
  void* qkv;           // [T, (N + 2K) H]: queries, keys, values; queries and keys are normalized and rotated in place
                       // kAttending: [T, N H], the queries
  const void* norm;    // [N + K, H]: weights of the heads' norms; null if there are none
  // [positions, H], or [T, H] if they are those of rows: cosine and sine of each pair; null if nothing is rotated
  const float* turns;
  bool turns_are_of_rows = false;
  const int32_t* ends = nullptr;  // [T]: how many of its sequence's first tokens each row sees; null: up to its own
  // [blocks, 2, K, S · H]: keys, then values. A block of keys is stored by component, so that adjacent numbers belong
  // to adjacent tokens: [H / p, S, p]. A block of values is stored by token: [S / p, H, p]. p is 2 for bfloat16, whose
  // pairs are cheap to widen, and for integers of 8 bits, and 1 for other types. Integers are followed by the float32
  // scales of the S tokens, with which they have to be multiplied: [blocks, 2, K, S · H + 4 · S].
  void* cache;  // null: keys and values are only those of the step, in `qkv`
  const int32_t* tables;  // [slots, table_stride]: the blocks of each slot
  const Sequence* sequences;
  void* out;              // [T, N · H]; kAttending: see PartOfWeights
  int64_t num_sequences, table_stride;
  int64_t num_heads, num_kv_heads, head_dim, block_size;
  int64_t window;         // how many tokens a token sees, itself included; 0: all
  // Whether a token sees tokens after its own, too: those of the sequence in this step, as far away as those before it.
  bool is_two_sided = false;
  float eps, norm_offset, scale;  // the offset is added to the weights of norms
  float softcap;          // a scaled score s becomes softcap · tanh(s / softcap); 0: it doesn't
  const float* sinks;     // [N]: a logit of each query head that takes part in the softmax and has no value; or null
  // Of every `num_owners` blocks of a sequence's tokens, the cache has the one with the index `owner`, in one block of
  // the table. kWhole: 1 and 0.
  int64_t num_owners = 1, owner = 0;
};

// kAttending: what follows the H sums of weighted values of a query in `out`, which is [T, N, H + 2] in float32. Weights
// are powers of two.
struct PartOfWeights {
  float highest;  // the exponent that the others are relative to; minus infinity if the query sees none of the keys
  float total;    // the sum of the weights
};

// Puts the parts together that several workers have computed.
struct MergeArgs {
  const float* parts;  // [P, T, N, H + 2]; with latents, H is the size of a latent
  const float* sinks;  // as in AttentionArgs, whose sinks are null then: each counts once
  void* out;           // [T, N, H]
  int64_t num_parts, num_rows, num_heads, head_dim;
};

constexpr int64_t kLatentRows = 16;  // query heads, of one token or of several, that are computed together
constexpr int64_t kMaxLatentRank = 512, kMaxLatentWidth = 640;

// Results of some keys for kLatentRows rows.
struct LatentSums {
  alignas(64) float highest[kLatentRows];  // of the scores
  float total[kLatentRows];                // of the weights
  float values[kLatentRows * kMaxLatentRank];  // [rows, R], R rounded up to whole vectors
};

struct LatentArgs {
  AttentionPart part = kWhole;
  void* qkv;           // [T, (N + 1) W]: queries, then the key; prepared in place
                       // kAttending: [T, N W], the queries
  const void* norm;    // [R]: weights of the norm of the key's first R numbers
  const float* turns;  // [positions, W - R]: cosine and sine of each pair of the others, and of the queries' last ones
  void* cache;         // [blocks, S, W]: keys, whose first R numbers are the values
  const int32_t* tables;  // as in AttentionArgs
  const Sequence* sequences;
  void* out;              // [T, N · R]; kAttending: see PartOfWeights
  LatentSums* scratch;    // of `latent_scratch_sums`; null if that is 0
  int64_t num_sequences, table_stride;
  int64_t num_heads, rank, width, block_size;
  float eps, scale;
  int64_t num_owners = 1, owner = 0;  // as in AttentionArgs
};

// Results that threads need to share the keys of so few groups of rows: those of all keys, and those of some parts.
static inline int64_t latent_scratch_sums(int64_t num_groups, int64_t num_threads) {
  return 0 < num_groups && num_groups < num_threads ? num_groups + 2 * num_threads : 0;
}

struct LinearArgs {
  const void* x;       // [R, I], rows `x_stride` apart
  const void* weight;  // [O, I]
  void* out;           // [R, O]
  int64_t num_rows, num_inputs, num_outputs, x_stride;
};

constexpr int kPanelOutputs = 16;

static inline int64_t panels_of(int64_t num_outputs) {
  return (num_outputs + kPanelOutputs - 1) / kPanelOutputs;
}

struct PanelLinearArgs {
  const void* x;         // [R, I], rows `x_stride` apart
  // The weight in panels of 16 outputs: [O / 16, I / p, 16, p]. p is 2 for bfloat16, and 1 for other types. The last
  // panel's missing outputs have zeros.
  const void* packed;
  const void* bias;      // [O], or null
  const void* residual;  // [R, O], or null; may be `out`
  void* out;             // [R, O]; with a gate, [R, O / 2]
  int64_t num_rows, num_inputs, num_outputs, x_stride;
  Gate gate;             // if there is one, the weight has a panel of gates, then a panel of what they gate, and so on
  bool is_ungated = false;  // whether `gate` names an activation of each output instead; out is [R, O] then
};

// A linear layer for each of N heads of a row.
struct HeadLinearArgs {
  const void* x;       // [R, N, I], rows `x_stride` and heads `x_head_stride` apart
  const void* packed;  // [N, O, I]: each head's weight in panels, as in PanelLinearArgs
  void* out;           // [R, N, O], rows `out_stride` and heads `out_head_stride` apart
  int64_t num_rows, num_heads, num_inputs, num_outputs, x_stride, x_head_stride, out_stride, out_head_stride;
};

// A weight is (integer - zero) · scale, or integer · scale + offset, where the integers are unsigned. With `is_e2m1`,
// its 4 bits are a number in the floating-point format E2M1, whose integer is twice the number plus 12, and the zero is
// 12. `float8_linear` gets numbers of 8 bits in the format E4M3, which scales multiply: [O / 16, I, 16]. It uses neither
// zeros nor scratch memory, doesn't round rows, and takes groups of any multiple of 4 inputs.
struct IntegerLinearArgs {
  const void* x;  // [R, I], rows `x_stride` apart
  // The integers in panels of 16 outputs: [O / 16, I / 4, 16, 4] in 8 bits. In 4 bits, [O / 16, I / 8, 16, 4]: a byte
  // has one of four inputs in its lower half, and one of the next four in its upper half. The last panel's missing
  // outputs may have any numbers.
  const uint8_t* packed;
  const float* scales;   // [O / 16, G, 16], for G groups of `group_size` inputs. The last one may be shorter
  const uint8_t* zeros;  // the same; null: the middle of the integers. Always null with `is_e2m1`
  const float* offsets;  // the same; null: there are zeros instead. Always null with `is_e2m1` and with `zeros`
  const void* bias;      // as in PanelLinearArgs
  const void* residual;
  void* out;
  char* scratch;         // of `integer_scratch_bytes`
  int64_t num_rows, num_inputs, num_outputs, x_stride;
  int64_t group_size;    // all inputs, or a multiple of 16 that divides 256 or that 256 divides
  int64_t bits;          // of the weight's integers: 4 or 8
  int64_t row_bits;      // of the integers to which rows are rounded: 8 or 16
  int64_t row_group_size;  // inputs of a row that share a scale: all; with 8 bits, also a multiple of 16 that divides
                           // `group_size` and 256
  bool is_e2m1;
  Gate gate;
  bool is_ungated = false;  // always
};

constexpr int64_t kMaxBlockInputs = 256;  // the sum of as many products of 8 and 16 bits fits in 32 bits

// Inputs whose products are added up exactly. They share a scale of the weight and one of a row.
static inline int64_t integer_block_inputs(const IntegerLinearArgs& args) {
  const int64_t least = args.group_size < args.row_group_size ? args.group_size : args.row_group_size;
  return least < kMaxBlockInputs ? least : kMaxBlockInputs;
}

// The scratch memory of a row in integers: 2 bytes for each input, then two numbers for each block of inputs.
static inline int64_t integer_row_bytes(const IntegerLinearArgs& args) {
  const int64_t block = integer_block_inputs(args), num_blocks = (args.num_inputs + block - 1) / block;
  const int64_t size = (args.num_inputs + 15) / 16 * 32 + num_blocks * (args.row_bits == 8 ? 8 : 4);
  return (size + 63) / 64 * 64;
}

// The scales of the rows, then the rows.
static inline int64_t integer_scratch_bytes(const IntegerLinearArgs& args) {
  return (args.num_rows * int64_t(sizeof(float)) + 63) / 64 * 64 + args.num_rows * integer_row_bytes(args);
}

// What a LoRA adapter adds to a linear layer, whose parts it changes one by one.
struct LoraAdapter {
  const void* a;     // [num_rows, I] in panels: those of all parts, one below the other; null if it adds nothing
  int64_t num_rows;
  struct Part {
    const void* b;  // [num_outputs, rank] in panels; the rank is even
    int64_t first_row, rank, first_output, num_outputs;
  } parts[3];  // those that lack have no outputs
};

struct LoraArgs {
  const LoraAdapter* adapters;  // by slot
  const int64_t* rows;          // [R]: the rows of x and y that are for adapters
  const int64_t* slots;         // [R]: of each of these rows' adapter; equal ones are adjacent
  const void* x;                // [T, I], rows `x_stride` apart
  void* products;               // [R, width]: A x
  void* y;                      // [T, O], rows `y_stride` apart; gets B (A x) in addition
  int64_t num_rows, num_inputs, width, x_stride, y_stride;
};

// A sequence's tokens in a step of a layer that keeps a state.
struct StateSequence {
  int32_t first_row;  // of its tokens in x
  int32_t num_tokens;
  int32_t read_row;   // of the states; negative: it begins with zeros
  int32_t write_row;
};

// One more row that gets a sequence's state, after some of its tokens.
struct StateSave {
  int32_t sequence, num_tokens, row;
};

// N heads, which read the G heads of queries and keys in groups of N / G. Mamba-2 calls queries C and keys B.
struct RecurrenceArgs {
  // [T, X], rows `x_stride` apart. Of the gated delta rule: queries, keys and values; then b and a, N numbers each. Of
  // Mamba-2: values, keys and queries; then N times.
  const void* x;
  const void* taps;       // [C, W], the oldest first; C channels of queries, keys and values
  const void* conv_bias;  // [C]; null if there is none
  const float* decay;     // [N]: A_log
  const float* bias;      // [N]: dt_bias
  const float* skip;      // [N]: D; null for the gated delta rule
  void* conv_states;      // [rows, C, W - 1]
  float* states;          // [rows, N, K, H]
  const StateSequence* sequences;  // those with one token first
  const StateSave* saves;          // ordered by sequence, then by the number of tokens
  void* out;              // [T, N · H]
  float* scratch;         // `recurrence_scratch_numbers`
  int64_t num_tokens, num_sequences, num_saves, x_stride;
  int64_t num_k_heads, num_v_heads, k_dim, v_dim, conv_size;
  float largest_share;             // of the gated delta rule: of a value that is written
  float least_time, longest_time;  // of Mamba-2

  int64_t num_channels() const { return 2 * num_k_heads * k_dim + num_v_heads * v_dim; }
  int64_t channels_stride() const { return (num_channels() + 15) / 16 * 16; }
  int64_t num_factors() const { return 2 * num_v_heads + num_k_heads; }
};

constexpr int64_t kMaxKeyDim = 256;
constexpr int64_t kMinTaps = 2, kMaxTaps = 4;

// The scratch memory of a step: the convolution's results, and what multiplies states and what they get.
static inline int64_t recurrence_scratch_numbers(const RecurrenceArgs& args) {
  return args.num_tokens * (args.channels_stride() + args.num_factors());
}

// Masks of some rows of logits.
struct MaskArgs {
  float* logits;         // [R, V], rows `stride` apart; changed in place
  const int64_t* rows;   // [M]: the row that each mask is for
  const uint8_t* masks;  // [M, mask_bytes(V)]: a bit for each token that may come, the lowest of a byte first
  int64_t num_masks, dim, stride;
};

// A mask has whole words of 32 bits. Those beyond the vocabulary have no meaning.
static inline int64_t mask_bytes(int64_t dim) {
  return (dim + 31) / 32 * 4;
}

struct PickArgs {
  const void* logits;  // [R, V], rows `stride` apart
  int64_t* out;        // [R]
  int64_t num_rows, dim, stride;
};

// The columns of a draw's limits: the fields of DrawLimits in raycore/sampling/picking.py, in their order.
#define RAYCORE_DRAW_LIMITS(F)                                           \
  F(temperature)                                                         \
  F(min_p)   /* the least weight, relative to the most likely token's */ \
  F(top_k)   /* V if unlimited */                                        \
  F(top_p)   /* 1 if unlimited */                                        \
  F(uniform) /* random, in [0, 1) */

// What a row's draw is limited to.
struct DrawLimits {
#define RAYCORE_DECLARE(NAME) double NAME;
  RAYCORE_DRAW_LIMITS(RAYCORE_DECLARE)
#undef RAYCORE_DECLARE
};

constexpr int64_t kNumDrawLimits = sizeof(DrawLimits) / sizeof(double);

constexpr int64_t kDrawBlock = 128;  // tokens whose weights are added up, or whose maximum is taken, together

// The scratch memory of a worker that draws.
static inline int64_t draw_scratch_bytes(int64_t dim) {
  return (dim + kDrawBlock - 1) / kDrawBlock * 2 * (kDrawBlock * sizeof(float) + sizeof(double));
}

struct DrawArgs {
  const void* logits;        // [R, V], rows `stride` apart
  const DrawLimits* limits;  // [R]
  char* scratch;             // of each worker, `scratch_stride` bytes apart
  int64_t* out;              // [R]
  int64_t num_rows, dim, stride, scratch_stride;
};

constexpr int64_t kMaxLikely = 64;  // they are kept in order while a row is read

struct LogprobsArgs {
  const void* logits;        // [R, V], rows `stride` apart
  const int64_t* token_ids;  // [R]
  float* own;                // [R]: the log probability of the row's token
  int64_t* ranks;            // [R]: 1 plus the number of tokens that are strictly more likely
  float* likely;             // [R, k]: those of the most likely tokens
  int64_t* likely_ids;       // [R, k]
  int64_t num_rows, dim, stride, num_likely;  // k: at most V, and at most kMaxLikely
};

struct Kernels {
  const char* name;
  void (*read_floats)(const float* from, int64_t count, const Threads&);
  void (*rms_norm[kNumDTypes])(const NormArgs&, const Threads&);
  void (*layer_norm[kNumDTypes])(const LayerNormArgs&, const Threads&);
  void (*add_layer_norm[kNumDTypes])(const AddLayerNormArgs&, const Threads&);
  void (*gate_and_mul[kNumDTypes])(const GateArgs&, const Threads&);
  void (*attention[kNumDTypes])(const AttentionArgs&, const Threads&);
  void (*int8_attention[kNumDTypes])(const AttentionArgs&, const Threads&);  // to a cache of integers of 8 bits
  void (*uncached_attention[kNumDTypes])(const AttentionArgs&, const Threads&);  // to keys and values of the step
  void (*latent_attention[kNumDTypes])(const LatentArgs&, const Threads&);
  void (*merge_parts[kNumDTypes])(const MergeArgs&, const Threads&);
  void (*few_rows_linear[kNumDTypes])(const LinearArgs&, const Threads&);
  void (*mask_logits)(const MaskArgs&, const Threads&);
  void (*most_likely[kNumDTypes])(const PickArgs&, const Threads&);
  void (*draw[kNumDTypes])(const DrawArgs&, const Threads&);
  void (*logprobs[kNumDTypes])(const LogprobsArgs&, const Threads&);
  void (*gated_delta[kNumDTypes])(const RecurrenceArgs&, const Threads&);
  void (*mamba2[kNumDTypes])(const RecurrenceArgs&, const Threads&);
  void (*lora_shrink[kNumDTypes])(const LoraArgs&, const Threads&);
  void (*lora_expand[kNumDTypes])(const LoraArgs&, const Threads&);
  void (*integer_linear[kNumDTypes])(const IntegerLinearArgs&, const Threads&);
  void (*float8_linear[kNumDTypes])(const IntegerLinearArgs&, const Threads&);
  // for the types of the rows and of the weight; null for a weight of another type, unless the rows are float32
  void (*panel_linear[kNumDTypes][kNumDTypes])(const PanelLinearArgs&, const Threads&);
  void (*head_linear[kNumDTypes][kNumDTypes])(const HeadLinearArgs&, const Threads&);
};

#if defined(__x86_64__)
// What the source files with instruction sets compile. A part adds kernels to a table, or replaces those of the parts
// before it that its own instructions make faster. A library may lack parts: see build_backend/raycore_build.py.
enum Part {
  kAvx2,
  kAvx2Panels,
  kAvx2Integers,
  kAvxVnni,
  kAvx512,
  kAvx512Panels,
  kAvx512Integers,
  kAvx512Vnni,
  kAvx512Bf16,
  kAmx,
  kNumParts,
};
extern void (*parts[kNumParts])(Kernels&);  // null: not compiled
// Whether products of pairs of bfloat16 numbers, for which this processor must have instructions, are faster than in
// float32. Timed in some microseconds. Null without kAvx512Bf16.
extern bool (*pairs_are_faster)();

// Notes a part of the library when it is loaded. The block of code after the name is what it does to `kernels`.
#define RAYCORE_PART(PART, ...)                       \
  namespace raycore {                                 \
  static void add_part(Kernels& kernels) __VA_ARGS__  \
  __attribute__((constructor)) static void note() {   \
    parts[PART] = add_part;                           \
  }                                                   \
  }
#elif defined(__aarch64__)
extern const Kernels kNeonKernels;
#endif

}  // namespace raycore
