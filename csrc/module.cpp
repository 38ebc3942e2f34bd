// The native module: quire._native.

#include <nanobind/nanobind.h>

namespace nb = nanobind;

void bind_executor(nb::module_& m);
void bind_facts(nb::module_& m);
void bind_json(nb::module_& m);
void bind_parts(nb::module_& m);
void bind_plans(nb::module_& m);
void bind_probes(nb::module_& m);
void bind_ranks(nb::module_& m);
void bind_sampler(nb::module_& m);
void bind_speculation(nb::module_& m);
void bind_tiles(nb::module_& m);

NB_MODULE(_native, m) {
  m.doc() =
      "Native kernels, the executor and the scan of requests. Addresses are integers; the caller keeps what they point at alive.";
  bind_facts(m);
  bind_plans(m);
  bind_executor(m);
  bind_ranks(m);
  bind_probes(m);
  bind_parts(m);
  bind_tiles(m);
  bind_sampler(m);
  bind_speculation(m);
  bind_json(m);
}
