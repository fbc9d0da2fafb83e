#include "api.h"

#include <cstdlib>
#include <string>

#include "error.h"
#include "kernels.h"

namespace headrace {
thread_local std::string last_error;
}  // namespace headrace

uint32_t headrace_interface() { return HEADRACE_INTERFACE; }

const char* headrace_instruction_sets() {
  static const std::string names = [] {
    std::string joined;
    int64_t count = 0;
    const headrace::Kernels* const* list = headrace::available_kernels(&count);
    for (int64_t i = 0; i < count; ++i) joined.append(i ? "," : "").append(list[i]->name);
    return joined;
  }();
  return names.c_str();
}

const char* headrace_instruction_set() {
  if (const headrace::Kernels* chosen = headrace::chosen_kernels()) return chosen->name;
  headrace::last_error = std::string(headrace::kInstructionSetVariable) + " is " + std::getenv(headrace::kInstructionSetVariable) +
                         ", and this machine has " + headrace_instruction_sets();
  return nullptr;
}

const char* headrace_error() { return headrace::last_error.c_str(); }
