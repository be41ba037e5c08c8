// The chains, and their reverse, of networks whose hidden and last layers are at most a vector wide: each row of a
// matrix is one register, and nothing is left of the loops and calls that larger products need.
#pragma once

#include "gemm.h"
#include "network.h"

namespace magep {
namespace MAGEP_ISA {

// Whether there is a hidden layer, and rows of every layer but the input fit a vector.
template <typename T>
inline bool is_narrow(const Shape& s) {
  return s.L() > 1 && *std::max_element(s.n.begin() + 1, s.n.end()) <= Simd<T>::kWidth;
}
// Whether hidden layers fill it, so that their widths are known when compiled.
template <typename T>
inline bool has_whole_vectors(const Shape& s) {
  return std::all_of(s.n.begin() + 1, s.n.end() - 1, [](int64_t n) { return n == Simd<T>::kWidth; });
}

// Nine to twelve rows at once where there are registers for it, else 8 at a time, then 4, 2 and 1:
// body(number of rows as a constant, first row).
template <typename Body>
inline void for_row_blocks(int64_t rows, Body&& body) {
#if defined(__AVX512F__)
  switch (rows) {
    case 9: return body(std::integral_constant<int, 9>{}, 0);
    case 10: return body(std::integral_constant<int, 10>{}, 0);
    case 11: return body(std::integral_constant<int, 11>{}, 0);
    case 12: return body(std::integral_constant<int, 12>{}, 0);
  }
#endif
  int64_t r = 0;
  for (; r + 8 <= rows; r += 8) body(std::integral_constant<int, 8>{}, r);
  if (rows & 4) body(std::integral_constant<int, 4>{}, r), r += 4;
  if (rows & 2) body(std::integral_constant<int, 2>{}, r), r += 2;
  if (rows & 1) body(std::integral_constant<int, 1>{}, r);
}
// Four at a time, for products with a matrix in registers.
template <typename Body>
inline void for_few_rows(int64_t rows, Body&& body) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) body(std::integral_constant<int, 4>{}, r);
  if (rows & 2) body(std::integral_constant<int, 2>{}, r), r += 2;
  if (rows & 1) body(std::integral_constant<int, 1>{}, r);
}

// sums[r] += sum_k a[r * a_row + k * a_column] b[k], rows of b being ldb numbers apart. Sizes are numbers or constants.
template <typename T, int R, typename Inner, typename Row, typename Column, typename Lanes>
inline void add_products(typename Simd<T>::Vec (&sums)[R], Inner inner, const T* a, Row a_row, Column a_column,
                         const T* b, int64_t ldb, Lanes lanes) {
  const int64_t count = inner;
  for (int64_t k = 0; k < count; ++k) {
    const auto right = load_lanes(b + k * ldb, lanes);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) sums[r] += Simd<T>::broadcast(a[r * a_row + k * a_column]) * right;
  }
}

// The same with the rows of b in registers, even and odd ones summed apart: few sums would wait for one another.
template <typename T, int R, typename Inner>
inline void add_products(typename Simd<T>::Vec (&sums)[R], Inner inner, const T* a, int64_t a_row,
                         const typename Simd<T>::Vec* b) {
  const int count = inner;
  typename Simd<T>::Vec odd[R] = {};
#pragma GCC unroll 8
  for (int k = 0; k + 1 < count; k += 2)
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      sums[r] += Simd<T>::broadcast(a[r * a_row + k]) * b[k];
      odd[r] += Simd<T>::broadcast(a[r * a_row + k + 1]) * b[k + 1];
    }
  if (count % 2)
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) sums[r] += Simd<T>::broadcast(a[r * a_row + count - 1]) * b[count - 1];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) sums[r] += odd[r];
}

// One network and channel. Rows that are broadcast soon lie W numbers apart in scratch memory, stored as whole vectors.
template <typename S, typename T, bool whole>
struct NarrowChain {
  using Lanes = Simd<T>;
  using Vec = typename Lanes::Vec;
  static constexpr int W = Lanes::kWidth;
  static constexpr std::integral_constant<int, W> kRow{};
  static constexpr std::integral_constant<int, 1> kOne{};

  const Network<S, T>& x;
  int64_t net, channel;
  T* space;  // for a matrix in the type of computation

