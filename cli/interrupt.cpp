#include "interrupt.hpp"

#include <csignal>

namespace moestro::cli {
namespace {

volatile std::sig_atomic_t interrupted = 0;

void remember(int signal) {
  interrupted = 1;
  std::signal(signal, SIG_DFL);
}

}  // namespace

void install_interrupt_handler() {
  std::signal(SIGINT, remember);
  std::signal(SIGTERM, remember);
}

void check_interrupt() {
  if (interrupted != 0) throw Interrupted{};
}

}  // namespace moestro::cli
