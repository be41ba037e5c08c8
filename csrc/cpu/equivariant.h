// The equivariant layer of a batch of networks, forward and backward.
#pragma once

#include "readout.h"

namespace magep {
namespace MAGEP_ISA {

// A tile of a middle layer's weights: `rows` rows of `columns` entries, flat in memory where whole rows are taken.
struct Tile {
  int64_t rows, columns;
  Tile(const Shape& s, int64_t i, int64_t element_size) {
    const int64_t n = s.n[i], m = s.n[i - 1];
    // [W; WW; bW] of a tile, 3 d rows, in a quarter of a second-level cache of 1 MiB.
    const int64_t budget = std::max<int64_t>(64, (256 << 10) / (3 * s.d * element_size));
    columns = std::min<int64_t>(m, 128);
    rows = std::max<int64_t>(columns == m ? 1 : kMaxRows, std::min<int64_t>(budget, 768) / columns);
    if (rows > kMaxRows) rows -= rows % kMaxRows;
    rows = std::min(rows, n);
  }
  int64_t size() const { return rows * columns; }
  // An odd number of cache lines between rows, so that columns do not fall into one cache set.
  int64_t ld() const { return (size() + 31) / 32 * 32 + 16; }
};

// Calls body(group) for the networks of a range, up to `size` at a time: a thread takes those of a group through the
// layers together.
template <typename Body>
void for_groups(Range networks, int64_t size, Body&& body) {
  for (int64_t first = networks.begin; first < networks.end; first += size)
    body(Range{first, std::min(networks.end, first + size)});
}

template <typename S, typename T>
struct EquivariantCall {
  Network<S, T> x;
  const T* const* matrices;  // weight_1, bias_1, ..., weight_L, bias_L
  const Parallel& parallel;

  const Shape& s() const { return x.s; }
  const T* weight_matrix(int64_t i) const { return matrices[2 * i - 2]; }
  const T* bias_matrix(int64_t i) const { return matrices[2 * i - 1]; }

  // Networks in a group: as many as keep the intermediates within 8 MiB, eight at most.
  int64_t group_size() const {
    const int64_t bytes = x.at.grad_size * static_cast<int64_t>(sizeof(T));
    return std::max<int64_t>(1, std::min<int64_t>(8, (8 << 20) / bytes));
  }

  int64_t scratch_size() const {
    const Shape& s = x.s;
    const int64_t n_0 = s.n_0(), n_L = s.n_L(), wide = widest(s) + 16, L = s.L(), group = group_size();
    int64_t hidden = 0;
    for (int64_t i = 1; i < L; ++i) {
      const int64_t rows = hidden_rows(i);
      hidden = std::max(
          hidden, (1 + group) * rows * s.d * s.columns(i) + group * s.d * s.columns(i) * s.n[i] + 2 * rows * s.n[i]);
    }
    hidden += group * s.connected_size();
    int64_t middle = 0;
    for (int64_t i = 2; i < L; ++i) {
      const Tile tile(s, i, sizeof(T));
      middle =
          std::max(middle, (6 * s.d + s.e + 16) * tile.ld() + s.d * s.rank() * wide + 3 * s.d * s.e + kTransposedBlock);
      const int64_t ld = single_output_rows(i) * s.n[i - 1] + 16;
      middle = std::max(middle, (4 * s.n[i] + s.n[i - 1]) * s.d + (3 * s.d + 16) * s.e + (3 * s.d + 2 * s.e) * ld +
                                    2 * kMaxRows * single_output_rows(i) * s.d + 256);
    }
    middle += (2 * s.d + 1) * s.rank() * wide + n_0 * n_L + 64;  // the left factor P Psi and its gradient
    const int64_t rows = row_block_size(s.e * n_L, 3 * n_L * s.d, 1), m = s.n[L - 1];
    const int64_t last =
        2 * group * rows * s.d * (n_0 + 1) + group * (n_L + n_0 + 1) * s.d * m + group * rows * m + L * n_L * s.d;
    return std::max({hidden, middle, last, chain_scratch<S, T>(s)}) + 2048;
  }

  // --- hidden layers: the bias, and for i = 1 the weights, are one product with [A_i | b_i] ---

  // coefficient[r][c, d]: Phi_W + Phi_WW G^T, Phi_Wb, Phi_b + Phi_bW g. Phi_Wb, the same for every network, is copied
  // for the `first` only.
  void coefficients(int64_t i, int64_t rows, const T* phi, const T* G, bool first, T* out) const {
    const Shape& s = x.s;
    const int64_t n_0 = s.n_0(), d = s.d, K = s.hidden_columns(i), c = s.columns(i);
    const T* from = phi + 3 * n_0 * d;  // Phi_Wb, for every t or once, then Phi_b
    for (int64_t r = 0; first && r < rows; ++r)
      for (int64_t t = 0; t < i - 1; ++t)
        std::memcpy(out + (r * c + n_0 + t) * d, from + r * K + (s.share_Wb ? 0 : t * d), d * sizeof(T));
    lane_gemm<T>(d, rows, n_0, n_0, {phi + n_0 * d, K / d, 1}, {G, 1, n_0}, {out, c, 1},
                 LaneMatrix<const T>{phi, K / d, 1});
    lane_gemm<T>(d, rows, 1, n_0, {phi + 2 * n_0 * d, K / d, 1}, {G + n_0 * n_0 * d, 1, 1}, {out + (c - 1) * d, c, 1},
                 LaneMatrix<const T>{phi + K - d, K / d, 1});
  }

  // Gradients of some rows of coefficients, [net][r][c, d], of all networks of a group, to those of the matrix.
  void coefficients_backward(Range group, int64_t i, int64_t rows, const T* bar, int64_t bar_stride, const T* G,
                             T* phi_bar) const {
    const Shape& s = x.s;
    const int64_t n_0 = s.n_0(), d = s.d, K = s.hidden_columns(i), c = s.columns(i);
    for (int64_t net = 0; net < group.size(); ++net)
      for (int64_t r = 0; r < rows; ++r) {
        const T* from = bar + net * bar_stride + r * c * d;
        add(n_0 * d, from, phi_bar + r * K);
        T* to = phi_bar + r * K + 3 * n_0 * d;
        for (int64_t t = 0; s.share_Wb && t < i - 1; ++t) add(d, from + (n_0 + t) * d, to);
        if (s.share_Wb)
          add(d, from + (c - 1) * d, phi_bar + (r + 1) * K - d);
        else
          add(i * d, from + n_0 * d, to);
      }
    const Networks networks{group.size(), bar_stride, s.connected_size()};
    lane_gemm<T>(d, rows, n_0, n_0, {bar, c, 1}, {G, n_0, 1}, {phi_bar + n_0 * d, K / d, 1}, true, networks);
    lane_gemm<T>(d, rows, n_0, 1, {bar + (c - 1) * d, c, 1}, {G + n_0 * n_0 * d, 1, 1},
                 {phi_bar + 2 * n_0 * d, K / d, 1}, true, networks);
  }

