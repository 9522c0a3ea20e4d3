/// Offsets beyond 32 bits. Sizes of layers that nobody can run here are computed; and stages run for real
/// on tensors whose strides spread a few rows over hundreds of gigabytes of reserved, untouched addresses.
///
/// Liger issue 1246 and PR 1248 (T K 2n > 2^31), vllm issue 45884 (token * width wraps unsigned 32 bits),
/// Liger PR 1377 (the stride between experts was assumed).
#include <sys/mman.h>

#include "support/stage_data.hpp"

namespace moestro::test {
namespace {

using Wide = __int128;

TEST(LargeOffsetsTest, SizesOfLargeLayers) {
  const Shape shapes[] = {
      {135000, 1024, 1024, 64, 8}, {1525201, 4096, 1408, 64, 8}, {70000, 7168, 2048, 128, 8}};
  for (const Shape& shape : shapes) {
    LayerConfig config = config_of(shape, DType::kBF16);
    config.save = SavePolicy::kAll;
    SCOPED_TRACE(describe(config));
    Context ctx;
    ctx.backend = BackendId::kReference;
    const LayerBytes bytes = layer_bytes(config, ctx);
    const Wide slots = Wide{shape.num_tokens} * shape.top_k;
    const Wide h = slots * 2 * shape.d_ff * 2;
    const Wide a = slots * shape.d_ff * 2;
    EXPECT_GT(h / 2, Wide{1} << 31);
    EXPECT_TRUE(Wide{bytes.saved} >= h + a && Wide{bytes.saved} <= h + a + bytes.index + 1024);
    EXPECT_TRUE(Wide{bytes.forward_workspace} >= slots * shape.d_model * 2);
    EXPECT_TRUE(Wide{bytes.backward_workspace} >= h + slots * shape.d_model * 2);

    // Parts of the saved buffer follow one another without overlap; only addresses are computed.
    auto* const base = reinterpret_cast<unsigned char*>(std::uintptr_t{1} << 40);
    const SavedView view = view_saved(config, base);
    const auto offset = [&](const void* pointer) {
      return Wide{static_cast<const unsigned char*>(pointer) - base};
    };
    EXPECT_TRUE(offset(view.h.data) >= Wide{bytes.index});
    EXPECT_TRUE(offset(view.a.data) >= offset(view.h.data) + h);
    EXPECT_TRUE(offset(view.a.data) + a <= Wide{bytes.saved});
    EXPECT_TRUE(Wide{element_offset(view.h, view.h.extent[0] - 1, view.h.extent[1] - 1)} == h / 2 - 1);
  }
}

TEST(LargeOffsetsTest, WeightViews) {
  const TensorView w_up = make_view(nullptr, DType::kBF16, {128, 2 * 2048, 7168});
  EXPECT_TRUE(Wide{w_up.numel()} == Wide{128} * 4096 * 7168);
  EXPECT_TRUE(Wide{element_offset(w_up, 127, 4095, 7167)} == Wide{128} * 4096 * 7168 - 1);
  const TensorView view = transposed(w_up);
  EXPECT_EQ(element_offset(view, 127, 7167, 4095), element_offset(w_up, 127, 4095, 7167));
}

TEST(LargeOffsetsTest, SlotsThatDoNotFitInto32BitsAreRefused) {
  LayerConfig config;
  config.num_tokens = std::int64_t{1} << 30;
  config.d_model = config.d_ff = config.num_experts = 1;
  config.top_k = 8;
  Context ctx;
  ctx.backend = BackendId::kReference;
  EXPECT_EQ(layer_bytes(config, ctx).saved, 0U);
  const Status status = layer_forward(config, {}, ctx);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(std::string(status.message()).find("8589934592"), std::string::npos) << status.message();
}

/// Addresses without memory: a page gets some when it is first touched.
class Reserved {
 public:
  explicit Reserved(std::size_t bytes) : bytes_(bytes) {
    pointer_ =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (pointer_ == MAP_FAILED) pointer_ = nullptr;
  }
  ~Reserved() {
    if (pointer_ != nullptr) munmap(pointer_, bytes_);
  }
  Reserved(const Reserved&) = delete;
  Reserved& operator=(const Reserved&) = delete;
  void* data() const { return pointer_; }

 private:
  std::size_t bytes_;
  void* pointer_;
};

class SpreadTest : public BackendSuite {};
MOESTRO_FOR_EACH_BACKEND(SpreadTest);

/// A copy of `array` whose axis 0 has a stride of more than 2^31 elements.
struct Spread {
  TensorView view;
  std::unique_ptr<Reserved> memory;

