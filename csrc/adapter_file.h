// Pairs of an adapter that lie in a file as a pool takes them: read and packed without anybody's lock.
#pragma once

#include <string>
#include <vector>

#include "adapter_pool.h"

namespace quire {

// A [rank, cols] and B [rows, rank] of a part of a linear, at these bytes of a file; B is multiplied by `scale`.
struct StoredPair {
  std::string linear;
  int part, rank;
  uint64_t a, b;
  DType a_dtype, b_dtype;
  float scale;
};

// Puts pairs into a slot in their order. Throws what AdapterPool::put throws, and std::runtime_error if the file cannot
// be read or ends before; what the slot has then is not defined.
void put_stored(AdapterPool* pool, int slot, int file, const std::vector<StoredPair>& pairs);

}  // namespace quire
