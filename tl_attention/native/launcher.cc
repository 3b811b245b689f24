// Launcher of packed kernels: the part of a runtime that a compiled kernel calls, on the CUDA driver and tvm_ffi's C API alone.
//
// The host code of a kernel checks its arguments and asks `tl_attention_pack_lookup` for three functions by name: one that makes a
// TMA descriptor, one that selects a device, and the launch of its own device code. packing.py gives that symbol its name, so
// neither these functions nor the symbol meet those of an installed TileLang.
//
// pack.py opens libraries (libcuda.so.1, the host code) and calls the two functions at the end of this file. All their arguments are
// integers, addresses among them. What they point at lives as long as the process, as kernels do: nothing is unloaded.

#include <cuda.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <atomic>

#include <tvm/ffi/c_api.h>
#include <tvm/ffi/extra/c_env_api.h>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int MAX_DEVICES = 64;
constexpr int MAX_PARAMETERS = 64;  // of a kernel

// ---- Errors: set for the caller, which tvm_ffi turns into a Python exception

__attribute__((format(printf, 1, 2))) int fail(const char* format, ...) {
  char text[1024];
  va_list values;
  va_start(values, format);
  vsnprintf(text, sizeof text, format, values);
  va_end(values);
  TVMFFIErrorSetRaisedFromCStr("RuntimeError", text);
  return -1;
}

// ---- The driver: its functions by name, so that this library loads without a GPU

#define DRIVER_FUNCTIONS(X) \
  X(cuInit)                 \
  X(cuGetErrorName)         \
  X(cuDeviceGet)            \
  X(cuDevicePrimaryCtxRetain) \
  X(cuCtxGetCurrent)        \
  X(cuCtxSetCurrent)        \
  X(cuCtxGetDevice)         \
  X(cuModuleLoadData)       \
  X(cuModuleGetFunction)    \
  X(cuFuncSetAttribute)     \
  X(cuTensorMapEncodeTiled) \
  X(cuLaunchKernel)         \
  X(cuLaunchKernelEx)

struct Driver {
#define MEMBER(name) decltype(&::name) name;
  DRIVER_FUNCTIONS(MEMBER)
#undef MEMBER
};

Driver driver;
bool driver_is_open = false;
pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;  // for the first use of a device or of a kernel on it

struct Lock {
  Lock() { pthread_mutex_lock(&mutex); }
  ~Lock() { pthread_mutex_unlock(&mutex); }
};

int need_driver() {
  if (driver_is_open) return 0;
  return fail("tl_attention: a kernel needs a GPU and its driver, and libcuda.so.1 could not be opened");
}

int check(CUresult result, const char* call, const char* subject) {
  if (result == CUDA_SUCCESS) return 0;
  const char* name = nullptr;
  driver.cuGetErrorName(result, &name);
  return fail("%s: %s failed with %s (%d)", subject, call, name ? name : "an unknown error", static_cast<int>(result));
}

// ---- Devices: the primary context of each, which PyTorch uses too

std::atomic<CUcontext> contexts[MAX_DEVICES];

int retain_context(int device) {
  Lock lock;
  if (contexts[device].load()) return 0;
  CUdevice handle;
  CUcontext context;
  if (check(driver.cuInit(0), "cuInit", "set_device") || check(driver.cuDeviceGet(&handle, device), "cuDeviceGet", "set_device") ||
      check(driver.cuDevicePrimaryCtxRetain(&context, handle), "cuDevicePrimaryCtxRetain", "set_device")) {
    return -1;
  }
  contexts[device].store(context);
  return 0;
}

// Arguments: device type, device index. Makes the primary context of the device current in this thread.
int set_device(void*, const TVMFFIAny* arguments, int32_t count, TVMFFIAny* result) {
  if (count != 2) return fail("set_device: expected 2 arguments, got %d", count);
  if (need_driver()) return -1;
  int64_t device = arguments[1].v_int64;
  if (device < 0 || device >= MAX_DEVICES) return fail("set_device: expected a device from 0 to %d, got %ld", MAX_DEVICES - 1, device);
  if (!contexts[device].load(std::memory_order_acquire) && retain_context(static_cast<int>(device))) return -1;
  CUcontext wanted = contexts[device].load(std::memory_order_acquire), current = nullptr;
  driver.cuCtxGetCurrent(&current);
  if (current != wanted && check(driver.cuCtxSetCurrent(wanted), "cuCtxSetCurrent", "set_device")) return -1;
  result->type_index = kTVMFFINone;
  return 0;
}

