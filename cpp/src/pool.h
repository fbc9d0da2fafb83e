// A few threads that share the work of one step. Whoever calls run works along.
#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>

namespace headrace {

class Pool {
 public:
  // `threads` in all, the caller's included, 1 to 1024; they are started here, named headrace-1 and so on, take no signals, run on whatever
  // processor the system chooses, and end with the pool. Between runs they sleep. A forked child has the pool without its threads: runs go on,
  // by the caller alone. Throws invalid_argument, or system_error if there are no more threads to be had.
  explicit Pool(int64_t threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int64_t threads() const;

  // Calls task(index, slot) once for each index in [0, count), in any order and thread, and returns when all have returned; it happens before
  // the return. No two calls that run at the same time have the same slot, in [0, threads). A thread that the system runs late is not waited
  // for unless it is inside a task: the others do its part. Tasks do not throw and call no run. Several callers take turns. Throws
  // invalid_argument for 2^24 tasks or more.
  template <class Task>
  void run(int64_t count, Task&& task) {
    run_erased(count, [](void* context, int64_t index, int64_t slot) { (*static_cast<std::remove_reference_t<Task>*>(context))(index, slot); }, &task);
  }

 private:
  using Call = void (*)(void* context, int64_t index, int64_t slot);
  void run_erased(int64_t count, Call call, void* context);

  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace headrace
