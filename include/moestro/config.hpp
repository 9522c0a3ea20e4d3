/// What a layer is: its extents and the choices that its user makes.
///
/// Letters, the same everywhere: T tokens, d model dimension, n expert hidden dimension, E experts,
/// K choices per token, S routing slots (T*K, or the length of a ragged list), R routed rows (slots
/// whose id is a valid expert, R <= S; known on the device only).
#pragma once

#include <cstdint>

#include "moestro/tensor.hpp"

namespace moestro {

/// Gated kinds read H as [gate | up]; ungated kinds read it as one block of n columns.
enum class ActivationKind : std::uint8_t {
  kSwiGLU,       ///< silu(gate) * up
  kGeGLU,        ///< gelu(gate) * up, exact gelu (erf)
  kGeGLUTanh,    ///< gelu(gate) * up, tanh approximation
  kReGLU,        ///< relu(gate) * up
  kSwiGLUClamp,  ///< silu(min(gate, limit)) * clamp(up, -limit, limit)     (DeepSeek-V4, GLM)
  kSwiGLUOAI,    ///< g * sigmoid(alpha g) * (u + 1), g, u clamped as above (gpt-oss)
  kReLU,         ///< ungated
  kReLU2,        ///< ungated, relu(h)^2
  kGELU,         ///< ungated, exact
  kSiLU,         ///< ungated
};
constexpr int kNumActivationKinds = 10;

struct Activation {
  ActivationKind kind = ActivationKind::kSwiGLU;
  float limit = 7.0F;    ///< kSwiGLUClamp and kSwiGLUOAI only; > 0
  float alpha = 1.702F;  ///< kSwiGLUOAI only
};

constexpr bool is_gated(ActivationKind kind) {
  return kind <= ActivationKind::kSwiGLUOAI;
}

/// Columns of H per column of A: 2 when gated, else 1.
constexpr std::int64_t h_width_factor(ActivationKind kind) {
  return is_gated(kind) ? 2 : 1;
}

/// Order of w_up's 2n rows (and of b_up). H and its gradient are always [gate | up] in memory.
enum class GateLayout : std::uint8_t {
  kConcatenated,  ///< gate rows 0..n-1, up rows n..2n-1 (Hugging Face v5)
  kInterleaved,   ///< gate 0, up 0, gate 1, up 1, … (gpt-oss)
};

/// What forward keeps for backward beyond x, weights and the index.
enum class SavePolicy : std::uint8_t {
  kPreactivation,  ///< H (SonicMoE)
  kAll,            ///< H and A (MoEBlaze, algorithm 1)
  kNone,           ///< nothing; backward runs the up projection again
};

/// Where a token's routing weight acts.
enum class WeightPosition : std::uint8_t {
  kAfter,   ///< y[t] = sum_k w[t,k] * expert(x[t])
  kBefore,  ///< y[t] = sum_k expert(w[t,k] * x[t])       (Llama 4)
};

struct LayerConfig {
  std::int64_t num_tokens = 0;    ///< T >= 0
  std::int64_t d_model = 0;       ///< d >= 1
  std::int64_t d_ff = 0;          ///< n >= 1
  std::int64_t num_experts = 0;   ///< E >= 1
  std::int64_t top_k = 0;         ///< K >= 1; 0 for a ragged routing
  std::int64_t ragged_slots = 0;  ///< length of the ragged id list; read when top_k == 0
  DType dtype = DType::kF32;      ///< of x, the weights matrices, the biases and y
  Activation activation;
  GateLayout gate_layout = GateLayout::kConcatenated;
  SavePolicy save = SavePolicy::kPreactivation;
  WeightPosition weight_position = WeightPosition::kAfter;
  bool has_b_up = false;
  bool has_b_down = false;

  std::int64_t num_slots() const { return top_k == 0 ? ragged_slots : num_tokens * top_k; }
  std::int64_t h_width() const { return h_width_factor(activation.kind) * d_ff; }
};

/// Names as the command line and Python spell them ("swiglu_oai", "interleaved", "none", "before").
const char* name_of(ActivationKind kind);
const char* name_of(GateLayout layout);
const char* name_of(SavePolicy policy);
const char* name_of(WeightPosition position);

/// The inverse: false, and `*value` untouched, when `name` is none of the names.
bool parse_name(const char* name, ActivationKind* value);
bool parse_name(const char* name, GateLayout* value);
bool parse_name(const char* name, SavePolicy* value);
bool parse_name(const char* name, WeightPosition* value);
bool parse_name(const char* name, DType* value);

}  // namespace moestro
