// The C interface that Python loads. Functions that can fail give 0, or less and leave what was wrong in headrace_error().
#pragma once

#include <cstdint>

#define HEADRACE_API extern "C" __attribute__((visibility("default")))

// Number of this interface: whoever loads the library refuses another one.
HEADRACE_API int32_t headrace_abi();
// Names of the instruction sets that this machine can run, best first, joined by commas.
HEADRACE_API const char* headrace_instruction_sets();
// Name of the one in use: the best, or the one that the environment variable HEADRACE_INSTRUCTION_SET names. Null: that is none of them.
HEADRACE_API const char* headrace_instruction_set();
// Of this thread's last failure.
HEADRACE_API const char* headrace_error();
