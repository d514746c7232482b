// Registers the kernels with torch, under `torch.ops.raycore`.

#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <tuple>
#include <type_traits>

#include "kernels.h"
#include "processor.h"
#include "recording.h"
#include "shuffle.h"
#include "threads.h"
#include "torch_abi.h"

namespace raycore {

TorchFunctions torch_functions;
bool reads_in_order = false;
#if defined(__x86_64__)
void (*parts[kNumParts])(Kernels&) = {};
bool (*pairs_are_faster)() = nullptr;
#endif

namespace {

constexpr char kExpect[] = "raycore's kernels expect %s";
constexpr uint64_t kAbiVersion = (2ull << 56) | (10ull << 48);  // of the interface that torch_abi.h declares
Kernels kernels;
int32_t dtype_codes[kNumDTypes];

// The tensors that the running call owns. They are deleted when it ends, also by an error.
class OwnedTensors {
 public:
  void add(TensorHandle handle) { handles_[count_++] = handle; }
  void release(TensorHandle handle) {
    for (int i = 0; i < count_; i++)
      if (handles_[i] == handle) handles_[i] = handles_[--count_];
  }
  void delete_all() {
    while (count_) torch_functions.aoti_torch_delete_tensor_object(handles_[--count_]);
  }

 private:
  TensorHandle handles_[16];  // no operation has more
  int count_ = 0;
};

thread_local OwnedTensors owned_tensors;
thread_local ReplayedValues replayed;

// Has torch throw an error, which the caller in Python gets as a RuntimeError. This library only lets it pass: it is
// compiled without C++ exceptions, so that it doesn't matter whose C++ library the compiler has.
[[noreturn]] void fail(const char* format, const char* what) {
  char message[256];
  std::snprintf(message, sizeof(message), format, what);
  owned_tensors.delete_all();
  replayed.delete_all_but(-1);
  torch_functions.aoti_torch_check(false, "raycore", __FILE__, __LINE__, message);
  __builtin_unreachable();
}

#define RAYCORE_TORCH(NAME, ...)                                      \
  do {                                                                \
    if (torch_functions.NAME(__VA_ARGS__)) fail("%s failed", #NAME); \
  } while (false)

// A tensor that the running call owns.
class Tensor {
 public:
  explicit Tensor(TensorHandle handle) : handle_(handle) { owned_tensors.add(handle); }
  explicit Tensor(StackValue value) : Tensor(reinterpret_cast<TensorHandle>(value)) {}
  template <typename T = void>
  T* data() const {
    void* pointer;
    RAYCORE_TORCH(aoti_torch_get_data_ptr, handle_, &pointer);
    return static_cast<T*>(pointer);
  }
  int64_t size(int64_t dim) const {
    int64_t* sizes;
    RAYCORE_TORCH(aoti_torch_get_sizes, handle_, &sizes);
    return sizes[dim];
  }
  int64_t stride(int64_t dim) const {
    int64_t* strides;
    RAYCORE_TORCH(aoti_torch_get_strides, handle_, &strides);
    return strides[dim];
  }
  int32_t torch_dtype() const {
    int32_t dtype;
    RAYCORE_TORCH(aoti_torch_get_dtype, handle_, &dtype);
    return dtype;
  }
  DType dtype() const {
    const int32_t code = torch_dtype();
    for (int i = 0; i < kNumDTypes; i++)
      if (dtype_codes[i] == code) return DType(i);
    fail(kExpect, "float32, bfloat16 or float16");
  }
  int64_t dim() const {
    int64_t dim;
    RAYCORE_TORCH(aoti_torch_get_dim, handle_, &dim);
    return dim;
  }
  int64_t numel() const {
    int64_t count = 1;
    for (int64_t i = dim() - 1; i >= 0; i--) count *= size(i);
    return count;
  }
  bool is_contiguous() const {
    int64_t expected = 1;
    bool is_dense = true;
    for (int64_t i = dim() - 1; i >= 0; expected *= size(i), i--) is_dense &= size(i) <= 1 || stride(i) == expected;
    return is_dense || expected == 0;  // empty ones have any strides
  }
  StackValue release() {
    owned_tensors.release(handle_);
    return reinterpret_cast<StackValue>(handle_);
  }

 private:
  TensorHandle handle_;
};

// The results of an operation that has several.
template <int count>
struct Tensors {
  Tensor each[count];
};

void expect(bool condition, const char* what) {
  if (!condition) fail(kExpect, what);
}

Tensor empty(int64_t size, int32_t dtype) {
  const int64_t stride = 1;
  TensorHandle handle;
  RAYCORE_TORCH(aoti_torch_empty_strided, 1, &size, &stride, dtype, 0, -1, &handle);
  return Tensor(reinterpret_cast<StackValue>(handle));
}

Tensor empty(int64_t rows, int64_t columns, int32_t dtype) {
  const int64_t sizes[] = {rows, columns}, strides[] = {columns, 1};
  TensorHandle handle;
  RAYCORE_TORCH(aoti_torch_empty_strided, 2, sizes, strides, dtype, 0, -1, &handle);
  return Tensor(reinterpret_cast<StackValue>(handle));
}

void for_range(int64_t count, int64_t grain, RangeFunction function, void* context) {
  if (count <= grain) {
    if (count) function(0, count, context);
    return;
  }
  RAYCORE_TORCH(torch_parallel_for, 0, count, grain, function, context);
}

Threads threads() {
  uint32_t count;
  RAYCORE_TORCH(torch_get_num_threads, &count);
  return {count, for_range};
}

// What this thread records. Null: nothing.
thread_local Recording* recording;
// Bit i: whether argument i of the call that is recorded is a tensor.
thread_local uint64_t recorded_tensors;
thread_local const StackValue* recorded_stack;

// Takes an argument of an operation from torch's stack, by the type of its parameter.
template <typename Parameter>
Parameter take(const StackValue*& next) {
  return Parameter(*next++);
}

template <>
Tensor take(const StackValue*& next) {
  if (recording) recorded_tensors |= uint64_t(1) << (next - recorded_stack);
  return Tensor(*next++);
}

template <>
float take(const StackValue*& next) {
  double number;
  std::memcpy(&number, next++, sizeof(number));
  return static_cast<float>(number);
}

template <>
Gate take(const StackValue*& next) {
  const int64_t kind = take<int64_t>(next);
  expect(kind > kNoGate && kind < kNumGateKinds, "a gate that they know");
  return {GateKind(kind), take<float>(next), take<float>(next)};
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, float eps, float offset) {
  const DType dtype = x.dtype();
  expect(x.dim() == 2 && x.size(1) && x.stride(1) == 1, "x [T, D] with contiguous rows");
  expect(weight.dim() == 1 && weight.size(0) == x.size(1) && weight.is_contiguous(), "a contiguous weight [D]");
  expect(weight.dtype() == dtype, "a weight of the dtype of x");
  Tensor out = empty(x.size(0), x.size(1), x.torch_dtype());
  kernels.rms_norm[dtype](
      {x.data(), weight.data(), out.data(), x.size(0), x.size(1), x.stride(0), eps, offset}, threads());
  return out;
}

// What is expected of the weight and the bias of a norm of `x`.
void expect_norm(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  const auto is_like_weight = [&](const Tensor& each) {
    return each.dim() == 1 && each.size(0) == x.size(1) && each.is_contiguous() && each.dtype() == x.dtype();
  };
  expect(is_like_weight(weight), "a contiguous weight [D] of the dtype of x");
  expect(!bias.size(0) || is_like_weight(bias), "a contiguous bias [D] of the dtype of x, or an empty one");
}

Tensor layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, float eps) {
  const DType dtype = x.dtype();
  expect(x.dim() == 2 && x.size(1) && x.stride(1) == 1, "x [T, D] with contiguous rows");
  expect_norm(x, weight, bias);
  Tensor out = empty(x.size(0), x.size(1), x.torch_dtype());
  kernels.layer_norm[dtype]({x.data(), weight.data(), bias.size(0) ? bias.data() : nullptr, out.data(), x.size(0),
                             x.size(1), x.stride(0), eps},
                            threads());
  return out;
}

void add_layer_norm(const Tensor& residual, const Tensor& x, const Tensor& weight, const Tensor& bias, float eps,
                    bool keeps_sum) {
  const DType dtype = x.dtype();
  expect(x.dim() == 2 && x.size(1) && x.is_contiguous(), "a contiguous x [T, D]");
  expect(residual.dim() == 2 && residual.size(0) == x.size(0) && residual.size(1) == x.size(1) &&
             residual.is_contiguous() && residual.dtype() == kFloat32,
         "a contiguous residual [T, D] in float32");
  expect_norm(x, weight, bias);
  kernels.add_layer_norm[dtype]({residual.data<float>(), x.data(), weight.data(),
                                 bias.size(0) ? bias.data() : nullptr, x.size(0), x.size(1), eps, keeps_sum},
                                threads());
}

Tensor gate_and_mul(const Tensor& gate_up, const Gate& gate) {
  expect(gate_up.dim() == 2 && gate_up.size(1) && gate_up.size(1) % 2 == 0 && gate_up.is_contiguous(),
         "a contiguous gate_up [T, 2F]");
  const int64_t dim = gate_up.size(1) / 2;
  Tensor out = empty(gate_up.size(0), dim, gate_up.torch_dtype());
  kernels.gate_and_mul[gate_up.dtype()]({gate_up.data(), out.data(), gate_up.size(0), dim, gate}, threads());
  return out;
}

// Reads numbers as fast as all threads can.
void read_floats(const Tensor& x) {
  expect(x.dtype() == kFloat32 && x.dim() == 1 && x.is_contiguous(), "contiguous x [N] in float32");
  kernels.read_floats(x.data<float>(), x.size(0), threads());
}

void mask_logits(const Tensor& logits, const Tensor& rows, const Tensor& masks) {
  expect(logits.dim() == 2 && logits.size(1) && logits.stride(1) == 1 && logits.dtype() == kFloat32,
         "logits [R, V] in float32 with contiguous rows");
  const int64_t num_masks = rows.size(0), num_rows = logits.size(0), dim = logits.size(1);
  expect(rows.dim() == 1 && rows.is_contiguous() && rows.torch_dtype() == torch_functions.aoti_torch_dtype_int64(),
         "contiguous rows [M] in int64");
  expect(masks.dim() == 2 && masks.size(0) == num_masks && masks.size(1) == mask_bytes(dim) && masks.is_contiguous() &&
             masks.torch_dtype() == torch_functions.aoti_torch_dtype_uint8(),
         "contiguous masks [M, B] in uint8, with a bit for each token in whole words of 32 bits");
  for (int64_t i = 0; i < num_masks; i++)
    expect(uint64_t(rows.data<int64_t>()[i]) < uint64_t(num_rows), "rows of the logits");
  kernels.mask_logits(
      {logits.data<float>(), rows.data<int64_t>(), masks.data<uint8_t>(), num_masks, dim, logits.stride(0)}, threads());
}

Tensor most_likely(const Tensor& logits) {
  expect(logits.dim() == 2 && logits.size(1) && logits.stride(1) == 1, "logits [R, V] with contiguous rows");
  Tensor out = empty(logits.size(0), torch_functions.aoti_torch_dtype_int64());
  kernels.most_likely[logits.dtype()](
      {logits.data(), out.data<int64_t>(), logits.size(0), logits.size(1), logits.stride(0)}, threads());
  return out;
}

Tensor draw(const Tensor& logits, const Tensor& limits) {
  expect(logits.dim() == 2 && logits.size(1) && logits.stride(1) == 1, "logits [R, V] with contiguous rows");
  const int64_t num_rows = logits.size(0), dim = logits.size(1);
#define RAYCORE_COLUMN(NAME) " " #NAME
  expect(limits.dim() == 2 && limits.size(0) == num_rows && limits.size(1) == kNumDrawLimits &&
             limits.is_contiguous() && limits.torch_dtype() == torch_functions.aoti_torch_dtype_float64(),
         "contiguous limits [R, L] in float64, with the columns" RAYCORE_DRAW_LIMITS(RAYCORE_COLUMN));
#undef RAYCORE_COLUMN
  const Threads all = threads();
  const int64_t stride = draw_scratch_bytes(dim), num_workers = num_rows < all.count ? num_rows : all.count;
  Tensor scratch = empty(num_workers * stride, torch_functions.aoti_torch_dtype_uint8());
  Tensor out = empty(num_rows, torch_functions.aoti_torch_dtype_int64());
  kernels.draw[logits.dtype()]({logits.data(), limits.data<DrawLimits>(), scratch.data<char>(), out.data<int64_t>(),
                                num_rows, dim, logits.stride(0), stride},
                               all);
  return out;
}

Tensors<4> logprobs(const Tensor& logits, const Tensor& token_ids, int64_t num_likely) {
  expect(logits.dim() == 2 && logits.size(1) && logits.stride(1) == 1, "logits [R, V] with contiguous rows");
  const int64_t num_rows = logits.size(0), dim = logits.size(1);
  const int32_t int64 = torch_functions.aoti_torch_dtype_int64();
  expect(token_ids.dim() == 1 && token_ids.size(0) == num_rows && token_ids.is_contiguous() &&
             token_ids.torch_dtype() == int64,
         "contiguous token ids [R] in int64");
  for (int64_t row = 0; row < num_rows; row++)
    expect(uint64_t(token_ids.data<int64_t>()[row]) < uint64_t(dim), "token ids of the vocabulary");
  expect(num_likely >= 0 && num_likely <= dim && num_likely <= kMaxLikely, "at most 64 of the most likely tokens");
  Tensor own = empty(num_rows, dtype_codes[kFloat32]), ranks = empty(num_rows, int64);
  Tensor likely = empty(num_rows, num_likely, dtype_codes[kFloat32]), ids = empty(num_rows, num_likely, int64);
  kernels.logprobs[logits.dtype()](
      {logits.data(), token_ids.data<int64_t>(), own.data<float>(), ranks.data<int64_t>(), likely.data<float>(),
       ids.data<int64_t>(), num_rows, dim, logits.stride(0), num_likely},
      threads());
  return {{own, ranks, likely, ids}};
}

void expect_head_dim(const AttentionArgs& args) {
  expect(args.head_dim > 0 && args.head_dim % 2 == 0 && args.head_dim <= kMaxHeadDim,
         "an even head size of at most 512");
}

// Expects the tokens of a step's sequences to be rows of `x`.
void expect_sequences(const Tensor& sequences, const Tensor& x) {
  expect(sequences.dim() == 2 && sequences.size(1) == sizeof(Sequence) / sizeof(int32_t) && sequences.is_contiguous() &&
             sequences.torch_dtype() == torch_functions.aoti_torch_dtype_int32(),
         "contiguous sequences [n, 4] in int32");
  const int64_t num_rows = x.size(0), num_sequences = sequences.size(0);
  const Sequence* all = sequences.data<Sequence>();
  for (int64_t i = 0; i < num_sequences; i++)
    expect(all[i].first_row >= 0 && all[i].num_tokens >= 0 && all[i].start >= 0 &&
               int64_t(all[i].first_row) + all[i].num_tokens <= num_rows,
           "sequences of rows of the step");
}

int64_t length_of(const Sequence& sequence) {
  return int64_t(sequence.start) + sequence.num_tokens;
}

// Expects the block tables to name a block of the cache for each token that a step's sequences have. `block_numbers`:
// how many numbers a block has.
template <typename Args>
void expect_blocks(const Args& args, const Tensor& tables, const Tensor& cache, int64_t block_numbers) {
  expect(tables.dim() == 2 && tables.torch_dtype() == torch_functions.aoti_torch_dtype_int32() && tables.stride(1) == 1,
         "block tables [slots, blocks] in int32");
  const int64_t num_slots = tables.size(0), num_columns = tables.size(1), num_blocks = cache.numel() / block_numbers;
  for (int64_t i = 0; i < args.num_sequences; i++) {
    const Sequence& sequence = args.sequences[i];
    expect(uint64_t(sequence.slot) < uint64_t(num_slots), "slots of the block tables");
    const int64_t all = (length_of(sequence) + args.block_size - 1) / args.block_size;
    const int64_t own = (all + args.num_owners - 1 - args.owner) / args.num_owners;
    expect(own <= num_columns, "block tables as long as the sequences");
    const int32_t* table = args.tables + sequence.slot * args.table_stride;
    int32_t lowest = 0, highest = -1;  // without a branch for each block, so that compilers use vectors
    for (int64_t block = 0; block < own; block++) {
      lowest = table[block] < lowest ? table[block] : lowest;
      highest = table[block] > highest ? table[block] : highest;
    }
    expect(lowest == 0 && highest < num_blocks, "blocks of the cache");
  }
}

// Expects cosines and sines for `width` numbers of each of a step's positions, or of each row of `of_rows`.
template <typename Args>
void expect_turns(const Args& args, const Tensor& turns, int64_t width, const Tensor* of_rows = nullptr) {
  expect(turns.dim() == 2 && turns.size(1) == width && turns.torch_dtype() == dtype_codes[kFloat32] &&
             turns.is_contiguous(),
         "contiguous cosines and sines [P, numbers that are turned] in float32");
  const int64_t count = turns.size(0);
  if (of_rows) return expect(count == of_rows->size(0), "cosines and sines [T, H] of the rows");
  for (int64_t i = 0; i < args.num_sequences; i++)
    expect(length_of(args.sequences[i]) <= count, "cosines and sines of all positions");
}

// What all operations of attention have. Of every `num_owners` blocks of tokens, the cache has one.
AttentionArgs attention_args(AttentionPart part, const Tensor& x, const Tensor& cache, const Tensor& tables,
                             const Tensor& sequences, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                             int64_t block_size, int64_t num_owners, int64_t owner) {
  AttentionArgs args{};
  args.part = part;
  args.qkv = x.data();
  args.cache = cache.data();
  args.tables = tables.data<int32_t>();
  args.table_stride = tables.stride(0);
  args.sequences = sequences.data<Sequence>();
  args.num_sequences = sequences.size(0);
  args.num_heads = num_heads;
  args.num_kv_heads = num_kv_heads;
  args.head_dim = head_dim;
  args.block_size = block_size;
  args.num_owners = num_owners;
  args.owner = owner;
  expect(num_heads > 0 && num_kv_heads > 0 && num_heads % num_kv_heads == 0, "whole groups of query heads");
  const int64_t heads_per_row = part == kAttending ? num_heads : num_heads + 2 * num_kv_heads;
  expect(x.dim() == 2 && x.size(1) == heads_per_row * head_dim && x.is_contiguous(),
         part == kAttending ? "a contiguous q [T, N H]" : "a contiguous qkv [T, (N + 2K) H]");
  expect_head_dim(args);
  expect(block_size > 0 && block_size % 2 == 0 && block_size <= 256, "an even block size of at most 256");
  expect_sequences(sequences, x);
  const bool has_scales = cache.torch_dtype() == torch_functions.aoti_torch_dtype_int8();
  expect((has_scales || cache.dtype() == x.dtype()) && cache.is_contiguous(),
         "a contiguous cache of int8 or of the dtype of the queries");
  const int64_t width = block_size * (head_dim + (has_scales ? 4 : 0));
  expect(cache.dim() > 0 && cache.size(cache.dim() - 1) == width, "a cache [..., S H], or [..., S H + 4 S] of int8");
  expect(num_owners > 0 && uint64_t(owner) < uint64_t(num_owners), "an owner below the number of owners");
  expect_blocks(args, tables, cache, 2 * num_kv_heads * width);
  return args;
}

// Sets how queries and keys are normalized and rotated.
void set_turns(AttentionArgs& args, const Tensor& qkv, const Tensor& norm, float eps, float norm_offset,
               const Tensor& turns, bool turns_are_of_rows = false) {
  args.norm = norm.size(0) ? norm.data() : nullptr;
  args.eps = eps;
  args.norm_offset = norm_offset;
  args.turns = turns.data<float>();
  args.turns_are_of_rows = turns_are_of_rows;
  expect_turns(args, turns, args.head_dim, turns_are_of_rows ? &qkv : nullptr);
  expect(!args.norm || (norm.dim() == 2 && norm.size(0) == args.num_heads + args.num_kv_heads &&
                        norm.size(1) == args.head_dim && norm.is_contiguous() && norm.dtype() == qkv.dtype()),
         "a contiguous norm [N + K, H] of the dtype of qkv, or none");
}

// Sets how many of its sequence's first tokens each row sees.
void set_ends(AttentionArgs& args, const Tensor& qkv, const Tensor& ends) {
  if (!ends.size(0)) return;
  expect(ends.dim() == 1 && ends.size(0) == qkv.size(0) && ends.is_contiguous() &&
             ends.torch_dtype() == torch_functions.aoti_torch_dtype_int32(),
         "contiguous ends [T] in int32");
  args.ends = ends.data<int32_t>();
  for (int64_t i = 0; i < args.num_sequences; i++) {
    const Sequence& sequence = args.sequences[i];
    for (int64_t token = 0; token < sequence.num_tokens; token++) {
      const int64_t end = args.ends[sequence.first_row + token];
      expect(end > 0 && end <= length_of(sequence), "ends within the sequences");
    }
  }
}

void expect_sinks(const Tensor& sinks, int64_t num_heads) {
  expect(!sinks.size(0) || (sinks.size(0) == num_heads && sinks.dtype() == kFloat32 && sinks.is_contiguous()),
         "contiguous sinks [N] in float32");
}

void run_attention(const AttentionArgs& args, const Tensor& x, const Tensor& cache) {
  const bool has_scales = cache.torch_dtype() == torch_functions.aoti_torch_dtype_int8();
  (has_scales ? kernels.int8_attention : kernels.attention)[x.dtype()](args, threads());
}

Tensor attention(const Tensor& qkv, const Tensor& norm, float eps, float norm_offset, const Tensor& turns,
                 const Tensor& cache, const Tensor& tables, const Tensor& sequences, int64_t num_heads,
                 int64_t num_kv_heads, int64_t block_size, int64_t window, float scale, float softcap,
                 const Tensor& sinks, bool turns_are_of_rows, const Tensor& ends) {
  AttentionArgs args = attention_args(kWhole, qkv, cache, tables, sequences, num_heads, num_kv_heads, turns.size(1),
                                      block_size, 1, 0);
  set_turns(args, qkv, norm, eps, norm_offset, turns, turns_are_of_rows);
  set_ends(args, qkv, ends);
  args.window = window;
  args.scale = scale;
  args.softcap = softcap;
  args.sinks = sinks.size(0) ? sinks.data<float>() : nullptr;
  expect_sinks(sinks, num_heads);
  Tensor out = empty(qkv.size(0), num_heads * args.head_dim, qkv.torch_dtype());
  args.out = out.data();
  run_attention(args, qkv, cache);
  return out;
}

// Attention of whole sequences' tokens to those before and after them.
Tensor two_sided_attention(const Tensor& qkv, const Tensor& turns, const Tensor& sequences, int64_t num_heads,
                           int64_t window, float scale) {
  expect(num_heads > 0 && qkv.dim() == 2 && qkv.size(1) % (3 * num_heads) == 0 && qkv.is_contiguous(),
         "a contiguous qkv [T, 3N H]");
  AttentionArgs args{};
  args.qkv = qkv.data();
  args.sequences = sequences.data<Sequence>();
  args.num_sequences = sequences.size(0);
  args.num_heads = args.num_kv_heads = num_heads;
  args.head_dim = qkv.size(1) / (3 * num_heads);
  args.block_size = kCopiedBlock;
  args.is_two_sided = true;
  args.window = window;
  args.scale = scale;
  expect_head_dim(args);
  expect_sequences(sequences, qkv);
  for (int64_t i = 0; i < args.num_sequences; i++)
    expect(args.sequences[i].start == 0, "sequences from their first token on");
  if (turns.size(0)) {
    expect_turns(args, turns, args.head_dim);
    args.turns = turns.data<float>();
  }
  Tensor out = empty(qkv.size(0), num_heads * args.head_dim, qkv.torch_dtype());
  args.out = out.data();
  kernels.uncached_attention[qkv.dtype()](args, threads());
  return out;
}

// Normalizes and rotates queries and keys, and stores those keys and values that the cache has.
void store_owned_keys(const Tensor& qkv, const Tensor& norm, float eps, float norm_offset, const Tensor& turns,
                      const Tensor& cache, const Tensor& tables, const Tensor& sequences, int64_t num_heads,
                      int64_t num_kv_heads, int64_t block_size, int64_t num_owners, int64_t owner) {
  AttentionArgs args = attention_args(kStoring, qkv, cache, tables, sequences, num_heads, num_kv_heads, turns.size(1),
                                      block_size, num_owners, owner);
  set_turns(args, qkv, norm, eps, norm_offset, turns);
  run_attention(args, qkv, cache);
}

// Attention to those keys that the cache has: a part of the results, [T, N (H + 2)], for `merge_parts`.
Tensor attend_to_owned_keys(const Tensor& q, const Tensor& cache, const Tensor& tables, const Tensor& sequences,
                            int64_t num_heads, int64_t num_kv_heads, int64_t block_size, int64_t window, float scale,
                            float softcap, int64_t num_owners, int64_t owner) {
  expect(num_heads > 0, "query heads");
  AttentionArgs args = attention_args(kAttending, q, cache, tables, sequences, num_heads, num_kv_heads,
                                      q.size(1) / num_heads, block_size, num_owners, owner);
  args.window = window;
  args.scale = scale;
  args.softcap = softcap;
  Tensor out = empty(q.size(0), num_heads * (args.head_dim + 2), dtype_codes[kFloat32]);
  args.out = out.data();
  run_attention(args, q, cache);
  return out;
}

// Attention to all keys, [T, N H], of the parts that several workers have computed. `like`: has the dtype of the result.
Tensor merge_parts(const Tensor& parts, const Tensor& sinks, const Tensor& like) {
  expect(parts.dim() == 4 && parts.is_contiguous() && parts.torch_dtype() == dtype_codes[kFloat32],
         "contiguous parts [P, T, N, H + 2] in float32");
  const int64_t num_rows = parts.size(1), num_heads = parts.size(2), head_dim = parts.size(3) - 2;
  expect(parts.size(0) > 0 && head_dim > 0 && head_dim <= kMaxLatentRank, "parts of heads of at most 512 numbers");
  expect_sinks(sinks, num_heads);
  Tensor out = empty(num_rows, num_heads * head_dim, like.torch_dtype());
  const float* own_sinks = sinks.size(0) ? sinks.data<float>() : nullptr;
  kernels.merge_parts[like.dtype()](
      {parts.data<float>(), own_sinks, out.data(), parts.size(0), num_rows, num_heads, head_dim}, threads());
  return out;
}

// What all operations of latent attention have. Of every `num_owners` blocks of tokens, the cache has one.
LatentArgs latent_args(AttentionPart part, const Tensor& x, const Tensor& cache, const Tensor& tables,
                       const Tensor& sequences, int64_t num_heads, int64_t rank, int64_t width, int64_t block_size,
                       int64_t num_owners, int64_t owner) {
  LatentArgs args{};
  args.part = part;
  args.qkv = x.data();
  args.cache = cache.data();
  args.tables = tables.data<int32_t>();
  args.sequences = sequences.data<Sequence>();
  args.num_sequences = sequences.size(0);
  args.table_stride = tables.stride(0);
  args.num_heads = num_heads;
  args.rank = rank;
  args.width = width;
  args.block_size = block_size;
  args.num_owners = num_owners;
  args.owner = owner;
  expect(num_heads > 0 && rank > 0 && block_size > 0, "query heads, latents, and blocks of tokens");
  const int64_t heads_per_row = part == kAttending ? num_heads : num_heads + 1;
  expect(x.dim() == 2 && x.size(1) == heads_per_row * width && x.is_contiguous(),
         part == kAttending ? "a contiguous q [T, N W]" : "a contiguous qkv [T, (N + 1) W]");
  expect(rank % 2 == 0 && rank <= kMaxLatentRank && width % 2 == 0 && rank <= width && width <= kMaxLatentWidth,
         "latents of an even size of at most 512, and keys of an even size of at most 640");
  expect_sequences(sequences, x);
  expect(cache.dtype() == x.dtype() && cache.is_contiguous() && cache.dim() > 0 &&
             cache.size(cache.dim() - 1) == block_size * width,
         "a contiguous cache [..., S W] of the dtype of the queries");
  expect(num_owners > 0 && uint64_t(owner) < uint64_t(num_owners), "an owner below the number of owners");
  expect_blocks(args, tables, cache, block_size * width);
  return args;
}

// Sets how latents are normalized, and how queries and keys are rotated.
void set_turns(LatentArgs& args, const Tensor& qkv, const Tensor& norm, float eps, const Tensor& turns) {
  expect(norm.dim() == 1 && norm.dtype() == qkv.dtype() && norm.is_contiguous(),
         "a contiguous norm [R] of the dtype of qkv");
  expect_turns(args, turns, args.width - args.rank);
  args.norm = norm.data();
  args.eps = eps;
  args.turns = turns.data<float>();
}

// Attends, and returns the result, which has `num_results` numbers of a token.
Tensor attend_to_latents(LatentArgs& args, const Tensor& x, int64_t num_results, int32_t result_dtype) {
  const Threads all = threads();
  int64_t num_groups = 0;
  for (int64_t i = 0; i < args.num_sequences; i++)
    num_groups += (args.sequences[i].num_tokens * args.num_heads + kLatentRows - 1) / kLatentRows;
  const int64_t num_sums = latent_scratch_sums(num_groups, all.count);
  Tensor out = empty(x.size(0), num_results, result_dtype);
  Tensor scratch = empty(num_sums * int64_t(sizeof(LatentSums)), torch_functions.aoti_torch_dtype_uint8());
  args.out = out.data();
  args.scratch = num_sums ? scratch.data<LatentSums>() : nullptr;
  kernels.latent_attention[x.dtype()](args, all);
  return out;
}

Tensor latent_attention(const Tensor& qkv, const Tensor& norm, float eps, const Tensor& turns, const Tensor& cache,
                        const Tensor& tables, const Tensor& sequences, int64_t num_heads, int64_t block_size,
                        float scale) {
  const int64_t rank = norm.size(0);
  LatentArgs args = latent_args(kWhole, qkv, cache, tables, sequences, num_heads, rank, rank + turns.size(1),
                                block_size, 1, 0);
  set_turns(args, qkv, norm, eps, turns);
  args.scale = scale;
  return attend_to_latents(args, qkv, num_heads * rank, qkv.torch_dtype());
}

// Rotates queries and keys, normalizes latents, and stores those latents and keys that the cache has.
void store_owned_latents(const Tensor& qkv, const Tensor& norm, float eps, const Tensor& turns, const Tensor& cache,
                         const Tensor& tables, const Tensor& sequences, int64_t num_heads, int64_t block_size,
                         int64_t num_owners, int64_t owner) {
  const int64_t rank = norm.size(0);
  LatentArgs args = latent_args(kStoring, qkv, cache, tables, sequences, num_heads, rank, rank + turns.size(1),
                                block_size, num_owners, owner);
  set_turns(args, qkv, norm, eps, turns);
  kernels.latent_attention[qkv.dtype()](args, threads());
}

// Attention to those latents that the cache has: a part of the results, [T, N (R + 2)], for `merge_parts`.
Tensor attend_to_owned_latents(const Tensor& q, const Tensor& cache, const Tensor& tables, const Tensor& sequences,
                               int64_t num_heads, int64_t rank, int64_t block_size, float scale, int64_t num_owners,
                               int64_t owner) {
  expect(num_heads > 0, "query heads");
  LatentArgs args = latent_args(kAttending, q, cache, tables, sequences, num_heads, rank, q.size(1) / num_heads,
                                block_size, num_owners, owner);
  args.scale = scale;
  return attend_to_latents(args, q, num_heads * (rank + 2), dtype_codes[kFloat32]);
}

Tensor few_rows_linear(const Tensor& x, const Tensor& weight) {
  expect(x.dim() == 2 && x.stride(1) == 1 && x.size(1) % 2 == 0, "x [R, I] with contiguous rows and an even I");
  expect(weight.dim() == 2 && weight.size(1) == x.size(1) && weight.is_contiguous(), "a contiguous weight [O, I]");
  expect(weight.dtype() == x.dtype(), "a weight of the dtype of x");
  LinearArgs args = {x.data(), weight.data(), nullptr, x.size(0), x.size(1), weight.size(0), x.stride(0)};
  Tensor out = empty(args.num_rows, args.num_outputs, x.torch_dtype());
  args.out = out.data();
  kernels.few_rows_linear[x.dtype()](args, threads());
  return out;
}

using Quad = uint32_t __attribute__((vector_size(16)));

// Copies four words of each of four outputs, from `offset` on, to the places of four outputs in a panel.
inline void pack_quads(const char* const* from, int64_t offset, uint32_t* to) {
  Quad rows[4];
  for (int o = 0; o < 4; o++) std::memcpy(&rows[o], from[o] + offset, sizeof(Quad));
  const Quad low01 = RAYCORE_SHUFFLE(rows[0], rows[1], 0, 4, 1, 5), low23 = RAYCORE_SHUFFLE(rows[2], rows[3], 0, 4, 1, 5);
  const Quad high01 = RAYCORE_SHUFFLE(rows[0], rows[1], 2, 6, 3, 7);
  const Quad high23 = RAYCORE_SHUFFLE(rows[2], rows[3], 2, 6, 3, 7);
  const Quad words[4] = {RAYCORE_SHUFFLE(low01, low23, 0, 1, 4, 5), RAYCORE_SHUFFLE(low01, low23, 2, 3, 6, 7),
                         RAYCORE_SHUFFLE(high01, high23, 0, 1, 4, 5), RAYCORE_SHUFFLE(high01, high23, 2, 3, 6, 7)};
  for (int i = 0; i < 4; i++) std::memcpy(to + i * kPanelOutputs, &words[i], sizeof(Quad));
}

// Copies the weights of a panel's outputs, [I] each, into a panel: [I / p, 16, p], in words of p numbers. Those of an
// output that is null are zero. The words may begin at any byte.
template <typename Word>
void pack_panel(const char* const (&from)[kPanelOutputs], bool is_whole, int64_t num_words, char* panel) {
  // a line of each output at a time: those of all outputs may have the same place in a cache
  constexpr int64_t kLine = 64 / sizeof(Word);
  Word* to = reinterpret_cast<Word*>(panel);
  for (int64_t begin = 0; begin < num_words; begin += kLine) {
    const int64_t end = begin + kLine < num_words ? begin + kLine : num_words;
    if constexpr (sizeof(Word) == 4) {
      if (is_whole && end - begin == kLine) {
        for (int64_t o = 0; o < kPanelOutputs; o += 4)
          for (int64_t i = begin; i < end; i += 4) pack_quads(from + o, i * 4, to + i * kPanelOutputs + o);
        continue;
      }
    }
    for (int64_t o = 0; o < kPanelOutputs; o++)
      for (int64_t i = begin; i < end; i++) {
        Word word = 0;
        if (from[o]) std::memcpy(&word, from[o] + i * sizeof(Word), sizeof(Word));
        to[i * kPanelOutputs + o] = word;
      }
  }
}

// Packs the outputs of a weight [O, I]: `output(row)` is the one that `packed`, [rows, I], has in a row, or less than 0
// for none. Panels that have none are left as they are, unless `fills`.
template <typename Output>
void pack_outputs(const Tensor& weight, const Tensor& packed, bool fills, const Output& output) {
  const bool are_bytes = weight.torch_dtype() == torch_functions.aoti_torch_dtype_uint8();
  const DType dtype = are_bytes ? kNumDTypes : weight.dtype();
  const int64_t num_inputs = weight.size(1), bytes = are_bytes ? 1 : dtype == kFloat32 ? 4 : 2;
  const int64_t word = are_bytes ? 1 : dtype == kFloat16 ? 2 : 4;
  expect(weight.size(0) == 0 || num_inputs == 1 || weight.stride(1) == 1, "a weight [O, I] with contiguous rows");
  expect(dtype != kBFloat16 || num_inputs % 2 == 0, "an even I for weights in bfloat16");
  const char* weights = weight.data<char>();
  char* out = packed.data<char>();
  for_rows(packed.size(0) / kPanelOutputs, 1, threads(), [&](int64_t panel) {
    const char* from[kPanelOutputs];
    bool is_needed = fills, is_whole = true;
    for (int64_t o = 0; o < kPanelOutputs; o++) {
      const int64_t row = output(panel * kPanelOutputs + o);
      from[o] = row < 0 ? nullptr : weights + row * weight.stride(0) * bytes;
      is_needed |= row >= 0;
      is_whole &= row >= 0;
    }
    if (!is_needed) return;
    const int64_t num_words = num_inputs * bytes / word;
    char* to = out + panel * kPanelOutputs * num_inputs * bytes;
    (word == 1 ? pack_panel<uint8_t> : word == 2 ? pack_panel<uint16_t> : pack_panel<uint32_t>)(from, is_whole,
                                                                                                 num_words, to);
  });
}

// The weight of a linear layer, packed in panels: [O, I], with O rounded up to a multiple of 16.
Tensor pack_linear(const Tensor& weight) {
  expect(weight.dim() == 2 && weight.is_contiguous(), "a contiguous weight [O, I]");
  const int64_t num_outputs = weight.size(0);
  Tensor out = empty(panels_of(num_outputs) * kPanelOutputs, weight.size(1), weight.torch_dtype());
  pack_outputs(weight, out, true, [&](int64_t row) { return row < num_outputs ? row : -1; });
  return out;
}

// Packs some outputs of a weight [O, I] into panels of a packed one: rows[row] is the output that `packed` has in a row,
// or -1. A panel that has one gets zeros in its rows without one; others are left as they are.
void pack_rows(const Tensor& packed, const Tensor& weight, const Tensor& rows) {
  expect(packed.dim() == 2 && packed.is_contiguous() && packed.size(0) % kPanelOutputs == 0, "a packed weight");
  expect(weight.dim() == 2 && weight.size(1) == packed.size(1) && weight.torch_dtype() == packed.torch_dtype(),
         "a weight of the packed one's dtype and inputs");
  expect(rows.torch_dtype() == torch_functions.aoti_torch_dtype_int64() && rows.dim() == 1 && rows.is_contiguous() &&
             rows.size(0) == packed.size(0),
         "rows in int64, one for each row of the packed weight");
  const int64_t* outputs = rows.data<int64_t>();
  for (int64_t row = 0; row < packed.size(0); row++)
    expect(outputs[row] >= -1 && outputs[row] < weight.size(0), "rows that the weight has");
  pack_outputs(weight, packed, false, [&](int64_t row) { return outputs[row]; });
}

void expect_inputs(const Tensor& packed, int64_t num_inputs) {
  expect(num_inputs > 0, "a packed weight with inputs");
  expect(packed.dtype() != kBFloat16 || num_inputs % 2 == 0, "an even I for weights in bfloat16");
}

// `out`, [R, O], is `num_outputs` wide.
void multiply_panels(const Tensor& x, const Tensor& packed, const Tensor& bias, const Tensor& out, int64_t num_outputs,
                     const void* residual = nullptr, const Gate& gate = {}, bool is_ungated = false) {
  expect(packed.dim() == 2 && packed.is_contiguous(), "a packed weight");
  const int64_t num_inputs = packed.size(1), missing = packed.size(0) - num_outputs;
  expect_inputs(packed, num_inputs);
  expect(missing >= 0 && missing < kPanelOutputs && num_outputs > 0, "as many outputs as the packed weight has");
  expect(x.dim() == 2 && x.size(1) == num_inputs && x.stride(1) == 1, "x [R, I] with contiguous rows");
  const auto kernel = kernels.panel_linear[x.dtype()][packed.dtype()];
  expect(kernel, "a weight of the dtype of x");
  const bool has_bias = bias.size(0);
  expect(!has_bias || (bias.size(0) == num_outputs && bias.is_contiguous() && bias.dtype() == x.dtype()),
         "a contiguous bias [O] of the dtype of x");
  kernel({x.data(), packed.data(), has_bias ? bias.data() : nullptr, residual, out.data(), x.size(0), num_inputs,
          num_outputs, x.stride(0), gate, is_ungated},
         threads());
}

Tensor panel_linear(const Tensor& x, const Tensor& packed, const Tensor& bias, int64_t num_outputs) {
  Tensor out = empty(x.size(0), num_outputs, x.torch_dtype());
  multiply_panels(x, packed, bias, out, num_outputs);
  return out;
}

Tensor gated_panel_linear(const Tensor& x, const Tensor& packed, const Tensor& bias, const Gate& gate) {
  expect(packed.size(0) % (2 * kPanelOutputs) == 0, "a panel of gates for each panel of other outputs");
  Tensor out = empty(x.size(0), packed.size(0) / 2, x.torch_dtype());
  multiply_panels(x, packed, bias, out, packed.size(0), nullptr, gate);
  return out;
}

// With an activation of each output.
Tensor activated_panel_linear(const Tensor& x, const Tensor& packed, const Tensor& bias, int64_t num_outputs,
                              const Gate& activation) {
  Tensor out = empty(x.size(0), num_outputs, x.torch_dtype());
  multiply_panels(x, packed, bias, out, num_outputs, nullptr, activation, true);
  return out;
}

void expect_residual(const Tensor& residual, const Tensor& x) {
  expect(residual.dim() == 2 && residual.size(0) == x.size(0) && residual.is_contiguous() &&
             residual.dtype() == x.dtype(),
         "a contiguous residual [R, O] of the dtype of x");
}

void add_panel_linear(const Tensor& residual, const Tensor& x, const Tensor& packed, const Tensor& bias) {
  expect_residual(residual, x);
  multiply_panels(x, packed, bias, residual, residual.size(1), residual.data());
}

void head_linear(const Tensor& x, const Tensor& packed, const Tensor& out) {
  expect(x.dim() == 3 && x.stride(2) == 1, "x [R, N, I] with contiguous heads");
  expect(out.dim() == 3 && out.stride(2) == 1 && out.size(0) == x.size(0) && out.size(1) == x.size(1) &&
             out.dtype() == x.dtype(),
         "out [R, N, O] with contiguous heads, of the dtype of x");
  const int64_t num_outputs = out.size(2);
  expect(packed.dim() == 3 && packed.is_contiguous() && packed.size(0) == x.size(1) && packed.size(2) == x.size(2) &&
             packed.size(1) == panels_of(num_outputs) * kPanelOutputs,
         "packed weights [N, O, I]");
  expect_inputs(packed, packed.size(2));
  const auto kernel = kernels.head_linear[x.dtype()][packed.dtype()];
  expect(kernel, "weights of the dtype of x");
  kernel({x.data(), packed.data(), out.data(), x.size(0), x.size(1), x.size(2), num_outputs, x.stride(0), x.stride(1),
          out.stride(0), out.stride(1)},
         threads());
}

// What the operations with integer weights have in common.
struct IntegerLinear {
  Tensor x, packed, scales, zeros, bias;  // `zeros` in float32 are offsets
  int64_t bits, row_bits, row_group_size, group_size;
  bool is_e2m1;

