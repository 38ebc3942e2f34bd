// Python bindings of the executor.

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unordered_map.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <cerrno>
#include <cstring>
#include <system_error>

#include "adapter_file.h"
#include "executor.h"

namespace nb = nanobind;
using namespace nb::literals;
using quire::DType;
using quire::Executor;

namespace {

using PartRanks = decltype(quire::AdapterShape::parts);

template <class T>
const T* at(uintptr_t address) {
  return reinterpret_cast<const T*>(address);
}

quire::StepPointers step_of(const std::vector<uintptr_t>& arrays, const std::vector<uintptr_t>& block_tables) {
  quire::StepPointers step;
  step.token_ids = at<int32_t>(arrays.at(0));
  step.positions = at<int32_t>(arrays.at(1));
  step.query_start = at<int32_t>(arrays.at(2));
  step.slots = at<int32_t>(arrays.at(3));
  step.logit_rows = at<int32_t>(arrays.at(4));
  step.mirrors = at<int32_t>(arrays.at(5));
  step.adapters = at<int32_t>(arrays.at(6));
  for (uintptr_t table : block_tables) step.block_tables.push_back(at<int32_t>(table));
  return step;
}

void bind(Executor& e, const quire::Limits& limits, const std::vector<uintptr_t>& arrays,
          const std::vector<uintptr_t>& block_tables, size_t arena_bytes, size_t block_bytes, uintptr_t activations) {
  e.bind(limits, step_of(arrays, block_tables), arena_bytes, block_bytes, reinterpret_cast<char*>(activations));
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

quire::SharedMatrix shared_matrix(const std::string& name) {
  if (name == "a") return quire::SharedMatrix::a;
  if (name == "b") return quire::SharedMatrix::b;
  if (name.empty()) return quire::SharedMatrix::none;
  throw std::invalid_argument("shared: '" + name + "' is not a or b");
}

using nogil = nb::call_guard<nb::gil_scoped_release>;

void bind_building(nb::class_<Executor>& c) {
  c.def(nb::init<const std::string&, int>(), "isa"_a, "threads"_a)
      .def(nb::init<const std::string&, Executor&>(), nb::keep_alive<1, 3>(), "isa"_a, "beside"_a,
           "One that takes turns with another on its threads.")
      .def(
          "add_param",
          [](Executor& e, const std::string& name, const quire::Param& param) { e.weights().add(name, param); },
          "name"_a, "param"_a)
      .def(
          "borrow_param",
          [](Executor& e, const Executor& lender, const std::string& name) {
            e.weights().borrow(lender.weights(), name);
          },
          nb::keep_alive<1, 2>(), "lender"_a, "name"_a, "Use a parameter of another executor.")
      .def("allocate_weights", [](Executor& e) { e.weights().allocate(); })
      .def(
          "put",
          [](Executor& e, const std::string& param, int row_offset, uintptr_t src, DType dtype, int rows, int cols) {
            return e.weights().put(param, row_offset, at<void>(src), dtype, rows, cols);
          },
          nogil(), "param"_a, "row_offset"_a, "src"_a, "dtype"_a, "rows"_a, "cols"_a)
      .def("put_codes", &put_codes, nogil(), "param"_a, "row_offset"_a, "rows"_a, "arrays"_a)
      .def("save_weights", &save_weights, "fd"_a, "first"_a, "count"_a)
      .def("map_weights", &map_weights, "fd"_a, "sums"_a)
      .def(
          "add_rope",
          [](Executor& e, uintptr_t cos, uintptr_t sin, int max_len, int half, bool interleaved) {
            e.add_rope(at<float>(cos), at<float>(sin), max_len, half, interleaved);
          },
          "cos"_a, "sin"_a, "max_len"_a, "half"_a, "interleaved"_a)
      .def(
          "add_buffer",
          [](Executor& e, const std::string& name, int cols, int pitch, DType dtype, size_t offset, size_t scales_at,
             size_t numbers_at, int group, bool rotated, bool logits, int per, bool shared) {
            e.add_buffer(name,
                         {cols, pitch, dtype, offset, scales_at, numbers_at, group, rotated, logits, per, shared});
          },
          nb::kw_only(), "name"_a, "cols"_a, "pitch"_a, "dtype"_a, "offset"_a, "scales_at"_a, "numbers_at"_a, "group"_a,
          "rotated"_a, "logits"_a, "per"_a, "shared"_a)
      .def(
          "add_kv_layer",
          [](Executor& e, int group, int kv_heads, int head_dim, size_t offset, quire::KVType type,
             std::vector<float> k_scales, std::vector<float> v_scales, std::vector<float> books, int rope) {
            e.add_kv_layer({group, kv_heads, head_dim, offset, type, std::move(k_scales), std::move(v_scales),
                            std::move(books), rope});
          },
          "group"_a, "kv_heads"_a, "head_dim"_a, "offset"_a, "type"_a, "k_scales"_a, "v_scales"_a, "books"_a, "rope"_a,
          "Scales: what a stored 1 of each head's keys and values stands for; 1 but in an fp8 cache. Books and the number "
          "of the rope, or -1: of a kvquant3 cache; see kv_layout.h.")
      .def("add_op", &Executor::add_op, "kind"_a, "fields"_a,
           "An op by the name of its class in program/ops, with all its fields; those of records as \"shape.heads\".")
      .def("begin_head", &Executor::begin_head)
      .def("join", &Executor::join, nb::keep_alive<1, 2>(), "group"_a, "rank"_a,
           "Meet the other ranks of the program there.")
      .def("bind", &bind, "limits"_a, "arrays"_a, "block_tables"_a, "arena_bytes"_a, "block_bytes"_a,
           "activations"_a = 0, "activations: the address of arena_bytes for them; 0 for memory of its own.");
}

void bind_experts(nb::class_<Executor>& c) {
  c.def(
       "place_experts",
       [](Executor& e, int router, const std::vector<int32_t>& experts) { e.experts(router).put(experts); }, "router"_a,
       "experts"_a, "The expert at each place of a router, whose weights are there.")
      .def(
          "share_experts",
          [](Executor& e, quire::Group& group, int rank, uintptr_t shown) {
            e.share_experts(group, rank, reinterpret_cast<char*>(shown));
          },
          nb::keep_alive<1, 2>(), "group"_a, "rank"_a, "shown"_a,
          "Meet the ranks of all replicas that share experts there; shown: the address of the rows that this one shows.")
      .def(
          "take_expert_pairs", [](Executor& e, int router) { return e.experts(router).take_pairs(); }, "router"_a,
          "Pairs of (token, expert) that each place has had since the last call.")
      .def(
          "expert_bytes", [](const Executor& e, const std::string& name) { return e.weights().matrix(name, 0).second; },
          "name"_a, "Bytes of one expert in a packed parameter.")
      .def(
          "read_expert",
          [](const Executor& e, const std::string& name, int number, uintptr_t into) {
            const auto [begin, bytes] = e.weights().matrix(name, number);
            std::memcpy(reinterpret_cast<void*>(into), begin, bytes);
          },
          nogil(), "name"_a, "number"_a, "into"_a)
      .def(
          "replace_expert",
          [](Executor& e, const std::string& name, int number, uintptr_t packed) {
            e.weights().replace_matrix(name, number, at<void>(packed));
          },
          nogil(), "name"_a, "number"_a, "packed"_a,
          "Put what read_expert gave, of the same parameter on another rank.");
}

void bind_adapters(nb::class_<Executor>& c) {
  c.def(
       "set_adapter_layout", [](Executor& e, const quire::AdapterLayout& l) { e.adapters().set_layout(l); }, "layout"_a)
      .def(
          "open_adapter",
          [](Executor& e, int slot, const PartRanks& parts, const std::vector<std::string>& own) {
            e.adapters().open(slot, {parts, own});
          },
          nogil(), "slot"_a, "parts"_a, "own"_a)
      .def(
          "put_adapter",
          [](Executor& e, int slot, const std::string& name, int part, uintptr_t a, DType a_dtype, uintptr_t b,
             DType b_dtype, float scale, uintptr_t gain, int rank) {
            e.adapters().put(slot, name, part, {at<char>(a), a_dtype, 1}, {at<char>(b), b_dtype, scale},
                             at<float>(gain), rank);
          },
          nogil(), "slot"_a, "name"_a, "part"_a, "a"_a, "a_dtype"_a, "b"_a, "b_dtype"_a, "scale"_a, "gain"_a, "rank"_a)
      .def(
          "put_stored",
          [](Executor& e, int slot, int file, const std::vector<quire::StoredPair>& pairs) {
            put_stored(&e.adapters(), slot, file, pairs);
          },
          nogil(), "slot"_a, "file"_a, "pairs"_a)
      .def(
          "put_own_rows",
          [](Executor& e, int slot, const std::string& name, int first, uintptr_t rows, int count, int cols) {
            e.adapters().put_rows(slot, name, first, at<float>(rows), count, cols);
          },
          nogil(), "slot"_a, "name"_a, "first"_a, "rows"_a, "count"_a, "cols"_a)
      .def(
          "clear_adapter", [](Executor& e, int slot) { e.adapters().clear(slot); }, "slot"_a)
      .def(
          "adapter_pages", [](const Executor& e, int slot) { return e.adapters().pages_of(slot); }, "slot"_a,
          "Numbers of the pages that a slot has.")
      .def_prop_ro("free_adapter_pages", [](const Executor& e) { return e.adapters().free_pages(); });
}

void bind_adapter_layout(nb::module_& m) {
  nb::class_<quire::StoredPair>(m, "StoredPair", "A and B of a part of a linear at some bytes of a file.")
      .def(
          "__init__",
          [](quire::StoredPair* pair, const std::string& linear, int part, int rank, uint64_t a, DType a_dtype,
             uint64_t b, DType b_dtype,
             float scale) { new (pair) quire::StoredPair{linear, part, rank, a, b, a_dtype, b_dtype, scale}; },
          "linear"_a, "part"_a, "rank"_a, "a"_a, "a_dtype"_a, "b"_a, "b_dtype"_a, "scale"_a);
  using quire::AdapterLayout;
  nb::class_<AdapterLayout>(m, "AdapterLayout", "How adapters lie in the pages of a pool.")
      .def(nb::init<>())
      .def(
          "add_linear",
          [](AdapterLayout& l, const std::string& name, int cols, int rank, const std::vector<int>& rows,
             const std::string& shared) { l.declare(name, cols, rank, rows, shared_matrix(shared)); },
          "name"_a, "cols"_a, "rank"_a, "rows"_a, "shared"_a,
          "A linear that adapters may change, with the rows of its parts, and the matrix that they share.")
      .def("add_own", &AdapterLayout::declare_own, "name"_a, "param"_a,
           "A parameter of which adapters may have one of their own.")
      .def_prop_ro("page_bytes", [](const AdapterLayout& l) { return l.page().bytes; })
      .def(
          "pages",
          [](const AdapterLayout& l, const PartRanks& parts, const std::vector<std::string>& own) {
            return l.place({parts, own});
          },
          "parts"_a, "own"_a,
          "Pages of an adapter: the rank of each part of a linear, 0 for none, and whether it has gains; and parameters "
          "of its own.")
      .def(
          "pool_bytes",
          [](const AdapterLayout& l, int slots, int pages) {
            return l.slab_bytes(pages) + l.table_bytes(slots, pages);
          },
          "slots"_a, "pages"_a, "Bytes of a pool, its tables included.");
}

void bind_running(nb::class_<Executor>& c) {
  c.def("run", &Executor::run, nogil(), "tokens"_a, "rows"_a, "logit_rows"_a)
      .def(
          "use_step",
          [](Executor& e, const std::vector<uintptr_t>& arrays, const std::vector<uintptr_t>& block_tables) {
            e.use_step(step_of(arrays, block_tables));
          },
          "arrays"_a, "block_tables"_a, "Later steps are in these arrays, which are as those of bind.")
      .def("run_head", &Executor::run_head, nogil(), "logit_rows"_a)
      .def("run_range", &Executor::run_range, nogil(), "tokens"_a, "rows"_a, "logit_rows"_a, "begin"_a, "end"_a)
      .def("stop_after", &Executor::stop_after, "op"_a, "Run no op after this one; -1 runs all.")
      .def("profile", &Executor::profile, "on"_a)
      .def("take_profile", &Executor::take_profile)
      .def(
          "copy_blocks",
          [](Executor& e, const std::vector<int32_t>& blocks, const std::vector<int32_t>& targets) {
            if (blocks.size() != targets.size()) throw std::invalid_argument("targets: one for each block is needed");
            nb::gil_scoped_release release;
            e.copy_blocks(blocks.data(), targets.data(), blocks.size());
          },
          "blocks"_a, "targets"_a, "Copy blocks of the cache to others.")
      .def("fill_cache", &Executor::fill_cache, "byte"_a,
           "Overwrite every byte of the cache; for tests. 255 is NaN, or a scale that is NaN, in every format.")
      .def(
          "buffer",
          [](const Executor& e, const std::string& name) { return reinterpret_cast<uintptr_t>(e.buffer(name).data()); },
          "name"_a)
      .def_prop_ro("weight_bytes", [](const Executor& e) { return e.weights().arena().bytes(); })
      .def_prop_ro("kv_bytes", &Executor::kv_bytes)
      .def_prop_ro("adapter_bytes", [](const Executor& e) { return e.adapters().bytes(); })
      .def_prop_ro("kv_warmed", &Executor::kv_warmed, "Bytes of the cache whose pages are in memory ahead of use.")
      .def_prop_ro("activation_bytes", &Executor::activation_bytes)
      .def_prop_ro("table_bytes", &Executor::table_bytes)
      .def("arenas", &Executor::arenas)
      .def_prop_ro("isa", &Executor::isa)
      .def_prop_ro("threads", &Executor::threads)
      .def(
          "use_threads", [](Executor& self, int count) { self.pool().use(count); }, "count"_a,
          "Steps from now on run on so many of the threads.")
      .def("warm_blocks", &Executor::warm_blocks, "count"_a,
           "Pages of blocks from this one on are not brought into memory ahead of use.");
}

}  // namespace

void bind_executor(nb::module_& m) {
  nb::class_<quire::Limits>(m, "Limits")
      .def(nb::init<>())
      .def_rw("max_tokens", &quire::Limits::max_tokens)
      .def_rw("max_rows", &quire::Limits::max_rows)
      .def_rw("max_logit_rows", &quire::Limits::max_logit_rows)
      .def_rw("max_len", &quire::Limits::max_len)
      .def_rw("num_blocks", &quire::Limits::num_blocks)
      .def_rw("block_size", &quire::Limits::block_size)
      .def_rw("branches", &quire::Limits::branches)
      .def_rw("branch_blocks", &quire::Limits::branch_blocks)
      .def_rw("max_loras", &quire::Limits::max_loras)
      .def_rw("adapter_pages", &quire::Limits::adapter_pages);

  nb::class_<quire::Group>(m, "Group");
  bind_adapter_layout(m);
  nb::class_<Executor> executor(m, "Executor");
  bind_building(executor);
  bind_experts(executor);
  bind_adapters(executor);
  bind_running(executor);
}
