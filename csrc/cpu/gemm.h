// The matrix products: gemm, C[m, n] (+)= sum_k A[m, k] B[k, n], A of any strides, rows of B and C contiguous, and
// gemm_dot, C[m, n] (+)= sum_k A[m, k] B[n, k], rows of all three contiguous.
#pragma once

#include <algorithm>
#include <utility>

#include "lanes.h"

namespace magep {
namespace MAGEP_ISA {

// A block of MR rows and up to two vectors of C stays in registers. AVX-512 has 32 registers, the others 16.
#if defined(__AVX512F__)
constexpr int kMaxRows = 12;
#else
constexpr int kMaxRows = 6;
#endif
constexpr int64_t kInnerBlock = 128;  // rows of B per pass: their pages fit the first-level TLB, their tiles the cache

template <typename T>
struct Operand {
  const T* data;
  int64_t row_stride, column_stride;
};

// MR rows and NV vectors of C, the last of which has `tail` lanes. B is fetched `ahead` numbers before it is used.
// A's strides come one by one: of a struct on the stack, two numbers stored singly were loaded as one vector, which
// cannot be forwarded and waits until all results before are written.
template <typename T, int MR, int NV, typename Tail>
inline void micro_kernel(int64_t K, const T* a, int64_t a_row, int64_t a_column, const T* b, int64_t ldb, int64_t ahead,
                         T* c, int64_t ldc, bool accumulate, Tail tail) {
  using S = Simd<T>;
  using Vec = typename S::Vec;
  Vec sum[MR][NV];
  if (accumulate) {
#pragma GCC unroll 16
    for (int m = 0; m < MR; ++m) {
#pragma GCC unroll 4
      for (int v = 0; v < NV - 1; ++v) sum[m][v] = S::load(c + m * ldc + v * S::kWidth);
      sum[m][NV - 1] = load_lanes(c + m * ldc + (NV - 1) * S::kWidth, tail);
    }
  } else {
#pragma GCC unroll 16
    for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) sum[m][v] = Vec{};
  }
  for (int64_t k = 0; k < K; ++k) {
    Vec right[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) __builtin_prefetch(b + v * S::kWidth + ahead);
#pragma GCC unroll 4
    for (int v = 0; v < NV - 1; ++v) right[v] = S::load(b + v * S::kWidth);
    right[NV - 1] = load_lanes(b + (NV - 1) * S::kWidth, tail);
#pragma GCC unroll 16
    for (int m = 0; m < MR; ++m) {
      const Vec left = S::broadcast(a[m * a_row]);
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) sum[m][v] += left * right[v];
    }
    a += a_column;
    b += ldb;
  }
#pragma GCC unroll 16
  for (int m = 0; m < MR; ++m) {
#pragma GCC unroll 4
    for (int v = 0; v < NV - 1; ++v) S::store(c + m * ldc + v * S::kWidth, sum[m][v]);
    store_lanes(c + m * ldc + (NV - 1) * S::kWidth, sum[m][NV - 1], tail);
  }
}

// MR rows of C.
template <typename T, int MR>
void row_panel(int64_t N, int64_t K, const T* a, int64_t a_row, int64_t a_column, const T* b, int64_t ldb,
               int64_t ahead, T* c, int64_t ldc, bool accumulate) {
  constexpr int W = Simd<T>::kWidth;
  constexpr std::integral_constant<int, W> whole;
  int64_t n = 0;
  for (; n + 2 * W <= N; n += 2 * W)
    micro_kernel<T, MR, 2>(K, a, a_row, a_column, b + n, ldb, ahead, c + n, ldc, accumulate, whole);
  const int left = static_cast<int>(N - n);
  if (left > W)
    micro_kernel<T, MR, 2>(K, a, a_row, a_column, b + n, ldb, ahead, c + n, ldc, accumulate, left - W);
  else if (left == W)
    micro_kernel<T, MR, 1>(K, a, a_row, a_column, b + n, ldb, ahead, c + n, ldc, accumulate, whole);
  else if (left > 0)
    micro_kernel<T, MR, 1>(K, a, a_row, a_column, b + n, ldb, ahead, c + n, ldc, accumulate, left);
}

