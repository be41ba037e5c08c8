// Views of one network's weights and intermediates, for the channels of a block.
#pragma once

#include "product.cuh"
#include "shape.h"

namespace magep::cuda {

// W_i of the first channel; element (c, j, k) at c * channel + j * ld + k.
template <typename X>
struct Weight {
  const X* data;
  int64_t channel;
  int ld;
};

// Weights where the caller has them, [B, d, n_i, n_(i-1)].
template <typename S>
struct GlobalWeights {
  const Shape& s;
  const S* const* W;
  int64_t first;  // channel of the batch, net * d + c

  __device__ Weight<S> weight(int i) const {
    const int64_t size = int64_t(s.n[i]) * s.n[i - 1];
    return {W[i - 1] + first * size, size, s.n[i - 1]};
  }
};

// Weights of `channels` channels, copied to shared memory.
template <typename T>
struct SharedWeights {
  const Shape& s;
  const StagedWeights& at;
  T* base;
  int channels;

  __device__ Weight<T> weight(int i) const {
    const int ld = StagedWeights::ld(s.n[i - 1]);
    return {base + at.W[i] * channels, int64_t(s.n[i]) * ld, ld};
  }
  template <typename S>
  __device__ void copy(const GlobalWeights<S>& from) const {
    for (int i = 1; i <= s.L; ++i) {
      const int m = s.n[i - 1], ld = StagedWeights::ld(m);
      const S* source = from.weight(i).data;
      T* to = base + at.W[i] * channels;
      for_each(channels * s.n[i] * m, [&](int k) { to[k / m * ld + k % m] = load(source[k]); });
    }
  }
};

// The intermediates of one network, or of some of its channels in shared memory, as Layout lays them out.
template <typename T>
struct Sections {
  const Shape& s;
  const Layout& at;
  T* base;
  int channels;  // that lie in this memory
  int first;     // the one that c = 0 means

  __device__ T* row(int offset, int n, int row, int c) const {
    return base + int64_t(offset + row * n) * channels + int64_t(first + c) * n;
  }
  __device__ T* A(int i, int column, int c) const { return row(at.A[i], s.n[i], column, c); }
  __device__ T* bias(int i, int c) const { return A(i, s.columns(i) - 1, c); }
  __device__ T* S(int t, int p, int c) const { return row(at.S[t], s.n[t], p, c); }
  __device__ T* R(int i, int q, int c) const { return row(at.R[i], s.n[i - 1], q, c); }
  __device__ T* U(int i, int p, int c) const { return row(at.U[i], s.n[i], p, c); }
  __device__ T& G0(int i, int q, int k, int c) const {
    return base[(at.G0[i] + q * s.n_0() + k) * channels + first + c];
  }
  __device__ T& F(int feature, int c) const { return base[int64_t(at.F + feature) * channels + first + c]; }
  __device__ int64_t row_stride(int n) const { return int64_t(channels) * n; }

  // The factors of [WW] of layer i > 1, rank rows each, and the row that meets b in [bW].
  __device__ T* left(int i, int c) const { return s.through_output(i) ? U(i, 0, c) : A(i, 0, c); }
  __device__ T* right(int i, int c) const { return s.through_output(i) ? S(i - 1, 0, c) : R(i, 0, c); }
  __device__ T* bias_factor(int i, int c) const { return R(i, s.through_output(i) ? 0 : s.n_0(), c); }
};

// [pairs, n_0 + 1, n_L, d], from channel `first` on.
template <typename T>
struct Connections {
  const Shape& s;
  T* base;
  int first;

  __device__ T& operator()(int pair, int q, int p, int c) const {
    return base[(int64_t(pair * (s.n_0() + 1) + q) * s.n_L() + p) * s.d + first + c];
  }
};

}  // namespace magep::cuda
