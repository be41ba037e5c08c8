// Sizes of a call and where a network's intermediates lie, as plain data that goes to kernels by value. Indices follow
// the paper: layers i = 1 ... L, widths n[0] ... n[L].
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace magep::cuda {

constexpr int kMaxLayers = 32;

enum class Operation { chain, equivariant, invariant };

struct Shape {
  int B, d, e, L;  // networks, channels in, channels (or features) out, layers
  Operation operation;
  int n[kMaxLayers + 1];

  __host__ __device__ int n_0() const { return n[0]; }
  __host__ __device__ int n_L() const { return n[L]; }
  __host__ __device__ bool equivariant() const { return operation == Operation::equivariant; }
  // Columns of [A_i | b_i] = [P_i | v_(i,1) ... v_(i,i-1) | b_i].
  __host__ __device__ int columns(int i) const { return n[0] + i; }
  // [WW] of a middle layer has two factorisations, P (Psi S) of inner size n_0 and (P Psi) S of inner size n_L.
  __host__ __device__ bool through_output(int i) const { return i < L && (n_L() < n_0() || n_L() == 1); }
  __host__ __device__ int rank(int i) const { return through_output(i) ? n_L() : n_0(); }
  // Rows per channel of what the bias of a hidden layer is a linear map of: P, [WW], [bW], [Wb], b.
  __host__ __device__ int hidden_rows(int i) const { return 3 * n_0() + i; }
  // The same for the last bias and the invariant layer: P_L, [WW], [bW], [Wb], b_L, the two traces; then 1.
  __host__ __device__ int feature_rows() const { return 3 * n_L() * n_0() + L * n_L() + 2 * (L - 1); }
  __host__ __device__ int readout_columns() const { return feature_rows() * d + 1; }
  __host__ __device__ int readout_rows() const { return equivariant() ? e * n_L() : e; }

  // Pairs (s, t) of the connections, in the order of the table of terms.
  __host__ __device__ int pair_to_input(int i) const { return equivariant() ? i - 1 : 0; }
  __host__ __device__ int pair_to_neighbour(int i) const { return L + i - 2; }
  __host__ __device__ int pair_of_trace(int s) const { return equivariant() ? 2 * L - 2 + s : s; }
  __host__ __device__ int pairs() const { return equivariant() ? 3 * L - 2 : L; }
  __host__ __device__ int psi_size() const { return pairs() * (n_0() + 1) * n_L() * d; }

  // Outputs are numbered as the matrices of coefficients: weights of layer i at 2 i - 2, bias at 2 i - 1; the invariant
  // layer's only one is 0.
  __host__ __device__ int outputs() const { return equivariant() ? 2 * L : 1; }
  __host__ __device__ bool is_readout(int output) const { return output == outputs() - 1; }
  __host__ __device__ int output_rows(int output) const {
    const int i = output / 2 + 1;
    if (is_readout(output)) return readout_rows();
    if (output % 2 == 1) return e;
    return i == 1 ? e * n_0() : i < L ? e : e * n_L();
  }
  __host__ __device__ int output_columns(int output) const {
    const int i = output / 2 + 1;
    if (is_readout(output)) return readout_columns();
    if (output == 0 || output % 2 == 1) return hidden_rows(i) * d;
    return i < L ? 3 * d : 3 * n_L() * d;
  }
  // Columns of the data of one network that the matrix of an output meets.
  __host__ __device__ int output_positions(int output) const {
    const int i = output / 2 + 1;
    if (is_readout(output)) return 1;
    if (output == 0 || output % 2 == 1) return n[i];
    return i < L ? n[i] * n[i - 1] : n[i - 1];
  }
};

// Offsets of the intermediates of one network, in numbers per channel. Sections of rows are [row][channel][n], others
// [entry][channel], so that one layout serves whole networks in global memory and some channels in shared memory.
//   A[i]   columns of [A_i | b_i], n_i each        S[t]   rows of the suffix chain, t >= 1, n_t each
//   G0[i]  [Psi; psi]_(i,0) S_0: (n_0 + 1) n_0 entries
//   R[i]   right factor of [WW] and [bW], i > 1:    n_0 rows of Psi S (or none, through_output) and psi S, n_(i-1) each
//   U[i]   left factor P Psi of a middle layer:     n_L rows of n_i, only through_output
//   F      the invariants; their last, 1, belongs to no channel and follows all
struct Layout {
  int A[kMaxLayers + 1], S[kMaxLayers + 1], G0[kMaxLayers + 1], R[kMaxLayers + 1], U[kMaxLayers + 1];
  int F, chains, size;  // the chains alone, with G0; everything

  explicit Layout(const Shape& s) : A{}, S{}, G0{}, R{}, U{}, F(0), chains(0), size(0) {
    const auto reserve = [this](int count) {
      const int offset = size;
      size += count;
      return offset;
    };
    for (int i = 1; i <= s.L; ++i) A[i] = reserve(s.columns(i) * s.n[i]);
    for (int t = 1; t < s.L && s.operation != Operation::invariant; ++t) S[t] = reserve(s.n_L() * s.n[t]);
    for (int i = s.equivariant() ? 1 : s.L; i <= s.L && s.operation != Operation::chain; ++i)
      G0[i] = reserve((s.n_0() + 1) * s.n_0());
    chains = size;
    for (int i = 2; i <= s.L && s.equivariant(); ++i) {
      R[i] = reserve((s.through_output(i) ? 1 : s.n_0() + 1) * s.n[i - 1]);
      if (s.through_output(i)) U[i] = reserve(s.n_L() * s.n[i]);
    }
    if (s.operation != Operation::chain) F = reserve(s.feature_rows());
  }
};

// Gradients that the backward pass of the mixing leaves to that of the chains, laid out likewise.
//   H[i]      of the rows that the bias of hidden layer i (and the weights of layer 1) is a linear map of
//   left[i]   of the factors of [WW] (rank rows) and [bW] (one row) of layer i > 1 of length n_i
//   right[i]  of those of length n_(i-1)
struct GradientLayout {
  int H[kMaxLayers + 1], left[kMaxLayers + 1], right[kMaxLayers + 1];
  int F, size;

  explicit GradientLayout(const Shape& s) : H{}, left{}, right{}, F(0), size(0) {
    const auto reserve = [this](int count) {
      const int offset = size;
      size += count;
      return offset;
    };
    for (int i = 1; i < s.L && s.equivariant(); ++i) H[i] = reserve(s.hidden_rows(i) * s.n[i]);
    for (int i = 2; i <= s.L && s.equivariant(); ++i) {
      left[i] = reserve((s.rank(i) + 1) * s.n[i]);
      right[i] = reserve((s.rank(i) + 1) * s.n[i - 1]);
    }
    F = reserve(s.feature_rows());
  }
};

// Weights of one network staged in shared memory, per channel: rows of odd length, so that neither rows nor columns
// collide in banks.
struct StagedWeights {
  int W[kMaxLayers + 1];
  int size;

  static __host__ __device__ int ld(int columns) { return columns | 1; }
  explicit StagedWeights(const Shape& s) : W{}, size(0) {
    for (int i = 1; i <= s.L; ++i) {
      W[i] = size;
      size += s.n[i] * ld(s.n[i - 1]);
    }
  }
};

}  // namespace magep::cuda
