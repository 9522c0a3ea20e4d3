// moestro route FILE: what a recorded routing means for the kernels: index, loads, rows lost to padding, and
// what rounding the counts to whole tiles would change.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <new>
#include <nlohmann/json.hpp>
#include <optional>
#include <regex>
#include <string>
#include <vector>

#include "commands.hpp"
#include "common/rounding_math.hpp"
#include "errors.hpp"
#include "moestro/dispatch.hpp"
#include "text.hpp"

namespace moestro::cli {
namespace {

using Json = nlohmann::ordered_json;

struct RouteOptions {
  std::string file;
  std::int64_t num_experts = 0;  // 0: the largest id + 1
  bool json = false;
};

/// Ids of all tokens, token by token.
struct Recorded {
  std::vector<std::int32_t> ids;
  std::vector<std::int32_t> offsets = {0};  // [T+1]

  std::int64_t num_tokens() const { return static_cast<std::int64_t>(offsets.size()) - 1; }
  /// Anything that no int32 holds is a sentinel like any negative id.
  void add(std::int64_t id) {
    ids.push_back(id < 0 || id > INT32_MAX - 1 ? -1 : static_cast<std::int32_t>(id));
  }
  void end_token() { offsets.push_back(static_cast<std::int32_t>(ids.size())); }
};

std::string read_all(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) fail("route: cannot read '{}'", path);
  return {std::istreambuf_iterator<char>(in), {}};
}

template <typename Integer>
std::int64_t integer_at(const char* data, std::int64_t i) {
  Integer value;
  std::memcpy(&value, data + i * static_cast<std::int64_t>(sizeof value), sizeof value);
  return static_cast<std::int64_t>(value);
}

/// NumPy's format, version 1 or 2: magic, version, length of the header, the header as a Python dictionary.
Recorded parse_npy(const std::string& path, const std::string& bytes) {
  const bool version_one = bytes.size() >= 10 && bytes[6] == 1;
  const std::size_t start = version_one ? 10 : 12;
  if (bytes.size() < start || bytes.compare(0, 6, "\x93NUMPY") != 0)
    fail("route: '{}' is not a .npy file", path);
  const auto byte = [&](std::size_t i) {
    return static_cast<std::size_t>(static_cast<unsigned char>(bytes[i]));
  };
  const std::size_t length =
      version_one ? byte(8) | byte(9) << 8 : byte(8) | byte(9) << 8 | byte(10) << 16 | byte(11) << 24;
  if (bytes.size() - start < length) fail("route: '{}' ends within its header", path);
  const std::string header = bytes.substr(start, length);
  std::smatch type, order, shape;
  if (!std::regex_search(header, type, std::regex("'descr': *'([^']*)'")) ||
      !std::regex_search(header, order, std::regex("'fortran_order': *(True|False)")) ||
      !std::regex_search(header, shape, std::regex("'shape': *\\((\\d+), *(\\d+)\\)"))) {
    fail("route: '{}' holds no integers of shape [T, K]", path);
  }
  if (order[1] == "True") fail("route: '{}' is in Fortran order, expected rows of tokens in C order", path);
  using Load = std::int64_t (*)(const char*, std::int64_t);
  const struct {
    const char* name;
    std::size_t size;
    Load load;
  } types[] = {{"<i8", 8, integer_at<std::int64_t>},  {"<i4", 4, integer_at<std::int32_t>},
               {"<i2", 2, integer_at<std::int16_t>},  {"|i1", 1, integer_at<std::int8_t>},
               {"<u4", 4, integer_at<std::uint32_t>}, {"<u2", 2, integer_at<std::uint16_t>},
               {"|u1", 1, integer_at<std::uint8_t>}};
  const auto* found = std::find_if(std::begin(types), std::end(types),
                                   [&](const auto& each) { return type[1] == each.name; });
  if (found == std::end(types)) fail("route: '{}' is of type '{}', expected integers", path, type[1].str());
  const std::size_t available = (bytes.size() - start - length) / found->size;
  std::int64_t num_tokens = 0;
  std::int64_t top_k = 0;
  try {
    num_tokens = std::stoll(shape[1]);
    top_k = std::stoll(shape[2]);
  } catch (const std::out_of_range&) {
    fail("route: '{}' has a shape that 64 bits cannot count", path);
  }
  if (top_k > 0 && num_tokens > INT32_MAX / top_k)
    fail("route: '{}' has more slots than 32 bits count", path);
  if (available < static_cast<std::size_t>(num_tokens * top_k))
    fail("route: '{}' ends before its last id", path);
  Recorded recorded;
  for (std::int64_t t = 0; t < num_tokens; ++t) {
    for (std::int64_t k = 0; k < top_k; ++k)
      recorded.add(found->load(bytes.data() + start + length, t * top_k + k));
    recorded.end_token();
  }
  return recorded;
}

/// One token a line, an array of ids.
Recorded parse_jsonl(const std::string& path, const std::string& text) {
  Recorded recorded;
  std::size_t line_number = 0;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    const std::string line = text.substr(begin, end - begin);
    begin = end + 1;
    ++line_number;
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    const Json ids = Json::parse(line, nullptr, false);
    const bool sound = ids.is_array() && std::all_of(ids.begin(), ids.end(),
                                                     [](const Json& id) { return id.is_number_integer(); });
    if (!sound) fail("route: line {} of '{}' is not an array of ids, like [3, 17]", line_number, path);
    for (const Json& id : ids)
      recorded.add(id.is_number_unsigned() && id.get<std::uint64_t>() > INT32_MAX ? -1
                                                                                  : id.get<std::int64_t>());
    recorded.end_token();
    if (recorded.ids.size() > INT32_MAX) fail("route: '{}' has more slots than 32 bits count", path);
  }
  return recorded;
}

