/// Times the stages and the layer on a GPU through the public C++ API, by CUDA Graph replay: each stage is
/// captured several times into one graph, so that launches do not show. One JSON line a measurement.
///
///   moestro_stage_bench [--path auto|portable|hopper] [--shapes NAME|NAME@T,…] [--only router,dispatch,…]
///
/// Inputs are random. Small stages run on buffers that may stay in L2, as in a layer; tensors of the
/// matrix stages are far larger than it.
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <sstream>
#include <string>
#include <vector>

#include "moestro/moestro.hpp"
#include "shapes.hpp"

namespace {

using moestro::DType;
using moestro::LayerConfig;
using moestro::Status;
using moestro::TensorView;

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "stage_bench: %s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}
void check(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "stage_bench: %s\n", status.message());
  std::exit(1);
}

__device__ unsigned hash(unsigned long long x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdULL;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ULL;
  x ^= x >> 33;
  return static_cast<unsigned>(x);
}
/// About normal: the sum of four uniforms.
__device__ float draw(unsigned long long seed, unsigned long long i) {
  float sum = -2.0F;
  for (int part = 0; part < 4; ++part)
    sum += static_cast<float>(hash((seed * 4 + part) << 40 ^ i)) * 0x1p-32F;
  return sum * 1.7320508F;
}
__global__ void fill_kernel(unsigned short* bf16, float* f32, long long count, unsigned long long seed,
                            float scale) {
  const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
  for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
    const float value = draw(seed, static_cast<unsigned long long>(i)) * scale;
    if (bf16 != nullptr) bf16[i] = static_cast<unsigned short>(__float_as_uint(value) >> 16);
    if (f32 != nullptr) f32[i] = value;
  }
}

struct Memory {
  void* take(std::size_t bytes) {
    void* pointer = nullptr;
    check(cudaMalloc(&pointer, bytes + 256), "cudaMalloc");
    blocks.push_back(pointer);
    return pointer;
  }
  TensorView tensor(DType dtype, std::initializer_list<std::int64_t> extents, float scale = 0.0F) {
    TensorView view = moestro::make_view(nullptr, dtype, extents);
    view.data = take(static_cast<std::size_t>(view.numel() * moestro::dtype_bytes(dtype)));
    if (scale != 0.0F) {
      fill_kernel<<<2048, 256>>>(dtype == DType::kBF16 ? static_cast<unsigned short*>(view.data) : nullptr,
                                 dtype == DType::kF32 ? static_cast<float*>(view.data) : nullptr,
                                 view.numel(), ++seed, scale);
      check(cudaDeviceSynchronize(), "fill");
    }
    return view;
  }
  ~Memory() {
    for (void* block : blocks) (void)cudaFree(block);
  }
  std::vector<void*> blocks;
  unsigned long long seed = 0;
};

struct Bench {
  moestro::Context ctx;
  cudaStream_t stream = nullptr;
  std::string device;
  std::string path;

  /// Median microseconds of one call.
  double time(int calls, int replays, const std::function<Status()>& call) {
    check(call());  // module load and first-time attributes stay out
    check(cudaStreamSynchronize(stream), "warm-up");
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "begin capture");
    for (int i = 0; i < calls; ++i) check(call());
    check(cudaStreamEndCapture(stream, &graph), "end capture");
    check(cudaGraphInstantiate(&exec, graph, 0), "instantiate");
    cudaEvent_t begin = nullptr;
    cudaEvent_t end = nullptr;
    check(cudaEventCreate(&begin), "event");
    check(cudaEventCreate(&end), "event");
    std::vector<float> times;
    for (int i = 0; i < replays + 3; ++i) {
      check(cudaEventRecord(begin, stream), "record");
      check(cudaGraphLaunch(exec, stream), "replay");
      check(cudaEventRecord(end, stream), "record");
      check(cudaEventSynchronize(end), "synchronize");
      float ms = 0.0F;
      check(cudaEventElapsedTime(&ms, begin, end), "elapsed");
      if (i >= 3) times.push_back(ms);
    }
    check(cudaEventDestroy(begin), "event");
    check(cudaEventDestroy(end), "event");
    check(cudaGraphExecDestroy(exec), "graph");
    check(cudaGraphDestroy(graph), "graph");
    std::sort(times.begin(), times.end());
    return times[times.size() / 2] * 1000.0 / calls;
  }

  void report(const char* what, const char* shape, double us, double flop, double bytes) const {
    std::printf("{\"bench\":\"stage\",\"what\":\"%s\",\"shape\":\"%s\",\"path\":\"%s\",\"us\":%.2f", what,
                shape, path.c_str(), us);
    if (flop > 0) std::printf(",\"tflops\":%.1f", flop / us * 1e-6);
    if (bytes > 0) std::printf(",\"gb_per_s\":%.0f", bytes / us * 1e-3);
    std::printf(",\"device\":\"%s\"}\n", device.c_str());
    std::fflush(stdout);
  }
};

