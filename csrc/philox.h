// Philox4x32-10: a counter-based random generator, so that a draw depends on its seed and its place and on nothing
// drawn before. Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.
#pragma once

#include <array>
#include <cstdint>

namespace quire {

constexpr int kPhiloxRounds = 10;
constexpr uint32_t kPhiloxMultiplier0 = 0xD2511F53u, kPhiloxMultiplier1 = 0xCD9E8D57u;
constexpr uint32_t kPhiloxStep0 = 0x9E3779B9u, kPhiloxStep1 = 0xBB67AE85u;  // of the keys, each round

using Philox4 = std::array<uint32_t, 4>;

inline Philox4 philox4x32(Philox4 c, uint32_t key0, uint32_t key1) {
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t a = uint64_t{kPhiloxMultiplier0} * c[0];
    const uint64_t b = uint64_t{kPhiloxMultiplier1} * c[2];
    c = {static_cast<uint32_t>(b >> 32) ^ c[1] ^ key0, static_cast<uint32_t>(b),
         static_cast<uint32_t>(a >> 32) ^ c[3] ^ key1, static_cast<uint32_t>(a)};
    key0 += kPhiloxStep0;
    key1 += kPhiloxStep1;
  }
  return c;
}

// What numbers are for: those for different purposes at one place are independent.
enum class Draw : uint32_t { token = 0, span = 1, accept = 2, residual = 3, xtc = 4 };

// Where a token is drawn: for which request and sample of it, and at which position in the sequence.
struct Place {
  uint64_t seed;
  uint32_t sample;
  uint32_t position;

  uint32_t key0() const { return static_cast<uint32_t>(seed); }
  uint32_t key1() const { return static_cast<uint32_t>(seed >> 32); }
  // The block-th four numbers for a purpose.
  Philox4 words(Draw purpose, uint32_t block) const {
    return philox4x32({position, block, sample, static_cast<uint32_t>(purpose)}, key0(), key1());
  }
  // A multiple of 2^-53 in [0, 1).
  double uniform(Draw purpose) const {
    const Philox4 r = words(purpose, 0);
    return static_cast<double>((uint64_t{r[1]} << 32 | r[0]) >> 11) * 0x1.0p-53;
  }
};

}  // namespace quire
