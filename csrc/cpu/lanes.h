// Elementwise algebra along contiguous channels.
#pragma once

#include <type_traits>

#include "simd.h"

namespace magep {
namespace MAGEP_ISA {

// Calls body(offset, count) for each vector of `n` lanes; count is the number of valid lanes, a constant but for the
// last vector.
template <typename T, typename Body>
inline void for_lanes(int64_t n, Body&& body) {
  constexpr int W = Simd<T>::kWidth;
  int64_t k = 0;
  for (; k + W <= n; k += W) body(k, std::integral_constant<int, W>{});
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
  for_lanes<T>(n, [&](int64_t k, auto count) {
    store_lanes(out + k, load_lanes(out + k, count) + load_lanes(x + k, count) * load_lanes(y + k, count), count);
  });
}

// out += x
template <typename T>
inline void add(int64_t n, const T* x, T* out) {
  for_lanes<T>(n, [&](int64_t k, auto count) {
    store_lanes(out + k, load_lanes(out + k, count) + load_lanes(x + k, count), count);
  });
}

// out = a x
template <typename T>
inline void scale(int64_t n, T a, const T* x, T* out) {
  const auto factor = Simd<T>::broadcast(a);
  for_lanes<T>(n, [&](int64_t k, auto count) { store_lanes(out + k, factor * load_lanes(x + k, count), count); });
}

// out[m, n, :] (+)= sum_k a[m, k, :] b[k, n, :], a small matrix product in every channel at once. Strides count
// channels-long rows: element (m, k) of a starts at a + (m * a_m + k * a_k) * d.
template <typename T>
struct LaneMatrix {
  T* data;
  int64_t row_stride, column_stride;
};

// A sum over networks as well: `count` of them, the operands of each this many numbers after those of the one before.
struct Networks {
  int64_t count = 1, a_stride = 0, b_stride = 0;
};

// One block of MB x NB results of lane_gemm in one vector of channels.
template <typename T, int MB, int NB, typename Count, typename Left, typename Right, typename At>
inline void lane_block(int64_t K, int64_t networks, Count count, const Left& left, const Right& right, const At& at,
                       bool accumulate) {
  using Vec = typename Simd<T>::Vec;
  Vec sum[MB][NB];
#pragma GCC unroll 8
  for (int m = 0; m < MB; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < NB; ++n) sum[m][n] = accumulate ? load_lanes(at(m, n), count) : Vec{};
  for (int64_t net = 0; net < networks; ++net)
    for (int64_t k = 0; k < K; ++k) {
      Vec r[NB];
#pragma GCC unroll 4
      for (int n = 0; n < NB; ++n) r[n] = load_lanes(right(net, k, n), count);
#pragma GCC unroll 8
      for (int m = 0; m < MB; ++m) {
        const Vec l = load_lanes(left(net, m, k), count);
#pragma GCC unroll 4
        for (int n = 0; n < NB; ++n) sum[m][n] += l * r[n];
      }
    }
#pragma GCC unroll 8
  for (int m = 0; m < MB; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < NB; ++n) store_lanes(at(m, n), sum[m][n], count);
}

template <typename T>
void lane_gemm(int64_t d, int64_t M, int64_t N, int64_t K, LaneMatrix<const T> a, LaneMatrix<const T> b,
               LaneMatrix<T> out, bool accumulate, Networks networks = {}) {
  const int64_t a_m = a.row_stride * d, a_k = a.column_stride * d, b_k = b.row_stride * d, b_n = b.column_stride * d;
  const int64_t out_m = out.row_stride * d, out_n = out.column_stride * d;
  const auto with_count = [&](int64_t lane, auto count) {
    const auto block = [&](auto MB, auto NB, int64_t m, int64_t n) {
      const T *left = a.data + m * a_m + lane, *right = b.data + n * b_n + lane;
      T* to = out.data + m * out_m + n * out_n + lane;
      lane_block<T, decltype(MB)::value, decltype(NB)::value>(
          K, networks.count, count,
          [=](int64_t net, int64_t i, int64_t k) { return left + net * networks.a_stride + i * a_m + k * a_k; },
          [=](int64_t net, int64_t k, int64_t j) { return right + net * networks.b_stride + k * b_k + j * b_n; },
          [=](int64_t i, int64_t j) { return to + i * out_m + j * out_n; }, accumulate);
    };
    const auto columns = [&](auto MB, int64_t m) {
      int64_t n = 0;
      for (; n + 2 <= N; n += 2) block(MB, std::integral_constant<int, 2>{}, m, n);
      if (n < N) block(MB, std::integral_constant<int, 1>{}, m, n);
    };
    int64_t m = 0;
    for (; m + 4 <= M; m += 4) columns(std::integral_constant<int, 4>{}, m);
    for (; m < M; ++m) columns(std::integral_constant<int, 1>{}, m);
  };
  for_lanes<T>(d, with_count);
}

}  // namespace MAGEP_ISA
}  // namespace magep
