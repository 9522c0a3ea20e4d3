/// The layer shapes of published comparisons, by name, for the tool and the measuring programs. bench/peers
/// has the same in Python; a test compares the two.
#pragma once

#include <cstdint>

#include "moestro/config.hpp"

namespace moestro::cli {

struct NamedShape {
  const char* name;
  std::int64_t num_tokens, d_model, d_ff, num_experts, top_k;
};

/// `config` with the extents of a shape, of this kind or of options.hpp.
template <class AnyShape>
LayerConfig with_extents(LayerConfig config, const AnyShape& shape) {
  config.num_tokens = shape.num_tokens;
  config.d_model = shape.d_model;
  config.d_ff = shape.d_ff;
  config.num_experts = shape.num_experts;
  config.top_k = shape.top_k;
  return config;
}

inline constexpr NamedShape kNamedShapes[] = {
    {"1.4B-n256", 40960, 768, 256, 128, 8},    {"1.4B-n512", 40960, 768, 512, 64, 4},
    {"1.4B-n1024", 40960, 768, 1024, 32, 2},   {"7B-n256", 24576, 1536, 256, 128, 8},
    {"7B-n512", 24576, 1536, 512, 64, 4},      {"7B-n1024", 24576, 1536, 1024, 32, 2},
    {"30B-n256", 32768, 4096, 256, 256, 16},   {"30B-n512", 32768, 4096, 512, 128, 8},
    {"30B-n1024", 32768, 4096, 1024, 64, 4},   {"120B-n512", 32768, 4096, 512, 256, 16},
    {"120B-n1024", 32768, 4096, 1024, 128, 8}, {"120B-n2048", 32768, 4096, 2048, 64, 4},
    {"olmoe", 32768, 2048, 1024, 64, 8},       {"qwen3-next", 32768, 2048, 512, 512, 10},
    {"qwen3-235b", 32768, 4096, 1536, 128, 8}, {"qwen3-30b", 32768, 2048, 768, 128, 8},
    {"gpt-oss-20b", 32768, 2880, 2880, 32, 4}, {"deepseek-v3", 16384, 7168, 2048, 256, 8},
    {"conf1", 32768, 512, 2048, 4, 1},         {"conf2", 65536, 512, 2048, 8, 2},
    {"conf3", 65536, 1024, 4096, 16, 4},       {"conf4", 32768, 2048, 8192, 16, 4},
    {"conf5", 32768, 1024, 4096, 8, 2},        {"conf6", 32768, 2048, 8192, 8, 2},
    {"conf7", 65536, 1024, 4096, 8, 4},
};

}  // namespace moestro::cli