/// Experts chosen by random logits.
moestro::RouterForwardArgs route(const Bench& bench, std::int64_t num_tokens, std::int64_t num_experts,
                                 std::int64_t top_k, Memory* memory) {
  moestro::RouterForwardArgs router;
  router.logits = memory->tensor(DType::kBF16, {num_tokens, num_experts}, 1.0F);
  router.expert_ids = memory->tensor(DType::kI32, {num_tokens, top_k});
  router.weights = memory->tensor(DType::kF32, {num_tokens, top_k});
  check(moestro::router_forward(router, bench.ctx));
  return router;
}

void bench_router_and_dispatch(Bench& bench, bool router, bool dispatch) {
  const struct {
    std::int64_t num_tokens, num_experts, top_k;
  } shapes[] = {{32768, 64, 8}, {32768, 128, 8}, {32768, 256, 16}, {32768, 512, 10}, {131072, 128, 8}};
  for (const auto& shape : shapes) {
    Memory memory;
    char name[64];
    std::snprintf(name, sizeof name, "T%lld,E%lld,K%lld", static_cast<long long>(shape.num_tokens),
                  static_cast<long long>(shape.num_experts), static_cast<long long>(shape.top_k));
    moestro::RouterForwardArgs forward =
        route(bench, shape.num_tokens, shape.num_experts, shape.top_k, &memory);
    if (router) {
      bench.report("router_forward", name,
                   bench.time(20, 20, [&] { return router_forward(forward, bench.ctx); }), 0, 0);
      moestro::RouterForwardArgs renormalized = forward;
      renormalized.config.weight_kind = moestro::WeightKind::kRenormalized;
      bench.report("router_forward,renormalized", name,
                   bench.time(20, 20, [&] { return router_forward(renormalized, bench.ctx); }), 0, 0);
      moestro::RouterBackwardArgs backward;
      backward.logits = forward.logits;
      backward.expert_ids = forward.expert_ids;
      backward.d_weights = memory.tensor(DType::kF32, {shape.num_tokens, shape.top_k}, 1.0F);
      backward.d_logits = memory.tensor(DType::kBF16, {shape.num_tokens, shape.num_experts});
      bench.report("router_backward", name,
                   bench.time(20, 20, [&] { return router_backward(backward, bench.ctx); }), 0, 0);
    }
    if (!dispatch) continue;
    const std::int64_t num_slots = shape.num_tokens * shape.top_k;
    moestro::DispatchArgs args;
    args.expert_ids = forward.expert_ids;
    args.num_experts = shape.num_experts;
    args.index = moestro::carve_index(memory.take(moestro::index_bytes(num_slots, shape.num_experts)),
                                      num_slots, shape.num_experts);
    moestro::Context ctx = bench.ctx;
    ctx.workspace_bytes =
        moestro::dispatch_workspace_bytes(shape.num_tokens, num_slots, shape.num_experts, ctx);
    ctx.workspace = memory.take(ctx.workspace_bytes);
    bench.report("dispatch_forward", name, bench.time(20, 20, [&] { return dispatch_forward(args, ctx); }), 0,
                 0);
    moestro::RowWeightsArgs row_weights{forward.weights, args.index, memory.tensor(DType::kF32, {num_slots})};
    bench.report("dispatch_row_weights", name,
                 bench.time(20, 20, [&] { return dispatch_row_weights(row_weights, ctx); }), 0, 0);
  }
}

