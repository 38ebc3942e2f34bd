#include "context.h"

#include <algorithm>

namespace quire {

namespace {

constexpr int kSmallRows = 4;  // rows of a task of an op by rows

}  // namespace

int Context::rows_of_task(int rows) const { return std::clamp(ceil_div(rows, 2 * threads), 1, kSmallRows); }

KVLayout Context::layout(const KVLayer& layer) const {
  KVLayout l;
  l.type = layer.type;
  l.kv_heads = layer.kv_heads;
  l.head_dim = layer.head_dim;
  l.d16 = kv_elems(layer.head_dim);
  l.block_size = limits.block_size;
  l.tiles_per_block = limits.block_size / kTile;
  l.tile_bytes = kTile * kv_pair_bytes(l.d16, layer.type);
  l.block_bytes = block_bytes;
  return l;
}

CacheRow Context::cache_row(const KVLayer& layer, int row, int begin, int end) const {
  CacheRow found = cache_line(layer, step.slots[row]);
  found.token_begin = begin, found.token_end = end;
  return found;
}

CacheRow Context::cache_line(const KVLayer& layer, int line) const {
  return {step.positions,
          table_line(layer.group, line),
          kv.data() + layer.offset,
          layout(layer),
          layer.k_scales.data(),
          layer.v_scales.data(),
          0,
          0,
          key_codes(layer)};
}

KeyCodes Context::key_codes(const KVLayer& layer) const {
  if (layer.rope < 0) return {layer.books.data(), nullptr, nullptr, 0, 0, false};
  const Rope& rope = ropes[static_cast<size_t>(layer.rope)];
  const int positions = static_cast<int>(rope.cos.size()) / rope.half;
  return {layer.books.data(), rope.cos.data(), rope.sin.data(), positions, rope.half * 2, rope.interleaved};
}

CacheWrite Context::cache_write(const KVLayer& layer, const TilePiece& piece) const {
  CacheWrite w;
  static_cast<CacheRow&>(w) = cache_row(layer, piece.row, piece.begin, piece.end);
  w.mirrors = mirrors.data() + piece.mirror_begin;
  w.mirror_count = piece.mirror_end - piece.mirror_begin;
  w.block_tables = step.block_tables[layer.group];
  w.blocks_per_row = limits.blocks_per_row();
  return w;
}

size_t Context::plan_step() {
  pieces.clear();
  for (int b = 0; b < rows; ++b)
    for (int t = step.query_start[b], end = step.query_start[b + 1]; t < end; t = pieces.back().end)
      pieces.push_back({b, t, std::min(end, t + kTile - step.positions[t] % kTile)});
  plan_mirrors();
  adapters.plan_step(rows, step.query_start, step.slots, step.adapters);
  adapters.plan_head(logit_rows, step.logit_rows);
  attention.plan_step(rows, step.query_start, step.positions);
  int highest = -1;  // block that the step writes
  for (const TilePiece& piece : pieces) {
    if (step.slots[piece.row] >= limits.max_rows) break;  // branches, whose blocks lie behind all others
    for (size_t group = 0; group < step.block_tables.size(); ++group)
      highest = std::max(highest, block_table(static_cast<int>(group),
                                              piece.row)[step.positions[piece.begin] / limits.block_size]);
  }
  return block_bytes * static_cast<size_t>(highest + 1);
}

// Mirrors go up to a branch point: they begin with a tile's first token of the row, or with the row.
void Context::plan_mirrors() {
  mirrors.clear();
  if (!step.mirrors || !step.mirrors[1]) return;
  for (TilePiece& piece : pieces) {
    piece.mirror_begin = static_cast<int>(mirrors.size());
    for (const int32_t* m = step.mirrors; m[1]; m += 4)
      if (m[0] <= piece.begin && piece.begin < m[1])
        mirrors.push_back({m[2], std::min(m[1], piece.end) - piece.begin, m[3]});
    piece.mirror_end = static_cast<int>(mirrors.size());
  }
}

}  // namespace quire
