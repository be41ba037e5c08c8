// Host stand-in: the 16-bit type of the toolkit's header of this name.
#pragma once

struct __half {
  _Float16 value;
};
inline float __half2float(__half x) { return static_cast<float>(x.value); }
inline __half __float2half(float x) { return {static_cast<_Float16>(x)}; }
