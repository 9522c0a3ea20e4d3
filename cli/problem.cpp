#include "problem.hpp"

#include <algorithm>
#include <cmath>
#include <new>

#include "common/element_access.hpp"
#include "support/random.hpp"

namespace moestro::cli {

Problem::Problem(const LayerConfig& config, const test::BackendUnderTest& target,
                 test::RoutingKind routing_kind, std::uint64_t seed)
    : config_(config), device_(*target.device), seed_(seed) {
  const std::int64_t num_tokens = config.num_tokens;
  const std::int64_t num_experts = config.num_experts;
  const std::int64_t d = config.d_model;
  const std::int64_t n = config.d_ff;
  const std::int64_t width = config.h_width();
  const DType dtype = config.dtype;
  const DType real = accumulation_dtype(dtype);

  test::Rng rng(seed);
  test::RoutingOptions options;
  options.kind = routing_kind;
  expert_ids_ = test::make_routing(rng, num_tokens, num_experts, config.top_k, options).ids;
  std::vector<std::int32_t> ids(expert_ids_.begin(), expert_ids_.end());

  // Unit-scale x and dY, and weights that keep H, Y and the gradients at unit scale.
  const double unit = std::sqrt(3.0);
  const double up = unit / std::sqrt(static_cast<double>(d));
  const double down = unit / std::sqrt(static_cast<double>(n));
  forward_.x = random(dtype, {num_tokens, d}, -unit, unit);
  forward_.expert_ids = tensor(DType::kI32, {num_tokens, config.top_k});
  device_.upload(forward_.expert_ids.data, ids.data(), ids.size() * sizeof(std::int32_t));
  forward_.weights = random(real, {num_tokens, config.top_k}, 0.1, 1.0);
  forward_.w_up = random(dtype, {num_experts, width, d}, -up, up);
  forward_.w_down = random(dtype, {num_experts, d, n}, -down, down);
  if (config.has_b_up) forward_.b_up = random(dtype, {num_experts, width}, -1, 1);
  if (config.has_b_down) forward_.b_down = random(dtype, {num_experts, d}, -1, 1);
  forward_.y = tensor(dtype, {num_tokens, d});

  backward_.d_y = random(dtype, {num_tokens, d}, -unit, unit);
  backward_.x = forward_.x;
  backward_.weights = forward_.weights;
  backward_.w_up = forward_.w_up;
  backward_.w_down = forward_.w_down;
  backward_.b_up = forward_.b_up;
  backward_.b_down = forward_.b_down;
  backward_.d_x = tensor(dtype, {num_tokens, d});
  backward_.d_weights = tensor(real, {num_tokens, config.top_k});
  backward_.d_w_up = tensor(dtype, {num_experts, width, d});
  backward_.d_w_down = tensor(dtype, {num_experts, d, n});
  if (config.has_b_up) backward_.d_b_up = tensor(dtype, {num_experts, width});
  if (config.has_b_down) backward_.d_b_down = tensor(dtype, {num_experts, d});
}

void* Problem::allocate(std::size_t bytes) {
  void* pointer = device_.allocate(std::max<std::size_t>(bytes, 1));
  if (pointer == nullptr) throw std::bad_alloc();
  memory_.push_back(std::unique_ptr<void, Release>(pointer, Release{&device_}));
  return pointer;
}

TensorView Problem::tensor(DType dtype, std::initializer_list<std::int64_t> extents) {
  TensorView view = make_view(nullptr, dtype, extents);
  view.data = allocate(static_cast<std::size_t>(view.numel() * dtype_bytes(dtype)));
  return view;
}

TensorView Problem::random(DType dtype, std::initializer_list<std::int64_t> extents, double low,
                           double high) {
  const TensorView view = tensor(dtype, extents);
  constexpr std::int64_t kPattern = 524287;  // prime: rows do not repeat with it
  const std::int64_t count = view.numel();
  const std::int64_t period = std::min(count, kPattern);
  const std::size_t element = static_cast<std::size_t>(dtype_bytes(dtype));
  std::vector<unsigned char> pattern(static_cast<std::size_t>(period) * element);
  const TensorView image = make_view(pattern.data(), dtype, {period});
  test::Rng rng(++seed_);
  for (std::int64_t i = 0; i < period; ++i) store_real(image, rng.uniform(low, high), i);
  for (std::int64_t first = 0; first < count; first += period) {
    const std::size_t part = static_cast<std::size_t>(std::min(period, count - first)) * element;
    device_.upload(static_cast<unsigned char*>(view.data) + static_cast<std::size_t>(first) * element,
                   pattern.data(), part);
  }
  return view;
}

std::vector<double> Problem::download(const TensorView& view) const {
  std::vector<unsigned char> bytes(static_cast<std::size_t>(view.numel() * dtype_bytes(view.dtype)));
  device_.download(bytes.data(), view.data, bytes.size());
  const TensorView image = make_view(bytes.data(), view.dtype, {view.numel()});
  std::vector<double> values(static_cast<std::size_t>(view.numel()));
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = load_real(image, static_cast<std::int64_t>(i));
  return values;
}

}  // namespace moestro::cli
