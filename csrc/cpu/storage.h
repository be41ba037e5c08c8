// Conversion between how tensors are stored and what is computed with: bfloat16 and float16 are computed in float.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "simd.h"
#include "storage_types.h"

namespace magep {

namespace MAGEP_ISA {

inline float widen(BFloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

inline void narrow(float f, BFloat16& out) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u)
    out.bits = static_cast<uint16_t>((bits >> 16) | 0x40u);  // NaN stays NaN
  else
    out.bits = static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);  // to nearest, ties to even
}

inline float widen(Float16 x) {
#if defined(__F16C__)
  return _cvtsh_ss(x.bits);
#else
  const uint32_t sign = (x.bits & 0x8000u) << 16, exponent = (x.bits >> 10) & 0x1fu, mantissa = x.bits & 0x3ffu;
  uint32_t bits;
  if (exponent == 0x1f)
    bits = sign | 0x7f800000u | (mantissa << 13);
  else if (exponent != 0)
    bits = sign | ((exponent + 112) << 23) | (mantissa << 13);
  else {
    const float small = static_cast<float>(mantissa) * 0x1p-24f;
    return sign ? -small : small;
  }
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
#endif
}

inline void narrow(float f, Float16& out) {
#if defined(__F16C__)
  out.bits = _cvtss_sh(f, 0);
#else
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  const uint32_t sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u)
    out.bits = static_cast<uint16_t>(sign | 0x7e00u);
  else if (magnitude >= 0x477ff000u)
    out.bits = static_cast<uint16_t>(sign | 0x7c00u);
  else if (magnitude < 0x38800000u) {  // subnormal: let float addition round to a multiple of 2^-24
    float absolute;
    std::memcpy(&absolute, &magnitude, 4);
    const float shifted = absolute + 0.5f;
    uint32_t rounded;
    std::memcpy(&rounded, &shifted, 4);
    out.bits = static_cast<uint16_t>(sign | (rounded - 0x3f000000u));
  } else {
    const uint32_t rebased = magnitude - 0x38000000u;
    out.bits = static_cast<uint16_t>(sign | ((rebased + 0xfffu + ((rebased >> 13) & 1u)) >> 13));
  }
#endif
}

template <typename S, typename T>
inline void load_row(const S* from, int64_t count, T* to) {
  if constexpr (std::is_same_v<S, T>)
    std::memcpy(to, from, count * sizeof(T));
  else
    for (int64_t k = 0; k < count; ++k) to[k] = widen(from[k]);
}

template <typename S, typename T>
inline void store_row(const T* from, int64_t count, S* to) {
  if constexpr (std::is_same_v<S, T>)
    std::memcpy(to, from, count * sizeof(T));
  else
    for (int64_t k = 0; k < count; ++k) narrow(from[k], to[k]);
}

constexpr int64_t kStreamedBytes = 8 << 20;  // results of this size are not found in a cache when they are read again

// A copy around the caches, which saves reading the lines that it overwrites; call finish_streams before others read
// it.
template <typename T>
inline void stream_row(const T* from, int64_t count, T* to) {
  int64_t k = 0;
#if defined(__AVX2__) || defined(__AVX512F__)
  constexpr int64_t W = kVectorBytes / sizeof(T);
  if (reinterpret_cast<uintptr_t>(to) % kVectorBytes == 0)
    for (; k + W <= count; k += W) {
#if defined(__AVX512F__)
      _mm512_stream_si512(reinterpret_cast<__m512i*>(to + k), _mm512_loadu_si512(from + k));
#else
      _mm256_stream_si256(reinterpret_cast<__m256i*>(to + k),
                          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + k)));
#endif
    }
#endif
  std::memcpy(to + k, from + k, (count - k) * sizeof(T));
}

inline void finish_streams() {
#if defined(__AVX2__) || defined(__AVX512F__)
  _mm_sfence();
#endif
}

template <typename S, typename T>
inline T load_one(const S& x) {
  if constexpr (std::is_same_v<S, T>)
    return x;
  else
    return widen(x);
}

template <typename S, typename T>
inline void store_one(T x, S& to) {
  if constexpr (std::is_same_v<S, T>)
    to = x;
  else
    narrow(x, to);
}

}  // namespace MAGEP_ISA
}  // namespace magep
