// What connects the chains: G0, the factors of [WW] and [bW], and the invariants, which the bias of the last layer and
// the invariant layer are linear maps of; each with its reverse. All per channel.
#pragma once

#include "chain.cuh"

namespace magep::cuda {

// Entries of F per channel, in the order of the table of terms.
struct Features {
  int P, WW, bW, Wb, b, WW_pp, bW_pp;
  __device__ explicit Features(const Shape& s) {
    const int product = s.n_L() * s.n_0();
    P = 0;
    WW = product;
    bW = 2 * product;
    Wb = 3 * product;
    b = Wb + (s.L - 1) * s.n_L();
    WW_pp = b + s.n_L();
    bW_pp = WW_pp + s.L - 1;
  }
};

// Everything after the chains. Ends with a barrier.
template <typename T>
__device__ void connect(const Shape& s, const Connections<const T>& psi, int count, const Sections<T>& x) {
  const Direct direct;
  const int L = s.L, n_0 = s.n_0(), n_L = s.n_L();
  const bool equivariant = s.equivariant();
  // G0_i = [Psi; psi]_(i,0) S_0
  for (int i = equivariant ? 1 : L; i <= L; ++i) {
    const int pair = s.pair_to_input(i);
    direct.product<T>(count, n_0 + 1, n_0, inner(n_L),
                      generated<Along::inner>([&](int c, int q, const Index& p) { return psi(pair, q, p.at, c); }),
                      generated<Along::inner>([&](int c, int k, const Index& p) { return x.A(L, k, c)[p.at]; }),
                      [&](int c, int q, int k, T value) { x.G0(i, q, k, c) = value; });
  }
  // R_i = [Psi; psi]_(i,i-1) S_(i-1), or only its last row and U_i = P_i Psi
  for (int i = 2; equivariant && i <= L; ++i) {
    const bool left = s.through_output(i);
    const int pair = s.pair_to_neighbour(i), skip = left ? n_0 : 0;
    direct.product<T>(
        count, n_0 + 1 - skip, s.n[i - 1], inner(n_L),
        generated<Along::inner>([&](int c, int q, const Index& p) { return psi(pair, q + skip, p.at, c); }),
        generated<Along::outer>([&](int c, int k, const Index& p) { return x.S(i - 1, p.at, c)[k]; }),
        [&](int c, int q, int k, T value) { x.R(i, q, c)[k] = value; });
    if (left)
      direct.product<T>(count, n_L, s.n[i], inner(n_0),
                        generated<Along::outer>([&](int c, int p, const Index& q) { return psi(pair, q.at, p, c); }),
                        generated<Along::outer>([&](int c, int j, const Index& q) { return x.A(i, q.at, c)[j]; }),
                        [&](int c, int p, int j, T value) { x.U(i, p, c)[j] = value; });
  }
  __syncthreads();
  const Features f(s);
  for_each(count * s.feature_rows(), [&](int task) {
    const int c = task % count, at = task / count;
    T value = 0;
    if (at < f.WW) {
      value = x.A(L, at % n_0, c)[at / n_0];
    } else if (at < f.bW) {
      const int p = (at - f.WW) / n_0, k = (at - f.WW) % n_0;
      for (int q = 0; q < n_0; ++q) value += x.A(L, q, c)[p] * x.G0(L, q, k, c);
    } else if (at < f.Wb) {
      value = x.bias(L, c)[(at - f.bW) / n_0] * x.G0(L, n_0, (at - f.bW) % n_0, c);
    } else if (at < f.WW_pp) {
      value = x.A(L, n_0 + (at - f.Wb) / n_L, c)[(at - f.Wb) % n_L];
    } else if (at < f.bW_pp) {
      const int pair = s.pair_of_trace(at - f.WW_pp + 1);
      for (int q = 0; q < n_0; ++q)
        for (int p = 0; p < n_L; ++p) value += psi(pair, q, p, c) * x.A(L, q, c)[p];
    } else {
      const int t = at - f.bW_pp + 1, pair = s.pair_of_trace(t);
      for (int p = 0; p < n_L; ++p) value += psi(pair, n_0, p, c) * x.A(L, n_0 + t - 1, c)[p];
    }
    x.F(at, c) = value;
  });
  if (x.first == 0 && threadIdx.x == 0) x.base[int64_t(x.at.size) * x.channels] = 1;
  __syncthreads();
}

// Gradients of one network's mixing, as GradientLayout lays them out, from channel `first` on.
template <typename T>
struct MixGradients {
  const Shape& s;
  const GradientLayout& at;
  T* base;
  int first;