  static int64_t scratch_size(const Shape& s) { return (2 * s.columns(s.L()) + (s.L() - 1) * s.n_L()) * W + 64; }

  int64_t L() const { return x.s.L(); }
  auto hidden(int64_t i) const {
    if constexpr (whole)
      return std::integral_constant<int, W>{};
    else
      return static_cast<int>(x.s.n[i]);
  }
  const T* weight(int64_t i) const { return weight_as(x, i, net, channel, space); }
  template <typename Pointer>
  Pointer part(Pointer first, const Section& section) const {
    return first + section.offset + channel * section.channel_stride;
  }

  // A row of what is kept. The one that belongs to the channel after next is fetched: where another core has read it, a
  // store would wait.
  template <typename Width>
  static inline void keep(T* to, Vec row, Width n) {
    store_lanes(to, row, n);
    __builtin_prefetch(to + 2 * n, 1);
  }

  // The prefix of a layer waits for that of the layer before, the suffixes do not: they take turns.
  void forward(bool suffix, T* saved, Scratch<T> scratch) const {
    const Shape& s = x.s;
    T *A = scratch.take(s.columns(L()) * W), *next = scratch.take(s.columns(L()) * W);
    T* suffixes = scratch.take((L() - 1) * s.n_L() * W);  // [t - 1][p][W]
    first_prefix(A, saved);
    if (suffix) last_suffix(suffixes, saved);
    for (int64_t i = 2; i <= L(); ++i) {
      if (i < L())
        prefix(i, hidden(i), A, next, saved);
      else
        prefix(i, static_cast<int>(s.n_L()), A, next, saved);
      std::swap(A, next);
      if (suffix && i < L()) suffix_of(L() - i, suffixes, saved);
    }
    if (suffix)
      for (int64_t i = 2; i <= L(); ++i) connect_right(i, suffixes, saved);
    const int64_t n_0 = s.n_0();
    T* PL = saved + x.at.PL + channel;
    for (int64_t p = 0; p < s.n_L(); ++p)
      for (int64_t q = 0; q < n_0; ++q) PL[(p * n_0 + q) * s.d] = A[q * W + p];
  }

  void first_prefix(T* to, T* saved) const {
    const int64_t n_0 = x.s.n_0();
    const Section& a = x.at.A[1];
    const S* w = x.weight(1, net, channel);
    const auto n = hidden(1);
    for (int64_t q = 0; q < n_0; ++q) {
      for (int j = 0; j < n; ++j) to[q * W + j] = load_one<S, T>(w[j * n_0 + q]);
      keep(part(saved, a) + q * a.row_stride, Lanes::load(to + q * W), n);
    }
    keep_bias(1, n, to, saved);
  }
  template <typename Width>
  void keep_bias(int64_t i, Width n, T* to, T* saved) const {
    const Section& a = x.at.A[i];
    const int64_t row = a.rows - 1;
    load_row(x.bias(i, net, channel), n, to + row * W);
    keep(part(saved, a) + row * a.row_stride, Lanes::load(to + row * W), n);
  }

  // A_i = W_i [A_(i-1) | b_(i-1)], written twice: for the next product, and to what is kept.
  template <typename Width>
  void prefix(int64_t i, Width n, const T* from, T* to, T* saved) const {
    const Section& a = x.at.A[i];
    T* kept = part(saved, a);
    const auto m = hidden(i - 1);
    Vec right[W];
    load_columns<T>(n, m, weight(i), m, right);
    for_few_rows(a.rows - 1, [&](auto R, int64_t c) {
      Vec sums[decltype(R)::value] = {};
      add_products<T>(sums, m, from + c * W, W, right);
      for (int r = 0; r < R; ++r) {
        Lanes::store(to + (c + r) * W, sums[r]);
        keep(kept + (c + r) * a.row_stride, sums[r], n);
      }
    });
    keep_bias(i, n, to, saved);
  }

  // S_(L-1) = W_L
  void last_suffix(T* suffixes, T* saved) const {
    const Section& S_t = x.at.S[L() - 1];
    T *to = suffixes + (L() - 2) * x.s.n_L() * W, *kept = part(saved, S_t);
    const auto n = hidden(L() - 1);
    const T* w = weight(L());
    for (int64_t p = 0; p < x.s.n_L(); ++p) {
      const Vec row = load_lanes(w + p * n, n);
      Lanes::store(to + p * W, row);
      keep(kept + p * S_t.row_stride, row, n);
    }
  }

