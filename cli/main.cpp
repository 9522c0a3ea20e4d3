// moestro info | verify | bench | plan | route
#include <fmt/format.h>

#include <cstdio>
#include <exception>
#include <new>
#include <string>
#include <vector>

#include "commands.hpp"
#include "errors.hpp"
#include "interrupt.hpp"
#include "machine.hpp"
#include "text.hpp"

int main(int argc, char** argv) {
  using namespace moestro::cli;
  CLI::App app{"Mixture-of-Experts layers that keep little between forward and backward.", "moestro"};
  app.set_version_flag("--version", version_line());
  app.require_subcommand(1);
  app.fallthrough(false);
  Command command;
  add_info(app, &command);
  add_verify(app, &command);
  add_bench(app, &command);
  add_plan(app, &command);
  add_route(app, &command);
  if (argc == 1) {
    fmt::print(stderr, "{}", app.help());
    return kExitUsage;
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help, --version
    if (app.get_subcommands().empty() && argv[1][0] != '-') {
      std::vector<std::string> names;
      for (const CLI::App* command_app : app.get_subcommands({})) names.push_back(command_app->get_name());
      fmt::print(stderr, "moestro: '{}' is none of the commands: {}\n", argv[1], joined(names));
      return kExitUsage;
    }
    fmt::print(stderr, "moestro: {}\nRun with --help for the options.\n", error.what());
    return kExitUsage;
  }

  install_interrupt_handler();
  try {
    return command();
  } catch (const UsageError& error) {
    fmt::print(stderr, "moestro: {}\n", error.what());
    return kExitUsage;
  } catch (const Interrupted&) {
    fmt::print(stderr, "moestro: interrupted\n");
    return kExitInterrupted;
  } catch (const std::bad_alloc&) {
    fmt::print(stderr, "moestro: not enough memory for this shape\n");
    return kExitUsage;
  } catch (const std::exception& error) {
    fmt::print(stderr, "moestro: {}\n", error.what());
    return kExitUsage;
  }
}
