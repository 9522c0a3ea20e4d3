// moestro bench: medians of the layer's and the stages' times, beside competitors measured in turns in the
// same run. Rows go to the screen and, as JSON lines, to --out (bench/README.md explains the keys).
#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cases.hpp"
#include "commands.hpp"
#include "errors.hpp"
#include "interrupt.hpp"
#include "machine.hpp"
#include "moestro/backend.hpp"
#include "options.hpp"
#include "target.hpp"
#include "text.hpp"

namespace moestro::cli {
namespace {

using Json = nlohmann::ordered_json;

struct BenchOptions {
  ShapeOptions shapes;
  LayerOptions layer;
  Context context;
  CaseOptions cases{{}, "all", "", DispatchBuilder::kAuto};
  test::RoutingKind routing = test::RoutingKind::kUniform;
  std::uint64_t seed = 1;
  int repeats = 20;
  int warmup = 3;
  std::string out;
  bool graph = false;
  bool json = false;
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

/// Times of every case of a group, in microseconds. Cases of a group take turns, and the first of each turn
/// changes, so that what the machine does meanwhile meets all of them alike.
std::vector<std::vector<double>> measure(const CaseGroup& group, Timer& timer, const BenchOptions& options) {
  for (int i = 0; i < options.warmup; ++i) {
    for (const Case& timed : group) {
      timed.run();
      check_interrupt();
    }
  }
  std::vector<std::vector<double>> times(group.size());
  for (int i = 0; i < options.repeats; ++i) {
    for (std::size_t turn = 0; turn < group.size(); ++turn) {
      const std::size_t which = (turn + static_cast<std::size_t>(i)) % group.size();
      times[which].push_back(timer.time_us(group[which].run));
      check_interrupt();
    }
  }
  return times;
}

/// Median over the turns of other / first.
double paired_ratio(const std::vector<double>& other, const std::vector<double>& first) {
  std::vector<double> ratios;
  for (std::size_t i = 0; i < other.size(); ++i) ratios.push_back(other[i] / first[i]);
  return median(std::move(ratios));
}

class Report {
 public:
  explicit Report(const BenchOptions& options)
      : options_(options),
        table_({"shape", "stage", "pass", "way", "median", "min", "rate", "kept", "peak", "time x", "kept x"},
               4) {
    if (!options.out.empty()) {
      file_.open(options.out, std::ios::app);
      if (!file_) fail("--out: {} cannot be opened for appending", options.out);
    }
  }

  void add(const Shape& shape, const LayerConfig& config, const Json& machine, const CaseGroup& group,
           const std::vector<std::vector<double>>& times) {
    for (std::size_t i = 0; i < group.size(); ++i) {
      const Case& timed = group[i];
      const double mid = median(times[i]);
      const double least = *std::min_element(times[i].begin(), times[i].end());
      Json row = {{"T", config.num_tokens},
                  {"d", config.d_model},
                  {"n", config.d_ff},
                  {"E", config.num_experts},
                  {"K", config.top_k},
                  {"dtype", dtype_name(config.dtype)},
                  {"shape", shape.name},
                  {"stage", timed.stage},
                  {"pass", timed.pass},
                  {"way", timed.way},
                  {"median_us", mid},
                  {"min_us", least},
                  {"repeats", options_.repeats},
                  {"warmup", options_.warmup},
                  {"activation", name_of(config.activation.kind)},
                  {"save", name_of(config.save)},
                  {"gate_layout", name_of(config.gate_layout)},
                  {"weight_position", name_of(config.weight_position)},
                  {"bias_up", config.has_b_up},
                  {"bias_down", config.has_b_down},
                  {"routing", name_of_routing(options_.routing)},
                  {"seed", options_.seed}};
      row.update(machine);
      if (timed.flops > 0) {
        row["flops"] = timed.flops;
        row["flops_per_s"] = timed.flops / mid * 1e6;
      }
      if (timed.bytes > 0) {
        row["bytes"] = timed.bytes;
        row["bytes_per_s"] = timed.bytes / mid * 1e6;
      }
      if (timed.kept_bytes > 0) {
        row["kept_bytes"] = timed.kept_bytes;
        row["peak_bytes"] = timed.peak_bytes;
      }
      std::string time_ratio;
      std::string kept_ratio;
      if (i > 0) {
        const double ratio = paired_ratio(times[i], times[0]);
        row["paired_ratio_median"] = ratio;
        time_ratio = fmt::format("{:.2f}", ratio);
        if (timed.kept_bytes > 0 && group[0].kept_bytes > 0) {
          const double kept =
              static_cast<double>(timed.kept_bytes) / static_cast<double>(group[0].kept_bytes);
          row["kept_ratio"] = kept;
          kept_ratio = fmt::format("{:.2f}", kept);
        }
      }
      row["date"] = utc_now();
      write(row);
      const bool layer = timed.kept_bytes > 0;
      table_.add({shape.name, timed.stage, timed.pass, timed.way, time_text(mid), time_text(least),
                  timed.flops > 0 ? rate_text(timed.flops, mid) : bandwidth_text(timed.bytes, mid),
                  layer ? bytes_text(timed.kept_bytes) : "", layer ? bytes_text(timed.peak_bytes) : "",
                  time_ratio, kept_ratio});
      compared_ = compared_ || i > 0;
    }
  }

