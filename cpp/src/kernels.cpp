// Which instruction sets this machine has.
#include "kernels.h"

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#if defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace headrace {

// Each is called only where the machine has the instruction set: even filling the table is compiled for it.
const Kernels* portable_kernels();
const Kernels* avx2_kernels();
const Kernels* avxvnni_kernels();
const Kernels* avx512_kernels();
const Kernels* neon_kernels();

namespace {

struct Available {
  const Kernels* list[8];
  int64_t count = 0;

  Available() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni"))
      list[count++] = avx512_kernels();
    if (avx2 && __builtin_cpu_supports("avxvnni")) list[count++] = avxvnni_kernels();
    if (avx2) list[count++] = avx2_kernels();
#elif defined(__aarch64__)
    if (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) list[count++] = neon_kernels();
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

const Kernels& named_kernels(const char* name) {
  if (const Kernels* found = name ? find_kernels(name) : nullptr) return *found;
  throw std::invalid_argument(std::string("this machine has no instruction set ") + (name ? name : "without a name"));
}

const Kernels* chosen_kernels() {
  const char* name = std::getenv(kInstructionSetVariable);
  return name && *name ? find_kernels(name) : available().list[0];
}

}  // namespace headrace
