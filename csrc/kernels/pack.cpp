// Packing: rows of a checkpoint to panels, at the speed at which memory gives and takes them.
//
// A panel interleaves its rows in units of four bytes: one float32, or two bfloat16 or float16 (kernels.h). So every
// format is packed in two steps: some units of sixteen rows are made in a buffer that stays in the L1 cache, and the
// buffer is transposed into the panel, a cache line for each unit.

#include "kernels.h"
#include "kernels/table.h"
#include "simd/transpose.h"
#include "simd/half.h"

namespace quire {
namespace QUIRE_ISA {

namespace {

constexpr int kRowsTogether = 16;  // one cache line of units
constexpr int kUnits = 64;         // made at a time: 256 bytes of each row
constexpr size_t kScan = 8192;     // elements between two looks at a running maximum

QUIRE_INLINE float exact_half(uint16_t h) {
  // Scaling by 2^112 moves the exponent's bias; subnormals come out exact as well. Infinities and NaNs keep theirs.
  const float scaled = bits_to_float(static_cast<uint32_t>(h & 0x7fffu) << 13) * 0x1p112f;
  const uint32_t special = (h & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u;
  return bits_to_float(float_to_bits(scaled) | special | static_cast<uint32_t>(h & 0x8000u) << 16);
}

// n elements from `from` on, as float32.
QUIRE_INLINE void floats(const void* src, DType type, size_t from, int n, float* out) {
  if (type == DType::f32) {
    std::memcpy(out, static_cast<const float*>(src) + from, static_cast<size_t>(n) * 4);
  } else if (type == DType::bf16) {
    const uint16_t* p = static_cast<const uint16_t*>(src) + from;
    for (int i = 0; i < n; ++i) out[i] = bf16_to_float(p[i]);
  } else {
    const uint16_t* p = static_cast<const uint16_t*>(src) + from;
    for (int i = 0; i < n; ++i) out[i] = exact_half(p[i]);
  }
}

// The largest magnitude of n elements, as bits of their format: finite numbers sort like integers.
template <class T>
QUIRE_INLINE T largest_bits(const T* p, size_t n, T magnitude) {
  T top = 0;
  for (size_t i = 0; i < n; ++i) {
    const T bits = p[i] & magnitude;
    top = bits > top ? bits : top;
  }
  return top;
}

template <class T>
int64_t first_at_least(const T* p, size_t n, T magnitude, T bound) {
  for (size_t start = 0; start < n; start += kScan) {
    const size_t count = n - start < kScan ? n - start : kScan;
    if (largest_bits(p + start, count, magnitude) < bound) continue;
    for (size_t i = start; i < start + count; ++i)
      if ((p[i] & magnitude) >= bound) return static_cast<int64_t>(i);
  }
  return -1;
}

// Units [0, n) of `rows` rows, from the buffer to their columns of the panel, the first of which is `column`.
void interleave(const uint32_t* buffer, int rows, int n, uint32_t* panel, int column) {
  panel += column;
  int u = 0;
  if (rows == kRowsTogether)
    for (; u + 4 <= n; u += 4)
      for (int i = 0; i < kRowsTogether; i += 4)
        transpose4(buffer + i * kUnits + u, kUnits, panel + static_cast<size_t>(u) * kPanel + i, kPanel);
  for (; u < n; ++u)
    for (int i = 0; i < rows; ++i) panel[static_cast<size_t>(u) * kPanel + i] = buffer[i * kUnits + u];
}

// The same where a cache line of the panel holds the first halves of sixteen units, then the second ones.
void interleave_halves(const uint32_t* buffer, int rows, int n, uint32_t* panel, int column) {
  const int lane = column % kRowsTogether;
  for (int u = 0; u < n; ++u, panel += kPanel) {
    uint16_t* line = reinterpret_cast<uint16_t*>(panel + column - lane) + lane;
    for (int i = 0; i < rows; ++i) {
      line[i] = static_cast<uint16_t>(buffer[i * kUnits + u]);
      line[kRowsTogether + i] = static_cast<uint16_t>(buffer[i * kUnits + u] >> 16);
    }
  }
}

// Walks a task's rows, at most sixteen of one panel at a time. `make(row, k, n, out)` writes elements [k, k + n) of a row
// as units, those past the last one zero.
template <class Make>
QUIRE_INLINE void pack(const PackTask& t, int per_unit, Make make, decltype(interleave)* place = interleave) {
  uint32_t buffer[kRowsTogether * kUnits];
  const int units = (t.k + per_unit - 1) / per_unit;
  const size_t panel_units = static_cast<size_t>(units) * kPanel;
  for (int r = t.row_begin; r < t.row_end;) {
    const int first = t.row_offset + r;
    const int room = kRowsTogether - first % kRowsTogether;
    const int rows = t.row_end - r < room ? t.row_end - r : room;
    uint32_t* panel = static_cast<uint32_t*>(t.dst) + (first / kPanel) * panel_units;
    for (int u = 0; u < units; u += kUnits) {
      const int n = units - u < kUnits ? units - u : kUnits;
      const int k = u * per_unit, count = t.k - k < n * per_unit ? t.k - k : n * per_unit;
      for (int i = 0; i < rows; ++i) make(r + i, k, count, buffer + i * kUnits);
      place(buffer, rows, n, panel + static_cast<size_t>(u) * kPanel, first % kPanel);
    }
    r += rows;
  }
}

QUIRE_INLINE size_t element(const PackTask& t, int row, int k) { return static_cast<size_t>(row) * t.k + k; }

}  // namespace

void pack_f32(const PackTask& t) {
  pack(t, 1, [&](int row, int k, int n, uint32_t* out) {
    floats(t.src, t.src_dtype, element(t, row, k), n, reinterpret_cast<float*>(out));
  });
}

void pack_bf16(const PackTask& t) {
  pack(t, 2, [&](int row, int k, int n, uint32_t* out) {
    uint16_t* halves = reinterpret_cast<uint16_t*>(out);
    const size_t from = element(t, row, k);
    if (t.src_dtype == DType::bf16) {
      std::memcpy(halves, static_cast<const uint16_t*>(t.src) + from, static_cast<size_t>(n) * 2);
    } else {
      float numbers[kUnits * 2];
      floats(t.src, t.src_dtype, from, n, numbers);
      for (int i = 0; i < n; ++i) halves[i] = float_to_bf16(numbers[i]);
    }
    if (n & 1) halves[n] = 0;
  });
}

void pack_f16(const PackTask& t) {
  pack(
      t, 2,
      [&](int row, int k, int n, uint32_t* out) {
        uint16_t* halves = reinterpret_cast<uint16_t*>(out);
        to_f16(static_cast<const char*>(t.src) + element(t, row, k) * dtype_bytes(t.src_dtype), t.src_dtype, halves, n);
        if (n & 1) halves[n] = 0;
      },
      interleave_halves);
}

// Two of each four features, see kernels.h.
void pack_bf16_24(const PackTask& t) {
  for (int r = t.row_begin; r < t.row_end; ++r) {
    const int row = t.row_offset + r, col = row % kPanel, bit = col % 16 * 2;
    char* four = static_cast<char*>(t.dst) + static_cast<size_t>(row / kPanel) * (t.k / 4) * kFourBytes;
    for (int k = 0; k < t.k; k += 4, four += kFourBytes) {
      float numbers[4];
      floats(t.src, t.src_dtype, element(t, r, k), 4, numbers);
      uint16_t* values = reinterpret_cast<uint16_t*>(four) + col * 2;
      uint32_t* there = reinterpret_cast<uint32_t*>(four + kPanel * 4) + col / 16 * 2;
      int count = 0;
      for (int i = 0; i < 4 && count < 2; ++i) {
        const uint16_t number = float_to_bf16(numbers[i]);
        if (!(number & 0x7fff)) continue;
        values[count++] = number;
        there[i / 2] |= uint32_t{1} << (bit + i % 2);
      }
      if (count == 1) values[1] = values[0];  // the fourth feature is looked for there
    }
  }
}

int64_t first_nonfinite(const void* src, DType type, DType kept, size_t n) {
  if (kept == DType::bf16_24) {
    const int64_t bad = first_nonfinite(src, type, DType::bf16, n);
    if (bad >= 0) return bad;
    for (size_t i = 0; i < n; i += 4) {
      float numbers[4];
      floats(src, type, i, 4, numbers);
      for (int j = 0, count = 0; j < 4; ++j)
        if (float_to_bf16(numbers[j]) & 0x7fff && ++count == 3) return static_cast<int64_t>(i) + j;
    }
    return -1;
  }
  const bool half = kept == DType::f16;  // 65520 and more become infinite
  if (type == DType::f32)
    return first_at_least(static_cast<const uint32_t*>(src), n, uint32_t{0x7fffffff},
                          half ? uint32_t{0x477ff000} : uint32_t{0x7f800000});
  const uint16_t bound = type == DType::f16 ? 0x7c00 : half ? 0x4780 : 0x7f80;
  return first_at_least(static_cast<const uint16_t*>(src), n, uint16_t{0x7fff}, bound);
}

void to_f32(const void* src, DType type, float* dst, size_t n) {
  for (size_t i = 0; i < n; i += kScan) floats(src, type, i, static_cast<int>(n - i < kScan ? n - i : kScan), dst + i);
}

void to_f16(const void* src, DType type, uint16_t* dst, size_t n) {
  if (type == DType::f16) {
    std::memcpy(dst, src, n * sizeof(uint16_t));
    return;
  }
  for (size_t i = 0; i < n; i += 16) {
    alignas(64) float numbers[16] = {};
    uint16_t halves[16];
    const int count = static_cast<int>(n - i < 16 ? n - i : 16);
    floats(src, type, i, count, numbers);
    store_half(halves, load(numbers));
    std::memcpy(dst + i, halves, static_cast<size_t>(count) * sizeof(uint16_t));
  }
}

void to_bf16(const void* src, DType type, float scale, uint16_t* dst, size_t n) {
  if (type == DType::bf16 && scale == 1.0f) {
    std::memcpy(dst, src, n * sizeof(uint16_t));
    return;
  }
  float numbers[256];
  for (size_t i = 0; i < n; i += 256) {
    const int count = static_cast<int>(n - i < 256 ? n - i : 256);
    floats(src, type, i, count, numbers);
    for (int j = 0; j < count; ++j) dst[i + j] = float_to_bf16(numbers[j] * scale);
  }
}

}  // namespace QUIRE_ISA
}  // namespace quire
