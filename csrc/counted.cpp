#include "counted.h"

#include <atomic>

namespace quire {

namespace {

const Kernels* running = nullptr;

template <auto kKernel>
struct Counted;
template <class Result, class... Arguments, Result (*Kernels::*kKernel)(Arguments...)>
struct Counted<kKernel> {
  static inline std::atomic<int64_t> calls{0};
  static Result call(Arguments... arguments) {
    calls.fetch_add(1, std::memory_order_relaxed);
    return (running->*kKernel)(arguments...);
  }
};

}  // namespace

const Kernels& counted(const Kernels& kernels) {
  static Kernels table;
#define X(name, ...) table.name = Counted<&Kernels::name>::call;
  QUIRE_KERNELS(X)
#undef X
  table.isa = kernels.isa;
  running = &kernels;
  return table;
}

std::map<std::string, int64_t> take_kernel_calls() {
  return {
#define X(name, ...) {#name, Counted<&Kernels::name>::calls.exchange(0)},
      QUIRE_KERNELS(X)
#undef X
  };
}

}  // namespace quire
