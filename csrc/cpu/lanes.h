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

// out[r, :] = left[r] right[:], rows of n numbers
template <typename T>
inline void outer(int64_t rows, int64_t n, const T* left, const T* right, T* out) {
  if (n != Simd<T>::kWidth) {
    for (int64_t r = 0; r < rows; ++r) scale(n, left[r], right, out + r * n);
    return;
  }
  const auto row = Simd<T>::load(right);
  for (int64_t r = 0; r < rows; ++r) Simd<T>::store(out + r * n, Simd<T>::broadcast(left[r]) * row);
}

// out[m, n, :] (+)= sum_k a[m, k, :] b[k, n, :], a small matrix product in every channel at once. Strides count
// channels-long rows: element (m, k) of a starts at a + (m * a_m + k * a_k) * d.
template <typename T>
struct LaneMatrix {
  T* data;
  int64_t row_stride, column_stride;
};

// Networks whose operands lie this many numbers apart: `count` of them.
struct Networks {
  int64_t count = 1, a_stride = 0, b_stride = 0;
};

// One block of MB x NB results of lane_gemm in one vector of channels; right[n], to[n] and start[n] are where columns
// begin, start[0] may be null.
template <typename T, int MB, int NB, typename Count>
inline void lane_block(int64_t K, Networks sum, Count count, const T* left, int64_t a_m, int64_t a_k,
                       const T* const* right, int64_t b_k, T* const* to, int64_t out_m, const T* const* start,
                       int64_t start_m) {
  using Vec = typename Simd<T>::Vec;
  Vec sums[MB][NB];
#pragma GCC unroll 8
  for (int m = 0; m < MB; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < NB; ++n) sums[m][n] = start[0] ? load_lanes(start[n] + m * start_m, count) : Vec{};
  for (int64_t net = 0; net < sum.count; ++net)
    for (int64_t k = 0; k < K; ++k) {
      Vec r[NB];
#pragma GCC unroll 4
      for (int n = 0; n < NB; ++n) r[n] = load_lanes(right[n] + net * sum.b_stride + k * b_k, count);
#pragma GCC unroll 8
      for (int m = 0; m < MB; ++m) {
        const Vec l = load_lanes(left + net * sum.a_stride + m * a_m + k * a_k, count);
#pragma GCC unroll 4
        for (int n = 0; n < NB; ++n) sums[m][n] += l * r[n];
      }
    }
#pragma GCC unroll 8
  for (int m = 0; m < MB; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < NB; ++n) store_lanes(to[n] + m * out_m, sums[m][n], count);
}

// lane_gemm with columns anywhere: right(n), to(n) and start(n) are where column n of b, of out and of what the
// products are added to begin; start(n) may be null.
template <typename T, typename Right, typename To, typename Start>
void lane_gemm_columns(int64_t d, int64_t M, int64_t N, int64_t K, LaneMatrix<const T> a, int64_t b_k, int64_t out_m,
                       int64_t start_m, const Right& right, const To& to, const Start& start, Networks sum) {
  const int64_t a_m = a.row_stride * d, a_k = a.column_stride * d;
  for_lanes<T>(d, [&](int64_t lane, auto count) {
    const auto block = [&](auto MB, auto NB, int64_t m, int64_t n) {
      const T* right_columns[decltype(NB)::value];
      T* out_columns[decltype(NB)::value];
      const T* start_columns[decltype(NB)::value];
      for (int j = 0; j < decltype(NB)::value; ++j) {
        right_columns[j] = right(n + j) + lane;
        out_columns[j] = to(n + j) + m * out_m + lane;
        const T* first = start(n + j);
        start_columns[j] = first ? first + m * start_m + lane : nullptr;
      }
      lane_block<T, decltype(MB)::value, decltype(NB)::value>(K, sum, count, a.data + m * a_m + lane, a_m, a_k,
                                                              right_columns, b_k, out_columns, out_m, start_columns,
                                                              start_m);
    };
    const auto columns = [&](auto MB, int64_t m) {
      int64_t n = 0;
#if defined(__AVX512F__)  // 32 registers
      for (; n + 4 <= N; n += 4) block(MB, std::integral_constant<int, 4>{}, m, n);
#endif
      for (; n + 2 <= N; n += 2) block(MB, std::integral_constant<int, 2>{}, m, n);
      if (n < N) block(MB, std::integral_constant<int, 1>{}, m, n);
    };
    int64_t m = 0;
    for (; m + 4 <= M; m += 4) columns(std::integral_constant<int, 4>{}, m);
    for (; m < M; ++m) columns(std::integral_constant<int, 1>{}, m);
  });
}

// out[m, n, :] = start[m, n, :] + sum_k a[m, k, :] b[k, n, :]; start.data may be null, or out's own.
template <typename T>
void lane_gemm(int64_t d, int64_t M, int64_t N, int64_t K, LaneMatrix<const T> a, LaneMatrix<const T> b,
               LaneMatrix<T> out, LaneMatrix<const T> start, Networks sum = {}) {
  lane_gemm_columns<T>(
      d, M, N, K, a, b.row_stride * d, out.row_stride * d, start.row_stride * d,
      [&](int64_t n) { return b.data + n * b.column_stride * d; },
      [&](int64_t n) { return out.data + n * out.column_stride * d; },
      [&](int64_t n) { return start.data ? start.data + n * start.column_stride * d : nullptr; }, sum);
}

// With `sum`, the products of all its networks are added up.
template <typename T>
void lane_gemm(int64_t d, int64_t M, int64_t N, int64_t K, LaneMatrix<const T> a, LaneMatrix<const T> b,
               LaneMatrix<T> out, bool accumulate, Networks sum = {}) {
  const T* start = accumulate ? out.data : nullptr;
  lane_gemm<T>(d, M, N, K, a, b, out, LaneMatrix<const T>{start, out.row_stride, out.column_stride}, sum);
}

// The same `a` for `networks` networks, each with b and out of its own, this many numbers after those of the one
// before: the columns of all of them meet a row of `a` while it is at hand.
template <typename T>
void lane_gemm_each(int64_t networks, int64_t b_stride, int64_t out_stride, int64_t d, int64_t M, int64_t N, int64_t K,
                    LaneMatrix<const T> a, LaneMatrix<const T> b, LaneMatrix<T> out, bool accumulate) {
  const auto at = [&](int64_t n, int64_t stride, int64_t column_stride) {
    const uint32_t net = static_cast<uint32_t>(n) / static_cast<uint32_t>(N);
    return net * stride + (n - net * N) * column_stride * d;
  };
  const auto to = [&](int64_t n) { return out.data + at(n, out_stride, out.column_stride); };
  lane_gemm_columns<T>(
      d, M, networks * N, K, a, b.row_stride * d, out.row_stride * d, out.row_stride * d,
      [&](int64_t n) { return b.data + at(n, b_stride, b.column_stride); }, to,
      [&](int64_t n) { return accumulate ? to(n) : nullptr; }, Networks{});
}

}  // namespace MAGEP_ISA
}  // namespace magep
