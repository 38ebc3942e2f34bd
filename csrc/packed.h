// Packed weights on disk: a checksum of every chunk, so that a file that was cut or changed is never used.
#pragma once

#include <cstddef>
#include <cstdint>

namespace quire {

// Bytes that one checksum covers; a whole number of pages.
constexpr size_t kChunkBytes = size_t{4} << 20;

// 64-bit checksum of `bytes` (a multiple of 64) at memory speed. Any change within one of the eight interleaved
// streams of words changes it for certain while it is one word, and else but for one case in 2^64. Not a defence
// against an attacker who looks for a collision.
uint64_t checksum(const char* data, size_t bytes, uint64_t seed);

}  // namespace quire