template <typename T>
inline void row_panel(int rows, int64_t N, int64_t K, const T* a, int64_t a_row, int64_t a_column, const T* b,
                      int64_t ldb, int64_t ahead, T* c, int64_t ldc, bool accumulate) {
#define MAGEP_ROWS(MR) \
  case MR: return row_panel<T, MR>(N, K, a, a_row, a_column, b, ldb, ahead, c, ldc, accumulate);
  switch (rows) {
    MAGEP_ROWS(1)
    MAGEP_ROWS(2)
    MAGEP_ROWS(3)
    MAGEP_ROWS(4)
    MAGEP_ROWS(5)
    MAGEP_ROWS(6)
#if defined(__AVX512F__)
    MAGEP_ROWS(7)
    MAGEP_ROWS(8)
    MAGEP_ROWS(9)
    MAGEP_ROWS(10)
    MAGEP_ROWS(11)
    MAGEP_ROWS(12)
#endif
  }
#undef MAGEP_ROWS
}

// Rows of A in blocks of nearly equal height: 20 rows are 5 + 5 + 5 + 5, not 6 + 6 + 6 + 2.
struct RowBlocks {
  int64_t count, height, higher;  // the first `higher` blocks have one row more
  explicit RowBlocks(int64_t rows) : count((rows + kMaxRows - 1) / kMaxRows) {
    const uint32_t blocks = static_cast<uint32_t>(std::max<int64_t>(count, 1)), all = static_cast<uint32_t>(rows);
    height = all / blocks;
    higher = all % blocks;
  }
  int64_t begin(int64_t r) const { return r * height + std::min(r, higher); }
  int size(int64_t r) const { return static_cast<int>(height + (r < higher)); }
};

// A transposed A (row_stride 1) is read with strides: keep K at 64 or less there, or its rows may share few cache sets.
template <typename T>
void gemm(int64_t M, int64_t N, int64_t K, Operand<T> a, const T* b, int64_t ldb, T* c, int64_t ldc, bool accumulate,
          int64_t ahead = 0) {
  const RowBlocks blocks(M);
  int64_t k = 0;
  do {  // once for K = 0 too: C is then cleared
    const int64_t inner = std::min(K - k, kInnerBlock);
    // A B that stays in the first-level cache is swept once per block of rows, so that C is written in order; a larger
    // one is taken column tile by column tile, each meeting all of A.
    const int64_t size = inner * N * static_cast<int64_t>(sizeof(T)) <= (16 << 10) ? N : 2 * Simd<T>::kWidth;
    for (int64_t n = 0; n < N; n += size)
      for (int64_t r = 0; r < blocks.count; ++r) {
        const int64_t m = blocks.begin(r);
        row_panel<T>(blocks.size(r), std::min(size, N - n), inner, a.data + m * a.row_stride + k * a.column_stride,
                     a.row_stride, a.column_stride, b + k * ldb + n, ldb, ahead, c + m * ldc + n, ldc,
                     accumulate || k > 0);
      }
    k += inner;
  } while (k < K);
}

// [a's sums of pairs | b's], where a and b consist of kWidth / group groups: within each group the first half is added
// to the second.
template <typename T, int group, int... k>
inline typename Simd<T>::Vec fold(typename Simd<T>::Vec a, typename Simd<T>::Vec b, std::integer_sequence<int, k...>) {
  constexpr int half = group / 2;
#if defined(__clang__)
  return __builtin_shufflevector(a, b, (k / half * group + k % half)...) +
         __builtin_shufflevector(a, b, (k / half * group + half + k % half)...);
#else
  typedef std::conditional_t<sizeof(T) == 4, int32_t, int64_t> Index __attribute__((vector_size(kVectorBytes)));
  return __builtin_shuffle(a, b, Index{(k / half * group + k % half)...}) +
         __builtin_shuffle(a, b, Index{(k / half * group + half + k % half)...});
#endif
}

// The sums of kWidth vectors, as one vector in the same order.
template <typename T, int group = Simd<T>::kWidth>
inline typename Simd<T>::Vec sums(typename Simd<T>::Vec* v) {
  if constexpr (group == 1) {
    return v[0];
  } else {
#pragma GCC unroll 16
    for (int k = 0; k < group / 2; ++k)
      v[k] = fold<T, group>(v[2 * k], v[2 * k + 1], std::make_integer_sequence<int, Simd<T>::kWidth>{});
    return sums<T, group / 2>(v);
  }
}

