#include "support/tensor.hpp"

#include <algorithm>
#include <cstring>

#include "support/report.hpp"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace moestro::test {
namespace {

constexpr std::size_t kGuardBytes = 256;
constexpr std::size_t kSmallBytes = 1U << 16U;
constexpr unsigned char kGuard = 0xc3;

/// Under AddressSanitizer the guards of host memory are out of bounds for reads too.
[[maybe_unused]] void forbid([[maybe_unused]] const void* pointer, [[maybe_unused]] std::size_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
  ASAN_POISON_MEMORY_REGION(pointer, bytes);
#endif
}
[[maybe_unused]] void allow([[maybe_unused]] const void* pointer, [[maybe_unused]] std::size_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
  ASAN_UNPOISON_MEMORY_REGION(pointer, bytes);
#endif
}

}  // namespace

GuardedBuffer::GuardedBuffer(Device& device, std::size_t bytes, std::string name, std::size_t misalignment)
    : GuardedBuffer(device, std::vector<unsigned char>(bytes, 0xff), std::move(name), misalignment) {}

GuardedBuffer::GuardedBuffer(Device& device, const std::vector<unsigned char>& content, std::string name,
                             std::size_t misalignment)
    : device_(device),
      bytes_(content.size()),
      name_(std::move(name)),
      offset_(kGuardBytes + misalignment),
      allocation_(device.allocate(offset_ + bytes_ + kGuardBytes)) {
  std::vector<unsigned char> image(offset_ + bytes_ + kGuardBytes, kGuard);
  std::copy(content.begin(), content.end(), image.begin() + static_cast<std::ptrdiff_t>(offset_));
  device_.upload(allocation_, image.data(), image.size());
  if (device_.on_host()) forbid_guards();
}

GuardedBuffer::~GuardedBuffer() {
  check_guards();
  device_.release(allocation_);
}

void GuardedBuffer::forbid_guards() const {
  forbid(allocation_, offset_ / 8 * 8);  // ASan's grain
  forbid(static_cast<unsigned char*>(data()) + bytes_, kGuardBytes);
}

std::vector<unsigned char> GuardedBuffer::read(std::size_t first, std::size_t count) const {
  std::vector<unsigned char> image(count);
  device_.download(image.data(), static_cast<unsigned char*>(allocation_) + first, count);
  return image;
}

void GuardedBuffer::check_guards() const {
  // One copy where it is a small one: on a device it is their number that takes time.
  if (bytes_ <= kSmallBytes) {
    (void)download();
    return;
  }
  if (device_.on_host()) allow(allocation_, offset_ + bytes_ + kGuardBytes);
  check_guard(read(0, offset_), "in front of");
  check_guard(read(offset_ + bytes_, kGuardBytes), "behind");
  if (device_.on_host()) forbid_guards();
}

void GuardedBuffer::check_guard(const std::vector<unsigned char>& guard, const char* where) const {
  if (!std::all_of(guard.begin(), guard.end(), [](unsigned char byte) { return byte == kGuard; })) {
    report_failure(name_ + ": written " + where + " its memory");
  }
}

void* GuardedBuffer::data() const {
  return static_cast<unsigned char*>(allocation_) + offset_;
}

void GuardedBuffer::upload(const std::vector<unsigned char>& content) {
  if (content.size() != bytes_) std::abort();
  device_.upload(data(), content.data(), bytes_);
}

std::vector<unsigned char> GuardedBuffer::download() const {
  if (device_.on_host()) allow(allocation_, offset_ + bytes_ + kGuardBytes);
  const std::vector<unsigned char> image = read(0, offset_ + bytes_ + kGuardBytes);
  if (device_.on_host()) forbid_guards();
  const auto content = image.begin() + static_cast<std::ptrdiff_t>(offset_);
  const auto end = content + static_cast<std::ptrdiff_t>(bytes_);
  check_guard({image.begin(), content}, "in front of");
  check_guard({end, image.end()}, "behind");
  return {content, end};
}

std::size_t GuardedBuffer::high_water() const {
  const std::vector<unsigned char> content = download();
  std::size_t used = content.size();
  while (used > 0 && content[used - 1] == 0xff) --used;
  return used;
}

void Tensor::place(const std::string& name, std::vector<std::int64_t> shape, DType dtype,
                   const Layout& layout) {
  name_ = name;
  view_.dtype = dtype;
  view_.rank = static_cast<int>(shape.size());
  if (layout.transposed) std::swap(shape[shape.size() - 1], shape[shape.size() - 2]);
  std::copy(shape.begin(), shape.end(), view_.extent);
  std::int64_t stride = 1;
  std::int64_t last = 0;  // offset of the last element
  for (int axis = view_.rank - 1; axis >= 0; --axis) {
    view_.stride[axis] = stride;
    last += std::max<std::int64_t>(view_.extent[axis] - 1, 0) * stride;
    stride *= view_.extent[axis];
    if (axis == view_.rank - 1) stride += layout.row_padding;
    if (axis == 1 && view_.rank == 3) stride += layout.outer_padding;
  }
  const std::int64_t element_bytes = dtype_bytes(dtype);
  const std::int64_t count = view_.numel() == 0 ? 0 : last + 1;
  if (layout.transposed) view_ = transposed(view_);
  misalignment_ = static_cast<std::size_t>(layout.misalignment * element_bytes);
  uploaded_.assign(static_cast<std::size_t>(count * element_bytes), 0xff);
}

void Tensor::upload(Device& device) {
  buffer_ = std::make_shared<GuardedBuffer>(device, uploaded_, name_, misalignment_);
  view_.data = buffer_->data();
}

