// Kernels that count their calls: which of them a program runs, for the test that each has a case.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "kernels.h"

namespace quire {

// The kernels of a set, counted: of one set at a time.
const Kernels& counted(const Kernels& kernels);
// How often each kernel was called through `counted` since the last call of this.
std::map<std::string, int64_t> take_kernel_calls();

}  // namespace quire
