#include <vector>

#include "kernels.h"

namespace quire {

// Keys and values of 32 tokens of one row and head, from a bf16 cache to a kivi cache.
struct CompressTask {
  KVLayout from, to;
  const char* source;  // the head's first tile of the tokens, in either cache
  char* target;
};

}  // namespace quire

#ifdef QUIRE_ISA  // the kernel, once for every instruction set

#include <cstring>

#include "kernels/table.h"
#include "simd/half.h"
#include "simd/lines.h"

namespace quire {
namespace QUIRE_ISA {

namespace {

constexpr int kTokens = 2 * kTile;  // that share scales of keys
static_assert(kTokens == kKVGroup);

// A group's scale and what code 0 stands for, as bf16. Numbers that are not finite make both NaN.
struct GroupNumbers {
  uint16_t scale, least;
};

// Codes of two vectors, the first `counts` of all 32 numbers: round((x - least) / scale) in [0, 2^kBits - 1].
template <int kBits>
QUIRE_INLINE GroupNumbers to_codes(V16 a, V16 b, uint8_t* out) {
  constexpr float kMost = (1 << kBits) - 1;
  const float most = reduce_max(vmax(a, b)), least = -reduce_max(vmax(sub(zero(), a), sub(zero(), b)));
  GroupNumbers n{0x7fc0, 0x7fc0};
  if (!mask_not_finite(add(mul(a, zero()), mul(b, zero())))) {
    n.least = float_to_bf16(least);
    n.scale = float_to_bf16((most - bf16_to_float(n.least)) / kMost);
  }
  const float scale = bf16_to_float(n.scale);
  const V16 inverse = set1(scale > 1e-30f ? 1.0f / scale : 0.0f), origin = set1(bf16_to_float(n.least));
  const auto codes = [&](V16 x) __attribute__((always_inline)) {
    return vmax(vmin(round_even(mul(sub(x, origin), inverse)), set1(kMost)), zero());
  };
  store_byte(out, codes(a), 0);
  store_byte(out + 16, codes(b), 0);
  return n;
}

// Byte i of a line holds codes a[i] and b[i]; of two bits, two lines share sixteen bytes.
template <int kBits>
QUIRE_INLINE void put_line(uint8_t* codes, int line, const uint8_t* a, const uint8_t* b) {
  uint8_t* to = codes + (kBits == 4 ? line : line / 2) * 16;
  const int shift = kBits == 4 ? 0 : line % 2 * 4;
  for (int i = 0; i < 16; ++i) {
    const int both = (a[i] | b[i] << kBits) << shift;
    to[i] = static_cast<uint8_t>(shift ? to[i] | both : both);
  }
}

template <int kBits>
void compress(const CompressTask& t) {
  const KVLayout& kv = t.to;
  const uint16_t* source[2];
  uint8_t* target[2];
  for (int i = 0; i < 2; ++i) {
    source[i] = reinterpret_cast<const uint16_t*>(t.source + i * t.from.tile_bytes);
    target[i] = reinterpret_cast<uint8_t*>(t.target + i * kv.tile_bytes);
  }
  const auto numbers = [&](int i) { return reinterpret_cast<uint16_t*>(target[i] + kv.scale_offset()); };
  uint8_t a[kTokens], b[kTokens];
  for (int line = 0; line < kv.d16 / 2; ++line) {  // two d of 32 keys
    const P16 early = load_pairs(source[0] + line * 32), late = load_pairs(source[1] + line * 32);
    const GroupNumbers first = to_codes<kBits>(first_of(early), first_of(late), a);
    const GroupNumbers second = to_codes<kBits>(second_of(early), second_of(late), b);
    for (int i = 0; i < 2; ++i) put_line<kBits>(target[i], line, a + i * kTile, b + i * kTile);
    numbers(0)[2 * line] = first.scale, numbers(0)[2 * line + 1] = second.scale;
    numbers(1)[2 * line] = first.least, numbers(1)[2 * line + 1] = second.least;
  }
  alignas(64) uint8_t codes[2][kMaxHeadDim + kKVGroup];
  const int vectors = kv.d16 / 16, groups = kv.groups();
  for (int token = 0; token < kTokens; ++token) {
    const int tile = token / kTile, lane = token % kTile;
    const uint16_t* values = source[tile] + t.from.v_offset() + static_cast<size_t>(lane / 2) * 2 * kv.d16;
    uint16_t* scales = numbers(tile) + kv.d16 + lane;
    for (int v = 0; v < vectors; v += 2) {
      const auto of = [&](int vector) {
        const P16 pairs = load_pairs(values + vector * 32);
        return lane % 2 ? second_of(pairs) : first_of(pairs);
      };
      const V16 x = of(v), y = v + 1 < vectors ? of(v + 1) : x;
      const GroupNumbers n = to_codes<kBits>(x, y, codes[token % 2] + v * 16);
      scales[v / 2 * kTile] = n.scale;
      scales[(groups + v / 2) * kTile] = n.least;
    }
    if (token % 2 == 0) continue;
    for (int v = 0; v < vectors; ++v) {
      const uint8_t *early = codes[0] + v * 16, *late = codes[1] + v * 16;
      std::memcpy(a, early, 8), std::memcpy(a + 8, late, 8);
      std::memcpy(b, early + 8, 8), std::memcpy(b + 8, late + 8, 8);
      put_line<kBits>(target[tile] + kv.key_bytes(), lane / 2 * vectors + v, a, b);
    }
  }
}

}  // namespace

void compress_kv(const CompressTask& t) { t.to.type == KVType::kivi4 ? compress<4>(t) : compress<2>(t); }

}  // namespace QUIRE_ISA
}  // namespace quire

