// A batch of networks as the kernels see it, and memory to work in.
#pragma once

#include <stdexcept>
#include <vector>

#include "gemm.h"
#include "layout.h"
#include "storage.h"

namespace magep {
namespace MAGEP_ISA {

// Memory of one thread, kept between calls: taking a slice costs nothing, growing happens before the work starts.
template <typename T>
class Scratch {
 public:
  // A buffer for this thread of at least `count` numbers, valid until the next call of `begin`.
  static Scratch begin(int64_t count) {
    thread_local std::vector<T> memory;
    return Scratch(at_least(count, memory), count);
  }
  T* take(int64_t count) {
    T* slice = next_;
    next_ += whole_lines(count);
    if (next_ > end_) throw std::length_error("magep_fast: scratch memory was reserved too small");
    return slice;
  }

 private:
  Scratch(T* memory, int64_t count) : next_(memory), end_(memory + count) {}
  T *next_, *end_;
};

template <typename S, typename T>
struct Network {
  const Shape& s;
  const Layout& at;
  const S* const* W;  // [B, d, n_i, n_(i-1)], at i - 1
  const S* const* b;  // [B, d, n_i]
  const T* psi;       // [pairs, n_0 + 1, n_L, d]

  const S* weight(int64_t i, int64_t net, int64_t channel) const {
    return W[i - 1] + (net * s.d + channel) * s.n[i] * s.n[i - 1];
  }
  const S* bias(int64_t i, int64_t net, int64_t channel) const { return b[i - 1] + (net * s.d + channel) * s.n[i]; }
  const T* connection(int64_t pair) const { return psi + pair * (s.n_0() + 1) * s.n_L() * s.d; }
  // Psi_(pair) of one channel as an operand (q, p), and its transpose (p, q); row n_0 is psi.
  Operand<T> psi_qp(int64_t pair, int64_t channel) const { return {connection(pair) + channel, s.n_L() * s.d, s.d}; }
  Operand<T> psi_pq(int64_t pair, int64_t channel) const { return {connection(pair) + channel, s.d, s.n_L() * s.d}; }
};

// W_i of one network and channel in the type of computation: where it lies, or converted into `space`.
template <typename S, typename T>
inline const T* weight_as(const Network<S, T>& x, int64_t i, int64_t net, int64_t channel, T* space) {
  const S* w = x.weight(i, net, channel);
  if constexpr (std::is_same_v<S, T>) {
    (void)space;
    return w;
  } else {
    load_row(w, x.s.n[i] * x.s.n[i - 1], space);
    return space;
  }
}

template <typename S, typename T>
int64_t largest_matrix(const Shape& s) {
  if (std::is_same_v<S, T>) return 0;
  int64_t size = 0;
  for (int64_t i = 1; i <= s.L(); ++i) size = std::max(size, s.n[i] * s.n[i - 1]);
  return size;
}

inline int64_t widest(const Shape& s) { return *std::max_element(s.n.begin(), s.n.end()); }

}  // namespace MAGEP_ISA
}  // namespace magep
