// What is between them is compiled for more than the processor that the rest is for.
#pragma once

#define HEADRACE_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define HEADRACE_TARGET_BEGIN(features) HEADRACE_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define HEADRACE_TARGET_END HEADRACE_PRAGMA(clang attribute pop)
#else
#define HEADRACE_TARGET_BEGIN(features) HEADRACE_PRAGMA(GCC push_options) HEADRACE_PRAGMA(GCC target(features))
#define HEADRACE_TARGET_END HEADRACE_PRAGMA(GCC pop_options)
#endif