  // `out`, [R, O], is `num_outputs` wide.
  void compute(const Tensor& out, int64_t num_outputs, const void* residual = nullptr, const Gate& gate = {}) const {
    if (packed.torch_dtype() == torch_functions.aoti_torch_dtype_uint8())
      return compute_float8(out, num_outputs, residual, gate);
    expect(bits == 4 || bits == 8, "weights in 4 or 8 bits");
    expect(!is_e2m1 || (bits == 4 && !zeros.size(0)), "numbers of 4 bits without zeros");
    expect(row_bits == 8 || row_bits == 16, "rows in 8 or 16 bits");
    expect(packed.dim() == 2 && packed.is_contiguous() && packed.size(0) % kPanelOutputs == 0 &&
               packed.torch_dtype() == torch_functions.aoti_torch_dtype_int32(),
           "a packed weight in int32");
    const int64_t num_inputs = packed.size(1) * 32 / bits;
    expect(num_inputs > 0, "a packed weight with inputs");
    expect(x.dim() == 2 && x.size(1) == num_inputs && x.stride(1) == 1, "x [R, I] with contiguous rows");
    expect(group_size == num_inputs ||
               (group_size > 0 && group_size % 16 == 0 &&
                (kMaxBlockInputs % group_size == 0 || group_size % kMaxBlockInputs == 0)),
           "groups of all inputs, or of a multiple of 16 that divides 256 or that 256 divides");
    expect(!row_group_size || (row_bits == 8 && row_group_size > 0 && row_group_size % 16 == 0 &&
                               kMaxBlockInputs % row_group_size == 0 &&
                               (group_size == num_inputs || group_size % row_group_size == 0)),
           "groups of rows in 8 bits: of a multiple of 16 that divides 256 and the groups of the weight; or 0");
    const int64_t num_groups = (num_inputs + group_size - 1) / group_size;
    const auto has_shape = [&](const Tensor& tensor) { return is_of_groups(tensor, num_groups); };
    expect(has_shape(scales) && scales.dtype() == kFloat32, "contiguous scales [O / 16, G, 16] in float32");
    const bool has_offsets = zeros.size(0) && zeros.torch_dtype() == torch_functions.aoti_torch_dtype_float32();
    const bool has_zeros = zeros.size(0) && !has_offsets;
    expect(!has_zeros || zeros.torch_dtype() == torch_functions.aoti_torch_dtype_uint8(),
           "zeros in uint8, or offsets in float32");
    expect(!zeros.size(0) || has_shape(zeros), "contiguous zeros or offsets [O / 16, G, 16]");
    expect_outputs(num_outputs);
    IntegerLinearArgs args = {
        x.data(), packed.data<uint8_t>(), scales.data<float>(), has_zeros ? zeros.data<uint8_t>() : nullptr,
        has_offsets ? zeros.data<float>() : nullptr, bias_data(), residual, out.data(), nullptr,
        x.size(0), num_inputs, num_outputs, x.stride(0), group_size, bits, row_bits,
        row_group_size ? row_group_size : num_inputs, is_e2m1, gate};
    Tensor scratch = empty(integer_scratch_bytes(args), torch_functions.aoti_torch_dtype_uint8());
    args.scratch = scratch.data<char>();
    kernels.integer_linear[x.dtype()](args, threads());
  }