  // G_bar[q', q] += sum_r bar[r, q'] Phi_WW[r, q];  g_bar[q] += sum_r bar[r, last] Phi_bW[r, q]
  void connected_backward(int64_t i, int64_t rows, const T* phi, const T* bar, T* grad) const {
    const Shape& s = x.s;
    const int64_t n_0 = s.n_0(), d = s.d, K = s.hidden_columns(i), c = s.columns(i);
    T* G_bar = grad + x.at.G0[i];
    lane_gemm<T>(d, n_0, n_0, rows, {bar, 1, c}, {phi + n_0 * d, K / d, 1}, {G_bar, n_0, 1}, true);
    lane_gemm<T>(d, 1, n_0, rows, {bar + (c - 1) * d, 1, c}, {phi + 2 * n_0 * d, K / d, 1},
                 {G_bar + n_0 * n_0 * d, 1, 1}, true);
  }

  // Rows of a matrix of coefficients that stay in the second-level cache while the networks of a group meet them one
  // after the other: a multiple of `unit`, 64 at most because products with them transposed follow.
  static int64_t row_block_size(int64_t rows, int64_t columns, int64_t unit) {
    const int64_t fit = std::min<int64_t>(64, (128 << 10) / (columns * static_cast<int64_t>(sizeof(T))));
    return std::min(std::max(rows, unit), std::max<int64_t>(1, fit / unit) * unit);
  }

  // The most rows taken at once of the matrices that a hidden layer's outputs have, of its bias and its weights.
  int64_t hidden_rows(int64_t i) const {
    const int64_t columns = s().hidden_columns(i), n_0 = s().n_0();
    return std::max(row_block_size(s().e, columns, 1), row_block_size(s().e * n_0, columns, n_0));
  }

  // G0_i of the networks of a group.
  T* connected(Range group, int64_t i, const T* saved, int64_t stride, Scratch<T>& scratch) const {
    const int64_t size = s().connected_size();
    T* G = scratch.take(group.size() * size);
    for (int64_t net = group.begin; net < group.end; ++net)
      connect(x, i, saved + net * stride, G + (net - group.begin) * size);
    return G;
  }

  void hidden_forward(Range group, int64_t i, const T* saved, int64_t stride, const LayerOutputs<S, T>& out,
                      Scratch<T> scratch) const {
    const Shape& s = x.s;
    const int64_t n_0 = s.n_0(), n = s.n[i], inner = s.columns(i) * s.d, K = s.hidden_columns(i);
    const Section& a = x.at.A[i];
    const int64_t most = hidden_rows(i);
    T* product = scratch.take(most * n);
    T* transposed = scratch.take(most * n);
    T* coefficient = scratch.take(most * inner);
    const T* G = connected(group, i, saved, stride, scratch);
    const auto blocks = [&](const T* phi, int64_t all, int64_t unit, auto&& store) {
      const int64_t size = row_block_size(all, K, unit);
      for (int64_t row = 0; row < all; row += size) {
        const int64_t rows = std::min(size, all - row);
        for (int64_t net = group.begin; net < group.end; ++net) {
          const T* own = saved + net * stride;
          coefficients(i, rows, phi + row * K, G + (net - group.begin) * s.connected_size(), net == group.begin,
                       coefficient);
          gemm<T>(rows, n, inner, {coefficient, inner, 1}, own + a.offset, a.ld, product, n, false);
          store(net, row, rows);
        }
      }
    };
    blocks(bias_matrix(i), s.e, 1, [&](int64_t net, int64_t row, int64_t rows) {
      (out.bias(i) + (net * s.e + row) * n).store(product, rows * n);
    });
    if (i != 1) return;
    blocks(weight_matrix(1), s.e * n_0, n_0, [&](int64_t net, int64_t row, int64_t rows) {
      for (int64_t r = 0; r < rows; r += n_0) transpose<T>(n_0, n, product + r * n, n, transposed + r * n, n_0);
      (out.weight(1) + (net * s.e * n_0 + row) * n).store(transposed, rows * n);
    });
  }

  // grads: [networks of the group][layout.grad_size].
  void hidden_backward(Range group, int64_t i, const LayerGradients<S, T>& out_bar, const T* saved, int64_t stride,
                       T* grads, T* weight_matrix_bar, T* bias_matrix_bar, Scratch<T> scratch) const {
    const Shape& s = x.s;
    const int64_t n_0 = s.n_0(), n = s.n[i], inner = s.columns(i) * s.d, K = s.hidden_columns(i);
    const Section& a = x.at.A[i];
    T* transposed = scratch.take(group.size() * inner * n);
    for (int64_t net = group.begin; net < group.end; ++net)
      transpose<T>(inner, n, saved + net * stride + a.offset, a.ld, transposed + (net - group.begin) * inner * n,
                   inner);
    const int64_t most = hidden_rows(i);
    T* bar = scratch.take(most * n);
    T* loaded = scratch.take(most * n);
    T* coefficient = scratch.take(most * inner);
    T* coefficient_bar = scratch.take(group.size() * most * inner);
    const T* G = connected(group, i, saved, stride, scratch);
    const auto blocks = [&](const T* phi, T* phi_bar, int64_t all, int64_t unit, auto&& load) {
      const int64_t size = row_block_size(all, K, unit);
      for (int64_t row = 0; row < all; row += size) {
        const int64_t rows = std::min(size, all - row);
        for (int64_t net = group.begin; net < group.end; ++net) {
          const int64_t g = net - group.begin;
          T *grad = grads + g * x.at.grad_size, *own_bar = coefficient_bar + g * size * inner;
          load(net, row, rows);
          coefficients(i, rows, phi + row * K, G + g * s.connected_size(), g == 0, coefficient);
          gemm<T>(rows, inner, n, {bar, n, 1}, transposed + g * inner * n, inner, own_bar, inner, false);
          gemm<T>(inner, n, rows, {coefficient, 1, inner}, bar, n, grad + a.offset, a.ld, true);
          connected_backward(i, rows, phi + row * K, own_bar, grad);
        }
        coefficients_backward(group, i, rows, coefficient_bar, size * inner, G, phi_bar + row * K);
      }
    };
    blocks(bias_matrix(i), bias_matrix_bar, s.e, 1, [&](int64_t net, int64_t row, int64_t rows) {
      load_row(out_bar.bias(i) + (net * s.e + row) * n, rows * n, bar);
    });
    if (i != 1) return;
    blocks(weight_matrix(1), weight_matrix_bar, s.e * n_0, n_0, [&](int64_t net, int64_t row, int64_t rows) {
      load_row(out_bar.weight(1) + (net * s.e * n_0 + row) * n, rows * n, loaded);
      for (int64_t r = 0; r < rows; r += n_0) transpose<T>(n, n_0, loaded + r * n, n_0, bar + r * n, n);
    });
  }

  // --- middle layers: E(W)_i = Phi [W_i; WW; bW], the tiles of WW and bW made on the spot ---

  // [rank][d][n_i], the left factor of [WW], transposed: P, which the chain keeps, or P Psi, made here.
  struct Left {
    const T* data;
    int64_t row_stride, channel_stride;
  };
  Left left_factor(int64_t i, const T* saved, Scratch<T>& scratch) const {
    const Shape& s = x.s;
    const Section& a = x.at.A[i];
    if (!s.through_output()) return {saved + a.offset, a.row_stride, a.channel_stride};
    const int64_t n = s.n[i], pair = s.pair_to_neighbour(i);
    T* U = scratch.take(s.n_L() * s.d * n);
    for (int64_t channel = 0; channel < s.d; ++channel)
      gemm<T>(s.n_L(), n, s.n_0(), x.psi_pq(pair, channel), saved + a.offset + channel * a.channel_stride, a.row_stride,
              U + channel * n, s.d * n, false);
    return {U, s.d * n, n};
  }

