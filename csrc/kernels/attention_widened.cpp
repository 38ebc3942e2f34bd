// Attention over a cache that is widened to bfloat16, see attention_rows.h.

#include "kernels/attention_rows.h"

namespace quire {
namespace QUIRE_ISA {

void attend_widened(const AttendTask& t) { attend_rows<WidenedCache>(t); }

}  // namespace QUIRE_ISA
}  // namespace quire