  // S_t = S_(t+1) W_(t+1)
  void suffix_of(int64_t t, T* suffixes, T* saved) const {
    const Section& S_t = x.at.S[t];
    const int64_t n_L = x.s.n_L();
    T *to = suffixes + (t - 1) * n_L * W, *from = to + n_L * W, *kept = part(saved, S_t);
    const auto n = hidden(t);
    const T* w = weight(t + 1);
    for_row_blocks(n_L, [&](auto R, int64_t p) {
      Vec sums[decltype(R)::value] = {};
      add_products<T>(sums, hidden(t + 1), from + p * W, kRow, kOne, w, n, n);
      for (int r = 0; r < R; ++r) {
        Lanes::store(to + (p + r) * W, sums[r]);
        keep(kept + (p + r) * S_t.row_stride, sums[r], n);
      }
    });
  }

  // R_i = [Psi; psi] S_(i-1), or only its last row
  void connect_right(int64_t i, const T* suffixes, T* saved) const {
    const Section& right = x.at.R[i];
    if (right.rows == 0) return;
    const int64_t n_L = x.s.n_L(), d = x.s.d, skip = x.s.n_0() + 1 - right.rows;
    const T* connection = x.connection(x.s.pair_to_neighbour(i)) + skip * n_L * d + channel;
    for_row_blocks(right.rows, [&](auto R, int64_t q) {
      Vec sums[decltype(R)::value] = {};
      add_products<T>(sums, n_L, connection + q * n_L * d, n_L * d, d, suffixes + (i - 2) * n_L * W, W, kRow);
      for (int r = 0; r < R; ++r) keep(part(saved, right) + (q + r) * right.row_stride, sums[r], hidden(i - 1));
    });
  }

  // As chain_backward; gradients are added to, or with `write` written.
  void backward(bool suffix, const T* saved, const T* grad, T* psi_bar, S* const* W_bar, S* const* b_bar, bool write,
                Scratch<T> scratch) const {
    const Shape& s = x.s;
    const int64_t n_0 = s.n_0(), n_L = s.n_L(), d = s.d;
    T* S_bar = suffix ? scratch.take((L() - 1) * n_L * W) : nullptr;  // [t - 1][p][W]
    if (suffix) suffixes_backward(saved, grad, S_bar, psi_bar);

    T *A_bar = scratch.take(s.columns(L()) * W), *before_bar = scratch.take(s.columns(L()) * W);
    const Section& last = x.at.A[L()];
    for (int64_t c = 0; c < last.rows; ++c)
      Lanes::store(A_bar + c * W, load_lanes(part(grad, last) + c * last.row_stride, static_cast<int>(n_L)));
    for (int64_t p = 0; p < n_L; ++p)
      for (int64_t q = 0; q < n_0; ++q) A_bar[q * W + p] += grad[x.at.PL + (p * n_0 + q) * d + channel];

    for (int64_t i = L(); i >= 1; --i) {
      const int64_t c = s.columns(i) - 1, n = s.n[i];
      store_row(A_bar + c * W, n, b_bar[i - 1] + (net * d + channel) * n);
      S* out = W_bar[i - 1] + (net * d + channel) * n * s.n[i - 1];
      if (i == 1) {
        for (int64_t j = 0; j < n; ++j)
          for (int64_t q = 0; q < n_0; ++q) store_one(A_bar[q * W + j], out[j * n_0 + q]);
        return;
      }
      const Section& before = x.at.A[i - 1];
      const auto m = hidden(i - 1);
      const T* w = weight(i);
      for_row_blocks(c, [&](auto R, int64_t row) {
        Vec sums[decltype(R)::value] = {};
        if (suffix)
          for (int r = 0; r < R; ++r) sums[r] = load_lanes(part(grad, before) + (row + r) * before.row_stride, m);
        add_products<T>(sums, n, A_bar + row * W, kRow, kOne, w, m, m);
        for (int r = 0; r < R; ++r) Lanes::store(before_bar + (row + r) * W, sums[r]);
      });
      // W_bar_i += A_bar_i [A_(i-1) | b_(i-1)]^T + S_i^T S_bar_(i-1), and S_bar_(L-1) itself for i = L.
      T* sum;
      if constexpr (std::is_same_v<S, T>) {
        sum = out;
      } else {
        sum = space;
        if (!write) load_row(out, n * m, sum);
      }
      const T* own_S_bar = suffix ? S_bar + (i - 2) * n_L * W : nullptr;
      for_row_blocks(n, [&](auto R, int64_t j) {
        Vec sums[decltype(R)::value] = {};
        if (suffix && i == L())
          for (int r = 0; r < R; ++r) sums[r] = Lanes::load(own_S_bar + (j + r) * W);
        else if (!write)
          for (int r = 0; r < R; ++r) sums[r] = load_lanes(sum + (j + r) * m, m);
        add_products<T>(sums, c, A_bar + j, kOne, kRow, part(saved, before), before.row_stride, m);
        if (suffix && i < L()) {
          const Section& S_i = x.at.S[i];
          add_products<T>(sums, n_L, part(saved, S_i) + j, kOne, S_i.row_stride, own_S_bar, W, kRow);
        }
        for (int r = 0; r < R; ++r) store_lanes(sum + (j + r) * m, sums[r], m);
      });
      if constexpr (!std::is_same_v<S, T>) store_row(sum, n * m, out);
      std::swap(A_bar, before_bar);
    }
  }

