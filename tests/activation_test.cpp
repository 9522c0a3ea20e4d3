/// Activation: values and slopes of every kind, on every backend.
#include "moestro/activation.hpp"

#include "support/stage_data.hpp"

namespace moestro::test {
namespace {

class ActivationTest : public BackendSuite {
 protected:
  Array forward(const BackendUnderTest& on, const Array& h, const Activation& activation, DType dtype,
                Layout layout = {}) {
    const std::int64_t n = h.columns() / h_width_factor(activation.kind);
    const Tensor input(*on.device, "h", h, dtype, layout);
    const Tensor a = Tensor::output(*on.device, "a", {h.extent(0), n}, dtype, layout);
    Workspace workspace(on, scratch(on, n, dtype));
    MOESTRO_EXPECT_OK(activation_forward({input.view(), activation, a.view()}, workspace.context()));
    input.expect_unchanged();
    return a.read();
  }
  Array backward(const BackendUnderTest& on, const Array& h, const Array& d_a, const Activation& activation,
                 DType dtype, Layout layout = {}) {
    const Tensor input(*on.device, "h", h, dtype, layout);
    const Tensor arriving(*on.device, "d_a", d_a, dtype, layout);
    const Tensor d_h = Tensor::output(*on.device, "d_h", h.shape, dtype, layout);
    Workspace workspace(on, scratch(on, d_a.columns(), dtype));
    MOESTRO_EXPECT_OK(
        activation_backward({input.view(), arriving.view(), activation, d_h.view()}, workspace.context()));
    input.expect_unchanged();
    arriving.expect_unchanged();
    return d_h.read();
  }
  static std::size_t scratch(const BackendUnderTest& on, std::int64_t n, DType dtype) {
    LayerConfig config;
    config.num_tokens = config.d_model = config.num_experts = config.top_k = 1;
    config.d_ff = n;
    config.dtype = dtype;
    return find_backend(on.id)->stage_workspace_bytes(config, on.context());
  }
};
MOESTRO_FOR_EACH_BACKEND(ActivationTest);

TEST_P(ActivationTest, EveryKindInEveryType) {
  Rng rng(5000);
  for (const DType dtype : dtypes()) {
    for (const ActivationKind kind : kAllActivations) {
      for (const std::int64_t n : {1, 3, 7, 8, 17, 64, 129}) {
        for (const std::int64_t num_rows : {0, 1, 37}) {
          SCOPED_TRACE(testing::Message() << dtype_name(dtype) << ' ' << name_of(kind) << " n=" << n);
          Activation activation;
          activation.kind = kind;
          activation.limit = kGridLimit;
          const Array h = normal_array(rng, {num_rows, h_width_factor(kind) * n}, 2).rounded(dtype);
          const Array d_a = normal_array(rng, {num_rows, n}).rounded(dtype);
          const Layout layout{.row_padding = n % 2, .misalignment = n % 2};
          const Tolerance tolerance{.floor = 4, .least_scale = 0.5};
          EXPECT_TRUE(near_truth("a", forward(backend(), h, activation, dtype, layout),
                                 forward(reference_under_test(), h, activation, DType::kF64),
                                 plain_activation(h, activation, dtype), dtype, tolerance));
          EXPECT_TRUE(near_truth("d_h", backward(backend(), h, d_a, activation, dtype, layout),
                                 backward(reference_under_test(), h, d_a, activation, DType::kF64),
                                 plain_activation_backward(h, d_a, activation, dtype), dtype, tolerance));
          if (HasFailure()) return;
        }
      }
    }
  }
}

// Each value alone over the whole range: small results must be right in themselves, not only beside
// large ones, and nothing overflows on the way (sigmoid of -100, tanh of 1e4).
TEST_P(ActivationTest, WholeRange) {
  for (const DType dtype : dtypes()) {
    for (const ActivationKind kind : kAllActivations) {
      Activation activation;
      activation.kind = kind;
      const std::vector<double> gates = {-1e4, -100, -40, -10, -3, -0.5, -1e-3, 0,
                                         1e-3, 0.5,  3,   10,  40, 100,  1e4};
      const auto num_rows = static_cast<std::int64_t>(gates.size());
      Array h({num_rows, h_width_factor(kind)}, 0.75);
      for (std::int64_t r = 0; r < num_rows; ++r) h.at(r, 0) = gates[static_cast<std::size_t>(r)];
      h = h.rounded(dtype);
      const Array d_a({num_rows, 1}, 1);
      const Array a = forward(backend(), h, activation, dtype);
      const Array d_h = backward(backend(), h, d_a, activation, dtype);
      const Array true_a = forward(reference_under_test(), h, activation, DType::kF64);
      const Array true_d_h = backward(reference_under_test(), h, d_a, activation, DType::kF64);
      for (std::int64_t r = 0; r < num_rows; ++r) {
        SCOPED_TRACE(testing::Message() << dtype_name(dtype) << ' ' << name_of(kind) << " h=" << h.at(r, 0));
        if (std::isinf(rounded_to(dtype, true_a.at(r, 0)))) continue;  // past what f16 holds
        // Absolute below 1, relative above; f32 arithmetic cancels in the slopes' 1 - s.
        const double unit = 8 * std::max(unit_roundoff(dtype), 0x1p-53);
        EXPECT_LE(std::abs(a.at(r, 0) - true_a.at(r, 0)), unit * std::max(1.0, std::abs(true_a.at(r, 0))));
        for (std::int64_t c = 0; c < h.columns(); ++c) {
          EXPECT_LE(std::abs(d_h.at(r, c) - true_d_h.at(r, c)),
                    unit * std::max(1.0, std::abs(true_d_h.at(r, c))));
        }
      }
    }
  }
}

// Independent of the shared formulas: values from the definitions, computed with a calculator.
TEST_P(ActivationTest, KnownValues) {
  const auto value = [&](ActivationKind kind, double gate, double up) {
    Activation activation;
    activation.kind = kind;
    Array h({1, h_width_factor(kind)}, gate);
    if (is_gated(kind)) h.at(0, 1) = up;
    return forward(backend(), h, activation, DType::kF32).at(0, 0);
  };
  EXPECT_NEAR(value(ActivationKind::kSwiGLU, 1, 2), 1.4621171573, 1e-6);  // 2 sigmoid(1)
  EXPECT_NEAR(value(ActivationKind::kGeGLU, 1, 2), 1.6826894921, 1e-6);   // 2 Phi(1)
  EXPECT_NEAR(value(ActivationKind::kGeGLUTanh, 1, 2), 1.6823839812,
              1e-6);  // 1 + tanh(0.8335593)
  EXPECT_NEAR(value(ActivationKind::kReGLU, -1, 2), 0, 0);
  EXPECT_NEAR(value(ActivationKind::kReGLU, 3, 2), 6, 0);
  EXPECT_NEAR(value(ActivationKind::kSwiGLUClamp, 9, -9), -48.955358491, 1e-4);  // -7 * 7 sigmoid(7)
  EXPECT_NEAR(value(ActivationKind::kSwiGLUOAI, 1, 2), 2.5373872978, 1e-5);      // 3 sigmoid(1.702)
  EXPECT_NEAR(value(ActivationKind::kReLU, 2.5, 0), 2.5, 0);
  EXPECT_NEAR(value(ActivationKind::kReLU2, 2.5, 0), 6.25, 0);
  EXPECT_NEAR(value(ActivationKind::kReLU2, -2.5, 0), 0, 0);
  EXPECT_NEAR(value(ActivationKind::kGELU, -1, 0), -0.1586552539, 1e-6);
  EXPECT_NEAR(value(ActivationKind::kSiLU, -1, 0), -0.2689414214, 1e-6);
}

// Automodel issue 2170 and DeepSeek-V4: beyond the limit the clamp lets no gradient through; at the
// limit itself it does, as torch.clamp.
TEST_P(ActivationTest, ClampStopsTheGradient) {
  for (const float limit : {7.0F, 10.0F}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const ActivationKind kind : {ActivationKind::kSwiGLUClamp, ActivationKind::kSwiGLUOAI}) {
        Activation activation;
        activation.kind = kind;
        activation.limit = limit;
        Array h({4, 2});
        const double edge = static_cast<double>(limit);
        h.values = {20, 20, -20, -20, edge, edge, 1, -edge};
        const Array d_h = backward(backend(), h, Array({4, 1}, 1), activation, dtype);
        EXPECT_EQ(d_h.at(0, 0), 0.0);
        EXPECT_EQ(d_h.at(0, 1), 0.0);
        EXPECT_NE(d_h.at(1, 0), NAN);  // the gate has no lower clamp
        EXPECT_EQ(d_h.at(1, 1), 0.0);
        EXPECT_NE(d_h.at(2, 0), 0.0);
        EXPECT_NE(d_h.at(2, 1), 0.0);
        EXPECT_NE(d_h.at(3, 1), 0.0);
        EXPECT_LE(std::abs(forward(backend(), h, activation, dtype).at(0, 0)), edge * (edge + 1));
      }
    }
  }
}

TEST_P(ActivationTest, SlopeOfReluAtZeroIsZero) {
  for (const ActivationKind kind : {ActivationKind::kReLU, ActivationKind::kReLU2}) {
    Activation activation;
    activation.kind = kind;
    EXPECT_EQ(backward(backend(), Array({1, 1}), Array({1, 1}, 1), activation, DType::kF32).at(0, 0), 0.0);
  }
}

TEST_P(ActivationTest, NanStaysNan) {
  for (const ActivationKind kind : kAllActivations) {
    SCOPED_TRACE(name_of(kind));
    Activation activation;
    activation.kind = kind;
    const Array h({1, h_width_factor(kind)}, NAN);
    EXPECT_TRUE(std::isnan(forward(backend(), h, activation, DType::kF32).at(0, 0)));
  }
}

}  // namespace
}  // namespace moestro::test
