// Host stand-in: the 16-bit type of the toolkit's header of this name.
#pragma once

#include <cstdint>
#include <cstring>

struct __nv_bfloat16 {
  uint16_t bits;
};
inline float __bfloat162float(__nv_bfloat16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
// To the nearest, ties to even.
inline __nv_bfloat16 __float2bfloat16(float x) {
  if (x != x) return {0x7fff};
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return {uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