 private:
  // Of numbers in 8 bits in floating point.
  void compute_float8(const Tensor& out, int64_t num_outputs, const void* residual, const Gate& gate) const {
    expect(packed.dim() == 2 && packed.is_contiguous() && packed.size(0) % kPanelOutputs == 0, "a packed weight");
    const int64_t num_inputs = packed.size(1);
    expect(num_inputs > 0 && num_inputs % 4 == 0, "a packed weight with a multiple of 4 inputs");
    expect(x.dim() == 2 && x.size(1) == num_inputs && x.stride(1) == 1, "x [R, I] with contiguous rows");
    expect(group_size > 0 && group_size % 4 == 0, "groups of a multiple of 4 inputs");
    expect(is_of_groups(scales, (num_inputs + group_size - 1) / group_size) && scales.dtype() == kFloat32,
           "contiguous scales [O / 16, G, 16] in float32");
    expect(!zeros.size(0), "numbers in floating point without zeros");
    expect_outputs(num_outputs);
    IntegerLinearArgs args = {};
    args.x = x.data();
    args.packed = packed.data<uint8_t>();
    args.scales = scales.data<float>();
    args.bias = bias_data();
    args.residual = residual;
    args.out = out.data();
    args.num_rows = x.size(0);
    args.num_inputs = num_inputs;
    args.num_outputs = num_outputs;
    args.x_stride = x.stride(0);
    args.group_size = group_size;
    args.gate = gate;
    kernels.float8_linear[x.dtype()](args, threads());
  }

