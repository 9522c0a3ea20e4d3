#include "text.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <cstdlib>
#include <utility>

namespace moestro::cli {
namespace {

std::string scaled(double value, double step, const std::array<const char*, 6>& units) {
  std::size_t unit = 0;
  while (std::abs(value) >= step && unit + 1 < units.size()) {
    value /= step;
    ++unit;
  }
  const int decimals = value < 10 ? 2 : value < 1000 ? 1 : 0;
  return fmt::format("{:.{}f} {}", value, decimals, units[unit]);
}

/// Columns that `text` takes on a terminal: its code points.
std::size_t display_width(const std::string& text) {
  return static_cast<std::size_t>(std::count_if(
      text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xc0U) != 0x80U; }));
}

}  // namespace

std::string bytes_text(std::size_t bytes) {
  if (bytes < 1024) return fmt::format("{} B", bytes);
  return scaled(static_cast<double>(bytes), 1024, {"B", "KiB", "MiB", "GiB", "TiB", "PiB"});
}

std::string time_text(double us) {
  return scaled(us, 1000, {"us", "ms", "s", "ks", "Ms", "Gs"});
}

std::string flops_text(double flops) {
  return scaled(flops, 1000, {"FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"});
}

std::string rate_text(double flops, double us) {
  if (us <= 0 || flops <= 0) return "-";
  return scaled(flops / us * 1e6, 1000, {"FLOP/s", "kFLOP/s", "MFLOP/s", "GFLOP/s", "TFLOP/s", "PFLOP/s"});
}

std::string bandwidth_text(double bytes, double us) {
  if (us <= 0 || bytes <= 0) return "-";
  return scaled(bytes / us * 1e6, 1000, {"B/s", "kB/s", "MB/s", "GB/s", "TB/s", "PB/s"});
}

Table::Table(std::vector<std::string> header, int left_columns) : left_columns_(left_columns) {
  rows_.push_back(std::move(header));
}

void Table::add(std::vector<std::string> row) {
  row.resize(rows_.front().size());
  rows_.push_back(std::move(row));
}

std::string Table::text() const {
  std::vector<std::size_t> widths(rows_.front().size());
  for (const auto& row : rows_) {
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], display_width(row[i]));
  }
  std::string text;
  for (std::size_t r = 0; r < rows_.size(); ++r) {
    std::string line;
    for (std::size_t i = 0; i < widths.size(); ++i) {
      const std::string padding(widths[i] - display_width(rows_[r][i]), ' ');
      if (i > 0) line += "  ";
      line += static_cast<int>(i) < left_columns_ ? rows_[r][i] + padding : padding + rows_[r][i];
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
    if (r == 0) {
      std::size_t total = 2 * (widths.size() - 1);
      for (std::size_t width : widths) total += width;
      text += std::string(total, '-') + "\n";
    }
  }
  return text;
}

bool parse_bytes(const std::string& text, std::size_t* bytes) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  if (end == text.c_str() || !std::isfinite(value) || value < 0) return false;
  std::string unit;
  for (; *end != '\0'; ++end) {
    if (*end != ' ') unit += static_cast<char>(std::tolower(static_cast<unsigned char>(*end)));
  }
  double factor = 0;
  const std::array<std::pair<const char*, double>, 16> units{{{"", 1},
                                                              {"b", 1},
                                                              {"k", 1024.0},
                                                              {"kib", 1024.0},
                                                              {"kb", 1e3},
                                                              {"m", 1048576.0},
                                                              {"mib", 1048576.0},
                                                              {"mb", 1e6},
                                                              {"g", 1073741824.0},
                                                              {"gib", 1073741824.0},
                                                              {"gb", 1e9},
                                                              {"t", 1099511627776.0},
                                                              {"tib", 1099511627776.0},
                                                              {"tb", 1e12},
                                                              {"pib", 1125899906842624.0},
                                                              {"pb", 1e15}}};
  for (const auto& [name, size] : units) {
    if (unit == name) factor = size;
  }
  if (factor == 0 || value * factor >= 9.2e18) return false;
  *bytes = static_cast<std::size_t>(value * factor);
  return true;
}

std::string joined(const std::vector<std::string>& names) {
  return fmt::format("{}", fmt::join(names, ", "));
}

}  // namespace moestro::cli
