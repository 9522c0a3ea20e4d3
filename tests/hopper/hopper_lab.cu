/// Laboratory of the Hopper kernels: checks each against a plain product in f64, and times each beside a
/// cuBLAS batched product of the same extents. Needs a device of compute capability 9.0.
///
///   hopper_lab check            every kernel, variant and hard routing at small shapes; MOESTRO_LAB_UP_ALONE
///   hopper_lab samples SHAPE... the same by samples at large shapes; SHAPE as in cli/shapes.hpp, or all
///   hopper_lab turns SHAPE...   plans in turns with cuBLAS on a warm card, with its clock;
///                               MOESTRO_LAB_KERNELS=up,up_h,up_a,down,down_backward,up_backward,
///                               up_weight,down_weight,
///                               MOESTRO_LAB_ROUNDS, MOESTRO_LAB_TURN_MS; plans as tile.by_expert.raster in
///                               MOESTRO_LAB_UP_PLANS, _ROWS_PLANS (of down and dX~), _DOWN_BACKWARD_PLANS
///                               and _WEIGHT_PLANS
///   hopper_lab steps SHAPE...   forward and backward of the layer in turns, by the rules and with the plans
///                               that MOESTRO_LAB_STEP_PLANS lists, or else every tile of every product:
///                               product=tile.by_expert.raster.start, + between those forced together
///   hopper_lab profile SHAPE... each kernel once, for a profiler, or MOESTRO_LAB_ROWS_PLANS
/// MOESTRO_LAB_ZIPF skews the routing, MOESTRO_LAB_OAI takes SwiGLU-OAI and biases, MOESTRO_LAB_SILU SiLU
/// without gate; MOESTRO_LAB_F32 adds weights' gradients to f32 ones (turns); MOESTRO_LAB_OCCUPIED
/// multiprocessors belong to another kernel (turns and steps).
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iterator>
#include <numeric>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "cases.hpp"
#include "common/activation_math.hpp"
#include "cuda/hopper/hopper.hpp"
#include "cuda/hopper/plan.hpp"
#include "moestro/layer.hpp"
#include "shapes.hpp"
#include "support/occupied.hpp"
#include "support/report.hpp"

namespace m = moestro;
namespace hopper = moestro::cuda::hopper;
using moestro::DType;
using std::int64_t;

#define CHECK_CUDA(expression)                                                                     \
  do {                                                                                             \
    const cudaError_t error_ = (expression);                                                       \
    if (error_ != cudaSuccess) {                                                                   \
      std::printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #expression, cudaGetErrorString(error_)); \
      std::exit(2);                                                                                \
    }                                                                                              \
  } while (false)

static void check_status(const m::Status& status) {
  if (!status.ok()) {
    std::printf("status: %s\n", status.message());
    std::exit(2);
  }
}

struct Shape {
  const char* name;
  int64_t T, d, n, E, K;
};
static Shape shape_of(const m::cli::NamedShape& named) {
  return {named.name, named.num_tokens, named.d_model, named.d_ff, named.num_experts, named.top_k};
}

// ---- device buffers ----

struct Buffer {
  void* data = nullptr;
  std::size_t bytes = 0;
  explicit Buffer(std::size_t size) : bytes(size) {
    CHECK_CUDA(cudaMalloc(&data, std::max<std::size_t>(size, 16)));
    poison();
  }
  Buffer(const Buffer&) = delete;
  ~Buffer() { cudaFree(data); }
  void poison() { CHECK_CUDA(cudaMemset(data, 0xff, bytes)); }  // NaN in bf16, f16 and f32
  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
};

__device__ inline unsigned mix(unsigned x) {
  x ^= x >> 16;
  x *= 0x7feb352dU;
  x ^= x >> 15;
  x *= 0x846ca68bU;
  return x ^ (x >> 16);
}
/// Sum of four uniforms: close to a normal of the given deviation.
__device__ inline float noise(int64_t i, unsigned seed, float deviation) {
  float sum = 0;
  unsigned h = mix(static_cast<unsigned>(i) ^ mix(static_cast<unsigned>(i >> 32) + seed * 0x9e3779b9U));
  for (int j = 0; j < 4; ++j) {
    sum += static_cast<float>(h >> 8) * 0x1p-24F - 0.5F;
    h = mix(h + 0x68bc21ebU);
  }
  return sum * 1.7320508F * deviation;
}
template <class T>
__global__ void fill_kernel(T* data, int64_t count, unsigned seed, float deviation, float mean) {
  for (int64_t i = blockIdx.x * 256LL + threadIdx.x; i < count; i += gridDim.x * 256LL) {
    data[i] = T(noise(i, seed, deviation) + mean);
  }
}
template <class T>
static void fill(T* data, int64_t count, unsigned seed, float deviation, float mean = 0) {
  fill_kernel<<<2048, 256>>>(data, count, seed, deviation, mean);
}

// ---- routing ----

enum class Routing { kUniform, kZipf, kEmptyExperts, kSentinels };

struct HostIndex {
  std::vector<int> token, offsets, map, tiles, order;
  int num_tiles = 0;
};

static HostIndex route(const Shape& s, Routing routing, unsigned seed) {
  std::mt19937 rng(seed);
  std::vector<double> weight(s.E, 1.0);
  for (int64_t e = 0; e < s.E; ++e) {
    if (routing == Routing::kZipf) weight[e] = 1.0 / (e + 1);
    if (routing == Routing::kEmptyExperts && e % 3 == 1 && s.E - s.E / 3 > s.K) weight[e] = 0;
  }
  std::vector<std::vector<std::pair<int, int>>> rows(s.E);
  std::exponential_distribution<double> exponential(1.0);
  std::vector<std::pair<double, int>> key(s.E);
  std::uniform_int_distribution<int> pick(0, static_cast<int>(s.E) - 1);
  std::vector<int> chosen;
  HostIndex index;
  for (int64_t t = 0; t < s.T; ++t) {
    chosen.clear();
    if (routing == Routing::kUniform || routing == Routing::kSentinels) {
      while (static_cast<int64_t>(chosen.size()) < s.K) {
        const int e = pick(rng);
        if (std::find(chosen.begin(), chosen.end(), e) == chosen.end()) chosen.push_back(e);
      }
    } else {  // without replacement, in proportion to weight
      for (int64_t e = 0; e < s.E; ++e) {
        key[e] = {weight[e] > 0 ? exponential(rng) / weight[e] : 1e300, static_cast<int>(e)};
      }
      std::partial_sort(key.begin(), key.begin() + s.K, key.end());
      for (int64_t k = 0; k < s.K; ++k) chosen.push_back(key[k].second);
    }
    for (int64_t k = 0; k < s.K; ++k) {
      if (routing == Routing::kSentinels && rng() % 4 == 0) continue;
      rows[chosen[k]].push_back({static_cast<int>(t), static_cast<int>(t * s.K + k)});
    }
  }
  index.map.assign(s.T * s.K, -1);
  index.offsets.push_back(0);
  for (int64_t e = 0; e < s.E; ++e) {
    const int first = index.offsets.back();
    const int count = static_cast<int>(rows[e].size());
    for (const auto& [token, slot] : rows[e]) {
      index.map[slot] = static_cast<int>(index.token.size());
      index.token.push_back(token);
    }
    for (int r = 0; r < count; r += 128) {
      index.tiles.insert(index.tiles.end(), {static_cast<int>(e), first + r, std::min(128, count - r), 0});
    }
    index.offsets.push_back(first + count);
  }
  index.token.resize(s.T * s.K, 0);
  index.num_tiles = static_cast<int>(index.tiles.size() / 4);
  index.order.resize(s.E);
  std::iota(index.order.begin(), index.order.end(), 0);
  std::stable_sort(index.order.begin(), index.order.end(),
                   [&](int a, int b) { return rows[a].size() > rows[b].size(); });
  return index;
}

static Buffer* upload(const std::vector<int>& values) {
  auto* buffer = new Buffer(std::max<std::size_t>(values.size(), 1) * sizeof(int));
  CHECK_CUDA(cudaMemcpy(buffer->data, values.data(), values.size() * sizeof(int), cudaMemcpyHostToDevice));
  return buffer;
}

