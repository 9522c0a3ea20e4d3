/// The fast CPU backend.
#pragma once

#include <cstddef>

#include "moestro/backend.hpp"

namespace moestro::cpu {

const Backend* cpu_backend();

/// Writes the versions of the libraries behind the backend ("OpenBLAS 0.3.21 (Cooperlake)") and the
/// processor's instruction set; always terminated.
void library_versions(char* text, std::size_t size);

}  // namespace moestro::cpu
