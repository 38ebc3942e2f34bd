// Widths of latent attention, as Python's LatentShape.
#pragma once

#include "fields.h"

namespace quire {

struct LatentShape {
  int heads, rank, nope, rope;

  // From the field `shape`; `layer` is the cache that holds its latents.
  LatentShape(Fields& f, const KVLayer& layer)
      : heads(f.integer("shape.heads")), rank(f.integer("shape.rank")), nope(f.integer("shape.nope")),
        rope(f.integer("shape.rope")) {
    f.record("shape", "LatentShape");
    f.require(layer.kv_heads == 1 && layer.head_dim == rank + rope, "the layer's cache must hold latent and key");
  }
  int q_head() const { return nope + rope; }
};

}  // namespace quire