  // From the gradient of the left factor in one channel, [j][rank]: P_bar += U_bar Psi^T, Psi_bar += P^T U_bar, or
  // P_bar += U_bar where the left factor is P.
  void left_factor_backward(int64_t i, int64_t channel, const T* left_bar, const T* saved, T* grad, T* psi_bar,
                            Scratch<T> scratch) const {
    const Shape& s = x.s;
    const Section& a = x.at.A[i];
    const int64_t n = s.n[i], n_0 = s.n_0(), n_L = s.n_L(), rank = s.rank(), pair = s.pair_to_neighbour(i);
    T* P_bar = grad + a.offset + channel * a.channel_stride;
    T* transposed = scratch.take(rank * n);
    transpose<T>(n, rank, left_bar, rank, transposed, n);
    if (!s.through_output()) {
      for (int64_t q = 0; q < rank; ++q) add(n, transposed + q * n, P_bar + q * a.row_stride);
      return;
    }
    T* product = scratch.take(n_0 * n_L);
    gemm<T>(n_0, n, n_L, x.psi_qp(pair, channel), transposed, n, P_bar, a.row_stride, true);
    gemm<T>(n_0, n_L, n, {saved + a.offset + channel * a.channel_stride, a.row_stride, 1}, left_bar, n_L, product, n_L,
            false);
    T* pair_bar = psi_bar + pair * (n_0 + 1) * n_L * s.d + channel;
    for (int64_t k = 0; k < n_0 * n_L; ++k) pair_bar[k * s.d] += product[k];
  }

  const Section& right_factor(int64_t i) const { return s().through_output() ? x.at.S[i - 1] : x.at.R[i]; }

  // How many channels before its turn a row of a tile is asked for.
  static constexpr int64_t kRowsAhead = 2;

  template <typename Body>
  void for_tiles(int64_t i, const Tile& tile, Body&& body) const {
    const int64_t n = s().n[i], m = s().n[i - 1];
    for (int64_t j = 0; j < n; j += tile.rows)
      for (int64_t k = 0; k < m; k += tile.columns)
        body(j, k, std::min(tile.rows, n - j), std::min(tile.columns, m - k));
  }

  // Copies rows x columns at (j, k) of every channel of a [channels, n_i, n_(i-1)] array into a tile.
  template <typename From>
  void load_tile(From from, int64_t channels, int64_t i, int64_t j, int64_t k, int64_t rows, int64_t columns, T* to,
                 int64_t ld) const {
    const int64_t n = s().n[i], m = s().n[i - 1];
    for (int64_t channel = 0; channel < channels; ++channel) {
      const From at = from + ((channel * n + j) * m + k);
      if (channel + kRowsAhead < channels) fetch(at + kRowsAhead * n * m, columns == m ? rows * columns : columns);
      if (columns == m)
        load_row(at, rows * columns, to + channel * ld);
      else
        for (int64_t r = 0; r < rows; ++r) load_row(at + r * m, columns, to + channel * ld + r * columns);
    }
  }

  void make_tile(int64_t net, int64_t i, int64_t j, int64_t k, int64_t rows, int64_t columns, const T* saved,
                 const Left& left, T* tile, int64_t ld) const {
    const Shape& s = x.s;
    const Section &right = right_factor(i), &a = x.at.A[i], &r = x.at.R[i];
    load_tile(x.weight(i, net, 0), s.d, i, j, k, rows, columns, tile, ld);
    const T* b = saved + a.offset + (s.columns(i) - 1) * a.row_stride;
    const T* g = saved + r.offset + (r.rows - 1) * r.row_stride;
    for (int64_t channel = 0; channel < s.d; ++channel) {
      const T* l = left.data + channel * left.channel_stride + j;
      const T* from = saved + right.offset + channel * right.channel_stride + k;
      T *WW = tile + (s.d + channel) * ld, *bW = tile + (2 * s.d + channel) * ld;
      if (s.rank() == 1)
        outer(rows, columns, l, from, WW);
      else
        gemm<T>(rows, columns, s.rank(), {l, 1, left.row_stride}, from, right.row_stride, WW, columns, false);
      outer(rows, columns, b + channel * a.ld + j, g + channel * r.ld + k, bW);
    }
  }

  // out (+)= product of a matrix with a tile, rows of the result being channels of a [channels, n_i, n_(i-1)] array.
  void multiply_to(int64_t channels, int64_t inner, Operand<T> matrix, const T* tile, int64_t ld, Destination<S, T> out,
                   int64_t i, int64_t j, int64_t k, int64_t rows, int64_t columns, T* space) const {
    const int64_t n = s().n[i], m = s().n[i - 1];
    out = out + (j * m + k);
    if constexpr (std::is_same_v<S, T>) {
      (void)space;
      T* at = out.before ? out.before : out.value;
      if (columns == m)
        gemm<T>(channels, rows * columns, inner, matrix, tile, ld, at, n * m, false);
      else
        for (int64_t r = 0; r < rows; ++r)
          gemm<T>(channels, columns, inner, matrix, tile + r * columns, ld, at + r * m, n * m, false);
      if (out.f == Activation::none) return;
      const int64_t pieces = columns == m ? 1 : rows, length = rows * columns / pieces;
      for (int64_t channel = 0; channel < channels; ++channel)
        for (int64_t r = 0; r < pieces; ++r) {
          const int64_t offset = channel * n * m + r * m;
          Destination<S, T>{out.value + offset, nullptr, out.f}.store(at + offset, length);
        }
    } else {
      gemm<T>(channels, rows * columns, inner, matrix, tile, ld, space, ld, false);
      for (int64_t channel = 0; channel < channels; ++channel)
        for (int64_t r = 0; r < rows; ++r)
          (out + (channel * n * m + r * m)).store(space + channel * ld + r * columns, columns);
    }
  }

  void middle_forward(int64_t net, int64_t i, const T* saved, Destination<S, T> W_out, Scratch<T> scratch) const {
    const Shape& s = x.s;
    if (s.n_L() == 1) return single_output_forward(net, i, saved, W_out, scratch);
    const Tile tile(s, i, sizeof(T));
    const int64_t ld = tile.ld();
    T* data = scratch.take(3 * s.d * ld);
    T* space = scratch.take(s.e * ld);
    const auto out = W_out + net * s.e * s.n[i] * s.n[i - 1];
    const Left left = left_factor(i, saved, scratch);
    for_tiles(i, tile, [&](int64_t j, int64_t k, int64_t rows, int64_t columns) {
      make_tile(net, i, j, k, rows, columns, saved, left, data, ld);
      multiply_to(s.e, 3 * s.d, {weight_matrix(i), 3 * s.d, 1}, data, ld, out, i, j, k, rows, columns, space);
    });
  }