// ---- comparison ----

struct Error {
  double difference, reference;
  unsigned long long wrong;  ///< non-finite or far off
};

/// f(sample, reference, output): a warp a sample; every lane returns the same pair.
template <class F>
__global__ void compare_kernel(int64_t samples, F f, Error* error) {
  for (int64_t i = blockIdx.x * 8LL + threadIdx.x / 32; i < samples; i += gridDim.x * 8LL) {
    double reference = 0;
    double output = 0;
    f(i, reference, output);
    if (threadIdx.x % 32 == 0) {
      const double difference = output - reference;
      atomicAdd(&error->difference, difference * difference);
      atomicAdd(&error->reference, reference * reference);
      if (!(fabs(difference) <= 0.05 * fabs(reference) + 0.05)) atomicAdd(&error->wrong, 1ULL);
    }
  }
}
__device__ inline double warp_sum(double value) {
  for (int i = 16; i > 0; i /= 2) value += __shfl_xor_sync(0xffffffffU, value, i);
  return value;
}

static int failures = 0;

void m::test::report_failure(const std::string& what) {
  ++failures;
  std::printf("    FAILED: %s\n", what.c_str());
}

template <class F>
static void compare(const char* what, int64_t samples, double tolerance, F f) {
  static Error* error = nullptr;
  if (error == nullptr) CHECK_CUDA(cudaMalloc(&error, sizeof(Error)));
  CHECK_CUDA(cudaMemset(error, 0, sizeof(Error)));
  compare_kernel<<<4096, 256>>>(samples, f, error);
  Error host{};
  CHECK_CUDA(cudaMemcpy(&host, error, sizeof(Error), cudaMemcpyDeviceToHost));
  const double relative =
      host.reference > 0 ? std::sqrt(host.difference / host.reference) : std::sqrt(host.difference);
  const bool ok = relative <= tolerance && host.wrong == 0;
  if (!ok) {
    ++failures;
    std::printf("    FAILED %s: relative error %.3g, wrong %llu of %lld\n", what, relative, host.wrong,
                static_cast<long long>(samples));
  }
}

/// Counts 16-bit words from `begin` on that are not the poison.
__global__ void touched_kernel(const unsigned short* data, int64_t count, unsigned long long* touched) {
  for (int64_t i = blockIdx.x * 256LL + threadIdx.x; i < count; i += gridDim.x * 256LL) {
    if (data[i] != 0xffff) atomicAdd(touched, 1ULL);
  }
}
static void expect_untouched(const char* what, const Buffer& buffer, std::size_t from_byte) {
  static unsigned long long* touched = nullptr;
  if (touched == nullptr) CHECK_CUDA(cudaMalloc(&touched, 8));
  CHECK_CUDA(cudaMemset(touched, 0, 8));
  touched_kernel<<<256, 256>>>(buffer.as<unsigned short>() + from_byte / 2,
                               static_cast<int64_t>((buffer.bytes - from_byte) / 2), touched);
  unsigned long long host = 0;
  CHECK_CUDA(cudaMemcpy(&host, touched, 8, cudaMemcpyDeviceToHost));
  if (host != 0) {
    ++failures;
    std::printf("    FAILED %s: %llu words past the routed rows were written\n", what, host);
  }
}
/// A hash of the bits, to compare runs.
__global__ void hash_kernel(const unsigned* data, int64_t count, unsigned long long* hash) {
  unsigned long long sum = 0;
  for (int64_t i = blockIdx.x * 256LL + threadIdx.x; i < count; i += gridDim.x * 256LL) {
    sum += mix(data[i] ^ mix(static_cast<unsigned>(i)));
  }
  atomicAdd(hash, sum);
}
static unsigned long long hash_of(const Buffer& buffer) {
  static unsigned long long* hash = nullptr;
  if (hash == nullptr) CHECK_CUDA(cudaMalloc(&hash, 8));
  CHECK_CUDA(cudaMemset(hash, 0, 8));
  hash_kernel<<<512, 256>>>(buffer.as<unsigned>(), static_cast<int64_t>(buffer.bytes / 4), hash);
  unsigned long long host = 0;
  CHECK_CUDA(cudaMemcpy(&host, hash, 8, cudaMemcpyDeviceToHost));
  return host;
}

__device__ inline int expert_of(const int* offsets, int E, int row) {
  int low = 0;
  int high = E;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (offsets[middle] <= row ? low : high) = middle;
  }
  return low;
}

struct ActivationReference {
  m::Activation activation;
  __device__ void operator()(double gate, double up, double* value, double* slope_gate,
                             double* slope_up) const {
    using K = m::ActivationKind;
    using m::activation_math::gated;
    const double limit = activation.limit;
    const double alpha = activation.alpha;
    m::activation_math::GatedValue<double> g{};
    m::activation_math::ValueSlope<double> u{};
    switch (activation.kind) {
      case K::kSwiGLU: g = gated<K::kSwiGLU>(gate, up, limit, alpha); break;
      case K::kGeGLU: g = gated<K::kGeGLU>(gate, up, limit, alpha); break;
      case K::kGeGLUTanh: g = gated<K::kGeGLUTanh>(gate, up, limit, alpha); break;
      case K::kReGLU: g = gated<K::kReGLU>(gate, up, limit, alpha); break;
      case K::kSwiGLUClamp: g = gated<K::kSwiGLUClamp>(gate, up, limit, alpha); break;
      case K::kSwiGLUOAI: g = gated<K::kSwiGLUOAI>(gate, up, limit, alpha); break;
      case K::kReLU: u = m::activation_math::ungated<K::kReLU>(gate); break;
      case K::kReLU2: u = m::activation_math::ungated<K::kReLU2>(gate); break;
      case K::kGELU: u = m::activation_math::ungated<K::kGELU>(gate); break;
      case K::kSiLU: u = m::activation_math::ungated<K::kSiLU>(gate); break;
    }
    if (m::is_gated(activation.kind)) u = {g.value, g.slope_gate};
    *value = u.value;
    *slope_gate = u.slope;
    *slope_up = g.slope_up;
  }
};

// ---- the yardstick ----

struct Cublas {
  using Create = int (*)(void**);
  using Gemm = int (*)(void*, int, int, int, int, int, const void*, const void*, int, int, long long,
                       const void*, int, int, long long, const void*, void*, int, int, long long, int, int,
                       int);
  void* handle = nullptr;
  Gemm gemm = nullptr;
  Cublas() {
    void* library = dlopen("libcublas.so.13", RTLD_NOW);
    if (library == nullptr) {
      std::printf("no cuBLAS: %s\n", dlerror());
      return;
    }
    const auto create = reinterpret_cast<Create>(dlsym(library, "cublasCreate_v2"));
    gemm = reinterpret_cast<Gemm>(dlsym(library, "cublasGemmStridedBatchedEx"));
    if (create == nullptr || create(&handle) != 0) gemm = nullptr;
  }
  /// Row-major c[b] = op(a[b]) op(b[b]) with c of rows x cols.
  void run(bool transpose_a, bool transpose_b, int64_t rows, int64_t cols, int64_t k, const void* a,
           const void* b, void* c, int64_t batch, int type) const {
    const float one = 1;
    const float zero = 0;
    const int status =
        gemm(handle, transpose_b, transpose_a, static_cast<int>(cols), static_cast<int>(rows),
             static_cast<int>(k), &one, b, type, static_cast<int>(transpose_b ? k : cols), k * cols, a, type,
             static_cast<int>(transpose_a ? rows : k), rows * k, &zero, c, type, static_cast<int>(cols),
             rows * cols, static_cast<int>(batch), 68 /* f32 */, -1);
    if (status != 0) std::printf("cuBLAS status %d\n", status);
  }
};