  /// What was measured so far.
  void print() const {
    if (options_.json) return;
    fmt::print("{}", table_.text());
    if (compared_)
      fmt::print("\ntime x, kept x: times moestro's, in the same turns (median of {} pairs)\n",
                 options_.repeats);
  }

 private:
  void write(const Json& row) {
    const std::string line = row.dump();
    if (options_.json) {
      fmt::print("{}\n", line);
      std::fflush(stdout);
    }
    if (!file_.is_open()) return;
    file_ << line << std::endl;  // whole lines, also when interrupted
    if (!file_) fail("--out: writing to {} failed", options_.out);
  }

  const BenchOptions& options_;
  std::ofstream file_;
  Table table_;
  bool compared_ = false;
};

int run(const BenchOptions& options) {
  const test::BackendUnderTest target = find_target(options.context);
  const std::unique_ptr<Timer> timer = make_timer(target, options.graph);
  const std::string& compare = options.cases.compare;
  const auto times_stage = [&](const char* stage) {
    return std::find(options.cases.stages.begin(), options.cases.stages.end(), stage) !=
           options.cases.stages.end();
  };
  if (compare == "conventional" && !times_stage("layer")) fail("--compare conventional needs --stage layer");
  if (compare == "sort" && !times_stage("dispatch")) fail("--compare sort needs --stage dispatch");
  Report report(options);
  Context ctx = target.context();
  ctx.num_threads = options.context.num_threads;
  try {
    for (const Shape& shape : options.shapes.resolve("4096,512,512,32,4")) {
      const LayerConfig config = options.layer.config(shape);
      char path[512];
      find_backend(target.id)->describe_path(config, ctx, path, sizeof path);
      Json machine = {
          {"backend", name_of_backend(target.id)}, {"path", path}, {"device", device_name(target)}};
      if (target.device->on_host()) {
        machine["threads"] = num_threads(ctx);
      } else {
        machine["graph"] = options.graph;
      }
      machine["versions"] = versions_json();
      machine["commit"] = build_json()["commit"];
      Problem problem(config, target, options.routing, options.seed);
      std::vector<CaseGroup> groups = make_cases(&problem, target, ctx, options.cases);
      if (groups.empty()) fail("--pass {}: none of the stages asked for has it", options.cases.pass);
      if (!options.json) {
        fmt::print("{} = {}, {}, save {}: {}\n", shape.name, shape.text(), dtype_name(config.dtype),
                   name_of(config.save), path);
        std::fflush(stdout);
      }
      for (CaseGroup& group : groups) {
        report.add(shape, config, machine, group, measure(group, *timer, options));
      }
    }
  } catch (const Interrupted&) {
    report.print();
    throw;
  }
  if (!options.json) fmt::print("\n");
  report.print();
  return kExitDone;
}

}  // namespace

void add_bench(CLI::App& app, Command* selected) {
  auto options = std::make_shared<BenchOptions>();
  CLI::App* bench =
      app.add_subcommand("bench", "Times of the layer and of each stage, as a table and JSON lines");
  add_shape_options(*bench, &options->shapes, true);
  add_layer_options(*bench, &options->layer);
  bench
      ->add_option("--stage", options->cases.stages,
                   "layer (default) or a stage; may be given several times: " + joined(stage_names()))
      ->type_name("NAME")
      ->allow_extra_args(false)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->check([](const std::string& name) {
        const std::vector<std::string>& names = stage_names();
        if (name == "all" || std::find(names.begin(), names.end(), name) != names.end()) return std::string();
        return fmt::format("'{}' is none of: all, {}", name, joined(names));
      });
  add_choice(
      *bench, "--pass", pass_names(), [options](std::size_t i) { options->cases.pass = pass_names()[i]; },
      "all", "Which direction (step: forward and backward in one)");
  add_choice(
      *bench, "--compare", {"conventional", "sort"},
      [options](std::size_t i) { options->cases.compare = i == 0 ? "conventional" : "sort"; }, "",
      "Measure in turns with the layer done the materialising way, or dispatch with std::stable_sort");
  add_choice(
      *bench, "--builder", {"auto", "dense_map", "histogram"},
      [options](std::size_t i) { options->cases.builder = static_cast<DispatchBuilder>(i); }, "auto",
      "How dispatch builds the index");
  add_routing_option(*bench, &options->routing);
  bench->add_option("--repeats", options->repeats, "Timed runs; medians are over these")
      ->capture_default_str()
      ->check(CLI::Range(1, 1000000));
  bench->add_option("--warmup", options->warmup, "Runs before them")
      ->capture_default_str()
      ->check(CLI::Range(0, 1000000));
  bench->add_option("--seed", options->seed, "Of the random problem")->capture_default_str();
  add_context_options(*bench, &options->context);
  bench->add_flag("--graph", options->graph, "CUDA: time the replay of a CUDA Graph instead of the calls");
  bench->add_option("--out", options->out, "Append one JSON line a row to this file")->type_name("FILE");
  bench->add_flag("--json", options->json, "Print JSON lines instead of the table (keys: bench/README.md)");
  bench->callback([options, selected] {
    std::vector<std::string>& stages = options->cases.stages;
    if (std::find(stages.begin(), stages.end(), "all") != stages.end()) stages = stage_names();
    if (stages.empty()) stages = {"layer"};
    *selected = [options] { return run(*options); };
  });
}

}  // namespace moestro::cli