  // matrix_bar is accumulated transposed, [3 d][e], unless n_L = 1.
  void middle_backward(int64_t net, int64_t i, Incoming<S, T> out_bar, const T* saved, T* grad, S* W_bar, T* matrix_bar,
                       T* psi_bar, Scratch<T> scratch) const {
    const Shape& s = x.s;
    if (s.n_L() == 1) return single_output_backward(net, i, out_bar, saved, grad, W_bar, matrix_bar, psi_bar, scratch);
    const Tile tile(s, i, sizeof(T));
    const int64_t ld = tile.ld(), n = s.n[i], m = s.n[i - 1], d = s.d, rank = s.rank();
    const Section &right = right_factor(i), &a = x.at.A[i], &r = x.at.R[i];
    const Left left = left_factor(i, saved, scratch);
    T* data = scratch.take(3 * d * ld);
    T* data_bar = scratch.take(2 * d * ld);
    T* bar = scratch.take(s.e * ld);
    T* transposed = scratch.take(kTransposedBlock);
    T* space = scratch.take(d * ld);
    T* left_bar = scratch.take(d * rank * n);  // [d][j][rank]
    std::fill(left_bar, left_bar + d * rank * n, T(0));
    const int64_t b_row = a.offset + (s.columns(i) - 1) * a.row_stride, g_row = r.offset + (r.rows - 1) * r.row_stride;
    T* phi_transposed = scratch.take(3 * d * s.e);
    transpose<T>(s.e, 3 * d, weight_matrix(i), 3 * d, phi_transposed, s.e);
    const Destination<S, T> W_bar_net{W_bar + net * d * n * m, nullptr, Activation::none};
    for_tiles(i, tile, [&](int64_t j, int64_t k, int64_t rows, int64_t columns) {
      const int64_t size = rows * columns;
      load_tile(out_bar + net * s.e * n * m, s.e, i, j, k, rows, columns, bar, ld);
      make_tile(net, i, j, k, rows, columns, saved, left, data, ld);
      gemm_transposed<T>(3 * d, s.e, size, data, ld, bar, ld, matrix_bar, s.e, true, transposed);
      multiply_to(d, s.e, {phi_transposed, s.e, 1}, bar, ld, W_bar_net, i, j, k, rows, columns, space);
      gemm<T>(2 * d, size, s.e, {phi_transposed + d * s.e, s.e, 1}, bar, ld, data_bar, ld, false);
      for (int64_t channel = 0; channel < d; ++channel) {
        const T *WW_bar = data_bar + channel * ld, *bW_bar = data_bar + (d + channel) * ld;
        const T* factor = saved + right.offset + channel * right.channel_stride + k;
        T* factor_bar = grad + right.offset + channel * right.channel_stride + k;
        T* own_left_bar = left_bar + (channel * n + j) * rank;
        if (rank == 1) {
          outer_backward(rows, columns, left.data + channel * left.channel_stride + j, factor, WW_bar, own_left_bar,
                         factor_bar);
        } else {
          gemm<T>(rank, columns, rows, {left.data + channel * left.channel_stride + j, left.row_stride, 1}, WW_bar,
                  columns, factor_bar, right.row_stride, true);
          gemm_dot<T>(rows, rank, columns, WW_bar, columns, factor, right.row_stride, own_left_bar, rank, true);
        }
        const int64_t b_at = b_row + channel * a.ld + j, g_at = g_row + channel * r.ld + k;
        outer_backward(rows, columns, saved + b_at, saved + g_at, bW_bar, grad + b_at, grad + g_at);
      }
    });
    for (int64_t channel = 0; channel < d; ++channel)
      left_factor_backward(i, channel, left_bar + channel * n * rank, saved, grad, psi_bar, scratch);
  }

  // --- middle layers of networks with one output: [WW] and [bW] have the same right factor, the row S, so that
  //     E(W)_i[:, j, :] = Phi_1 W[:, j, :] + (Phi_2 u_j + Phi_3 v_j) S,  u = P Psi, v = b psi, one number a channel ---

  // u and v with channels innermost, [j][d].
  void left_factors(int64_t i, const T* saved, T* u, T* v, Scratch<T> scratch) const {
    const Shape& s = x.s;
    const Section& a = x.at.A[i];
    const T* psi = x.connection(s.pair_to_neighbour(i)) + s.n_0() * s.d;
    transpose<T>(s.d, s.n[i], left_factor(i, saved, scratch).data, s.n[i], u, s.d);
    transpose<T>(s.d, s.n[i], saved + a.offset + (s.columns(i) - 1) * a.row_stride, a.ld, v, s.d);
    for (int64_t j = 0; j < s.n[i]; ++j)
      for_lanes<T>(s.d, [&](int64_t k, auto count) {
        T* at = v + j * s.d + k;
        store_lanes(at, load_lanes(at, count) * load_lanes(psi + k, count), count);
      });
  }

  // Rows j that meet Phi_1 together.
  int64_t single_output_rows(int64_t i) const { return std::min(s().n[i], std::max<int64_t>(1, 128 / s().n[i - 1])); }

  // mixed = Phi_2 u_j + Phi_3 v_j, [e][d].
  void mix(const T* phi, const T* u, const T* v, T* mixed, int64_t ld) const {
    const int64_t d = s().d;
    for (int64_t e = 0; e < s().e; ++e)
      for_lanes<T>(d, [&](int64_t k, auto count) {
        const T* row = phi + e * 3 * d + k;
        store_lanes(mixed + e * ld + k,
                    load_lanes(row + d, count) * load_lanes(u + k, count) +
                        load_lanes(row + 2 * d, count) * load_lanes(v + k, count),
                    count);
      });
  }

  void single_output_forward(int64_t net, int64_t i, const T* saved, Destination<S, T> W_out,
                             Scratch<T> scratch) const {
    const Shape& s = x.s;
    const int64_t d = s.d, n = s.n[i], m = s.n[i - 1], step = single_output_rows(i), ld = step * m + 16;
    const Section& S_t = x.at.S[i - 1];
    const T* phi = weight_matrix(i);
    T* u = scratch.take(n * d);
    T* v = scratch.take(n * d);
    T* mixed = scratch.take(s.e * d);
    T* data = scratch.take(d * ld);
    T* product = scratch.take(s.e * ld);
    left_factors(i, saved, u, v, scratch);
    const bool large = s.B * s.e * n * m * static_cast<int64_t>(sizeof(S)) >= kStreamedBytes;
    for (int64_t first = 0; first < n; first += step) {
      const int64_t rows = std::min(step, n - first);
      load_tile(x.weight(i, net, 0), d, i, first, 0, rows, m, data, ld);
      gemm<T>(s.e, rows * m, d, {phi, 3 * d, 1}, data, ld, product, ld, false);
      for (int64_t j = first; j < first + rows; ++j) {
        mix(phi, u + j * d, v + j * d, mixed, d);
        gemm<T>(s.e, m, d, {mixed, d, 1}, saved + S_t.offset, S_t.ld, product + (j - first) * m, ld, true);
      }
      for (int64_t e = 0; e < s.e; ++e)
        store(W_out + ((net * s.e + e) * n + first) * m, product + e * ld, rows * m, large);
    }
    if (large) finish_streams();
  }

  // `from` is overwritten.
  static void store(Destination<S, T> to, T* from, int64_t count, bool large) {
    if constexpr (std::is_same_v<S, T>)
      if (large) {
        if (to.before) stream_row(from, count, to.before);
        if (to.f != Activation::none) Destination<T, T>{from, nullptr, to.f}.store(from, count);
        return stream_row(from, count, to.value);
      }
    to.store(from, count);
  }

