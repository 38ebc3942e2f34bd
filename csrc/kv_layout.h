// How keys and values are stored in a block of the cache.
#pragma once

#include <cstddef>
#include <cstdint>

#include "sizes.h"

namespace quire {

// Tokens of a KV tile; cache blocks are whole tiles.
constexpr int kTile = 16;

// Formats of a cache; docs/kv_cache.md says what their numbers stand for.
enum class KVType : int32_t {
  f32 = 0,
  bf16 = 1,
  f16 = 2,
  i8 = 3,
  e4m3 = 4,
  e5m2 = 5,
  i4 = 6,
  kivi4 = 7,
  kivi2 = 8,
  kvquant3 = 9
};

// Neighbouring numbers of a key or value that share a scale in formats of four bits and less, and neighbouring tokens
// whose keys do so in kivi4 and kivi2.
constexpr int kKVGroup = 32;
// A query of a layer with a kivi cache sees the keys of its own stretch of so many positions, and of the one before, in
// bfloat16, and the others in the cache's bits: which of them depends on the two positions alone.
constexpr int kRecentStretch = 64;
constexpr int recent_from(int position) {
  return position < kRecentStretch ? 0 : (position / kRecentStretch - 1) * kRecentStretch;
}

constexpr int kv_elems(int head_dim) { return ceil_div(head_dim, 16) * 16; }
constexpr int kv_bits(KVType t) {
  switch (t) {
    case KVType::f32: return 32;
    case KVType::bf16:
    case KVType::f16: return 16;
    case KVType::i4:
    case KVType::kivi4: return 4;
    case KVType::kivi2: return 2;
    case KVType::kvquant3: return 3;
    default: return 8;
  }
}
// Attention multiplies these as bfloat16: a call widens the tiles of a group of keys first.
constexpr bool kv_widened(KVType t) { return t >= KVType::e4m3; }
// Keys and values of tokens that are no longer recent, which share scales with their neighbours' keys.
constexpr bool kv_late(KVType t) { return t == KVType::kivi4 || t == KVType::kivi2; }
// Numbers of a key, and of a value, that kvquant3 keeps as bf16 beside its codes: one in a hundred, rounded up.
constexpr int kv_outliers(int elems) { return ceil_div(elems, 100); }
// What codes of a head stand for in kvquant3: eight levels of keys, eight of values, and of keys the middle and the scale
// of every dimension, float32.
constexpr int kKVLevels = 8;
constexpr size_t kv_codebook(int elems) { return 2 * (kKVLevels + static_cast<size_t>(elems)); }
// Bytes of the scales of a key and a value of `elems` numbers together.
constexpr size_t kv_scale_bytes(int elems, KVType t) {
  const size_t groups = static_cast<size_t>(ceil_div(elems, kKVGroup));
  if (kv_late(t)) return static_cast<size_t>(ceil_div(4 * elems, kKVGroup)) + 4 * groups;
  if (t == KVType::kvquant3) return 4 + 8 * static_cast<size_t>(kv_outliers(elems));
  return t == KVType::i8 ? 4 : t == KVType::i4 ? 4 * groups : 0;
}
// Bytes of a key and a value of `elems` numbers, with their scales.
constexpr size_t kv_pair_bytes(int elems, KVType t) {
  return static_cast<size_t>(ceil_div(2 * elems * kv_bits(t), 8)) + kv_scale_bytes(elems, t);
}

// A layer's cache inside one block: for each kv head its tiles, and a tile is its keys, its values and their scales.
// So what one head reads of a block lies together, and so do heads that one thread works on.
//
//   f32   K [d][16]        V [16][d16]
//   bf16  K [d/2][16][2]   V [8][d16][2]     pairs of d, pairs of tokens
//   f16   K [d][16]        V [8][d16/16][2][16]   a line of values: two tokens, sixteen d each
//   i8    K [d/4][16][4]   V [4][d16][4]     fours of d, with 128 added; fours of tokens
//         and the bfloat16 scales of the 16 keys, then of the 16 values
//   e4m3, e5m2   the bytes of bf16's numbers in its order
//   i4    sixteen bytes for each line of bf16: keys' two d of a token are the nibbles of a byte; of a line of values the
//         first eight bytes are the one token, d 0 … 7 low and 8 … 15 high, the others the other token; then bfloat16
//         scales of the keys, [groups][16], and of the values
//   kivi4, kivi2   codes of bf16's numbers, of one line or of two in sixteen bytes; two tiles are 32 tokens, of whose keys
//         the first has a bfloat16 scale for each d, the second what code 0 stands for; then the scales of the values,
//         [groups][16], and what their codes 0 stand for
//   kvquant3   keys [d16/8][3][16] bytes: the low two bits of d 0 … 3, of d 4 … 7, the third bits of all; values
//         [16][d16/16][6]: the low two bits of sixteen d, then their third bits; bfloat16 scales of the 16 values, and their
//         middles; outliers of keys [n][16], and of values, each d and a bfloat16 number
//
// d16 is head_dim rounded up to 16, and K takes 16 * d16 numbers. A line is 32 numbers, 64 bytes of bf16.
struct KVLayout {
  KVType type;
  int kv_heads, head_dim, d16;
  int block_size, tiles_per_block;
  size_t tile_bytes, block_bytes;  // from one tile, and one block, to the next

  size_t v_offset() const { return static_cast<size_t>(kTile) * d16; }  // numbers from a tile's K to its V
  size_t key_bytes() const { return v_offset() * static_cast<size_t>(kv_bits(type)) / 8; }  // the same in bytes
  size_t scale_offset() const { return 2 * key_bytes(); }
  int groups() const { return ceil_div(d16, kKVGroup); }
  // Bytes from a layer's part of a block to the tile of a head that holds this position.
  size_t tile_at(int head, int position) const {
    return (static_cast<size_t>(head) * tiles_per_block + position % block_size / kTile) * tile_bytes;
  }
};

}  // namespace quire
