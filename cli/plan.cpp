// moestro plan: memory and arithmetic of a training step, before anything runs. The figures are the
// library's (moestro/plan.hpp); this file reads the question and prints the answer.
#include "moestro/plan.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "commands.hpp"
#include "errors.hpp"
#include "model_config.hpp"
#include "moestro/backend.hpp"
#include "options.hpp"
#include "text.hpp"

namespace moestro::cli {
namespace {

using Json = nlohmann::ordered_json;

struct PlanOptions {
  std::string config_path;
  ShapeOptions shapes;
  std::int64_t tokens = -1;
  std::int64_t d_model = -1;
  std::int64_t d_ff = -1;
  std::int64_t experts = -1;
  std::int64_t top_k = -1;
  std::int64_t layers = -1;
  LayerConfig base;  ///< dtype, activation, weight position, biases
  bool dtype_given = false;
  bool activation_given = false;
  bool weight_position_given = false;
  std::string budget;
  Context context;
  bool json = false;
};

/// Everything known about the layers to plan.
struct Question {
  std::string title;
  std::vector<LayerConfig> configs;  ///< one a group
  std::vector<std::int64_t> num_layers;
  std::vector<std::string> notes;
};

/// One line of the answer: a save policy, or the conventional way.
struct Answer {
  std::string name;
  std::size_t kept_per_layer = 0;  ///< of the largest layer
  std::size_t forward_workspace = 0;
  std::size_t backward_workspace = 0;
  StepPlan step;
};

void override_from(std::int64_t given, std::int64_t* value) {
  if (given >= 0) *value = given;
}

LayerConfig layer_config(const PlanOptions& options, Shape shape) {
  override_from(options.tokens, &shape.num_tokens);
  override_from(options.d_model, &shape.d_model);
  override_from(options.d_ff, &shape.d_ff);
  override_from(options.experts, &shape.num_experts);
  override_from(options.top_k, &shape.top_k);
  check_extents(shape);
  LayerOptions layer;
  layer.base = options.base;
  return layer.config(shape);
}

Question question_of(const PlanOptions& options) {
  Question question;
  if (!options.config_path.empty()) {
    if (options.tokens < 0) fail("plan: --tokens is missing: how many tokens a step of one device has");
    const ModelConfig model = read_model_config(options.config_path);
    PlanOptions filled = options;
    if (!options.dtype_given) {
      filled.base.dtype = model.dtype.value_or(DType::kBF16);
      if (!model.dtype) question.notes.push_back("the file names no dtype: bf16 assumed");
    }
    if (!options.activation_given) {
      filled.base.activation = model.activation.value_or(Activation{});
      if (!model.activation) question.notes.push_back("the file names no activation: swiglu assumed");
    }
    if (!options.weight_position_given) filled.base.weight_position = model.weight_position;
    filled.base.has_b_up |= model.has_b_up;
    filled.base.has_b_down |= model.has_b_down;
    for (const MoeLayers& group : model.groups) {
      const Shape shape{"", options.tokens, group.d_model, group.d_ff, group.num_experts, group.top_k};
      question.configs.push_back(layer_config(filled, shape));
      question.num_layers.push_back(group.num_layers);
    }
    question.title = fmt::format("{}: {} of {} layers have experts", model.model_type, model.num_moe_layers(),
                                 model.num_layers);
    question.notes.insert(question.notes.end(), model.notes.begin(), model.notes.end());
    if (options.layers >= 0) {
      if (model.groups.size() > 1) fail("plan: --layers cannot replace the file's: its layers differ");
      question.num_layers.front() = options.layers;
      question.title = fmt::format("{}: {} layers with experts", model.model_type, options.layers);
    }
    return question;
  }

  Shape shape;
  if (!options.shapes.shapes.empty() || !options.shapes.presets.empty()) {
    shape = options.shapes.resolve("").front();
  } else {
    std::vector<std::string> missing;
    if (options.tokens < 0) missing.emplace_back("--tokens");
    if (options.d_model < 0) missing.emplace_back("--d-model");
    if (options.d_ff < 0) missing.emplace_back("--d-ff");
    if (options.experts < 0) missing.emplace_back("--experts");
    if (options.top_k < 0) missing.emplace_back("--top-k");
    if (!missing.empty()) {
      fail("plan: missing {} (or give --shape, --preset or a config.json with --tokens)", joined(missing));
    }
  }
  question.configs.push_back(layer_config(options, shape));
  question.num_layers.push_back(options.layers < 0 ? 1 : options.layers);
  question.title = fmt::format("{} layer{} with experts", question.num_layers.front(),
                               question.num_layers.front() == 1 ? "" : "s");
  return question;
}

/// Bytes are added in 64 bits: refuse what would not fit rather than print a wrapped number.
void check_countable(const Question& question) {
  double total = 0;
  for (std::size_t i = 0; i < question.configs.size(); ++i) {
    const LayerConfig& config = question.configs[i];
    const double widest = static_cast<double>(2 * config.d_model + 4 * config.h_width());
    const double rows = static_cast<double>(config.num_slots()) + static_cast<double>(config.num_experts);
    total += rows * widest * 8 * static_cast<double>(std::max<std::int64_t>(question.num_layers[i], 1));
    total += static_cast<double>(config.num_experts) * static_cast<double>(config.h_width() + config.d_ff) *
             static_cast<double>(config.d_model) * 8;
  }
  if (total > 4e18) fail("plan: these extents need more bytes than 64 bits can count");
}

template <typename PlanOf>
Answer answer_of(std::string name, const Question& question, PlanOf&& plan_of) {
  Answer answer;
  answer.name = std::move(name);
  std::vector<LayerGroup> groups;
  for (std::size_t i = 0; i < question.configs.size(); ++i) {
    const LayerPlan plan = plan_of(question.configs[i]);
    groups.push_back({plan, question.num_layers[i]});
    answer.kept_per_layer = std::max(answer.kept_per_layer, plan.kept_bytes);
    answer.forward_workspace = std::max(answer.forward_workspace, plan.forward_workspace_bytes);
    answer.backward_workspace = std::max(answer.backward_workspace, plan.backward_workspace_bytes);
  }
  answer.step = plan_step(groups);
  return answer;
}

std::string description(const LayerConfig& config) {
  return fmt::format("T {}, d {}, n {}, E {}, K {}, {}, {}{}{}, weight {} the expert", config.num_tokens,
                     config.d_model, config.d_ff, config.num_experts, config.top_k,
                     name_of(config.activation.kind), dtype_name(config.dtype),
                     config.has_b_up ? ", b_up" : "", config.has_b_down ? ", b_down" : "",
                     name_of(config.weight_position));
}

Json json_of(const Answer& answer) {
  return {{"kept_bytes_per_layer", answer.kept_per_layer},
          {"kept_bytes", answer.step.kept_bytes},
          {"forward_workspace_bytes", answer.forward_workspace},
          {"backward_workspace_bytes", answer.backward_workspace},
          {"peak_bytes", answer.step.peak_bytes},
          {"forward_flops", answer.step.forward_flops},
          {"backward_flops", answer.step.backward_flops}};
}

Json json_of(const ConventionalBytes& bytes) {
  return {{"index", bytes.index},       {"x_rows", bytes.x_rows}, {"h", bytes.h},
          {"gate", bytes.gate},         {"a", bytes.a},           {"y_rows", bytes.y_rows},
          {"d_y_rows", bytes.d_y_rows}, {"d_a", bytes.d_a},       {"d_h", bytes.d_h}};
}

void print_json(const Question& question, const std::vector<Answer>& policies, const Answer& conventional,
                const Answer* fits, const Context& context) {
  Json groups = Json::array();
  for (std::size_t i = 0; i < question.configs.size(); ++i) {
    const LayerConfig& config = question.configs[i];
    groups.push_back({{"T", config.num_tokens},
                      {"d", config.d_model},
                      {"n", config.d_ff},
                      {"E", config.num_experts},
                      {"K", config.top_k},
                      {"dtype", dtype_name(config.dtype)},
                      {"activation", name_of(config.activation.kind)},
                      {"weight_position", name_of(config.weight_position)},
                      {"bias_up", config.has_b_up},
                      {"bias_down", config.has_b_down},
                      {"layers", question.num_layers[i]},
                      {"x_bytes", config.num_tokens * config.d_model * dtype_bytes(config.dtype)},
                      {"parameter_bytes", parameter_bytes(config)},
                      {"conventional_parts", json_of(conventional_bytes(config))}});
  }
  Json root = {{"title", question.title}, {"backend", name_of_backend(context.backend)}, {"layers", groups}};
  Json policy_json;
  for (const Answer& answer : policies) policy_json[answer.name] = json_of(answer);
  root["policies"] = policy_json;
  root["conventional"] = json_of(conventional);
  root["fits"] = fits == nullptr ? Json() : Json(fits->name);
  root["notes"] = question.notes;
  fmt::print("{}\n", root.dump(2));
}

void print_text(const Question& question, const std::vector<Answer>& policies, const Answer& conventional) {
  fmt::print("{}\n", question.title);
  for (std::size_t i = 0; i < question.configs.size(); ++i) {
    fmt::print("  {} x {}\n", question.num_layers[i], description(question.configs[i]));
  }
  for (const std::string& note : question.notes) fmt::print("  note: {}\n", note);

  const bool differ = question.configs.size() > 1;
  Table table({"way", differ ? "kept, largest layer" : "kept a layer", "kept, all layers", "forward scratch",
               "backward scratch", "peak of a step", "forward", "backward"});
  const auto add = [&table](const std::string& name, const Answer& answer) {
    table.add({name, bytes_text(answer.kept_per_layer), bytes_text(answer.step.kept_bytes),
               bytes_text(answer.forward_workspace), bytes_text(answer.backward_workspace),
               bytes_text(answer.step.peak_bytes), flops_text(answer.step.forward_flops),
               flops_text(answer.step.backward_flops)});
  };
  for (const Answer& answer : policies) add("save " + answer.name, answer);
  add("conventional", conventional);
  fmt::print("\n{}\n", table.text());

  const LayerConfig& config = question.configs.front();
  const ConventionalBytes bytes = conventional_bytes(config);
  const bool after = config.weight_position == WeightPosition::kAfter;
  const char* width = is_gated(config.activation.kind) ? "2n" : "n";
  fmt::print("R = T*K = {} routed rows a layer, peak = kept in all layers + the largest scratch.\n",
             config.num_slots());
  fmt::print("preactivation keeps H R*{0} + index, all keeps A R*n as well, none the index alone.\n", width);
  fmt::print(
      "The conventional way keeps, a layer: permuted x R*d ({}) + H R*{} ({}){} + A R*n ({}){} + index "
      "({});\n",
      bytes_text(bytes.x_rows), width, bytes_text(bytes.h),
      bytes.gate > 0 ? fmt::format(" + act(gate) R*n ({})", bytes_text(bytes.gate)) : "", bytes_text(bytes.a),
      after ? fmt::format(" + Y R*d ({})", bytes_text(bytes.y_rows)) : "", bytes_text(bytes.index));
  fmt::print("its backward holds dY R*d ({}, later dX), dA R*n ({}) and dH R*{} ({}).\n",
             bytes_text(bytes.d_y_rows), bytes_text(bytes.d_a), width, bytes_text(bytes.d_h));
  fmt::print(
      "x itself, T*d ({} a layer), is kept by either way and in neither; the experts' weights are {} a "
      "layer.\n",
      bytes_text(static_cast<std::size_t>(config.num_tokens * config.d_model * dtype_bytes(config.dtype))),
      bytes_text(parameter_bytes(config)));
}

int run(const PlanOptions& options) {
  std::size_t budget = 0;
  if (!options.budget.empty() && !parse_bytes(options.budget, &budget)) {
    fail("--budget: '{}' is not a number of bytes (such as 80GiB, 512MiB or 1000000)", options.budget);
  }
  const Question question = question_of(options);
  check_countable(question);
  const Backend* backend = nullptr;
  check(require_backend(options.context.backend, &backend));

  std::vector<Answer> policies;
  for (const SavePolicy policy : {SavePolicy::kPreactivation, SavePolicy::kAll, SavePolicy::kNone}) {
    policies.push_back(answer_of(name_of(policy), question, [&](LayerConfig config) {
      config.save = policy;
      return plan_layer(config, options.context);
    }));
  }
  const Answer conventional = answer_of(
      "conventional", question, [](const LayerConfig& config) { return plan_conventional_layer(config); });

  // Least work first: `all` recomputes nothing, `preactivation` the activation, `none` a product as well.
  const Answer* fits = nullptr;
  if (!options.budget.empty()) {
    for (const Answer* answer : {&policies[1], &policies[0], &policies[2]}) {
      if (fits == nullptr && answer->step.peak_bytes <= budget) fits = answer;
    }
  }

  if (options.json) {
    print_json(question, policies, conventional, fits, options.context);
  } else {
    print_text(question, policies, conventional);
    if (!options.budget.empty()) {
      const bool all_fits = conventional.step.peak_bytes <= budget;
      fmt::print("\nBudget {}: ", bytes_text(budget));
      if (fits != nullptr) {
        fmt::print("take --save {}, which leaves {}. ", fits->name,
                   bytes_text(budget - fits->step.peak_bytes));
      } else {
        fmt::print("no policy fits; the smallest, {}, needs {} more. ", policies[2].name,
                   bytes_text(policies[2].step.peak_bytes - budget));
      }
      fmt::print("The conventional way {}.\n", all_fits ? "fits" : "does not fit");
    }
  }
  return options.budget.empty() || fits != nullptr ? kExitDone : kExitFailed;
}

}  // namespace

void add_plan(CLI::App& app, Command* selected) {
  auto options = std::make_shared<PlanOptions>();
  options->base.dtype = DType::kBF16;
  CLI::App* plan = app.add_subcommand("plan", "Memory and arithmetic of a training step, before it runs");
  plan->add_option("config", options->config_path, "A Hugging Face config.json, or a folder with one");
  add_shape_options(*plan, &options->shapes, false);
  const auto extent = [plan](const char* name, std::int64_t* value, const char* help) {
    plan->add_option(name, *value, help)->check(CLI::NonNegativeNumber);
  };
  extent("--tokens", &options->tokens, "T: tokens of a step on one device");
  extent("--d-model", &options->d_model, "d: model dimension");
  extent("--d-ff", &options->d_ff, "n: expert hidden dimension");
  extent("--experts", &options->experts, "E: experts");
  extent("--top-k", &options->top_k, "K: choices per token");
  plan->add_option("--layers", options->layers, "Layers with experts")->check(CLI::Range(0, 100000));
  add_dtype_option(*plan, &options->base.dtype);
  add_activation_options(*plan, &options->base.activation);
  add_weight_position_option(*plan, &options->base.weight_position);
  plan->add_flag("--bias-up", options->base.has_b_up, "Experts have b_up [E, 2n]");
  plan->add_flag("--bias-down", options->base.has_b_down, "Experts have b_down [E, d]");
  plan->add_option("--budget", options->budget,
                   "Say which policy's peak fits (80GiB); exit code 1 when none does")
      ->type_name("BYTES");
  add_context_options(*plan, &options->context);
  plan->add_flag("--json", options->json, "Print JSON (keys: docs/cli.md)");
  plan->callback([plan, options, selected] {
    options->dtype_given = plan->count("--dtype") > 0;
    options->activation_given = plan->count("--activation") > 0;
    options->weight_position_given = plan->count("--weight-position") > 0;
    *selected = [options] { return run(*options); };
  });
}

}  // namespace moestro::cli
