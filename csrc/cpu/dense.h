// Dense layers with ReLU between them, forward and backward: the head that reads the invariants of a batch of networks.
#pragma once

#include "readout.h"

namespace magep {
namespace MAGEP_ISA {

// layers: weight [widths[k + 1], widths[k]] and bias [widths[k + 1]] of every layer k; values: the outputs, then the
// [B, widths[k + 1]] of every other layer k.
template <typename T>
void dense_forward(const DenseShape& s, const T* x, const T* const* layers, T* const* values,
                   const Parallel& parallel) {
  const int64_t last = s.layers() - 1;
  for (int64_t k = 0; k <= last; ++k) {
    const int64_t K = s.widths[k], rows = s.widths[k + 1];
    const T* F = k == 0 ? x : values[k];
    const auto f = k < last ? Activation::relu : Activation::none;
    readout(s.B, rows, K, layers[2 * k], F, K, Destination<T, T>{values[k < last ? k + 1 : 0], nullptr, f}, parallel,
            layers[2 * k + 1]);
  }
  if (!s.sigmoid) return;
  for (int64_t r = 0; r < s.B * s.widths.back(); ++r) values[0][r] = T(1) / (T(1) + std::exp(-values[0][r]));
}

// x_bar may be null where nobody asks for it.
template <typename T>
void dense_backward(const DenseShape& s, const T* out_bar, const T* x, const T* const* layers, const T* const* values,
                    T* x_bar, T* const* layers_bar, const Parallel& parallel) {
  const int64_t last = s.layers() - 1, size = s.B * s.widest();
  int64_t most = 1;
  for (int64_t k = 0; k <= last; ++k)
    most = std::max(most, readout_parts(s.B, s.widths[k + 1], s.widths[k], parallel.threads));
  thread_local std::vector<T> memory;
  T *bar = at_least((1 + most) * size, memory), *F_bar = bar + size;
  load_row(out_bar, s.B * s.widths.back(), bar);
  for (int64_t r = 0; s.sigmoid && r < s.B * s.widths.back(); ++r) {
    const T y = values[0][r];
    bar[r] *= y * (T(1) - y);
  }
  for (int64_t k = last; k >= 0; --k) {
    const int64_t K = s.widths[k], rows = s.widths[k + 1];
    const T* before = k == 0 ? x : values[k];
    T* bias_bar = layers_bar[2 * k + 1];
    std::memcpy(bias_bar, bar, rows * sizeof(T));
    for (int64_t net = 1; net < s.B; ++net) add(rows, bar + net * rows, bias_bar);
    readout_backward(s.B, rows, K, layers[2 * k], before, K, bar, F_bar, layers_bar[2 * k], parallel);
    const int64_t parts = readout_parts(s.B, rows, K, parallel.threads);
    for (int64_t net = 0; net < s.B; ++net) sum_parts(parts, s.B, K, net, F_bar);
    if (k > 0)
      load_row(Incoming<T, T>{F_bar, before, Activation::relu}, s.B * K, bar);
    else if (x_bar)
      store_row(F_bar, s.B * K, x_bar);
  }
}

}  // namespace MAGEP_ISA
}  // namespace magep
