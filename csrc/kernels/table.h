// Kernels of this instruction set, by name; table.cpp puts them in the table.
#pragma once

#include "kernels.h"
#include "simd/isa.h"

namespace quire {
namespace QUIRE_ISA {

void linear_f32(const LinearTask&);
void linear_bf16(const LinearTask&);
void linear_f16(const LinearTask&);
void linear_i8(const LinearTask&);
void linear_groups(const LinearTask&);
void pack_f32(const PackTask&);
void pack_bf16(const PackTask&);
void pack_f16(const PackTask&);
void pack_i8(const PackTask&);
int64_t first_nonfinite(const void* src, DType dtype, DType kept, size_t n);
void pack_groups(const PackTask&);
void pack_codes(const PackCodesTask&);
void quantize(const QuantizeTask&);
void quantize_groups(const QuantizeTask&);
void embed(const EmbedTask&);
void embed_groups(const EmbedTask&);
void to_f32(const void* src, DType dtype, float* dst, size_t n);
void to_bf16(const void* src, DType dtype, uint16_t* dst, size_t n);
void to_f16(const void* src, DType dtype, uint16_t* dst, size_t n);
void norm(const NormTask&);
void add_rows(const AddTask&);
void scale_rows(const ScaleTask&);
void rope_write(const RopeWriteTask&);
void attend(const AttendTask&);
void attend_merge(const AttendTask&);
void latent_write(const LatentWriteTask&);
void latent_attend(const LatentTask&);
void latent_merge(const LatentTask&);
void gated_act(const GatedActTask&);
void route(const RouteTask&);
void combine(const CombineTask&);
void gather(const GatherTask&);
float read_sum(const void* src, size_t bytes);
int64_t fma_loop(int64_t iterations, float* sink);
int64_t bf16_loop(int64_t iterations, float* sink);
int64_t i8_loop(int64_t iterations, float* sink);
extern const SamplingKernels sampling_table;  // constant-initialised, in sampling.cpp

}  // namespace QUIRE_ISA
}  // namespace quire