  // For a few rows e of Phi and a few rows j: the gradient of Phi_2 u_j + Phi_3 v_j, [j][e][d], and from it those of
  // Phi_2, Phi_3, u and v while all of them are at hand.
  void mixed_backward(int64_t E, int64_t rows, int64_t m, Operand<T> bar, const T* S_transposed, const T* phi,
                      T* phi_bar, const T* u, const T* v, T* u_bar, T* v_bar, T* mixed_bar) const {
    using Vec = typename Simd<T>::Vec;
    const int64_t d = s().d;
    for (int64_t j = 0; j < rows; ++j)
      gemm<T>(E, d, m, {bar.data + j * m, bar.row_stride, 1}, S_transposed, d, mixed_bar + j * E * d, d, false);
    for (int64_t j = 0; j < rows; j += 2) {
      const bool pair = j + 1 < rows;
      const T *first = mixed_bar + j * E * d, *second = pair ? first + E * d : first;
      for_lanes<T>(d, [&](int64_t k, auto count) {
        const int64_t at = j * d + k, next = pair ? at + d : at;
        const Vec none{}, u_0 = load_lanes(u + at, count), v_0 = load_lanes(v + at, count);
        const Vec u_1 = pair ? load_lanes(u + next, count) : none, v_1 = pair ? load_lanes(v + next, count) : none;
        Vec u_0_bar = load_lanes(u_bar + at, count), v_0_bar = load_lanes(v_bar + at, count);
        Vec u_1_bar = none, v_1_bar = none;
        if (pair) u_1_bar = load_lanes(u_bar + next, count), v_1_bar = load_lanes(v_bar + next, count);
        for (int64_t e = 0; e < E; ++e) {
          const T* row = phi + e * 3 * d + k;
          T* to = phi_bar + e * 3 * d + k;
          const Vec g_0 = load_lanes(first + e * d + k, count), g_1 = load_lanes(second + e * d + k, count);
          const Vec phi_2 = load_lanes(row + d, count), phi_3 = load_lanes(row + 2 * d, count);
          u_0_bar += g_0 * phi_2;
          v_0_bar += g_0 * phi_3;
          u_1_bar += g_1 * phi_2;
          v_1_bar += g_1 * phi_3;
          store_lanes(to + d, load_lanes(to + d, count) + g_0 * u_0 + g_1 * u_1, count);
          store_lanes(to + 2 * d, load_lanes(to + 2 * d, count) + g_0 * v_0 + g_1 * v_1, count);
        }
        store_lanes(u_bar + at, u_0_bar, count);
        store_lanes(v_bar + at, v_0_bar, count);
        if (pair) store_lanes(u_bar + next, u_1_bar, count), store_lanes(v_bar + next, v_1_bar, count);
      });
    }
  }

  // matrix_bar is accumulated as it is stored, [e][3 d].
  void single_output_backward(int64_t net, int64_t i, Incoming<S, T> out_bar, const T* saved, T* grad, S* W_bar,
                              T* matrix_bar, T* psi_bar, Scratch<T> scratch) const {
    const Shape& s = x.s;
    const int64_t d = s.d, n = s.n[i], m = s.n[i - 1], E = s.e, step = single_output_rows(i), ld = step * m + 16;
    const Section &S_t = x.at.S[i - 1], &a = x.at.A[i];
    const T* phi = weight_matrix(i);
    T* u = scratch.take(n * d);
    T* v = scratch.take(n * d);
    T* u_bar = scratch.take(n * d);
    T* v_bar = scratch.take(n * d);
    T* phi_transposed = scratch.take(d * E);
    const int64_t ld_mixed = d + 16;  // read transposed: a column should not fall into few cache sets
    T* mixed = scratch.take(E * ld_mixed);
    constexpr int64_t kBlock = 2 * kMaxRows;
    T* mixed_bar = scratch.take(step * kBlock * d);
    T* data = scratch.take(d * ld);
    T* data_transposed = scratch.take(d * ld);
    T* S_transposed = scratch.take(m * d);
    T* bar = scratch.take(E * ld);
    T* space = scratch.take(d * ld);
    const Destination<S, T> W_bar_net{W_bar + net * d * n * m, nullptr, Activation::none};
    left_factors(i, saved, u, v, scratch);
    std::fill(u_bar, u_bar + n * d, T(0));
    std::fill(v_bar, v_bar + n * d, T(0));
    transpose<T>(E, d, phi, 3 * d, phi_transposed, E);
    transpose<T>(d, m, saved + S_t.offset, S_t.ld, S_transposed, d);
    for (int64_t first = 0; first < n; first += step) {
      const int64_t rows = std::min(step, n - first);
      load_tile(x.weight(i, net, 0), d, i, first, 0, rows, m, data, ld);
      load_tile(out_bar + net * E * n * m, E, i, first, 0, rows, m, bar, ld);
      transpose<T>(d, rows * m, data, ld, data_transposed, d);
      gemm<T>(E, d, rows * m, {bar, ld, 1}, data_transposed, d, matrix_bar, 3 * d, true);
      multiply_to(d, E, {phi_transposed, E, 1}, bar, ld, W_bar_net, i, first, 0, rows, m, space);
      for (int64_t j = first; j < first + rows; ++j) {
        const T* bar_j = bar + (j - first) * m;
        mix(phi, u + j * d, v + j * d, mixed, ld_mixed);
        gemm<T>(d, m, E, {mixed, 1, ld_mixed}, bar_j, ld, grad + S_t.offset, S_t.ld, true);
      }
      for (int64_t e = 0; e < E; e += kBlock)
        mixed_backward(std::min(kBlock, E - e), rows, m, {bar + e * ld, ld, 1}, S_transposed, phi + e * 3 * d,
                       matrix_bar + e * 3 * d, u + first * d, v + first * d, u_bar + first * d, v_bar + first * d,
                       mixed_bar);
    }
    // u is P Psi; v = b psi.
    const int64_t pair = s.pair_to_neighbour(i), b_row = a.offset + (s.columns(i) - 1) * a.row_stride;
    const T* psi = x.connection(pair) + s.n_0() * d;
    T* last_bar = psi_bar + (pair * (s.n_0() + 1) + s.n_0()) * d;
    T* U_bar = scratch.take(n * d);
    transpose<T>(n, d, u_bar, d, U_bar, n);
    for (int64_t channel = 0; channel < d; ++channel) {
      left_factor_backward(i, channel, U_bar + channel * n, saved, grad, psi_bar, scratch);
      for (int64_t j = 0; j < n; ++j) {
        grad[b_row + channel * a.ld + j] += v_bar[j * d + channel] * psi[channel];
        last_bar[channel] += v_bar[j * d + channel] * saved[b_row + channel * a.ld + j];
      }
    }
  }

  // --- the last layer: E(W)_L = Phi_1 W_L + Y [Psi; psi] W_L with Y = [Phi_2 P_L | Phi_3 b_L], from the small side ---

  // Y = [Phi_2 P_L | Phi_3 b_L] of a group for some rows of the matrix, [row][q][d] of each network.
  void last_left(Range group, int64_t rows, const T* matrix, const T* saved, int64_t stride, T* Y,
                 int64_t Y_stride) const {
    const Shape& s = x.s;
    const int64_t n_0 = s.n_0(), n_L = s.n_L(), d = s.d;
    const T* first = saved + group.begin * stride;
    lane_gemm_each<T>(group.size(), stride, Y_stride, d, rows, n_0, n_L, {matrix + n_L * d, 3 * n_L, 1},
                      {first + x.at.PL, n_0, 1}, {Y, n_0 + 1, 1}, false);
    lane_gemm_each<T>(group.size(), stride, Y_stride, d, rows, 1, n_L, {matrix + 2 * n_L * d, 3 * n_L, 1},
                      {last_bias(first), 1, 1}, {Y + n_0 * d, n_0 + 1, 1}, false);
  }
  // b_L with channels innermost, [p][d]: a block of the network's features, which follow `saved` in memory.
  const T* last_bias(const T* saved) const { return saved + x.at.size + Features(s()).b; }

