#include "kernels/table.h"

namespace quire {
namespace QUIRE_ISA {

// Constant-initialised: no code of this set may run before the CPU has been asked.
extern const Kernels table;
const Kernels table = {QUIRE_STRINGIFY(QUIRE_ISA),
#define X(name, result, ...) name,
                       QUIRE_KERNELS(X)
#undef X
};

}  // namespace QUIRE_ISA
}  // namespace quire
