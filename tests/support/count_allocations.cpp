#include "support/count_allocations.hpp"

#include <atomic>
#include <cstdlib>
#include <new>

namespace {
std::atomic<std::size_t> total_bytes{0};
}  // namespace

// In a file of its own: where the compiler sees new and delete together with free, it warns.
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  total_bytes += bytes;
  return std::malloc(bytes == 0 ? 1 : bytes);
}
void* operator new(std::size_t bytes) {
  void* pointer = operator new(bytes, std::nothrow);
  if (pointer == nullptr) throw std::bad_alloc();
  return pointer;
}
void operator delete(void* pointer) noexcept {
  std::free(pointer);
}
void operator delete(void* pointer, std::size_t) noexcept {
  std::free(pointer);
}
void operator delete(void* pointer, const std::nothrow_t&) noexcept {
  std::free(pointer);
}

namespace moestro::test {

std::size_t allocated_bytes() {
  return total_bytes;
}

}  // namespace moestro::test
