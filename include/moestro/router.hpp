/// Router: from a token's logits to its K experts and their weights.
///
///   l        the logits, cut to [-clip, clip] where clip > 0
///   scores   p = softmax(l) | sigmoid(l) | sqrt(softplus(l)) | l itself
///   choice   the K experts with the largest p (+ selection bias) among the top_groups best groups; ties go
///            to the lower id. Without a bias the logits are compared instead, whose order is p's and which
///            do not round. With top_p < 1 a token keeps its choices up to the first with which their p
///            reach top_p; the slots after it become sentinels (-1) of weight 0
///   weights  w = v / D * scale * expert_scale[choice], never from the biased score, with
///              kScores        v = p,               D = 1
///              kRenormalized  v = p,               D = epsilon + sum of the token's chosen p
///              kSoftmax       v = exp(l - max l),  D = sum of the token's v: softmax over the chosen
///              kSigmoid       v = sigmoid(l),      D = 1
///
/// The logits are an ordinary dense product of x and the router's matrix, which every framework and
/// BLAS computes well: this stage starts where that ends.
///
/// Source    groups: DeepSeek-V2 (arXiv 2405.04434, section 2.1.2; kMax) and V3 (arXiv 2412.19437, section
///           2.1.2; kTopTwo); selection bias: arXiv 2408.15664; top-p: arXiv 2403.07652.
/// Numerics  f32 from logits to weights (f64 for f64 logits). A NaN logit counts as -infinity, so ids
///           are always in range; +infinity weighs as the largest finite number. Where D is 0 (all chosen
///           scores are 0: a row of NaN), so are the weights. The choice has no gradient, and neither has a
///           logit beyond the clip.
/// Async     enqueues on ctx.stream; no allocation, no synchronisation.
#pragma once

#include <cstddef>
#include <cstdint>

#include "moestro/context.hpp"
#include "moestro/status.hpp"
#include "moestro/tensor.hpp"

namespace moestro {

enum class RouterScore : std::uint8_t { kSoftmax, kSigmoid, kSqrtSoftplus, kIdentity };
enum class WeightKind : std::uint8_t { kScores, kRenormalized, kSoftmax, kSigmoid };
enum class GroupMerit : std::uint8_t {
  kMax,     ///< a group's largest (biased) score
  kTopTwo,  ///< the sum of its two largest
};

const char* name_of(RouterScore score);
const char* name_of(WeightKind kind);
const char* name_of(GroupMerit merit);
bool parse_name(const char* name, RouterScore* value);
bool parse_name(const char* name, WeightKind* value);
bool parse_name(const char* name, GroupMerit* value);

struct RouterConfig {
  RouterScore score = RouterScore::kSoftmax;     ///< kIdentity: with kSoftmax or kSigmoid weights only
  WeightKind weight_kind = WeightKind::kScores;  ///< kRenormalized: a token's weights sum to scale
  float epsilon = 0.0F;                          ///< kRenormalized only
  float scale = 1.0F;
  float clip = 0.0F;   ///< 0: logits as they are
  float top_p = 1.0F;  ///< below 1: softmax scores only
  int num_groups = 1;  ///< of E / num_groups neighbouring experts each
  int top_groups = 1;
  GroupMerit group_merit = GroupMerit::kTopTwo;
};

struct RouterForwardArgs {
  TensorView logits;          ///< in  [T, E] f32|f64|bf16|f16, unit stride along E
  TensorView selection_bias;  ///< in  [E] f32, optional
  RouterConfig config;
  TensorView expert_ids;     ///< out [T, K] i32, falling (biased) score
  TensorView weights;        ///< out [T, K] f32 (f64 for f64 logits)
  TensorView expert_scale;   ///< in  [E] dtype of weights, optional
  bool ids_given = false;    ///< expert_ids is an input (replay, hash routing); ids outside [0, E) weigh 0
  TensorView token_offsets;  ///< in  [T+1] i32, optional, with ids_given: expert_ids and weights are [S],
                             ///< slots of token t at [t]..[t+1]-1; slots past the last token's weigh 0
};
Status router_forward(const RouterForwardArgs& args, const Context& ctx);

struct RouterBackwardArgs {
  TensorView logits;      ///< in  [T, E]
  TensorView expert_ids;  ///< in  [T, K] i32, or [S]
  TensorView d_weights;   ///< in  [T, K], or [S]
  RouterConfig config;
  TensorView d_logits;        ///< out [T, E], dtype of logits; the selection itself has no gradient
  TensorView expert_scale;    ///< in  [E], optional
  TensorView token_offsets;   ///< in  [T+1] i32, optional
  TensorView d_expert_scale;  ///< out [B, E] dtype of weights, optional: row b sums over the b-th of B equal
                              ///< parts of the tokens, so the gradient is the sum of the rows. More rows
                              ///< are more parallel work; the order of summation is fixed by B
};
Status router_backward(const RouterBackwardArgs& args, const Context& ctx);

}  // namespace moestro
