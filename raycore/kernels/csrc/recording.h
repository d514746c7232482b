// Records the operations that a thread calls, and calls them again with other tensors.
//
// A layer with one row is computed in microseconds, and Python takes as long for each operation. A recording calls all
// of a layer's operations at once. It tells their tensors apart: some are the recording's inputs, some are results of
// earlier calls, and all others are constants, such as weights. A constant may get other memory, but stays the same
// object. Recordings of layers that follow each other are linked, so that one call replays several of them.

#pragma once

#include <cstdlib>
#include <cstring>

#include "torch_abi.h"

namespace raycore {

constexpr int kRecordedInputs = 3;
constexpr int kMaxRecordedCalls = 32, kMaxRecordedArguments = 24, kMaxRecordedValues = 48, kMaxRecordedDims = 4;

// What tells tensors apart that live at the same time.
struct TensorKey {
  void* data;
  int32_t dtype;
  int64_t num_dims, sizes[kMaxRecordedDims], strides[kMaxRecordedDims];

  // Returns false for a tensor with more dimensions.
  bool take(TensorHandle tensor) {
    int64_t *all_sizes, *all_strides;
    std::memset(this, 0, sizeof(*this));
    if (torch_functions.aoti_torch_get_data_ptr(tensor, &data) || torch_functions.aoti_torch_get_dtype(tensor, &dtype) ||
        torch_functions.aoti_torch_get_dim(tensor, &num_dims) || num_dims > kMaxRecordedDims ||
        torch_functions.aoti_torch_get_sizes(tensor, &all_sizes) ||
        torch_functions.aoti_torch_get_strides(tensor, &all_strides))
      return false;
    std::memcpy(sizes, all_sizes, num_dims * sizeof(int64_t));
    std::memcpy(strides, all_strides, num_dims * sizeof(int64_t));
    return true;
  }
  bool operator==(const TensorKey& other) const { return !std::memcmp(this, &other, sizeof(*this)); }
};

struct RecordedArgument {
  enum { kNumber, kConstant, kValue } kind;
  StackValue number;  // or the handle of a constant
  int value;          // the index of an input or a result
};

struct RecordedCall {
  BoxedFunction function;
  int num_arguments, num_results;
  RecordedArgument arguments[kMaxRecordedArguments];
};

inline void delete_tensor(StackValue tensor) {
  torch_functions.aoti_torch_delete_tensor_object(reinterpret_cast<TensorHandle>(tensor));
}

// The inputs of the replay that a thread runs, and the results so far. They are deleted when it ends, also by an error.
struct ReplayedValues {
  StackValue values[kMaxRecordedValues];
  int count = 0;

  void delete_all_but(int kept) {
    for (int i = 0; i < count; i++)
      if (i != kept) delete_tensor(values[i]);
    count = 0;
  }
  // Goes on with the first of the inputs of another recording. The others stay.
  void go_on_with(int result) {
    const StackValue first = values[result];
    for (int i = 0; i < count; i++)
      if (i != result && (i == 0 || i >= kRecordedInputs)) delete_tensor(values[i]);
    values[0] = first;
    count = kRecordedInputs;
  }
};

class Recording {
 public:
  // Begins a recording with these inputs. Null: there is no memory. The C library's memory, as this library needs no C++
  // library.
  static Recording* make(const StackValue* inputs) {
    Recording* made = static_cast<Recording*>(std::calloc(1, sizeof(Recording)));
    if (!made) return nullptr;
    made->is_usable_ = true;
    for (int i = 0; i < kRecordedInputs; i++) made->add_value(inputs[i]);
    return made;
  }
  static void destroy(Recording* recording) {
    if (!recording) return;
    for (int c = 0; c < recording->num_calls_; c++) {
      const RecordedCall& call = recording->calls_[c];
      for (int i = 0; i < call.num_arguments; i++)
        if (call.arguments[i].kind == RecordedArgument::kConstant) delete_tensor(call.arguments[i].number);
    }
    std::free(recording);
  }

