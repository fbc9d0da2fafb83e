// C functions of sums over the ranks of one host.
#include "api.h"
#include "error.h"
#include "shared_group.h"

using headrace::GroupStatus;
using headrace::guarded;
using headrace::last_error;
using headrace::SharedGroup;

int64_t headrace_group_bytes(int64_t size, int64_t capacity) { return static_cast<int64_t>(SharedGroup::bytes(size, capacity)); }

SharedGroup* headrace_group_create(int32_t file, int64_t rank, int64_t size, int64_t capacity, double deadline_seconds) {
  return guarded([&] { return new SharedGroup(file, rank, size, capacity, deadline_seconds); });
}

void headrace_group_destroy(SharedGroup* group) { delete group; }

int32_t headrace_group_sum(void* group, float* data, int64_t count) {
  const GroupStatus status = static_cast<SharedGroup*>(group)->all_reduce(data, count);
  if (status == GroupStatus::kTimedOut) last_error = "a sum over the ranks of this host: not all of them came to it in time";
  if (status == GroupStatus::kBroken) last_error = "a sum over the ranks of this host: one of them has given up waiting for the others, or has ended";
  return static_cast<int32_t>(status);
}

void headrace_group_abandon(SharedGroup* group) { group->abandon(); }