// Blocks of MR x NR results, as many as a vector has lanes, each summed in a vector of its own along k.
template <int MR, typename T>
void gemm_dot_blocks(int64_t M, int64_t N, int64_t K, const T* a, int64_t lda, const T* b, int64_t ldb, T* c,
                     int64_t ldc, bool accumulate, int64_t ahead) {
  using Lanes = Simd<T>;
  constexpr int W = Lanes::kWidth, NR = W / MR;
  const int64_t whole = K / W * W;
  for (int64_t n = 0; n < N; n += NR)
    for (int64_t m = 0; m < M; m += MR) {
      const T *left[MR], *right[NR];  // rows beyond the last one repeat it
#pragma GCC unroll 16
      for (int i = 0; i < MR; ++i) left[i] = a + std::min(m + i, M - 1) * lda;
#pragma GCC unroll 16
      for (int j = 0; j < NR; ++j) right[j] = b + std::min(n + j, N - 1) * ldb;
      typename Lanes::Vec sum[W] = {};
      const auto step = [&](auto&& load) {
        typename Lanes::Vec x[NR];
#pragma GCC unroll 16
        for (int j = 0; j < NR; ++j) x[j] = load(right[j]);
#pragma GCC unroll 16
        for (int i = 0; i < MR; ++i) {
          const auto y = load(left[i]);
#pragma GCC unroll 16
          for (int j = 0; j < NR; ++j) sum[i * NR + j] += y * x[j];
        }
      };
      for (int64_t k = 0; k < whole; k += W) {
        if (m == 0)
#pragma GCC unroll 16
          for (int j = 0; j < NR; ++j) __builtin_prefetch(right[j] + k + ahead);
        step([k](const T* row) { return Lanes::load(row + k); });
      }
      if (whole < K) step([&](const T* row) { return Lanes::load_first(row + whole, static_cast<int>(K - whole)); });
      T results[W];
      Lanes::store(results, sums<T>(sum));
      const int64_t rows = std::min<int64_t>(MR, M - m), columns = std::min<int64_t>(NR, N - n);
      for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < columns; ++j) {
          T& to = c[(m + i) * ldc + n + j];
          to = accumulate ? to + results[i * NR + j] : results[i * NR + j];
        }
    }
}

// For long rows, where neither operand is transposed yet. B, which may be large, is read once.
template <typename T>
void gemm_dot(int64_t M, int64_t N, int64_t K, const T* a, int64_t lda, const T* b, int64_t ldb, T* c, int64_t ldc,
              bool accumulate, int64_t ahead = 0) {
  constexpr int W = Simd<T>::kWidth;
  if (N == 1)
    gemm_dot_blocks<W>(M, N, K, a, lda, b, ldb, c, ldc, accumulate, ahead);
  else if (M == 1)
    gemm_dot_blocks<1>(M, N, K, a, lda, b, ldb, c, ldc, accumulate, ahead);
  else
    gemm_dot_blocks<W >= 8 ? 4 : 2>(M, N, K, a, lda, b, ldb, c, ldc, accumulate, ahead);
}

// to[c, r] = from[r, c] for up to kSquare rows and columns; memory beyond them is neither read nor written.
#if defined(__AVX512F__)
constexpr int64_t kSquare = 16;
__attribute__((always_inline)) inline void transpose_registers(__m512* r) {  // called, it would go through memory
  __m512 s[16];
#pragma GCC unroll 16
  for (int k = 0; k < 16; k += 2) {
    s[k] = _mm512_unpacklo_ps(r[k], r[k + 1]);
    s[k + 1] = _mm512_unpackhi_ps(r[k], r[k + 1]);
  }
#pragma GCC unroll 16
  for (int k = 0; k < 16; k += 4) {
    r[k] = _mm512_shuffle_ps(s[k], s[k + 2], 0x44);
    r[k + 1] = _mm512_shuffle_ps(s[k], s[k + 2], 0xee);
    r[k + 2] = _mm512_shuffle_ps(s[k + 1], s[k + 3], 0x44);
    r[k + 3] = _mm512_shuffle_ps(s[k + 1], s[k + 3], 0xee);
  }
  // r[4 g + c]: columns c, 4 + c, 8 + c, 12 + c of rows 4 g ... 4 g + 3
#pragma GCC unroll 16
  for (int c = 0; c < 4; ++c) {
    s[c] = _mm512_shuffle_f32x4(r[c], r[4 + c], 0x88);
    s[4 + c] = _mm512_shuffle_f32x4(r[c], r[4 + c], 0xdd);
    s[8 + c] = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0x88);
    s[12 + c] = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0xdd);
  }
