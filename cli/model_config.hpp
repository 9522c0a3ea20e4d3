/// The MoE layers of a model, from a Hugging Face config.json.
///
/// Families spell the same facts differently; the lists of keys are in model_config.cpp. A key that is
/// missing or of the wrong type is a UsageError that names the file, the key and what it holds.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "moestro/config.hpp"

namespace moestro::cli {

/// Layers that are alike.
struct MoeLayers {
  std::int64_t d_model = 0;  ///< the dimension that experts see (a latent one where the model has it)
  std::int64_t d_ff = 0;
  std::int64_t num_experts = 0;
  std::int64_t top_k = 0;
  std::int64_t num_layers = 0;
};

struct ModelConfig {
  std::string model_type;
  std::int64_t num_layers = 0;    ///< of the whole model, dense ones too
  std::vector<MoeLayers> groups;  ///< never empty
  std::optional<DType> dtype;
  std::optional<Activation> activation;  ///< absent where the file does not say
  WeightPosition weight_position = WeightPosition::kAfter;
  bool has_b_up = false;
  bool has_b_down = false;
  std::vector<std::string> notes;  ///< what was guessed, for the reader

  std::int64_t num_moe_layers() const;
};

/// `path` is the file, or a folder that holds a config.json.
ModelConfig read_model_config(const std::string& path);

}  // namespace moestro::cli