  // Into how many parts threads divide the last layer by the rows of its matrices, or 0 where they divide it by
  // networks. By rows, each thread reads, and sums the gradients of, its own rows only, but adds to the gradients of
  // all networks: worth it where those of all parts take less memory than sums of the whole matrix for all threads but
  // the first.
  int64_t last_row_parts() const {
    const Shape& s = x.s;
    const int64_t parts = readout_parts(s.B, s.e * s.n_L(), s.readout_columns(), parallel.threads);
    const bool by_rows =
        s.B > 0 && parts > 1 && parts * s.B * last_sums_size() < (parts - 1) * 3 * s.e * s.n_L() * s.n_L() * s.d;
    return by_rows ? parts : 0;
  }

  void last_forward(Range group, Range range, const T* saved, int64_t stride, Destination<S, T> W_out,
                    Scratch<T> scratch) const {
    const Shape& s = x.s;
    const int64_t L = s.L(), n_L = s.n_L(), d = s.d, m = s.n[L - 1], all = s.e * n_L, inner = d * (s.n_0() + 1);
    const int64_t K = 3 * n_L * d, size = even_block_size(range.size(), row_block_size(all, K, 1));
    const Section &S_t = x.at.S[L - 1], &right = x.at.R[L];
    T* Y = scratch.take(group.size() * size * inner);
    T* product = scratch.take(size * m);
    for (int64_t row = range.begin; row < range.end; row += size) {
      const int64_t rows = std::min(size, range.end - row);
      const T* matrix = weight_matrix(L) + row * K;
      last_left(group, rows, matrix, saved, stride, Y, size * inner);
      for (int64_t net = group.begin; net < group.end; ++net) {
        const T *own = saved + net * stride, *own_Y = Y + (net - group.begin) * size * inner;
        gemm<T>(rows, m, n_L * d, {matrix, K, 1}, own + S_t.offset, S_t.ld, product, m, false);
        gemm<T>(rows, m, inner, {own_Y, inner, 1}, own + right.offset, right.ld, product, m, true);
        (W_out + (net * all + row) * m).store(product, rows * m);
      }
    }
  }

  // Where the last layer's weights add to the gradients of S_(L-1), R_L and P_L of a network; those of the next one are
  // `stride` numbers further.
  struct LastSums {
    T *suffix, *right, *PL;
    int64_t stride;
  };
  int64_t last_sums_size() const {
    const Shape& s = x.s;
    return whole_lines(s.d * ((s.n_L() + s.n_0() + 1) * s.n[s.L() - 1] + s.n_L() * s.n_0()));
  }
  // In memory of their own, [net][last_sums_size].
  LastSums last_sums(int64_t net, T* memory) const {
    const Shape& s = x.s;
    const int64_t size = last_sums_size(), m = s.n[s.L() - 1];
    T *suffix = memory + net * size, *right = suffix + s.n_L() * s.d * m;
    return {suffix, right, right + (s.n_0() + 1) * s.d * m, size};
  }
  // Within the gradients of everything kept, [net][layout.grad_size].
  LastSums last_sums_in(T* grads) const {
    const int64_t L = s().L();
    return {grads + x.at.S[L - 1].offset, grads + x.at.R[L].offset, grads + x.at.PL, x.at.grad_size};
  }
  void add_last_sums(const LastSums& from, const LastSums& to) const {
    const Shape& s = x.s;
    const int64_t m = s.n[s.L() - 1];
    add(s.n_L() * s.d * m, from.suffix, to.suffix);
    add((s.n_0() + 1) * s.d * m, from.right, to.right);
    add(s.n_L() * s.n_0() * s.d, from.PL, to.PL);
  }

  // Some rows of matrix_bar are added to, or with `write` written for the first time; `sums` likewise with
  // `write_sums`. What is added to the gradient of b_L is added to those of the features of the group, F_bar.
  void last_backward(Range group, Range range, Incoming<S, T> out_bar, const T* saved, int64_t stride,
                     const LastSums& sums, bool write_sums, T* F_bar, T* matrix_bar, bool write,
                     Scratch<T> scratch) const {
    const Shape& s = x.s;
    const int64_t L = s.L(), n_0 = s.n_0(), n_L = s.n_L(), d = s.d, m = s.n[L - 1], all = s.e * n_L;
    const int64_t inner = d * (n_0 + 1), K = 3 * n_L * d;
    const int64_t size = even_block_size(range.size(), row_block_size(all, K, 1));
    const Section &S_t = x.at.S[L - 1], &right = x.at.R[L];
    const int64_t nets = group.size(), ld = nets * m;
    T* Y = scratch.take(nets * size * inner);
    T* Y_bar = scratch.take(nets * size * inner);
    T* bar = scratch.take(size * ld);  // [row][net][k]: one long sum over networks and k for Phi_1
    T* W_transposed = scratch.take(nets * n_L * d * m);
    T* right_transposed = scratch.take(nets * inner * m);
    for (int64_t g = 0; g < nets; ++g) {
      const T* own = saved + (group.begin + g) * stride;
      transpose<T>(n_L * d, m, own + S_t.offset, S_t.ld, W_transposed + g * n_L * d * m, n_L * d);
      transpose<T>(inner, m, own + right.offset, right.ld, right_transposed + g * inner * m, inner);
    }
    for (int64_t row = range.begin; row < range.end; row += size) {
      const int64_t rows = std::min(size, range.end - row);
      const bool sum = !write_sums || row > range.begin;
      const T* matrix = weight_matrix(L) + row * K;
      T* to = matrix_bar + row * K;
      last_left(group, rows, matrix, saved, stride, Y, size * inner);
      for (int64_t g = 0; g < nets; ++g) {
        const int64_t net = group.begin + g;
        T *own_bar = bar + g * m, *own_Y_bar = Y_bar + g * size * inner;
        for (int64_t r = 0; r < rows; ++r) load_row(out_bar + (net * all + row + r) * m, m, own_bar + r * ld);
        gemm<T>(n_L * d, m, rows, {matrix, 1, K}, own_bar, ld, sums.suffix + g * sums.stride, S_t.ld, sum);
        gemm<T>(rows, inner, m, {own_bar, ld, 1}, right_transposed + g * inner * m, inner, own_Y_bar, inner, false);
        gemm<T>(inner, m, rows, {Y + g * size * inner, 1, inner}, own_bar, ld, sums.right + g * sums.stride, right.ld,
                sum);
      }
      // P_bar[p, q] += sum_r Phi_2[r, p] Y_bar[r, q], and likewise b_L
      lane_gemm_each<T>(nets, size * inner, sums.stride, d, n_L, n_0, rows, {matrix + n_L * d, 1, 3 * n_L},
                        {Y_bar, n_0 + 1, 1}, {sums.PL, n_0, 1}, sum);
      lane_gemm_each<T>(nets, size * inner, s.readout_columns(), d, n_L, 1, rows, {matrix + 2 * n_L * d, 1, 3 * n_L},
                        {Y_bar + n_0 * d, n_0 + 1, 1}, {F_bar + Features(s).b, 1, 1}, true);
      // Phi_1_bar += bar W^T;  Phi_2_bar[r, p] += sum_q Y_bar[r, q] P[p, q];  Phi_3_bar[r, p] += Y_bar[r, n_0] b[p]
      gemm<T>(rows, n_L * d, ld, {bar, ld, 1}, W_transposed, n_L * d, to, K, !write);
      const T* own = saved + group.begin * stride;
      const Networks networks{nets, size * inner, stride};
      lane_gemm<T>(d, rows, n_L, n_0, {Y_bar, n_0 + 1, 1}, {own + x.at.PL, 1, n_0}, {to + n_L * d, 3 * n_L, 1}, !write,
                   networks);
      lane_gemm<T>(d, rows, n_L, 1, {Y_bar + n_0 * d, n_0 + 1, 1}, {last_bias(own), 1, 1},
                   {to + 2 * n_L * d, 3 * n_L, 1}, !write, networks);
    }
  }
};

// Where the gradients of the parameters are summed: the first chunk of networks in the results themselves, each other
// one in memory of its own, added in order at the end. The last bias is summed over networks by one product of its own.
// Weights of middle layers are summed transposed unless n_L = 1, so those have memory of their own in every chunk.
template <typename T>
struct Sums {
  std::vector<T*> matrices;  // weight_1, bias_1, ..., weight_L
  T* psi;
};

struct Accumulator {
  const Shape& s;
  std::vector<int64_t> counts, offsets;  // of weight_1, bias_1, ..., weight_L, psi, in the memory of a chunk
  std::vector<int64_t> first_offsets;    // of what the first chunk does not sum in the results
  int64_t size = 0, first_size = 0;