#pragma GCC unroll 16
  for (int c = 0; c < 4; ++c) {
    r[c] = _mm512_shuffle_f32x4(s[c], s[8 + c], 0x88);
    r[4 + c] = _mm512_shuffle_f32x4(s[4 + c], s[12 + c], 0x88);
    r[8 + c] = _mm512_shuffle_f32x4(s[c], s[8 + c], 0xdd);
    r[12 + c] = _mm512_shuffle_f32x4(s[4 + c], s[12 + c], 0xdd);
  }
}
// `whole`: 16 rows and columns, known when compiled. Nothing that is read soon should be stored under a mask: a load
// cannot take it from the store but waits for the cache.
template <bool whole>
inline void transpose_vectors(int rows, int columns, const float* from, int64_t ld_from, float* to, int64_t ld_to) {
  __m512 r[16];
  const __mmask16 row = static_cast<__mmask16>((1u << columns) - 1), column = static_cast<__mmask16>((1u << rows) - 1);
#pragma GCC unroll 16
  for (int k = 0; k < 16; ++k)
    r[k] = whole      ? _mm512_loadu_ps(from + k * ld_from)
           : k < rows ? _mm512_maskz_loadu_ps(row, from + k * ld_from)
                      : _mm512_setzero_ps();
  transpose_registers(r);
#pragma GCC unroll 16
  for (int k = 0; k < 16; ++k)
    if (whole)
      _mm512_storeu_ps(to + k * ld_to, r[k]);
    else if (k < columns)
      _mm512_mask_storeu_ps(to + k * ld_to, column, r[k]);
}
inline void transpose_square(int rows, int columns, const float* from, int64_t ld_from, float* to, int64_t ld_to) {
  if (rows == 16 && columns == 16)
    transpose_vectors<true>(rows, columns, from, ld_from, to, ld_to);
  else
    transpose_vectors<false>(rows, columns, from, ld_from, to, ld_to);
}
#else
constexpr int64_t kSquare = 8;
#if defined(__AVX2__)
// Whole squares only: masked stores are slow on some processors of this level.
inline void transpose_whole(const float* from, int64_t ld_from, float* to, int64_t ld_to) {
  __m256 r[8], s[8];
  for (int k = 0; k < 8; ++k) r[k] = _mm256_loadu_ps(from + k * ld_from);
  for (int k = 0; k < 8; k += 2) {
    s[k] = _mm256_unpacklo_ps(r[k], r[k + 1]);
    s[k + 1] = _mm256_unpackhi_ps(r[k], r[k + 1]);
  }
  for (int k = 0; k < 8; k += 4) {
    r[k] = _mm256_shuffle_ps(s[k], s[k + 2], 0x44);
    r[k + 1] = _mm256_shuffle_ps(s[k], s[k + 2], 0xee);
    r[k + 2] = _mm256_shuffle_ps(s[k + 1], s[k + 3], 0x44);
    r[k + 3] = _mm256_shuffle_ps(s[k + 1], s[k + 3], 0xee);
  }
  for (int k = 0; k < 4; ++k) {
    _mm256_storeu_ps(to + k * ld_to, _mm256_permute2f128_ps(r[k], r[k + 4], 0x20));
    _mm256_storeu_ps(to + (k + 4) * ld_to, _mm256_permute2f128_ps(r[k], r[k + 4], 0x31));
  }
}
#endif
#endif
template <typename T>
inline void transpose_square(int rows, int columns, const T* from, int64_t ld_from, T* to, int64_t ld_to) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  if constexpr (sizeof(T) == 4)
    if (rows == kSquare && columns == kSquare) return transpose_whole(from, ld_from, to, ld_to);
#endif
  for (int c = 0; c < columns; ++c)
    for (int r = 0; r < rows; ++r) to[c * ld_to + r] = from[r * ld_from + c];
}

// to[c, r] = from[r, c]
template <typename T>
void transpose(int64_t rows, int64_t columns, const T* from, int64_t ld_from, T* to, int64_t ld_to, int64_t ahead = 0) {
  for (int64_t r = 0; r < rows; r += kSquare)
    for (int64_t c = 0; c < columns; c += kSquare) {
      if (ahead)
        for (int64_t k = r; k < std::min(rows, r + kSquare); ++k) __builtin_prefetch(from + k * ld_from + c + ahead);
      transpose_square(static_cast<int>(std::min(kSquare, rows - r)), static_cast<int>(std::min(kSquare, columns - c)),
                       from + r * ld_from + c, ld_from, to + c * ld_to + r, ld_to);
    }
}

