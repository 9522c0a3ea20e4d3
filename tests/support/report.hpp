/// Where guarded memory and layer runs report what they find wrong. This library does not define it: the
/// tests turn it into a failure of the running test, `moestro verify` prints it.
#pragma once

#include <string>

namespace moestro::test {

void report_failure(const std::string& what);

}  // namespace moestro::test
