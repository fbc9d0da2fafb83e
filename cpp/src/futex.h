// Waiting for a word of memory to change, between threads or between processes that have it mapped.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>

namespace headrace {

enum class Scope : int { kThreads = FUTEX_PRIVATE_FLAG, kProcesses = 0 };

static_assert(sizeof(std::atomic<uint32_t>) == 4 && std::atomic<uint32_t>::is_always_lock_free);

// Until `word` is not `expected` any more and somebody has woken those that wait for it, at most `nanoseconds` (below 0: for ever), or for no
// reason at all: whoever calls it looks again.
inline void futex_wait(std::atomic<uint32_t>& word, uint32_t expected, Scope scope, int64_t nanoseconds = -1) {
  timespec limit{static_cast<time_t>(nanoseconds / 1'000'000'000), static_cast<long>(nanoseconds % 1'000'000'000)};
  syscall(SYS_futex, &word, FUTEX_WAIT | static_cast<int>(scope), expected, nanoseconds < 0 ? nullptr : &limit, nullptr, 0);
}

inline void futex_wake(std::atomic<uint32_t>& word, int32_t most, Scope scope) {
  syscall(SYS_futex, &word, FUTEX_WAKE | static_cast<int>(scope), most, nullptr, nullptr, 0);
}

inline int64_t monotonic_nanoseconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

// How long a thread looks before it sleeps: about what it costs to fall asleep and to be woken, so that at worst it is paid twice.
constexpr int64_t kSpin = 30'000;

// A moment of waiting in a loop that looks at memory.
inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

// Looks for at most so long whether `done`, and says whether it is.
template <class Done>
inline bool spin(int64_t nanoseconds, Done&& done) {
  if (done()) return true;
  if (nanoseconds <= 0) return false;
  const int64_t end = monotonic_nanoseconds() + nanoseconds;
  do {
    for (int i = 0; i < 16; ++i) {
      relax();
      if (done()) return true;
    }
  } while (monotonic_nanoseconds() < end);
  return false;
}

}  // namespace headrace
