// The watermark of Kirchenbauer et al., 2023 (arXiv:2301.10226): before each token a part of the vocabulary is drawn by a
// generator seeded with the token before ("lefthash", a context of one token), and the logits of these green tokens are
// raised. Who knows the key counts green tokens.
#pragma once

#include <cstdint>

#include "sampling_params.h"

namespace quire {

// Puts the green tokens after `before` first in `order` [vocab]; returns how many there are. They are those of
// transformers' WatermarkLogitsProcessor on a CPU: the beginning of torch.randperm.
int draw_green(int32_t before, const SamplingParams& params, int vocab, int32_t* order);

}  // namespace quire
