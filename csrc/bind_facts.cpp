// Numbers that Python states too, or has to know; tests/native/test_facts.py compares them.

#include <nanobind/nanobind.h>

#include "kernels.h"
#include "packed.h"
#include "sampler.h"

namespace nb = nanobind;

void bind_facts(nb::module_& m) {
  m.attr("CHUNK_BYTES") = quire::kChunkBytes;
  m.attr("GROUP_BITS") = quire::kGroupBits;
  m.attr("MAXIMA_COLS") = quire::kMaximaCols;
  m.attr("MAX_LOGPROBS") = quire::kMaxLogprobs;
  m.attr("PACK_LAYOUT") = quire::kPackLayout;
  m.attr("PANEL_ROWS") = quire::kPanel;
  m.attr("SUPER_GROUPS") = quire::GroupFormat::kSuper;
}
