// Sampling kernels: passes over one row of logits.
#pragma once

namespace quire {

struct SamplingKernels {};

}  // namespace quire
