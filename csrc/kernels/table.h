// Kernels of this instruction set, by name; table.cpp puts them in the table.
#pragma once

#include "kernels.h"
#include "simd/isa.h"

namespace quire {
namespace QUIRE_ISA {

#define X(name, result, ...) result name(__VA_ARGS__);
QUIRE_KERNELS(X)
#undef X

}  // namespace QUIRE_ISA
}  // namespace quire