  bool is_of_groups(const Tensor& tensor, int64_t num_groups) const {
    return tensor.dim() == 3 && tensor.size(0) * kPanelOutputs == packed.size(0) && tensor.size(1) == num_groups &&
           tensor.size(2) == kPanelOutputs && tensor.is_contiguous();
  }

  void expect_outputs(int64_t num_outputs) const {
    const int64_t missing = packed.size(0) - num_outputs;
    expect(missing >= 0 && missing < kPanelOutputs && num_outputs > 0, "as many outputs as the packed weight has");
    expect(!bias.size(0) || (bias.size(0) == num_outputs && bias.is_contiguous() && bias.dtype() == x.dtype()),
           "a contiguous bias [O] of the dtype of x");
  }

  const void* bias_data() const { return bias.size(0) ? bias.data() : nullptr; }
};

template <>
IntegerLinear take(const StackValue*& next) {
  return {take<Tensor>(next),  take<Tensor>(next),  take<Tensor>(next),  take<Tensor>(next),
          take<Tensor>(next),  take<int64_t>(next), take<int64_t>(next), take<int64_t>(next),
          take<int64_t>(next), take<bool>(next)};
}

Tensor integer_linear(const IntegerLinear& linear, int64_t num_outputs) {
  Tensor out = empty(linear.x.size(0), num_outputs, linear.x.torch_dtype());
  linear.compute(out, num_outputs);
  return out;
}

Tensor gated_integer_linear(const IntegerLinear& linear, const Gate& gate) {
  const int64_t num_outputs = linear.packed.size(0);
  expect(num_outputs % (2 * kPanelOutputs) == 0, "a panel of gates for each panel of other outputs");
  Tensor out = empty(linear.x.size(0), num_outputs / 2, linear.x.torch_dtype());
  linear.compute(out, num_outputs, nullptr, gate);
  return out;
}

void add_integer_linear(const IntegerLinear& linear, const Tensor& residual) {
  expect_residual(residual, linear.x);
  linear.compute(residual, residual.size(1), residual.data());
}

// What the operations of adapters have in common. `numbers`: x or y, some of whose rows are for adapters.
LoraArgs lora_args(const Tensor& numbers, const Tensor& rows, const Tensor& slots, const Tensor& adapters) {
  const int32_t int64 = torch_functions.aoti_torch_dtype_int64();
  expect(adapters.dim() == 2 && adapters.size(1) == sizeof(LoraAdapter) / sizeof(int64_t) &&
             adapters.is_contiguous() && adapters.torch_dtype() == int64,
         "contiguous adapters [slots, 17] in int64");
  const auto is_index = [&](const Tensor& tensor) {
    return tensor.dim() == 1 && tensor.is_contiguous() && tensor.torch_dtype() == int64;
  };
  expect(is_index(rows) && is_index(slots) && slots.size(0) == rows.size(0), "contiguous rows and slots [R] in int64");
  expect(numbers.dim() == 2 && numbers.stride(1) == 1, "x or y [T, numbers] with contiguous rows");
  for (int64_t row = 0; row < rows.size(0); row++) {
    expect(uint64_t(rows.data<int64_t>()[row]) < uint64_t(numbers.size(0)), "rows of x or y");
    expect(uint64_t(slots.data<int64_t>()[row]) < uint64_t(adapters.size(0)), "slots of adapters");
  }
  LoraArgs args = {};
  args.adapters = adapters.data<LoraAdapter>();
  args.rows = rows.data<int64_t>();
  args.slots = slots.data<int64_t>();
  args.num_rows = rows.size(0);
  return args;
}

// Expects `is_met` of each row's adapter, unless the adapter adds nothing.
template <typename Condition>
void expect_adapters(const LoraArgs& args, const Condition& is_met, const char* what) {
  for (int64_t row = 0; row < args.num_rows; row++) {
    if (row && args.slots[row] == args.slots[row - 1]) continue;
    const LoraAdapter& adapter = args.adapters[args.slots[row]];
    expect(!adapter.a || is_met(adapter), what);
  }
}

// A x for some rows of x, [R, width]. What is beyond the number of rows of A isn't set.
Tensor lora_shrink(const Tensor& x, const Tensor& rows, const Tensor& slots, const Tensor& adapters, int64_t width) {
  LoraArgs args = lora_args(x, rows, slots, adapters);
  expect(x.size(1) % 2 == 0, "x [T, I] with an even I");
  args.width = width;
  expect_adapters(
      args, [&](const LoraAdapter& adapter) { return adapter.num_rows >= 0 && adapter.num_rows <= width; },
      "a width of as many rows as adapters have");
  Tensor out = empty(args.num_rows, args.width, x.torch_dtype());
  args.x = x.data();
  args.products = out.data();
  args.num_inputs = x.size(1);
  args.x_stride = x.stride(0);
  kernels.lora_shrink[x.dtype()](args, threads());
  return out;
}

// Adds B (A x) to some rows of y.
void lora_expand(const Tensor& y, const Tensor& products, const Tensor& rows, const Tensor& slots,
                 const Tensor& adapters) {
  LoraArgs args = lora_args(y, rows, slots, adapters);
  expect(products.dim() == 2 && products.is_contiguous() && products.dtype() == y.dtype() &&
             products.size(0) == args.num_rows,
         "contiguous products [R, width] of the dtype of y");
  args.products = products.data();
  args.y = y.data();
  args.width = products.size(1);
  args.y_stride = y.stride(0);
  const int64_t num_outputs = y.size(1);
  const auto fits = [&](const LoraAdapter& adapter) {
    for (const LoraAdapter::Part& part : adapter.parts)
      if (part.first_row < 0 || part.rank < 0 || part.rank % 2 || part.first_row + part.rank > args.width ||
          part.first_output < 0 || part.num_outputs < 0 || part.first_output + part.num_outputs > num_outputs)
        return false;
    return true;
  };
  expect_adapters(args, fits, "adapters whose parts are within the products and y");
  kernels.lora_expand[y.dtype()](args, threads());
}

// What the operations of layers that keep a state have in common.
struct Recurrence {
  Tensor x, taps, conv_bias, decay, bias, skip, conv_states, states, sequences, saves;
  int64_t num_k_heads;

