#include "cpu/adam.h"
#include "naive.h"

namespace {

using magep::AdamStep;
using magep::Parallel;
using namespace magep::MAGEP_ISA;

// One number after torch's documentation of Adam and AdamW, in double.
void naive_adam(const AdamStep& s, double g, double& p, double& m, double& v) {
  if (s.decoupled)
    p -= s.lr * s.weight_decay * p;
  else
    g += s.weight_decay * p;
  m = s.beta1 * m + (1 - s.beta1) * g;
  v = s.beta2 * v + (1 - s.beta2) * g * g;
  const double m_hat = m / (1 - std::pow(s.beta1, s.step)), v_hat = v / (1 - std::pow(s.beta2, s.step));
  p -= s.lr * m_hat / (std::sqrt(v_hat) + s.eps);
}

template <typename T>
std::vector<T> random_numbers(int64_t count, double low, double high) {
  std::vector<T> values(count);
  for (T& x : values) x = static_cast<T>(std::uniform_real_distribution<double>(low, high)(generator));
  return values;
}

// Each array is followed by numbers that must stay as they are.
constexpr int64_t kBehind = 17;

template <typename T>
void test_adam(const AdamStep& first, const std::vector<int64_t>& sizes, const Parallel& parallel) {
  std::vector<std::vector<T>> g, p, m, v;
  for (int64_t size : sizes) {
    g.push_back(random_numbers<T>(size + kBehind, -1, 1));
    p.push_back(random_numbers<T>(size + kBehind, -1, 1));
    m.push_back(random_numbers<T>(size + kBehind, -1, 1));
    v.push_back(random_numbers<T>(size + kBehind, 0, 1));
  }
  AdamStep s = first;
  for (int repeat = 0; repeat < 3; ++repeat, ++s.step) {
    const auto before_g = g, before_p = p, before_m = m, before_v = v;
    adam<T>(s, sizes, pointers(g).data(), pointers(p).data(), pointers(m).data(), pointers(v).data(), parallel);
    CHECK(g == before_g, "gradients were changed");
    // Terms of p and of m up to size 1, so the last digit of each is that of 1; v is a sum of positive numbers.
    const double last = 8 * std::numeric_limits<T>::epsilon();
    for (size_t k = 0; k < sizes.size(); ++k)
      for (int64_t at = 0; at < sizes[k] + kBehind; ++at) {
        double p_at = before_p[k][at], m_at = before_m[k][at], v_at = before_v[k][at];
        if (at < sizes[k]) naive_adam(s, g[k][at], p_at, m_at, v_at);
        CHECK(std::abs(m[k][at] - m_at) <= last, "mean %zu of %g: %g, not %g", k, s.step, double(m[k][at]), m_at);
        CHECK(std::abs(v[k][at] - v_at) <= last * v_at, "square %zu: %g, not %g", k, double(v[k][at]), v_at);
        CHECK(std::abs(p[k][at] - p_at) <= last * (1 + std::abs(p_at - before_p[k][at])), "number %lld of %lld: %g",
              static_cast<long long>(at), static_cast<long long>(sizes[k]), p[k][at] - p_at);
        if (at >= sizes[k]) CHECK(p[k][at] == p_at && m[k][at] == m_at && v[k][at] == v_at, "written behind %zu", k);
      }
  }
}

}  // namespace

void run_tests() {
  const std::vector<AdamStep> steps{
      {1e-3, 0.9, 0.999, 1e-8, 0, false, 1},   {0.1, 0.9, 0.999, 1e-8, 0.1, false, 1},
      {0.1, 0.9, 0.999, 1e-8, 0.1, true, 1},   {0.05, 0.3, 0.5, 1e-2, 0, true, 1},
      {0.05, 0, 0.9, 1e-6, 0.01, true, 20000}, {0, 0.9, 0.999, 1e-8, 0.1, true, 7},
  };
  const std::vector<std::vector<int64_t>> sizes{{1}, {15, 16, 17}, {}, {0, 5000}, {4096, 3, 9001, 100}};
  for (const AdamStep& s : steps)
    for (const auto& each : sizes)
      for (int64_t threads : {1, 3}) {
        test_adam<float>(s, each, serial(threads));
        test_adam<double>(s, each, threaded(threads));
      }
}
