// The invariants of a network, which the bias of the last layer and the invariant layer are linear maps of, in the
// order of the table of terms: P_L, [WW], [bW], [Wb], b_L, the two traces, 1. Channels are innermost throughout.
#pragma once

#include "activation.h"
#include "chain.h"

namespace magep {
namespace MAGEP_ISA {

struct Features {
  int64_t P = 0, WW, bW, Wb, b, WW_pp, bW_pp, one;
  explicit Features(const Shape& s) {
    const int64_t product = s.n_L() * s.n_0() * s.d;
    WW = product;
    bW = 2 * product;
    Wb = 3 * product;
    b = Wb + s.Wb_blocks(s.L()) * s.n_L() * s.d;
    WW_pp = b + s.n_L() * s.d;
    bW_pp = WW_pp + (s.L() - 1) * s.d;
    one = bW_pp + (s.L() - 1) * s.d;
  }
};

// G0_i = [Psi; psi]_(i,0) S_0
template <typename S, typename T>
void connect(const Network<S, T>& x, int64_t i, const T* saved, T* G0) {
  const Shape& s = x.s;
  lane_gemm<T>(s.d, s.n_0() + 1, s.n_0(), s.n_L(), {x.connection(s.pair_to_input(i)), s.n_L(), 1},
               {saved + x.at.PL, s.n_0(), 1}, {G0, s.n_0(), 1}, false);
}

template <typename S, typename T>
void connect_backward(const Network<S, T>& x, int64_t i, const T* saved, T* grad, T* psi_bar) {
  const Shape& s = x.s;
  const int64_t pair = s.pair_to_input(i);
  const T* G_bar = grad + x.at.G0[i];
  lane_gemm<T>(s.d, s.n_0() + 1, s.n_L(), s.n_0(), {G_bar, s.n_0(), 1}, {saved + x.at.PL, 1, s.n_0()},
               {psi_bar + pair * (s.n_0() + 1) * s.n_L() * s.d, s.n_L(), 1}, true);
  lane_gemm<T>(s.d, s.n_L(), s.n_0(), s.n_0() + 1, {x.connection(pair), 1, s.n_L()}, {G_bar, s.n_0(), 1},
               {grad + x.at.PL, s.n_0(), 1}, true);
}

// v_(L,1) ... v_(L,L-1) with channels innermost: the block Wb of the features, unless that is their sum.
template <typename S, typename T>
inline int64_t last_Wb(const Network<S, T>& x) {
  return x.s.Wb_blocks(x.s.L()) < x.s.L() - 1 ? x.at.vL : x.at.size + Features(x.s).Wb;
}

// The features of a network, which follow what the chains keep of it; needs A_L, P_L and G0_L.
template <typename S, typename T>
void features(const Network<S, T>& x, T* saved) {
  const Shape& s = x.s;
  const Features f(s);
  const int64_t L = s.L(), n_0 = s.n_0(), n_L = s.n_L(), d = s.d;
  const T *PL = saved + x.at.PL, *G = saved + x.at.G0[L];
  const Section& a = x.at.A[L];
  T *F = saved + x.at.size, *v = saved + last_Wb(x);
  std::memcpy(F + f.P, PL, n_L * n_0 * d * sizeof(T));
  lane_gemm<T>(d, n_L, n_0, n_0, {PL, n_0, 1}, {G, n_0, 1}, {F + f.WW, n_0, 1}, false);
  // Rows n_0 ... of A_L, [c][d][p], are v_(L,1) ... v_(L,L-1) and b_L.
  for (int64_t t = 0; t < L; ++t) {
    const T* row = saved + a.offset + (n_0 + t) * a.row_stride;
    transpose<T>(d, n_L, row, a.ld, t == L - 1 ? F + f.b : v + t * n_L * d, d);
  }
  if (v != F + f.Wb) {
    std::memcpy(F + f.Wb, v, n_L * d * sizeof(T));
    for (int64_t t = 1; t < L - 1; ++t) add(n_L * d, v + t * n_L * d, F + f.Wb);
  }
  const T* b = F + f.b;
  lane_gemm<T>(d, n_L, n_0, 1, {b, 1, 1}, {G + n_0 * n_0 * d, 1, 1}, {F + f.bW, n_0, 1}, false);
  for (int64_t t = 1; t < L; ++t) {
    const T* psi = x.connection(s.pair_of_trace(t));
    T *WW_pp = F + f.WW_pp + (t - 1) * d, *bW_pp = F + f.bW_pp + (t - 1) * d;
    std::fill(WW_pp, WW_pp + d, T(0));
    for (int64_t q = 0; q < n_0; ++q)
      for (int64_t p = 0; p < n_L; ++p) add_product(d, psi + (q * n_L + p) * d, PL + (p * n_0 + q) * d, WW_pp);
    lane_gemm<T>(d, 1, 1, n_L, {psi + n_0 * n_L * d, 1, 1}, {v + (t - 1) * n_L * d, 1, 1}, {bW_pp, 1, 1}, false);
  }
  F[f.one] = 1;
  std::fill(F + f.one + 1, saved + x.at.stride, T(0));  // so that equal calls leave equal memory
}

// Gradients of the features to those of A_L, P_L, G0_L and of the connections of the traces.
template <typename S, typename T>
void features_backward(const Network<S, T>& x, const T* saved, const T* F_bar, T* grad, T* psi_bar,
                       Scratch<T> scratch) {
  const Shape& s = x.s;
  const Features f(s);
  const int64_t L = s.L(), n_0 = s.n_0(), n_L = s.n_L(), d = s.d;
  const T *PL = saved + x.at.PL, *G = saved + x.at.G0[L];
  T *PL_bar = grad + x.at.PL, *G_bar = grad + x.at.G0[L];
  const T *b = saved + x.at.size + f.b, *v = saved + last_Wb(x), *g = G + n_0 * n_0 * d;
  add(n_L * n_0 * d, F_bar + f.P, PL_bar);
  lane_gemm<T>(d, n_L, n_0, n_0, {F_bar + f.WW, n_0, 1}, {G, 1, n_0}, {PL_bar, n_0, 1}, true);
  lane_gemm<T>(d, n_0, n_0, n_L, {PL, 1, n_0}, {F_bar + f.WW, n_0, 1}, {G_bar, n_0, 1}, true);

  T* rows_bar = scratch.take(L * n_L * d);  // of v_(L,1) ... v_(L,L-1), b_L
  for (int64_t t = 0; t < L - 1; ++t)
    std::memcpy(rows_bar + t * n_L * d, F_bar + f.Wb + std::min(t, s.Wb_blocks(L) - 1) * n_L * d, n_L * d * sizeof(T));
  T* b_bar = rows_bar + (L - 1) * n_L * d;
  std::memcpy(b_bar, F_bar + f.b, n_L * d * sizeof(T));
  lane_gemm<T>(d, n_L, 1, n_0, {F_bar + f.bW, n_0, 1}, {g, 1, 1}, {b_bar, 1, 1}, true);
  lane_gemm<T>(d, 1, n_0, n_L, {b, 1, 1}, {F_bar + f.bW, n_0, 1}, {G_bar + n_0 * n_0 * d, 1, 1}, true);
  for (int64_t t = 1; t < L; ++t) {
    const int64_t offset = s.pair_of_trace(t) * (n_0 + 1) * n_L * d;
    const T *psi = x.psi + offset, *WW_pp = F_bar + f.WW_pp + (t - 1) * d, *bW_pp = F_bar + f.bW_pp + (t - 1) * d;
    T* pair_bar = psi_bar + offset;
    for (int64_t q = 0; q < n_0; ++q)
      for (int64_t p = 0; p < n_L; ++p) {
        add_product(d, psi + (q * n_L + p) * d, WW_pp, PL_bar + (p * n_0 + q) * d);
        add_product(d, PL + (p * n_0 + q) * d, WW_pp, pair_bar + (q * n_L + p) * d);
      }
    for (int64_t p = 0; p < n_L; ++p) {
      add_product(d, psi + (n_0 * n_L + p) * d, bW_pp, rows_bar + ((t - 1) * n_L + p) * d);
      add_product(d, v + ((t - 1) * n_L + p) * d, bW_pp, pair_bar + (n_0 * n_L + p) * d);
    }
  }
  const Section& a = x.at.A[L];
  for (int64_t t = 0; t < L; ++t) {
    T* row = grad + a.offset + (n_0 + t) * a.row_stride;
    const T* bar = rows_bar + t * n_L * d;
    for (int64_t channel = 0; channel < d; ++channel)
      for (int64_t p = 0; p < n_L; ++p) row[channel * a.ld + p] += bar[p * d + channel];
  }
}

// As few blocks of at most `most` rows, but of equal size.
inline int64_t even_block_size(int64_t rows, int64_t most) {
  const int64_t count = std::max<int64_t>(1, (rows + most - 1) / most);
  return std::max<int64_t>(1, (rows + count - 1) / count);
}

// Products of a readout, of its forward pass, below which a second thread is not worth waking.
constexpr int64_t kSmallReadout = 1 << 17;
inline int64_t readout_threads(int64_t B, int64_t rows, int64_t K, int64_t threads) {
  return B * rows * K < kSmallReadout ? 1 : threads;
}

// Into how many parts threads divide the rows of a readout's matrix in the backward pass. Each part sums gradients of
// the features in memory of its own, [B][K]: with several parts no more than the matrix in all.
inline int64_t readout_parts(int64_t B, int64_t rows, int64_t K, int64_t threads) {
  return std::max<int64_t>(1, std::min(readout_threads(B, rows, K, threads), rows / std::max<int64_t>(16, B)));
}

// out[net, r] = sum_k matrix[r, k] F[net, k], plus bias[r] if there is one, for some of the rows r; features of
// networks are ld numbers apart.
template <typename S, typename T>
void readout_rows(int64_t B, int64_t rows, Range range, int64_t K, const T* matrix, const T* F, int64_t ld,
                  Destination<S, T> out, const T* bias = nullptr) {
  const int64_t count = range.size();
  Scratch<T> scratch = Scratch<T>::begin(B * count + 16);
  T* sums = scratch.take(B * count);
  gemm_dot<T>(B, count, K, F, ld, matrix + range.begin * K, K, sums, count, false);
  for (int64_t net = 0; bias && net < B; ++net) add(count, bias + range.begin, sums + net * count);
  for (int64_t net = 0; net < B; ++net) (out + (net * rows + range.begin)).store(sums + net * count, count);
}

// For some of the rows r and of the columns k:
//   F_bar[net, k] = sum_r bar[net, r] matrix[r, k];  matrix_bar[r, k] = sum_net bar[net, r] F[net, k]
template <typename T>
void readout_rows_backward(int64_t B, int64_t rows, Range range, Range columns, int64_t K, const T* matrix, const T* F,
                           int64_t ld, const T* bar, T* F_bar, T* matrix_bar) {
  // Blocks that keep both matrices read and written in order.
  constexpr int64_t kStrip = 512;
  const int64_t size = even_block_size(range.size(), 64);
  for (int64_t k = columns.begin; k < columns.end; k += kStrip) {
    const int64_t count = std::min(kStrip, columns.end - k);
    for (int64_t r = range.begin; r < range.end; r += size) {
      const int64_t some = std::min(size, range.end - r);
      gemm<T>(B, count, some, {bar + r, rows, 1}, matrix + r * K + k, K, F_bar + k, K, r > range.begin);
      gemm<T>(some, count, B, {bar + r, 1, rows}, F + k, ld, matrix_bar + r * K + k, K, false);
    }
  }
}

// All rows. Where there are as many parts as threads, a thread takes the same rows forward and backward and finds them
// in its own cache.
template <typename S, typename T>
void readout(int64_t B, int64_t rows, int64_t K, const T* matrix, const T* F, int64_t ld, Destination<S, T> out,
             const Parallel& parallel, const T* bias = nullptr) {
  const int64_t parts = std::min(rows, readout_threads(B, rows, K, parallel.threads));
  parallel.run(
      parts, [&](int64_t part) { readout_rows(B, rows, Range::part(rows, part, parts), K, matrix, F, ld, out, bias); });
}

// F_bar: [readout_parts][B][K], still to be summed over the parts by `sum_parts`. Where there are fewer parts than
// threads, threads divide the columns too.
template <typename T>
void readout_backward(int64_t B, int64_t rows, int64_t K, const T* matrix, const T* F, int64_t ld, const T* bar,
                      T* F_bar, T* matrix_bar, const Parallel& parallel) {
  const int64_t parts = readout_parts(B, rows, K, parallel.threads), lines = (K + 15) / 16;
  const int64_t strips = std::min(lines, std::max<int64_t>(1, readout_threads(B, rows, K, parallel.threads) / parts));
  parallel.run(parts * strips, [&](int64_t task) {
    const int64_t part = task / strips;
    const Range strip = Range::part(lines, task % strips, strips);
    readout_rows_backward(B, rows, Range::part(rows, part, parts), {strip.begin * 16, std::min(K, strip.end * 16)}, K,
                          matrix, F, ld, bar, F_bar + part * B * K, matrix_bar);
  });
}

// The gradients of the features of one network, in the first part.
template <typename T>
T* sum_parts(int64_t parts, int64_t B, int64_t K, int64_t net, T* F_bar) {
  T* sum = F_bar + net * K;
  for (int64_t part = 1; part < parts; ++part) add(K, sum + part * B * K, sum);
  return sum;
}

}  // namespace MAGEP_ISA
}  // namespace magep
