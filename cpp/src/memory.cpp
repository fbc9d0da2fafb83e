#include "memory.h"

#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <charconv>
#include <cstdio>
#include <string>

namespace headrace {

namespace {

// Nodes beyond these are not asked about: a mask of one word.
constexpr int kMaxNodes = 64;
constexpr int kInterleave = 3;  // MPOL_INTERLEAVE of linux/mempolicy.h, which is not installed everywhere

std::string read_line(const std::string& path) {
  std::string text;
  if (FILE* file = std::fopen(path.c_str(), "re")) {
    for (int c; (c = std::fgetc(file)) != EOF && c != '\n';) text.push_back(static_cast<char>(c));
    std::fclose(file);
  }
  return text;
}

// NUMA nodes of the processors that this process may use, as a mask. 0: the system does not tell.
uint64_t own_nodes() {
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof(allowed), &allowed)) return 0;  // more processors than a cpu_set_t has
  uint64_t nodes = 0;
  for (int node : parse_cpu_list(read_line("/sys/devices/system/node/online"))) {
    if (node >= kMaxNodes) continue;
    for (int cpu : parse_cpu_list(read_line("/sys/devices/system/node/node" + std::to_string(node) + "/cpulist")))
      if (cpu < CPU_SETSIZE && CPU_ISSET(cpu, &allowed)) nodes |= uint64_t{1} << node;
  }
  return nodes;
}

size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

size_t page_size() {
  static const size_t size = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return size;
}

}  // namespace

std::vector<int> parse_cpu_list(std::string_view text) {
  std::vector<int> numbers;
  const char* at = text.data();
  const char* const end = at + text.size();
  while (at < end) {
    int first = 0, last = 0;
    auto read = std::from_chars(at, end, first);
    if (read.ec != std::errc() || first < 0) return {};
    last = first;
    if (read.ptr < end && *read.ptr == '-') read = std::from_chars(read.ptr + 1, end, last);
    if (read.ec != std::errc() || last < first || last - first > 1 << 16 || (read.ptr < end && *read.ptr != ',')) return {};
    for (int n = first; n <= last; ++n) numbers.push_back(n);
    at = read.ptr + 1;
  }
  return numbers;
}

Memory Memory::allocate(size_t bytes) noexcept {
  if (bytes == 0 || bytes > SIZE_MAX / 2) return {};
  const bool huge = bytes >= kHugePage;
  const size_t length = round_up(bytes, page_size());
  const size_t reserved = huge ? length + kHugePage : length;
  void* mapped = mmap(nullptr, reserved, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) return {};
  uint8_t* const begin = static_cast<uint8_t*>(mapped);
  uint8_t* data = begin;
  if (huge) {
    data += round_up(reinterpret_cast<uintptr_t>(begin), kHugePage) - reinterpret_cast<uintptr_t>(begin);
    if (data > begin) munmap(begin, static_cast<size_t>(data - begin));
    munmap(data + length, static_cast<size_t>(begin + reserved - (data + length)));
    // Both are advice: without them it is as right, and slower.
    madvise(data, length, MADV_HUGEPAGE);
    static const uint64_t nodes = own_nodes();
    if (nodes & (nodes - 1)) syscall(SYS_mbind, data, length, kInterleave, &nodes, kMaxNodes + 1, 0);
  }
  return adopt(data, bytes);
}

Memory::~Memory() {
  if (data_) munmap(data_, round_up(bytes_, page_size()));
}

}  // namespace headrace
