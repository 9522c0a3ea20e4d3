/// What this program was built from and what it runs on.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace moestro::cli {

std::string version_line();  ///< "moestro 0.1.0 (commit 0123456789ab)"
std::string cpu_model();     ///< "Intel(R) Xeon(R) …", or "unknown"
std::string utc_now();       ///< "2026-01-31T12:00:00Z"

/// {"moestro", "commit", "build_type", "compiler", "flags"}
nlohmann::ordered_json build_json();

/// {"moestro", "compiler", "openblas", "cuda"}; a library that is not there is left out.
nlohmann::ordered_json versions_json();

/// {"model", "logical_processors", "memory_bytes", "instructions": ["avx2", …]}
nlohmann::ordered_json cpu_json();

}  // namespace moestro::cli
