// Instruction sets: what the machine has, and the kernel table of each compiled set.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace quire {

// Names of the compiled sets this CPU can run, best first; "baseline" is always last.
std::vector<std::string> supported_isas();

// The kernel table of a set: `name`, else the best. Throws std::invalid_argument when it cannot run here.
const Kernels& kernels_for(const std::string& name);
// Makes kernels_for return kernels that count their calls (counted.h), or no longer.
void count_kernels(bool on);

}  // namespace quire
