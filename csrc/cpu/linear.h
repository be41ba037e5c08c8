// The linear equivariant layer (Monomial-NFN), forward and backward: every output is a matrix of coefficients times the
// layer's own weights and bias. Weights may have several taps, which are channels here; no product of layers is taken.
#pragma once

#include "readout.h"

namespace magep {
namespace MAGEP_ISA {

// One product Y = matrix X of a network:
//   first    [W_1; b_1] -> [E(W)_1; E(b)_1]   rows (channel, k) then e    columns j    inner (q, channel) then d
//   weight   W_i -> E(W)_i, 1 < i < L         rows channel                columns (j, k)    inner channel
//   bias     b_i -> E(b)_i, 1 < i < L         rows e                      columns j         inner d
//   last     W_L -> E(W)_L                    rows (channel, j)           columns k         inner (p, channel)
struct Piece {
  enum Kind { first, weight, bias, last } kind;
  int64_t i, rows, columns, inner;

  static int64_t count(const LinearShape& s) { return 2 * s.L() - 2; }
  Piece(const LinearShape& s, int64_t index) {
    const int64_t L = s.L();
    kind = index == 0 ? first : index < L - 1 ? weight : index < 2 * L - 3 ? bias : last;
    i = kind == first ? 1 : kind == weight ? index + 1 : kind == bias ? index - L + 3 : L;
    const int64_t n = s.n[i], m = s.n[i - 1], c = s.in[i - 1], out = s.out[i - 1];
    switch (kind) {
      case first: rows = out * m + s.e, columns = n, inner = m * c + s.d; break;
      case weight: rows = out, columns = n * m, inner = c; break;
      case bias: rows = s.e, columns = n, inner = s.d; break;
      case last: rows = out * n, columns = m, inner = n * c; break;
    }
  }
  int64_t tile() const { return std::min<int64_t>(columns, 256); }
};

template <typename S, typename T>
struct LinearCall {
  const LinearShape& s;
  const S* const* W;
  const S* const* b;

  // Of the matrices of coefficients, in one place and in the order of the pieces; the last bias is apart.
  std::vector<int64_t> offsets() const {
    std::vector<int64_t> at{0};
    for (int64_t k = 0; k < Piece::count(s); ++k) {
      const Piece p(s, k);
      at.push_back(at.back() + p.rows * p.inner);
    }
    return at;
  }
  // Copies between the layer's matrices, weight_1, bias_1, ..., weight_L, bias_L, and the pieces.
  template <typename Copy>
  void for_matrices(Copy&& copy) const {
    const auto at = offsets();
    for (int64_t k = 0; k < Piece::count(s); ++k) {
      const Piece p(s, k);
      const int64_t bias_size = s.e * p.inner, size = p.rows * p.inner;
      if (p.kind == Piece::first) {
        copy(0, at[k], size - bias_size);
        copy(1, at[k] + size - bias_size, bias_size);
      } else {
        copy(p.kind == Piece::bias ? 2 * p.i - 1 : 2 * p.i - 2, at[k], size);
      }
    }
  }

  int64_t scratch_size() const {
    int64_t most = 0;
    for (int64_t k = 0; k < Piece::count(s); ++k) {
      const Piece p(s, k);
      most = std::max(most, (2 * p.inner + p.rows + s.n[p.i - 1]) * p.tile());
    }
    return most + 64;
  }

  // X of columns begin ... begin + count - 1, [inner][count], in `X` or where it lies.
  const T* load(const Piece& p, int64_t net, int64_t begin, int64_t count, T* X) const {
    const int64_t n = s.n[p.i], m = s.n[p.i - 1], c = s.in[p.i - 1];
    const S *w = W[p.i - 1] + net * c * n * m, *bias = b[p.i - 1] + net * s.d * n;
    if constexpr (std::is_same_v<S, T>) {
      if (count == p.columns && p.kind == Piece::weight) return w;
      if (count == p.columns && p.kind == Piece::bias) return bias;
    }
    switch (p.kind) {
      case Piece::first:
        for (int64_t channel = 0; channel < c; ++channel)
          for (int64_t q = 0; q < m; ++q)
            for (int64_t j = 0; j < count; ++j)
              X[(q * c + channel) * count + j] = load_one<S, T>(w[(channel * n + begin + j) * m + q]);
        for (int64_t channel = 0; channel < s.d; ++channel)
          load_row(bias + channel * n + begin, count, X + (m * c + channel) * count);
        break;
      case Piece::weight:
        for (int64_t channel = 0; channel < c; ++channel)
          load_row(w + channel * n * m + begin, count, X + channel * count);
        break;
      case Piece::bias:
        for (int64_t channel = 0; channel < s.d; ++channel)
          load_row(bias + channel * n + begin, count, X + channel * count);
        break;
      case Piece::last:
        for (int64_t q = 0; q < n; ++q)
          for (int64_t channel = 0; channel < c; ++channel)
            load_row(w + (channel * n + q) * m + begin, count, X + (q * c + channel) * count);
        break;
    }
    return X;
  }

