#include "model_config.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <nlohmann/json.hpp>

#include "errors.hpp"
#include "text.hpp"

namespace moestro::cli {
namespace {

using Json = nlohmann::json;
using Keys = std::initializer_list<const char*>;

const Keys kExpertKeys = {"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts",
                          "num_moe_experts"};
const Keys kTopKKeys = {"num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k",
                        "top_k_experts",       "experts_per_token"};
const Keys kWidthKeys = {"moe_intermediate_size", "expert_ffn_hidden_size", "moe_ffn_hidden_size",
                         "expert_intermediate_size"};
const Keys kDenseWidthKeys = {"intermediate_size", "ffn_hidden_size"};
const Keys kModelKeys = {"moe_latent_size", "hidden_size", "d_model", "n_embd"};
const Keys kLayerKeys = {"num_hidden_layers", "num_layers", "n_layers", "n_layer"};
const Keys kActivationKeys = {"mlp_hidden_act", "hidden_act", "hidden_activation"};
const Keys kDTypeKeys = {"dtype", "torch_dtype"};

constexpr std::int64_t kMaxLayers = 100000;

std::string list_of(Keys keys) {
  return joined({keys.begin(), keys.end()});
}

/// One file: looks keys up where the family puts them, and words the errors.
class Reader {
 public:
  Reader(std::string path, const Json& root) : path_(std::move(path)) {
    scopes_.push_back(&root);
    // Models with images or sound keep the language model's part in an object of its own.
    for (bool deeper = true; deeper;) {
      deeper = false;
      for (const char* name : {"text_config", "language_config", "llm_config", "thinker_config"}) {
        const auto found = scopes_.front()->find(name);
        if (found != scopes_.front()->end() && found->is_object()) {
          scopes_.insert(scopes_.begin(), &*found);
          deeper = true;
          break;
        }
      }
    }
    const auto ffn = scopes_.front()->find("ffn_config");  // DBRX
    if (ffn != scopes_.front()->end() && ffn->is_object()) scopes_.insert(scopes_.begin(), &*ffn);
  }

  struct Found {
    const char* key = nullptr;
    const Json* value = nullptr;
    explicit operator bool() const { return value != nullptr; }
  };

  /// The first of `keys` that is there and not null; innermost object first.
  Found find(Keys keys) const {
    for (const Json* scope : scopes_) {
      for (const char* key : keys) {
        const auto found = scope->find(key);
        if (found != scope->end() && !found->is_null()) return {key, &*found};
      }
    }
    return {};
  }

  std::int64_t whole(const char* key, const Json& value, std::int64_t least) const {
    if (!value.is_number_integer() || value.get<double>() < static_cast<double>(least) ||
        value.get<double>() > 2147483647.0) {
      std::string shown = value.dump(-1, ' ', false, Json::error_handler_t::replace);
      if (shown.size() > 40) shown = shown.substr(0, 37) + "...";
      fail("{}: {} is {}, expected a whole number from {} to 2147483647", path_, key, shown, least);
    }
    return value.get<std::int64_t>();
  }

  std::int64_t whole_or(const char* key, std::int64_t least, std::int64_t fallback) const {
    const Found found = find({key});
    return found ? whole(key, *found.value, least) : fallback;
  }

  Found require(Keys keys, const char* what) const {
    const Found found = find(keys);
    if (!found) fail("{}: no {}: looked for {}", path_, what, list_of(keys));
    return found;
  }

  /// A number, or a list with one number a layer.
  std::int64_t at_layer(const Found& found, std::int64_t layer, std::int64_t num_layers) const {
    if (!found.value->is_array()) return whole(found.key, *found.value, 1);
    if (static_cast<std::int64_t>(found.value->size()) != num_layers) {
      fail("{}: {} lists {} layers, expected {}", path_, found.key, found.value->size(), num_layers);
    }
    return whole(found.key, (*found.value)[static_cast<std::size_t>(layer)], 1);
  }

  std::string text_or(Keys keys, const std::string& fallback) const {
    const Found found = find(keys);
    if (!found) return fallback;
    if (!found.value->is_string()) fail("{}: {} is not a string", path_, found.key);
    return found.value->get<std::string>();
  }

  const Json* list(const char* key) const {
    const Found found = find({key});
    if (!found) return nullptr;
    if (!found.value->is_array()) fail("{}: {} is not a list", path_, key);
    return found.value;
  }

  const std::string& path() const { return path_; }