  // Has `num_inputs` numbers of each head behind the channels.
  RecurrenceArgs args(int64_t num_inputs) const {
    expect(x.dim() == 2 && x.stride(1) == 1, "x [T, X] with contiguous rows");
    expect(states.dim() == 4 && states.is_contiguous() && states.dtype() == kFloat32,
           "contiguous states [rows, N, K, H] in float32");
    expect(conv_states.dim() == 3 && conv_states.is_contiguous() && conv_states.dtype() == x.dtype() &&
               conv_states.size(0) == states.size(0),
           "contiguous states of the convolution [rows, C, W - 1] of the dtype of x");
    RecurrenceArgs args = {};
    args.num_tokens = x.size(0);
    args.x_stride = x.stride(0);
    args.num_k_heads = num_k_heads;
    args.num_v_heads = states.size(1);
    args.k_dim = states.size(2);
    args.v_dim = states.size(3);
    args.conv_size = conv_states.size(2) + 1;
    expect(num_k_heads > 0 && args.num_v_heads % num_k_heads == 0, "equally many heads for each head of keys");
    expect(args.k_dim <= kMaxKeyDim, "heads of keys with at most 256 numbers");
    expect(args.conv_size >= kMinTaps && args.conv_size <= kMaxTaps, "2 to 4 taps");
    expect(conv_states.size(1) == args.num_channels(), "a convolution of the channels of all heads");
    expect(x.size(1) == args.num_channels() + num_inputs * args.num_v_heads, "an x with the width of its parts");
    expect(taps.dim() == 2 && taps.size(0) == args.num_channels() && taps.size(1) == args.conv_size &&
               taps.is_contiguous() && taps.dtype() == x.dtype(),
           "contiguous taps [C, W] of the dtype of x");
    expect(!conv_bias.size(0) || (conv_bias.size(0) == args.num_channels() && conv_bias.is_contiguous() &&
                                  conv_bias.dtype() == x.dtype()),
           "a contiguous bias [C] of the dtype of x");
    set_pointers(args);
    return args;
  }

