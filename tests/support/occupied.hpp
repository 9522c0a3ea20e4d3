/// A kernel that has some of the multiprocessors for itself, as a collective would.
#pragma once

namespace moestro::test {

/// Holds `count` multiprocessors of the current device, with all of their shared memory, from here to the
/// destructor; at most for a minute. Kernels must have run before: to load one waits for all that run.
class Occupied {
 public:
  explicit Occupied(int count);
  Occupied(const Occupied&) = delete;
  Occupied& operator=(const Occupied&) = delete;
  ~Occupied();

 private:
  int* stop_ = nullptr;     ///< in host memory
  void* stream_ = nullptr;  ///< a cudaStream_t
};

}  // namespace moestro::test
