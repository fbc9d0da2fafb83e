// Memory for what is large and is read by all threads: matrices and the KV cache.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

namespace headrace {

// Zeroed memory that the system gives page by page, when it is first touched, and takes back at the end.
//
// It begins on a 64-byte boundary; of kHugePage bytes or more on a huge page, and the system is asked for huge pages, which read a third
// faster: many small matrices belong in one block. Where the processors that this process may use are of more than one NUMA node, the pages
// are dealt to these nodes in turn, since any thread reads any part.
class Memory {
 public:
  static constexpr size_t kHugePage = size_t{2} << 20;

  Memory() = default;
  // What is not to be had, 0 bytes included, is an empty Memory: data() is null.
  static Memory allocate(size_t bytes) noexcept;
  Memory(Memory&& other) noexcept : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  Memory& operator=(Memory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Memory();

  uint8_t* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  explicit operator bool() const { return data_ != nullptr; }

  // Whoever takes it gives it back by `adopt`.
  uint8_t* release() { return bytes_ = 0, std::exchange(data_, nullptr); }
  static Memory adopt(uint8_t* data, size_t bytes) {
    Memory taken;
    taken.data_ = data, taken.bytes_ = bytes;
    return taken;
  }

 private:
  uint8_t* data_ = nullptr;
  size_t bytes_ = 0;
};

// The kernel's lists of processors, "0-3,8": the numbers in it, or none if it is not one.
std::vector<int> parse_cpu_list(std::string_view text);

}  // namespace headrace