  // The gradient of X to those of W and b.
  void store(const Piece& p, int64_t net, int64_t begin, int64_t count, const T* X, S* const* W_bar,
             S* const* b_bar) const {
    const int64_t n = s.n[p.i], m = s.n[p.i - 1], c = s.in[p.i - 1];
    S *w = W_bar[p.i - 1] + net * c * n * m, *bias = b_bar[p.i - 1] + net * s.d * n;
    switch (p.kind) {
      case Piece::first:
        for (int64_t channel = 0; channel < c; ++channel)
          for (int64_t j = 0; j < count; ++j)
            for (int64_t q = 0; q < m; ++q)
              store_one(X[(q * c + channel) * count + j], w[(channel * n + begin + j) * m + q]);
        for (int64_t channel = 0; channel < s.d; ++channel)
          store_row(X + (m * c + channel) * count, count, bias + channel * n + begin);
        break;
      case Piece::weight:
        for (int64_t channel = 0; channel < c; ++channel)
          store_row(X + channel * count, count, w + channel * n * m + begin);
        break;
      case Piece::bias:
        for (int64_t channel = 0; channel < s.d; ++channel)
          store_row(X + channel * count, count, bias + channel * n + begin);
        break;
      case Piece::last:
        for (int64_t q = 0; q < n; ++q)
          for (int64_t channel = 0; channel < c; ++channel)
            store_row(X + (q * c + channel) * count, count, w + (channel * n + q) * m + begin);
        break;
    }
  }

  // Calls visit(is_weight, offset in the tensor of outputs, row of Y, length) for each contiguous run of outputs: all
  // rows of Y where they are whole. In the piece `first` a run of weights is n_0 rows (channel, k) of Y, transposed.
  template <typename Visit>
  void for_runs(const Piece& p, int64_t net, int64_t begin, int64_t count, Visit&& visit) const {
    const int64_t n = s.n[p.i], m = s.n[p.i - 1], out = s.out[p.i - 1];
    const bool whole = count == p.columns;
    switch (p.kind) {
      case Piece::first:
        if (whole && m == 1) {
          visit(true, net * out * n, 0, out * n);
          visit(false, net * s.e * n, out, s.e * n);
          break;
        }
        for (int64_t channel = 0; channel < out; ++channel)
          visit(true, ((net * out + channel) * n + begin) * m, channel * m, count * m);
        for (int64_t channel = 0; channel < s.e; ++channel)
          visit(false, (net * s.e + channel) * n + begin, out * m + channel, count);
        break;
      case Piece::weight:
      case Piece::last:
      case Piece::bias: {
        const bool is_weight = p.kind != Piece::bias;
        if (whole) {
          visit(is_weight, net * p.rows * p.columns, 0, p.rows * p.columns);
          break;
        }
        for (int64_t row = 0; row < p.rows; ++row)
          visit(is_weight, (net * p.rows + row) * p.columns + begin, row, count);
        break;
      }
    }
  }

  void forward(const Piece& p, int64_t net, const T* matrix, const LayerOutputs<S, T>& out, Scratch<T> scratch) const {
    const int64_t tile = p.tile(), m = s.n[p.i - 1];
    T* space = scratch.take(p.inner * tile);
    T* Y = scratch.take(p.rows * tile);
    T* run = scratch.take(tile * m);
    for (int64_t begin = 0; begin < p.columns; begin += tile) {
      const int64_t count = std::min(tile, p.columns - begin);
      const T* X = load(p, net, begin, count, space);
      gemm<T>(p.rows, count, p.inner, {matrix, p.inner, 1}, X, count, Y, count, false);
      for_runs(p, net, begin, count, [&](bool is_weight, int64_t offset, int64_t row, int64_t length) {
        const T* from = Y + row * count;
        if (p.kind == Piece::first && is_weight && m > 1) {
          transpose<T>(m, count, from, count, run, m);
          from = run;
        }
        ((is_weight ? out.weight(p.i) : out.bias(p.i)) + offset).store(from, length);
      });
    }
  }

  // matrix_bar += Y_bar X^T, and unless W_bar is null X_bar = matrix^T Y_bar.
  void backward(const Piece& p, int64_t net, const T* matrix_transposed, const LayerGradients<S, T>& out_bar,
                T* matrix_bar, S* const* W_bar, S* const* b_bar, Scratch<T> scratch) const {
    const int64_t tile = p.tile(), m = s.n[p.i - 1];
    T* space = scratch.take(p.inner * tile);
    T* X_transposed = scratch.take(p.inner * tile);
    T* Y_bar = scratch.take(p.rows * tile);
    T* run = scratch.take(tile * m);
    for (int64_t begin = 0; begin < p.columns; begin += tile) {
      const int64_t count = std::min(tile, p.columns - begin);
      const T* X = load(p, net, begin, count, space);
      transpose<T>(p.inner, count, X, count, X_transposed, p.inner);
      for_runs(p, net, begin, count, [&](bool is_weight, int64_t offset, int64_t row, int64_t length) {
        T* to = Y_bar + row * count;
        const bool transposed = p.kind == Piece::first && is_weight && m > 1;
        load_row((is_weight ? out_bar.weight(p.i) : out_bar.bias(p.i)) + offset, length, transposed ? run : to);
        if (transposed) transpose<T>(count, m, run, m, to, count);
      });
      gemm<T>(p.rows, p.inner, count, {Y_bar, count, 1}, X_transposed, p.inner, matrix_bar, p.inner, true);
      if (!W_bar) continue;
      gemm<T>(p.inner, count, p.rows, {matrix_transposed, p.rows, 1}, Y_bar, count, space, count, false);
      store(p, net, begin, count, space, W_bar, b_bar);
    }
  }