  __device__ T* row(int offset, int n, int row, int c) const {
    return base + int64_t(offset + row * n) * s.d + int64_t(first + c) * n;
  }
  __device__ T* H(int i, int x, int c) const { return row(at.H[i], s.n[i], x, c); }
  __device__ T* left(int i, int l, int c) const { return row(at.left[i], s.n[i], l, c); }
  __device__ T* right(int i, int l, int c) const { return row(at.right[i], s.n[i - 1], l, c); }
  __device__ T& F(int feature, int c) const { return base[int64_t(at.F + feature) * s.d + first + c]; }
};

// The reverse of `connect`, with the gradients of everything that the mixing reads: fills A and S of `bar`, uses its
// G0, and writes all of psi_bar's entries of these channels. Ends with a barrier.
template <typename T>
__device__ void connect_backward(const Shape& s, const Connections<const T>& psi, int count, const Sections<T>& x,
                                 const MixGradients<const T>& mix, const Sections<T>& bar,
                                 const Connections<T>& psi_bar) {
  const int L = s.L, n_0 = s.n_0(), n_L = s.n_L(), product = n_0 * n_L;
  const bool equivariant = s.equivariant();
  const Features f(s);
  // G0_bar, by F for the last layer and by H for the others.
  for (int i = equivariant ? 1 : L; i <= L; ++i)
    for_each(count * (n_0 + 1) * n_0, [&](int task) {
      const int c = task % count, k = task / count % n_0, q = task / count / n_0;
      const T* left = q < n_0 ? x.A(i, q, c) : x.bias(i, c);
      T value = 0;
      if (i == L) {
        for (int p = 0; p < n_L; ++p) value += left[p] * mix.F((q < n_0 ? f.WW : f.bW) + p * n_0 + k, c);
      } else {
        const T* H = mix.H(i, (q < n_0 ? n_0 : 2 * n_0) + k, c);
        for (int j = 0; j < s.n[i]; ++j) value += left[j] * H[j];
      }
      bar.G0(i, q, k, c) = value;
    });
  // S_bar, and the connections of neighbours, by the factors of [WW] and [bW].
  for (int i = 2; equivariant && i <= L; ++i) {
    const bool left = s.through_output(i);
    const int pair = s.pair_to_neighbour(i), m = s.n[i - 1], rank = s.rank(i);
    for_each(count * n_L * m, [&](int task) {
      const int k = task % m, p = task / m % n_L, c = task / m / n_L;
      T value = psi(pair, n_0, p, c) * mix.right(i, rank, c)[k];
      if (left)
        value += mix.right(i, p, c)[k];
      else
        for (int q = 0; q < n_0; ++q) value += psi(pair, q, p, c) * mix.right(i, q, c)[k];
      bar.S(i - 1, p, c)[k] = value;
    });
    for_each(count * (n_0 + 1) * n_L, [&](int task) {
      const int c = task % count, p = task / count % n_L, q = task / count / n_L;
      T value = 0;
      if (left && q < n_0) {
        for (int j = 0; j < s.n[i]; ++j) value += x.A(i, q, c)[j] * mix.left(i, p, c)[j];
      } else {
        const T* R_bar = mix.right(i, left ? rank : q, c);
        for (int k = 0; k < m; ++k) value += R_bar[k] * x.S(i - 1, p, c)[k];
      }
      psi_bar(pair, q, p, c) = value;
    });
  }
  // The connections of the traces.
  for_each(count * (L - 1) * (n_0 + 1) * n_L, [&](int task) {
    const int c = task % count, p = task / count % n_L, q = task / count / n_L % (n_0 + 1);
    const int t = task / count / n_L / (n_0 + 1) + 1;
    psi_bar(s.pair_of_trace(t), q, p, c) =
        q < n_0 ? mix.F(f.WW_pp + t - 1, c) * x.A(L, q, c)[p] : mix.F(f.bW_pp + t - 1, c) * x.A(L, n_0 + t - 1, c)[p];
  });
  __syncthreads();
  // The connections of the inputs, by G0_bar.
  for (int i = equivariant ? 1 : L; i <= L; ++i)
    for_each(count * (n_0 + 1) * n_L, [&](int task) {
      const int c = task % count, p = task / count % n_L, q = task / count / n_L;
      T value = 0;
      for (int k = 0; k < n_0; ++k) value += bar.G0(i, q, k, c) * x.A(L, k, c)[p];
      psi_bar(s.pair_to_input(i), q, p, c) = value;
    });
  // A_bar of hidden layers, of which the invariant layer reads none.
  for (int i = 1; i < L; ++i)
    for_each(count * s.columns(i) * s.n[i], [&](int task) {
      const int n = s.n[i], j = task % n, column = task / n % s.columns(i), c = task / n / s.columns(i);
      T value = 0;
      if (equivariant) {
        const bool is_bias = column == s.columns(i) - 1;
        value = mix.H(i, column < n_0 ? column : 2 * n_0 + column, c)[j];
        if (column < n_0)
          for (int k = 0; k < n_0; ++k) value += mix.H(i, n_0 + k, c)[j] * x.G0(i, column, k, c);
        if (is_bias) {
          for (int k = 0; k < n_0; ++k) value += mix.H(i, 2 * n_0 + k, c)[j] * x.G0(i, n_0, k, c);
          if (i > 1) value += mix.left(i, s.rank(i), c)[j];
        }
        if (i > 1 && column < n_0) {
          if (s.through_output(i))
            for (int p = 0; p < n_L; ++p) value += psi(s.pair_to_neighbour(i), column, p, c) * mix.left(i, p, c)[j];
          else
            value += mix.left(i, column, c)[j];
        }
      }
      bar.A(i, column, c)[j] = value;
    });
  // A_bar_L: by the invariants, the factors of layer L, and P_L = S_0 in every G0.
  for_each(count * s.columns(L) * n_L, [&](int task) {
    const int p = task % n_L, column = task / n_L % s.columns(L), c = task / n_L / s.columns(L);
    T value = 0;
    if (column < n_0) {
      value = mix.F(p * n_0 + column, c);
      for (int k = 0; k < n_0; ++k) value += mix.F(product + p * n_0 + k, c) * x.G0(L, column, k, c);
      for (int t = 1; t < L; ++t) value += psi(s.pair_of_trace(t), column, p, c) * mix.F(f.WW_pp + t - 1, c);
      for (int i = equivariant ? 1 : L; i <= L; ++i)
        for (int q = 0; q <= n_0; ++q) value += psi(s.pair_to_input(i), q, p, c) * bar.G0(i, q, column, c);
      if (equivariant) value += mix.left(L, column, c)[p];
    } else {
      const int t = column - n_0 + 1;  // v_(L,t), or b_L for t = L
      value = mix.F(f.Wb + (t - 1) * n_L + p, c);
      if (t < L) {
        value += psi(s.pair_of_trace(t), n_0, p, c) * mix.F(f.bW_pp + t - 1, c);
      } else {
        for (int k = 0; k < n_0; ++k) value += mix.F(f.bW + p * n_0 + k, c) * x.G0(L, n_0, k, c);
        if (equivariant) value += mix.left(L, n_0, c)[p];
      }
    }
    bar.A(L, column, c)[p] = value;
  });
  __syncthreads();
}

}  // namespace magep::cuda
