#include "cpu/dense.h"
#include "naive.h"

namespace {

using magep::DenseShape;
using magep::Parallel;
using namespace magep::MAGEP_ISA;

// -> the values of every layer, in order
Tensors naive_dense(const DenseShape& s, const std::vector<double>& x, const Tensors& layers) {
  Tensors values;
  const std::vector<double>* before = &x;
  values.reserve(s.layers());
  for (int64_t k = 0; k < s.layers(); ++k) {
    const int64_t n = s.widths[k], rows = s.widths[k + 1];
    std::vector<double> out;
    for (int64_t net = 0; net < s.B; ++net)
      for (int64_t r = 0; r < rows; ++r) {
        double sum = layers[2 * k + 1][r];
        for (int64_t j = 0; j < n; ++j) sum += layers[2 * k][r * n + j] * (*before)[net * n + j];
        if (k + 1 < s.layers())
          sum = std::max(sum, 0.0);
        else if (s.sigmoid)
          sum = 1 / (1 + std::exp(-sum));
        out.push_back(sum);
      }
    values.push_back(out);
    before = &values.back();
  }
  return values;
}

// Multiples of 1/16, so that without a sigmoid every number is exact. Gradients with one are those of the same layers
// without it times y (1 - y).
void test_dense(const DenseShape& s, const Parallel& parallel) {
  auto x = random_integers<double>(s.B * s.widths[0]);
  Tensors layers;
  for (int64_t k = 0; k < s.layers(); ++k) {
    layers.push_back(random_integers<double>(s.widths[k + 1] * s.widths[k]));
    layers.push_back(random_integers<double>(s.widths[k + 1]));
  }
  for (auto& tensor : layers)
    for (double& number : tensor) number /= 16;
  Tensors expected = naive_dense(s, x, layers);
  std::rotate(expected.begin(), expected.end() - 1, expected.end());  // the outputs come first
  Tensors values;
  for (const auto& tensor : expected) values.emplace_back(tensor.size(), NAN);
  const auto to = pointers(values), phi = pointers(layers);
  dense_forward<double>(s, x.data(), phi.data(), to.data(), parallel);
  for (size_t k = 0; k < values.size(); ++k)
    for (size_t at = 0; at < values[k].size(); ++at)
      CHECK(std::abs(values[k][at] - expected[k][at]) <= 1e-15, "layer %zu at %zu", k, at);

  const auto seeds = random_integers<double>(s.B * s.widths.back());
  std::vector<double> x_bar(x.size(), NAN);
  Tensors bars;
  for (const auto& tensor : layers) bars.emplace_back(tensor.size(), NAN);
  Tensors without = bars;
  const auto bar = pointers(bars), bar_without = pointers(without);
  dense_backward<double>(s, seeds.data(), x.data(), phi.data(), to.data(), x_bar.data(), bar.data(), parallel);
  dense_backward<double>(s, seeds.data(), x.data(), phi.data(), to.data(), nullptr, bar_without.data(), parallel);
  CHECK(bars == without, "gradients of layers depend on whether that of x is wanted");

  DenseShape plain = s;
  plain.sigmoid = false;
  auto weighted = seeds;
  for (size_t r = 0; s.sigmoid && r < seeds.size(); ++r) weighted[r] *= expected[0][r] * (1 - expected[0][r]);
  const auto value = [&] { return inner_product(weighted, naive_dense(plain, x, layers).back()); };
  // Piecewise linear in each number: a step to either side shows the gradient, unless a ReLU turns there.
  int compared = 0;
  const double step = 1.0 / (1 << 20);
  const auto compare = [&](std::vector<double>& tensor, const std::vector<double>& gradient) {
    const size_t at = generator() % tensor.size();
    const double before = tensor[at], here = value();
    tensor[at] = before + step;
    const double right = (value() - here) / step;
    tensor[at] = before - step;
    const double left = (here - value()) / step;
    tensor[at] = before;
    if (std::abs(right - left) > 1e-5 * (1 + std::abs(right))) return;
    CHECK(std::abs(gradient[at] - right) <= 1e-4 * (1 + std::abs(right)), "gradient %g, slope %g", gradient[at], right);
    ++compared;
  };
  for (int repeat = 0; repeat < 8; ++repeat) {
    compare(x, x_bar);
    for (size_t k = 0; k < layers.size(); ++k) compare(layers[k], bars[k]);
  }
  CHECK(compared > 0, "a ReLU turned everywhere");
}

}  // namespace

void run_tests() {
  const std::vector<DenseShape> shapes{
      {1, {1, 1}, false},         {2, {3, 4}, true},           {3, {5, 7, 2}, false},
      {8, {20, 33, 17, 1}, true}, {4, {2, 300, 150, 3}, true}, {33, {3, 64, 65, 2}, false},
  };
  for (const DenseShape& s : shapes)
    for (int64_t threads : {1, 3}) {
      test_dense(s, serial(threads));
      test_dense(s, threaded(threads));
    }
}
