// Python bindings of attention at a tile of one's choice: the kernel of the executor, run for what it moves.

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "executor.h"

namespace nb = nanobind;
using namespace nb::literals;
using quire::Executor;
using quire::kTile;

namespace {

// Keys and values of one head in a float32 cache whose blocks are single tiles.
class Cache {
 public:
  Cache(const float* k, const float* v, int tokens, int head_dim) {
    const int d16 = quire::kv_elems(head_dim), tiles = quire::ceil_div(tokens, kTile);
    const size_t bytes = 2 * sizeof(float) * kTile * static_cast<size_t>(d16);
    layout = {quire::KVType::f32, 1, head_dim, d16, kTile, 1, bytes, bytes};
    arena.allocate(bytes * static_cast<size_t>(tiles));  // zeros
    float* to = reinterpret_cast<float*>(arena.data());
    for (int at = 0; at < tokens; ++at, k += head_dim, v += head_dim) {
      float* keys = to + static_cast<size_t>(at / kTile) * (bytes / sizeof(float));
      float* values = keys + layout.v_offset() + static_cast<size_t>(at % kTile) * d16;
      for (int d = 0; d < head_dim; ++d) keys[d * kTile + at % kTile] = k[d], values[d] = v[d];
    }
    blocks.resize(static_cast<size_t>(tiles));
    std::iota(blocks.begin(), blocks.end(), 0);
  }
  quire::KVLayout layout;
  quire::Arena arena;
  std::vector<int32_t> blocks;
};

// softmax(Q·Kᵀ / √d)·V of one head, all float32 [tokens, head_dim], `rows` queries at a time: each call of the kernel reads
// all keys and values, a few at a time. Returns the numbers that calls have read and written, as the kernel counts them.
size_t attend_tiles(const Executor& e, uintptr_t q, uintptr_t k, uintptr_t v, uintptr_t out, int tokens, int head_dim,
                    int rows) {
  Cache cache(reinterpret_cast<const float*>(k), reinterpret_cast<const float*>(v), tokens, head_dim);
  std::vector<int32_t> positions(static_cast<size_t>(tokens));
  std::iota(positions.begin(), positions.end(), 0);
  quire::Arena scratch;
  scratch.allocate(quire::attend_scratch_bytes(head_dim, rows, false));
  const float one = 1.0f;
  size_t tiles = 0, numbers = 0;
  quire::AttendTask t{};
  t.positions = positions.data();
  t.block_table = cache.blocks.data();
  t.cache = cache.arena.data();
  t.kv = cache.layout;
  t.k_scales = t.v_scales = &one;
  t.qkv = reinterpret_cast<const float*>(q);
  t.out = reinterpret_cast<float*>(out);
  t.out_dtype = quire::DType::f32;
  t.pitch = t.out_pitch = static_cast<size_t>(head_dim);
  t.heads_per_kv = t.head_end = 1;
  t.scale = 1.0f / std::sqrt(static_cast<float>(head_dim));
  t.last = tokens - 1;
  t.partition_end = quire::ceil_div(tokens, quire::kPartition);
  t.scratch = scratch.data();
  t.tiles_read = &tiles;
  for (t.token_begin = 0; t.token_begin < tokens; t.token_begin = t.token_end) {
    t.token_end = std::min(tokens, t.token_begin + rows);
    e.kernels().attend(t);
    numbers += 2 * static_cast<size_t>(t.rows()) * static_cast<size_t>(head_dim);
  }
  return numbers + tiles * 2 * kTile * static_cast<size_t>(cache.layout.d16);
}

}  // namespace

void bind_tiles(nb::module_& m) {
  m.def("attend_tiles", &attend_tiles, nb::call_guard<nb::gil_scoped_release>(), "executor"_a, "q"_a, "k"_a, "v"_a,
        "out"_a, "tokens"_a, "head_dim"_a, "rows"_a,
        "Attention of one head in both directions, `rows` queries at a time: q, k, v and out are addresses of float32 "
        "[tokens, head_dim]. Returns the numbers that the kernel has read and written.");
  m.def(
      "attend_tile_bytes", [](int head_dim, int rows) { return quire::attend_scratch_bytes(head_dim, rows, false); },
      "head_dim"_a, "rows"_a, "Bytes of scratch that attend_tiles needs for a tile.");
}