__global__ void softmax_kernel(const unsigned short* logits, float* scores, std::int64_t num_tokens,
                               std::int64_t num_experts) {
  const std::int64_t t = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (t >= num_tokens) return;
  const auto term = [&](std::int64_t e) {
    return __expf(__uint_as_float(static_cast<unsigned>(logits[t * num_experts + e]) << 16));
  };
  float sum = 0.0F;
  for (std::int64_t e = 0; e < num_experts; ++e) sum += term(e);
  for (std::int64_t e = 0; e < num_experts; ++e) scores[t * num_experts + e] = term(e) / sum;
}

void bench_grouped_router(Bench& bench) {
  constexpr std::int64_t kTokens = 32768;
  Memory memory;
  moestro::RouterForwardArgs forward;
  forward.logits = memory.tensor(DType::kBF16, {kTokens, 256}, 1.0F);
  forward.selection_bias = memory.tensor(DType::kF32, {256}, 0.1F);
  forward.expert_ids = memory.tensor(DType::kI32, {kTokens, 8});
  forward.weights = memory.tensor(DType::kF32, {kTokens, 8});
  forward.config.score = moestro::RouterScore::kSigmoid;
  forward.config.weight_kind = moestro::WeightKind::kRenormalized;
  forward.config.epsilon = 1e-20F;
  forward.config.scale = 2.5F;
  const auto report = [&](const char* name) {
    bench.report("router_forward", name,
                 bench.time(20, 20, [&] { return router_forward(forward, bench.ctx); }), 0, 0);
  };
  report("T32768,E256,K8,sigmoid,bias");
  forward.config.num_groups = 8;
  forward.config.top_groups = 4;
  forward.config.group_merit = moestro::GroupMerit::kTopTwo;
  report("T32768,E256,K8,sigmoid,bias,groups8of4");
}

void bench_rounding(Bench& bench) {
  const struct {
    std::int64_t num_tokens, num_experts, top_k;
  } shapes[] = {{4096, 128, 8}, {32768, 128, 8}, {32768, 256, 16}, {32768, 512, 10}, {131072, 128, 8}};
  constexpr std::int64_t kTile = 128;
  for (const auto& shape : shapes) {
    Memory memory;
    const moestro::RouterForwardArgs router =
        route(bench, shape.num_tokens, shape.num_experts, shape.top_k, &memory);
    moestro::RoundingArgs args;
    args.expert_ids = router.expert_ids;
    args.scores = memory.tensor(DType::kF32, {shape.num_tokens, shape.num_experts});
    softmax_kernel<<<static_cast<unsigned>((shape.num_tokens + 127) / 128), 128, 0, bench.stream>>>(
        static_cast<const unsigned short*>(router.logits.data), static_cast<float*>(args.scores.data),
        shape.num_tokens, shape.num_experts);
    args.draws = memory.tensor(DType::kF32, {shape.num_experts});
    const std::vector<float> draws(static_cast<std::size_t>(shape.num_experts), 0.5F);
    check(cudaMemcpy(args.draws.data, draws.data(), draws.size() * sizeof(float), cudaMemcpyHostToDevice),
          "draws");
    args.tile = kTile;
    args.token_offsets = memory.tensor(DType::kI32, {shape.num_tokens + 1});
    moestro::Context ctx = bench.ctx;
    ctx.workspace_bytes = moestro::rounding_workspace_bytes(shape.num_tokens, shape.num_experts, ctx);
    ctx.workspace = memory.take(ctx.workspace_bytes);
    for (const moestro::Rounding rounding :
         {moestro::Rounding::kNearest, moestro::Rounding::kUp, moestro::Rounding::kDown,
          moestro::Rounding::kStochastic, moestro::Rounding::kScore}) {
      args.rounding = rounding;
      args.rounded_ids = memory.tensor(
          DType::kI32,
          {moestro::rounded_slots(shape.num_tokens, shape.top_k, shape.num_experts, kTile, rounding)});
      char name[96];
      std::snprintf(name, sizeof name, "T%lld,E%lld,K%lld,tile%lld,%s",
                    static_cast<long long>(shape.num_tokens), static_cast<long long>(shape.num_experts),
                    static_cast<long long>(shape.top_k), static_cast<long long>(kTile), name_of(rounding));
      bench.report("rounding", name, bench.time(10, 12, [&] { return round_tokens(args, ctx); }), 0, 0);
    }
  }
}

