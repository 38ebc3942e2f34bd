// Arithmetic of sizes.
#pragma once

#include <cstddef>

namespace quire {

// Bytes that every piece of an arena is aligned to: a cache line, and the widest vector register.
constexpr size_t kAlignment = 64;

constexpr size_t align_up(size_t n, size_t to) { return (n + to - 1) / to * to; }
constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

}  // namespace quire
