/// Tensors in guarded device memory. Outside its elements every byte is known: guard bytes in front and
/// behind, and NaN (0xff) in whatever was not written yet and in the gaps between strided rows. So a
/// read outside of a tensor poisons the result, and a write outside of it is seen.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "moestro/dispatch.hpp"
#include "support/array.hpp"
#include "support/device.hpp"

namespace moestro::test {

class GuardedBuffer {
 public:
  /// Its `bytes`, poisoned, start at a 256-byte boundary plus `misalignment`.
  GuardedBuffer(Device& device, std::size_t bytes, std::string name, std::size_t misalignment = 0);
  GuardedBuffer(Device& device, const std::vector<unsigned char>& content, std::string name,
                std::size_t misalignment = 0);
  ~GuardedBuffer();
  GuardedBuffer(const GuardedBuffer&) = delete;
  GuardedBuffer& operator=(const GuardedBuffer&) = delete;

  void* data() const;
  std::size_t bytes() const { return bytes_; }
  void upload(const std::vector<unsigned char>& content);
  /// The content; fails the running test where a guard byte has changed.
  std::vector<unsigned char> download() const;
  void poison() { upload(std::vector<unsigned char>(bytes_, 0xff)); }
  /// Bytes up to the last one that is not poison.
  std::size_t high_water() const;

 private:
  std::vector<unsigned char> read(std::size_t first, std::size_t count) const;  ///< of the allocation
  void check_guards() const;
  void check_guard(const std::vector<unsigned char>& guard, const char* where) const;
  void forbid_guards() const;  ///< on the host

  Device& device_;
  std::size_t bytes_;
  std::string name_;
  std::size_t offset_;
  void* allocation_;
};

/// How a tensor lies in memory.
struct Layout {
  std::int64_t row_padding = 0;    ///< elements between rows of the last axis
  std::int64_t outer_padding = 0;  ///< elements more between entries of axis 0 of a rank-3 tensor
  std::int64_t misalignment = 0;   ///< elements by which the first one is off a 256-byte boundary
  bool transposed = false;         ///< last two axes exchanged in memory
};

/// As the forced path takes it.
inline Layout forced_layout(const Layout& layout) {
  if (!hopper_is_forced()) return layout;
  return {.row_padding = 8 * layout.row_padding, .outer_padding = 8 * layout.outer_padding};
}

class Tensor {
 public:
  Tensor() = default;  ///< absent
  /// An input; absent when `array` is.
  Tensor(Device& device, const std::string& name, const Array& array, DType dtype, Layout layout = {});
  /// An output, poisoned.
  static Tensor output(Device& device, const std::string& name, std::vector<std::int64_t> shape, DType dtype,
                       Layout layout = {});
  static Tensor integers(Device& device, const std::string& name, std::vector<std::int64_t> shape,
                         const std::vector<std::int64_t>& values, DType dtype, Layout layout = {});

  bool present() const { return buffer_ != nullptr; }
  TensorView view() const;
  /// The elements now; fails the running test where a guard or a gap has changed.
  Array read() const;
  std::vector<std::int64_t> read_integers() const;
  /// All bytes of the memory it spans, for comparisons bit for bit.
  std::vector<unsigned char> bytes() const {
    return buffer_ ? buffer_->download() : std::vector<unsigned char>();
  }
  /// Fails the running test when any byte differs from what was uploaded.
  void expect_unchanged() const;

 private:
  /// Where its elements lie, in poison.
  void place(const std::string& name, std::vector<std::int64_t> shape, DType dtype, const Layout& layout);
  void upload(Device& device);
  TensorView host_view(std::vector<unsigned char>& image) const;

  std::shared_ptr<GuardedBuffer> buffer_;
  TensorView view_;
  std::string name_;
  std::size_t misalignment_ = 0;
  std::vector<unsigned char> uploaded_;
};

/// The lists of an Index, on the host.
struct IndexLists {
  std::vector<std::int32_t> expert_token_indices, expert_token_offsets, token_index_map, tiles, num_tiles,
      expert_order, token_expert_indices;
  std::int64_t num_rows() const { return expert_token_offsets.back(); }
};

/// An Index in guarded memory of exactly the documented sizes.
class IndexBuffers {
 public:
  IndexBuffers(Device& device, std::int64_t num_slots, std::int64_t num_experts);
  void upload(const IndexLists& lists);
  Index index() const;
  IndexLists read() const;

 private:
  std::vector<std::shared_ptr<GuardedBuffer>> buffers_;
};

/// A call's workspace: exactly the bytes it may use.
class Workspace {
 public:
  Workspace(const BackendUnderTest& backend, std::size_t bytes)
      : buffer_(*backend.device, bytes, "workspace"), context_(backend.context()) {
    context_.workspace = buffer_.data();
    context_.workspace_bytes = bytes;
  }
  const Context& context() const { return context_; }
  GuardedBuffer& buffer() { return buffer_; }

 private:
  GuardedBuffer buffer_;
  Context context_;
};

}  // namespace moestro::test