using LayerShape = moestro::cli::NamedShape;

/// A name, or a name with another number of tokens: "qwen3-next@8192". The shape's name is that of `text`.
LayerShape parse_shape(const std::string& text) {
  const std::string name = text.substr(0, text.find('@'));
  for (LayerShape shape : moestro::cli::kNamedShapes) {
    if (name != shape.name) continue;
    shape.name = text.c_str();
    if (name.size() < text.size()) shape.num_tokens = std::atoll(text.c_str() + name.size() + 1);
    if (shape.num_tokens > 0) return shape;
  }
  std::fprintf(stderr, "stage_bench: --shapes: '%s' is neither the name of a shape nor NAME@T\n",
               text.c_str());
  std::exit(1);
}

LayerConfig config_of(const LayerShape& shape) {
  LayerConfig config;
  config.dtype = DType::kBF16;
  return moestro::cli::with_extents(config, shape);
}

/// The arguments of a layer's two calls over tensors of their own.
struct LayerArgs {
  moestro::LayerForwardArgs forward;
  moestro::LayerBackwardArgs backward;

  /// All but the routing, `saved` and d_weights.
  LayerArgs(const LayerConfig& config, Memory* memory) {
    const DType dtype = config.dtype;
    const std::int64_t num_tokens = config.num_tokens;
    const std::int64_t num_experts = config.num_experts;
    const std::int64_t d = config.d_model;
    forward.x = backward.x = memory->tensor(dtype, {num_tokens, d}, 1.0F);
    forward.w_up = backward.w_up = memory->tensor(dtype, {num_experts, config.h_width(), d}, 0.02F);
    forward.w_down = backward.w_down = memory->tensor(dtype, {num_experts, d, config.d_ff}, 0.02F);
    forward.y = memory->tensor(dtype, {num_tokens, d});
    backward.d_y = memory->tensor(dtype, {num_tokens, d}, 1.0F);
    backward.d_x = memory->tensor(dtype, {num_tokens, d});
    give_weight_gradients(config, dtype, memory);
  }
  void give_weight_gradients(const LayerConfig& config, DType dtype, Memory* memory) {
    backward.d_w_up = memory->tensor(dtype, {config.num_experts, config.h_width(), config.d_model});
    backward.d_w_down = memory->tensor(dtype, {config.num_experts, config.d_model, config.d_ff});
  }
  /// `offsets` where the routing is ragged.
  void give_routing(const TensorView& ids, const TensorView& weights, const TensorView& offsets,
                    const TensorView& d_weights) {
    forward.expert_ids = ids;
    forward.weights = backward.weights = weights;
    forward.token_offsets = backward.token_offsets = offsets;
    backward.d_weights = d_weights;
  }
  void give_saved(void* saved, std::size_t bytes) {
    forward.saved = backward.saved = saved;
    forward.saved_bytes = backward.saved_bytes = bytes;
  }
  Status step(const LayerConfig& config, const moestro::Context& ctx) const {
    const Status status = layer_forward(config, forward, ctx);
    return status.ok() ? layer_backward(config, backward, ctx) : status;
  }
};

