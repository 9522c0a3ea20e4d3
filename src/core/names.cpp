/// The enums' names, as the command line and Python spell them.
#include <cstring>

#include "moestro/config.hpp"
#include "moestro/rounding.hpp"
#include "moestro/router.hpp"

namespace moestro {
namespace {

template <typename Enum>
struct Name {
  Enum value;
  const char* text;
};

constexpr Name<ActivationKind> kActivationNames[] = {
    {ActivationKind::kSwiGLU, "swiglu"},
    {ActivationKind::kGeGLU, "geglu"},
    {ActivationKind::kGeGLUTanh, "geglu_tanh"},
    {ActivationKind::kReGLU, "reglu"},
    {ActivationKind::kSwiGLUClamp, "swiglu_clamp"},
    {ActivationKind::kSwiGLUOAI, "swiglu_oai"},
    {ActivationKind::kReLU, "relu"},
    {ActivationKind::kReLU2, "relu2"},
    {ActivationKind::kGELU, "gelu"},
    {ActivationKind::kSiLU, "silu"},
};
static_assert(sizeof kActivationNames / sizeof kActivationNames[0] == kNumActivationKinds);

constexpr Name<GateLayout> kGateLayoutNames[] = {
    {GateLayout::kConcatenated, "concatenated"},
    {GateLayout::kInterleaved, "interleaved"},
};
constexpr Name<SavePolicy> kSavePolicyNames[] = {
    {SavePolicy::kPreactivation, "preactivation"},
    {SavePolicy::kAll, "all"},
    {SavePolicy::kNone, "none"},
};
constexpr Name<WeightPosition> kWeightPositionNames[] = {
    {WeightPosition::kAfter, "after"},
    {WeightPosition::kBefore, "before"},
};
constexpr Name<DType> kDTypeNames[] = {
    {DType::kF32, "f32"}, {DType::kF64, "f64"}, {DType::kBF16, "bf16"},
    {DType::kF16, "f16"}, {DType::kI32, "i32"}, {DType::kI64, "i64"},
};

constexpr Name<RouterScore> kRouterScoreNames[] = {
    {RouterScore::kSoftmax, "softmax"},
    {RouterScore::kSigmoid, "sigmoid"},
    {RouterScore::kSqrtSoftplus, "sqrt_softplus"},
    {RouterScore::kIdentity, "identity"},
};
constexpr Name<WeightKind> kWeightKindNames[] = {
    {WeightKind::kScores, "scores"},
    {WeightKind::kRenormalized, "renormalized"},
    {WeightKind::kSoftmax, "softmax"},
    {WeightKind::kSigmoid, "sigmoid"},
};
constexpr Name<GroupMerit> kGroupMeritNames[] = {
    {GroupMerit::kMax, "max"},
    {GroupMerit::kTopTwo, "top2"},
};

constexpr Name<Rounding> kRoundingNames[] = {
    {Rounding::kNearest, "nearest"},       {Rounding::kUp, "up"},       {Rounding::kDown, "down"},
    {Rounding::kStochastic, "stochastic"}, {Rounding::kScore, "score"},
};

template <typename Enum, std::size_t kCount>
const char* name_in(const Name<Enum> (&names)[kCount], Enum value) {
  for (const Name<Enum>& name : names) {
    if (name.value == value) return name.text;
  }
  return "?";
}

template <typename Enum, std::size_t kCount>
bool parse_in(const Name<Enum> (&names)[kCount], const char* text, Enum* value) {
  for (const Name<Enum>& name : names) {
    if (std::strcmp(name.text, text) == 0) {
      *value = name.value;
      return true;
    }
  }
  return false;
}

}  // namespace

const char* name_of(ActivationKind kind) {
  return name_in(kActivationNames, kind);
}
const char* name_of(GateLayout layout) {
  return name_in(kGateLayoutNames, layout);
}
const char* name_of(SavePolicy policy) {
  return name_in(kSavePolicyNames, policy);
}
const char* name_of(WeightPosition position) {
  return name_in(kWeightPositionNames, position);
}
const char* name_of(RouterScore score) {
  return name_in(kRouterScoreNames, score);
}
const char* name_of(WeightKind kind) {
  return name_in(kWeightKindNames, kind);
}
const char* name_of(GroupMerit merit) {
  return name_in(kGroupMeritNames, merit);
}
const char* name_of(Rounding rounding) {
  return name_in(kRoundingNames, rounding);
}

bool parse_name(const char* name, ActivationKind* value) {
  return parse_in(kActivationNames, name, value);
}
bool parse_name(const char* name, GateLayout* value) {
  return parse_in(kGateLayoutNames, name, value);
}
bool parse_name(const char* name, SavePolicy* value) {
  return parse_in(kSavePolicyNames, name, value);
}
bool parse_name(const char* name, WeightPosition* value) {
  return parse_in(kWeightPositionNames, name, value);
}
bool parse_name(const char* name, RouterScore* value) {
  return parse_in(kRouterScoreNames, name, value);
}
bool parse_name(const char* name, WeightKind* value) {
  return parse_in(kWeightKindNames, name, value);
}
bool parse_name(const char* name, GroupMerit* value) {
  return parse_in(kGroupMeritNames, name, value);
}
bool parse_name(const char* name, Rounding* value) {
  return parse_in(kRoundingNames, name, value);
}
bool parse_name(const char* name, DType* value) {
  return parse_in(kDTypeNames, name, value);
}

}  // namespace moestro
