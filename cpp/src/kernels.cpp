// Which instruction sets this machine has.
#include "kernels.h"

#include <cstring>

namespace headrace {

// Each is called only where the machine has the instruction set: even filling the table is compiled for it.
const Kernels* portable_kernels();
const Kernels* avx2_kernels();

namespace {

struct Available {
  const Kernels* list[8];
  int64_t count = 0;

  Available() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) list[count++] = avx2_kernels();
#endif
    list[count++] = portable_kernels();
  }
};

const Available& available() {
  static const Available found;
  return found;
}

}  // namespace

const Kernels* const* available_kernels(int64_t* count) {
  *count = available().count;
  return available().list;
}

const Kernels* find_kernels(const char* name) {
  for (int64_t i = 0; i < available().count; ++i)
    if (!std::strcmp(available().list[i]->name, name)) return available().list[i];
  return nullptr;
}

}  // namespace headrace
