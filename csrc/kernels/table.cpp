#include "kernels/table.h"

namespace quire {
namespace QUIRE_ISA {

// Constant-initialised: no code of this set may run before the CPU has been asked.
extern const Kernels table;
const Kernels table = {
    QUIRE_STRINGIFY(QUIRE_ISA),
    linear_f32,
    linear_bf16,
    linear_f16,
    linear_i8,
    linear_groups,
    pack_f32,
    pack_bf16,
    pack_f16,
    pack_i8,
    pack_groups,
    pack_codes,
    quantize,
    quantize_groups,
    norm,
    add_rows,
    scale_rows,
    rope_write,
    attend,
    attend_merge,
    latent_write,
    latent_attend,
    latent_merge,
    gated_act,
    route,
    combine,
    embed,
    embed_groups,
    gather,
    to_f32,
    to_bf16,
    to_f16,
    first_nonfinite,
    read_sum,
    fma_loop,
    bf16_loop,
    i8_loop,
    &sampling_table,
};

}  // namespace QUIRE_ISA
}  // namespace quire
