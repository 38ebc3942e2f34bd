// Python bindings of parts of the executor that are tested on their own.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <stdexcept>

#include "counted.h"
#include "isa.h"
#include "page_warmer.h"
#include "pool.h"

namespace nb = nanobind;
using namespace nb::literals;
using quire::PageWarmer;
using quire::Processors;
using quire::Tasks;

namespace {

// For each phase and thread, the tasks that it claimed, in order: phases follow each other as in Executor::step.
std::vector<std::vector<std::vector<int>>> claim_all(int threads, const std::vector<int>& phases) {
  quire::ThreadPool pool(threads);
  Tasks tasks(pool.threads());
  std::vector<std::vector<std::vector<int>>> found(phases.size());
  for (auto& phase : found) phase.resize(static_cast<size_t>(pool.threads()));
  if (phases.empty()) return found;
  tasks.deal(phases[0]);
  auto job = [&](int thread) {
    for (size_t i = 0; i < phases.size(); ++i) {
      for (int t = tasks.claim(thread); t >= 0; t = tasks.claim(thread)) found[i][thread].push_back(t);
      pool.barrier(thread, [&] { tasks.deal(i + 1 < phases.size() ? phases[i + 1] : 0); });
    }
  };
  quire::on_all(pool, job);
  return found;
}

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Sums of pages by one key; with another one `above`, the sums of these sums, which are put on the stack alone.
nb::bytes sum_pages(const Bytes& data, const nb::bytes& key, const nb::bytes& above, const std::string& isa) {
  constexpr size_t kKeyBytes = quire::kSumKeyWords * sizeof(uint64_t);
  if (key.size() != kKeyBytes) throw std::invalid_argument("key: not SUM_KEY_BYTES bytes");
  if (above.size() && above.size() != kKeyBytes) throw std::invalid_argument("above: not SUM_KEY_BYTES bytes");
  if (reinterpret_cast<uintptr_t>(data.data()) % 8) throw std::invalid_argument("data: not aligned to 8 bytes");
  uint64_t keys[2][quire::kSumKeyWords];
  std::memcpy(keys[0], key.c_str(), kKeyBytes);
  std::memcpy(keys[1], above.c_str(), above.size());
  const size_t part = above.size() ? size_t(quire::kSumPage) * quire::kPageWords / quire::kPageSums : quire::kSumPage;
  std::vector<uint64_t> sums((data.size() + part - 1) / part * quire::kPageSums);
  {
    nb::gil_scoped_release other_threads_run;
    const quire::Kernels& kernels = quire::kernels_for(isa);
    if (!above.size()) {
      kernels.sum_pages({data.data(), data.size(), keys[0], sums.data()});
    } else {
      for (size_t at = 0, i = 0; at < data.size(); at += part, i += quire::kPageSums) {
        const size_t bytes = std::min(part, data.size() - at);
        uint64_t below[quire::kPageWords];
        kernels.sum_pages({data.data() + at, bytes, keys[0], below});
        const size_t pages = (bytes + quire::kSumPage - 1) / quire::kSumPage;
        kernels.sum_pages({below, pages * quire::kPageSums * sizeof(uint64_t), keys[1], &sums[i]});
      }
    }
  }
  return nb::bytes(reinterpret_cast<const char*>(sums.data()), sums.size() * sizeof(uint64_t));
}

}  // namespace

void bind_parts(nb::module_& m) {
  m.def("count_kernels", &quire::count_kernels, "on"_a,
        "Whether executors and samplers that are made from now on count calls.");
  m.def("take_kernel_calls", &quire::take_kernel_calls,
        "Counted calls of every kernel, by name, since the last call of this.");
  nb::class_<Tasks>(m, "Tasks")
      .def(nb::init<int>(), "threads"_a)
      .def("deal", &Tasks::deal, "tasks"_a)
      .def("claim", &Tasks::claim, "thread"_a);
  m.attr("SUM_KEY_BYTES") = quire::kSumKeyWords * sizeof(uint64_t);
  m.def(
      "sum_pages", &sum_pages, "data"_a, "key"_a, "above"_a = nb::bytes("", 0), "isa"_a = "",
      "Four NH check sums of 64 bits for every 1024 bytes; key: SUM_KEY_BYTES bytes. With another key `above`, the sums "
      "of these sums: four for every 32 KiB. The same on every instruction set. Releases the interpreter lock.");
  m.def("claim_all", &claim_all, nb::call_guard<nb::gil_scoped_release>(), "threads"_a, "phases"_a,
        "What each thread of a pool claims of phases of so many tasks: [phase][thread][task].");
  nb::class_<Processors>(m, "Processors")
      .def(nb::init<int>(), "threads"_a)
      .def("note", &Processors::note, "thread"_a)
      .def("part", &Processors::part, "thread"_a)
      .def("seen", &Processors::seen, "thread"_a);
  nb::class_<PageWarmer>(m, "PageWarmer")
      .def(
          "__init__",
          [](PageWarmer* self, uintptr_t address, size_t size, size_t ahead) {
            new (self) PageWarmer(reinterpret_cast<char*>(address), size, ahead);
          },
          "address"_a, "size"_a, "ahead"_a)
      .def("used", &PageWarmer::used, "size"_a)
      .def("begin", &PageWarmer::begin)
      .def("end", &PageWarmer::end)
      .def_prop_ro("warmed", &PageWarmer::warmed);
}
