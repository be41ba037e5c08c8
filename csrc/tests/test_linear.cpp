#include "cpu/linear.h"
#include "naive.h"

namespace {

using magep::Activation;
using magep::LinearShape;
using magep::Parallel;
using namespace magep::MAGEP_ISA;

struct LinearInputs {
  Tensors W, b, matrices;

  explicit LinearInputs(const LinearShape& s) {
    const int64_t L = s.L(), n_0 = s.n[0], n_L = s.n[L];
    for (int64_t i = 1; i <= L; ++i) {
      const int64_t in = s.in[i - 1], out = s.out[i - 1];
      W.push_back(random_integers<double>(s.B * in * s.n[i] * s.n[i - 1]));
      b.push_back(random_integers<double>(s.B * s.d * s.n[i]));
      matrices.push_back(random_integers<double>(i == 1   ? out * n_0 * (n_0 * in + s.d)
                                                 : i == L ? out * n_L * n_L * in
                                                          : out * in));
      matrices.push_back(random_integers<double>(i == 1   ? s.e * (n_0 * in + s.d)
                                                 : i == L ? s.e * n_L * (n_L * s.d + 1)
                                                          : s.e * s.d));
    }
  }
};

// -> new weights, new biases
Tensors naive_linear(const LinearShape& s, const LinearInputs& x) {
  const int64_t L = s.L();
  Tensors result(2 * L);
  for (int64_t net = 0; net < s.B; ++net)
    for (int64_t i = 1; i <= L; ++i) {
      const int64_t n = s.n[i], m = s.n[i - 1], in = s.in[i - 1];
      const auto &phi = x.matrices[2 * i - 2], &phi_bias = x.matrices[2 * i - 1];
      const auto W = [&](int64_t c, int64_t j, int64_t k) { return x.W[i - 1][((net * in + c) * n + j) * m + k]; };
      const auto b = [&](int64_t c, int64_t j) { return x.b[i - 1][(net * s.d + c) * n + j]; };
      // Row r of a matrix of layer 1 meets [W_1; b_1] at neuron j.
      const auto first = [&](const std::vector<double>& matrix, int64_t r, int64_t j) {
        double sum = 0;
        for (int64_t q = 0; q < m; ++q)
          for (int64_t c = 0; c < in; ++c) sum += matrix[r * (m * in + s.d) + q * in + c] * W(c, j, q);
        for (int64_t c = 0; c < s.d; ++c) sum += matrix[r * (m * in + s.d) + m * in + c] * b(c, j);
        return sum;
      };
      for (int64_t o = 0; o < s.out[i - 1]; ++o)
        for (int64_t j = 0; j < n; ++j)
          for (int64_t k = 0; k < m; ++k) {
            double sum = 0;
            if (i == 1) {
              sum = first(phi, o * m + k, j);
            } else {
              for (int64_t c = 0; c < in; ++c)
                if (i < L)
                  sum += phi[o * in + c] * W(c, j, k);
                else
                  for (int64_t p = 0; p < n; ++p) sum += phi[((o * n + j) * n + p) * in + c] * W(c, p, k);
            }
            result[i - 1].push_back(sum);
          }
      for (int64_t o = 0; o < s.e; ++o)
        for (int64_t j = 0; j < n; ++j) {
          double sum = 0;
          if (i == 1)
            sum = first(phi_bias, o, j);
          else if (i < L)
            for (int64_t c = 0; c < s.d; ++c) sum += phi_bias[o * s.d + c] * b(c, j);
          else {
            const double* row = phi_bias.data() + (o * n + j) * (n * s.d + 1);
            for (int64_t p = 0; p < n; ++p)
              for (int64_t c = 0; c < s.d; ++c) sum += row[p * s.d + c] * b(c, p);
            sum += row[n * s.d];
          }
          result[L + i - 1].push_back(sum);
        }
    }
  return result;
}

Tensors unwritten(const Tensors& like) {
  Tensors out;
  for (const auto& tensor : like) out.emplace_back(tensor.size(), NAN);
  return out;
}

double inner_products(const Tensors& x, const Tensors& y) {
  double sum = 0;
  for (size_t k = 0; k < x.size(); ++k) sum += inner_product(x[k], y[k]);
  return sum;
}

// Integers throughout: every number is exact, and so is the adjoint.
void test_linear(const LinearShape& s, const Parallel& parallel) {
  LinearInputs x(s);
  const int64_t L = s.L();
  const Tensors expected = naive_linear(s, x);
  Tensors out = unwritten(expected);
  const auto to = pointers(out), W = pointers(x.W), b = pointers(x.b), phi = pointers(x.matrices);
  linear_forward<double, double>(s, W.data(), b.data(), phi.data(),
                                 {to.data(), to.data() + L, nullptr, nullptr, Activation::none}, parallel);
  CHECK(out == expected, "B=%d d=%d e=%d L=%d", int(s.B), int(s.d), int(s.e), int(L));

  Tensors seeds;
  for (const auto& tensor : expected) seeds.push_back(random_integers<double>(tensor.size()));
  Tensors W_bar = unwritten(x.W), b_bar = unwritten(x.b), phi_bar = unwritten(x.matrices), phi_only = phi_bar;
  const auto bar = pointers(seeds), W_to = pointers(W_bar), b_to = pointers(b_bar), phi_to = pointers(phi_bar),
             phi_only_to = pointers(phi_only);
  const magep::OutputGradients<double> gradients{bar.data(), bar.data() + L, nullptr, nullptr, Activation::none};
  linear_backward<double, double>(s, gradients, W.data(), b.data(), phi.data(), W_to.data(), b_to.data(), phi_to.data(),
                                  parallel);
  linear_backward<double, double>(s, gradients, W.data(), b.data(), phi.data(), nullptr, nullptr, phi_only_to.data(),
                                  parallel);
  CHECK(phi_only == phi_bar, "gradients of matrices depend on whether those of features are wanted");
  // The output is linear in the matrices, and affine in the features: the constant is what zero features give.
  CHECK(inner_products(seeds, expected) == inner_products(phi_bar, x.matrices), "adjoint in the matrices");
  LinearInputs zero = x;
  for (Tensors* group : {&zero.W, &zero.b})
    for (auto& tensor : *group) std::fill(tensor.begin(), tensor.end(), 0.0);
  CHECK(inner_products(seeds, expected) - inner_products(seeds, naive_linear(s, zero)) ==
            inner_products(W_bar, x.W) + inner_products(b_bar, x.b),
        "adjoint in the features");
  // Entry by entry: each weight and bias changed alone.
  for (Tensors* group : {&x.W, &x.b})
    for (size_t k = 0; k < group->size(); ++k) {
      auto& tensor = (*group)[k];
      const size_t at = generator() % tensor.size();
      tensor[at] += 1;
      const double gradient = (group == &x.W ? W_bar : b_bar)[k][at];
      CHECK(inner_products(seeds, naive_linear(s, x)) - inner_products(seeds, expected) == gradient, "entry %zu of %zu",
            at, k);
      tensor[at] -= 1;
    }
}

}  // namespace

void run_tests() {
  const std::vector<LinearShape> shapes{
      {2, 2, 3, {2, 3, 2}, {2, 2}, {3, 3}},
      {1, 1, 1, {1, 1, 1}, {1, 1}, {1, 1}},
      {3, 1, 4, {1, 5, 6, 3}, {9, 9, 1}, {4, 4, 4}},
      {2, 2, 3, {3, 4, 2, 5}, {4, 2, 6}, {9, 3, 6}},
      {5, 3, 2, {2, 300, 3, 4}, {3, 6, 3}, {2, 2, 4}},
      {2, 9, 17, {2, 3, 30, 20, 1}, {9, 9, 9, 9}, {17, 17, 17, 17}},
  };
  for (const LinearShape& s : shapes)
    for (int64_t threads : {1, 3}) {
      test_linear(s, serial(threads));
      test_linear(s, threaded(threads));
    }
}