Recorded read_recorded(const std::string& path) {
  const auto ends_with = [&](const std::string& end) {
    return path.size() >= end.size() && path.compare(path.size() - end.size(), end.size(), end) == 0;
  };
  if (ends_with(".npy")) return parse_npy(path, read_all(path));
  if (ends_with(".jsonl")) return parse_jsonl(path, read_all(path));
  fail("route: FILE is '{}', expected a .npy file of integers [T, K] or a .jsonl file of arrays", path);
}

struct AlignedBytes {
  explicit AlignedBytes(std::size_t bytes)
      : data(static_cast<char*>(::operator new (bytes + 1, std::align_val_t{256}))) {}
  ~AlignedBytes() { ::operator delete (data, std::align_val_t{256}); }
  AlignedBytes(const AlignedBytes&) = delete;
  AlignedBytes& operator=(const AlignedBytes&) = delete;
  char* data;
};

/// Rows of each expert, by the library's own dispatch.
std::vector<std::int64_t> count_rows(Recorded& recorded, std::int64_t num_experts) {
  const auto num_slots = static_cast<std::int64_t>(recorded.ids.size());
  Context context;
  context.backend = BackendId::kCPU;
  const AlignedBytes index(index_bytes(num_slots, num_experts));
  DispatchArgs args;
  args.expert_ids = make_view(recorded.ids.data(), DType::kI32, {num_slots});
  args.token_offsets = make_view(recorded.offsets.data(), DType::kI32, {recorded.num_tokens() + 1});
  args.num_experts = num_experts;
  args.index = carve_index(index.data, num_slots, num_experts);
  context.workspace_bytes = dispatch_workspace_bytes(recorded.num_tokens(), num_slots, num_experts, context);
  const AlignedBytes workspace(context.workspace_bytes);
  context.workspace = workspace.data;
  check(dispatch_forward(args, context));
  std::vector<std::int64_t> rows;
  for (std::int64_t e = 0; e < num_experts; ++e)
    rows.push_back(args.index.expert_token_offsets[e + 1] - args.index.expert_token_offsets[e]);
  return rows;
}