  // Notes a call that begins. Bit i of `tensors` says whether argument i is a tensor.
  void begin_call(BoxedFunction function, const StackValue* stack, uint64_t num_arguments, uint64_t tensors) {
    if (num_calls_ == kMaxRecordedCalls || num_arguments > kMaxRecordedArguments) is_usable_ = false;
    if (!is_usable_) return;
    RecordedCall& call = calls_[num_calls_++];
    call.function = function;
    call.num_arguments = num_arguments;
    call.num_results = 0;
    for (uint64_t i = 0; i < num_arguments; i++) {
      RecordedArgument& argument = call.arguments[i];
      argument = {RecordedArgument::kNumber, stack[i], -1};
      if (!(tensors >> i & 1)) continue;
      argument.value = find_value(stack[i]);
      argument.kind = argument.value < 0 ? RecordedArgument::kConstant : RecordedArgument::kValue;
      if (argument.value < 0) argument.number = copy_of(stack[i]);
    }
  }
  // Notes the results of the call that has begun.
  void end_call(const StackValue* stack, uint64_t num_results) {
    if (!is_usable_) return;
    calls_[num_calls_ - 1].num_results = num_results;
    for (uint64_t i = 0; i < num_results; i++) add_value(stack[i]);
  }
  // Says which value is the result of the recording. Returns whether it can be used.
  bool end(StackValue result) {
    result_ = find_value(result);
    return is_usable_ && (result_ == 0 || result_ >= kRecordedInputs);
  }
  // Says which recording goes on with the result.
  void link(const Recording* next) { next_ = next; }

  // Calls everything of so many recordings again, which follow each other, and returns the result of the last one.
  // Takes the inputs.
  StackValue replay(int64_t num_recordings, const StackValue* inputs, ReplayedValues& replayed) const {
    replayed.count = kRecordedInputs;
    std::memcpy(replayed.values, inputs, kRecordedInputs * sizeof(StackValue));
    const Recording* last = this;
    last->call_all(replayed);
    while (--num_recordings > 0) {
      replayed.go_on_with(last->result_);
      last = last->next_;
      last->call_all(replayed);
    }
    replayed.delete_all_but(last->result_);
    return replayed.values[last->result_];
  }

 private:
  void call_all(ReplayedValues& replayed) const {
    StackValue* const values = replayed.values;
    StackValue stack[kMaxRecordedArguments];
    for (int c = 0; c < num_calls_; c++) {
      const RecordedCall& call = calls_[c];
      for (int i = 0; i < call.num_arguments; i++) {
        const RecordedArgument& argument = call.arguments[i];
        if (argument.kind == RecordedArgument::kNumber) stack[i] = argument.number;
        else stack[i] = copy_of(argument.kind == RecordedArgument::kValue ? values[argument.value] : argument.number);
      }
      call.function(stack, call.num_arguments, call.num_results);
      for (int i = 0; i < call.num_results; i++) values[replayed.count++] = stack[i];
    }
  }
  static StackValue copy_of(StackValue tensor) {
    TensorHandle copy;
    torch_functions.aoti_torch_new_tensor_handle(reinterpret_cast<TensorHandle>(tensor), &copy);
    return reinterpret_cast<StackValue>(copy);
  }
  void add_value(StackValue tensor) {
    if (num_values_ == kMaxRecordedValues || !keys_[num_values_].take(reinterpret_cast<TensorHandle>(tensor)))
      is_usable_ = false;
    else num_values_++;
  }
  // The newest one: others may have had the same memory before.
  int find_value(StackValue tensor) {
    TensorKey key;
    if (!key.take(reinterpret_cast<TensorHandle>(tensor))) is_usable_ = false;
    for (int i = num_values_ - 1; is_usable_ && i >= 0; i--)
      if (keys_[i] == key) return i;
    return -1;
  }

  bool is_usable_;
  int num_calls_, num_values_, result_;
  const Recording* next_;
  RecordedCall calls_[kMaxRecordedCalls];
  TensorKey keys_[kMaxRecordedValues];
};

}  // namespace raycore
