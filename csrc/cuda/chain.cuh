// The two chains of some channels of one network, and their reverse.
//   A_1 = W_1, A_i = W_i [A_(i-1) | b_(i-1)]      S_(L-1) = W_L, S_t = S_(t+1) W_(t+1)
#pragma once

#include "network.cuh"

namespace magep::cuda {

// Fills A, and with `suffix` S. `bias[i - 1]` is [B, d, n_i]; `first` is the batch's channel that c = 0 means.
template <typename T, typename Engine, typename Weights, typename S>
__device__ void chain_forward(const Engine& engine, const Shape& s, const Weights& weights, const S* const* bias,
                              int64_t first, int count, bool suffix, const Sections<T>& to) {
  const int L = s.L, n_0 = s.n_0(), n_L = s.n_L();
  const auto W_1 = weights.weight(1), W_L = weights.weight(L);
  for_each(count * n_0 * s.n[1], [&](int k) {
    const int j = k % s.n[1], q = k / s.n[1] % n_0, c = k / s.n[1] / n_0;
    to.A(1, q, c)[j] = load(W_1.data[c * W_1.channel + j * W_1.ld + q]);
  });
  for (int i = 1; i <= L; ++i)
    for_each(count * s.n[i],
             [&](int k) { to.bias(i, k / s.n[i])[k % s.n[i]] = load(bias[i - 1][first * s.n[i] + k]); });
  if (suffix && L > 1)
    for_each(count * n_L * s.n[L - 1], [&](int task) {
      const int m = s.n[L - 1], k = task % m, p = task / m % n_L, c = task / m / n_L;
      to.S(L - 1, p, c)[k] = load(W_L.data[c * W_L.channel + p * W_L.ld + k]);
    });
  __syncthreads();
  for (int i = 2; i <= L; ++i) {
    const int n = s.n[i], m = s.n[i - 1];
    const auto W = weights.weight(i);
    engine.template product<T>(count, s.columns(i) - 1, n, inner(m), rows(to.A(i - 1, 0, 0), m, to.row_stride(m)),
                               rows(W.data, W.channel, W.ld),
                               [&](int c, int x, int j, T value) { to.A(i, x, c)[j] = value; });
    __syncthreads();
  }
  for (int t = L - 2; suffix && t >= 1; --t) {
    const int n = s.n[t + 1], m = s.n[t];
    const auto W = weights.weight(t + 1);
    engine.template product<T>(count, n_L, m, inner(n), rows(to.S(t + 1, 0, 0), n, to.row_stride(n)),
                               columns(W.data, W.channel, W.ld),
                               [&](int c, int p, int k, T value) { to.S(t, p, c)[k] = value; });
    __syncthreads();
  }
}

// Takes gradients of A and S, in `bar`, through the chains, and writes those of weights and biases. With
// `add`, what W_bar holds for layers i > 1 is added to.
template <typename T, typename Engine, typename Weights, typename S>
__device__ void chain_backward(const Engine& engine, const Shape& s, const Weights& weights, const Sections<T>& from,
                               const Sections<T>& bar, int64_t first, int count, bool suffix, bool add, S* const* W_bar,
                               S* const* b_bar) {
  const int L = s.L, n_0 = s.n_0(), n_L = s.n_L();
  // S_bar_(t+1) += S_bar_t W_(t+1)^T
  for (int t = 1; suffix && t + 1 < L; ++t) {
    const int n = s.n[t + 1], m = s.n[t];
    const auto W = weights.weight(t + 1);
    engine.template product<T>(count, n_L, n, inner(m), rows(bar.S(t, 0, 0), m, bar.row_stride(m)),
                               rows(W.data, W.channel, W.ld),
                               [&](int c, int p, int j, T value) { bar.S(t + 1, p, c)[j] += value; });
    __syncthreads();
  }
  for (int i = L; i >= 2; --i) {
    const int n = s.n[i], m = s.n[i - 1], columns_i = s.columns(i) - 1;
    const auto W = weights.weight(i);
    // [A_(i-1) | b_(i-1)]_bar += W_i^T A_bar_i
    engine.template product<T>(count, columns_i, m, inner(n), rows(bar.A(i, 0, 0), n, bar.row_stride(n)),
                               columns(W.data, W.channel, W.ld),
                               [&](int c, int x, int k, T value) { bar.A(i - 1, x, c)[k] += value; });
    // W_bar_i += A_bar_i [A_(i-1) | b_(i-1)]^T + S_i^T S_bar_(i-1), and S_bar_(L-1) itself for i = L: one product of
    // both, the suffixes' rows after the prefixes'.
    const bool middle = suffix && i < L;
    engine.template product<T>(
        count, n, m, inner(columns_i + (middle ? n_L : 0)), generated<Along::outer>([&](int c, int j, const Index& k) {
          return k.at < columns_i ? bar.A(i, k.at, c)[j] : from.S(i, k.at - columns_i, c)[j];
        }),
        generated<Along::outer>([&](int c, int j, const Index& k) {
          return k.at < columns_i ? from.A(i - 1, k.at, c)[j] : bar.S(i - 1, k.at - columns_i, c)[j];
        }),
        [&](int c, int j, int k, T value) {
          S& to = W_bar[i - 1][((first + c) * n + j) * m + k];
          if (suffix && i == L) value += bar.S(L - 1, j, c)[k];
          store(add ? load(to) + value : value, to);
        });
    __syncthreads();
  }
  for_each(count * s.n[1] * n_0, [&](int k) {
    const int q = k % n_0, j = k / n_0 % s.n[1], c = k / n_0 / s.n[1];
    store(bar.A(1, q, c)[j], W_bar[0][first * s.n[1] * n_0 + k]);
  });
  for (int i = 1; i <= L; ++i)
    for_each(count * s.n[i],
             [&](int k) { store(bar.bias(i, k / s.n[i])[k % s.n[i]], b_bar[i - 1][first * s.n[i] + k]); });
}

}  // namespace magep::cuda
