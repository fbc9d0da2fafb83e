// The random numbers of a draw (headrace/engine/sampler.py): they belong to seed, position and token, and to nothing else.
#pragma once

#include <cstdint>

namespace headrace {

// 64 bits for each (seed, position): Philox4x32-10 of Salmon, Moraes, Dror, Shaw (SC 2011), key = seed, counter = (position, 0).
inline uint64_t race_key(uint64_t seed, uint64_t position) {
  uint32_t c0 = uint32_t(position), c1 = uint32_t(position >> 32), c2 = 0, c3 = 0, k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t(0xD2511F53u) * c0, p1 = uint64_t(0xCD9E8D57u) * c2;
    c0 = uint32_t(p1 >> 32) ^ c1 ^ k0, c1 = uint32_t(p1);
    c2 = uint32_t(p0 >> 32) ^ c3 ^ k1, c3 = uint32_t(p0);
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return c0 | uint64_t(c1) << 32;
}

// 32 bits for each token: the hash triple32 of Chris Wellons ("Prospecting for Hash Functions", 2018), with a word of the key before its
// first round and the other after it.
inline uint32_t race_number(uint32_t token, uint32_t first_key, uint32_t second_key) {
  uint32_t x = token * 0x9E3779B1u ^ first_key;
  x ^= x >> 17;
  x *= 0xED5AD4BBu;
  x ^= x >> 11;
  x += second_key;
  x *= 0xAC4C1B51u;
  x ^= x >> 15;
  x *= 0x31848BABu;
  x ^= x >> 14;
  return x;
}

}  // namespace headrace
