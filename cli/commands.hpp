/// The subcommands. Each add_* declares its options and, when the user picked it, leaves the work to do in
/// `*selected`. Exit codes: 0 done (verify: passed), 1 verify failed or a budget that nothing fits,
/// 2 bad usage or bad input, 130 interrupted.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>

namespace moestro::cli {

using Command = std::function<int()>;

constexpr int kExitDone = 0;
constexpr int kExitFailed = 1;
constexpr int kExitUsage = 2;
constexpr int kExitInterrupted = 130;

void add_info(CLI::App& app, Command* selected);
void add_verify(CLI::App& app, Command* selected);
void add_bench(CLI::App& app, Command* selected);
void add_plan(CLI::App& app, Command* selected);
void add_route(CLI::App& app, Command* selected);

}  // namespace moestro::cli
