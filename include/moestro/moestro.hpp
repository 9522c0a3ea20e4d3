/// moestro: Mixture-of-Experts layers that keep little and run at the speed of the matrix units.
/// Includes the whole public interface; docs/data-flow.md shows how the stages fit together.
#pragma once

#include "moestro/activation.hpp"
#include "moestro/backend.hpp"
#include "moestro/combine.hpp"
#include "moestro/config.hpp"
#include "moestro/context.hpp"
#include "moestro/dispatch.hpp"
#include "moestro/down.hpp"
#include "moestro/layer.hpp"
#include "moestro/router.hpp"
#include "moestro/status.hpp"
#include "moestro/tensor.hpp"
#include "moestro/up.hpp"
