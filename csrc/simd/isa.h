// Which instruction set this translation unit is compiled for, and the namespace its code lives in.
//
// Kernel files, and files of ops that hold a kernel, are compiled once per set with -DQUIRE_ISA=baseline|avx2|avx512.
// Everything they define then sits in quire::QUIRE_ISA, so that no AVX-512 copy of an inline function can be picked by the
// linker for another set.
// For the same reason kernel files use no templates of the standard library.
#pragma once

#include <cstddef>
#include <cstdint>

#ifndef QUIRE_ISA
#error "kernel files are compiled with -DQUIRE_ISA=<name>"
#endif

#define QUIRE_INLINE static inline __attribute__((always_inline))
#define QUIRE_STRINGIFY_(x) #x
#define QUIRE_STRINGIFY(x) QUIRE_STRINGIFY_(x)
