// Philox4x32-10: a counter-based random generator, so that a draw depends on its seed and its place and on nothing
// drawn before. Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.
#pragma once

#include <array>
#include <cstdint>

namespace quire {

using Philox4 = std::array<uint32_t, 4>;

inline Philox4 philox4x32(Philox4 c, uint32_t key0, uint32_t key1) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53u} * c[0];
    const uint64_t b = uint64_t{0xCD9E8D57u} * c[2];
    c = {static_cast<uint32_t>(b >> 32) ^ c[1] ^ key0, static_cast<uint32_t>(b),
         static_cast<uint32_t>(a >> 32) ^ c[3] ^ key1, static_cast<uint32_t>(a)};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return c;
}

// What a uniform is for: draws for different purposes at one place are independent.
enum class Draw : uint32_t { token = 0 };

// A multiple of 2^-53 in [0, 1) that belongs to (seed, sample of the request, position in the sequence, purpose).
inline double uniform(uint64_t seed, uint32_t sample, uint64_t position, Draw purpose) {
  const Philox4 counter = {static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32), sample,
                           static_cast<uint32_t>(purpose)};
  const Philox4 r = philox4x32(counter, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
  return static_cast<double>((uint64_t{r[1]} << 32 | r[0]) >> 11) * 0x1.0p-53;
}

}  // namespace quire