void bench_layer(Bench& bench, const LayerShape& shape, const std::string& only) {
  const auto wants = [&](const char* what) { return only.empty() || only.find(what) != std::string::npos; };
  Memory memory;
  const LayerConfig config = config_of(shape);
  const std::int64_t num_slots = config.num_slots();
  const std::int64_t width = config.h_width();
  const DType bf16 = DType::kBF16;
  moestro::Context ctx = bench.ctx;
  const moestro::LayerBytes bytes = moestro::layer_bytes(config, ctx);
  ctx.workspace_bytes = std::max(bytes.forward_workspace, bytes.backward_workspace);
  ctx.workspace = memory.take(ctx.workspace_bytes);
  const moestro::RouterForwardArgs router =
      route(bench, shape.num_tokens, shape.num_experts, shape.top_k, &memory);
  LayerArgs args(config, &memory);
  args.give_routing(router.expert_ids, router.weights, {},
                    memory.tensor(DType::kF32, {shape.num_tokens, shape.top_k}));
  args.give_saved(memory.take(bytes.saved), bytes.saved);
  const moestro::LayerForwardArgs& forward = args.forward;
  const moestro::LayerBackwardArgs& backward = args.backward;
  check(moestro::layer_forward(config, forward, ctx));

  const double product = 2.0 * static_cast<double>(num_slots) * static_cast<double>(shape.d_model) *
                         static_cast<double>(shape.d_ff);  // of one n x d matrix
  const double row_bytes = static_cast<double>(shape.d_model) * 2;
  const double combine_bytes = static_cast<double>(num_slots + shape.num_tokens) * row_bytes;
  if (wants("stages")) {
    const moestro::SavedView saved = moestro::view_saved(config, forward.saved);
    const TensorView a = memory.tensor(bf16, {num_slots, shape.d_ff});
    const TensorView rows = memory.tensor(bf16, {num_slots, shape.d_model});
    const TensorView d_h = memory.tensor(bf16, {num_slots, width});
    const TensorView a_scaled = memory.tensor(bf16, {num_slots, shape.d_ff});
    const TensorView row_weights = memory.tensor(DType::kF32, {num_slots});
    check(moestro::dispatch_row_weights({forward.weights, saved.index, row_weights}, ctx));
    moestro::UpForwardArgs up;
    up.x = forward.x;
    up.w_up = forward.w_up;
    up.index = saved.index;
    up.h = saved.h;
    up.a = a;
    bench.report("up_forward", shape.name, bench.time(1, 8, [&] { return up_forward(up, ctx); }), 2 * product,
                 0);
    moestro::DownForwardArgs down;
    down.a = a;
    down.w_down = forward.w_down;
    down.index = saved.index;
    down.y_rows = rows;
    bench.report("down_forward", shape.name, bench.time(1, 8, [&] { return down_forward(down, ctx); }),
                 product, 0);
    moestro::CombineArgs combine;
    combine.rows = rows;
    combine.weights = forward.weights;
    combine.index = saved.index;
    combine.tokens = forward.y;
    bench.report("combine_forward", shape.name,
                 bench.time(1, 12, [&] { return combine_forward(combine, ctx); }), 0, combine_bytes);
    moestro::DownBackwardArgs down_backward_args;
    down_backward_args.d_y = backward.d_y;
    down_backward_args.w_down = forward.w_down;
    down_backward_args.h = saved.h;
    down_backward_args.row_weights = row_weights;
    down_backward_args.index = saved.index;
    down_backward_args.d_h = d_h;
    down_backward_args.a_scaled = a_scaled;
    down_backward_args.d_weights = backward.d_weights;
    bench.report("down_backward", shape.name,
                 bench.time(1, 8, [&] { return down_backward(down_backward_args, ctx); }), product, 0);
    moestro::DownWeightBackwardArgs down_weight;
    down_weight.d_y = backward.d_y;
    down_weight.a_scaled = a_scaled;
    down_weight.row_weights = row_weights;
    down_weight.index = saved.index;
    down_weight.d_w_down = backward.d_w_down;
    bench.report("down_weight_backward", shape.name,
                 bench.time(1, 8, [&] { return down_weight_backward(down_weight, ctx); }), product, 0);
    moestro::UpBackwardArgs up_backward_args;
    up_backward_args.d_h = d_h;
    up_backward_args.w_up = forward.w_up;
    up_backward_args.index = saved.index;
    up_backward_args.d_x_rows = rows;
    bench.report("up_backward", shape.name,
                 bench.time(1, 8, [&] { return up_backward(up_backward_args, ctx); }), 2 * product, 0);
    combine.weights = {};
    combine.tokens = backward.d_x;
    bench.report("combine_backward", shape.name,
                 bench.time(1, 12, [&] { return combine_backward(combine, ctx); }), 0, combine_bytes);
    moestro::UpWeightBackwardArgs up_weight;
    up_weight.x = forward.x;
    up_weight.d_h = d_h;
    up_weight.index = saved.index;
    up_weight.d_w_up = backward.d_w_up;
    bench.report("up_weight_backward", shape.name,
                 bench.time(1, 8, [&] { return up_weight_backward(up_weight, ctx); }), 2 * product, 0);
  }
  if (wants("layer")) {
    bench.report("layer_forward", shape.name,
                 bench.time(1, 8, [&] { return layer_forward(config, forward, ctx); }), 3 * product, 0);
    bench.report("layer_backward", shape.name,
                 bench.time(1, 8, [&] { return layer_backward(config, backward, ctx); }), 6 * product, 0);
  }
  if (wants("accumulate")) {  // the step's gradients of the weights in their own dtype, and added to f32 ones
    LayerArgs adding = args;
    adding.give_weight_gradients(config, DType::kF32, &memory);
    adding.backward.accumulate = true;
    std::vector<double> plain_us, adding_us;
    for (int turn = 0; turn < 3; ++turn) {
      plain_us.push_back(bench.time(1, 8, [&] { return args.step(config, ctx); }));
      adding_us.push_back(bench.time(1, 8, [&] { return adding.step(config, ctx); }));
    }
    std::sort(plain_us.begin(), plain_us.end());
    std::sort(adding_us.begin(), adding_us.end());
    bench.report("layer_step", shape.name, plain_us[1], 9 * product, 0);
    bench.report("layer_step_f32_accumulate", shape.name, adding_us[1], 9 * product, 0);
  }
  if (wants("host")) {
    const auto host_us = [&](const std::function<Status()>& call) {
      constexpr int kCalls = 20;
      std::vector<double> times;
      for (int i = 0; i < kCalls; ++i) {
        check(cudaStreamSynchronize(bench.stream), "synchronize");
        const auto begin = std::chrono::steady_clock::now();
        check(call());
        times.push_back(
            std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count());
      }
      std::sort(times.begin(), times.end());
      return times[kCalls / 2];
    };
    bench.report("host_layer_forward", shape.name,
                 host_us([&] { return layer_forward(config, forward, ctx); }), 0, 0);
    bench.report("host_layer_backward", shape.name,
                 host_us([&] { return layer_backward(config, backward, ctx); }), 0, 0);
  }
}

