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
template <typename T>
class AdamRule {
 public:
  explicit AdamRule(const AdamStep& s)
      : near_(s.beta1 > 0.5),
        weight_(broadcast(near_ ? 1 - s.beta1 : -s.beta1)),
        beta2_(broadcast(s.beta2)),
        own_square_(broadcast(1 - s.beta2)),
        shrink_(broadcast(s.decoupled ? 1 - s.lr * s.weight_decay : 1)),
        decays_(!s.decoupled && s.weight_decay != 0),
        decay_(broadcast(s.weight_decay)),
        rate_(broadcast(s.lr / (1 - std::pow(s.beta1, s.step)))),
        correction_(broadcast(1 / std::sqrt(1 - std::pow(s.beta2, s.step)))),
        eps_(broadcast(s.eps)) {}

  // On a copy of the rule, which no store can change: its numbers stay in registers.
  void apply(int64_t n, const T* g_at, T* p_at, T* m_at, T* v_at) const {
    const AdamRule rule = *this;
    for_lanes<T>(n, [&, rule](int64_t k, auto count) {
      auto g = load_lanes(g_at + k, count), m = load_lanes(m_at + k, count);
      const auto p = load_lanes(p_at + k, count) * rule.shrink_;
      if (rule.decays_) g += rule.decay_ * p;
      // From the nearer end, as torch.lerp: without memory, m is g to the last digit.
      m = (rule.near_ ? m : g) + rule.weight_ * (g - m);
      const auto v = rule.beta2_ * load_lanes(v_at + k, count) + rule.own_square_ * g * g;
      store_lanes(p_at + k, p - rule.rate_ * m / (Simd<T>::sqrt(v) * rule.correction_ + rule.eps_), count);
      store_lanes(m_at + k, m, count);
      store_lanes(v_at + k, v, count);
    });
  }

 private:
  using Vec = typename Simd<T>::Vec;
  static Vec broadcast(double x) { return Simd<T>::broadcast(static_cast<T>(x)); }

  bool near_;
  Vec weight_, beta2_, own_square_, shrink_;
  bool decays_;
  Vec decay_, rate_, correction_, eps_;
};

// sizes: how many numbers each array of parameters, gradients, means m and squares v has. Every thread takes the same
// share of each array: about the rows whose gradients it has in its cache.
template <typename T>
void adam(const AdamStep& s, const std::vector<int64_t>& sizes, const T* const* gradients, T* const* parameters,
          T* const* means, T* const* squares, const Parallel& parallel) {
  const AdamRule<T> rule(s);
  int64_t total = 0;
  for (int64_t size : sizes) total += size;
  const int64_t parts = parallel.chunks(total / kAdamNumbers);
  parallel.run(parts, [&](int64_t part) {
    for (size_t k = 0; k < sizes.size(); ++k) {
      const Range lines = Range::part(whole_lines(sizes[k]) / kLine, part, parts);  // no two write to one line
      const int64_t begin = lines.begin * kLine, end = std::min(lines.end * kLine, sizes[k]);
      rule.apply(end - begin, gradients[k] + begin, parameters[k] + begin, means[k] + begin, squares[k] + begin);
    }
  });
}

}  // namespace MAGEP_ISA
}  // namespace magep