// ---- TMA descriptors

// Arguments: descriptor, element type, rank, address, `rank` each of sizes, strides in bytes (the first is that of an element, which
// the driver does not take), box sizes and element strides, then interleave, swizzle, promotion to L2 and fill.
int create_tensor_map(void*, const TVMFFIAny* arguments, int32_t count, TVMFFIAny* result) {
  constexpr int MAX_RANK = 5, FIXED = 8;
  if (need_driver()) return -1;
  if (count < FIXED) return fail("create_tensor_map: expected at least %d arguments, got %d", FIXED, count);
  int64_t rank = arguments[2].v_int64;
  if (rank < 1 || rank > MAX_RANK) return fail("create_tensor_map: expected a rank from 1 to %d, got %ld", MAX_RANK, rank);
  if (count != FIXED + 4 * rank) return fail("create_tensor_map: expected %ld arguments, got %d", FIXED + 4 * rank, count);
  cuuint64_t sizes[MAX_RANK], strides[MAX_RANK];
  cuuint32_t box[MAX_RANK], element_strides[MAX_RANK];
  const TVMFFIAny *lists = arguments + 4, *last = lists + 4 * rank;
  for (int64_t i = 0; i < rank; ++i) {
    sizes[i] = static_cast<cuuint64_t>(lists[i].v_int64);
    strides[i] = static_cast<cuuint64_t>(lists[rank + i].v_int64);
    box[i] = static_cast<cuuint32_t>(lists[2 * rank + i].v_int64);
    element_strides[i] = static_cast<cuuint32_t>(lists[3 * rank + i].v_int64);
  }
  CUresult status = driver.cuTensorMapEncodeTiled(
      static_cast<CUtensorMap*>(arguments[0].v_ptr), static_cast<CUtensorMapDataType>(arguments[1].v_int64),
      static_cast<cuuint32_t>(rank), arguments[3].v_ptr, sizes, strides + 1, box, element_strides,
      static_cast<CUtensorMapInterleave>(last[0].v_int64), static_cast<CUtensorMapSwizzle>(last[1].v_int64),
      static_cast<CUtensorMapL2promotion>(last[2].v_int64), static_cast<CUtensorMapFloatOOBfill>(last[3].v_int64));
  if (status != CUDA_SUCCESS) {
    char text[512];
    int used = snprintf(text, sizeof text, "TMA descriptor of rank %ld at %p, sizes", rank, arguments[3].v_ptr);
    for (int64_t i = 0; i < rank; ++i) used += snprintf(text + used, sizeof text - used, " %lu", sizes[i]);
    used += snprintf(text + used, sizeof text - used, ", strides");
    for (int64_t i = 1; i < rank; ++i) used += snprintf(text + used, sizeof text - used, " %lu", strides[i]);
    used += snprintf(text + used, sizeof text - used, ", box");
    for (int64_t i = 0; i < rank; ++i) used += snprintf(text + used, sizeof text - used, " %u", box[i]);
    return check(status, "cuTensorMapEncodeTiled", text);
  }
  result->type_index = kTVMFFIInt;
  result->zero_padding = 0;
  result->v_int64 = 0;
  return 0;
}

// ---- Kernels

// A kernel on one device. Its shared memory is the most that a launch has asked for.
struct DeviceKernel {
  std::atomic<CUfunction> function;
  std::atomic<int64_t> shared_bytes;
};

struct Kernel {
  TVMFFISafeCallType host;  // checks the arguments of a call, makes descriptors, launches
  const void* cubin;
  const char* name;        // of the kernel in the cubin
  const char* parameters;  // a letter each: p address, g address of a value that is passed itself, i u int32, l int64, f d floats
  const char* launch;      // a letter for each number after them: x y z of the grid, X Y Z of a CTA, s bytes of shared memory
  bool early;              // may start before the kernel before it ends (programmatic dependent launch)
  TVMFFIObjectHandle launcher;
  DeviceKernel devices[MAX_DEVICES];
};