  Spread(std::vector<std::int64_t> shape, DType dtype) {
    constexpr std::int64_t kStride = (std::int64_t{1} << 31) + 64;
    view = make_view(nullptr, dtype, {1});
    view.rank = static_cast<int>(shape.size());
    std::int64_t stride = 1;
    for (int axis = view.rank - 1; axis >= 0; --axis) {
      view.extent[axis] = shape[static_cast<std::size_t>(axis)];
      view.stride[axis] = stride;
      stride *= view.extent[axis];
    }
    view.stride[0] = kStride;
    memory = std::make_unique<Reserved>(
        static_cast<std::size_t>((view.extent[0] + 1) * kStride * dtype_bytes(dtype)));
    view.data = memory->data();
  }
  Spread(const Array& array, DType dtype) : Spread(array.shape, dtype) {
    if (view.data == nullptr) return;
    each([&](std::int64_t i, std::int64_t j, std::int64_t k) {
      store_real(view, array.at(i, j, k), i, j, k);
    });
  }
  Array read() const {
    Array array(std::vector<std::int64_t>(view.extent, view.extent + view.rank));
    each([&](std::int64_t i, std::int64_t j, std::int64_t k) {
      array.at(i, j, k) = load_real(view, i, j, k);
    });
    return array;
  }
  template <typename Visit>
  void each(Visit visit) const {
    for (std::int64_t i = 0; i < view.extent[0]; ++i) {
      for (std::int64_t j = 0; j < view.extent[1]; ++j) {
        for (std::int64_t k = 0; k < (view.rank == 3 ? view.extent[2] : 1); ++k) visit(i, j, k);
      }
    }
  }
};

TEST_P(SpreadTest, EveryStageFollowsStridesBeyond32Bits) {
  if (!device().on_host()) GTEST_SKIP() << "needs more addresses than a device has memory";
  for (const DType dtype : two_dtypes()) {
    LayerConfig config;
    config.dtype = dtype;
    const StageData data = stage_data(8000, {5, 16, 16, 3, 2}, config);
    const StageCall call(backend(), data, dtype);
    const Tensor row_weights = call.in_real("row_weights", data.row_weights);
    const std::int64_t slots = data.num_slots();

    const Spread x(data.problem.x, dtype);
    const Spread w_up(data.problem.w_up, dtype);
    const Spread w_down(data.problem.w_down, dtype);
    const Spread d_y(data.problem.d_y, dtype);
    const Spread h({slots, 32}, dtype);
    const Spread a({slots, 16}, dtype);
    const Spread y_rows({slots, 16}, dtype);
    const Spread y({5, 16}, dtype);
    const Spread d_h({slots, 32}, dtype);
    const Spread a_scaled({slots, 16}, dtype);
    const Spread d_x_rows({slots, 16}, dtype);
    const Spread d_x({5, 16}, dtype);
    const Spread d_w_up(data.problem.w_up.shape, dtype);
    const Spread d_w_down(data.problem.w_down.shape, dtype);
    for (const Spread* spread : {&x, &w_up, &w_down, &d_y, &h, &a, &y_rows, &y, &d_h, &a_scaled, &d_x_rows,
                                 &d_x, &d_w_up, &d_w_down}) {
      if (spread->view.data == nullptr) GTEST_SKIP() << "this machine does not lend so many addresses";
    }
    const Tensor weights = call.in_real("weights", data.problem.weights);
    const Tensor d_weights = call.out_real("d_weights", data.problem.weights.shape);

    UpForwardArgs up;
    up.x = x.view;
    up.w_up = w_up.view;
    up.index = call.index();
    up.h = h.view;
    up.a = a.view;
    MOESTRO_EXPECT_OK(up_forward(up, call.context()));
    MOESTRO_EXPECT_OK(down_forward({a.view, w_down.view, {}, call.index(), y_rows.view}, call.context()));
    MOESTRO_EXPECT_OK(
        combine_forward({y_rows.view, weights.view(), {}, call.index(), y.view}, call.context()));
    DownBackwardArgs down;
    down.d_y = d_y.view;
    down.w_down = w_down.view;
    down.h = h.view;
    down.row_weights = row_weights.view();
    down.index = call.index();
    down.d_h = d_h.view;
    down.a_scaled = a_scaled.view;
    down.d_weights = d_weights.view();
    MOESTRO_EXPECT_OK(down_backward(down, call.context()));
    DownWeightBackwardArgs down_weight;
    down_weight.d_y = d_y.view;
    down_weight.a_scaled = a_scaled.view;
    down_weight.row_weights = row_weights.view();
    down_weight.index = call.index();
    down_weight.d_w_down = d_w_down.view;
    MOESTRO_EXPECT_OK(down_weight_backward(down_weight, call.context()));
    UpBackwardArgs up_back;
    up_back.d_h = d_h.view;
    up_back.w_up = w_up.view;
    up_back.index = call.index();
    up_back.d_x_rows = d_x_rows.view;
    MOESTRO_EXPECT_OK(up_backward(up_back, call.context()));
    MOESTRO_EXPECT_OK(combine_backward({d_x_rows.view, {}, {}, call.index(), d_x.view}, call.context()));
    UpWeightBackwardArgs up_weight;
    up_weight.x = x.view;
    up_weight.d_h = d_h.view;
    up_weight.index = call.index();
    up_weight.d_w_up = d_w_up.view;
    MOESTRO_EXPECT_OK(up_weight_backward(up_weight, call.context()));

    const LayerResult result = {y.read(), d_x.read(), d_weights.read(), d_w_up.read(), d_w_down.read(),
                                {},       {}};
    expect_near_truth(result, data.problem, dtype, {.floor = 4, .least_scale = 1});
  }
}

}  // namespace
}  // namespace moestro::test
