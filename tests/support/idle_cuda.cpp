// A driver of CUDA without a device: every call succeeds and does nothing. `idle_cuda.py` compiles it, and says why.
// It has the functions that Triton calls. Types and numbers are those of cuda.h, which isn't needed.

#include <stdint.h>
#include <string.h>

extern "C" {

#define DOES_NOTHING(name) int name() { return 0; }

enum { LAUNCH_SIZES = 7, MOST_PARAMETERS = 32 };
enum { MULTIPROCESSORS = 16, MAJOR = 75, MINOR = 76, SHARED_MEMORY_OPTIN = 97 };

static int handle;

int64_t idle_num_launches;
// Of the last launch: the function; the grid, the block and the bytes of shared memory; the first four bytes of each
// parameter.
int64_t idle_function;
uint32_t idle_sizes[LAUNCH_SIZES];
uint32_t idle_parameters[MOST_PARAMETERS];
// How many parameters to note. The driver isn't told how many a kernel has.
int32_t idle_num_parameters;

DOES_NOTHING(cuInit)
DOES_NOTHING(cuCtxSetCurrent)
DOES_NOTHING(cuCtxGetLimit)
DOES_NOTHING(cuCtxSetLimit)
DOES_NOTHING(cuFuncSetAttribute)
DOES_NOTHING(cuFuncSetCacheConfig)
DOES_NOTHING(cuModuleUnload)
DOES_NOTHING(cuOccupancyMaxActiveClusters)
DOES_NOTHING(cuStreamIsCapturing)
DOES_NOTHING(cuTensorMapEncodeTiled)
DOES_NOTHING(cuTensorMapEncodeIm2col)

static int give(void **out) {
  *out = &handle;
  return 0;
}

static int give_number(int *out, int number) {
  *out = number;
  return 0;
}

int cuCtxGetCurrent(void **context) { return give(context); }
int cuDevicePrimaryCtxRetain(void **context, int device) { return give(context); }
int cuModuleLoadData(void **module, const void *image) { return give(module); }
int cuCtxGetDevice(int *device) { return give_number(device, 0); }
int cuDeviceGet(int *device, int index) { return give_number(device, 0); }
int cuDeviceGetCount(int *count) { return give_number(count, 1); }
int cuDriverGetVersion(int *version) { return give_number(version, 13000); }
int cuFuncGetAttribute(int *value, int attribute, void *function) { return give_number(value, 1024); }

int cuModuleGetFunction(intptr_t *function, void *module, const char *name) {
  static intptr_t num_functions;
  *function = ++num_functions;
  return 0;
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
  switch (attribute) {
  case MULTIPROCESSORS:
    return give_number(value, 132);
  case MAJOR:
    return give_number(value, 9);
  case MINOR:
    return give_number(value, 0);
  case SHARED_MEMORY_OPTIN:
    return give_number(value, 227 * 1024);
  default:
    return give_number(value, 65536);
  }
}

int cuPointerGetAttribute(uint64_t *value, int attribute, uint64_t pointer) {
  *value = pointer;
  return 0;
}

int cuGetErrorString(int error, const char **text) {
  *text = "an idle driver has no errors";
  return 0;
}

int cuLaunchKernelEx(const uint32_t *config, intptr_t function, void **parameters, void **extra) {
  ++idle_num_launches;
  idle_function = function;
  memcpy(idle_sizes, config, sizeof(idle_sizes));
  for (int i = 0; i < idle_num_parameters; ++i)
    memcpy(&idle_parameters[i], parameters[i], sizeof(uint32_t));
  return 0;
}

}  // extern "C"
