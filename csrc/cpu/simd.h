// Vectors of the widest kind the translation unit is compiled for. Included once per instruction set, in a namespace of
// its own (MAGEP_ISA), so that every level can live in one library.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace magep {
namespace MAGEP_ISA {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

template <typename T>
struct Simd {
  static constexpr int kWidth = kVectorBytes / sizeof(T);
  typedef T Vec __attribute__((vector_size(kVectorBytes)));

  static inline Vec load(const T* p) {
    Vec v;
    std::memcpy(&v, p, sizeof v);
    return v;
  }
  static inline void store(T* p, Vec v) { std::memcpy(p, &v, sizeof v); }
  static inline Vec broadcast(T x) { return x - Vec{}; }
  static inline Vec sqrt(Vec v) {
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 4)
      return reinterpret_cast<Vec>(_mm512_sqrt_ps(reinterpret_cast<__m512>(v)));
    else
      return reinterpret_cast<Vec>(_mm512_sqrt_pd(reinterpret_cast<__m512d>(v)));
#elif defined(__AVX2__)
    if constexpr (sizeof(T) == 4)
      return reinterpret_cast<Vec>(_mm256_sqrt_ps(reinterpret_cast<__m256>(v)));
    else
      return reinterpret_cast<Vec>(_mm256_sqrt_pd(reinterpret_cast<__m256d>(v)));
#else
    for (int k = 0; k < kWidth; ++k) v[k] = std::sqrt(v[k]);
    return v;
#endif
  }

  // The first n lanes, the others zero; memory behind them is not touched.
  static inline Vec load_first(const T* p, int n) {
    Vec v{};
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 4)
      v = reinterpret_cast<Vec>(_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1), p));
    else
      v = reinterpret_cast<Vec>(_mm512_maskz_loadu_pd(static_cast<__mmask8>((1u << n) - 1), p));
#elif defined(__AVX2__)
    if constexpr (sizeof(T) == 4)
      v = reinterpret_cast<Vec>(_mm256_maskload_ps(p, mask32(n)));
    else
      v = reinterpret_cast<Vec>(_mm256_maskload_pd(p, mask64(n)));
#else
    for (int k = 0; k < n; ++k) v[k] = p[k];
#endif
    return v;
  }
  static inline void store_first(T* p, Vec v, int n) {
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 4)
      _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << n) - 1), reinterpret_cast<__m512>(v));
    else
      _mm512_mask_storeu_pd(p, static_cast<__mmask8>((1u << n) - 1), reinterpret_cast<__m512d>(v));
#elif defined(__AVX2__)
    if constexpr (sizeof(T) == 4)
      _mm256_maskstore_ps(p, mask32(n), reinterpret_cast<__m256>(v));
    else
      _mm256_maskstore_pd(p, mask64(n), reinterpret_cast<__m256d>(v));
#else
    for (int k = 0; k < n; ++k) p[k] = v[k];
#endif
  }

 private:
#if defined(__AVX2__) && !defined(__AVX512F__)
  static inline __m256i mask32(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static inline __m256i mask64(int n) {
    return _mm256_cmpgt_epi64(_mm256_set1_epi64x(n), _mm256_setr_epi64x(0, 1, 2, 3));
  }
#endif
};

}  // namespace MAGEP_ISA
}  // namespace magep