  // S_bar_t = what others left in grad + [Psi; psi]^T R_bar + S_bar_(t-1) W_t^T;  [Psi; psi]_bar += R_bar S_t^T
  void suffixes_backward(const T* saved, const T* grad, T* S_bar, T* psi_bar) const {
    const Shape& s = x.s;
    const int64_t n_L = s.n_L(), d = s.d;
    for (int64_t t = 1; t < L(); ++t) {
      const Section &S_t = x.at.S[t], &R_t = x.at.R[t + 1];
      const auto n = hidden(t);
      const int64_t skip = s.n_0() + 1 - R_t.rows, pair = s.pair_to_neighbour(t + 1);
      const T *R_bar = part(grad, R_t), *own = part(grad, S_t);
      T* to = S_bar + (t - 1) * n_L * W;
      Vec right[W];
      if (t > 1) load_columns<T>(n, hidden(t - 1), weight(t), s.n[t - 1], right);
      for_few_rows(n_L, [&](auto R, int64_t p) {
        Vec sums[decltype(R)::value];
        for (int r = 0; r < R; ++r) sums[r] = load_lanes(own + (p + r) * S_t.row_stride, n);
        if (R_t.rows > 0)
          add_products<T>(sums, R_t.rows, x.connection(pair) + (skip * n_L + p) * d + channel, d, n_L * d, R_bar,
                          R_t.row_stride, n);
        if (t > 1) add_products<T>(sums, hidden(t - 1), to + (p - n_L) * W, W, right);
        for (int r = 0; r < R; ++r) Lanes::store(to + (p + r) * W, sums[r]);
      });
      if (R_t.rows == 0) continue;
      load_columns<T>(static_cast<int>(n_L), n, part(saved, S_t), S_t.row_stride, right);
      for_few_rows(R_t.rows, [&](auto R, int64_t q) {
        Vec sums[decltype(R)::value] = {};
        add_products<T>(sums, n, R_bar + q * R_t.row_stride, R_t.row_stride, right);
        T dots[decltype(R)::value * W];
        for (int r = 0; r < R; ++r) Lanes::store(dots + r * W, sums[r]);
        T* pair_bar = psi_bar + (pair * (s.n_0() + 1) + q + skip) * n_L * d + channel;
        for (int r = 0; r < R; ++r)
          for (int64_t p = 0; p < n_L; ++p) pair_bar[(r * n_L + p) * d] += dots[r * W + p];
      });
    }
  }
};

// Calls body with the chain of one network and channel.
template <typename S, typename T, typename Body>
inline void with_narrow_chain(const Network<S, T>& x, int64_t net, int64_t channel, T* space, Body&& body) {
  if (has_whole_vectors<T>(x.s))
    body(NarrowChain<S, T, true>{x, net, channel, space});
  else
    body(NarrowChain<S, T, false>{x, net, channel, space});
}

}  // namespace MAGEP_ISA
}  // namespace magep