/// Forward and backward of the layer with plain top-K and with token rounding to tiles of 64 and 128, by
/// turns; and what comes in addition: rounding, and the weights of the rounded pairs.
void bench_rounded_layer(Bench& bench, const LayerShape& shape) {
  Memory memory;
  const LayerConfig config = config_of(shape);
  const moestro::RouterForwardArgs router =
      route(bench, shape.num_tokens, shape.num_experts, shape.top_k, &memory);
  const TensorView scores = memory.tensor(DType::kF32, {shape.num_tokens, shape.num_experts});
  softmax_kernel<<<static_cast<unsigned>((shape.num_tokens + 127) / 128), 128, 0, bench.stream>>>(
      static_cast<const unsigned short*>(router.logits.data), static_cast<float*>(scores.data),
      shape.num_tokens, shape.num_experts);

  struct Way {
    std::string name;
    LayerConfig config;
    TensorView ids, weights, offsets;
    std::vector<double> us;
  };
  std::vector<Way> ways;
  ways.push_back({std::string(shape.name) + ",plain", config, router.expert_ids, router.weights, {}, {}});
  moestro::Context ctx = bench.ctx;
  ctx.workspace_bytes = moestro::rounding_workspace_bytes(shape.num_tokens, shape.num_experts, ctx);
  for (const std::int64_t tile : {64, 128}) {
    Way way;
    way.name = std::string(shape.name) + ",tile" + std::to_string(tile) + ",nearest";
    way.config = config;
    way.config.top_k = 0;
    way.config.ragged_slots = moestro::rounded_slots(shape.num_tokens, shape.top_k, shape.num_experts, tile,
                                                     moestro::Rounding::kNearest);
    way.ids = memory.tensor(DType::kI32, {way.config.ragged_slots});
    way.weights = memory.tensor(DType::kF32, {way.config.ragged_slots});
    way.offsets = memory.tensor(DType::kI32, {shape.num_tokens + 1});
    moestro::RoundingArgs rounding;
    rounding.expert_ids = router.expert_ids;
    rounding.scores = scores;
    rounding.tile = tile;
    rounding.rounded_ids = way.ids;
    rounding.token_offsets = way.offsets;
    moestro::RouterForwardArgs weigh = router;
    weigh.ids_given = true;
    weigh.expert_ids = way.ids;
    weigh.weights = way.weights;
    weigh.token_offsets = way.offsets;
    Memory scratch;
    ctx.workspace = scratch.take(ctx.workspace_bytes);
    check(round_tokens(rounding, ctx));
    bench.report("rounding", way.name.c_str(), bench.time(4, 8, [&] { return round_tokens(rounding, ctx); }),
                 0, 0);
    bench.report("router_forward,ids_given", way.name.c_str(),
                 bench.time(4, 8, [&] { return router_forward(weigh, ctx); }), 0, 0);
    ways.push_back(way);
  }

  Memory shared;
  std::size_t saved_bytes = 0;
  std::size_t workspace_bytes = 0;
  for (const Way& way : ways) {
    const moestro::LayerBytes bytes = moestro::layer_bytes(way.config, ctx);
    saved_bytes = std::max(saved_bytes, bytes.saved);
    workspace_bytes = std::max({workspace_bytes, bytes.forward_workspace, bytes.backward_workspace});
  }
  ctx.workspace_bytes = workspace_bytes;
  ctx.workspace = shared.take(workspace_bytes);
  void* const saved = shared.take(saved_bytes);
  LayerArgs args(config, &shared);
  args.give_saved(saved, saved_bytes);
  const TensorView d_weights = shared.tensor(DType::kF32, {ways.back().config.ragged_slots});
  for (int turn = 0; turn < 3; ++turn) {
    for (Way& way : ways) {
      TensorView d_slots = way.weights;  // the same shape
      d_slots.data = d_weights.data;
      args.give_routing(way.ids, way.weights, way.offsets, d_slots);
      way.us.push_back(bench.time(1, 5, [&] { return args.step(way.config, ctx); }));
    }
  }
  for (Way& way : ways) {
    std::sort(way.us.begin(), way.us.end());
    bench.report("layer_step", way.name.c_str(), way.us[way.us.size() / 2], 0, 0);
  }
}

}  // namespace

