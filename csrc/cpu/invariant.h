// The invariant layer of a batch of networks, forward and backward: the prefix chain and one skinny product.
#pragma once

#include "readout.h"

namespace magep {
namespace MAGEP_ISA {

template <typename S, typename T>
int64_t invariant_scratch(const Shape& s) {
  return chain_scratch<S, T>(s) + s.L() * s.n_L() * s.d + 256;
}

// saved: [B][layout.size + features].
template <typename S, typename T>
void invariant_forward(const Shape& s, const S* const* W, const S* const* b, const T* matrix, const T* psi, S* out,
                       T* saved, const Parallel& parallel) {
  const Layout at(s, Operation::invariant);
  const Network<S, T> x{s, at, W, b, psi};
  const int64_t K = s.readout_columns(), stride = at.size + K, need = invariant_scratch<S, T>(s);
  parallel.split(s.B * s.d, [&](int64_t, int64_t begin, int64_t end) {
    Scratch<T> scratch = Scratch<T>::begin(need);
    for (int64_t task = begin; task < end; ++task)
      chain_forward(x, task / s.d, task % s.d, false, saved + task / s.d * stride, scratch);
  });
  thread_local std::vector<T> memory;
  memory.resize(s.B * K);
  T* F = memory.data();
  for (int64_t net = 0; net < s.B; ++net) {
    T* own = saved + net * stride;
    connect(x, s.L(), own);
    features(x, own, own + at.size);
    std::memcpy(F + net * K, own + at.size, K * sizeof(T));
  }
  readout(s.B, s.e, K, matrix, F, Destination<S, T>{out, nullptr, Activation::none}, parallel);
}

template <typename S, typename T>
void invariant_backward(const Shape& s, const S* out_bar, const S* const* W, const S* const* b, const T* matrix,
                        const T* psi, const T* saved, S* const* W_bar, S* const* b_bar, T* matrix_bar, T* psi_bar,
                        const Parallel& parallel) {
  const Layout at(s, Operation::invariant);
  const Network<S, T> x{s, at, W, b, psi};
  const int64_t K = s.readout_columns(), stride = at.size + K, need = invariant_scratch<S, T>(s);
  thread_local std::vector<T> memory;
  memory.resize(s.B * (2 * K + s.e + at.size));
  T *F = memory.data(), *F_bar = F + s.B * K, *bar = F_bar + s.B * K, *grads = bar + s.B * s.e;
  for (int64_t net = 0; net < s.B; ++net) std::memcpy(F + net * K, saved + net * stride + at.size, K * sizeof(T));
  load_row(out_bar, s.B * s.e, bar);
  readout_backward(s.B, s.e, K, matrix, F, bar, F_bar, matrix_bar, parallel);
  std::fill(psi_bar, psi_bar + s.psi_size(), T(0));
  Scratch<T> own_scratch = Scratch<T>::begin(need);
  for (int64_t net = 0; net < s.B; ++net) {
    T* grad = grads + net * at.size;
    const T* own = saved + net * stride;
    std::fill(grad, grad + at.size, T(0));
    features_backward(x, own, own + at.size, F_bar + net * K, grad, psi_bar, own_scratch);
    connect_backward(x, s.L(), own, grad, psi_bar);
  }
  parallel.split(s.B * s.d, [&](int64_t, int64_t begin, int64_t end) {
    Scratch<T> scratch = Scratch<T>::begin(need);
    for (int64_t task = begin; task < end; ++task)
      chain_backward(x, task / s.d, task % s.d, false, saved + task / s.d * stride, grads + task / s.d * at.size,
                     static_cast<T*>(nullptr), W_bar, b_bar, true, scratch);
  });
}

}  // namespace MAGEP_ISA
}  // namespace magep
