// Ops that read one buffer and write others: two of them over the same buffer, one after the other, need not meet.
#pragma once

#include "context.h"

namespace quire {

struct Beside {
  virtual ~Beside() = default;
  virtual const Buffer& input() const = 0;
};

}  // namespace quire
