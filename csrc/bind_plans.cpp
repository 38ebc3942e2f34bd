// Python bindings of what is planned before there is an executor: scratch of ops, and how attention is cut.

#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <vector>

#include "attention_plan.h"
#include "expert_plan.h"
#include "rounding.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

std::vector<std::vector<int>> attention_parts(const std::vector<int>& shape, int threads, int max_len,
                                              const std::vector<int>& query_start, const std::vector<int>& positions) {
  const quire::AttendShape s{shape.at(0), shape.at(1), shape.at(2), shape.at(3)};
  const size_t states = quire::attention_states({s}, threads, max_len);
  quire::AttentionPlan plan(s, threads, static_cast<int>(positions.size()), states);
  plan.plan(static_cast<int>(query_start.size()) - 1, query_start.data(), positions.data());
  std::vector<std::vector<int>> found;
  for (const quire::AttendPart& p : plan.parts())
    found.push_back(
        {p.row, p.token_begin, p.token_end, p.partition_begin, p.partition_end, p.counter, p.head_begin, p.head_end});
  return found;
}

}  // namespace

void bind_plans(nb::module_& m) {
  m.def(
      "attention_bytes",
      [](const std::vector<std::vector<int>>& shapes, int threads, int max_len) {
        std::vector<quire::AttendShape> found;
        for (const auto& s : shapes) found.push_back({s.at(0), s.at(1), s.at(2), 0, s.at(3), true, s.at(4) != 0});
        return quire::attention_memory(found, threads, max_len).total;
      },
      "shapes"_a, "threads"_a, "max_len"_a,
      "Bytes of scratch that attention needs; a shape is (head_dim, heads, kv_heads, rank, whether its cache is widened).");
  m.def(
      "attention_parts", &attention_parts, "shape"_a, "threads"_a, "max_len"_a, "query_start"_a, "positions"_a,
      "How a step's attention is cut: (row, token begin, token end, partition begin, partition end, split, first head of "
      "keys, head after the last) with split -1 for a part that covers all its partitions; a shape ends with the window.");
  m.def("experts_bytes", &quire::expert_plan_bytes, "experts"_a, "pairs"_a,
        "Bytes of scratch that sorting pairs of tokens and experts needs.");
  m.def(
      "rounding_bytes", [](int cols, int threads) { return quire::RoundedRows::row_bytes(cols) * threads; }, "cols"_a,
      "threads"_a, "Bytes of scratch that rounding rows of up to `cols` columns needs.");
}