// The columns of a matrix of at most kWidth rows and columns as vectors; lanes beyond `rows` are zero. Sizes are
// numbers or constants.
template <typename T, typename Rows, typename Columns>
inline void load_columns(Rows rows, Columns columns, const T* from, int64_t ld, typename Simd<T>::Vec* to) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) {
#pragma GCC unroll 16
    for (int k = 0; k < 16; ++k) to[k] = k < rows ? load_lanes(from + k * ld, columns) : typename Simd<T>::Vec{};
    transpose_registers(reinterpret_cast<__m512*>(to));
    return;
  }
#endif
  for (int c = 0; c < columns; ++c) {
    typename Simd<T>::Vec column{};
    for (int r = 0; r < rows; ++r) column[r] = from[r * ld + c];
    to[c] = column;
  }
}

constexpr int64_t kTransposedBlock = 4096;  // numbers of B that gemm_transposed takes at once

// C[m, n] (+)= sum_k A[m, k] B[n, k], rows of all three contiguous, by gemm_dot or by transposing B and gemm, whichever
// takes fewer cycles: a block of gemm_dot adds up the lanes of its sums, gemm pays for the empty lanes of a vector.
// `space` holds kTransposedBlock numbers.
template <typename T>
void gemm_transposed(int64_t M, int64_t N, int64_t K, const T* a, int64_t lda, const T* b, int64_t ldb, T* c,
                     int64_t ldc, bool accumulate, T* space, int64_t ahead = 0) {
  constexpr int64_t W = Simd<T>::kWidth;
  const int64_t by_dot = (M + 3) / 4 * ((4 * N + W - 1) / W) * (K + 3 * W);
  const int64_t by_gemm = M * ((N + W - 1) / W) * K + 13 * N * K / (2 * W) + 40;
  if (K > kTransposedBlock / kSquare || by_dot < by_gemm)
    return gemm_dot<T>(M, N, K, a, lda, b, ldb, c, ldc, accumulate, ahead);
  const int64_t size = kTransposedBlock / K / kSquare * kSquare;
  for (int64_t n = 0; n < N; n += size) {
    const int64_t columns = std::min(size, N - n);
    transpose<T>(columns, K, b + n * ldb, ldb, space, columns, ahead);
    gemm<T>(M, columns, K, {a, lda, 1}, space, columns, c + n, ldc, accumulate);
  }
}

// The reverse of `outer`, out[r, :] = left[r] right[:]:
// left_bar[r] += sum_k bar[r, k] right[k], right_bar[k] += sum_r left[r] bar[r, k].
template <typename T>
inline void outer_backward(int64_t rows, int64_t n, const T* left, const T* right, const T* bar, T* left_bar,
                           T* right_bar) {
  constexpr int W = Simd<T>::kWidth;
  if (n != W) {
    gemm_dot<T>(1, rows, n, right, n, bar, n, left_bar, rows, true);
    gemm<T>(1, n, rows, {left, 0, 1}, bar, n, right_bar, n, true);
    return;
  }
  using Vec = typename Simd<T>::Vec;
  const Vec factor = Simd<T>::load(right);
  Vec even = Simd<T>::load(right_bar), odd{};
  int64_t first = 0;
  for (; first + W <= rows; first += W) {
    Vec products[W];
#pragma GCC unroll 16
    for (int r = 0; r < W; r += 2) {
      const Vec row = Simd<T>::load(bar + (first + r) * W), next = Simd<T>::load(bar + (first + r + 1) * W);
      products[r] = row * factor;
      products[r + 1] = next * factor;
      even += Simd<T>::broadcast(left[first + r]) * row;
      odd += Simd<T>::broadcast(left[first + r + 1]) * next;
    }
    Simd<T>::store(left_bar + first, Simd<T>::load(left_bar + first) + sums<T>(products));
  }
  Simd<T>::store(right_bar, even + odd);
  if (first < rows) {
    gemm_dot<T>(1, rows - first, n, right, n, bar + first * W, n, left_bar + first, rows - first, true);
    gemm<T>(1, n, rows - first, {left + first, 0, 1}, bar + first * W, n, right_bar, n, true);
  }
}

}  // namespace MAGEP_ISA
}  // namespace magep
