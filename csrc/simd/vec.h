// V16: sixteen float32 lanes, the unit every kernel is written in.
//
// avx512: one register. avx2: two. baseline: GCC vectors that the compiler lowers to what the target has.
// Operations are lane-wise and rounded once; fma is fused on avx2 and avx512 and two roundings on baseline.
// Horizontal sums use one fixed tree, so a result depends on the instruction set and on nothing else.
#pragma once

#include <cmath>

#if defined(__AVX512F__) && defined(__AVX512BF16__)
#define QUIRE_AVX512 1
#include <immintrin.h>

#include "simd/vec_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__)
#define QUIRE_AVX2 1
#include <immintrin.h>

#include "simd/vec_avx2.h"
#else
#define QUIRE_GENERIC 1
#include "simd/vec_generic.h"
#endif
