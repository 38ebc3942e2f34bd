// Linear layers over packed weights, and rows of an embedding. Packing is in pack.cpp.

#include "kernels.h"
#include "kernels/micro.h"
#include "kernels/table.h"

namespace quire {
namespace QUIRE_ISA {

namespace {

// k is walked in blocks so that a panel's part stays in the L2 cache while all rows pass over it. Between blocks the
// float32 sums rest in y; a store and a load change no bit.
constexpr int kBlockK = 1024;

// One row block alone: how far ahead of the running load it prefetches, in bytes.
constexpr size_t kPrefetch = 4096;

// Lines of the next weights to prefetch beside each k step, and how far ahead.
struct Ahead {
  int lines;        // 0: nothing
  size_t distance;  // bytes
  size_t stride;    // bytes between the lines of two steps
  bool near;        // into the L1 cache; a whole block ahead would only push out the current one
};

template <class T>
struct Tile {
  const typename T::elem* x;
  size_t ldx;
  const typename T::elem* w;
  float* y;       // first output of the panel for this row block
  size_t ldy;
  const float* bias;  // of the panel, or null
  const float* x_scale;     // i8: of this row block
  const float* w_scale;     // i8: of the panel
  const int32_t* w_offset;
  int steps, width;   // width: valid columns of the panel
  bool first, last;
  Ahead ahead;
};

// A vector of sums between two k blocks rests in y as it is, also when it is integers.
QUIRE_INLINE V16 rest_load(const float* p, int n, V16) { return load_n(p, n); }
QUIRE_INLINE I16 rest_load(const float* p, int n, I16) {
  float t[16];
  store(t, load_n(p, n));
  return iload(t);
}
QUIRE_INLINE V16 as_floats(V16 a) { return a; }
QUIRE_INLINE V16 as_floats(I16 a) {
  float t[16];
  istore(t, a);
  return load(t);
}
QUIRE_INLINE V16 clear(V16) { return zero(); }
QUIRE_INLINE I16 clear(I16) { return izero(); }

// Sums -> the layer's output, before the bias.
template <class T>
QUIRE_INLINE V16 finish(const Tile<T>&, V16 sum, int, int) {
  return sum;
}
template <class T>
QUIRE_INLINE V16 finish(const Tile<T>& t, I16 sum, int r, int col) {
  // x was stored with 128 added: the offset takes 128 * (sum of w) off again, in exact integers
  const V16 exact = to_float(isub(sum, iload(t.w_offset + col)));
  return mul(exact, mul(set1(t.x_scale[r]), load(t.w_scale + col)));
}

template <class T, int R>
QUIRE_INLINE void tile_rows(const Tile<T>& t) {
  constexpr int C = cols_for<R>();
  constexpr int kVectors = kPanel / 16;
  constexpr size_t wstride = static_cast<size_t>(kPanel) * T::step, cstride = 16 * T::step;
  for (int c0 = 0; c0 < kVectors; c0 += C) {
    using Sum = typename T::sum;
    Sum acc[R * C];
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; ++c)
        acc[r * C + c] = t.first ? clear(Sum{})
                                 : rest_load(t.y + r * t.ldy + (c0 + c) * 16, t.width - (c0 + c) * 16, Sum{});
    const typename T::elem* w = t.w + c0 * cstride;
    if (t.ahead.lines && c0 == 0) {
      const char* next = reinterpret_cast<const char*>(t.w) + t.ahead.distance;
      for (int s = 0; s < t.steps; ++s) {
        for (int i = 0; i < t.ahead.lines; ++i) t.ahead.near ? prefetch(next + i * 64) : prefetch_l2(next + i * 64);
        next += t.ahead.stride;
        micro<T, R, C>(acc, t.x + s * T::step, t.ldx, w + s * wstride, wstride, cstride, 1);
      }
    } else {
      micro<T, R, C>(acc, t.x, t.ldx, w, wstride, cstride, t.steps);
    }
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; ++c) {
        const int col = (c0 + c) * 16;
        V16 v = t.last ? finish<T>(t, acc[r * C + c], r, col) : as_floats(acc[r * C + c]);
        if (t.last && t.bias) v = add(v, load_n(t.bias + col, t.width - col));
        if (t.width - col >= 16)
          store(t.y + r * t.ldy + col, v);
        else if (t.width > col)
          store_n(t.y + r * t.ldy + col, v, t.width - col);
      }
  }
}

template <class T>
void tile(int rows, const Tile<T>& t) {
  switch (rows) {
    case 1: return tile_rows<T, 1>(t);
    case 2: return tile_rows<T, 2>(t);
#if QUIRE_AVX512 || QUIRE_AVX2
    case 3: return tile_rows<T, 3>(t);
    case 4: return tile_rows<T, 4>(t);
#endif
#if QUIRE_AVX512
    case 5: return tile_rows<T, 5>(t);
    case 6: return tile_rows<T, 6>(t);
#endif
  }
}

// What row block b of `blocks` prefetches: alone, a fixed distance ahead; else its share of the next k block, so
// that all blocks together fetch it once.
QUIRE_INLINE Ahead ahead(int b, int blocks, int steps, size_t step_bytes) {
  const int lines = static_cast<int>(step_bytes / 64);
  if (blocks == 1) return {lines, kPrefetch, step_bytes, true};
  int sharing = lines;  // a divisor of lines: four or two lines a step in bf16 and float32
  while (sharing > blocks) sharing /= 2;
  if (b >= sharing) return {0, 0, 0, false};
  const int share = lines / sharing;
  return {share, static_cast<size_t>(steps) * step_bytes + static_cast<size_t>(b) * steps * share * 64,
          static_cast<size_t>(share) * 64, false};
}

template <class T>
void linear(const LinearTask& task) {
  using E = typename T::elem;
  const E* x = static_cast<const E*>(task.x);
  const E* w = static_cast<const E*>(task.w);
  const int k_steps = (task.k + T::step - 1) / T::step;
  const size_t panel_elems = static_cast<size_t>(k_steps) * kPanel * T::step;
  const int row_blocks = (task.rows + kRows - 1) / kRows;
  constexpr int block = kBlockK / T::step * (sizeof(E) == 1 ? 2 : 1);
  constexpr size_t step_bytes = static_cast<size_t>(kPanel) * T::step * sizeof(E);  // of one panel row
  for (int p = task.panel_begin; p < task.panel_end; ++p) {
    const int width = task.n - p * kPanel < kPanel ? task.n - p * kPanel : kPanel;
    for (int k0 = 0; k0 < k_steps; k0 += block) {
      const int steps = k_steps - k0 < block ? k_steps - k0 : block;
      // rows in blocks of nearly equal height: 8 rows are 4 + 4, not 6 + 2
      for (int b = 0; b < row_blocks; ++b) {
        const int r0 = static_cast<int>(static_cast<int64_t>(task.rows) * b / row_blocks);
        const int r1 = static_cast<int>(static_cast<int64_t>(task.rows) * (b + 1) / row_blocks);
        Tile<T> t;
        t.x = x + r0 * task.ldx + static_cast<size_t>(k0) * T::step;
        t.ldx = task.ldx;
        t.w = w + p * panel_elems + static_cast<size_t>(k0) * kPanel * T::step;
        t.y = task.y + r0 * task.ldy + static_cast<size_t>(p) * kPanel;
        t.ldy = task.ldy;
        t.bias = task.bias ? task.bias + static_cast<size_t>(p) * kPanel : nullptr;
        t.x_scale = task.x_scale ? task.x_scale + r0 : nullptr;
        t.w_scale = task.w_scale ? task.w_scale + static_cast<size_t>(p) * kPanel : nullptr;
        t.w_offset = task.w_offset ? task.w_offset + static_cast<size_t>(p) * kPanel : nullptr;
        t.steps = steps;
        t.width = width;
        t.first = k0 == 0;
        t.last = k0 + steps == k_steps;
        t.ahead = ahead(b, row_blocks, steps, step_bytes);
        tile<T>(r1 - r0, t);
      }
    }
  }
}

QUIRE_INLINE float source(const void* src, DType type, size_t i) {
  switch (type) {
    case DType::f32: return static_cast<const float*>(src)[i];
    case DType::bf16: return bf16_to_float(static_cast<const uint16_t*>(src)[i]);
    default: return half_to_float(static_cast<const uint16_t*>(src)[i]);
  }
}

void embed_impl(const EmbedTask& t) {
  for (int i = t.token_begin; i < t.token_end; ++i) {
    const int id = t.ids[i];
    float* out = t.out + static_cast<size_t>(i) * t.cols;
    if (!t.packed) {
      const size_t base = static_cast<size_t>(id) * t.cols;
      for (int k = 0; k < t.cols; ++k) out[k] = source(t.table, t.dtype, base + k);
    } else if (t.dtype == DType::f32) {
      const float* panel = static_cast<const float*>(t.table) + static_cast<size_t>(id / kPanel) * t.cols * kPanel;
      for (int k = 0; k < t.cols; ++k) out[k] = panel[static_cast<size_t>(k) * kPanel + id % kPanel];
    } else if (t.dtype == DType::i8) {
      const size_t panel_bytes = static_cast<size_t>((t.cols + 3) / 4) * 4 * kPanel;
      const int8_t* panel = static_cast<const int8_t*>(t.table) + (id / kPanel) * panel_bytes;
      for (int k = 0; k < t.cols; ++k)
        out[k] = static_cast<float>(panel[static_cast<size_t>(k / 4) * 4 * kPanel + (id % kPanel) * 4 + (k & 3)]) *
                 t.scale[id];
    } else {
      const size_t panel_elems = static_cast<size_t>((t.cols + 1) / 2) * 2 * kPanel;
      const uint16_t* panel = static_cast<const uint16_t*>(t.table) + (id / kPanel) * panel_elems;
      for (int k = 0; k < t.cols; ++k)
        out[k] = bf16_to_float(panel[static_cast<size_t>(k / 2) * 2 * kPanel + (id % kPanel) * 2 + (k & 1)]);
    }
  }
}

}  // namespace

void linear_f32(const LinearTask& t) { linear<F32>(t); }
void linear_bf16(const LinearTask& t) { linear<BF16>(t); }
void linear_i8(const LinearTask& t) { linear<I8>(t); }
void embed(const EmbedTask& t) { embed_impl(t); }

}  // namespace QUIRE_ISA
}  // namespace quire
