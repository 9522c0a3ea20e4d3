#include "machine.hpp"

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <fstream>
#include <sstream>
#include <thread>

#include "build_config.hpp"
#include "commit.hpp"
#include "cpu/gemm.hpp"

namespace moestro::cli {
namespace {

/// The value of the first "key : value" line of /proc/cpuinfo, or "".
std::string cpuinfo(const std::string& key) {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.compare(0, key.size(), key) != 0) continue;
    const std::size_t colon = line.find(':');
    if (colon == std::string::npos || line.find_first_not_of(" \t", key.size()) != colon) continue;
    return colon + 2 <= line.size() ? line.substr(colon + 2) : "";
  }
  return "";
}

}  // namespace

std::string version_line() {
  return "moestro " MOESTRO_VERSION " (commit " MOESTRO_COMMIT ")";
}

std::string cpu_model() {
  const std::string model = cpuinfo("model name");
  return model.empty() ? "unknown" : model;
}

std::string utc_now() {
  const std::time_t now = std::chrono::system_clock::to_time_t(std::chrono::system_clock::now());
  return fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(now));
}

nlohmann::ordered_json build_json() {
  return {{"moestro", MOESTRO_VERSION},
          {"commit", MOESTRO_COMMIT},
          {"build_type", MOESTRO_BUILD_TYPE},
          {"compiler", MOESTRO_CXX_COMPILER},
          {"flags", MOESTRO_CXX_FLAGS}};
}

nlohmann::ordered_json versions_json() {
  nlohmann::ordered_json versions = {{"moestro", MOESTRO_VERSION}, {"compiler", MOESTRO_CXX_COMPILER}};
  std::istringstream blas(cpu::gemm_library());  // "OpenBLAS 0.3.21 (Cooperlake)"
  std::string name;
  std::string version;
  std::string core;
  blas >> name >> version >> core;
  versions["openblas"] = version;
  if (core.size() > 2) versions["openblas_core"] = core.substr(1, core.size() - 2);
  if (std::strlen(MOESTRO_CUDA_COMPILER) > 0) versions["cuda"] = MOESTRO_CUDA_COMPILER;
  return versions;
}

nlohmann::ordered_json cpu_json() {
  nlohmann::ordered_json instructions = nlohmann::ordered_json::array();
  std::istringstream flags(cpuinfo("flags"));
  for (std::string flag; flags >> flag;) {
    for (const char* shown : {"avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16", "avx512_fp16"}) {
      if (flag == shown) instructions.push_back(flag);
    }
  }
  const long pages = sysconf(_SC_PHYS_PAGES);
  const long page = sysconf(_SC_PAGE_SIZE);
  return {{"model", cpu_model()},
          {"logical_processors", std::thread::hardware_concurrency()},
          {"memory_bytes", pages > 0 && page > 0 ? static_cast<std::int64_t>(pages) * page : 0},
          {"instructions", instructions}};
}

}  // namespace moestro::cli