 private:
  void set_pointers(RecurrenceArgs& args) const {
    const auto numbers_of = [&](const Tensor& tensor) {
      expect(tensor.dim() == 1 && tensor.size(0) == args.num_v_heads && tensor.is_contiguous() &&
                 tensor.dtype() == kFloat32,
             "contiguous numbers of heads [N] in float32");
      return tensor.data<float>();
    };
    args.x = x.data();
    args.taps = taps.data();
    args.conv_bias = conv_bias.size(0) ? conv_bias.data() : nullptr;
    args.decay = numbers_of(decay);
    args.bias = numbers_of(bias);
    args.skip = skip.size(0) ? numbers_of(skip) : nullptr;
    args.conv_states = conv_states.data();
    args.states = states.data<float>();
    const auto is_table = [](const Tensor& tensor, size_t bytes) {
      return tensor.dim() == 2 && tensor.size(1) == int64_t(bytes / sizeof(int32_t)) &&
             tensor.is_contiguous() &&
             tensor.torch_dtype() == torch_functions.aoti_torch_dtype_int32();
    };
    expect(is_table(sequences, sizeof(StateSequence)), "contiguous sequences [n, 4] in int32");
    expect(is_table(saves, sizeof(StateSave)), "contiguous saves [S, 3] in int32");
    args.sequences = sequences.data<StateSequence>();
    args.saves = saves.data<StateSave>();
    args.num_sequences = sequences.size(0);
    args.num_saves = saves.size(0);
    expect_rows(args);
  }

