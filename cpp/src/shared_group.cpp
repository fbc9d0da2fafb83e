// The memory holds a header and, for each rank, two buffers of `capacity` floats. A sum goes through it in pieces of that many floats; a rank
// puts what others are to read into a buffer of its own, meets them, and reads theirs. The two buffers take turns from meeting to meeting, so
// nobody waits for others to have read: whoever fills a buffer again has met everybody since, and who came to that meeting had read it.
#include "shared_group.h"

#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>
#include <system_error>

#include "futex.h"

namespace headrace {

namespace {

constexpr int64_t kMaxRanks = 1024;
constexpr int64_t kMaxCapacity = int64_t{1} << 24;
// From so many ranks and floats on each rank adds a part of them for all, at the price of a second meeting.
constexpr int64_t kShareRanks = 3;
constexpr int64_t kShareFloats = 4096;
constexpr int64_t kLine = 16;  // floats in 64 bytes

int64_t line_up(int64_t floats) { return (floats + kLine - 1) / kLine * kLine; }

// Processors for the threads of this process: where there are fewer than ranks, one that spins keeps the one that it waits for from running.
int64_t processors() {
  cpu_set_t allowed;
  return sched_getaffinity(0, sizeof(allowed), &allowed) ? kMaxRanks : CPU_COUNT(&allowed);
}

}  // namespace

// Bit 0 of `meeting` says that the group is broken; the rest counts meetings, and may wrap. It is the word that ranks sleep on, so both a
// meeting that is complete and a group that breaks change it, and no rank sleeps through either.
struct SharedGroup::Header {
  alignas(64) std::atomic<uint32_t> arrived;
  alignas(64) std::atomic<uint32_t> meeting;
  std::atomic<uint32_t> sleepers;
};

size_t SharedGroup::bytes(int64_t size, int64_t capacity) {
  return sizeof(Header) + static_cast<size_t>(size * 2 * line_up(capacity)) * sizeof(float);
}

SharedGroup::SharedGroup(int file, int64_t rank, int64_t size, int64_t capacity, double deadline_seconds) : rank_(rank), size_(size), capacity_(capacity) {
  if (size < 1 || size > kMaxRanks || rank < 0 || rank >= size)
    throw std::invalid_argument("rank " + std::to_string(rank) + " of " + std::to_string(size) + ": a group has 1 to " + std::to_string(kMaxRanks) + " ranks");
  if (capacity < 1 || capacity > kMaxCapacity)
    throw std::invalid_argument("a capacity of " + std::to_string(capacity) + " floats: it must be 1 to " + std::to_string(kMaxCapacity));
  if (!(deadline_seconds > 0 && deadline_seconds <= 1e6))
    throw std::invalid_argument("a deadline of " + std::to_string(deadline_seconds) + " s: it must be above 0, and at most 1000000");
  deadline_ = static_cast<int64_t>(deadline_seconds * 1e9);
  spin_ = size <= processors() ? kSpin : 0;
  // What lies behind the end of a file cannot be read: a signal would end the process.
  struct stat found;
  if (fstat(file, &found)) throw std::runtime_error("shared memory of the group: " + std::generic_category().message(errno));
  if (static_cast<size_t>(found.st_size) < bytes(size, capacity))
    throw std::invalid_argument("shared memory of " + std::to_string(found.st_size) + " bytes: the group needs " + std::to_string(bytes(size, capacity)));
  void* mapped = mmap(nullptr, bytes(size, capacity), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, file, 0);
  if (mapped == MAP_FAILED) throw std::runtime_error("shared memory of the group: " + std::generic_category().message(errno));
  header_ = static_cast<Header*>(mapped);
}

SharedGroup::~SharedGroup() { munmap(header_, bytes(size_, capacity_)); }

// Where a rank puts what others read after that meeting.
float* SharedGroup::buffer(int64_t rank, uint32_t meeting) const {
  return reinterpret_cast<float*>(header_ + 1) + (rank * 2 + (meeting & 1)) * line_up(capacity_);
}

void SharedGroup::abandon() {
  header_->meeting.fetch_or(1);
  futex_wake(header_->meeting, INT32_MAX, Scope::kProcesses);
}

// Returns when all ranks have come; what each has written before is then seen by all.
GroupStatus SharedGroup::meet() {
  std::atomic<uint32_t>& meeting = header_->meeting;
  const uint32_t before = meetings_++ * 2;
  if (header_->arrived.fetch_add(1) + 1 == static_cast<uint32_t>(size_)) {
    // Nobody comes to the next meeting before this one is said to be complete.
    header_->arrived.store(0);
    const uint32_t old = meeting.fetch_add(2);
    // Either a rank sees that before it sleeps, or it is counted as a sleeper here. One that was killed asleep is counted for ever, which costs
    // a call for nothing.
    if (header_->sleepers.load()) futex_wake(meeting, INT32_MAX, Scope::kProcesses);
    return old & 1 ? GroupStatus::kBroken : GroupStatus::kDone;
  }
  if (!spin(spin_, [&] { return meeting.load(std::memory_order_acquire) != before; })) {
    const int64_t end = monotonic_nanoseconds() + deadline_;
    header_->sleepers.fetch_add(1);
    while (meeting.load() == before) {
      const int64_t left = end - monotonic_nanoseconds();
      if (left <= 0) break;
      futex_wait(meeting, before, Scope::kProcesses, left);
    }
    header_->sleepers.fetch_sub(1);
    uint32_t expected = before;
    // The last of the others may come at this very moment: then nobody has timed out.
    if (meeting.compare_exchange_strong(expected, before | 1)) {
      futex_wake(meeting, INT32_MAX, Scope::kProcesses);
      return GroupStatus::kTimedOut;
    }
  }
  return meeting.load(std::memory_order_acquire) & 1 ? GroupStatus::kBroken : GroupStatus::kDone;
}

// out[i] = what rank 0 has put there, plus what rank 1 has, and so on, for i in [begin, end); a rank reads its own numbers where they are.
void SharedGroup::add_ranks(uint32_t meeting, const float* own, int64_t begin, int64_t end, float* out) const {
  // By pieces that stay in the first cache, however many ranks there are.
  constexpr int64_t kPiece = 1024;
  float sums[kPiece];
  for (int64_t at = begin; at < end; at += kPiece) {
    const int64_t n = std::min(kPiece, end - at);
    const size_t length = static_cast<size_t>(n) * sizeof(float);
    std::memcpy(sums, (rank_ == 0 ? own : buffer(0, meeting)) + at, length);
    for (int64_t rank = 1; rank < size_; ++rank) {
      const float* theirs = (rank == rank_ ? own : buffer(rank, meeting)) + at;
      for (int64_t i = 0; i < n; ++i) sums[i] += theirs[i];
    }
    std::memcpy(out + at, sums, length);
  }
}

// One meeting: each rank adds everything.
GroupStatus SharedGroup::sum_each(float* data, int64_t count) {
  const uint32_t meeting = meetings_;
  std::memcpy(buffer(rank_, meeting), data, static_cast<size_t>(count) * sizeof(float));
  const GroupStatus status = meet();
  if (status == GroupStatus::kDone) add_ranks(meeting, data, 0, count, data);
  return status;
}

// Two meetings: each rank adds its share, then takes those of the others.
GroupStatus SharedGroup::sum_shared(float* data, int64_t count) {
  const uint32_t first = meetings_, second = first + 1;
  const auto begin = [&](int64_t rank) { return std::min(count, line_up((count + size_ - 1) / size_) * rank); };
  const auto copy = [&](float* to, const float* from, int64_t rank) {
    std::memcpy(to + begin(rank), from + begin(rank), static_cast<size_t>(begin(rank + 1) - begin(rank)) * sizeof(float));
  };
  for (int64_t rank = 0; rank < size_; ++rank)
    if (rank != rank_) copy(buffer(rank_, first), data, rank);
  GroupStatus status = meet();
  if (status != GroupStatus::kDone) return status;
  add_ranks(first, data, begin(rank_), begin(rank_ + 1), buffer(rank_, second));
  status = meet();
  if (status != GroupStatus::kDone) return status;
  for (int64_t rank = 0; rank < size_; ++rank) copy(data, buffer(rank, second), rank);
  return GroupStatus::kDone;
}

GroupStatus SharedGroup::all_reduce(float* data, int64_t count) {
  if (size_ == 1) return GroupStatus::kDone;
  for (int64_t at = 0; at < count; at += capacity_) {
    const int64_t part = std::min(capacity_, count - at);
    const bool share = size_ >= kShareRanks && part >= kShareFloats;
    const GroupStatus status = share ? sum_shared(data + at, part) : sum_each(data + at, part);
    if (status != GroupStatus::kDone) return status;
  }
  return GroupStatus::kDone;
}

}  // namespace headrace
