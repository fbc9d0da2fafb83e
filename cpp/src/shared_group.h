// Sums over the ranks of one host, through memory that they share.
#pragma once

#include <cstddef>
#include <cstdint>

namespace headrace {

enum class GroupStatus : int32_t { kDone = 0, kTimedOut = 1, kBroken = 2 };

// One rank's part in a group. Ranks are processes, or threads, and each has its own.
class SharedGroup {
 public:
  // Bytes of memory that a group needs for sums of `capacity` floats at a time.
  static size_t bytes(int64_t size, int64_t capacity);
  // `file` is shared memory of that many zeroed bytes, which this maps; it may be closed afterwards. All ranks give the same size and
  // capacity, and have been made before one of them sums. Throws invalid_argument and runtime_error.
  SharedGroup(int file, int64_t rank, int64_t size, int64_t capacity, double deadline_seconds);
  ~SharedGroup();
  SharedGroup(const SharedGroup&) = delete;
  SharedGroup& operator=(const SharedGroup&) = delete;

  // data [count] becomes the sum over ranks, on every rank, added in the order of ranks so that all have the same bits; any count, the same on
  // all. Waits asleep, after a moment, and gives up after the deadline: from then on every call of every rank is kBroken, those that wait
  // included. What is in data after anything but kDone is of no use.
  GroupStatus all_reduce(float* data, int64_t count);
  // Lets all ranks that wait, now or later, return kBroken.
  void abandon();

 private:
  struct Header;

  GroupStatus meet();
  GroupStatus sum_each(float* data, int64_t count);
  GroupStatus sum_shared(float* data, int64_t count);
  void add_ranks(uint32_t meeting, const float* own, int64_t begin, int64_t end, float* out) const;
  float* buffer(int64_t rank, uint32_t meeting) const;

  Header* header_ = nullptr;
  int64_t rank_, size_, capacity_, deadline_, spin_;
  uint32_t meetings_ = 0;  // that this rank has come to
};

}  // namespace headrace