Json summary(Recorded& recorded, std::int64_t num_experts) {
  const std::vector<std::int64_t> rows = count_rows(recorded, num_experts);
  const auto slots = static_cast<std::int64_t>(recorded.ids.size());
  std::int64_t routed = 0;
  for (const std::int64_t count : rows) routed += count;
  const double mean = static_cast<double>(routed) / static_cast<double>(num_experts);
  double variance = 0;
  double diversity = 0;
  for (const std::int64_t count : rows) {
    const auto real = static_cast<double>(count);
    variance += (real - mean) * (real - mean) / static_cast<double>(num_experts);
    if (count > 0)
      diversity -= real / static_cast<double>(routed) * std::log(real / static_cast<double>(routed));
  }
  const auto busiest = std::max_element(rows.begin(), rows.end());
  const auto idlest = std::min_element(rows.begin(), rows.end());
  const auto load = [&](std::int64_t count) { return routed == 0 ? 0.0 : static_cast<double>(count) / mean; };
  Json root;
  root["tokens"] = recorded.num_tokens();
  root["experts"] = num_experts;
  root["slots"] = slots;
  root["routed"] = routed;
  root["sentinels"] = slots - routed;
  root["index_bytes"] = index_bytes(slots, num_experts);
  root["rows"] = rows;
  root["max_load"] = load(*busiest);
  root["busiest"] = busiest - rows.begin();
  root["min_load"] = load(*idlest);
  root["idlest"] = idlest - rows.begin();
  root["load_deviation"] = routed == 0 ? 0.0 : std::sqrt(variance) / mean;
  root["dead_experts"] = std::count(rows.begin(), rows.end(), 0);
  root["effective_experts"] = routed == 0 ? 0.0 : std::exp(diversity) / static_cast<double>(num_experts);
  root["tiles"] = Json::array();
  for (const std::int64_t tile : {64, 128, 256}) {
    std::int64_t tiles = 0;
    for (const std::int64_t count : rows) tiles += (count + tile - 1) / tile;
    const std::int64_t padding = tiles * tile - routed;
    Json entry = {{"rows", tile},
                  {"tiles", tiles},
                  {"padding_rows", padding},
                  {"padding_share",
                   tiles == 0 ? 0.0 : static_cast<double>(padding) / static_cast<double>(tiles * tile)}};
    for (const Rounding how : {Rounding::kNearest, Rounding::kUp, Rounding::kDown}) {
      std::int64_t added = 0;
      std::int64_t dropped = 0;
      for (const std::int64_t count : rows) {
        const std::int64_t change =
            rounding_math::rounded(count, tile, how, recorded.num_tokens(), 0.0F) - count;
        (change > 0 ? added : dropped) += std::abs(change);
      }
      entry[name_of(how)] = {{"added", added}, {"dropped", dropped}};
    }
    root["tiles"].push_back(entry);
  }
  return root;
}

std::string change_text(const Json& change) {
  return fmt::format("+{} -{}", change["added"].get<std::int64_t>(), change["dropped"].get<std::int64_t>());
}

int run(const RouteOptions& options) {
  Recorded recorded = read_recorded(options.file);
  std::int64_t num_experts = options.num_experts;
  if (num_experts == 0) {
    for (const std::int32_t id : recorded.ids) num_experts = std::max<std::int64_t>(num_experts, id + 1);
    if (num_experts == 0)
      fail("route: '{}' names no expert; say how many there are with --experts", options.file);
  }
  const Json root = summary(recorded, num_experts);
  if (options.json) {
    fmt::print("{}\n", root.dump(2));
    return kExitDone;
  }
  const auto integer = [&](const char* key) { return root[key].get<std::int64_t>(); };
  const auto real = [&](const char* key) { return root[key].get<double>(); };
  fmt::print("{} tokens, {} experts, {} slots: {} routed, {} sentinels; the index takes {}\n",
             integer("tokens"), num_experts, integer("slots"), integer("routed"), integer("sentinels"),
             bytes_text(root["index_bytes"].get<std::size_t>()));
  fmt::print("load: most {:.2f}x the mean (expert {}), least {:.2f}x (expert {}), deviation {:.1f} %{}\n",
             real("max_load"), integer("busiest"), real("min_load"), integer("idlest"),
             100 * real("load_deviation"), real("load_deviation") > 0.2 ? " (uneven: above 20 %)" : "");
  fmt::print("experts without a row: {}; {:.1f} % of the experts are effective (exp(H)/E)\n\n",
             integer("dead_experts"), 100 * real("effective_experts"));
  Table table({"tile", "tiles", "padding rows", "of the work", "nearest", "up", "down"});
  for (const Json& tile : root["tiles"]) {
    table.add({fmt::format("{}", tile["rows"].get<std::int64_t>()),
               fmt::format("{}", tile["tiles"].get<std::int64_t>()),
               fmt::format("{}", tile["padding_rows"].get<std::int64_t>()),
               fmt::format("{:.1f} %", 100 * tile["padding_share"].get<double>()),
               change_text(tile["nearest"]), change_text(tile["up"]), change_text(tile["down"])});
  }
  fmt::print("{}\nnearest, up, down: pairs that token rounding to this tile would add and drop.\n",
             table.text());
  return kExitDone;
}

}  // namespace

void add_route(CLI::App& app, Command* selected) {
  auto options = std::make_shared<RouteOptions>();
  CLI::App* command = app.add_subcommand(
      "route", "What a recorded routing means: index, loads, padding of each tile size, rounding");
  command
      ->add_option("FILE", options->file, ".npy of integers [T, K], or .jsonl with an array of ids a token")
      ->required();
  command->add_option("--experts", options->num_experts, "E; default: the largest id + 1")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 20));
  command->add_flag("--json", options->json, "Everything as JSON, each expert's rows too");
  command->callback([options, selected] { *selected = [options] { return run(*options); }; });
}

}  // namespace moestro::cli
