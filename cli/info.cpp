// moestro info: what this program is, what it runs on, and which path a shape takes.
#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "commands.hpp"
#include "machine.hpp"
#include "moestro/backend.hpp"
#include "options.hpp"
#include "text.hpp"

namespace moestro::cli {
namespace {

using Json = nlohmann::ordered_json;

struct InfoOptions {
  ShapeOptions shapes;
  LayerOptions layer;
  Context context;
  bool backend_given = false;
  bool json = false;
};

std::string path_of(const Backend& backend, const LayerConfig& config, const Context& context) {
  char text[512];
  backend.describe_path(config, context, text, sizeof text);
  return text;
}

Json gather(const InfoOptions& options) {
  Json root = {{"build", build_json()}, {"versions", versions_json()}, {"cpu", cpu_json()}};
  root["backends"] = Json::array();
  for (const BackendId id : {BackendId::kReference, BackendId::kCPU, BackendId::kCUDA}) {
    if (find_backend(id) != nullptr) root["backends"].push_back(name_of_backend(id));
  }
  if (options.shapes.shapes.empty() && options.shapes.presets.empty()) return root;

  root["paths"] = Json::array();
  for (const Shape& shape : options.shapes.resolve("")) {
    const LayerConfig config = options.layer.config(shape);
    for (const BackendId id : {BackendId::kReference, BackendId::kCPU, BackendId::kCUDA}) {
      const Backend* backend = find_backend(id);
      if (backend == nullptr || (options.backend_given && id != options.context.backend)) continue;
      Context context = options.context;
      context.backend = id;
      root["paths"].push_back({{"shape", shape.text()},
                               {"dtype", dtype_name(config.dtype)},
                               {"backend", name_of_backend(id)},
                               {"path", path_of(*backend, config, context)}});
    }
  }
  return root;
}

std::string words(const Json& list) {
  std::vector<std::string> names;
  for (const Json& name : list) names.push_back(name.get<std::string>());
  return joined(names);
}

int run(const InfoOptions& options) {
  const Json info = gather(options);
  if (options.json) {
    fmt::print("{}\n", info.dump(2));
    return kExitDone;
  }
  const Json& build = info["build"];
  const Json& versions = info["versions"];
  const Json& cpu = info["cpu"];
  const auto text = [](const Json& value) { return value.get<std::string>(); };
  fmt::print("{}\n", version_line());
  fmt::print("build      {}, {}, flags {}\n", text(build["build_type"]), text(build["compiler"]),
             text(build["flags"]));
  fmt::print("backends   {}\n", words(info["backends"]));
  fmt::print("cpu        {}, {} processors, {}{}{}\n", text(cpu["model"]),
             cpu["logical_processors"].get<unsigned>(), bytes_text(cpu["memory_bytes"].get<std::size_t>()),
             cpu["instructions"].empty() ? "" : ", ", words(cpu["instructions"]));
  fmt::print("openblas   {} ({} kernels)\n", text(versions["openblas"]),
             versions.value("openblas_core", "unknown"));
  fmt::print("cuda       {}\n", find_backend(BackendId::kCUDA) != nullptr
                                    ? "toolkit " + versions.value("cuda", "unknown")
                                    : std::string("not in this build"));
  if (info.contains("paths")) {
    for (const Json& path : info["paths"]) {
      fmt::print("path       {} {} on {}: {}\n", text(path["shape"]), text(path["dtype"]),
                 text(path["backend"]), text(path["path"]));
    }
  }
  return kExitDone;
}

}  // namespace

void add_info(CLI::App& app, Command* selected) {
  auto options = std::make_shared<InfoOptions>();
  CLI::App* info =
      app.add_subcommand("info", "Version, build, devices, and which path a shape takes and why");
  add_shape_options(*info, &options->shapes, true);
  add_layer_options(*info, &options->layer);
  add_context_options(*info, &options->context);
  info->add_flag("--json", options->json, "Print JSON (keys: docs/cli.md)");
  info->callback([info, options, selected] {
    options->backend_given = info->count("--backend") > 0;
    *selected = [options] { return run(*options); };
  });
}

}  // namespace moestro::cli