int load_on_device(Kernel* kernel, int device, int64_t shared_bytes) {
  Lock lock;
  DeviceKernel& on = kernel->devices[device];
  CUfunction function = on.function.load();
  if (!function) {
    CUmodule module;
    if (check(driver.cuModuleLoadData(&module, kernel->cubin), "cuModuleLoadData", kernel->name) ||
        check(driver.cuModuleGetFunction(&function, module, kernel->name), "cuModuleGetFunction", kernel->name)) {
      return -1;
    }
  }
  if (shared_bytes > on.shared_bytes.load()) {
    CUresult status =
        driver.cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, static_cast<int>(shared_bytes));
    if (check(status, "cuFuncSetAttribute of shared memory", kernel->name)) return -1;
    on.shared_bytes.store(shared_bytes);
  }
  on.function.store(function, std::memory_order_release);  // last: a launch that sees it needs nothing else
  return 0;
}

// Arguments: the kernel's parameters, then the numbers of its launch.
int launch_kernel(void* self, const TVMFFIAny* arguments, int32_t count, TVMFFIAny* result) {
  Kernel* kernel = static_cast<Kernel*>(self);
  void* addresses[MAX_PARAMETERS];
  union {
    int32_t integer;
    float real;
  } narrow[MAX_PARAMETERS];  // values that are wider as arguments than as parameters
  int32_t n = 0;
  for (const char* kind = kernel->parameters; *kind; ++kind, ++n) {
    switch (*kind) {
      case 'g':
        addresses[n] = arguments[n].v_ptr;
        break;
      case 'i':
      case 'u':
        narrow[n].integer = static_cast<int32_t>(arguments[n].v_int64);
        addresses[n] = &narrow[n];
        break;
      case 'f':
        narrow[n].real = static_cast<float>(arguments[n].v_float64);
        addresses[n] = &narrow[n];
        break;
      default:  // p l d
        addresses[n] = const_cast<void**>(&arguments[n].v_ptr);
    }
  }
  unsigned grid[3] = {1, 1, 1}, cta[3] = {1, 1, 1};
  int64_t shared_bytes = 0;
  for (const char* kind = kernel->launch; *kind; ++kind, ++n) {
    int64_t value = arguments[n].v_int64;
    if (*kind == 's') {
      shared_bytes = value;
    } else {
      (*kind >= 'x' ? grid[*kind - 'x'] : cta[*kind - 'X']) = static_cast<unsigned>(value);
    }
  }
  if (n != count) return fail("%s: expected %d arguments of the launch, got %d", kernel->name, n, count);
  if (!grid[0] || !grid[1] || !grid[2]) {
    return fail("%s: expected a grid of at least one CTA, got %u x %u x %u", kernel->name, grid[0], grid[1], grid[2]);
  }

  CUdevice device;
  if (need_driver()) return -1;
  if (check(driver.cuCtxGetDevice(&device), "cuCtxGetDevice", kernel->name)) return -1;
  DeviceKernel& on = kernel->devices[device];  // set_device made sure of the index
  if (!on.function.load(std::memory_order_acquire) || shared_bytes > on.shared_bytes.load(std::memory_order_relaxed)) {
    if (load_on_device(kernel, device, shared_bytes)) return -1;
  }
  CUfunction function = on.function.load(std::memory_order_acquire);
  CUstream stream = static_cast<CUstream>(TVMFFIEnvGetStream(kDLCUDA, device));
  CUresult status;
  if (kernel->early) {
    CUlaunchAttribute attribute;
    memset(&attribute, 0, sizeof attribute);
    attribute.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attribute.value.programmaticStreamSerializationAllowed = 1;
    CUlaunchConfig config;
    memset(&config, 0, sizeof config);
    config.gridDimX = grid[0], config.gridDimY = grid[1], config.gridDimZ = grid[2];
    config.blockDimX = cta[0], config.blockDimY = cta[1], config.blockDimZ = cta[2];
    config.sharedMemBytes = static_cast<unsigned>(shared_bytes);
    config.hStream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    status = driver.cuLaunchKernelEx(&config, function, addresses, nullptr);
  } else {
    status = driver.cuLaunchKernel(function, grid[0], grid[1], grid[2], cta[0], cta[1], cta[2],
                                   static_cast<unsigned>(shared_bytes), stream, addresses, nullptr);
  }
  if (status != CUDA_SUCCESS && status != CUDA_ERROR_DEINITIALIZED) {  // the latter: the process is ending
    char text[256];
    snprintf(text, sizeof text, "%s, grid %u x %u x %u, CTA %u x %u x %u, %ld bytes of shared memory", kernel->name, grid[0],
             grid[1], grid[2], cta[0], cta[1], cta[2], shared_bytes);
    return check(status, "launch", text);
  }
  result->type_index = kTVMFFINone;
  return 0;
}

