/// Options that several subcommands share, and the shapes with names.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "moestro/config.hpp"
#include "moestro/context.hpp"
#include "support/problem.hpp"

namespace moestro::cli {

struct Shape {
  std::string name;  ///< of the preset, or "T,d,n,E,K" as given
  std::int64_t num_tokens = 0;
  std::int64_t d_model = 0;
  std::int64_t d_ff = 0;
  std::int64_t num_experts = 0;
  std::int64_t top_k = 0;

  std::string text() const;  ///< "T,d,n,E,K"
};

/// "T,d,n,E,K"; a UsageError says what is wrong with `text`.
Shape parse_shape(const std::string& text);

/// Shapes with names: the 25 of the published comparisons and the two that the CPU is measured at.
const std::vector<Shape>& presets();

/// Throws a UsageError that names the option when an extent is outside what moestro takes: the index
/// counts rows in 32 bits, and the bytes must be countable.
void check_extents(const Shape& shape);

/// --shape and --preset. In the order given; `fallback` where neither was.
struct ShapeOptions {
  std::vector<std::string> shapes;
  std::vector<std::string> presets;
  std::vector<Shape> resolve(const std::string& fallback) const;
};
void add_shape_options(CLI::App& app, ShapeOptions* options, bool repeatable);

/// The choices of LayerConfig other than its extents.
struct LayerOptions {
  LayerConfig base;
  LayerConfig config(const Shape& shape) const;
};
void add_dtype_option(CLI::App& app, DType* dtype);
void add_activation_options(CLI::App& app, Activation* activation);
void add_save_option(CLI::App& app, SavePolicy* save);
void add_weight_position_option(CLI::App& app, WeightPosition* position);
/// All of the above, --gate-layout, --bias-up and --bias-down.
void add_layer_options(CLI::App& app, LayerOptions* options);

/// --backend, --threads, --path.
void add_context_options(CLI::App& app, Context* context);
const char* name_of_backend(BackendId id);
const char* name_of_path(KernelPath path);

/// An option that takes one of `names`; `assign` gets the index of the one given. A wrong name is answered
/// with the list. `shown_default` is for --help.
CLI::Option* add_choice(CLI::App& app, const std::string& option, std::vector<std::string> names,
                        std::function<void(std::size_t)> assign, const std::string& shown_default,
                        const std::string& help);

/// --routing: how tokens of a generated problem choose their experts.
void add_routing_option(CLI::App& app, test::RoutingKind* routing);
const char* name_of_routing(test::RoutingKind routing);

}  // namespace moestro::cli
