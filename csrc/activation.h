// The gate of a feed-forward: a word, or a record with numbers of its own.
#pragma once

#include <optional>

#include "fields.h"
#include "words.h"

namespace quire {

struct Activation {
  Act kind = Act::silu;
  float alpha = 0, limit = 0;

  // From the field `act`.
  explicit Activation(Fields& f) : kind(static_cast<Act>(f.choice("act", kActivations))) {
    if (kind == Act::clamped_swiglu) alpha = f.number("act.alpha"), limit = f.number("act.limit");
  }
  // The same, or nothing for None.
  static std::optional<Activation> optional(Fields& f) {
    if (!f.none("act")) return Activation(f);
    f.skip("act");
    return {};
  }
  // [rows, 2 * width] to rows of `out_pitch` elements.
  GatedActTask task(const float* gate_up, void* out, DType dtype, int rows, int width, size_t out_pitch,
                    bool up = true) const {
    return {gate_up, out, dtype, kind, width, 0, rows, 0, width, out_pitch, up, alpha, limit};
  }
};

}  // namespace quire
