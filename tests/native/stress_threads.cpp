// Pools and groups at work under the thread sanitizer, which ends the process where two threads touch something in no order. The first argument is
// for how many milliseconds each; ends with 0 if all that was computed is right.
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

// In one piece, which takes half as long to compile.
#include "memory.cpp"
#include "pool.cpp"
#include "shared_group.cpp"

using namespace headrace;
using Clock = std::chrono::steady_clock;

namespace {

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "%s\n", what);
  std::_Exit(1);
}

// Runs of few tasks and of many, of none and of some length, with pauses in which workers fall asleep or are about to. What tasks write is
// plain memory: only the pool keeps it in order.
void stress_pool(unsigned seed, int64_t threads, Clock::time_point end) {
  std::mt19937 random(seed);
  Pool pool(threads);
  std::vector<int> seen(2000), by_slot(static_cast<size_t>(threads));
  int expected = 0;
  while (Clock::now() < end) {
    const int count = static_cast<int>(random() % (random() % 4 ? 8 : seen.size()));
    const int length = static_cast<int>(random() % 50);
    for (int i = 0; i < count; ++i) seen[i] = 0;
    pool.run(count, [&](int64_t index, int64_t slot) {
      ++seen[index];
      ++by_slot[slot];
      for (std::atomic<int> i = 0; i < length; ++i) {}
    });
    for (int i = 0; i < count; ++i) require(seen[i] == 1, "an index was not run once");
    expected += count;
    if (random() % 32 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 200));
  }
  for (int number : by_slot) expected -= number;
  require(expected == 0, "slots have counted another number of tasks");
}

// Sums of all sizes, through memory that is mapped once for each rank, as in processes; the sanitizer sees each mapping as memory of its own,
// so what it can say is about the words that order them. That the buffers are not mixed up is told by the sums.
void stress_group(int64_t size, Clock::time_point end) {
  const int64_t capacity = 6000;
  const int file = memfd_create("stress", 0);
  require(file >= 0 && !ftruncate(file, static_cast<off_t>(SharedGroup::bytes(size, capacity))), "no memory to share");
  std::vector<std::thread> ranks;
  for (int64_t rank = 0; rank < size; ++rank)
    ranks.emplace_back([=] {
      SharedGroup group(file, rank, size, capacity, 60);
      std::mt19937 random(1);  // the same on all ranks
      std::vector<float> data(8000), more(1);
      for (int turn = 0; more[0] == 0; ++turn) {
        const size_t count = random() % 3 ? random() % 20 + 1 : random() % data.size() + 1;
        for (size_t i = 0; i < count; ++i) data[i] = static_cast<float>((turn + static_cast<int>(i)) % 1000 * (rank + 1));
        require(group.all_reduce(data.data(), static_cast<int64_t>(count)) == GroupStatus::kDone, "a sum was not made");
        for (size_t i = 0; i < count; ++i)
          require(data[i] == static_cast<float>((turn + static_cast<int>(i)) % 1000 * (size * (size + 1) / 2)), "a sum is wrong");
        // All end in the same turn: when one of them is past the end.
        more[0] = Clock::now() < end ? 0.f : 1.f;
        require(group.all_reduce(more.data(), 1) == GroupStatus::kDone, "a sum was not made");
      }
    });
  for (std::thread& rank : ranks) rank.join();
  close(file);
}

void check_lists() {
  require(parse_cpu_list("0-2,8") == std::vector<int>{0, 1, 2, 8}, "0-2,8");
  require(parse_cpu_list("5") == std::vector<int>{5}, "5");
  for (const char* text : {"", "a", "3-1", "1-", "0-99999999", "1;2"}) require(parse_cpu_list(text).empty(), text);
}

}  // namespace

int main(int, char** arguments) {
  const auto span = std::chrono::milliseconds(std::atoi(arguments[1]));
  check_lists();
  const auto end = Clock::now() + span;
  std::vector<std::thread> pools;
  for (unsigned i = 0; i < 3; ++i) pools.emplace_back([=] { stress_pool(i, 2 + 3 * i, end); });
  for (std::thread& each : pools) each.join();
  for (int64_t threads = 1; threads < 20; ++threads) Pool pool(threads);
  for (int64_t size = 2; size < 5; ++size) stress_group(size, Clock::now() + span / 3);
}
