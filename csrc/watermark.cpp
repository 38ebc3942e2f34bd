#include "watermark.h"

#include <numeric>
#include <random>
#include <utility>

namespace quire {

int draw_green(int32_t before, const SamplingParams& params, int vocab, int32_t* order) {
  // torch seeds its Mersenne twister with the low 32 bits.
  const uint64_t seed = static_cast<uint64_t>(params.watermark_key) * static_cast<uint64_t>(before);
  std::mt19937 random(static_cast<uint32_t>(seed));
  std::iota(order, order + vocab, 0);
  const int green = static_cast<int>(vocab * params.watermark_gamma);
  for (int i = 0; i < green; ++i)
    std::swap(order[i],
              order[i + static_cast<int>(static_cast<uint32_t>(random()) % static_cast<uint32_t>(vocab - i))]);
  return green;
}

}  // namespace quire
