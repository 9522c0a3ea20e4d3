/// Lays buffers out one after another in memory that the caller owns. Run over a null base it only
/// adds up sizes, so sizing a buffer and carving it are one function and cannot disagree.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include "moestro/tensor.hpp"

namespace moestro::core {

class Arena {
 public:
  static constexpr std::size_t kAlignment = 256;

  explicit Arena(void* base) : base_(static_cast<std::byte*>(base)) {}

  void* take(std::size_t bytes) {
    void* start = base_ == nullptr ? nullptr : base_ + used_;
    used_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    if (used_ > peak_) peak_ = used_;
    return start;
  }

  TensorView take_tensor(DType dtype, std::initializer_list<std::int64_t> extents) {
    TensorView view = make_view(nullptr, dtype, extents);
    view.data = take(static_cast<std::size_t>(view.numel() * dtype_bytes(dtype)));
    return view;
  }

  std::size_t used() const { return used_; }
  std::size_t peak() const { return peak_; }

  /// Goes back to an earlier used(): what is taken next shares its memory with what was taken since.
  void rewind(std::size_t used) { used_ = used; }

 private:
  std::byte* base_;
  std::size_t used_ = 0;
  std::size_t peak_ = 0;
};

}  // namespace moestro::core
