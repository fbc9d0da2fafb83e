// C functions of memory and threads.
#include <stdexcept>
#include <string>

#include "api.h"
#include "error.h"
#include "memory.h"
#include "pool.h"

using headrace::guarded;
using headrace::Memory;
using headrace::Pool;

void* headrace_memory_allocate(int64_t bytes) {
  return guarded([&]() -> void* {
    Memory memory = bytes < 0 ? Memory() : Memory::allocate(static_cast<size_t>(bytes));
    if (!memory) throw std::runtime_error("there is no block of " + std::to_string(bytes) + " bytes of memory");
    return memory.release();
  });
}

void headrace_memory_free(void* data, int64_t bytes) { Memory::adopt(static_cast<uint8_t*>(data), static_cast<size_t>(bytes)); }

Pool* headrace_pool_create(int64_t threads) {
  return guarded([&] { return new Pool(threads); });
}

void headrace_pool_destroy(Pool* pool) { delete pool; }

int32_t headrace_pool_run(Pool* pool, int64_t count, void (*task)(void* context, int64_t index, int64_t slot), void* context) {
  return guarded([&] {
    pool->run(count, [&](int64_t index, int64_t slot) { task(context, index, slot); });
    return 1;
  });
}
