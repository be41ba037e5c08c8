// Elementwise algebra along contiguous channels.
#pragma once

#include "simd.h"

namespace magep {
namespace MAGEP_ISA {

// Calls body(offset, count) for each vector of `n` lanes; count is the number of valid lanes.
template <typename T, typename Body>
inline void for_lanes(int64_t n, Body&& body) {
  constexpr int W = Simd<T>::kWidth;
  int64_t k = 0;
  for (; k + W <= n; k += W) body(k, W);
  if (k < n) body(k, static_cast<int>(n - k));
}

template <typename T>
inline typename Simd<T>::Vec load_lanes(const T* p, int count) {
  return count == Simd<T>::kWidth ? Simd<T>::load(p) : Simd<T>::load_first(p, count);
}

template <typename T>
inline void store_lanes(T* p, typename Simd<T>::Vec v, int count) {
  if (count == Simd<T>::kWidth)
    Simd<T>::store(p, v);
  else
    Simd<T>::store_first(p, v, count);
}

// out += x * y
template <typename T>
inline void add_product(int64_t n, const T* x, const T* y, T* out) {
  for_lanes<T>(n, [&](int64_t k, int count) {
    store_lanes(out + k, load_lanes(out + k, count) + load_lanes(x + k, count) * load_lanes(y + k, count), count);
  });
}

// out += x
template <typename T>
inline void add(int64_t n, const T* x, T* out) {
  for_lanes<T>(n, [&](int64_t k, int count) {
    store_lanes(out + k, load_lanes(out + k, count) + load_lanes(x + k, count), count);
  });
}

// out += a x
template <typename T>
inline void add_scaled(int64_t n, T a, const T* x, T* out) {
  const auto scale = Simd<T>::broadcast(a);
  for_lanes<T>(n, [&](int64_t k, int count) {
    store_lanes(out + k, load_lanes(out + k, count) + scale * load_lanes(x + k, count), count);
  });
}

template <typename T>
inline T dot(int64_t n, const T* x, const T* y) {
  typename Simd<T>::Vec sum{};
  for_lanes<T>(n, [&](int64_t k, int count) { sum += load_lanes(x + k, count) * load_lanes(y + k, count); });
  T total = 0;
  for (int k = 0; k < Simd<T>::kWidth; ++k) total += sum[k];
  return total;
}

// out[m, n, :] (+)= sum_k a[m, k, :] b[k, n, :], a small matrix product in every channel at once. Strides count
// channels-long rows: element (m, k) of a starts at a + (m * a_m + k * a_k) * d.
template <typename T>
struct LaneMatrix {
  T* data;
  int64_t row_stride, column_stride;
};

template <typename T>
inline void lane_gemm(int64_t d, int64_t M, int64_t N, int64_t K, LaneMatrix<const T> a, LaneMatrix<const T> b,
                      LaneMatrix<T> out, bool accumulate) {
  using Vec = typename Simd<T>::Vec;
  for_lanes<T>(d, [&](int64_t lane, int count) {
    const auto left = [&](int64_t m, int64_t k) {
      return load_lanes(a.data + (m * a.row_stride + k * a.column_stride) * d + lane, count);
    };
    const auto right = [&](int64_t k, int64_t n) {
      return load_lanes(b.data + (k * b.row_stride + n * b.column_stride) * d + lane, count);
    };
    const auto at = [&](int64_t m, int64_t n) {
      return out.data + (m * out.row_stride + n * out.column_stride) * d + lane;
    };
    int64_t m = 0;
    for (; m + 2 <= M; m += 2) {
      int64_t n = 0;
      for (; n + 2 <= N; n += 2) {
        Vec s00{}, s01{}, s10{}, s11{};
        for (int64_t k = 0; k < K; ++k) {
          const Vec a0 = left(m, k), a1 = left(m + 1, k), b0 = right(k, n), b1 = right(k, n + 1);
          s00 += a0 * b0;
          s01 += a0 * b1;
          s10 += a1 * b0;
          s11 += a1 * b1;
        }
        if (accumulate) {
          s00 += load_lanes(at(m, n), count);
          s01 += load_lanes(at(m, n + 1), count);
          s10 += load_lanes(at(m + 1, n), count);
          s11 += load_lanes(at(m + 1, n + 1), count);
        }
        store_lanes(at(m, n), s00, count);
        store_lanes(at(m, n + 1), s01, count);
        store_lanes(at(m + 1, n), s10, count);
        store_lanes(at(m + 1, n + 1), s11, count);
      }
      for (; n < N; ++n) {
        Vec s0{}, s1{};
        for (int64_t k = 0; k < K; ++k) {
          const Vec b0 = right(k, n);
          s0 += left(m, k) * b0;
          s1 += left(m + 1, k) * b0;
        }
        if (accumulate) {
          s0 += load_lanes(at(m, n), count);
          s1 += load_lanes(at(m + 1, n), count);
        }
        store_lanes(at(m, n), s0, count);
        store_lanes(at(m + 1, n), s1, count);
      }
    }
    for (; m < M; ++m)
      for (int64_t n = 0; n < N; ++n) {
        Vec s{};
        for (int64_t k = 0; k < K; ++k) s += left(m, k) * right(k, n);
        if (accumulate) s += load_lanes(at(m, n), count);
        store_lanes(at(m, n), s, count);
      }
  });
}

}  // namespace MAGEP_ISA
}  // namespace magep