#else  // the op

#include "op.h"

namespace quire {
namespace {

struct CompressKV final : Op {
  CompressKV(Fields& f, Context& c) : Op(c), recent(f.kv_layer("recent")), layer(f.kv_layer("layer")) {
    f.require(kv_late(layer.type) && recent.type == KVType::bf16 && recent.kv_heads == layer.kv_heads &&
                  recent.head_dim == layer.head_dim,
              "from a bf16 cache to a kivi cache of the same heads");
    f.require(layer.head_dim <= kMaxHeadDim, "head_dim is beyond the limit of the kernel");
  }

  // A task for each head of each 32 tokens whose last one is computed in the step, in every line that has it.
  int tasks() const override {
    groups.clear();
    for (const TilePiece& piece : context_.pieces) {
      const int last = context_.step.positions[piece.end - 1];
      if ((last + 1) % kKVGroup) continue;
      const int first = last + 1 - kKVGroup;
      groups.push_back({context_.step.slots[piece.row], first});
      for (int m = piece.mirror_begin; m < piece.mirror_end; ++m)
        if (context_.mirrors[m].count == piece.end - piece.begin) groups.push_back({context_.mirrors[m].line, first});
    }
    return static_cast<int>(groups.size()) * layer.kv_heads;
  }
  void run(int task, int) override {
    const Group& group = groups[task / layer.kv_heads];
    const CacheRow from = context_.cache_line(recent, group.line), to = context_.cache_line(layer, group.line);
    const int head = task % layer.kv_heads;
    const auto at = [&](const CacheRow& row) {
      const auto block = static_cast<size_t>(row.block_table[group.first / row.kv.block_size]);
      return static_cast<char*>(row.cache) + block * row.kv.block_bytes + row.kv.tile_at(head, group.first);
    };
    kernels().compress_kv({from.kv, to.kv, at(from), at(to)});
  }

  struct Group {
    int line, first;
  };
  const KVLayer &recent, &layer;
  mutable std::vector<Group> groups;
};

QUIRE_OP(CompressKV)

}  // namespace
}  // namespace quire

#endif
