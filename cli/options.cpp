#include "options.hpp"

#include <fmt/format.h>

#include <charconv>
#include <limits>
#include <utility>

#include "errors.hpp"
#include "shapes.hpp"
#include "text.hpp"

namespace moestro::cli {
namespace {

/// add_choice for an enum with kFirst … kFirst + count - 1 whose names name_of gives.
template <typename Enum>
CLI::Option* add_enum(CLI::App& app, const std::string& option, Enum* value, int count,
                      const std::string& help) {
  std::vector<std::string> names;
  for (int i = 0; i < count; ++i) names.emplace_back(name_of(static_cast<Enum>(i)));
  return add_choice(
      app, option, std::move(names), [value](std::size_t i) { *value = static_cast<Enum>(i); },
      name_of(*value), help);
}

constexpr std::int64_t kMaxWidth = std::int64_t{1} << 24;
constexpr std::int64_t kMaxExperts = std::int64_t{1} << 20;

void check_extent(const char* letter, const char* what, std::int64_t value, std::int64_t least,
                  std::int64_t most) {
  if (value < least || value > most) {
    fail("{} ({}) is {}, expected {} to {}", letter, what, value, least, most);
  }
}

}  // namespace

std::string Shape::text() const {
  return fmt::format("{},{},{},{},{}", num_tokens, d_model, d_ff, num_experts, top_k);
}

Shape parse_shape(const std::string& text) {
  std::vector<std::int64_t> numbers;
  const char* at = text.data();
  const char* const end = at + text.size();
  while (true) {
    std::int64_t number = 0;
    const auto [next, error] = std::from_chars(at, end, number);
    if (error != std::errc{} || (next != end && *next != ',')) {
      fail("--shape: '{}' is not T,d,n,E,K: five whole numbers with commas between them", text);
    }
    numbers.push_back(number);
    if (next == end) break;
    at = next + 1;
  }
  if (numbers.size() != 5) {
    fail("--shape: '{}' has {} number{}, expected five: T,d,n,E,K", text, numbers.size(),
         numbers.size() == 1 ? "" : "s");
  }
  Shape shape{text, numbers[0], numbers[1], numbers[2], numbers[3], numbers[4]};
  try {
    check_extents(shape);
  } catch (const UsageError& error) {
    fail("--shape: '{}': {}", text, error.what());
  }
  return shape;
}

void check_extents(const Shape& shape) {
  constexpr std::int64_t kMaxSlots = std::numeric_limits<std::int32_t>::max();
  check_extent("T", "tokens", shape.num_tokens, 0, kMaxSlots);
  check_extent("d", "model dimension", shape.d_model, 1, kMaxWidth);
  check_extent("n", "expert hidden dimension", shape.d_ff, 1, kMaxWidth);
  check_extent("E", "experts", shape.num_experts, 1, kMaxExperts);
  check_extent("K", "choices per token", shape.top_k, 1, kMaxExperts);
  if (shape.top_k > shape.num_experts) {
    fail("K (choices per token) is {}, expected at most E = {}", shape.top_k, shape.num_experts);
  }
  if (shape.num_tokens * shape.top_k > kMaxSlots) {
    fail("T*K is {}, expected at most {}: the index counts rows in 32 bits", shape.num_tokens * shape.top_k,
         kMaxSlots);
  }
}

const std::vector<Shape>& presets() {
  static const std::vector<Shape> shapes = [] {
    std::vector<Shape> all;
    for (const NamedShape& shape : kNamedShapes) {
      all.push_back(
          {shape.name, shape.num_tokens, shape.d_model, shape.d_ff, shape.num_experts, shape.top_k});
    }
    all.push_back({"cpu-n512", 4096, 512, 512, 32, 4});
    all.push_back({"cpu-n128", 4096, 256, 128, 128, 8});
    return all;
  }();
  return shapes;
}

std::vector<Shape> ShapeOptions::resolve(const std::string& fallback) const {
  std::vector<Shape> resolved;
  for (const std::string& text : shapes) resolved.push_back(parse_shape(text));
  for (const std::string& name : presets) {
    for (const Shape& preset : cli::presets()) {
      if (preset.name == name) resolved.push_back(preset);
    }
  }
  if (resolved.empty()) resolved.push_back(parse_shape(fallback));
  return resolved;
}

void add_shape_options(CLI::App& app, ShapeOptions* options, bool repeatable) {
  CLI::Option* shape = app.add_option("--shape", options->shapes,
                                      repeatable ? "T,d,n,E,K; may be given several times" : "T,d,n,E,K");
  shape->type_name("T,d,n,E,K")
      ->allow_extra_args(false)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  std::vector<std::string> names;
  for (const Shape& preset : presets()) names.push_back(preset.name);
  CLI::Option* preset = app.add_option("--preset", options->presets, "A shape by name: " + joined(names));
  preset->type_name("NAME")->allow_extra_args(false)->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  preset->check([names](const std::string& name) {
    for (const std::string& known : names) {
      if (known == name) return std::string();
    }
    return fmt::format("'{}' is not a preset; there are: {}", name, joined(names));
  });
  if (!repeatable) {
    shape->multi_option_policy(CLI::MultiOptionPolicy::Throw)->expected(1)->excludes(preset);
    preset->multi_option_policy(CLI::MultiOptionPolicy::Throw)->expected(1);
  }
}

CLI::Option* add_choice(CLI::App& app, const std::string& option, std::vector<std::string> names,
                        std::function<void(std::size_t)> assign, const std::string& shown_default,
                        const std::string& help) {
  const std::string list = joined(names);
  CLI::Option* added = app.add_option_function<std::string>(
      option,
      [option, names = std::move(names), assign = std::move(assign), list](const std::string& name) {
        for (std::size_t i = 0; i < names.size(); ++i) {
          if (names[i] == name) return assign(i);
        }
        throw CLI::ValidationError(option, fmt::format("'{}' is none of: {}", name, list));
      },
      help + ": " + list);
  return added->type_name("NAME")->default_str(shown_default);
}

LayerConfig LayerOptions::config(const Shape& shape) const {
  return with_extents(base, shape);
}

void add_dtype_option(CLI::App& app, DType* dtype) {
  static constexpr DType kTypes[] = {DType::kF32, DType::kF64, DType::kBF16, DType::kF16};
  add_choice(
      app, "--dtype", {"f32", "f64", "bf16", "f16"}, [dtype](std::size_t i) { *dtype = kTypes[i]; },
      dtype_name(*dtype), "Element type of x, the weights and y");
}

void add_activation_options(CLI::App& app, Activation* activation) {
  add_enum(app, "--activation", &activation->kind, kNumActivationKinds, "The experts' non-linearity");
  app.add_option("--limit", activation->limit, "Clamp of swiglu_clamp and swiglu_oai")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  app.add_option("--alpha", activation->alpha, "Slope of swiglu_oai's sigmoid")->capture_default_str();
}

void add_save_option(CLI::App& app, SavePolicy* save) {
  add_enum(app, "--save", save, 3, "What forward keeps for backward");
}

void add_weight_position_option(CLI::App& app, WeightPosition* position) {
  add_enum(app, "--weight-position", position, 2, "Where the routing weight acts, seen from the expert");
}

void add_layer_options(CLI::App& app, LayerOptions* options) {
  LayerConfig& base = options->base;
  add_dtype_option(app, &base.dtype);
  add_activation_options(app, &base.activation);
  add_save_option(app, &base.save);
  add_weight_position_option(app, &base.weight_position);
  add_enum(app, "--gate-layout", &base.gate_layout, 2, "Order of w_up's rows");
  app.add_flag("--bias-up", base.has_b_up, "Experts have b_up [E, 2n]");
  app.add_flag("--bias-down", base.has_b_down, "Experts have b_down [E, d]");
}

namespace {
constexpr const char* kBackendNames[] = {"reference", "cpu", "cuda"};
constexpr const char* kPathNames[] = {"auto", "portable", "hopper"};
constexpr const char* kRoutingNames[] = {"uniform", "zipf", "one", "half_empty", "duplicates"};
}  // namespace

const char* name_of_backend(BackendId id) {
  return kBackendNames[static_cast<int>(id)];
}
const char* name_of_path(KernelPath path) {
  return kPathNames[static_cast<int>(path)];
}
const char* name_of_routing(test::RoutingKind routing) {
  return kRoutingNames[static_cast<int>(routing)];
}

void add_context_options(CLI::App& app, Context* context) {
  add_choice(
      app, "--backend", {std::begin(kBackendNames), std::end(kBackendNames)},
      [context](std::size_t i) { context->backend = static_cast<BackendId>(i); },
      name_of_backend(context->backend), "Which implementation runs");
  app.add_option("--threads", context->num_threads, "CPU workers; 0 means all processors")
      ->capture_default_str()
      ->check(CLI::Range(0, 4096));
  add_choice(
      app, "--path", {std::begin(kPathNames), std::end(kPathNames)},
      [context](std::size_t i) { context->path = static_cast<KernelPath>(i); }, name_of_path(context->path),
      "CUDA kernels to use");
}

void add_routing_option(CLI::App& app, test::RoutingKind* routing) {
  add_choice(
      app, "--routing", {std::begin(kRoutingNames), std::end(kRoutingNames)},
      [routing](std::size_t i) { *routing = static_cast<test::RoutingKind>(i); }, name_of_routing(*routing),
      "How tokens choose experts (zipf: expert e with weight 1/(e+1); one: all the same)");
}

}  // namespace moestro::cli
