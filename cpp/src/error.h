// What goes wrong inside the library and what C functions make of it: no exception leaves it.
#pragma once

#include <exception>
#include <string>

namespace headrace {

// Of this thread, for headrace_error().
extern thread_local std::string last_error;

// What `work` gives, or, where it throws, the null of that type, with the text in last_error.
template <class Work>
auto guarded(Work&& work) noexcept -> decltype(work()) {
  try {
    return work();
  } catch (const std::exception& error) {
    last_error = error.what();
  } catch (...) {
    last_error = "an unknown failure";
  }
  return {};
}

}  // namespace headrace