int main(int argc, char** argv) {
  Bench bench;
  bench.path = "auto";
  std::string shapes = "7B-n256,30B-n1024,olmoe";
  std::string only;
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::strcmp(argv[i], "--path") == 0) bench.path = argv[i + 1];
    if (std::strcmp(argv[i], "--shapes") == 0) shapes = argv[i + 1];
    if (std::strcmp(argv[i], "--only") == 0) only = argv[i + 1];
  }
  std::vector<std::string> names;
  std::istringstream words(shapes);
  for (std::string word; std::getline(words, word, ',');) names.push_back(word);
  std::vector<LayerShape> layer_shapes;  // all at once, so that a wrong name costs nothing
  for (const std::string& name : names) layer_shapes.push_back(parse_shape(name));
  bench.ctx.backend = moestro::BackendId::kCUDA;
  if (bench.path == "portable") bench.ctx.path = moestro::KernelPath::kPortable;
  if (bench.path == "hopper") bench.ctx.path = moestro::KernelPath::kHopper;
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, 0), "device");
  bench.device = properties.name;
  check(cudaStreamCreateWithFlags(&bench.stream, cudaStreamNonBlocking), "stream");
  bench.ctx.stream = bench.stream;
  const auto wants = [&](const char* what) { return only.empty() || only.find(what) != std::string::npos; };
  if (wants("router") || wants("dispatch"))
    bench_router_and_dispatch(bench, wants("router"), wants("dispatch"));
  if (wants("router")) bench_grouped_router(bench);
  if (wants("rounding")) bench_rounding(bench);
  for (const LayerShape& shape : layer_shapes) {
    if (wants("stages") || wants("layer") || wants("host") || wants("accumulate"))
      bench_layer(bench, shape, only);
    // Asked for by name only: it takes three layers' memory.
    if (only.find("rounded") != std::string::npos) bench_rounded_layer(bench, shape);
  }
  return 0;
}
