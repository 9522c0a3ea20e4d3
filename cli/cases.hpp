/// What `moestro bench` can time: the layer and each stage, in each direction, and their competitors.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "problem.hpp"

namespace moestro::cli {

/// One thing to time.
struct Case {
  std::string stage;           ///< "layer" or a stage's name
  std::string pass;            ///< "forward", "backward", "weight_backward", "step" (forward and backward)
  std::string way;             ///< "moestro", "conventional", "std::stable_sort"
  double flops = 0;            ///< of matrix products; 0 where there are none
  double bytes = 0;            ///< read and written at the least; 0 where flops tell more
  std::size_t kept_bytes = 0;  ///< layer only: held from forward to backward, beyond x
  std::size_t peak_bytes = 0;  ///< layer only: kept and the largest workspace
  std::function<void()> run;
};

/// A case and those that do the same work another way: timed in turns.
using CaseGroup = std::vector<Case>;

struct CaseOptions {
  std::vector<std::string> stages;  ///< as stage_names, with "layer"
  std::string pass;                 ///< "all" or one
  std::string compare;              ///< "", "conventional" or "sort"
  DispatchBuilder builder = DispatchBuilder::kAuto;
};

const std::vector<std::string>& stage_names();
const std::vector<std::string>& pass_names();

/// The cases of one shape. Buffers are allocated here and live as long as `problem` and the cases; every
/// stage's inputs are valid, because the stages before it have run once.
/// Where `options.compare` asks for a competitor, its results have been compared with moestro's.
std::vector<CaseGroup> make_cases(Problem* problem, const test::BackendUnderTest& target, const Context& ctx,
                                  const CaseOptions& options);

}  // namespace moestro::cli