  // Without weight_L where threads divide it by rows.
  Accumulator(const Shape& s, bool last_by_rows) : s(s) {
    const int64_t last = last_by_rows ? 0 : s.e * s.n_L() * 3 * s.n_L() * s.d;
    for (int64_t i = 1; i <= s.L(); ++i) {
      counts.push_back(i == 1 ? s.e * s.n_0() * s.hidden_columns(1) : i == s.L() ? last : s.e * 3 * s.d);
      counts.push_back(i < s.L() ? s.e * s.hidden_columns(i) : s.psi_size());
    }
    for (size_t k = 0; k < counts.size(); ++k) {
      offsets.push_back(size);
      size += counts[k];
      first_offsets.push_back(first_size);
      if (transposed(static_cast<int64_t>(k))) first_size += counts[k];
    }
  }
  bool transposed(int64_t k) const { return k % 2 == 0 && 0 < k && k < 2 * s.L() - 2 && s.n_L() > 1; }
  int64_t memory(int64_t chunks) const { return first_size + (chunks - 1) * size; }

  // All but weight_L is cleared; that too if `clear_last`.
  template <typename T>
  Sums<T> of(int64_t chunk, T* memory, T* const* matrices, T* psi, bool clear_last) const {
    Sums<T> sums;
    for (size_t k = 0; k < counts.size(); ++k) {
      T* at = chunk > 0                             ? memory + first_size + (chunk - 1) * size + offsets[k]
              : transposed(static_cast<int64_t>(k)) ? memory + first_offsets[k]
              : k + 1 == counts.size()              ? psi
                                                    : matrices[k];
      if (k + 2 != counts.size() || clear_last) std::fill(at, at + counts[k], T(0));
      if (k + 1 == counts.size())
        sums.psi = at;
      else
        sums.matrices.push_back(at);
    }
    return sums;
  }
};

// saved: [B][layout.stride], the intermediates of each network followed by its features.
template <typename S, typename T>
void equivariant_forward(const Shape& s, const S* const* W, const S* const* b, const T* const* matrices, const T* psi,
                         const Outputs<S>& outputs, T* saved, const Parallel& parallel) {
  const Layout at(s, Operation::equivariant);
  const EquivariantCall<S, T> call{{s, at, W, b, psi}, matrices, parallel};
  const LayerOutputs<S, T> out{outputs};
  const int64_t L = s.L(), K = s.readout_columns(), stride = at.stride, need = call.scratch_size();
  const int64_t rows = s.e * s.n_L();
  const int64_t row_parts = call.last_row_parts();
  const auto chain = [&](int64_t net, int64_t channel, Scratch<T> scratch) {
    chain_forward(call.x, net, channel, true, saved + net * stride, scratch);
  };
  const auto layer = [&](Range group, int64_t i, Scratch<T> scratch) {
    for (int64_t net = group.begin; net < group.end; ++net) {
      T* own = saved + net * stride;
      if (i == L) {
        connect(call.x, L, own, own + at.G0[L]);
        features(call.x, own);
      }
      if (1 < i && i < L) call.middle_forward(net, i, own, out.weight(i), scratch);
    }
    if (i < L)
      call.hidden_forward(group, i, saved, stride, out, scratch);
    else if (row_parts == 0)
      call.last_forward(group, {0, rows}, saved, stride, out.weight(L), scratch);
  };
  if (s.B >= parallel.threads) {
    parallel.split(s.B, [&](int64_t, int64_t begin, int64_t end) {
      Scratch<T> scratch = Scratch<T>::begin(need);
      for_groups({begin, end}, call.group_size(), [&](Range group) {
        for (int64_t net = group.begin; net < group.end; ++net)
          for (int64_t channel = 0; channel < s.d; ++channel) chain(net, channel, scratch);
        for (int64_t i = 1; i <= L; ++i) layer(group, i, scratch);
      });
    });
  } else {
    parallel.split(s.B * s.d, [&](int64_t, int64_t begin, int64_t end) {
      Scratch<T> scratch = Scratch<T>::begin(need);
      for (int64_t task = begin; task < end; ++task) chain(task / s.d, task % s.d, scratch);
    });
    parallel.split(s.B * L, [&](int64_t, int64_t begin, int64_t end) {
      Scratch<T> scratch = Scratch<T>::begin(need);
      for (int64_t task = begin; task < end; ++task) layer({task / L, task / L + 1}, task % L + 1, scratch);
    });
  }
  const T *readout_matrix = matrices[2 * L - 1], *F = saved + at.size;
  if (row_parts == 0) return readout(s.B, rows, K, readout_matrix, F, stride, out.bias(L), parallel);
  parallel.run(row_parts, [&](int64_t part) {
    const Range range = Range::part(rows, part, row_parts);
    readout_rows(s.B, rows, range, K, readout_matrix, F, stride, out.bias(L));
    for_groups({0, s.B}, call.group_size(), [&](Range group) {
      call.last_forward(group, range, saved, stride, out.weight(L), Scratch<T>::begin(need));
    });
  });
}

template <typename S, typename T>
void equivariant_backward(const Shape& s, const OutputGradients<S>& gradients, const S* const* W, const S* const* b,
                          const T* const* matrices, const T* psi, const T* saved, S* const* W_bar, S* const* b_bar,
                          T* const* matrices_bar, T* psi_bar, const Parallel& parallel) {
  const Layout at(s, Operation::equivariant);
  const EquivariantCall<S, T> call{{s, at, W, b, psi}, matrices, parallel};
  const LayerGradients<S, T> out_bar{gradients};
  const int64_t row_parts = call.last_row_parts();
  const Accumulator accumulator(s, row_parts > 0);
  const int64_t L = s.L(), d = s.d, K = s.readout_columns(), stride = at.stride, rows = s.e * s.n_L();
  const int64_t need = call.scratch_size();
  const bool by_network = s.B >= parallel.threads;
  const int64_t chunks = parallel.chunks(by_network ? s.B : s.B * std::max(L, d));
  const int64_t group_size = by_network ? call.group_size() : 1, slots = by_network ? chunks * group_size : s.B;
  const int64_t parts = readout_parts(s.B, rows, K, parallel.threads), last_size = call.last_sums_size();
  thread_local std::vector<T> memory;
  const int64_t sums_size = whole_lines(accumulator.memory(chunks)), grads_size = slots * at.grad_size;
  const int64_t bar_size = whole_lines(s.B * rows), F_bar_size = whole_lines(parts * s.B * K);
  T* accumulators = at_least(sums_size + grads_size + bar_size + F_bar_size + row_parts * s.B * last_size, memory);
  T *grads = accumulators + sums_size, *bar = grads + grads_size, *F_bar = bar + bar_size;
  T* last_bars = F_bar + F_bar_size;

  // The last layer's bias, and by rows its weights too: each part of the rows sums gradients of all networks by itself.
  load_row(out_bar.bias(L), s.B * rows, bar);
  const T *readout_matrix = matrices[2 * L - 1], *F = saved + at.size;
  T *readout_bar = matrices_bar[2 * L - 1], *weight_L_bar = matrices_bar[2 * L - 2];
  if (row_parts == 0)
    readout_backward(s.B, rows, K, readout_matrix, F, stride, bar, F_bar, readout_bar, parallel);
  else
    parallel.run(row_parts, [&](int64_t part) {
      const Range range = Range::part(rows, part, row_parts);
      T *own_F_bar = F_bar + part * s.B * K, *own_bars = last_bars + part * s.B * last_size;
      readout_rows_backward(s.B, rows, range, {0, K}, K, readout_matrix, F, stride, bar, own_F_bar, readout_bar);
      for_groups({0, s.B}, call.group_size(), [&](Range group) {
        call.last_backward(group, range, out_bar.weight(L), saved, stride, call.last_sums(group.begin, own_bars), true,
                           own_F_bar + group.begin * K, weight_L_bar, group.begin == 0, Scratch<T>::begin(need));
      });
    });

  std::vector<Sums<T>> sums(chunks);
  const auto clear = [&](int64_t chunk) {
    sums[chunk] = accumulator.of(chunk, accumulators, matrices_bar, psi_bar, !by_network);
  };
  const auto layer = [&](Range group, int64_t i, T* group_grads, const Sums<T>& sum, bool write_last,
                         Scratch<T> scratch) {
    if (i < L) {
      call.hidden_backward(group, i, out_bar, saved, stride, group_grads, sum.matrices[0], sum.matrices[2 * i - 1],
                           scratch);
      return;
    }
    for (int64_t net = group.begin; net < group.end; ++net) sum_parts(parts, s.B, K, net, F_bar);
    if (row_parts == 0)
      call.last_backward(group, {0, rows}, out_bar.weight(L), saved, stride, call.last_sums_in(group_grads), false,
                         F_bar + group.begin * K, sum.matrices[2 * L - 2], write_last, scratch);
    for (int64_t net = group.begin; net < group.end; ++net) {
      T* grad = group_grads + (net - group.begin) * at.grad_size;
      for (int64_t part = 0; part < row_parts; ++part)
        call.add_last_sums(call.last_sums(net, last_bars + part * s.B * last_size), call.last_sums_in(grad));
      features_backward(call.x, saved + net * stride, F_bar + net * K, grad, sum.psi, scratch);
    }
  };
  const auto middle = [&](int64_t net, int64_t i, T* grad, const Sums<T>& sum, Scratch<T> scratch) {
    if (1 < i && i < L)
      call.middle_backward(net, i, out_bar.weight(i), saved + net * stride, grad, W_bar[i - 1], sum.matrices[2 * i - 2],
                           sum.psi, scratch);
  };
  const auto connections = [&](int64_t net, T* grad, const Sums<T>& sum) {
    for (int64_t i = 1; i <= L; ++i) connect_backward(call.x, i, saved + net * stride, grad, sum.psi);
  };
  const auto chain = [&](int64_t net, int64_t channel, T* grad, const Sums<T>& sum, Scratch<T> scratch) {
    // Only middle layers have a direct gradient in W_bar; the last layer's is in that of S_(L-1).
    chain_backward(call.x, net, channel, true, saved + net * stride, grad, sum.psi, W_bar, b_bar, WeightGradients::add,
                   scratch);
  };
  if (by_network) {
    parallel.split(s.B, [&](int64_t chunk, int64_t begin, int64_t end) {
      Scratch<T> scratch = Scratch<T>::begin(need);
      clear(chunk);
      const Sums<T>& sum = sums[chunk];
      T* own_grads = grads + chunk * group_size * at.grad_size;
      for_groups({begin, end}, group_size, [&](Range group) {
        std::fill(own_grads, own_grads + group.size() * at.grad_size, T(0));
        for (int64_t i = 1; i <= L; ++i) layer(group, i, own_grads, sum, group.begin == begin, scratch);
        for (int64_t net = group.begin; net < group.end; ++net) {
          T* grad = own_grads + (net - group.begin) * at.grad_size;
          for (int64_t i = 2; i < L; ++i) middle(net, i, grad, sum, scratch);
          connections(net, grad, sum);
          for (int64_t channel = 0; channel < d; ++channel) chain(net, channel, grad, sum, scratch);
        }
      });
    });
  } else {
    for (int64_t chunk = 0; chunk < chunks; ++chunk) clear(chunk);
    std::fill(grads, bar, T(0));
    parallel.split(s.B * L, [&](int64_t chunk, int64_t begin, int64_t end) {
      Scratch<T> scratch = Scratch<T>::begin(need);
      for (int64_t task = begin; task < end; ++task) {
        const int64_t net = task / L, i = task % L + 1;
        layer({net, net + 1}, i, grads + net * at.grad_size, sums[chunk], false, scratch);
        middle(net, i, grads + net * at.grad_size, sums[chunk], scratch);
      }
    });
    for (int64_t net = 0; net < s.B; ++net) connections(net, grads + net * at.grad_size, sums[0]);
    parallel.split(s.B * d, [&](int64_t chunk, int64_t begin, int64_t end) {
      Scratch<T> scratch = Scratch<T>::begin(need);
      for (int64_t task = begin; task < end; ++task)
        chain(task / d, task % d, grads + task / d * at.grad_size, sums[chunk], scratch);
    });
  }

  // Sum over chunks, in their order; each thread takes a share of every array, unless they are small.
  const int64_t shares = accumulator.size > (1 << 15) ? parallel.threads : 1;
  parallel.split(shares, [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t k = 0; k < 2 * L; ++k) {
      const auto at_k = [&](int64_t chunk) { return k == 2 * L - 1 ? sums[chunk].psi : sums[chunk].matrices[k]; };
      const int64_t count = accumulator.counts[k], lines = whole_lines(count) / kLine;
      const int64_t first = lines * begin / shares * 16;
      const int64_t last = std::min(count, lines * end / shares * 16);
      for (int64_t chunk = 1; first < last && chunk < chunks; ++chunk)
        add(last - first, at_k(chunk) + first, at_k(0) + first);
    }
  });
  for (int64_t k = 0; k < 2 * L - 1; ++k)
    if (accumulator.transposed(k)) transpose<T>(3 * d, s.e, sums[0].matrices[k], s.e, matrices_bar[k], 3 * d);
}

}  // namespace MAGEP_ISA
}  // namespace magep
