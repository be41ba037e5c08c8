// The invariant layer of a batch of networks, forward and backward: the prefix chain and one skinny product.
#pragma once

#include "readout.h"

namespace magep {
namespace MAGEP_ISA {

// saved: [B][layout.stride].
template <typename S, typename T>
void invariant_forward(const Shape& s, const S* const* W, const S* const* b, const T* matrix, const T* psi, S* out,
                       T* saved, const Parallel& parallel) {
  const Layout at(s, Operation::invariant);
  const Network<S, T> x{s, at, W, b, psi};
  const int64_t K = s.readout_columns(), stride = at.stride, need = chain_scratch<S, T>(s);
  parallel.split(s.B * s.d, [&](int64_t, int64_t begin, int64_t end) {
    Scratch<T> scratch = Scratch<T>::begin(need);
    for (int64_t task = begin; task < end; ++task)
      chain_forward(x, task / s.d, task % s.d, false, saved + task / s.d * stride, scratch);
  });
  parallel.split(s.B, [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t net = begin; net < end; ++net) {
      T* own = saved + net * stride;
      connect(x, s.L(), own, own + at.G0[s.L()]);
      features(x, own);
    }
  });
  readout(s.B, s.e, K, matrix, saved + at.size, stride, Destination<S, T>{out, nullptr, Activation::none}, parallel);
}

template <typename S, typename T>
void invariant_backward(const Shape& s, const S* out_bar, const S* const* W, const S* const* b, const T* matrix,
                        const T* psi, const T* saved, S* const* W_bar, S* const* b_bar, T* matrix_bar, T* psi_bar,
                        const Parallel& parallel) {
  const Layout at(s, Operation::invariant);
  const Network<S, T> x{s, at, W, b, psi};
  const int64_t K = s.readout_columns(), stride = at.stride;
  const int64_t need = chain_scratch<S, T>(s) + at.size + s.L() * s.n_L() * s.d + 64;  // gradients of one network
  thread_local std::vector<T> memory;
  // Gradients of the features reach the chains through what the layout has from A_L on, `tail` numbers a network.
  const int64_t first = at.A[s.L()].offset, tail = at.size - first;
  const int64_t parts = readout_parts(s.B, s.e, K, parallel.threads);
  T *F_bar = at_least(s.B * (parts * K + s.e + tail), memory), *bar = F_bar + parts * s.B * K, *tails = bar + s.B * s.e;
  load_row(out_bar, s.B * s.e, bar);
  readout_backward(s.B, s.e, K, matrix, saved + at.size, stride, bar, F_bar, matrix_bar, parallel);
  std::fill(psi_bar, psi_bar + s.psi_size(), T(0));
  {
    Scratch<T> scratch = Scratch<T>::begin(need);
    T* grad = scratch.take(at.size);
    for (int64_t net = 0; net < s.B; ++net) {
      const T* own = saved + net * stride;
      std::fill(grad + first, grad + at.size, T(0));
      features_backward(x, own, sum_parts(parts, s.B, K, net, F_bar), grad, psi_bar, scratch);
      connect_backward(x, s.L(), own, grad, psi_bar);
      std::memcpy(tails + net * tail, grad + first, tail * sizeof(T));
    }
  }
  int64_t weights = 0;
  for (int64_t i = 2; i <= s.L(); ++i) weights += s.B * s.d * s.n[i] * s.n[i - 1];
  const bool large = weights * static_cast<int64_t>(sizeof(T)) >= kStreamedBytes;
  const auto how = large ? WeightGradients::stream : WeightGradients::write;
  parallel.split(s.B * s.d, [&](int64_t, int64_t begin, int64_t end) {
    Scratch<T> scratch = Scratch<T>::begin(need);
    T* grad = scratch.take(at.size);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t net = task / s.d, channel = task % s.d;
      if (task == begin || channel == 0) std::memcpy(grad + first, tails + net * tail, tail * sizeof(T));
      chain_backward(x, net, channel, false, saved + net * stride, grad, static_cast<T*>(nullptr), W_bar, b_bar, how,
                     scratch);
    }
    if (how == WeightGradients::stream) finish_streams();
  });
}

}  // namespace MAGEP_ISA
}  // namespace magep
