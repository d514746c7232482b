// The functions of libtorch's stable C interface that the kernels use, found in the running process.
//
// Declared here and looked up by name, so that the library is built without torch, does not link to it, and loads under
// every torch that has the functions: 2.10 and later.

#pragma once

#include <cstdint>

namespace raycore {

struct TensorHandle_;
using TensorHandle = TensorHandle_*;
struct LibraryHandle_;
using LibraryHandle = LibraryHandle_*;

using StackValue = uint64_t;  // a tensor handle, or the bits of an int64_t, a double or a bool
using BoxedFunction = void (*)(StackValue* stack, uint64_t num_inputs, uint64_t num_outputs);

// result, name, arguments; functions return 0 for success, except those that return a number or throw an error
#define RAYCORE_TORCH_FUNCTIONS(F)                                                                                    \
  F(void, aoti_torch_check, (bool, const char*, const char*, uint32_t, const char*))                                  \
  F(int32_t, aoti_torch_library_init_fragment, (const char*, const char*, uint32_t, LibraryHandle*))                  \
  F(int32_t, aoti_torch_library_init_impl, (const char*, const char*, const char*, uint32_t, LibraryHandle*))         \
  F(int32_t, aoti_torch_library_def, (LibraryHandle, const char*))                                                    \
  F(int32_t, torch_library_impl, (LibraryHandle, const char*, BoxedFunction, uint64_t))                               \
  F(int32_t, aoti_torch_delete_tensor_object, (TensorHandle))                                                         \
  F(int32_t, aoti_torch_new_tensor_handle, (TensorHandle, TensorHandle*))                                             \
  F(int32_t, aoti_torch_get_data_ptr, (TensorHandle, void**))                                                         \
  F(int32_t, aoti_torch_get_dim, (TensorHandle, int64_t*))                                                            \
  F(int32_t, aoti_torch_get_sizes, (TensorHandle, int64_t**))                                                         \
  F(int32_t, aoti_torch_get_strides, (TensorHandle, int64_t**))                                                       \
  F(int32_t, aoti_torch_get_dtype, (TensorHandle, int32_t*))                                                          \
  F(int32_t, aoti_torch_empty_strided,                                                                                \
    (int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t, TensorHandle*))                              \
  F(int32_t, aoti_torch_dtype_float32, ())                                                                            \
  F(int32_t, aoti_torch_dtype_bfloat16, ())                                                                           \
  F(int32_t, aoti_torch_dtype_float16, ())                                                                            \
  F(int32_t, aoti_torch_dtype_float64, ())                                                                            \
  F(int32_t, aoti_torch_dtype_uint8, ())                                                                              \
  F(int32_t, aoti_torch_dtype_int8, ())                                                                               \
  F(int32_t, aoti_torch_dtype_int32, ())                                                                              \
  F(int32_t, aoti_torch_dtype_int64, ())                                                                              \
  F(int32_t, torch_parallel_for, (int64_t, int64_t, int64_t, void (*)(int64_t, int64_t, void*), void*))               \
  F(int32_t, torch_get_num_threads, (uint32_t*))

struct TorchFunctions {
#define RAYCORE_DECLARE(RESULT, NAME, ARGUMENTS) RESULT(*NAME) ARGUMENTS;
  RAYCORE_TORCH_FUNCTIONS(RAYCORE_DECLARE)
#undef RAYCORE_DECLARE
};

extern TorchFunctions torch_functions;

}  // namespace raycore
