/// Numbers and tables as people read them.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace moestro::cli {

std::string bytes_text(std::size_t bytes);       ///< "320.0 MiB"; exact below 1 KiB
std::string time_text(double us);                ///< "12.3 us", "4.56 ms", "1.23 s"
std::string flops_text(double flops);            ///< "1.23 TFLOP"
std::string rate_text(double flops, double us);  ///< "98.7 GFLOP/s"

std::string bandwidth_text(double bytes, double us);  ///< "12.3 GB/s"

/// Columns as wide as their widest cell; the first `left_columns` are left-aligned, the others right.
class Table {
 public:
  explicit Table(std::vector<std::string> header, int left_columns = 1);
  void add(std::vector<std::string> row);
  std::string text() const;  ///< with a line under the header; ends with a newline

 private:
  std::vector<std::vector<std::string>> rows_;
  int left_columns_;
};

/// "320 MiB", "80GB", "1.5 GiB" or plain bytes; false when `text` is none of these or negative.
bool parse_bytes(const std::string& text, std::size_t* bytes);

/// `names` joined by ", ".
std::string joined(const std::vector<std::string>& names);

}  // namespace moestro::cli
