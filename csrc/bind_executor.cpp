// Python bindings of the executor and of the machine's measured limits.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unordered_map.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <system_error>

#include "executor.h"
#include "isa.h"

namespace nb = nanobind;
using namespace nb::literals;
using quire::DType;
using quire::Executor;

namespace {

template <class T>
const T* at(uintptr_t address) {
  return reinterpret_cast<const T*>(address);
}

void bind(Executor& e, const quire::Limits& limits, const std::vector<uintptr_t>& arrays,
          const std::vector<uintptr_t>& block_tables, size_t arena_bytes, size_t block_bytes, DType kv_dtype) {
  quire::StepPointers step;
  step.token_ids = at<int32_t>(arrays.at(0));
  step.positions = at<int32_t>(arrays.at(1));
  step.query_start = at<int32_t>(arrays.at(2));
  step.slots = at<int32_t>(arrays.at(3));
  step.logit_rows = at<int32_t>(arrays.at(4));
  for (uintptr_t table : block_tables) step.block_tables.push_back(at<int32_t>(table));
  e.bind(limits, step, arena_bytes, block_bytes, kv_dtype);
}

// Checksums cross as packed numbers, 8 bytes a chunk.
nb::bytes save_weights(Executor& e, int fd, size_t first, size_t count) {
  std::vector<uint64_t> sums;
  int failed = 0;
  {
    nb::gil_scoped_release nogil;
    try {
      sums = e.weights().save(fd, first, count);
    } catch (const std::system_error& error) {
      failed = error.code().value();
    }
  }
  if (failed) {
    errno = failed;
    PyErr_SetFromErrno(PyExc_OSError);
    throw nb::python_error();
  }
  return nb::bytes(reinterpret_cast<const char*>(sums.data()), sums.size() * sizeof(uint64_t));
}

bool map_weights(Executor& e, int fd, nb::bytes packed) {
  std::vector<uint64_t> sums(packed.size() / sizeof(uint64_t));
  std::memcpy(sums.data(), packed.c_str(), sums.size() * sizeof(uint64_t));
  nb::gil_scoped_release nogil;
  return e.weights().map(fd, sums);
}

void put_codes(Executor& e, const std::string& param, int row_offset, int rows, const std::vector<uintptr_t>& arrays) {
  quire::PackCodesTask task{};
  task.codes = at<uint8_t>(arrays.at(0));
  task.scales = at<char>(arrays.at(1));
  task.offsets = at<char>(arrays.at(2));
  task.factors = at<uint16_t>(arrays.at(3));
  e.weights().put_codes(param, row_offset, rows, task);
}

std::vector<std::vector<int>> attention_parts(const std::vector<int>& shape, int threads, int max_len,
                                              const std::vector<int>& query_start,
                                              const std::vector<int>& positions) {
  const quire::AttendShape s{shape.at(0), shape.at(1), shape.at(2), shape.at(3)};
  const size_t states = quire::attention_states({s}, threads, max_len);
  quire::AttentionPlan plan(s, threads, static_cast<int>(positions.size()), states);
  plan.plan(static_cast<int>(query_start.size()) - 1, query_start.data(), positions.data());
  std::vector<std::vector<int>> found;
  for (const quire::AttendPart& p : plan.parts())
    found.push_back({p.row, p.token_begin, p.token_end, p.partition_begin, p.partition_end, p.counter, p.head_begin,
                     p.head_end});
  return found;
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Memory that all threads of an executor read together, touched once, to be read again and again.
class BandwidthProbe {
 public:
  BandwidthProbe(Executor& e, size_t bytes) : executor_(e), share_(bytes / e.threads() / 4096 * 4096), sinks_(e.threads() * 16) {
    arena_.allocate(bytes);
    auto touch = [&](int t) {
      for (size_t i = 0; i < share_; i += 4096) arena_.data()[share_ * t + i] = 1;
    };
    quire::on_all(e.pool(), touch);
    measure();
  }

  // Bytes per second of one pass.
  double measure() {
    auto read = [&](int t) { sinks_[t * 16] = executor_.kernels().read_sum(arena_.data() + share_ * t, share_); };
    const auto start = std::chrono::steady_clock::now();
    quire::on_all(executor_.pool(), read);
    return static_cast<double>(share_) * executor_.threads() / seconds_since(start);
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
  auto loop = [&](int t) {
    flops[t * 8] = run(iterations, &sinks[t * 16]);
  };
  quire::on_all(e.pool(), loop);
  const auto start = std::chrono::steady_clock::now();
  quire::on_all(e.pool(), loop);
  const double seconds = seconds_since(start);
  double total = 0;
  for (int t = 0; t < e.threads(); ++t) total += static_cast<double>(flops[t * 8]);
  return total / seconds;
}

using nogil = nb::call_guard<nb::gil_scoped_release>;

void bind_building(nb::class_<Executor>& c) {
  c.def(nb::init<const std::string&, int>(), "isa"_a, "threads"_a)
      .def("add_panels", [](Executor& e, const std::string& name, int matrices, int rows, int cols, DType dtype) {
        e.weights().add_panels(name, matrices, rows, cols, dtype);
      }, "name"_a, "matrices"_a, "rows"_a, "cols"_a, "dtype"_a)
      .def("add_groups", [](Executor& e, const std::string& name, int matrices, int rows, int cols,
                            const quire::GroupFormat& format) {
        e.weights().add_groups(name, matrices, rows, cols, format);
      }, "name"_a, "matrices"_a, "rows"_a, "cols"_a, "groups"_a)
      .def("add_table", [](Executor& e, const std::string& name, int rows, int cols, DType dtype) {
        e.weights().add_table(name, rows, cols, dtype);
      }, "name"_a, "rows"_a, "cols"_a, "dtype"_a)
      .def("add_vector", [](Executor& e, const std::string& name, int matrices, int rows) {
        e.weights().add_vector(name, matrices, rows);
      }, "name"_a, "matrices"_a, "rows"_a)
      .def("allocate_weights", [](Executor& e) { e.weights().allocate(); })
      .def("put", [](Executor& e, const std::string& param, int row_offset, uintptr_t src, DType dtype, int rows, int cols) {
        return e.weights().put(param, row_offset, at<void>(src), dtype, rows, cols);
      }, nogil(), "param"_a, "row_offset"_a, "src"_a, "dtype"_a, "rows"_a, "cols"_a)
      .def("put_codes", &put_codes, nogil(), "param"_a, "row_offset"_a, "rows"_a, "arrays"_a)
      .def("save_weights", &save_weights, "fd"_a, "first"_a, "count"_a)
      .def("map_weights", &map_weights, "fd"_a, "sums"_a)
      .def("add_rope", [](Executor& e, uintptr_t cos, uintptr_t sin, int max_len, int half, bool interleaved) {
        e.add_rope(at<float>(cos), at<float>(sin), max_len, half, interleaved);
      }, "cos"_a, "sin"_a, "max_len"_a, "half"_a, "interleaved"_a)
      .def("add_buffer", [](Executor& e, const std::string& name, int cols, DType dtype, size_t offset, size_t scale_offset,
                            int group, bool rotated, bool logits, int max_rows, int per) {
        e.add_buffer(name, {cols, dtype, offset, scale_offset, group, rotated, logits, max_rows, per});
      }, nb::kw_only(), "name"_a, "cols"_a, "dtype"_a, "offset"_a, "scale_offset"_a, "group"_a, "rotated"_a, "logits"_a,
         "max_rows"_a, "per"_a)
      .def("add_kv_layer", [](Executor& e, int group, int kv_heads, int head_dim, size_t offset) {
        e.add_kv_layer({group, kv_heads, head_dim, offset});
      }, "group"_a, "kv_heads"_a, "head_dim"_a, "offset"_a)
      .def("add_op", &Executor::add_op, "kind"_a, "fields"_a,
           "An op by the name of its class in program/ops, with all its fields; those of records as \"shape.heads\".")
      .def("begin_head", &Executor::begin_head)
      .def("join", &Executor::join, nb::keep_alive<1, 2>(), "group"_a, "rank"_a, "Meet the other ranks of the program there.")
      .def("bind", &bind, "limits"_a, "arrays"_a, "block_tables"_a, "arena_bytes"_a, "block_bytes"_a, "kv_dtype"_a);
}

void bind_running(nb::class_<Executor>& c) {
  c.def("run", &Executor::run, nogil(), "tokens"_a, "rows"_a, "logit_rows"_a)
      .def("run_head", &Executor::run_head, nogil(), "logit_rows"_a)
      .def("run_range", &Executor::run_range, nogil(), "tokens"_a, "rows"_a, "logit_rows"_a, "begin"_a, "end"_a)
      .def("stop_after", &Executor::stop_after, "op"_a, "Run no op after this one; -1 runs all.")
      .def("profile", &Executor::profile, "on"_a)
      .def("take_profile", &Executor::take_profile)
      .def("fill_cache", &Executor::fill_cache, "value"_a, "Overwrite the whole cache; for tests.")
      .def("buffer", [](const Executor& e, const std::string& name) {
        return reinterpret_cast<uintptr_t>(e.buffer(name).data());
      }, "name"_a)
      .def_prop_ro("weight_bytes", [](const Executor& e) { return e.weights().arena().bytes(); })
      .def_prop_ro("kv_bytes", &Executor::kv_bytes)
      .def_prop_ro("kv_warmed", &Executor::kv_warmed, "Bytes of the cache whose pages are in memory ahead of use.")
      .def_prop_ro("activation_bytes", &Executor::activation_bytes)
      .def_prop_ro("table_bytes", &Executor::table_bytes)
      .def("arenas", &Executor::arenas)
      .def_prop_ro("isa", &Executor::isa)
      .def_prop_ro("threads", &Executor::threads)
      .def("measure_flops", &measure_flops, nogil(), "dtype"_a, "iterations"_a);
}

// What memory attention and experts need, and how attention is cut.
void bind_plans(nb::module_& m) {
  m.def("attention_bytes", [](const std::vector<std::vector<int>>& shapes, int threads, int max_len) {
    std::vector<quire::AttendShape> found;
    for (const auto& s : shapes) found.push_back({s.at(0), s.at(1), s.at(2), 0, s.at(3)});
    return quire::attention_memory(found, threads, max_len).total;
  }, "shapes"_a, "threads"_a, "max_len"_a,
     "Bytes of scratch that attention needs; a shape is (head_dim, heads, kv_heads, rank).");
  m.def("attention_parts", &attention_parts, "shape"_a, "threads"_a, "max_len"_a, "query_start"_a, "positions"_a,
        "How a step's attention is cut: (row, token begin, token end, partition begin, partition end, split, first head of "
        "keys, head after the last) with split -1 for a part that covers all its partitions; a shape ends with the window.");
  m.def("experts_bytes", &quire::expert_plan_bytes, "experts"_a, "pairs"_a,
        "Bytes of scratch that sorting pairs of tokens and experts needs.");
}

}  // namespace

void bind_executor(nb::module_& m) {
  m.def("supported_isas", &quire::supported_isas, "Instruction sets this CPU can run, best first.");
  bind_plans(m);

  nb::enum_<DType>(m, "DType")
      .value("f32", DType::f32)
      .value("bf16", DType::bf16)
      .value("f16", DType::f16)
      .value("i8", DType::i8)
      .value("i32", DType::i32);

  nb::enum_<quire::GroupKind>(m, "GroupKind", "Formats of scales and offsets of groups.")
      .value("none", quire::GroupKind::none)
      .value("u8", quire::GroupKind::u8)
      .value("f16", quire::GroupKind::f16)
      .value("bf16", quire::GroupKind::bf16)
      .value("f32", quire::GroupKind::f32)
      .value("f16_u8", quire::GroupKind::f16_u8);

  nb::class_<quire::GroupFormat>(m, "GroupFormat")
      .def("__init__", [](quire::GroupFormat* self, int bits, int size, quire::GroupKind scales, quire::GroupKind offsets,
                          bool rotated) { new (self) quire::GroupFormat{bits, size, scales, offsets, rotated}; },
           "bits"_a, "size"_a, "scales"_a, "offsets"_a, "rotated"_a);

  nb::class_<quire::Limits>(m, "Limits")
      .def(nb::init<>())
      .def_rw("max_tokens", &quire::Limits::max_tokens)
      .def_rw("max_rows", &quire::Limits::max_rows)
      .def_rw("max_logit_rows", &quire::Limits::max_logit_rows)
      .def_rw("max_len", &quire::Limits::max_len)
      .def_rw("num_blocks", &quire::Limits::num_blocks)
      .def_rw("block_size", &quire::Limits::block_size);

  nb::class_<quire::Group>(m, "Group");
  nb::class_<quire::LocalGroup, quire::Group>(m, "LocalGroup", "Ranks in threads of this process.")
      .def(nb::init<int>(), "size"_a)
      .def("leave", &quire::LocalGroup::leave, "End the wait of all other ranks: this one will not come.");

  nb::class_<Executor> executor(m, "Executor");
  bind_building(executor);
  bind_running(executor);

  nb::class_<BandwidthProbe>(m, "BandwidthProbe")
      .def(nb::init<Executor&, size_t>(), nb::keep_alive<1, 2>(), nogil(), "executor"_a, "size"_a)
      .def("measure", &BandwidthProbe::measure, nogil(), "Bytes per second that all threads read together, in one pass.");
}