 private:
  std::string path_;
  std::vector<const Json*> scopes_;
};

/// Which layers have experts; every family's rule, applied where its keys are there.
std::vector<bool> find_moe_layers(const Reader& reader, std::int64_t num_layers) {
  std::vector<bool> moe(static_cast<std::size_t>(num_layers), true);
  const auto keep_if = [&moe](auto&& rule) {
    for (std::size_t i = 0; i < moe.size(); ++i) moe[i] = moe[i] && rule(static_cast<std::int64_t>(i));
  };
  const auto names_layer = [&reader](const char* key, const Json& layers, std::int64_t layer) {
    return std::any_of(layers.begin(), layers.end(),
                       [&](const Json& value) { return reader.whole(key, value, 0) == layer; });
  };

  for (const char* key : {"first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"}) {
    const std::int64_t dense = reader.whole_or(key, 0, 0);
    keep_if([dense](std::int64_t i) { return i >= dense; });
  }
  if (const std::int64_t last = reader.whole_or("moe_layer_end_index", -1, -1); last >= 0) {
    keep_if([last](std::int64_t i) { return i <= last; });
  }
  for (const char* key : {"decoder_sparse_step", "moe_layer_interval", "interleave_moe_layer_step"}) {
    if (reader.find({"moe_layers"}) && key == std::string("interleave_moe_layer_step")) continue;
    const std::int64_t step = reader.whole_or(key, 1, 1);
    keep_if([step](std::int64_t i) { return (i + 1) % step == 0; });
  }
  for (const char* key : {"moe_layer_freq", "moe_layer_frequency"}) {
    const Reader::Found found = reader.find({key});
    if (found && found.value->is_array()) {  // one flag a layer
      keep_if([&](std::int64_t i) {
        return i < static_cast<std::int64_t>(found.value->size()) &&
               reader.whole(key, (*found.value)[static_cast<std::size_t>(i)], 0) != 0;
      });
      continue;
    }
    const std::int64_t every = reader.whole_or(key, 1, 1);
    const std::int64_t offset = key == std::string("moe_layer_frequency") ? 1 : 0;  // Arctic counts from 1
    keep_if([every, offset](std::int64_t i) { return (i + offset) % every == 0; });
  }
  if (reader.find({"expert_layer_period"})) {  // Jamba
    const std::int64_t period = reader.whole_or("expert_layer_period", 1, 1);
    const std::int64_t offset = reader.whole_or("expert_layer_offset", 0, 0);
    keep_if([period, offset](std::int64_t i) { return i % period == offset; });
  }
  if (const Json* dense = reader.list("mlp_only_layers")) {
    keep_if([&](std::int64_t i) { return !names_layer("mlp_only_layers", *dense, i); });
  }
  if (const Json* listed = reader.list("moe_layers")) {
    keep_if([&](std::int64_t i) { return names_layer("moe_layers", *listed, i); });
  }
  if (const Json* kinds = reader.list("mlp_layer_types")) {
    keep_if([&](std::int64_t i) {
      const std::size_t at = static_cast<std::size_t>(i);
      return at < kinds->size() && (*kinds)[at] == "sparse";
    });
  }
  if (const Json* kinds = reader.list("layers_block_type")) {  // Nemotron-H; other families list mixers here
    if (std::find(kinds->begin(), kinds->end(), "moe") != kinds->end()) {
      keep_if([&](std::int64_t i) {
        const std::size_t at = static_cast<std::size_t>(i);
        return at < kinds->size() && (*kinds)[at] == "moe";
      });
    }
  } else if (const std::string pattern = reader.text_or({"hybrid_override_pattern"}, ""); !pattern.empty()) {
    keep_if([&](std::int64_t i) {
      const std::size_t at = static_cast<std::size_t>(i);
      return at < pattern.size() && pattern[at] == 'E';
    });
  }
  return moe;
}

std::optional<Activation> find_activation(const Reader& reader, const std::string& model_type) {
  Activation activation;
  const Reader::Found limit = reader.find({"swiglu_limit"});
  if (limit && limit.value->is_number() && limit.value->get<double>() > 0) {
    activation.limit = limit.value->get<float>();
  }
  if (model_type == "gpt_oss") {
    activation.kind = ActivationKind::kSwiGLUOAI;
    return activation;
  }
  std::string name = reader.text_or(kActivationKeys, "");
  const Reader::Found function = reader.find({"ffn_act_fn"});
  if (function && function.value->is_object()) name = function.value->value("name", "silu");
  if (name == "silu" || name == "swish") {
    activation.kind = limit ? ActivationKind::kSwiGLUClamp : ActivationKind::kSwiGLU;
  } else if (name == "gelu") {
    activation.kind = ActivationKind::kGeGLU;
  } else if (name == "gelu_pytorch_tanh" || name == "gelu_new" || name == "gelu_fast") {
    activation.kind = ActivationKind::kGeGLUTanh;
  } else if (name == "relu") {
    activation.kind = ActivationKind::kReGLU;
  } else if (name == "relu2") {
    activation.kind = ActivationKind::kReLU2;
  } else if (name.empty()) {
    return std::nullopt;
  } else {
    fail("{}: the activation '{}' is not known; name one with --activation", reader.path(), name);
  }
  return activation;
}

std::optional<DType> find_dtype(const Reader& reader) {
  const Reader::Found found = reader.find(kDTypeKeys);
  if (!found || !found.value->is_string()) return std::nullopt;
  const std::string name = found.value->get<std::string>();
  if (name == "bfloat16") return DType::kBF16;
  if (name == "float16") return DType::kF16;
  if (name == "float32") return DType::kF32;
  if (name == "float64") return DType::kF64;
  return std::nullopt;
}

Json parse_file(const std::string& path) {
  constexpr std::uintmax_t kMaxBytes = 16U << 20U;
  std::error_code error;
  if (!std::filesystem::exists(path, error)) fail("{}: no such file", path);
  if (!std::filesystem::is_regular_file(path, error)) fail("{}: not a file", path);
  if (std::filesystem::file_size(path, error) > kMaxBytes) fail("{}: too large for a config.json", path);
  std::ifstream file(path, std::ios::binary);
  if (!file) fail("{}: cannot be read", path);
  Json root;
  try {
    root = Json::parse(file);
  } catch (const Json::parse_error& parse) {
    std::string what = parse.what();  // "[json.exception.parse_error.101] parse error at line 1, …"
    if (const std::size_t at = what.find("] "); at != std::string::npos) what = what.substr(at + 2);
    fail("{}: not JSON: {}", path, what);
  }
  if (!root.is_object()) fail("{}: holds a JSON {}, expected an object", path, root.type_name());
  return root;
}

}  // namespace

std::int64_t ModelConfig::num_moe_layers() const {
  std::int64_t count = 0;
  for (const MoeLayers& group : groups) count += group.num_layers;
  return count;
}

ModelConfig read_model_config(const std::string& path) {
  std::error_code error;
  const std::string file = std::filesystem::is_directory(path, error)
                               ? (std::filesystem::path(path) / "config.json").string()
                               : path;
  const Json root = parse_file(file);
  const Reader reader(file, root);

  ModelConfig model;
  model.model_type = reader.text_or({"model_type"}, "model");
  if (const Reader::Found on = reader.find({"enable_moe_block"}); on && *on.value == false) {
    fail("{}: enable_moe_block is false: this model has no experts", file);
  }
  const Reader::Found experts = reader.require(kExpertKeys, "number of experts (is this a dense model?)");
  const Reader::Found top_k = reader.require(kTopKKeys, "number of experts per token");
  Reader::Found width = reader.find(kWidthKeys);
  if (!width) {
    width = reader.find(kDenseWidthKeys);
    if (!width) {
      fail("{}: no expert width: looked for {}, {}", file, list_of(kWidthKeys), list_of(kDenseWidthKeys));
    }
    model.notes.push_back(
        fmt::format("n is the file's {}: it names no width of its own for experts", width.key));
  }
  const Reader::Found d_model = reader.require(kModelKeys, "model dimension");

  if (const Json* kinds = reader.list("layers_block_type");
      kinds != nullptr && std::find(kinds->begin(), kinds->end(), "moe") != kinds->end()) {
    model.num_layers = static_cast<std::int64_t>(kinds->size());
  } else if (const std::string pattern = reader.text_or({"hybrid_override_pattern"}, ""); !pattern.empty()) {
    model.num_layers = static_cast<std::int64_t>(pattern.size());
  } else {
    const Reader::Found layers = model.model_type == "longcat_flash"  // num_hidden_layers counts twice there
                                     ? reader.require({"num_layers"}, "number of layers")
                                     : reader.require(kLayerKeys, "number of layers");
    model.num_layers = reader.whole(layers.key, *layers.value, 1);
  }
  if (model.num_layers > kMaxLayers)
    fail("{}: {} layers, expected at most {}", file, model.num_layers, kMaxLayers);

  const std::vector<bool> moe = find_moe_layers(reader, model.num_layers);
  for (std::int64_t i = 0; i < model.num_layers; ++i) {
    if (!moe[static_cast<std::size_t>(i)]) continue;
    const MoeLayers layer{
        reader.whole(d_model.key, *d_model.value, 1), reader.at_layer(width, i, model.num_layers),
        reader.at_layer(experts, i, model.num_layers), reader.at_layer(top_k, i, model.num_layers), 1};
    const auto alike = [&layer](const MoeLayers& other) {
      return other.d_ff == layer.d_ff && other.num_experts == layer.num_experts && other.top_k == layer.top_k;
    };
    const auto group = std::find_if(model.groups.begin(), model.groups.end(), alike);
    if (group == model.groups.end()) {
      model.groups.push_back(layer);
    } else {
      ++group->num_layers;
    }
  }
  if (model.groups.empty()) fail("{}: none of its {} layers has experts", file, model.num_layers);

  model.dtype = find_dtype(reader);
  model.activation = find_activation(reader, model.model_type);
  if (model.model_type == "gpt_oss") model.has_b_up = model.has_b_down = true;
  if (model.model_type.rfind("llama4", 0) == 0) model.weight_position = WeightPosition::kBefore;
  return model;
}

}  // namespace moestro::cli
