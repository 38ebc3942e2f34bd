// Python bindings of what measures the machine's limits.

#include <nanobind/nanobind.h>

#include <chrono>
#include <vector>

#include "executor.h"

namespace nb = nanobind;
using namespace nb::literals;
using quire::DType;
using quire::Executor;

namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Memory that all threads of an executor read together, touched once, to be read again and again.
class BandwidthProbe {
 public:
  BandwidthProbe(Executor& e, size_t bytes)
      : executor_(e), share_(bytes / e.threads() / 4096 * 4096), sinks_(e.threads() * 16) {
    arena_.allocate(bytes);
    auto touch = [&](int t) {
      for (size_t i = 0; i < share_; i += 4096) arena_.data()[share_ * t + i] = 1;
    };
    quire::on_all(e.pool(), touch);
    measure();
  }

  // Bytes per second of some passes, each of which reads all that its thread has.
  double measure(int passes = 1) {
    auto read = [&](int t) {
      for (int pass = 0; pass < passes; ++pass)
        sinks_[t * 16] += executor_.kernels().read_sum(arena_.data() + share_ * t, share_);
    };
    const auto start = std::chrono::steady_clock::now();
    quire::on_all(executor_.pool(), read);
    return static_cast<double>(share_) * executor_.threads() * passes / seconds_since(start);
  }

 private:
  Executor& executor_;
  quire::Arena arena_;
  size_t share_;
  std::vector<float> sinks_;
};

// Operations per second of all threads: float32 fma, bf16 pairs or int8 quads.
double measure_flops(Executor& e, DType dtype, int64_t iterations) {
  const quire::Kernels& k = e.kernels();
  auto run = dtype == DType::i8 ? k.i8_loop : dtype == DType::bf16 ? k.bf16_loop : k.fma_loop;
  std::vector<float> sinks(e.threads() * 16);
  std::vector<int64_t> flops(e.threads() * 8);
  auto loop = [&](int t) { flops[t * 8] = run(iterations, &sinks[t * 16]); };
  quire::on_all(e.pool(), loop);
  const auto start = std::chrono::steady_clock::now();
  quire::on_all(e.pool(), loop);
  const double seconds = seconds_since(start);
  double total = 0;
  for (int t = 0; t < e.threads(); ++t) total += static_cast<double>(flops[t * 8]);
  return total / seconds;
}

}  // namespace

void bind_probes(nb::module_& m) {
  using nogil = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<BandwidthProbe>(m, "BandwidthProbe")
      .def(nb::init<Executor&, size_t>(), nb::keep_alive<1, 2>(), nogil(), "executor"_a, "size"_a)
      .def("measure", &BandwidthProbe::measure, nogil(), "passes"_a = 1,
           "Bytes per second that all threads read together, in so many passes.");
  m.def("measure_flops", &measure_flops, nogil(), "executor"_a, "dtype"_a, "iterations"_a,
        "Operations per second of all threads of an executor.");
}
