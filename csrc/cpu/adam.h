// A step of Adam on the parameters of one layer, from gradients that have just been computed.
#pragma once

#include <cmath>

#include "lanes.h"
#include "layout.h"

namespace magep {
namespace MAGEP_ISA {

// Fewer numbers than this are no work for another thread.
constexpr int64_t kAdamNumbers = 4096;

// m += (1 - beta1) (g - m),  v = beta2 v + (1 - beta2) g²,
// p -= lr / (1 - beta1^step) m / (sqrt(v) / sqrt(1 - beta2^step) + eps);
// before that weight decay: p *= 1 - lr weight_decay if it is decoupled, else g += weight_decay p.
// sizes: how many numbers each array of parameters, gradients, means m and squares v has. Every thread takes the same
// share of each array: about the rows whose gradients it has in its cache.
template <typename T>
void adam(const AdamStep& s, const std::vector<int64_t>& sizes, const T* const* gradients, T* const* parameters,
          T* const* means, T* const* squares, const Parallel& parallel) {
  const auto broadcast = [](double x) { return Simd<T>::broadcast(static_cast<T>(x)); };
  const double own = 1 - s.beta1;
  // From the nearer end, as torch.lerp: without memory, m is g to the last digit.
  const bool near = own < 0.5;
  const auto weight = broadcast(near ? own : own - 1);
  const auto beta2 = broadcast(s.beta2), own_square = broadcast(1 - s.beta2);
  const auto shrink = broadcast(1 - s.lr * s.weight_decay), decay = broadcast(s.weight_decay);
  const auto rate = broadcast(s.lr / (1 - std::pow(s.beta1, s.step)));
  const auto correction = broadcast(1 / std::sqrt(1 - std::pow(s.beta2, s.step))), eps = broadcast(s.eps);
  const bool shrinks = s.weight_decay != 0 && s.decoupled, decays = s.weight_decay != 0 && !s.decoupled;
  const auto update = [&](int64_t n, const T* g_at, T* p_at, T* m_at, T* v_at) {
    for_lanes<T>(n, [&](int64_t k, auto count) {
      auto g = load_lanes(g_at + k, count), p = load_lanes(p_at + k, count), m = load_lanes(m_at + k, count);
      if (shrinks) p *= shrink;
      if (decays) g += decay * p;
      m = (near ? m : g) + weight * (g - m);
      const auto v = beta2 * load_lanes(v_at + k, count) + own_square * g * g;
      p -= rate * m / (Simd<T>::sqrt(v) * correction + eps);
      store_lanes(p_at + k, p, count);
      store_lanes(m_at + k, m, count);
      store_lanes(v_at + k, v, count);
    });
  };
  int64_t total = 0;
  for (int64_t size : sizes) total += size;
  const int64_t parts = parallel.chunks(total / kAdamNumbers);
  parallel.run(parts, [&](int64_t part) {
    constexpr int64_t kLine = 16;  // so that no two threads write to one cache line
    for (size_t k = 0; k < sizes.size(); ++k) {
      const Range lines = Range::part((sizes[k] + kLine - 1) / kLine, part, parts);
      const int64_t begin = lines.begin * kLine, end = std::min(lines.end * kLine, sizes[k]);
      update(end - begin, gradients[k] + begin, parameters[k] + begin, means[k] + begin, squares[k] + begin);
    }
  });
}

}  // namespace MAGEP_ISA
}  // namespace magep