  void expect_rows(const RecurrenceArgs& args) const {
    const auto is_row = [&](int64_t row) { return row >= 0 && row < states.size(0); };
    for (int64_t i = 0; i < args.num_sequences; i++) {
      const StateSequence& each = args.sequences[i];
      expect(each.first_row >= 0 && each.num_tokens > 0 && int64_t(each.first_row) + each.num_tokens <= args.num_tokens,
             "sequences of tokens of x");
      expect(each.read_row < states.size(0) && is_row(each.write_row), "rows of the states");
    }
    for (int64_t i = 0; i < args.num_saves; i++) {
      const StateSave& each = args.saves[i];
      expect(each.sequence >= 0 && each.sequence < args.num_sequences && is_row(each.row), "saves of sequences in rows");
      expect(each.num_tokens > 0 && each.num_tokens <= args.sequences[each.sequence].num_tokens,
             "saves after some tokens");
    }
  }
};

template <>
Recurrence take(const StackValue*& next) {
  return {take<Tensor>(next), take<Tensor>(next), take<Tensor>(next), take<Tensor>(next),
          take<Tensor>(next), take<Tensor>(next), take<Tensor>(next), take<Tensor>(next),
          take<Tensor>(next), take<Tensor>(next), take<int64_t>(next)};
}

// The results [T, N · H]. Rows of tokens of no sequence are zeros.
Tensor compute_recurrence(const Recurrence& recurrence, RecurrenceArgs args,
                          void (*const (&kernels)[kNumDTypes])(const RecurrenceArgs&, const Threads&)) {
  const DType dtype = recurrence.x.dtype();
  const int64_t width = args.num_v_heads * args.v_dim;
  Tensor out = empty(args.num_tokens, width, recurrence.x.torch_dtype());
  Tensor scratch = empty(recurrence_scratch_numbers(args), dtype_codes[kFloat32]);
  args.out = out.data();
  args.scratch = scratch.data<float>();
  int64_t num_left = args.num_tokens;
  for (int64_t i = 0; i < args.num_sequences; i++) num_left -= args.sequences[i].num_tokens;
  if (num_left) std::memset(args.out, 0, args.num_tokens * width * (dtype == kFloat32 ? 4 : 2));
  kernels[dtype](args, threads());
  return out;
}

Tensor gated_delta(const Recurrence& recurrence, float largest_share) {
  RecurrenceArgs args = recurrence.args(2);
  args.largest_share = largest_share;
  return compute_recurrence(recurrence, args, kernels.gated_delta);
}

Tensor mamba2(const Recurrence& recurrence, float least_time, float longest_time) {
  RecurrenceArgs args = recurrence.args(1);
  expect(args.skip, "numbers that skip the states");
  args.least_time = least_time;
  args.longest_time = longest_time;
  return compute_recurrence(recurrence, args, kernels.mamba2);
}

// An operation as torch calls it. Its arguments and results are on the stack.
template <auto operation>
struct Boxed;

template <typename Result, typename... Parameters, Result (*operation)(Parameters...)>
struct Boxed<operation> {
  static void call(StackValue* stack, uint64_t num_arguments, uint64_t num_results) {
    const StackValue* next = stack;
    recorded_stack = stack;
    recorded_tensors = 0;
    std::tuple<std::decay_t<Parameters>...> arguments{take<std::decay_t<Parameters>>(next)...};  // in this order
    if (recording) recording->begin_call(call, stack, num_arguments, recorded_tensors);
    if constexpr (std::is_void_v<Result>) std::apply(operation, arguments);
    else put(stack, std::apply(operation, arguments));
    if (recording) recording->end_call(stack, num_results);
    owned_tensors.delete_all();
  }

