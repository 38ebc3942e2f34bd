// NH, the universal hash of UMAC (Black et al. 1999, RFC 4418): integers only, so that every instruction set has the
// same sums.

#include "kernels/table.h"
#include "simd/vec.h"

namespace quire {
namespace QUIRE_ISA {

namespace {

// The sums of a whole page for each of kPageSums keys, each of which begins two words behind the one before.
void sum_page(const uint64_t* page, const uint64_t* key, uint64_t* out) {
#if QUIRE_AVX512
  __m512i sums[kPageSums] = {};
  for (int i = 0; i < kPageWords; i += 8) {
    const __m512i words = _mm512_loadu_si512(page + i);
    for (int j = 0; j < kPageSums; ++j) {
      const __m512i both = _mm512_add_epi32(words, _mm512_loadu_si512(key + i + 2 * j));
      sums[j] = _mm512_add_epi64(sums[j], _mm512_mul_epu32(both, _mm512_srli_epi64(both, 32)));
    }
  }
  for (int j = 0; j < kPageSums; ++j) out[j] = static_cast<uint64_t>(_mm512_reduce_add_epi64(sums[j]));
#elif QUIRE_AVX2
  __m256i sums[kPageSums];
  for (int j = 0; j < kPageSums; ++j) sums[j] = _mm256_setzero_si256();
  for (int i = 0; i < kPageWords; i += 4) {
    const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(page + i));
    for (int j = 0; j < kPageSums; ++j) {
      const __m256i keys = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(key + i + 2 * j));
      const __m256i both = _mm256_add_epi32(words, keys);
      sums[j] = _mm256_add_epi64(sums[j], _mm256_mul_epu32(both, _mm256_srli_epi64(both, 32)));
    }
  }
  for (int j = 0; j < kPageSums; ++j) {
    alignas(32) uint64_t lanes[4];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), sums[j]);
    out[j] = lanes[0] + lanes[1] + lanes[2] + lanes[3];
  }
#else
  for (int j = 0; j < kPageSums; ++j) {
    uint64_t sum = 0;
    for (int i = 0; i < kPageWords; ++i) {
      const uint64_t low = static_cast<uint32_t>(page[i] + key[i + 2 * j]);
      const uint64_t high = static_cast<uint32_t>((page[i] >> 32) + (key[i + 2 * j] >> 32));
      sum += low * high;
    }
    out[j] = sum;
  }
#endif
}

}  // namespace

void sum_pages(const PageSumTask& t) {
  const char* data = static_cast<const char*>(t.data);
  uint64_t* out = t.out;
  size_t left = t.bytes;
  for (; left >= kSumPage; left -= kSumPage, data += kSumPage, out += kPageSums) {
    sum_page(reinterpret_cast<const uint64_t*>(data), t.key, out);
  }
  if (left) {
    uint64_t page[kPageWords] = {};
    __builtin_memcpy(page, data, left);
    sum_page(page, t.key, out);
  }
}

}  // namespace QUIRE_ISA
}  // namespace quire
