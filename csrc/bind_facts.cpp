// Python bindings of facts that have their home here: formats, sizes of what is packed, limits of kernels.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "isa.h"
#include "kernels.h"
#include "ngram_index.h"
#include "packed.h"
#include "weights.h"
#include "words.h"

namespace nb = nanobind;
using namespace nb::literals;
using quire::DType;
using quire::GroupFormat;
using quire::GroupKind;
using quire::KVType;
using quire::Param;

namespace {

template <class T, size_t N>
nb::tuple tuple_of(const T (&values)[N]) {
  nb::list found;
  for (const T& value : values) found.append(value);
  return nb::tuple(found);
}

void bind_numbers(nb::module_& m) {
  m.attr("ALIGNMENT") = quire::kAlignment;
  m.attr("CHUNK_BYTES") = quire::kChunkBytes;
  m.attr("GROUP_BITS") = quire::kGroupBits;
  m.attr("GROUP_SIZES") = tuple_of(quire::kGroupSizes);
  m.attr("KV_LEVELS") = quire::kKVLevels;
  m.attr("LONGEST_MATCH") = quire::NgramIndex::kLongest;
  m.attr("MAXIMA_COLS") = quire::kMaximaCols;
  m.attr("MAX_EXPERTS") = quire::kMaxExperts;
  m.attr("MAX_HEAD_DIM") = quire::kMaxHeadDim;
  m.attr("MAX_TOP_K") = quire::kMaxTopK;
  m.attr("PACK_LAYOUT") = quire::kPackLayout;
  m.attr("PANEL_ROWS") = quire::kPanel;
  m.attr("RANK_LANES") = quire::kRankLanes;
  m.attr("SUPER_GROUPS") = GroupFormat::kSuper;
  m.attr("TILE_TOKENS") = quire::kTile;
}

// Words that cross as they are written in Python, which needs them as literals.
void bind_words(nb::module_& m) {
  m.attr("ACTIVATIONS") = tuple_of(quire::kActivations);
  m.attr("GROUP_SCORES") = tuple_of(quire::kGroupScores);
  m.attr("NORM_KINDS") = tuple_of(quire::kNormKinds);
  m.attr("ROUTER_SCORES") = tuple_of(quire::kRouterScores);
}

void bind_formats(nb::module_& m) {
  nb::enum_<DType>(m, "DType")
      .value("f32", DType::f32)
      .value("bf16", DType::bf16)
      .value("f16", DType::f16)
      .value("i8", DType::i8)
      .value("i32", DType::i32)
      .value("bf16_24", DType::bf16_24);
  nb::enum_<KVType>(m, "KVType")
      .value("f32", KVType::f32)
      .value("bf16", KVType::bf16)
      .value("f16", KVType::f16)
      .value("i8", KVType::i8)
      .value("e4m3", KVType::e4m3)
      .value("e5m2", KVType::e5m2)
      .value("i4", KVType::i4)
      .value("kivi4", KVType::kivi4)
      .value("kivi2", KVType::kivi2)
      .value("kvquant3", KVType::kvquant3);
  nb::enum_<GroupKind>(m, "GroupKind", "Formats of scales and offsets of groups.")
      .value("none", GroupKind::none)
      .value("u8", GroupKind::u8)
      .value("f16", GroupKind::f16)
      .value("bf16", GroupKind::bf16)
      .value("f32", GroupKind::f32)
      .value("f16_u8", GroupKind::f16_u8);
  nb::class_<GroupFormat>(m, "GroupFormat")
      .def(
          "__init__",
          [](GroupFormat* self, int bits, int size, GroupKind scales, GroupKind offsets, bool rotated) {
            new (self) GroupFormat{bits, size, scales, offsets, rotated};
          },
          "bits"_a, "size"_a, "scales"_a, "offsets"_a, "rotated"_a)
      .def("row_number_bytes", &GroupFormat::row_number_bytes, "cols"_a,
           "Bytes of the scales, offsets and factors of one output.");
  nb::class_<Param>(m, "Param", "A parameter in its packed form.")
      .def_static("panels", &Param::panels, "matrices"_a, "rows"_a, "cols"_a, "dtype"_a)
      .def_static("grouped", &Param::grouped, "matrices"_a, "rows"_a, "cols"_a, "groups"_a)
      .def_static("table", &Param::table, "rows"_a, "cols"_a, "dtype"_a)
      .def_static("vectors", &Param::vectors, "matrices"_a, "rows"_a)
      .def_prop_ro("bytes", &Param::bytes);
}

}  // namespace

void bind_facts(nb::module_& m) {
  m.def("supported_isas", &quire::supported_isas, "Instruction sets this CPU can run, best first.");
  bind_numbers(m);
  bind_words(m);
  bind_formats(m);
  m.def("dtype_bytes", &quire::dtype_bytes, "dtype"_a, "Bytes of a number of a buffer, table or plain panel.");
  m.def("kv_elems", &quire::kv_elems, "head_dim"_a, "Numbers that a key or value of head_dim takes in the cache.");
  m.def("kv_pair_bytes", &quire::kv_pair_bytes, "elems"_a, "type"_a,
        "Bytes of a key and a value of so many numbers, with their scales.");
  m.def("kv_scale_bytes", &quire::kv_scale_bytes, "elems"_a, "type"_a, "Bytes of the scales among them.");
  m.def("kv_outliers", &quire::kv_outliers, "elems"_a,
        "Numbers of a key, and of a value, of so many that kvquant3 keeps beside its codes.");
  m.def("kv_late", &quire::kv_late, "type"_a, "Whether tokens come to the cache when they are no longer recent.");
  m.def("kv_widened", &quire::kv_widened, "type"_a, "Whether attention multiplies these numbers as bfloat16.");
}
