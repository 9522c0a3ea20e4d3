/// Ctrl-C: long commands stop at the next point where what they have written is whole.
#pragma once

namespace moestro::cli {

struct Interrupted {};

/// The first Ctrl-C (or SIGTERM) is remembered; a second one ends the process at once.
void install_interrupt_handler();

/// Throws Interrupted when one has come.
void check_interrupt();

}  // namespace moestro::cli
