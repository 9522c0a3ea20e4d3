// moestro verify: one layer, forward and backward, against the double-precision reference. Every buffer is
// of exactly the documented size, lies between guard bytes and is filled with NaN before it is used.
#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "commands.hpp"
#include "errors.hpp"
#include "interrupt.hpp"
#include "moestro/backend.hpp"
#include "options.hpp"
#include "support/errors.hpp"
#include "support/random.hpp"
#include "support/report.hpp"
#include "support/run_layer.hpp"
#include "target.hpp"
#include "text.hpp"

namespace moestro {
namespace {
std::vector<std::string> reported_failures;
}

void test::report_failure(const std::string& what) {
  reported_failures.push_back(what);
}

namespace cli {
namespace {

using Json = nlohmann::ordered_json;

struct VerifyOptions {
  ShapeOptions shapes;
  LayerOptions layer;
  Context context;
  test::RoutingKind routing = test::RoutingKind::kUniform;
  double sentinels = 0;
  bool ragged = false;
  bool transposed = false;
  bool f32_grads = false;
  std::uint64_t seed = 1;
  bool json = false;
};

struct Line {
  std::string name;
  test::Comparison comparison;
  double relative(double error) const { return comparison.scale > 0 ? error / comparison.scale : error; }
};

/// Twice the error of plain arithmetic; but where few numbers make up the root mean square, one of them may
/// be further off by chance alone.
test::Tolerance tolerance_for(const test::Array& truth) {
  return truth.size() >= 256 ? test::Tolerance{} : test::Tolerance{.factor = 4, .floor = 4, .least_scale = 1};
}

std::vector<Line> compare_all(const test::LayerResult& got, const test::LayerProblem& problem,
                              DType grad_dtype) {
  check_interrupt();
  const test::LayerResult truth = test::true_layer(problem);
  check_interrupt();
  const test::LayerResult plain = test::plain_layer(problem, grad_dtype);
  check_interrupt();
  const DType dtype = problem.config.dtype;
  std::vector<Line> lines;
  const auto add = [&](const char* name, test::Array test::LayerResult::*member) {
    if (!(got.*member).present()) return;
    lines.push_back({name, test::compare(got.*member, truth.*member, plain.*member, dtype,
                                         tolerance_for(truth.*member))});
  };
  add("y", &test::LayerResult::y);
  add("d_x", &test::LayerResult::d_x);
  add("d_weights", &test::LayerResult::d_weights);
  add("d_w_up", &test::LayerResult::d_w_up);
  add("d_w_down", &test::LayerResult::d_w_down);
  add("d_b_up", &test::LayerResult::d_b_up);
  add("d_b_down", &test::LayerResult::d_b_down);
  return lines;
}

void print_json(const std::vector<Line>& lines, const test::LayerProblem& problem, const LayerBytes& bytes,
                const std::string& path, const VerifyOptions& options, bool passed) {
  const LayerConfig& config = problem.config;
  Json tensors = Json::array();
  for (const Line& line : lines) {
    const test::Comparison& c = line.comparison;
    tensors.push_back({{"name", line.name},
                       {"relative_error", line.relative(c.error)},
                       {"limit", line.relative(c.limit)},
                       {"plain_relative_error", line.relative(c.plain_error)},
                       {"worst_row", c.worst_row},
                       {"worst_row_error", line.relative(c.worst_row_error)},
                       {"worst_row_limit", line.relative(c.worst_row_limit)},
                       {"passed", c.passed()}});
  }
  const Json root = {{"passed", passed},
                     {"T", config.num_tokens},
                     {"d", config.d_model},
                     {"n", config.d_ff},
                     {"E", config.num_experts},
                     {"K", config.top_k},
                     {"slots", config.num_slots()},
                     {"dtype", dtype_name(config.dtype)},
                     {"activation", name_of(config.activation.kind)},
                     {"gate_layout", name_of(config.gate_layout)},
                     {"save", name_of(config.save)},
                     {"weight_position", name_of(config.weight_position)},
                     {"bias_up", config.has_b_up},
                     {"bias_down", config.has_b_down},
                     {"transposed", options.transposed},
                     {"routing", name_of_routing(options.routing)},
                     {"sentinels", options.sentinels},
                     {"seed", options.seed},
                     {"backend", name_of_backend(options.context.backend)},
                     {"path", path},
                     {"saved_bytes", bytes.saved},
                     {"forward_workspace_bytes", bytes.forward_workspace},
                     {"backward_workspace_bytes", bytes.backward_workspace},
                     {"tensors", tensors},
                     {"failures", reported_failures}};
  fmt::print("{}\n", root.dump(2));
}

void print_text(const std::vector<Line>& lines, const test::LayerProblem& problem, const LayerBytes& bytes,
                const std::string& path, const VerifyOptions& options, bool passed) {
  const LayerConfig& config = problem.config;
  fmt::print("T {}, d {}, n {}, E {}, {}, {} slots, {}, {}, {}, save {}, weight {}{}{}{}\n",
             config.num_tokens, config.d_model, config.d_ff, config.num_experts,
             config.top_k == 0 ? "ragged" : fmt::format("K {}", config.top_k), config.num_slots(),
             dtype_name(config.dtype), name_of(config.activation.kind), name_of(config.gate_layout),
             name_of(config.save), name_of(config.weight_position), config.has_b_up ? ", b_up" : "",
             config.has_b_down ? ", b_down" : "", options.transposed ? ", transposed weights" : "");
  fmt::print("{}\n", path);
  fmt::print("kept {}, workspace {} forward, {} backward\n\n", bytes_text(bytes.saved),
             bytes_text(bytes.forward_workspace), bytes_text(bytes.backward_workspace));
  Table table({"tensor", "relative error", "allowed", "plain", "worst row", "its error", "allowed", ""});
  for (const Line& line : lines) {
    const test::Comparison& c = line.comparison;
    if (!c.mismatch.empty()) {
      table.add({line.name, c.mismatch});
      continue;
    }
    const auto number = [&line](double error) { return fmt::format("{:.2e}", line.relative(error)); };
    table.add({line.name, number(c.error), number(c.limit), number(c.plain_error),
               fmt::format("{}", c.worst_row), number(c.worst_row_error), number(c.worst_row_limit),
               c.passed() ? "ok" : "FAILED"});
  }
  fmt::print("{}\n", table.text());
  for (const std::string& failure : reported_failures) fmt::print("FAILED: {}\n", failure);
  fmt::print("{}\n",
             passed ? "passed: two steps, alike to the bit, every error within what is allowed" : "FAILED");
}

int run(const VerifyOptions& options) {
  const Shape shape = options.shapes.resolve("96,48,40,8,2").front();
  LayerConfig config = options.layer.config(shape);
  const test::BackendUnderTest target = find_target(options.context);

  // Three runs in plain loops of one thread (reference, and the yardstick of plain arithmetic).
  const double loops = 36.0 * static_cast<double>(config.num_slots()) * static_cast<double>(config.d_model) *
                       static_cast<double>(config.d_ff);
  if (loops > 1e11) fmt::print(stderr, "moestro: the f64 reference will take about {:.0f} s\n", loops / 1e9);

  test::Rng rng(options.seed);
  test::RoutingOptions routing_options;
  routing_options.kind = options.routing;
  routing_options.sentinels = options.sentinels;
  const test::Routing routing =
      options.ragged
          ? test::make_ragged_routing(rng, shape.num_tokens, shape.num_experts, shape.top_k, routing_options)
          : test::make_routing(rng, shape.num_tokens, shape.num_experts, shape.top_k, routing_options);
  const test::Values values =
      test::has_kink(config.activation.kind) ? test::Values::kGrid : test::Values::kNormal;
  const test::LayerProblem problem = test::make_problem(rng, config, routing, values);

  test::RunOptions run_options;
  run_options.matrices.transposed = options.transposed;
  run_options.num_threads = options.context.num_threads;
  if (options.f32_grads) run_options.grad_dtype = DType::kF32;
  test::LayerRun layer(target, problem, run_options);
  check_interrupt();
  // The first step on fresh memory, the second on buffers that hold the first one's results.
  check(layer.forward());
  check(layer.backward());
  const std::vector<unsigned char> first = layer.output_bytes();
  layer.poison_workspaces();
  const test::LayerResult result = layer.run();
  if (layer.output_bytes() != first) {
    test::report_failure("the second step's results differ from the first one's bits");
  }
  const std::vector<Line> lines = compare_all(result, problem, run_options.grad_dtype.value_or(config.dtype));

  bool passed = reported_failures.empty();
  for (const Line& line : lines) passed = passed && line.comparison.passed();
  char path[512];
  find_backend(target.id)->describe_path(problem.config, options.context, path, sizeof path);
  (options.json ? print_json : print_text)(lines, problem, layer.bytes(), path, options, passed);
  return passed ? kExitDone : kExitFailed;
}

}  // namespace

void add_verify(CLI::App& app, Command* selected) {
  auto options = std::make_shared<VerifyOptions>();
  CLI::App* verify = app.add_subcommand(
      "verify",
      "A layer's forward and backward against the f64 reference; exit code 0 when all errors are small");
  add_shape_options(*verify, &options->shapes, false);
  add_layer_options(*verify, &options->layer);
  verify->add_flag("--transposed", options->transposed, "w_up stored [E, d, 2n], w_down [E, n, d]");
  verify->add_flag("--f32-grads", options->f32_grads, "Weights' and biases' gradients in f32");
  verify->add_flag("--ragged", options->ragged, "0 to 2K experts a token instead of K");
  verify->add_option("--sentinels", options->sentinels, "Fraction of slots that are not routed")
      ->capture_default_str()
      ->check(CLI::Range(0.0, 1.0));
  add_routing_option(*verify, &options->routing);
  verify->add_option("--seed", options->seed, "Of the random problem")->capture_default_str();
  add_context_options(*verify, &options->context);
  verify->add_flag("--json", options->json, "Print JSON (keys: docs/cli.md)");
  verify->callback([options, selected] { *selected = [options] { return run(*options); }; });
}

}  // namespace cli
}  // namespace moestro