  // What the last bias is a linear map of: b_L as [p][d], and 1.
  void last_features(int64_t net, T* F) const {
    const int64_t n_L = s.n.back();
    const S* bias = b[s.L() - 1] + net * s.d * n_L;
    for (int64_t p = 0; p < n_L; ++p)
      for (int64_t channel = 0; channel < s.d; ++channel)
        F[p * s.d + channel] = load_one<S, T>(bias[channel * n_L + p]);
    F[n_L * s.d] = 1;
  }
};

template <typename S, typename T>
void linear_forward(const LinearShape& s, const S* const* W, const S* const* b, const T* const* matrices,
                    const Outputs<S>& outputs, const Parallel& parallel) {
  const LinearCall<S, T> call{s, W, b};
  const LayerOutputs<S, T> out{outputs};
  const auto at = call.offsets();
  const int64_t pieces = Piece::count(s), K = s.n.back() * s.d + 1, need = call.scratch_size();
  thread_local std::vector<T> memory;
  T *packed = at_least(at.back() + s.B * K, memory), *F = packed + at.back();
  call.for_matrices([&](int64_t matrix, int64_t offset, int64_t size) {
    std::memcpy(packed + offset, matrices[matrix], size * sizeof(T));
  });
  parallel.split(s.B * pieces, [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task)
      call.forward(Piece(s, task % pieces), task / pieces, packed + at[task % pieces], out, Scratch<T>::begin(need));
  });
  for (int64_t net = 0; net < s.B; ++net) call.last_features(net, F + net * K);
  readout(s.B, s.e * s.n.back(), K, matrices[2 * s.L() - 1], F, K, out.bias(s.L()), parallel);
}

// W_bar and b_bar may be null where nobody asks for them.
template <typename S, typename T>
void linear_backward(const LinearShape& s, const OutputGradients<S>& gradients, const S* const* W, const S* const* b,
                     const T* const* matrices, S* const* W_bar, S* const* b_bar, T* const* matrices_bar,
                     const Parallel& parallel) {
  const LinearCall<S, T> call{s, W, b};
  const LayerGradients<S, T> out_bar{gradients};
  const auto at = call.offsets();
  const int64_t L = s.L(), n_L = s.n.back(), pieces = Piece::count(s), K = n_L * s.d + 1, rows = s.e * n_L;
  const int64_t need = call.scratch_size(), chunks = parallel.chunks(s.B * pieces), size = at.back();
  thread_local std::vector<T> memory;
  const int64_t parts = readout_parts(s.B, rows, K, parallel.threads);
  T *packed = at_least((2 + chunks) * size + s.B * ((1 + parts) * K + rows), memory), *transposed = packed + size,
    *sums = transposed + size;
  T *F = sums + chunks * size, *bar = F + s.B * K, *F_bar = bar + s.B * rows;
  call.for_matrices([&](int64_t matrix, int64_t offset, int64_t count) {
    std::memcpy(packed + offset, matrices[matrix], count * sizeof(T));
  });
  for (int64_t k = 0; k < pieces; ++k) {
    const Piece p(s, k);
    transpose<T>(p.rows, p.inner, packed + at[k], p.inner, transposed + at[k], p.rows);
  }
  std::fill(sums, sums + chunks * size, T(0));
  parallel.split(s.B * pieces, [&](int64_t chunk, int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t k = task % pieces;
      call.backward(Piece(s, k), task / pieces, transposed + at[k], out_bar, sums + chunk * size + at[k], W_bar, b_bar,
                    Scratch<T>::begin(need));
    }
  });
  for (int64_t chunk = 1; chunk < chunks; ++chunk) add(size, sums + chunk * size, sums);
  call.for_matrices([&](int64_t matrix, int64_t offset, int64_t count) {
    std::memcpy(matrices_bar[matrix], sums + offset, count * sizeof(T));
  });

  for (int64_t net = 0; net < s.B; ++net) call.last_features(net, F + net * K);
  load_row(out_bar.bias(L), s.B * rows, bar);
  readout_backward(s.B, rows, K, matrices[2 * L - 1], F, K, bar, F_bar, matrices_bar[2 * L - 1], parallel);
  if (!b_bar) return;
  for (int64_t net = 0; net < s.B; ++net) {
    const T* own = sum_parts(parts, s.B, K, net, F_bar);
    for (int64_t p = 0; p < n_L; ++p)
      for (int64_t channel = 0; channel < s.d; ++channel)
        store_one(own[p * s.d + channel], b_bar[L - 1][(net * s.d + channel) * n_L + p]);
  }
}

}  // namespace MAGEP_ISA
}  // namespace magep