/// For the card's clock: a multiprocessor's cycle counter and the nanosecond timer.
struct Stamp {
  unsigned long long cycles, ns;
};
constexpr int kMostMultiprocessors = 256;
/// stamps[multiprocessor], of those that are free.
__global__ void stamp_kernel(Stamp* stamps) {
  unsigned multiprocessor;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(multiprocessor));
  if (multiprocessor >= kMostMultiprocessors || threadIdx.x != 0) return;
  unsigned long long now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  stamps[multiprocessor] = {static_cast<unsigned long long>(clock64()), now};
}

static const char* tile_name(hopper::Product product, int tile) {
  static constexpr const char* kUpNames[] = {"128x256", "128x256 finisher"};
  static constexpr const char* kRowsNames[] = {"128x192 ping-pong", "128x256"};
  static constexpr const char* kDownBackwardNames[] = {"128x128 ping-pong", "128x256 finisher",
                                                       "128x256 finisher ahead"};
  static constexpr const char* kWeightNames[] = {"256x192", "128x256", "192x256"};
  static_assert(std::size(kUpNames) == hopper::kNumUpTiles &&
                std::size(kRowsNames) == hopper::kNumRowsTiles &&
                std::size(kDownBackwardNames) == hopper::kNumDownBackwardTiles &&
                std::size(kWeightNames) == hopper::kNumWeightTiles);
  switch (product) {
    case hopper::Product::kUp: return kUpNames[tile];
    case hopper::Product::kDown:
    case hopper::Product::kUpBackward: return kRowsNames[tile];
    case hopper::Product::kDownBackward: return kDownBackwardNames[tile];
    default: return kWeightNames[tile];
  }
}

/// A plan forced of one product.
struct TriedPlan {
  hopper::Product product;
  hopper::ForcedPlan plan;

  std::string name() const {
    std::string name = plan.tile < 0 ? "rule" : tile_name(product, plan.tile);
    if (plan.raster >= 0) name += " r" + std::to_string(plan.raster);
    if (plan.by_expert >= 0) name += plan.by_expert == 1 ? ", by expert" : ", in bands";
    static constexpr const char* kStarts[] = {", overlapping", ", together", ", in lockstep"};
    if (plan.start >= 0) name += kStarts[plan.start];
    return name;
  }
  /// tile.by_expert.raster and perhaps .start; -1 for what the rule takes.
  static TriedPlan parse(const char* what, hopper::Product product, const std::string& word) {
    TriedPlan tried{product, {}};
    hopper::ForcedPlan& p = tried.plan;
    if (std::sscanf(word.c_str(), "%d.%d.%d.%d", &p.tile, &p.by_expert, &p.raster, &p.start) < 3 ||
        p.tile < -1 || p.tile >= hopper::num_tiles(product) || p.start > 2) {
      std::printf("%s: %s is not tile.by_expert.raster[.start] with one of %d tiles\n", what, word.c_str(),
                  hopper::num_tiles(product));
      std::exit(2);
    }
    return tried;
  }
};

/// The plans that the environment's `variable` lists, or else the rule and every tile.
static std::vector<TriedPlan> tried_plans(const char* variable, hopper::Product product) {
  std::vector<TriedPlan> plans;
  const char* value = std::getenv(variable);
  if (value == nullptr) {
    for (int tile = -1; tile < hopper::num_tiles(product); ++tile) plans.push_back({product, {.tile = tile}});
    return plans;
  }
  std::istringstream words(value);
  for (std::string word; words >> word;) plans.push_back(TriedPlan::parse(variable, product, word));
  return plans;
}

template <class Call>
static void with_plans(const std::vector<TriedPlan>& plans, Call call) {
  for (const TriedPlan& tried : plans) hopper::force_plan(tried.product, tried.plan);
  call();
  hopper::force_plans();
}

struct Contestant {
  std::string name;
  std::function<void()> run;
  std::vector<double> ms;
  std::vector<double> ghz;
};

static double middle_of(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values.empty() ? 0 : values[values.size() / 2];
}

static double environment_number(const char* name, double otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr ? otherwise : std::atof(value);
}

static int num_occupied() {
  return static_cast<int>(environment_number("MOESTRO_LAB_OCCUPIED", 0));
}

