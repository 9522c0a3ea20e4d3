/// What only a GPU can get wrong: streams, graphs, devices, large offsets, and shapes large enough for many
/// tiles. Every test runs on the portable kernels and on whatever the backend chooses by itself.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <thread>

#include "moestro/backend.hpp"
#include "support/backend_suite.hpp"
#include "support/occupied.hpp"

namespace moestro::test {
namespace {

std::vector<BackendUnderTest> cuda_backends() {
  std::vector<BackendUnderTest> list;
  for (const BackendUnderTest& backend : backends_under_test()) {
    if (backend.id == BackendId::kCUDA) list.push_back(backend);
  }
  return list;
}

#define EXPECT_CUDA(expression) EXPECT_EQ(expression, cudaSuccess)

class CudaDeviceTest : public BackendSuite {
 protected:
  cudaStream_t stream() const { return static_cast<cudaStream_t>(device().stream()); }
};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(CudaDeviceTest);
INSTANTIATE_TEST_SUITE_P(Backend, CudaDeviceTest, testing::ValuesIn(cuda_backends()),
                         [](const auto& info) { return info.param.name; });

LayerConfig bf16_config() {
  LayerConfig config;
  config.dtype = DType::kBF16;
  config.has_b_up = config.has_b_down = true;
  return config;
}

void copy(const TensorView& to, const TensorView& from) {
  const auto bytes = static_cast<std::size_t>(from.numel() * dtype_bytes(from.dtype));
  EXPECT_CUDA(cudaMemcpy(to.data, from.data, bytes, cudaMemcpyDefault));
  EXPECT_CUDA(cudaDeviceSynchronize());  // a copy within the device does not wait by itself
}

// A graph captured once serves every later batch: nothing about the routing is baked into it.
TEST_P(CudaDeviceTest, GraphReplaysWithOtherData) {
  const Shape shape{300, 64, 96, 8, 3};
  LayerRun captured(backend(), random_problem(7000, shape, bf16_config(), {.kind = RoutingKind::kOneExpert}));
  captured.run();  // attributes are set outside the capture
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  EXPECT_CUDA(cudaStreamBeginCapture(stream(), cudaStreamCaptureModeThreadLocal));
  MOESTRO_EXPECT_OK(captured.forward());
  MOESTRO_EXPECT_OK(captured.backward());
  ASSERT_EQ(cudaStreamEndCapture(stream(), &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
  const RoutingKind kinds[] = {RoutingKind::kUniform, RoutingKind::kHalfEmpty, RoutingKind::kZipf};
  for (int batch = 0; batch < 3; ++batch) {
    LayerRun direct(backend(), random_problem(7001 + static_cast<std::uint64_t>(batch), shape, bf16_config(),
                                              {.kind = kinds[batch], .sentinels = 0.1 * batch}));
    direct.run();
    const LayerForwardArgs to = captured.forward_args();
    const LayerForwardArgs from = direct.forward_args();
    copy(to.x, from.x);
    copy(to.expert_ids, from.expert_ids);
    copy(to.weights, from.weights);
    copy(to.w_up, from.w_up);
    copy(to.w_down, from.w_down);
    copy(to.b_up, from.b_up);
    copy(to.b_down, from.b_down);
    copy(captured.backward_args().d_y, direct.backward_args().d_y);
    captured.poison_workspaces();
    EXPECT_CUDA(cudaGraphLaunch(executable, stream()));
    EXPECT_CUDA(cudaStreamSynchronize(stream()));
    EXPECT_EQ(captured.output_bytes(), direct.output_bytes()) << "batch " << batch;
  }
  EXPECT_CUDA(cudaGraphExecDestroy(executable));
  EXPECT_CUDA(cudaGraphDestroy(graph));
}

// Work on a private stream neither touches the default stream nor waits for it.
TEST_P(CudaDeviceTest, RunsWhileTheDefaultStreamIsBlocked) {
  LayerRun run(backend(), random_problem(7010, {200, 64, 64, 4, 2}, bf16_config()));
  const std::vector<unsigned char> expected = (run.run(), run.output_bytes());
  static std::atomic<bool> release{false};
  release = false;
  EXPECT_CUDA(cudaLaunchHostFunc(
      nullptr,
      [](void*) {
        while (!release) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      },
      nullptr));
  std::atomic<bool> done{false};
  std::atomic<bool> late{false};
  std::thread watchdog([&] {  // a call that waits for the default stream would wait for ever
    for (int i = 0; i < 20000 && !done; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    late = !done;
    if (late) release = true;
  });
  MOESTRO_EXPECT_OK(run.forward());
  MOESTRO_EXPECT_OK(run.backward());
  EXPECT_CUDA(cudaStreamSynchronize(stream()));
  done = true;
  watchdog.join();
  EXPECT_FALSE(late) << "the layer waited for the default stream";
  release = true;
  EXPECT_CUDA(cudaStreamSynchronize(nullptr));
  EXPECT_EQ(run.output_bytes(), expected);
}

// A collective keeps multiprocessors until other ranks come: what needs all of them at once would wait for
// it, and ranks perhaps for each other.
TEST_P(CudaDeviceTest, RunsBesideAKernelThatKeepsMultiprocessors) {
  int num_multiprocessors = 0;
  EXPECT_CUDA(cudaDeviceGetAttribute(&num_multiprocessors, cudaDevAttrMultiProcessorCount, 0));
  cudaEvent_t end = nullptr;
  EXPECT_CUDA(cudaEventCreate(&end));
  for (const std::int64_t num_tokens : {2000, 40000, 140000}) {
    LayerRun run(backend(), random_problem(7015, {num_tokens, 64, 64, 16, 4}, bf16_config()));
    const std::vector<unsigned char> expected = (run.run(), run.output_bytes());
    run.poison_workspaces();
    {
      const Occupied occupied(num_multiprocessors / 2);
      MOESTRO_EXPECT_OK(run.forward());
      MOESTRO_EXPECT_OK(run.backward());
      EXPECT_CUDA(cudaEventRecord(end, stream()));
      for (int i = 0; i < 20000 && cudaEventQuery(end) == cudaErrorNotReady; ++i) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      EXPECT_EQ(cudaEventQuery(end), cudaSuccess) << num_tokens << " tokens waited for the other kernel";
      (void)cudaGetLastError();  // not to be found by the next launch
    }
    EXPECT_EQ(run.output_bytes(), expected);
  }
  EXPECT_CUDA(cudaEventDestroy(end));
}

TEST_P(CudaDeviceTest, TwentyRunsOfManyTilesGiveTheSameBits) {
  LayerConfig config = bf16_config();
  LayerRun run(backend(),
               random_problem(7020, {3000, 256, 192, 16, 4}, config, {.kind = RoutingKind::kZipf}));
  run.run();
  const std::vector<unsigned char> first = run.output_bytes();
  for (int repeat = 1; repeat < 20; ++repeat) {
    run.poison_workspaces();
    MOESTRO_EXPECT_OK(run.forward());
    MOESTRO_EXPECT_OK(run.backward());
    ASSERT_EQ(run.output_bytes(), first) << "repeat " << repeat;
  }
}

/// More tiles than multiprocessors in every product, so that blocks draw from the counters.
LayerProblem many_tiles(std::uint64_t seed) {
  LayerConfig config;
  config.dtype = DType::kBF16;
  return random_problem(seed, {3000, 512, 256, 16, 4}, config, {.kind = RoutingKind::kZipf});
}

/// What a layer puts out whose stages are called one by one, each on a workspace that holds anything; the
/// products, if asked, on none.
std::vector<unsigned char> stages_alone(const BackendUnderTest& backend, const LayerProblem& problem,
                                        bool products_have_workspace) {
  LayerRun alone(backend, problem);
  const LayerConfig& config = problem.config;
  const LayerForwardArgs forward = alone.forward_args();
  const LayerBackwardArgs backward_args = alone.backward_args();
  const SavedView saved = view_saved(config, alone.saved().data());
  const auto rows = [&](const char* name, std::int64_t columns, DType dtype) {
    return Tensor::output(*backend.device, name, {config.num_slots(), columns}, dtype);
  };
  const Tensor a = rows("a", config.d_ff, config.dtype);
  const Tensor y_rows = rows("y_rows", config.d_model, config.dtype);
  const Tensor d_h = rows("d_h", config.h_width(), config.dtype);
  const Tensor a_scaled = rows("a_scaled", config.d_ff, config.dtype);
  const Tensor d_x_rows = rows("d_x_rows", config.d_model, config.dtype);
  const Tensor row_weights =
      Tensor::output(*backend.device, "row_weights", {config.num_slots()}, accumulation_dtype(config.dtype));
  Workspace workspace(backend, alone.bytes().backward_workspace);
  const auto context = [&] {
    workspace.buffer().upload(std::vector<unsigned char>(workspace.buffer().bytes(), 0x7f));
    return workspace.context();
  };
  const auto product = [&] { return products_have_workspace ? context() : backend.context(); };
  DispatchArgs dispatch;
  dispatch.expert_ids = forward.expert_ids;
  dispatch.num_experts = config.num_experts;
  dispatch.index = saved.index;
  MOESTRO_EXPECT_OK(dispatch_forward(dispatch, context()));
  UpForwardArgs up;
  up.x = forward.x;
  up.w_up = forward.w_up;
  up.index = saved.index;
  up.h = saved.h;
  up.a = a.view();
  MOESTRO_EXPECT_OK(up_forward(up, product()));
  MOESTRO_EXPECT_OK(down_forward({a.view(), forward.w_down, {}, saved.index, y_rows.view()}, product()));
  MOESTRO_EXPECT_OK(combine_forward({y_rows.view(), forward.weights, {}, saved.index, forward.y}, context()));
  MOESTRO_EXPECT_OK(dispatch_row_weights({forward.weights, saved.index, row_weights.view()}, context()));
  DownBackwardArgs down;
  down.d_y = backward_args.d_y;
  down.w_down = forward.w_down;
  down.h = saved.h;
  down.row_weights = row_weights.view();
  down.index = saved.index;
  down.d_h = d_h.view();
  down.a_scaled = a_scaled.view();
  down.d_weights = backward_args.d_weights;
  MOESTRO_EXPECT_OK(down_backward(down, context()));
  DownWeightBackwardArgs down_weight;
  down_weight.d_y = backward_args.d_y;
  down_weight.a_scaled = a_scaled.view();
  down_weight.row_weights = row_weights.view();
  down_weight.index = saved.index;
  down_weight.d_w_down = backward_args.d_w_down;
  MOESTRO_EXPECT_OK(down_weight_backward(down_weight, product()));
  UpBackwardArgs up_back;
  up_back.d_h = d_h.view();
  up_back.w_up = forward.w_up;
  up_back.index = saved.index;
  up_back.d_x_rows = d_x_rows.view();
  MOESTRO_EXPECT_OK(up_backward(up_back, product()));
  MOESTRO_EXPECT_OK(combine_backward({d_x_rows.view(), {}, {}, saved.index, backward_args.d_x}, context()));
  UpWeightBackwardArgs up_weight;
  up_weight.x = forward.x;
  up_weight.d_h = d_h.view();
  up_weight.index = saved.index;
  up_weight.d_w_up = backward_args.d_w_up;
  MOESTRO_EXPECT_OK(up_weight_backward(up_weight, product()));
  return alone.output_bytes();
}

// A layer's counters are zeroed once a call, a single stage's by the stage: whatever the workspace held. A
// counter that starts high skips tiles, and their outputs stay poisoned.
TEST_P(CudaDeviceTest, StagesAloneOnAnyWorkspaceGiveTheLayersBits) {
  const LayerProblem problem = many_tiles(7030);
  LayerRun layer(backend(), problem);
  layer.run();
  EXPECT_EQ(stages_alone(backend(), problem, true), layer.output_bytes());
}

// Without a counter tiles go to multiprocessors in a fixed pattern. No sum here is cut into parts, which
// would need memory.
TEST_P(CudaDeviceTest, ProductsWithoutWorkspaceGiveTheLayersBits) {
  LayerConfig config;
  config.dtype = DType::kBF16;
  const LayerProblem problem = random_problem(7040, {2000, 1024, 256, 16, 4}, config);
  LayerRun layer(backend(), problem);
  layer.run();
  EXPECT_EQ(stages_alone(backend(), problem, false), layer.output_bytes());
}

// Partial sums of dW1 and dW2 lie in the memory of dX~; without dX they have their own. The same bits either
// way.
TEST_P(CudaDeviceTest, FrozenInputLeavesGradientsOfWeightsAsTheyAre) {
  const LayerProblem problem = many_tiles(7050);
  LayerRun all(backend(), problem);
  const LayerResult expected = all.run();
  for (const bool w_down : {false, true}) {
    RunOptions options;
    options.grads.x = false;
    options.grads.w_down = w_down;
    LayerRun frozen(backend(), problem, options);
    const LayerResult result = frozen.run();
    EXPECT_TRUE(equal_values("d_w_up", result.d_w_up, expected.d_w_up));
    if (w_down) {
      EXPECT_TRUE(equal_values("d_w_down", result.d_w_down, expected.d_w_down));
    }
  }
}

/// The layer's two calls on another stream, or another workspace.
void enqueue(const LayerRun& run, const LayerConfig& config, const Context& ctx) {
  MOESTRO_EXPECT_OK(layer_forward(config, run.forward_args(), ctx));
  MOESTRO_EXPECT_OK(layer_backward(config, run.backward_args(), ctx));
}

// Calls in turn need nothing between them: each zeroes its own counters in the shared workspace.
TEST_P(CudaDeviceTest, LayersInTurnShareOneWorkspace) {
  const LayerProblem first_problem = many_tiles(7040);
  const LayerProblem second_problem = many_tiles(7041);
  LayerRun first(backend(), first_problem);
  LayerRun second(backend(), second_problem);
  const std::vector<unsigned char> expected_first = (first.run(), first.output_bytes());
  const std::vector<unsigned char> expected_second = (second.run(), second.output_bytes());
  LayerRun third(backend(), first_problem);
  LayerRun fourth(backend(), second_problem);
  Workspace workspace(backend(), std::max(third.bytes().forward_workspace, third.bytes().backward_workspace));
  workspace.buffer().poison();
  const Context& ctx = workspace.context();
  for (int step = 0; step < 5; ++step) {
    MOESTRO_EXPECT_OK(layer_forward(first_problem.config, third.forward_args(), ctx));
    MOESTRO_EXPECT_OK(layer_forward(second_problem.config, fourth.forward_args(), ctx));
    MOESTRO_EXPECT_OK(layer_backward(second_problem.config, fourth.backward_args(), ctx));
    MOESTRO_EXPECT_OK(layer_backward(first_problem.config, third.backward_args(), ctx));
  }
  EXPECT_EQ(third.output_bytes(), expected_first);
  EXPECT_EQ(fourth.output_bytes(), expected_second);
}

TEST_P(CudaDeviceTest, TwoStreamsAndThreadsAtOnce) {
  const LayerProblem problems[] = {many_tiles(7050), many_tiles(7051)};
  LayerRun first(backend(), problems[0]);
  LayerRun second(backend(), problems[1]);
  const std::vector<unsigned char> expected_first = (first.run(), first.output_bytes());
  const std::vector<unsigned char> expected_second = (second.run(), second.output_bytes());
  LayerRun third(backend(), problems[0]);
  LayerRun fourth(backend(), problems[1]);
  Workspace workspaces[] = {
      {backend(), std::max(third.bytes().forward_workspace, third.bytes().backward_workspace)},
      {backend(), std::max(fourth.bytes().forward_workspace, fourth.bytes().backward_workspace)}};
  for (Workspace& workspace : workspaces) workspace.buffer().poison();
  Context other = workspaces[1].context();
  cudaStream_t other_stream = nullptr;
  EXPECT_CUDA(cudaStreamCreateWithFlags(&other_stream, cudaStreamNonBlocking));
  other.stream = other_stream;
  // A thread each: what the library keeps between calls is shared.
  std::thread thread([&] {
    for (int step = 0; step < 10; ++step) enqueue(fourth, problems[1].config, other);
  });
  for (int step = 0; step < 10; ++step) enqueue(third, problems[0].config, workspaces[0].context());
  thread.join();
  EXPECT_CUDA(cudaStreamSynchronize(other_stream));
  EXPECT_EQ(third.output_bytes(), expected_first);
  EXPECT_EQ(fourth.output_bytes(), expected_second);
  EXPECT_CUDA(cudaStreamDestroy(other_stream));
}

// The kernels of dW2, dW1 and dX~ overlap. What comes next on the stream must find all of them whole. With n
// this small a tile of dW1 takes as long as many of dX~; with 64 experts some multiprocessors have two of
// them, and others have gone on to dX~.
TEST_P(CudaDeviceTest, GradientsAreWholeForTheNextKernel) {
  LayerConfig config;
  config.dtype = DType::kBF16;
  for (const std::int64_t num_experts : {8, 64}) {
    LayerRun run(backend(), random_problem(7060, {16000, 512, 8, num_experts, 8}, config));
    run.run();
    const LayerBackwardArgs args = run.backward_args();
    std::vector<ActivationForwardArgs> reads;
    std::vector<Tensor> seen;
    for (const TensorView& gradient : {args.d_x, args.d_w_up, args.d_w_down}) {
      const std::int64_t columns = gradient.extent[gradient.rank - 1];
      const std::int64_t rows = gradient.numel() / columns;
      seen.push_back(Tensor::output(device(), "seen", {rows, columns}, gradient.dtype));
      ActivationForwardArgs read;
      read.h = make_view(gradient.data, gradient.dtype, {rows, columns});
      read.activation.kind = ActivationKind::kSiLU;
      read.a = seen.back().view();
      reads.push_back(read);
    }
    const auto read_all = [&] {
      std::vector<std::vector<unsigned char>> bytes;
      for (const ActivationForwardArgs& read : reads) {
        MOESTRO_EXPECT_OK(activation_forward(read, run.backward_workspace().context()));
      }
      for (const Tensor& tensor : seen) bytes.push_back(tensor.bytes());
      return bytes;
    };
    const auto expected = read_all();
    for (int repeat = 0; repeat < 10; ++repeat) {
      for (const ActivationForwardArgs& read : reads) {
        const auto bytes = static_cast<std::size_t>(read.h.numel() * dtype_bytes(read.h.dtype));
        EXPECT_CUDA(cudaMemsetAsync(read.h.data, 0xff, bytes, stream()));
      }
      MOESTRO_EXPECT_OK(run.backward());
      ASSERT_EQ(read_all(), expected) << "repeat " << repeat;
    }
  }
}

double relative_error(const Array& actual, const Array& expected) {
  double error = 0;
  double scale = 0;
  for (std::size_t i = 0; i < expected.values.size(); ++i) {
    const double difference = actual.values[i] - expected.values[i];
    error += difference * difference;
    scale += expected.values[i] * expected.values[i];
  }
  return scale == 0 ? std::sqrt(error) : std::sqrt(error / scale);
}

// Extents of real models, few of them round. The CPU backend in f32 (tested against the reference) is quick
// enough to say what is right.
TEST_P(CudaDeviceTest, ExtentsOfRealModels) {
  if (find_backend(BackendId::kCPU) == nullptr) GTEST_SKIP() << "needs the CPU backend";
  const BackendUnderTest cpu{"cpu", BackendId::kCPU, KernelPath::kAuto, &host_device()};
  const Shape shapes[] = {{130, 2304, 704, 2, 1}, {70, 2688, 96, 8, 6},   {60, 136, 1408, 12, 6},
                          {50, 2816, 64, 16, 10}, {40, 40, 1792, 40, 12}, {96, 2880, 512, 2, 2},
                          {33, 72, 40, 384, 12},  {17, 24, 65, 512, 10},  {40, 136, 72, 160, 12},
                          {64, 264, 136, 8, 8},   {1, 2304, 704, 2, 1},   {260, 72, 40, 6, 6},
                          {129, 64, 96, 3, 0},    {90, 1025, 128, 60, 4}, {300, 256, 1856, 2, 1}};
  std::uint64_t seed = 7100;
  for (const Shape& shape : shapes) {
    for (const bool f32 : {false, true}) {
      if (f32 && hopper_is_forced()) continue;
      const DType dtype = f32 ? DType::kF32 : seed % 4 == 0 ? DType::kF16 : DType::kBF16;
      LayerConfig config;
      config.dtype = dtype;
      config.gate_layout = kAllGateLayouts[seed % 2];
      config.weight_position = kAllWeightPositions[seed / 2 % 2];
      config.has_b_up = seed % 3 != 0;
      config.has_b_down = seed % 3 != 1;
      LayerProblem problem =
          random_problem(seed, shape, config, {.kind = kAllRoutingKinds[seed % 4], .sentinels = 0.05});
      ++seed;
      SCOPED_TRACE(describe(problem.config));
      RunOptions options;
      options.matrices.transposed = seed % 4 == 0;
      options.num_threads = 8;
      LayerResult actual;
      if (!run_unless_refused([&] { actual = run_layer(backend(), problem, options); })) continue;
      const LayerResult expected = run_layer(cpu, with_dtype(problem, DType::kF32), options);
      // Storage roundings of H, A and Y add up; a wrong element anywhere is of order 1.
      const double limit = dtype == DType::kBF16 ? 1.5e-2 : dtype == DType::kF16 ? 2e-3 : 1e-5;
      EXPECT_LT(relative_error(actual.y, expected.y), limit);
      EXPECT_LT(relative_error(actual.d_x, expected.d_x), limit);
      EXPECT_LT(relative_error(actual.d_weights, expected.d_weights), limit);
      EXPECT_LT(relative_error(actual.d_w_up, expected.d_w_up), limit);
      EXPECT_LT(relative_error(actual.d_w_down, expected.d_w_down), limit);
      EXPECT_LT(relative_error(actual.d_b_up, expected.d_b_up), limit);
      EXPECT_LT(relative_error(actual.d_b_down, expected.d_b_down), limit);
    }
  }
}

/// The tokens [first, first + count) of a problem.
LayerProblem slice(const LayerProblem& problem, std::int64_t first, std::int64_t count) {
  const auto rows = [&](const Array& array) {
    Array part = array;
    const std::int64_t width = array.size() / array.extent(0);
    part.shape[0] = count;
    part.values.assign(array.values.begin() + first * width, array.values.begin() + (first + count) * width);
    return part;
  };
  LayerProblem part = problem;
  part.config.num_tokens = count;
  part.routing.num_tokens = count;
  const std::int64_t top_k = problem.routing.top_k;
  part.routing.ids.assign(problem.routing.ids.begin() + first * top_k,
                          problem.routing.ids.begin() + (first + count) * top_k);
  part.x = rows(problem.x);
  part.weights = rows(problem.weights);
  part.d_y = rows(problem.d_y);
  return part;
}

// Liger issue 1246: T K 2n > 2^31. Rows far behind are computed as if they were alone, bit for bit.
TEST_P(CudaDeviceTest, MoreThan2To31Elements) {
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
  EXPECT_CUDA(cudaMemGetInfo(&free_bytes, &total_bytes));
  if (free_bytes < std::size_t{30} << 30) GTEST_SKIP() << "needs 30 GiB of device memory";
  LayerConfig config;
  config.dtype = DType::kBF16;
  const LayerProblem problem = random_problem(7200, {135000, 8, 1024, 8, 8}, config);
  RunOptions options;
  options.grads.w_up = options.grads.w_down = false;
  LayerRun whole(backend(), problem, options);
  ASSERT_GT(problem.routing.num_slots() * problem.config.h_width(), std::int64_t{1} << 31);
  MOESTRO_EXPECT_OK(whole.forward());
  MOESTRO_EXPECT_OK(whole.backward());
  const LayerResult all = whole.read();
  constexpr std::int64_t kCount = 64;
  for (const std::int64_t first : {std::int64_t{0}, std::int64_t{67000}, 135000 - kCount}) {
    const LayerResult part = run_layer(backend(), slice(problem, first, kCount), options);
    const auto same = [&](const Array& array, const Array& expected) {
      const auto begin = array.values.begin() + first * expected.columns();
      return std::equal(expected.values.begin(), expected.values.end(), begin);
    };
    EXPECT_TRUE(same(all.y, part.y)) << "y from token " << first;
    EXPECT_TRUE(same(all.d_x, part.d_x)) << "d_x from token " << first;
    EXPECT_TRUE(same(all.d_weights, part.d_weights)) << "d_weights from token " << first;
  }
}

// grouped_gemm issue 15: tensors on another device than the thread's current one.
TEST_P(CudaDeviceTest, CurrentDeviceStaysAsItWas) {
  int count = 0;
  EXPECT_CUDA(cudaGetDeviceCount(&count));
  const LayerProblem problem = random_problem(7300, {20, 16, 16, 4, 2}, bf16_config());
  LayerRun run(backend(), problem);
  const std::vector<unsigned char> expected = (run.run(), run.output_bytes());
  if (count < 2) GTEST_SKIP() << "needs two GPUs";
  EXPECT_CUDA(cudaSetDevice(1));
  MOESTRO_EXPECT_OK(run.forward());
  MOESTRO_EXPECT_OK(run.backward());
  int current = -1;
  EXPECT_CUDA(cudaGetDevice(&current));
  EXPECT_EQ(current, 1);
  EXPECT_CUDA(cudaSetDevice(0));
  EXPECT_EQ(run.output_bytes(), expected);
}

TEST_P(CudaDeviceTest, DeviceThatIsNotThereIsAnError) {
  RouterForwardArgs args;
  args.logits = make_view(nullptr, DType::kF32, {0, 4});
  args.expert_ids = make_view(nullptr, DType::kI32, {0, 2});
  args.weights = make_view(nullptr, DType::kF32, {0, 2});
  Context ctx = backend().context();
  ctx.device_index = 63;
  const Status status = router_forward(args, ctx);
  EXPECT_EQ(status.code(), StatusCode::kDeviceError);
  EXPECT_NE(std::string(status.message()).find("63"), std::string::npos) << status.message();
  // The error does not stick to the next call.
  ctx.device_index = 0;
  MOESTRO_EXPECT_OK(router_forward(args, ctx));
}

// A path that does not fit is refused, never quietly replaced.
TEST_P(CudaDeviceTest, ForcedHopperPathRefusesF32) {
  LayerConfig config;
  config.dtype = DType::kF32;
  BackendUnderTest forced = backend();
  forced.path = KernelPath::kHopper;
  LayerRun run(forced, random_problem(7310, {20, 16, 16, 4, 2}, config));
  const Status status = run.forward();
  EXPECT_EQ(status.code(), StatusCode::kUnsupported);
  EXPECT_NE(std::string(status.message()).find("hopper"), std::string::npos) << status.message();
}

TEST_P(CudaDeviceTest, DoublePrecisionIsRefused) {
  LayerConfig config;
  config.dtype = DType::kF64;
  LayerRun run(backend(), random_problem(7320, {4, 8, 8, 2, 1}, config));
  EXPECT_EQ(run.forward().code(), StatusCode::kUnsupported);
}

}  // namespace
}  // namespace moestro::test