TensorView Tensor::host_view(std::vector<unsigned char>& image) const {
  TensorView view = view_;
  view.data = image.data();
  return view;
}

namespace {

template <typename Visit>
void for_each_element(const TensorView& view, Visit visit) {
  const auto extent = [&](int axis) { return axis < view.rank ? view.extent[axis] : 1; };
  for (std::int64_t i = 0; i < extent(0); ++i) {
    for (std::int64_t j = 0; j < extent(1); ++j) {
      for (std::int64_t k = 0; k < extent(2); ++k) visit(i, j, k);
    }
  }
}

}  // namespace

Tensor::Tensor(Device& device, const std::string& name, const Array& array, DType dtype, Layout layout) {
  if (!array.present()) return;
  place(name, array.shape, dtype, layout);
  const TensorView image = host_view(uploaded_);
  for_each_element(image, [&](std::int64_t i, std::int64_t j, std::int64_t k) {
    store_real(image, array.at(i, j, k), i, j, k);
  });
  upload(device);
}

Tensor Tensor::output(Device& device, const std::string& name, std::vector<std::int64_t> shape, DType dtype,
                      Layout layout) {
  Tensor tensor;
  tensor.place(name, std::move(shape), dtype, layout);
  tensor.upload(device);
  return tensor;
}

Tensor Tensor::integers(Device& device, const std::string& name, std::vector<std::int64_t> shape,
                        const std::vector<std::int64_t>& values, DType dtype, Layout layout) {
  Tensor tensor;
  tensor.place(name, std::move(shape), dtype, layout);
  const TensorView image = tensor.host_view(tensor.uploaded_);
  std::size_t next = 0;
  for_each_element(image, [&](std::int64_t i, std::int64_t j, std::int64_t k) {
    const std::int64_t offset = element_offset(image, i, j, k);
    const std::int64_t value = values[next++];
    if (dtype == DType::kI64) {
      static_cast<std::int64_t*>(image.data)[offset] = value;
    } else {
      static_cast<std::int32_t*>(image.data)[offset] = static_cast<std::int32_t>(value);
    }
  });
  tensor.upload(device);
  return tensor;
}

TensorView Tensor::view() const {
  return present() ? view_ : TensorView{};
}

Array Tensor::read() const {
  if (!present()) return {};
  std::vector<unsigned char> content = buffer_->download();
  const TensorView image = host_view(content);
  Array array(std::vector<std::int64_t>(view_.extent, view_.extent + view_.rank));
  const auto element_bytes = static_cast<std::size_t>(dtype_bytes(view_.dtype));
  std::vector<bool> owned(content.size() / element_bytes, false);
  for_each_element(image, [&](std::int64_t i, std::int64_t j, std::int64_t k) {
    array.at(i, j, k) = load_real(image, i, j, k);
    owned[static_cast<std::size_t>(element_offset(image, i, j, k))] = true;
  });
  for (std::size_t e = 0; e < owned.size(); ++e) {
    if (owned[e]) continue;
    for (std::size_t b = 0; b < element_bytes; ++b) {
      if (content[e * element_bytes + b] == 0xff) continue;
      report_failure(name_ + ": written in the gap between its rows, at element offset " + std::to_string(e));
      return array;
    }
  }
  return array;
}

std::vector<std::int64_t> Tensor::read_integers() const {
  std::vector<unsigned char> content = buffer_->download();
  const TensorView image = host_view(content);
  std::vector<std::int64_t> values;
  for_each_element(image, [&](std::int64_t i, std::int64_t j, std::int64_t) {
    values.push_back(load_integer(image, i, j));
  });
  return values;
}

void Tensor::expect_unchanged() const {
  if (present() && buffer_->download() != uploaded_) report_failure(name_ + ": an input was changed");
}

IndexBuffers::IndexBuffers(Device& device, std::int64_t num_slots, std::int64_t num_experts) {
  const auto add = [&](const char* name, std::int64_t count) {
    buffers_.push_back(std::make_shared<GuardedBuffer>(device, static_cast<std::size_t>(4 * count), name));
  };
  add("expert_token_indices", num_slots);
  add("expert_token_offsets", num_experts + 1);
  add("token_index_map", num_slots);
  add("tiles", 4 * max_tiles(num_slots, num_experts));
  add("num_tiles", 1);
  add("expert_order", num_experts);
  add("token_expert_indices", num_slots);
}

Index IndexBuffers::index() const {
  const auto list = [&](std::size_t i) { return static_cast<std::int32_t*>(buffers_[i]->data()); };
  return {list(0), list(1), list(2), list(3), list(4), list(5), list(6)};
}

void IndexBuffers::upload(const IndexLists& lists) {
  const std::vector<std::int32_t>* all[] = {&lists.expert_token_indices,
                                            &lists.expert_token_offsets,
                                            &lists.token_index_map,
                                            &lists.tiles,
                                            &lists.num_tiles,
                                            &lists.expert_order,
                                            &lists.token_expert_indices};
  for (std::size_t i = 0; i < buffers_.size(); ++i) {
    const auto* bytes = reinterpret_cast<const unsigned char*>(all[i]->data());
    buffers_[i]->upload({bytes, bytes + 4 * all[i]->size()});
  }
}

IndexLists IndexBuffers::read() const {
  const auto list = [&](std::size_t i) {
    const std::vector<unsigned char> content = buffers_[i]->download();
    std::vector<std::int32_t> values(content.size() / 4);
    if (!values.empty()) std::memcpy(values.data(), content.data(), content.size());
    return values;
  };
  return {list(0), list(1), list(2), list(3), list(4), list(5), list(6)};
}

}  // namespace moestro::test
