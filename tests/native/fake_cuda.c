// A driver and CUDA runtime without a GPU, for tests/test_pack.py: prints the calls that make a launch, with all they are given.

#include <stdint.h>
#include <stdio.h>
#include <string.h>

static char context, module, function;
static void* current;
static const char* kinds = "";  // of the next kernel's parameters: letters as in native/launcher.cc
static int failing;             // CUresult of the next launch

void fake_expect(const char* parameters, int status) { kinds = parameters, failing = status; }

int cuInit(unsigned flags) { return 0; }
int cuDeviceGet(int* device, int index) { return *device = index, 0; }
int cuDevicePrimaryCtxRetain(void** found, int device) { return *found = &context, 0; }
int cuCtxGetCurrent(void** found) { return *found = current, 0; }
int cuCtxSetCurrent(void* wanted) { return current = wanted, 0; }
int cuCtxGetDevice(int* device) { return *device = 0, 0; }
int cudaSetDevice(int device) { return current = &context, 0; }
int cudaGetDevice(int* device) { return *device = 0, 0; }
int cudaPeekAtLastError(void) { return 0; }
int cuGetErrorName(int status, const char** name) { return *name = "CUDA_ERROR_FAKE", 0; }
int cuGetErrorString(int status, const char** text) { return *text = "a fake error", 0; }
int cuModuleLoadData(void** found, const void* image) {
  *found = &module;
  printf("load %s\n", memcmp(image, "\177ELF", 4) ? "what is no cubin" : "a cubin");
  return 0;
}
int cuModuleUnload(void* unloaded) { return 0; }
int cuModuleGetFunction(void** found, void* of, const char* name) {
  *found = &function;
  printf("function %s\n", name);
  return of != &module;
}
int cuFuncSetAttribute(void* of, int attribute, int value) {
  printf("attribute %d %d\n", attribute, value);
  return of != &function;
}

int cuTensorMapEncodeTiled(unsigned char map[128], int type, unsigned rank, void* address, const uint64_t* sizes,
                           const uint64_t* strides, const unsigned* box, const unsigned* steps, int interleave, int swizzle,
                           int promotion, int fill) {
  static char text[1024];
  int used = sprintf(text, "type %d address %p interleave %d swizzle %d promotion %d fill %d", type, address, interleave, swizzle,
                     promotion, fill);
  for (unsigned i = 0; i < rank; ++i) {
    used += sprintf(text + used, ", size %lu box %u step %u", sizes[i], box[i], steps[i]);
    if (i + 1 < rank) used += sprintf(text + used, " stride %lu", strides[i]);
  }
  printf("map %s\n", text);
  memset(map, 0, 128);
  for (int i = 0; i < used; ++i) map[i % 128] = 31 * map[i % 128] + text[i];
  return (uintptr_t)map % 64 != 0;
}

static int launch(const char* how, const unsigned* sizes, unsigned shared, void* stream, void** parameters) {
  printf("%s grid %u %u %u CTA %u %u %u shared %u stream %p", how, sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], shared,
         stream);
  for (const char* kind = kinds; *kind; ++kind) {
    int bytes = *kind == 'g' ? 128 : strchr("iuf", *kind) ? 4 : 8;
    const unsigned char* at = parameters[kind - kinds];
    printf(" %c", *kind);
    for (int i = 0; i < bytes; ++i) printf("%02x", at[i]);
  }
  printf("\n");
  return failing;
}

int cuLaunchKernel(void* of, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                   void* stream, void** parameters, void** extra) {
  unsigned sizes[6] = {gx, gy, gz, bx, by, bz};
  return launch("launch", sizes, shared, stream, parameters);
}

struct Config {  // CUlaunchConfig
  unsigned sizes[6], shared;
  void* stream;
  const struct { int id; int padding; int value; } * attributes;
  unsigned count;
};

int cuLaunchKernelEx(const struct Config* config, void* of, void** parameters, void** extra) {
  char how[64];
  sprintf(how, "launch with %u attributes, first %d %d,", config->count, config->attributes->id, config->attributes->value);
  return launch(how, config->sizes, config->shared, config->stream, parameters);
}
