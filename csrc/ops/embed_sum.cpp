#include "kernels.h"

namespace quire {

// out[t] = words[id % rows] + positions[first + position] + segments[id / rows]; either of the last two may be missing.
struct EmbedSumTask {
  const void* words;      // [rows, cols], as the others
  const void* positions;  // or null
  const void* segments;   // or null
  DType dtype;
  const int32_t* ids;
  const int32_t* places;
  float* out;  // [tokens, cols]
  int rows, cols, first, token_begin, token_end;
};

}  // namespace quire

#ifdef QUIRE_ISA  // the kernel, once for every instruction set

#include "kernels/table.h"
#include "simd/functions.h"
#include "simd/half.h"

namespace quire {
namespace QUIRE_ISA {

namespace {

template <DType kType>
QUIRE_INLINE float element(const void* src, size_t i) {
  if constexpr (kType == DType::f32) return static_cast<const float*>(src)[i];
  const uint16_t half = static_cast<const uint16_t*>(src)[i];
  return kType == DType::bf16 ? bf16_to_float(half) : half_to_float(half);
}

template <DType kType>
void sum_rows(const EmbedSumTask& t) {
  const size_t cols = static_cast<size_t>(t.cols);
  for (int i = t.token_begin; i < t.token_end; ++i) {
    const size_t word = static_cast<size_t>(t.ids[i] % t.rows) * cols;
    const size_t segment = static_cast<size_t>(t.ids[i] / t.rows) * cols;
    const size_t place = static_cast<size_t>(t.first + t.places[i]) * cols;
    float* out = t.out + static_cast<size_t>(i) * cols;
    for (size_t k = 0; k < cols; ++k) out[k] = element<kType>(t.words, word + k);
    if (t.segments)
      for (size_t k = 0; k < cols; ++k) out[k] += element<kType>(t.segments, segment + k);
    if (t.positions)
      for (size_t k = 0; k < cols; ++k) out[k] += element<kType>(t.positions, place + k);
  }
}

}  // namespace

void embed_sum(const EmbedSumTask& t) {
  switch (t.dtype) {
    case DType::f32: return sum_rows<DType::f32>(t);
    case DType::bf16: return sum_rows<DType::bf16>(t);
    default: return sum_rows<DType::f16>(t);
  }
}

}  // namespace QUIRE_ISA
}  // namespace quire

#else  // the op

#include "op.h"

namespace quire {
namespace {

struct EmbedSum final : RowOp {
  EmbedSum(Fields& f, Context& c) : RowOp(c, f.buffer("out")), words(f.weight("words")), first(f.integer("first")) {
    positions = f.none("positions") ? (f.skip("positions"), nullptr) : &f.weight("positions");
    segments = f.none("segments") ? (f.skip("segments"), nullptr) : &f.weight("segments");
    f.require(out_.dtype == DType::f32 && out_.cols == words.cols && plain(words), "words must be rows of out's width");
    f.require((!positions || plain(*positions)) && (!segments || plain(*segments)),
              "positions and segments must be tables like words");
  }

  void run_rows(int begin, int end, int) override {
    kernels().embed_sum({words.data(), positions ? positions->data() : nullptr, segments ? segments->data() : nullptr,
                         words.dtype, context_.step.token_ids, context_.step.positions, out_.f32(), words.rows,
                         out_.cols, first, begin, end});
  }

  bool plain(const Param& p) const {
    return p.layout != Param::Layout::panels && !p.groups.bits && p.cols == words.cols && p.dtype == words.dtype;
  }

  const Param& words;
  const Param* positions;
  const Param* segments;
  int first;
};

QUIRE_OP(EmbedSum)

}  // namespace
}  // namespace quire

#endif