/// Runs all contestants in turns on a card that is warm: turns of about `turn_ms`, in an order drawn anew for
/// each round. Fills in the times and clocks of all turns.
static void take_turns(std::vector<Contestant>& contestants, int rounds, double turn_ms) {
  using Stamps = Stamp[2][kMostMultiprocessors];  // before a turn, and after
  static Stamp* stamps = nullptr;
  static cudaEvent_t events[2];
  if (stamps == nullptr) {
    CHECK_CUDA(cudaMalloc(&stamps, sizeof(Stamps)));
    for (cudaEvent_t& event : events) CHECK_CUDA(cudaEventCreate(&event));
  }
  const auto turn = [&](Contestant& c, int count) {
    CHECK_CUDA(cudaMemset(stamps, 0, sizeof(Stamps)));
    for (int i = 0; i < (count + 1) / 2; ++i) c.run();  // the clock settles
    stamp_kernel<<<1024, 32>>>(stamps);
    CHECK_CUDA(cudaEventRecord(events[0]));
    for (int i = 0; i < count; ++i) c.run();
    CHECK_CUDA(cudaEventRecord(events[1]));
    stamp_kernel<<<1024, 32>>>(stamps + kMostMultiprocessors);
    CHECK_CUDA(cudaEventSynchronize(events[1]));
    float ms = 0;
    CHECK_CUDA(cudaEventElapsedTime(&ms, events[0], events[1]));
    return static_cast<double>(ms) / count;
  };
  std::vector<int> counts;
  for (Contestant& c : contestants) {
    counts.push_back(std::clamp(static_cast<int>(turn_ms / turn(c, 3)), 3, 400));
  }
  const m::test::Occupied occupied(num_occupied());
  for (int i = 0; i < 8; ++i) turn(contestants[0], counts[0]);  // the card warms
  std::mt19937 rng(7);
  std::vector<std::size_t> order(contestants.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  for (int round = 0; round < rounds; ++round) {
    std::shuffle(order.begin(), order.end(), rng);  // a turn inherits the clock of the one before
    for (const std::size_t which : order) {
      Contestant& c = contestants[which];
      c.ms.push_back(turn(c, counts[which]));
      Stamps host;
      CHECK_CUDA(cudaMemcpy(host, stamps, sizeof host, cudaMemcpyDeviceToHost));
      int i = 0;  // the first that has both
      while (i + 1 < kMostMultiprocessors && (host[0][i].ns == 0 || host[1][i].ns == 0)) ++i;
      c.ghz.push_back(static_cast<double>(host[1][i].cycles - host[0][i].cycles) /
                      static_cast<double>(host[1][i].ns - host[0][i].ns));
    }
  }
}

/// Plans that are forced together.
using TriedStep = std::vector<TriedPlan>;
static constexpr const char* kProductNames[] = {"up",          "down",        "down_backward",
                                                "up_backward", "down_weight", "up_weight"};
static_assert(std::size(kProductNames) == hopper::kNumProducts);

static std::string name_of(const TriedStep& step) {
  std::string name;
  for (const TriedPlan& plan : step) {
    name += (name.empty() ? "" : " + ") + std::string(kProductNames[static_cast<int>(plan.product)]) + ' ' +
            plan.name();
  }
  return name;
}

/// What MOESTRO_LAB_STEP_PLANS lists, or else every tile of every product.
static std::vector<TriedStep> tried_steps() {
  constexpr const char* kVariable = "MOESTRO_LAB_STEP_PLANS";
  std::vector<TriedStep> steps;
  const char* value = std::getenv(kVariable);
  if (value == nullptr) {
    for (int i = 0; i < hopper::kNumProducts; ++i) {
      const auto product = static_cast<hopper::Product>(i);
      for (int tile = 0; tile < hopper::num_tiles(product); ++tile)
        steps.push_back({{product, {.tile = tile}}});
    }
    return steps;
  }
  std::istringstream words(value);
  for (std::string word; words >> word;) {
    TriedStep step;
    std::istringstream parts(word);
    for (std::string part; std::getline(parts, part, '+');) {
      const std::size_t equals = part.find('=');
      const auto* const product =
          std::find(std::begin(kProductNames), std::end(kProductNames), part.substr(0, equals));
      if (equals == std::string::npos || product == std::end(kProductNames)) {
        std::printf("%s: %s is not product=plan\n", kVariable, part.c_str());
        std::exit(2);
      }
      step.push_back(TriedPlan::parse(kVariable,
                                      static_cast<hopper::Product>(product - std::begin(kProductNames)),
                                      part.substr(equals + 1)));
    }
    steps.push_back(step);
  }
  return steps;
}

// ---- one problem ----

enum class Mode { kCheck, kTurns, kProfile };

struct Options {
  m::Activation activation;
  m::GateLayout layout = m::GateLayout::kConcatenated;
  Routing routing = Routing::kUniform;
  bool bias = false;
  bool before = false;
  Mode mode = Mode::kCheck;
  bool up_alone = false;
};

/// Adds a row for bench/results to the file that MOESTRO_LAB_JSON names, if it does.
/// `flops` are those of a run; `yardstick_ms` is the time of what `c` took turns with.
static void write_row(const char* bench, const Shape& s, DType dtype, const Options& o, const char* kernel,
                      const Contestant& c, double flops, const char* yardstick, double yardstick_ms) {
  const char* path = std::getenv("MOESTRO_LAB_JSON");
  if (path == nullptr) return;
  const auto environment = [](const char* name) {
    const char* value = std::getenv(name);
    return value == nullptr ? "" : value;
  };
  cudaDeviceProp device{};
  CHECK_CUDA(cudaGetDeviceProperties(&device, 0));
  const double ms = middle_of(c.ms);
  if (std::FILE* file = std::fopen(path, "a")) {
    std::fprintf(file,
                 "{\"bench\": \"%s\", \"shape\": \"%s\", \"T\": %lld, \"d\": %lld, \"n\": %lld, "
                 "\"E\": %lld, \"K\": %lld, \"dtype\": \"%s\", \"routing\": \"%s\", \"kernel\": \"%s\", "
                 "\"variant\": \"%s\", \"ms\": %.4f, \"tflops\": %.1f, \"%s_tflops\": %.1f, "
                 "\"ghz\": %.3f, \"occupied\": %d, \"activation\": \"%s\", "
                 "\"device\": \"%s\", \"driver\": \"%s\", \"CUDA\": \"%d.%d\", \"date\": \"%s\", "
                 "\"commit\": \"%s\"}\n",
                 bench, s.name, (long long)s.T, (long long)s.d, (long long)s.n, (long long)s.E,
                 (long long)s.K, m::dtype_name(dtype), o.routing == Routing::kZipf ? "zipf" : "uniform",
                 kernel, c.name.c_str(), ms, flops / ms * 1e-9, yardstick, flops / yardstick_ms * 1e-9,
                 middle_of(c.ghz), num_occupied(), m::name_of(o.activation.kind), device.name,
                 environment("MOESTRO_LAB_DRIVER"), CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10,
                 environment("MOESTRO_LAB_DATE"), environment("MOESTRO_LAB_COMMIT"));
    std::fclose(file);
  }
}

/// The whole layer under the rules and under other plans, in turns: what a plan costs others in power, and
/// where they overlap, counts as well.
static void steps(const m::cli::NamedShape& named, const Options& o) {
  const Shape s = shape_of(named);
  m::LayerConfig config = m::cli::with_extents({}, named);
  config.dtype = DType::kBF16;
  config.activation = o.activation;
  config.gate_layout = o.layout;
  config.has_b_up = config.has_b_down = o.bias;
  m::Context ctx;
  ctx.backend = m::BackendId::kCUDA;
  ctx.path = m::KernelPath::kHopper;
  const m::test::BackendUnderTest target = m::cli::find_target(ctx);
  const auto routing =
      o.routing == Routing::kZipf ? m::test::RoutingKind::kZipf : m::test::RoutingKind::kUniform;
  m::cli::Problem problem(config, target, routing, 7);
  m::cli::CaseOptions layer_step;
  layer_step.stages = {"layer"};
  layer_step.pass = "step";
  const std::vector<m::cli::CaseGroup> cases = m::cli::make_cases(&problem, target, ctx, layer_step);
  const m::cli::Case& step = cases.front().front();

  std::printf("%s = T %lld, d %lld, n %lld, E %lld, K %lld\n", s.name, (long long)s.T, (long long)s.d,
              (long long)s.n, (long long)s.E, (long long)s.K);
  std::vector<Contestant> list = {{"rules", step.run, {}, {}}, {"rules again", step.run, {}, {}}};
  for (const TriedStep& tried : tried_steps()) {
    list.push_back({name_of(tried), [&step, tried] { with_plans(tried, step.run); }, {}, {}});
  }
  take_turns(list, static_cast<int>(environment_number("MOESTRO_LAB_ROUNDS", 7)),
             environment_number("MOESTRO_LAB_TURN_MS", 60));
  const double rules = middle_of(list[0].ms);
  for (const Contestant& c : list) {
    const double ms = middle_of(c.ms);
    std::printf("  step %-60s %8.3f ms [%.3f %.3f]  %.4f of the rules  %.3f GHz\n", c.name.c_str(), ms,
                *std::min_element(c.ms.begin(), c.ms.end()), *std::max_element(c.ms.begin(), c.ms.end()),
                ms / rules, middle_of(c.ghz));
    write_row("hopper_steps", s, config.dtype, o, "step", c, step.flops, "rules", rules);
  }
  std::fflush(stdout);
}

template <class Element>
struct Problem {
  static constexpr bool kBf16 = sizeof(Element) == 2 && std::is_same_v<Element, __nv_bfloat16>;
  static constexpr DType kType = kBf16 ? DType::kBF16 : DType::kF16;
  static constexpr double kTolerance = kBf16 ? 6e-3 : 1e-3;
  static constexpr int64_t kGuard = 130;

  Shape s;
  Options o;
  int64_t S, planes, W;
  HostIndex host;
  m::Index index;
  int64_t R;
  Buffer x, d_y, w_up, w_down, b_up, b_down, s_row, h, a, y, d_h, d_h_bias, a_scaled, d_x, d_w_up, d_w_down,
      d_weights, work;
  Cublas* cublas;

  static std::size_t size(int64_t a, int64_t b, int64_t c = 1) {
    return static_cast<std::size_t>(a * b * c) * 2;
  }

  Problem(const Shape& shape, const Options& options, Cublas* library)
      : s(shape),
        o(options),
        S(s.T * s.K),
        planes(m::h_width_factor(o.activation.kind)),
        W(planes * s.n),
        host(route(s, o.routing, 7)),
        R(host.offsets.back()),
        x(size(s.T, s.d)),
        d_y(size(s.T, s.d)),
        w_up(size(s.E, W, s.d)),
        w_down(size(s.E, s.d, s.n)),
        b_up(size(s.E, W)),
        b_down(size(s.E, s.d)),
        s_row(S * 4),
        h(size(S + kGuard, W)),
        a(size(S + kGuard, s.n)),
        y(size(S + kGuard, s.d)),
        d_h(size(S + kGuard, W)),
        d_h_bias(o.before ? size(S + kGuard, W) : 0),
        a_scaled(size(S + kGuard, s.n)),
        d_x(size(S + kGuard, s.d)),
        d_w_up(size(s.E, W, s.d) * 2),
        d_w_down(size(s.E, s.d, s.n) * 2),
        d_weights(S * 4),
        work(std::max({hopper::down_backward_workspace_bytes(S, s.n, true),
                       hopper::weight_backward_workspace_bytes(S, W, s.d),
                       hopper::weight_backward_workspace_bytes(S, s.n, s.d)})),
        cublas(library) {
    index.expert_token_indices = upload(host.token)->as<int>();
    index.expert_token_offsets = upload(host.offsets)->as<int>();
    index.token_index_map = upload(host.map)->as<int>();
    index.tiles = upload(host.tiles)->as<int>();
    index.num_tiles = upload({host.num_tiles})->as<int>();
    index.expert_order = upload(host.order)->as<int>();
    fill(x.as<Element>(), s.T * s.d, 1, 1.0F);
    fill(d_y.as<Element>(), s.T * s.d, 2, 1.0F);
    fill(w_up.as<Element>(), s.E * W * s.d, 3, 1.0F / std::sqrt(static_cast<float>(s.d)));
    fill(w_down.as<Element>(), s.E * s.d * s.n, 4, 1.0F / std::sqrt(static_cast<float>(s.n)));
    fill(b_up.as<Element>(), s.E * W, 5, 0.5F);
    fill(b_down.as<Element>(), s.E * s.d, 6, 0.5F);
    fill(s_row.as<float>(), R, 8, 0.2F, 0.5F);  // entries past R stay poisoned
  }
  ~Problem() {
    cudaFree(index.expert_token_indices);
    cudaFree(index.expert_token_offsets);
    cudaFree(index.token_index_map);
    cudaFree(index.tiles);
    cudaFree(index.num_tiles);
    cudaFree(index.expert_order);
  }

  m::TensorView view(const Buffer& b, std::initializer_list<int64_t> e, DType type = kType) const {
    return m::make_view(b.data, type, e);
  }
  m::Context context() const {
    m::Context ctx;
    ctx.backend = m::BackendId::kCUDA;
    static const bool counter = std::getenv("MOESTRO_LAB_STATIC") == nullptr;
    ctx.workspace = work.data;
    ctx.workspace_bytes = counter ? work.bytes : 0;
    return ctx;
  }

  m::UpForwardArgs up_args(bool with_h, bool with_a) const {
    m::UpForwardArgs args;
    args.x = view(x, {s.T, s.d});
    args.w_up = view(w_up, {s.E, W, s.d});
    if (o.bias) args.b_up = view(b_up, {s.E, W});
    args.row_weights = view(s_row, {S}, DType::kF32);
    args.index = index;
    args.activation = o.activation;
    args.gate_layout = o.layout;
    args.weight_position = o.before ? m::WeightPosition::kBefore : m::WeightPosition::kAfter;
    if (with_h) args.h = view(h, {S, W});
    if (with_a) args.a = view(a, {S, s.n});
    return args;
  }
  m::DownForwardArgs down_args() const {
    m::DownForwardArgs args;
    args.a = view(a, {S, s.n});
    args.w_down = view(w_down, {s.E, s.d, s.n});
    if (o.bias) args.b_down = view(b_down, {s.E, s.d});
    args.index = index;
    args.y_rows = view(y, {S, s.d});
    return args;
  }
  m::DownBackwardArgs down_backward_args() const {
    m::DownBackwardArgs args;
    args.d_y = view(d_y, {s.T, s.d});
    args.w_down = view(w_down, {s.E, s.d, s.n});
    if (o.bias) args.b_down = view(b_down, {s.E, s.d});
    args.h = view(h, {S, W});
    args.row_weights = view(s_row, {S}, DType::kF32);
    args.index = index;
    args.activation = o.activation;
    args.gate_layout = o.layout;
    args.d_h = view(d_h, {S, W});
    args.a_scaled = view(a_scaled, {S, s.n});
    if (o.before) {
      args.weight_position = m::WeightPosition::kBefore;
      if (o.bias) args.b_up = view(b_up, {s.E, W});
      args.d_h_bias = view(d_h_bias, {S, W});
    }
    if (context().workspace_bytes > 0) args.d_weights = view(d_weights, {s.T, s.K}, DType::kF32);
    return args;
  }
  m::UpBackwardArgs up_backward_args() const {
    m::UpBackwardArgs args;
    args.d_h = view(d_h, {S, W});
    args.w_up = view(w_up, {s.E, W, s.d});
    args.index = index;
    args.gate_layout = o.layout;
    args.gated = planes == 2;
    args.d_x_rows = view(d_x, {S, s.d});
    return args;
  }
  m::UpWeightBackwardArgs up_weight_args(DType type, bool accumulate) const {
    m::UpWeightBackwardArgs args;
    args.x = view(x, {s.T, s.d});
    args.d_h = view(d_h, {S, W});
    args.index = index;
    args.gate_layout = o.layout;
    args.gated = planes == 2;
    args.d_w_up = view(d_w_up, {s.E, W, s.d}, type);
    args.accumulate = accumulate;
    return args;
  }
  m::DownWeightBackwardArgs down_weight_args(DType type, bool accumulate) const {
    m::DownWeightBackwardArgs args;
    args.d_y = view(d_y, {s.T, s.d});
    args.a_scaled = view(a_scaled, {S, s.n});
    args.row_weights = view(s_row, {S}, DType::kF32);
    args.index = index;
    args.d_w_down = view(d_w_down, {s.E, s.d, s.n}, type);
    args.accumulate = accumulate;
    return args;
  }

  /// Sample i of rows x cols: all of them where there are few, else spread by a hash.
  static int64_t num_samples(int64_t rows, int64_t cols) { return std::min<int64_t>(rows * cols, 1 << 17); }
  static __device__ void sample(int64_t i, int64_t rows, int64_t cols, int64_t* row, int64_t* col) {
    int64_t j = i;
    if (rows * cols > (1 << 17)) {
      j = static_cast<int64_t>((static_cast<unsigned long long>(mix(static_cast<unsigned>(i))) << 20 ^
                                mix(static_cast<unsigned>(i) + 77U)) %
                               static_cast<unsigned long long>(rows * cols));
    }
    *row = j / cols;
    *col = j % cols;
  }

  void check_up() {
    const auto* px = x.as<Element>();
    const auto* pw = w_up.as<Element>();
    const auto* pb = b_up.as<Element>();
    const auto* ps = s_row.as<float>();
    const auto* ph = h.as<Element>();
    const auto* pa = a.as<Element>();
    const auto ix = index;
    const int64_t d = s.d, n = s.n, width = W, rows = R, E = s.E;
    const bool interleaved = planes == 2 && o.layout == m::GateLayout::kInterleaved;
    const bool bias = o.bias, before = o.before;
    const bool two = planes == 2;
    compare("up h", num_samples(rows, width), kTolerance,
            [=] __device__(int64_t i, double& ref, double& out) {
              int64_t row, col;
              sample(i, rows, width, &row, &col);
              const int e = expert_of(ix.expert_token_offsets, static_cast<int>(E), static_cast<int>(row));
              const int64_t w_row = interleaved ? (col % n) * 2 + col / n : col;
              const Element* xr = px + ix.expert_token_indices[row] * d;
              const Element* wr = pw + (e * width + w_row) * d;
              double sum = 0;
              for (int64_t k = threadIdx.x % 32; k < d; k += 32)
                sum += double(float(xr[k])) * double(float(wr[k]));
              ref = warp_sum(sum) + (bias && !before ? double(float(pb[e * width + w_row])) : 0.0);
              out = float(ph[row * width + col]);
            });
    const ActivationReference act{o.activation};
    compare("up a", num_samples(rows, n), kTolerance, [=] __device__(int64_t i, double& ref, double& out) {
      int64_t row, col;
      sample(i, rows, n, &row, &col);
      const int e = expert_of(ix.expert_token_offsets, static_cast<int>(E), static_cast<int>(row));
      double z[2] = {0, 0};
      for (int p = 0; p < (two ? 2 : 1); ++p) {
        z[p] = float(ph[row * width + p * n + col]);
        if (before) {
          z[p] = z[p] * ps[row];
          if (bias) z[p] += float(pb[e * width + (interleaved ? col * 2 + p : p * n + col)]);
        }
      }
      double slope_gate, slope_up;
      act(z[0], z[1], &ref, &slope_gate, &slope_up);
      out = float(pa[row * n + col]);
    });
    expect_untouched("up h", h, size(R, W));
    expect_untouched("up a", a, size(R, s.n));
  }

  void check_down() {
    const auto* pa = a.as<Element>();
    const auto* pw = w_down.as<Element>();
    const auto* pb = b_down.as<Element>();
    const auto* py = y.as<Element>();
    const auto ix = index;
    const int64_t d = s.d, n = s.n, rows = R, E = s.E;
    const bool bias = o.bias;
    compare("down y", num_samples(rows, d), kTolerance, [=] __device__(int64_t i, double& ref, double& out) {
      int64_t row, col;
      sample(i, rows, d, &row, &col);
      const int e = expert_of(ix.expert_token_offsets, static_cast<int>(E), static_cast<int>(row));
      double sum = 0;
      for (int64_t k = threadIdx.x % 32; k < n; k += 32) {
        sum += double(float(pa[row * n + k])) * double(float(pw[(e * d + col) * n + k]));
      }
      ref = warp_sum(sum) + (bias ? double(float(pb[e * d + col])) : 0.0);
      out = float(py[row * d + col]);
    });
    expect_untouched("down y", y, size(R, s.d));
  }

  void check_down_backward() {
    const auto* pdy = d_y.as<Element>();
    const auto* pw = w_down.as<Element>();
    const auto* pb = b_down.as<Element>();
    const auto* pbu = b_up.as<Element>();
    const auto* ph = h.as<Element>();
    const auto* pdh = d_h.as<Element>();
    const auto* pdhb = d_h_bias.as<Element>();
    const auto* pas = a_scaled.as<Element>();
    const auto* ps = s_row.as<float>();
    const auto ix = index;
    const int64_t d = s.d, n = s.n, width = W, rows = R, E = s.E;
    const bool two = planes == 2, bias = o.bias, before = o.before;
    const bool interleaved = two && o.layout == m::GateLayout::kInterleaved;
    const ActivationReference act{o.activation};
    const auto activated = [=] __device__(int64_t row, int64_t col, int e, double* value, double* slope) {
      double z[2] = {0, 0};
      for (int p = 0; p < (two ? 2 : 1); ++p) {
        z[p] = float(ph[row * width + p * n + col]);
        if (before) {
          z[p] *= ps[row];
          if (bias) z[p] += float(pbu[e * width + (interleaved ? col * 2 + p : p * n + col)]);
        }
      }
      act(z[0], z[1], value, &slope[0], &slope[1]);
    };
    for (int what = 0; what < 5; ++what) {
      const char* names[] = {"down backward d_h gate", "down backward d_h up", "down backward d_h_bias gate",
                             "down backward d_h_bias up", "down backward a_scaled"};
      if ((what % 2 == 1 && !two) || (!before && (what == 2 || what == 3))) continue;
      compare(names[what], num_samples(rows, n), kTolerance,
              [=] __device__(int64_t i, double& ref, double& out) {
                int64_t row, col;
                sample(i, rows, n, &row, &col);
                const int e = expert_of(ix.expert_token_offsets, static_cast<int>(E), static_cast<int>(row));
                double value, slope[2];
                activated(row, col, e, &value, slope);
                if (what == 4) {
                  ref = before ? value : value * ps[row];
                  out = float(pas[row * n + col]);
                  return;
                }
                const Element* dy = pdy + ix.expert_token_indices[row] * d;
                double g = 0;
                for (int64_t k = threadIdx.x % 32; k < d; k += 32) {
                  g += double(float(dy[k])) * double(float(pw[(e * d + k) * n + col]));
                }
                const int plane = what % 2;
                ref = warp_sum(g) * slope[plane] * (what < 2 ? ps[row] : 1.0F);
                out = float((what < 2 ? pdh : pdhb)[row * width + plane * n + col]);
              });
    }
    const auto* pds = d_weights.as<float>();
    const int64_t slots = S;
    const int64_t few = std::min<int64_t>(slots, 2048);
    const double scale = 1 / std::sqrt(static_cast<double>(d));  // to about 1
    compare("down backward d_weights", few, kTolerance, [=] __device__(int64_t i, double& ref, double& out) {
      const int64_t slot = i * (slots / few);
      const int row = ix.token_index_map[slot];
      out = pds[slot] * scale;
      ref = 0;
      if (row < 0) return;
      const int e = expert_of(ix.expert_token_offsets, static_cast<int>(E), row);
      const Element* dy = pdy + ix.expert_token_indices[row] * d;
      double sum = 0;
      for (int64_t col = threadIdx.x % 32; col < n; col += 32) {
        double value, slope[2];
        activated(row, col, e, &value, slope);
        float g = 0;
        for (int64_t k = 0; k < d; ++k) g += float(dy[k]) * float(pw[(e * d + k) * n + col]);
        if (before) {
          for (int p = 0; p < (two ? 2 : 1); ++p)
            sum += double(g) * slope[p] * float(ph[row * width + p * n + col]);
        } else {
          sum += double(g) * value;
        }
      }
      if (bias && !before) {
        for (int64_t k = threadIdx.x % 32; k < d; k += 32)
          sum += double(float(dy[k])) * double(float(pb[e * d + k]));
      }
      ref = warp_sum(sum) * scale;
    });
    expect_untouched("down backward d_h", d_h, size(R, W));
    if (before) expect_untouched("down backward d_h_bias", d_h_bias, size(R, W));
    expect_untouched("down backward a_scaled", a_scaled, size(R, s.n));
  }

  void check_up_backward() {
    const auto* pdh = d_h.as<Element>();
    const auto* pw = w_up.as<Element>();
    const auto* pdx = d_x.as<Element>();
    const auto ix = index;
    const int64_t d = s.d, n = s.n, width = W, rows = R, E = s.E;
    const bool interleaved = planes == 2 && o.layout == m::GateLayout::kInterleaved;
    compare("up backward d_x", num_samples(rows, d), kTolerance,
            [=] __device__(int64_t i, double& ref, double& out) {
              int64_t row, col;
              sample(i, rows, d, &row, &col);
              const int e = expert_of(ix.expert_token_offsets, static_cast<int>(E), static_cast<int>(row));
              double sum = 0;
              for (int64_t k = threadIdx.x % 32; k < width; k += 32) {
                const int64_t w_row = interleaved ? (k % n) * 2 + k / n : k;
                sum += double(float(pdh[row * width + k])) * double(float(pw[(e * width + w_row) * d + col]));
              }
              ref = warp_sum(sum);
              out = float(pdx[row * d + col]);
            });
    expect_untouched("up backward d_x", d_x, size(R, s.d));
  }

  /// d_weight[e][i][j] = sum_r left[r][i] right[r][j]; `base` was there before.
  template <class Output>
  void check_weight(const char* what, const Buffer& out_buffer, bool up, double base) {
    const auto* px = (up ? x : d_y).template as<Element>();
    const auto* pr = (up ? d_h : a_scaled).template as<Element>();
    const auto* po = out_buffer.as<Output>();
    const auto ix = index;
    const int64_t d = s.d, n = s.n, width = up ? W : s.n, E = s.E;
    const bool interleaved = up && planes == 2 && o.layout == m::GateLayout::kInterleaved;
    // The matrix units cut off low bits as they add: the error of a long sum grows with its length.
    const double tolerance =
        sizeof(Output) == 4 ? 1e-5 * std::max<double>(1, static_cast<double>(R) / s.E / 4096) : kTolerance;
    compare(what, num_samples(E * width, d), tolerance, [=] __device__(int64_t i, double& ref, double& out) {
      int64_t er, col;
      sample(i, E * width, d, &er, &col);
      const int64_t e = er / width, c = er % width;
      const int first = ix.expert_token_offsets[e], last = ix.expert_token_offsets[e + 1];
      double sum = 0;
      for (int r = first + threadIdx.x % 32; r < last; r += 32) {
        sum += double(float(pr[r * width + c])) * double(float(px[ix.expert_token_indices[r] * d + col]));
      }
      ref = warp_sum(sum) + base;
      const int64_t w_row = interleaved ? (c % n) * 2 + c / n : c;
      out = float(up ? po[(e * width + w_row) * d + col] : po[(e * d + col) * n + c]);
    });
  }

  /// Both weights' gradients, twice: the bits must be the same.
  void check_weights(DType type, bool accumulate) {
    const m::Context ctx = context();
    unsigned long long hash[2][2];
    for (auto& of_repeat : hash) {
      for (Buffer* buffer : {&d_w_up, &d_w_down}) {
        buffer->poison();
        if (!accumulate) continue;
        const auto count = static_cast<int64_t>(buffer->bytes / 4);
        type == DType::kF32 ? fill(buffer->as<float>(), count, 1, 0, 1.0F)
                            : fill(buffer->as<Element>(), count, 1, 0, 1.0F);
      }
      check_status(hopper::up_weight_backward(up_weight_args(type, accumulate), ctx, nullptr));
      check_status(hopper::down_weight_backward(down_weight_args(type, accumulate), ctx, nullptr));
      of_repeat[0] = hash_of(d_w_up);
      of_repeat[1] = hash_of(d_w_down);
    }
    if (std::memcmp(hash[0], hash[1], sizeof hash[0]) != 0) {
      ++failures;
      std::printf("    FAILED: the weights' gradients are not reproducible\n");
    }
    if (type == DType::kF32) {
      check_weight<float>("d_w_up f32", d_w_up, true, accumulate);
      check_weight<float>("d_w_down f32", d_w_down, false, accumulate);
    } else {
      check_weight<Element>("d_w_up", d_w_up, true, accumulate);
      check_weight<Element>("d_w_down", d_w_down, false, accumulate);
    }
  }

  void run() {
    std::printf(
        "%-12s T %lld d %lld n %lld E %lld K %lld, %s, %s%s%s%s, routing %d, R %lld of %lld, tiles %d\n",
        s.name, (long long)s.T, (long long)s.d, (long long)s.n, (long long)s.E, (long long)s.K,
        kBf16 ? "bf16" : "f16", "activation ", std::to_string((int)o.activation.kind).c_str(),
        o.layout == m::GateLayout::kInterleaved ? ", interleaved" : "", o.bias ? ", bias" : "",
        (int)o.routing, (long long)R, (long long)S, host.num_tiles);
    std::fflush(stdout);
    if (o.mode == Mode::kTurns) return turns();
    if (o.mode == Mode::kProfile) return profile();
    const m::Context ctx = context();
    check_status(hopper::up_forward(up_args(true, true), ctx, nullptr));
    check_up();
    const unsigned long long a_hash = hash_of(a);
    a.poison();
    check_status(hopper::up_forward(up_args(false, true), ctx, nullptr));
    if (hash_of(a) != a_hash) {
      ++failures;
      std::printf("    FAILED: A without H differs from A with H\n");
    }
    for (int tile = 0; tile < hopper::kNumUpTiles; ++tile) {
      for (const int by_expert : {0, 1}) {
        hopper::force_plan(hopper::Product::kUp, {.tile = tile, .by_expert = by_expert});
        h.poison();
        a.poison();
        check_status(hopper::up_forward(up_args(true, true), ctx, nullptr));
        check_up();
        if (hash_of(a) != a_hash) std::printf("    note: tile %d, walk %d: other bits\n", tile, by_expert);
        a.poison();
        check_status(hopper::up_forward(up_args(false, true), ctx, nullptr));
        if (hash_of(a) != a_hash) {
          ++failures;
          std::printf("    FAILED: tile %d: A without H differs\n", tile);
        }
      }
    }
    hopper::force_plans();
    if (o.up_alone) return;
    unsigned long long y_hash[hopper::kNumRowsTiles];
    for (int tile = 0; tile < hopper::kNumRowsTiles; ++tile) {
      hopper::force_plan(hopper::Product::kDown, {.tile = tile});
      y.poison();
      check_status(hopper::down_forward(down_args(), ctx, nullptr));
      check_down();
      y_hash[tile] = hash_of(y);
      if (y_hash[tile] != y_hash[0]) std::printf("    note: tile %d gives other bits\n", tile);
    }
    for (int run = 0; run < 2 * hopper::kNumDownBackwardTiles; ++run) {  // each tile twice
      static unsigned long long first[4];
      hopper::force_plan(hopper::Product::kDownBackward, {.tile = run / 2});
      d_h.poison();
      d_h_bias.poison();
      a_scaled.poison();
      d_weights.poison();
      check_status(hopper::down_backward(down_backward_args(), ctx, nullptr));
      if (run % 2 == 0) check_down_backward();
      const unsigned long long now[4] = {hash_of(d_h), hash_of(d_h_bias), hash_of(a_scaled),
                                         hash_of(d_weights)};
      if (run % 2 == 1 && std::memcmp(first, now, sizeof now) != 0) {
        ++failures;
        std::printf("    FAILED: down backward is not reproducible\n");
      }
      std::memcpy(first, now, sizeof now);
    }
    if (!o.before) {
      for (int tile = 0; tile < hopper::kNumRowsTiles; ++tile) {
        hopper::force_plan(hopper::Product::kUpBackward, {.tile = tile});
        d_x.poison();
        check_status(hopper::up_backward(up_backward_args(), ctx, nullptr));
        check_up_backward();
      }
      for (int tile = 0; tile < hopper::kNumWeightTiles; ++tile) {
        hopper::force_plan(hopper::Product::kDownWeight, {.tile = tile});
        hopper::force_plan(hopper::Product::kUpWeight, {.tile = tile});
        for (const DType type : {kType, DType::kF32}) {
          check_weights(type, false);
          check_weights(type, true);
        }
      }
    }
    hopper::force_plans();
    CHECK_CUDA(cudaDeviceSynchronize());
  }

  /// Each kernel once.
  void profile() {
    const m::Context ctx = context();
    if (std::getenv("MOESTRO_LAB_ROWS_PLANS") != nullptr) {  // down and dX~, a plan after the other
      for (const TriedPlan& plan : tried_plans("MOESTRO_LAB_ROWS_PLANS", hopper::Product::kDown)) {
        with_plans({plan, {hopper::Product::kUpBackward, plan.plan}}, [&] {
          check_status(hopper::down_forward(down_args(), ctx, nullptr));
          check_status(hopper::up_backward(up_backward_args(), ctx, nullptr));
        });
      }
      CHECK_CUDA(cudaDeviceSynchronize());
      return;
    }
    check_status(hopper::up_forward(up_args(true, true), ctx, nullptr));
    check_status(hopper::down_forward(down_args(), ctx, nullptr));
    check_status(hopper::down_backward(down_backward_args(), ctx, nullptr));
    check_status(hopper::up_backward(up_backward_args(), ctx, nullptr));
    check_status(hopper::up_weight_backward(up_weight_args(kType, false), ctx, nullptr));
    check_status(hopper::down_weight_backward(down_weight_args(kType, false), ctx, nullptr));
    CHECK_CUDA(cudaDeviceSynchronize());
  }

  /// Plans in turns with the yardstick of the same product.
  void turns() {
    const m::Context ctx = context();
    const char* kernels = std::getenv("MOESTRO_LAB_KERNELS");
    const std::string list_of_kernels =
        std::string(",").append(kernels != nullptr ? kernels : "").append(",");
    const auto wants = [&](const char* kernel) {
      return kernels == nullptr ||
             list_of_kernels.find(std::string(",").append(kernel).append(",")) != std::string::npos;
    };
    const int type = kBf16 ? 14 : 2;
    fill(y.as<Element>(), S * s.d, 9, 1.0F);  // stands for gathered rows
    check_status(hopper::up_forward(up_args(true, true), ctx, nullptr));
    check_up();
    fill(d_h.as<Element>(), S * W, 10, 1.0F);
    check_status(hopper::up_backward(up_backward_args(), ctx, nullptr));
    check_up_backward();
    const auto run_turns = [&](const char* kernel, double flops, std::vector<Contestant>& list) {
      take_turns(list, static_cast<int>(environment_number("MOESTRO_LAB_ROUNDS", 3)),
                 environment_number("MOESTRO_LAB_TURN_MS", 30));
      const double yardstick = middle_of(list[0].ms);
      for (const Contestant& c : list) {
        const double ms = middle_of(c.ms);
        const double cycles = ms * middle_of(c.ghz) * 1e6;
        std::printf(
            "  %-13s %-38s %8.3f ms [%.3f %.3f] %6.1f TF/s  %.3f of cuBLAS  %.3f GHz, %.3f Mcycles, %.3f "
            "busy\n",
            kernel, c.name.c_str(), ms, *std::min_element(c.ms.begin(), c.ms.end()),
            *std::max_element(c.ms.begin(), c.ms.end()), flops / ms * 1e-9, yardstick / ms, middle_of(c.ghz),
            cycles * 1e-6, flops / 132 / 4096 / cycles);
        write_row("hopper_turns", s, kType, o, kernel, c, flops, "cublas", yardstick);
      }
      std::fflush(stdout);
    };
    // cuBLAS, then the plans of the product that `variable` lists.
    const auto contestants = [&](auto yardstick, const char* variable, hopper::Product product, auto call) {
      std::vector<Contestant> list = {{"cuBLAS", yardstick, {}, {}}};
      for (const TriedPlan& plan : tried_plans(variable, product)) {
        list.push_back({plan.name(), [=] { with_plans({plan}, [&] { check_status(call()); }); }, {}, {}});
      }
      return list;
    };
    const auto product = [&](bool transpose_a, bool transpose_b, int64_t rows, int64_t cols, int64_t k,
                             const Buffer& left, const Buffer& right, const Buffer& out) {
      return [=, this, l = left.data, r = right.data, c = out.data] {
        cublas->run(transpose_a, transpose_b, rows, cols, k, l, r, c, s.E, type);
      };
    };
    const int64_t rows = S / s.E;
    const double up_flops = 2.0 * R * s.d * W;
    const double down_flops = 2.0 * R * s.d * s.n;
    struct Outputs {
      const char* name;
      bool h, a;
    };
    for (const auto& [name, with_h, with_a] :
         {Outputs{"up", true, true}, Outputs{"up_h", true, false}, Outputs{"up_a", false, true}}) {
      if (!wants(name)) continue;
      auto list = contestants(
          product(false, true, rows, W, s.d, y, w_up, h), "MOESTRO_LAB_UP_PLANS", hopper::Product::kUp,
          [=, this, h = with_h, a = with_a] { return hopper::up_forward(up_args(h, a), ctx, nullptr); });
      run_turns(name, up_flops, list);
    }
    if (wants("down")) {
      auto list = contestants(product(false, true, rows, s.d, s.n, a, w_down, d_x), "MOESTRO_LAB_ROWS_PLANS",
                              hopper::Product::kDown,
                              [=, this] { return hopper::down_forward(down_args(), ctx, nullptr); });
      run_turns("down", down_flops, list);
    }
    if (wants("down_backward")) {
      auto list = contestants(product(false, false, rows, s.n, s.d, y, w_down, a),
                              "MOESTRO_LAB_DOWN_BACKWARD_PLANS", hopper::Product::kDownBackward, [=, this] {
                                return hopper::down_backward(down_backward_args(), ctx, nullptr);
                              });
      run_turns("down_backward", down_flops, list);
    }
    if (wants("up_backward")) {
      auto list = contestants(product(false, false, rows, s.d, W, d_h, w_up, y), "MOESTRO_LAB_ROWS_PLANS",
                              hopper::Product::kUpBackward,
                              [=, this] { return hopper::up_backward(up_backward_args(), ctx, nullptr); });
      run_turns("up_backward", up_flops, list);
    }
    const bool into_f32 = std::getenv("MOESTRO_LAB_F32") != nullptr;
    const DType grad_type = into_f32 ? DType::kF32 : kType;
    if (wants("up_weight")) {
      auto list =
          contestants(product(true, false, W, s.d, rows, d_h, y, d_w_up), "MOESTRO_LAB_WEIGHT_PLANS",
                      hopper::Product::kUpWeight, [=, this] {
                        return hopper::up_weight_backward(up_weight_args(grad_type, into_f32), ctx, nullptr);
                      });
      run_turns("up_weight", up_flops, list);
    }
    if (wants("down_weight")) {
      fill(a_scaled.as<Element>(), R * s.n, 12, 1.0F);
      auto list = contestants(product(true, false, s.d, s.n, rows, y, a_scaled, d_w_down),
                              "MOESTRO_LAB_WEIGHT_PLANS", hopper::Product::kDownWeight, [=, this] {
                                return hopper::down_weight_backward(down_weight_args(grad_type, into_f32),
                                                                    ctx, nullptr);
                              });
      run_turns("down_weight", down_flops, list);
    }
  }
};

template <class Element>
static void run(const Shape& shape, const Options& options, Cublas* cublas) {
  Problem<Element>(shape, options, cublas).run();
}

int main(int argc, char** argv) {
  const std::string mode = argc < 2 ? "" : argv[1];
  if (mode != "check" && mode != "samples" && mode != "turns" && mode != "steps" && mode != "profile") {
    std::printf("usage: hopper_lab check | samples, turns, steps or profile SHAPE...\n");
    return 1;
  }
  Cublas cublas;
  if (mode == "check") {
    using K = m::ActivationKind;
    const Shape plain{"plain", 512, 256, 256, 4, 2};
    const Shape odd{"odd", 700, 200, 136, 9, 3};
    const Shape tiny{"tiny", 5, 64, 64, 4, 2};
    const Shape many{"many", 300, 320, 192, 64, 4};
    const Shape eight{"eight", 257, 72, 40, 5, 2};
    const Shape one{"one", 1, 128, 128, 1, 1};
    const Shape skewed{"skewed", 6007, 192, 72, 4, 2};  // sums of large experts are cut into parts
    Options base;
    base.up_alone = std::getenv("MOESTRO_LAB_UP_ALONE") != nullptr;
    const int only = argc > 2 ? std::atoi(argv[2]) : 99;
    int step = 0;
    const auto go = [&](const Shape& shape, const Options& options, bool f16 = false) {
      if (step++ > only) return;
      f16 ? run<__half>(shape, options, &cublas) : run<__nv_bfloat16>(shape, options, &cublas);
    };
    go(plain, base);
    for (const Shape& shape : {odd, tiny, many, eight, one}) go(shape, base);
    for (const Routing routing : {Routing::kZipf, Routing::kEmptyExperts, Routing::kSentinels}) {
      Options options = base;
      options.routing = routing;
      go(many, options);
      go(odd, options, true);
    }
    Options options = base;
    options.routing = Routing::kZipf;
    go(skewed, options);
    options = base;
    options.layout = m::GateLayout::kInterleaved;
    options.bias = true;
    go(odd, options);
    options.before = true;
    go(odd, options);
    options.layout = m::GateLayout::kConcatenated;
    go(many, options);
    options = base;
    options.activation.kind = K::kSwiGLUOAI;
    options.bias = true;
    go(many, options);
    options.layout = m::GateLayout::kInterleaved;
    go(odd, options, true);
    for (int kind = 0; kind < m::kNumActivationKinds; ++kind) {
      options = base;
      options.activation.kind = static_cast<K>(kind);
      options.activation.limit = 0.7F;
      go(odd, options, kind % 2 == 1);
    }
  } else {
    Options options;
    if (mode == "turns") options.mode = Mode::kTurns;
    if (mode == "profile") options.mode = Mode::kProfile;
    if (std::getenv("MOESTRO_LAB_OAI") != nullptr) {
      options.activation.kind = m::ActivationKind::kSwiGLUOAI;
      options.bias = true;
    }
    if (std::getenv("MOESTRO_LAB_SILU") != nullptr) options.activation.kind = m::ActivationKind::kSiLU;
    if (std::getenv("MOESTRO_LAB_ZIPF") != nullptr) options.routing = Routing::kZipf;
    for (const m::cli::NamedShape& named : m::cli::kNamedShapes) {
      bool wanted = false;
      for (int i = 2; i < argc; ++i) {
        wanted = wanted || std::strcmp(argv[i], named.name) == 0 || std::strcmp(argv[i], "all") == 0;
      }
      if (!wanted) continue;
      mode == "steps" ? steps(named, options) : run<__nv_bfloat16>(shape_of(named), options, &cublas);
    }
  }
  CHECK_CUDA(cudaDeviceSynchronize());
  std::printf(failures == 0 ? "all checks passed\n" : "%d checks FAILED\n", failures);
  return failures == 0 ? 0 : 1;
}
