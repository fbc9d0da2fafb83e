// How a run is shared out.
//
// `ticket` is the one word that says what there is to do: (generation of the run, tasks that nobody has taken). Whoever takes a task brings it
// from (g, n) to (g, n - 1) by compare-and-swap, and has then taken task count - n of run g. The plain description of a run (call, context,
// count) is read between loading the ticket and that swap, and is right if the swap succeeds:
//   - It is not older than run g: it was written before the ticket that was loaded.
//   - It is not newer: the caller writes that of run g + 1 only once all tasks of run g have ended, and the swap succeeds only while one of
//     them is not even taken.
// With an index that grows by fetch_add and a count beside it the second would fail: a worker finds run g exhausted and is put aside just
// before it adds; the caller begins run g + 1; the worker takes index 0 of it with the function of run g. So it would with a swap of
// (g, next index): the worker reads the next run's greater count while the ticket is still that of run g, and takes a task that run g never had.
//
// `ended` counts the tasks of the run that have returned. A worker adds what it has done when it finds nothing more, so the caller waits for
// tasks that were taken, and for no thread.
#include "pool.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "futex.h"

namespace headrace {

namespace {

// More than any machine has; a greater number is a mistake.
constexpr int64_t kMaxThreads = 1024;
// The generation has the other 40 bits. A worker would have to be put aside between two instructions for 2^40 runs to take one for another.
constexpr int kCountBits = 24;
constexpr int64_t kMaxCount = (int64_t{1} << kCountBits) - 1;

constexpr uint64_t left(uint64_t ticket) { return ticket & kMaxCount; }

// New threads inherit the signals that are blocked: those of the pool take none, so handlers run in threads of whoever has set them.
class AllSignalsBlocked {
 public:
  AllSignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~AllSignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

}  // namespace

struct Pool::State {
  const int64_t threads;
  const pid_t process = getpid();
  // One run at a time; held by the caller.
  std::mutex running;

  alignas(64) std::atomic<uint64_t> ticket{0};
  // Of the run. Read by workers that may come too late to use it (see above), so it is atomic, and nothing is ordered by it.
  std::atomic<Call> call{nullptr};
  std::atomic<void*> context{nullptr};
  std::atomic<int64_t> count{0};

  alignas(64) std::atomic<uint32_t> ended{0};
  std::atomic<uint32_t> caller_sleeps{0};

  alignas(64) std::atomic<uint32_t> wake{0};  // what sleeping workers wait for: it changes when they are needed
  std::atomic<int32_t> sleepers{0};
  std::atomic<bool> closing{false};

  std::vector<std::thread> workers;

  explicit State(int64_t number) : threads(number) {}

  // Takes tasks until there are none, and gives how many it has run; `count_of_run` is that of the run they belonged to.
  uint32_t take(int64_t slot, int64_t& count_of_run) {
    uint32_t done = 0;
    uint64_t seen = ticket.load(std::memory_order_acquire);
    while (left(seen)) {
      const Call function = call.load(std::memory_order_relaxed);
      void* const argument = context.load(std::memory_order_relaxed);
      const int64_t tasks = count.load(std::memory_order_relaxed);
      if (!ticket.compare_exchange_weak(seen, seen - 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
      function(argument, tasks - static_cast<int64_t>(left(seen)), slot);
      ++done;
      count_of_run = tasks;
      seen = ticket.load(std::memory_order_acquire);
    }
    return done;
  }

  bool needed() const { return left(ticket.load()) || closing.load(); }

  void work(int64_t slot) {
    for (;;) {
      int64_t tasks = 0;
      // Tasks of two runs are never mixed here: the second begins only when what was done of the first has been added.
      if (const uint32_t done = take(slot, tasks)) {
        const uint32_t sum = ended.fetch_add(done) + done;
        // Either the caller sees this sum before it sleeps, or this sees that it does. After the sum it may be gone and in another run; then
        // the wake is for nothing and does no harm.
        if (sum == static_cast<uint32_t>(tasks) && caller_sleeps.load()) futex_wake(ended, 1, Scope::kThreads);
      }
      if (spin(kSpin, [this] { return needed(); })) {
        if (closing.load()) return;
        continue;
      }
      const uint32_t before = wake.load();
      sleepers.fetch_add(1);
      // Either this sees the ticket, or whoever has set it sees a sleeper, and changes `wake` before or while this waits for it.
      if (!needed()) futex_wait(wake, before, Scope::kThreads);
      sleepers.fetch_sub(1);
    }
  }

  void wake_workers(int64_t most) {
    if (sleepers.load() == 0) return;
    wake.fetch_add(1);
    futex_wake(wake, static_cast<int32_t>(most), Scope::kThreads);
  }

  void run(int64_t tasks, Call function, void* argument) {
    call.store(function, std::memory_order_relaxed);
    context.store(argument, std::memory_order_relaxed);
    count.store(tasks, std::memory_order_relaxed);
    ended.store(0, std::memory_order_relaxed);
    const uint64_t generation = (ticket.load(std::memory_order_relaxed) >> kCountBits) + 1;
    ticket.store(generation << kCountBits | static_cast<uint64_t>(tasks));
    wake_workers(tasks - 1);

    int64_t ignored = 0;
    const uint32_t all = static_cast<uint32_t>(tasks), mine = take(0, ignored);
    const auto others_ended = [&] { return ended.load() == all - mine; };
    if (spin(kSpin, others_ended)) return;
    caller_sleeps.store(1);
    // A worker wakes it when `ended` is the count of all tasks: from now on this thread's are in it.
    ended.fetch_add(mine);
    for (uint32_t seen; (seen = ended.load()) != all;) futex_wait(ended, seen, Scope::kThreads);
    caller_sleeps.store(0);
  }

  void stop() {
    closing.store(true);
    wake.fetch_add(1);
    futex_wake(wake, INT32_MAX, Scope::kThreads);
    for (std::thread& worker : workers) worker.join();
  }
};

Pool::Pool(int64_t threads) {
  if (threads < 1 || threads > kMaxThreads)
    throw std::invalid_argument("a pool of " + std::to_string(threads) + " threads: it must have 1 to " + std::to_string(kMaxThreads));
  state_ = std::make_unique<State>(threads);
  const AllSignalsBlocked while_they_start;
  try {
    state_->workers.reserve(static_cast<size_t>(threads - 1));
    for (int64_t slot = 1; slot < threads; ++slot) {
      state_->workers.emplace_back([state = state_.get(), slot] { state->work(slot); });
      pthread_setname_np(state_->workers.back().native_handle(), ("headrace-" + std::to_string(slot)).c_str());
    }
  } catch (...) {
    state_->stop();
    throw;
  }
}

Pool::~Pool() {
  // After a fork the child has the pool without its threads: runs are the caller's alone, and there is nobody to end. What cannot be joined
  // is left where it is.
  if (state_->process == getpid()) {
    state_->stop();
  } else {
    static_cast<void>(state_.release());
  }
}

int64_t Pool::threads() const { return state_->threads; }

void Pool::run_erased(int64_t count, Call call, void* context) {
  if (count <= 0) return;
  if (count > kMaxCount) throw std::invalid_argument("a run of " + std::to_string(count) + " tasks: a pool takes " + std::to_string(kMaxCount));
  const std::lock_guard<std::mutex> alone(state_->running);
  if (count > 1 && state_->threads > 1) return state_->run(count, call, context);
  for (int64_t index = 0; index < count; ++index) call(context, index, 0);
}

}  // namespace headrace
