/// Bytes that the whole program has asked `new` for so far: the library is linked statically, so its own
/// allocations are among them.
#pragma once

#include <cstddef>

namespace moestro::test {

std::size_t allocated_bytes();

}  // namespace moestro::test