int call_host(void* self, const TVMFFIAny* arguments, int32_t count, TVMFFIAny* result) {
  return static_cast<Kernel*>(self)->host(nullptr, arguments, count, result);
}

template <typename T>
T address(const TVMFFIAny& argument) {
  return reinterpret_cast<T>(argument.v_int64);
}

TVMFFIObjectHandle device_setter, tensor_map_maker;

}  // namespace

// What the host code of a kernel calls: the function of a name. The caller borrows it.
EXPORT int tl_attention_pack_lookup(void* context, const char* name, TVMFFIObjectHandle* found) {
  Kernel* kernel = static_cast<Kernel*>(context);
  if (!strcmp(name, kernel->name)) {
    *found = kernel->launcher;
  } else if (!strcmp(name, "__tvm_set_device")) {
    *found = device_setter;
  } else if (!strcmp(name, "__tvm_tensormap_create_tiled")) {
    *found = tensor_map_maker;
  } else {
    return fail("%s: its host code needs %s, which the launcher of tl_attention lacks", kernel->name, name);
  }
  return 0;
}

// Arguments: handle of libcuda.so.1 and address of dlsym.
EXPORT int __tvm_ffi_open_driver(void*, const TVMFFIAny* arguments, int32_t count, TVMFFIAny* result) {
  if (count != 2) return fail("open_driver: expected 2 arguments, got %d", count);
  void* library = address<void*>(arguments[0]);
  auto find = address<void* (*)(void*, const char*)>(arguments[1]);
#define FIND(name)                                                         \
  driver.name = reinterpret_cast<decltype(driver.name)>(find(library, #name)); \
  if (!driver.name) return fail("libcuda.so.1 has no " #name ": expected a driver of CUDA 12 or later");
  DRIVER_FUNCTIONS(FIND)
#undef FIND
  driver_is_open = true;
  result->type_index = kTVMFFINone;
  return 0;
}

// Arguments: addresses of the host code's main function and of its context variable, of the cubin, and of the texts of Kernel (name,
// parameters, launch); whether it starts early. Returns a function with the arguments of the main function.
EXPORT int __tvm_ffi_make_kernel(void*, const TVMFFIAny* arguments, int32_t count, TVMFFIAny* result) {
  if (count != 7) return fail("make_kernel: expected 7 arguments, got %d", count);
  Kernel* kernel = static_cast<Kernel*>(calloc(1, sizeof(Kernel)));
  if (!kernel) return fail("make_kernel: out of memory");
  kernel->host = address<TVMFFISafeCallType>(arguments[0]);
  kernel->cubin = address<const void*>(arguments[2]);
  kernel->name = address<const char*>(arguments[3]);
  kernel->parameters = address<const char*>(arguments[4]);
  kernel->launch = address<const char*>(arguments[5]);
  kernel->early = arguments[6].v_int64;
  if (strlen(kernel->parameters) > MAX_PARAMETERS) return fail("%s: more than %d parameters", kernel->name, MAX_PARAMETERS);
  *address<void**>(arguments[1]) = kernel;
  {
    Lock lock;
    if (!device_setter && TVMFFIFunctionCreate(nullptr, set_device, nullptr, &device_setter)) return -1;
    if (!tensor_map_maker && TVMFFIFunctionCreate(nullptr, create_tensor_map, nullptr, &tensor_map_maker)) return -1;
  }
  TVMFFIObjectHandle function;
  if (TVMFFIFunctionCreate(kernel, launch_kernel, nullptr, &kernel->launcher)) return -1;
  if (TVMFFIFunctionCreate(kernel, call_host, nullptr, &function)) return -1;
  result->type_index = kTVMFFIFunction;
  result->zero_padding = 0;
  result->v_obj = static_cast<TVMFFIObject*>(function);
  return 0;
}
