// Sums over the ranks of one host, through memory that they share.
#pragma once

#include <cstddef>
#include <cstdint>

namespace headrace {

enum class GroupStatus : int32_t { kDone = 0, kTimedOut = 1, kBroken = 2 };

class SharedGroup {
 public:
  // Memory that a group of `size` ranks needs for sums of up to `capacity` floats at a time.
  static size_t bytes(int64_t size, int64_t capacity);
  // Over a block of that many zeroed bytes that all ranks have mapped (64-byte aligned).
  SharedGroup(void* memory, int64_t rank, int64_t size, int64_t capacity, double deadline_seconds);

  // data [count] becomes the sum over ranks, on every rank, added in the order of ranks so that all have the same bits; any count. Waits
  // without spinning for long, and gives up after the deadline: from then on every call of every rank is kBroken.
  GroupStatus all_reduce(float* data, int64_t count);
  // Lets all others that wait, now or later, return kBroken.
  void abandon();

 private:
  unsigned char* memory_;
  int64_t rank_, size_, capacity_;
  double deadline_;
  uint32_t round_ = 0;
};

}  // namespace headrace