 private:
  static void put(StackValue* stack, Tensor result) { stack[0] = result.release(); }
  template <int count>
  static void put(StackValue* stack, Tensors<count> results) {
    for (int i = 0; i < count; i++) stack[i] = results.each[i].release();
  }
};

// Records this thread's operations from now on. Its arguments are the inputs of the recording.
void begin_recording(StackValue* stack, uint64_t num_arguments, uint64_t) {
  Recording::destroy(recording);
  recording = Recording::make(stack);
  for (uint64_t i = 0; i < num_arguments; i++) Tensor{stack[i]};  // so that this call deletes it
  owned_tensors.delete_all();
}

// Ends it. The argument is what the recording returns. Returns its number, which is 0 if it can't be used.
void end_recording(StackValue* stack, uint64_t, uint64_t) {
  Recording* ended = recording;
  recording = nullptr;
  const bool is_usable = ended && ended->end(stack[0]);
  Tensor{stack[0]};  // so that this call deletes it
  owned_tensors.delete_all();
  if (!is_usable) Recording::destroy(ended);
  stack[0] = is_usable ? reinterpret_cast<StackValue>(ended) : 0;
}

// Calls what was recorded, with other inputs: so many linked recordings.
void replay(StackValue* stack, uint64_t, uint64_t) {
  const Recording* first = reinterpret_cast<const Recording*>(stack[0]);
  stack[0] = first->replay(static_cast<int64_t>(stack[1]), stack + 2, replayed);
}

struct Op {
  const char* name;
  const char* schema;
  BoxedFunction function;
};

#define RAYCORE_INTEGER_LINEAR \
  "Tensor x, Tensor packed, Tensor scales, Tensor zeros, Tensor bias, int bits, int row_bits, int row_group_size, " \
  "int group_size, bool is_e2m1"

#define RAYCORE_RECURRENCE \
  "Tensor x, Tensor taps, Tensor conv_bias, Tensor decay, Tensor bias, Tensor skip, Tensor(a!) conv_states, " \
  "Tensor(b!) states, Tensor sequences, Tensor saves, int num_k_heads"

#define RAYCORE_GATE ", int gate, float alpha, float limit"

const Op kOps[] = {
    {"rms_norm", "rms_norm(Tensor x, Tensor weight, float eps, float offset) -> Tensor", Boxed<rms_norm>::call},
    {"layer_norm", "layer_norm(Tensor x, Tensor weight, Tensor bias, float eps) -> Tensor", Boxed<layer_norm>::call},
    {"add_layer_norm",
     "add_layer_norm(Tensor(a!) residual, Tensor(b!) x, Tensor weight, Tensor bias, float eps, bool keeps_sum) -> ()",
     Boxed<add_layer_norm>::call},
    {"gate_and_mul", "gate_and_mul(Tensor gate_up" RAYCORE_GATE ") -> Tensor", Boxed<gate_and_mul>::call},
    {"read_floats", "read_floats(Tensor x) -> ()", Boxed<read_floats>::call},
    {"few_rows_linear", "few_rows_linear(Tensor x, Tensor weight) -> Tensor", Boxed<few_rows_linear>::call},
    {"mask_logits", "mask_logits(Tensor(a!) logits, Tensor rows, Tensor masks) -> ()", Boxed<mask_logits>::call},
    {"most_likely", "most_likely(Tensor logits) -> Tensor", Boxed<most_likely>::call},
    {"pack_linear", "pack_linear(Tensor weight) -> Tensor", Boxed<pack_linear>::call},
    {"pack_rows", "pack_rows(Tensor(a!) packed, Tensor weight, Tensor rows) -> ()", Boxed<pack_rows>::call},
    {"panel_linear", "panel_linear(Tensor x, Tensor packed, Tensor bias, int num_outputs) -> Tensor",
     Boxed<panel_linear>::call},
    {"gated_panel_linear", "gated_panel_linear(Tensor x, Tensor packed, Tensor bias" RAYCORE_GATE ") -> Tensor",
     Boxed<gated_panel_linear>::call},
    {"activated_panel_linear",
     "activated_panel_linear(Tensor x, Tensor packed, Tensor bias, int num_outputs" RAYCORE_GATE ") -> Tensor",
     Boxed<activated_panel_linear>::call},
    {"add_panel_linear", "add_panel_linear(Tensor(a!) residual, Tensor x, Tensor packed, Tensor bias) -> ()",
     Boxed<add_panel_linear>::call},
    {"head_linear", "head_linear(Tensor x, Tensor packed, Tensor(a!) out) -> ()", Boxed<head_linear>::call},
    {"integer_linear", "integer_linear(" RAYCORE_INTEGER_LINEAR ", int num_outputs) -> Tensor",
     Boxed<integer_linear>::call},
    {"gated_integer_linear", "gated_integer_linear(" RAYCORE_INTEGER_LINEAR RAYCORE_GATE ") -> Tensor",
     Boxed<gated_integer_linear>::call},
    {"add_integer_linear", "add_integer_linear(" RAYCORE_INTEGER_LINEAR ", Tensor(a!) residual) -> ()",
     Boxed<add_integer_linear>::call},
    {"lora_shrink", "lora_shrink(Tensor x, Tensor rows, Tensor slots, Tensor adapters, int width) -> Tensor",
     Boxed<lora_shrink>::call},
    {"lora_expand", "lora_expand(Tensor(a!) y, Tensor products, Tensor rows, Tensor slots, Tensor adapters) -> ()",
     Boxed<lora_expand>::call},
    {"logprobs", "logprobs(Tensor logits, Tensor token_ids, int num_likely) -> (Tensor, Tensor, Tensor, Tensor)",
     Boxed<logprobs>::call},
    {"draw", "draw(Tensor logits, Tensor limits) -> Tensor", Boxed<draw>::call},
    {"gated_delta", "gated_delta(" RAYCORE_RECURRENCE ", float largest_share=1) -> Tensor", Boxed<gated_delta>::call},
    {"mamba2", "mamba2(" RAYCORE_RECURRENCE ", float least_time, float longest_time) -> Tensor", Boxed<mamba2>::call},
    {"attention",
     "attention(Tensor(a!) qkv, Tensor norm, float eps, float norm_offset, Tensor turns, Tensor(b!) cache, "
     "Tensor tables, Tensor sequences, int num_heads, int num_kv_heads, int block_size, int window, float scale, "
     "float softcap, Tensor sinks, bool turns_are_of_rows, Tensor ends) -> Tensor",
     Boxed<attention>::call},
    {"two_sided_attention",
     "two_sided_attention(Tensor(a!) qkv, Tensor turns, Tensor sequences, int num_heads, int window, float scale) -> "
     "Tensor",
     Boxed<two_sided_attention>::call},
    {"latent_attention",
     "latent_attention(Tensor(a!) qkv, Tensor norm, float eps, Tensor turns, Tensor(b!) cache, Tensor tables, "
     "Tensor sequences, int num_heads, int block_size, float scale) -> Tensor",
     Boxed<latent_attention>::call},
    {"store_owned_latents",
     "store_owned_latents(Tensor(a!) qkv, Tensor norm, float eps, Tensor turns, Tensor(b!) cache, Tensor tables, "
     "Tensor sequences, int num_heads, int block_size, int num_owners, int owner) -> ()",
     Boxed<store_owned_latents>::call},
    {"attend_to_owned_latents",
     "attend_to_owned_latents(Tensor q, Tensor cache, Tensor tables, Tensor sequences, int num_heads, int rank, "
     "int block_size, float scale, int num_owners, int owner) -> Tensor",
     Boxed<attend_to_owned_latents>::call},
    {"store_owned_keys",
     "store_owned_keys(Tensor(a!) qkv, Tensor norm, float eps, float norm_offset, Tensor turns, Tensor(b!) cache, "
     "Tensor tables, Tensor sequences, int num_heads, int num_kv_heads, int block_size, int num_owners, int owner) "
     "-> ()",
     Boxed<store_owned_keys>::call},
    {"attend_to_owned_keys",
     "attend_to_owned_keys(Tensor q, Tensor cache, Tensor tables, Tensor sequences, int num_heads, int num_kv_heads, "
     "int block_size, int window, float scale, float softcap, int num_owners, int owner) -> Tensor",
     Boxed<attend_to_owned_keys>::call},
    {"merge_parts", "merge_parts(Tensor parts, Tensor sinks, Tensor like) -> Tensor", Boxed<merge_parts>::call},
    {"begin_recording", "begin_recording(Tensor x, Tensor tables, Tensor sequences) -> ()", begin_recording},
    {"end_recording", "end_recording(Tensor result) -> int", end_recording},
    {"replay", "replay(int recording, int count, Tensor(a!) x, Tensor tables, Tensor sequences) -> Tensor", replay},
};

const char* missing = nullptr;  // see `raycore_missing`

#if defined(__x86_64__)
// Uses the kernels of these parts, one bit each. False if the library lacks one.
bool use(unsigned wanted) {
  for (int part = 0; part < kNumParts; part++)
    if (wanted >> part & 1 && !parts[part]) return false;
  kernels = {};
  for (int part = 0; part < kNumParts; part++)
    if (wanted >> part & 1) parts[part](kernels);
  return true;
}
#endif

// Uses the kernels named `choice`, or the best ones ("auto"). False if this processor or library hasn't got them.
bool choose(const char* choice) {
  const bool is_auto = !std::strcmp(choice, "auto");
  const auto is_wanted = [&](const char* name) { return is_auto || !std::strcmp(choice, name); };
  missing = nullptr;
#if defined(__x86_64__)
  const Processor processor;
  constexpr unsigned avx2 = 1 << kAvx2 | 1 << kAvx2Panels | 1 << kAvx2Integers;
  constexpr unsigned avx_vnni = 1 << kAvx2 | 1 << kAvx2Panels | 1 << kAvxVnni;
  constexpr unsigned wide = 1 << kAvx512 | 1 << kAvx512Panels, vnni = wide | 1 << kAvx512Vnni;
  constexpr unsigned bf16 = vnni | 1 << kAvx512Bf16;
  const struct {
    const char* name;
    bool is_had;
    unsigned parts;
  } sets[] = {{"amx", processor.has_amx(), bf16 | 1 << kAmx},
              {"avx512_bf16", processor.has_bf16, bf16},
              {"avx512_vnni", processor.has_vnni, vnni},
              {"avx512", processor.has_avx512, wide | 1 << kAvx512Integers},
              {"avx_vnni", processor.has_avx_vnni, avx_vnni},
              {"avx2", processor.has_avx2, avx2}};
  for (const auto& set : sets) {
    if (!is_wanted(set.name) || !set.is_had) continue;
    if (is_auto && set.parts == bf16 && pairs_are_faster && !pairs_are_faster()) continue;
    if (use(set.parts)) {
      reads_in_order = set.parts == bf16 && processor.is_zen4;
      return true;
    }
    if (!missing) missing = set.name;
  }
#elif defined(__aarch64__)
  if (is_wanted("neon")) {
    kernels = kNeonKernels;
    return true;
  }
#endif
  return false;
}

}  // namespace
}  // namespace raycore

#define RAYCORE_EXPORT extern "C" __attribute__((visibility("default")))

// Uses the kernels for an instruction set from now on, or the best ones for "auto". Returns the name of the instruction
// set, or null if there are no such kernels for this processor.
RAYCORE_EXPORT const char* raycore_choose(const char* choice) {
  return raycore::choose(choice) ? raycore::kernels.name : nullptr;
}

// The best instruction set that the last `raycore_choose` could have used if the library had its kernels. Null: none.
RAYCORE_EXPORT const char* raycore_missing() {
  return raycore::missing;
}

// Says that the second recording follows the first one.
RAYCORE_EXPORT void raycore_link_recordings(uint64_t first, uint64_t second) {
  reinterpret_cast<raycore::Recording*>(first)->link(reinterpret_cast<const raycore::Recording*>(second));
}

// Forgets what was recorded.
RAYCORE_EXPORT void raycore_delete_recording(uint64_t recording) {
  raycore::Recording::destroy(reinterpret_cast<raycore::Recording*>(recording));
}

// Registers the operations. Call it once, after `raycore_choose`. `libtorch`: the path of the loaded libtorch_cpu.
// Returns null, or why it failed.
RAYCORE_EXPORT const char* raycore_register(const char* libtorch) {
  using namespace raycore;
  static char reason[512];
  const auto because = [](const char* format, const char* what) {
    std::snprintf(reason, sizeof(reason), format, what);
    return reason;
  };
  void* library = dlopen(libtorch, RTLD_NOW | RTLD_NOLOAD);
  if (!library) return because("torch hasn't loaded %s", libtorch);
#define RAYCORE_FIND(RESULT, NAME, ARGUMENTS)                                                     \
  torch_functions.NAME = reinterpret_cast<decltype(torch_functions.NAME)>(dlsym(library, #NAME)); \
  if (!torch_functions.NAME) return because("this version of torch has no function %s", #NAME);
  RAYCORE_TORCH_FUNCTIONS(RAYCORE_FIND)
#undef RAYCORE_FIND
  dtype_codes[kFloat32] = torch_functions.aoti_torch_dtype_float32();
  dtype_codes[kBFloat16] = torch_functions.aoti_torch_dtype_bfloat16();
  dtype_codes[kFloat16] = torch_functions.aoti_torch_dtype_float16();
  LibraryHandle fragment, implementation;
  if (torch_functions.aoti_torch_library_init_fragment("raycore", __FILE__, __LINE__, &fragment) ||
      torch_functions.aoti_torch_library_init_impl("raycore", "CPU", __FILE__, __LINE__, &implementation))
    return because("torch refuses the library %s", "raycore");
  for (const Op& op : kOps)
    if (torch_functions.aoti_torch_library_def(fragment, op.schema) ||
        torch_functions.torch_library_impl(implementation, op.name, op.function, kAbiVersion))
      return because("torch refuses the operation %s", op.schema);
  return nullptr;
}
