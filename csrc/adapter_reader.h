// Matrices of adapters that one op reads, on their way while another computes.
#pragma once

#include "ahead.h"

namespace quire {

// An op that begins by reading A of the step's adapters.
struct AdapterReader {
  virtual ~AdapterReader() = default;
  // Lists the part `part` of `parts` of what it will read, in the order of its tasks.
  virtual void list(int part, int parts, Ahead* ahead) const = 0;
};

// An op that has time to fetch for the next of those.
struct FetchesAhead {
  virtual ~FetchesAhead() = default;
  const AdapterReader* next_reader = nullptr;
};

}  // namespace quire
