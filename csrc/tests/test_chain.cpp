#include "cpu/chain.h"
#include "naive.h"

namespace {

using magep::Layout;
using magep::Operation;
using magep::Section;
using magep::Shape;
using namespace magep::MAGEP_ISA;

// Where a chain keeps a matrix of one channel, and what it should be: element (j, c) lies in row c.
struct Part {
  Section at;
  Matrix value;
};

std::vector<Part> parts(const Shape& s, const Layout& at, const Terms& terms, int64_t c) {
  std::vector<Part> all;
  const auto add = [&](const Section& section, int64_t first_row, const Matrix& value) {
    Section rows = section;
    rows.offset += first_row * section.row_stride + c * section.channel_stride;
    all.push_back({rows, value});
  };
  const auto transposed = [](const Matrix& x) {
    Matrix out(x.columns, x.rows);
    for (int64_t r = 0; r < x.rows; ++r)
      for (int64_t k = 0; k < x.columns; ++k) out(k, r) = x(r, k);
    return out;
  };
  const int64_t L = s.L(), n_0 = s.n_0();
  for (int64_t i = 1; i <= L; ++i) {
    add(at.A[i], 0, terms.product(i, 0, c));
    for (int64_t t = 1; t < i; ++t) add(at.A[i], n_0 + t - 1, terms.Wb(i, t, c));
    add(at.A[i], n_0 + i - 1, terms.bias(i, c));
  }
  for (int64_t i = 2; at.S[L - 1].rows > 0 && i <= L; ++i) {
    const Matrix S = terms.product(L, i - 1, c);
    const int64_t pair = s.pair_to_neighbour(i);
    add(at.S[i - 1], 0, transposed(S));
    if (at.R[i].rows > 1) add(at.R[i], 0, transposed(terms.connection(pair, c, false) * S));
    if (at.R[i].rows > 0) add(at.R[i], at.R[i].rows - 1, transposed(terms.connection(pair, c, true) * S));
  }
  return all;
}

template <typename Body>
void for_elements(const Part& part, Body&& body) {
  for (int64_t c = 0; c < part.value.columns; ++c)
    for (int64_t j = 0; j < part.value.rows; ++j) body(part.at.offset + c * part.at.row_stride + j, part.value(j, c));
}

// <seed, everything the chains keep>, by definition.
double functional(const Shape& s, const Layout& at, const Inputs& x, const std::vector<double>& seed) {
  double sum = 0;
  for (int64_t c = 0; c < s.d; ++c)
    for (const Part& part : parts(s, at, Terms{s, x, 0}, c))
      for_elements(part, [&](int64_t k, double value) { sum += seed[k] * value; });
  return sum;
}

void test_chain(const Shape& s, Operation operation, WeightGradients how) {
  const Layout at(s, operation);
  const bool suffix = operation != Operation::invariant;
  Inputs x(s, true);
  std::vector<double*> W, b, W_bar, b_bar;
  std::vector<std::vector<double>> W_bars, b_bars;
  for (int64_t i = 0; i < s.L(); ++i) {
    W_bars.emplace_back(x.W[i].size(), NAN);
    b_bars.emplace_back(x.b[i].size(), NAN);
  }
  for (int64_t i = 0; i < s.L(); ++i) {
    W.push_back(x.W[i].data());
    b.push_back(x.b[i].data());
    W_bar.push_back(W_bars[i].data());
    b_bar.push_back(b_bars[i].data());
  }
  const Network<double, double> network{s, at, W.data(), b.data(), x.psi.data()};
  const auto scratch = Scratch<double>::begin(chain_scratch<double, double>(s));
  std::vector<double> saved(at.size, NAN), seed(at.size, 0), psi_bar(x.psi.size(), 0);
  for (int64_t c = 0; c < s.d; ++c) chain_forward(network, 0, c, suffix, saved.data(), scratch);
  for (int64_t c = 0; c < s.d; ++c)
    for (const Part& part : parts(s, at, Terms{s, x, 0}, c))
      for_elements(part, [&](int64_t k, double value) {
        CHECK(std::abs(saved[k] - value) <= 1e-12 * (1 + std::abs(value)), "L=%d channel %d: %g, expected %g",
              int(s.L()), int(c), saved[k], value);
        // An invariant layer uses nothing but A_L and what follows from it; gradients of the rest hold no numbers yet.
        if (suffix || k >= at.A[s.L()].offset) seed[k] = std::normal_distribution<double>()(generator);
      });

  std::vector<double> grad = seed;
  if (!suffix) std::fill(grad.begin(), grad.begin() + at.A[s.L()].offset, NAN);
  for (int64_t c = 0; c < s.d; ++c)
    chain_backward(network, 0, c, suffix, saved.data(), grad.data(), psi_bar.data(), W_bar.data(), b_bar.data(), how,
                   scratch);
  finish_streams();
  Tensors gradients = W_bars;
  gradients.insert(gradients.end(), b_bars.begin(), b_bars.end());
  gradients.push_back(psi_bar);
  std::vector<std::vector<double>*> inputs;
  for (Tensors* group : {&x.W, &x.b})
    for (auto& tensor : *group) inputs.push_back(&tensor);
  inputs.push_back(&x.psi);
  const std::string name = "L=" + std::to_string(s.L()) + ", operation " + std::to_string(int(operation));
  check_differences(inputs, {{1}}, gradients, [&] { return Tensors{{functional(s, at, x, seed)}}; }, name);
}

}  // namespace

void run_tests() {
  std::vector<Shape> shapes{
      {1, 1, 1, {1, 1, 1}},    {1, 2, 1, {2, 3, 2}},          {1, 3, 1, {2, 4, 5, 3}},      {1, 3, 1, {3, 4, 5, 2}},
      {1, 3, 1, {3, 4, 5, 1}}, {1, 2, 1, {1, 9, 17, 8, 1}},   {1, 2, 1, {2, 33, 50, 7, 3}}, {1, 2, 1, {9, 7, 8, 2}},
      {1, 2, 1, {2, 8, 7, 9}}, {1, 2, 1, {3, 2, 3, 2, 3, 2}},
  };
  // Hidden layers of one whole vector on some level, with as many rows as the loops over them distinguish.
  for (int64_t n : {2, 4, 8, 16}) {
    shapes.push_back({1, 2, 1, {1, n, n, n, n}});
    shapes.push_back({1, 3, 1, {2, n, n, std::max<int64_t>(1, n - 1)}});
    shapes.push_back({1, 2, 1, {9, n, n, n, n, n, 1}});
  }
  for (int64_t n_L = 9; n_L <= 13; ++n_L) shapes.push_back({1, 2, 1, {1, 16, 16, n_L}});
  for (const Shape& s : shapes)
    for (Operation operation : {Operation::chain, Operation::equivariant, Operation::invariant})
      test_chain(s, operation, WeightGradients::write);
  for (const Shape& s : shapes) test_chain(s, Operation::invariant, WeightGradients::stream);
  for (const Shape& s : {Shape{1, 2, 1, {3, 2}}, Shape{1, 1, 1, {2, 8}}, Shape{1, 1, 1, {2, 17}}})  // no hidden layer
    test_chain(s, Operation::chain, WeightGradients::write);
}
