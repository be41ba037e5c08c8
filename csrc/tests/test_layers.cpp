#include "cpu/equivariant.h"
#include "cpu/invariant.h"
#include "naive.h"

namespace {

using magep::Activation;
using magep::Parallel;
using magep::Shape;
using namespace magep::MAGEP_ISA;

template <typename T>
std::vector<std::vector<T>> convert(const Tensors& tensors) {
  std::vector<std::vector<T>> out;
  for (const auto& tensor : tensors) out.emplace_back(tensor.begin(), tensor.end());
  return out;
}

// Results start as NaN: what a kernel forgets to write cannot pass.
template <typename T>
std::vector<std::vector<T>> unwritten(const Tensors& like) {
  std::vector<std::vector<T>> out;
  for (const auto& tensor : like) out.emplace_back(tensor.size(), T(NAN));
  return out;
}

magep::Operation operation(bool equivariant) {
  return equivariant ? magep::Operation::equivariant : magep::Operation::invariant;
}

// One layer on one set of inputs, run by the kernels in T.
template <typename T>
struct Run {
  const Shape& s;
  bool equivariant;
  Activation f;
  std::vector<std::vector<T>> W, b, matrices, outputs, before;
  std::vector<T> psi, saved;

  Run(const Shape& s, bool equivariant, Activation f, const Inputs& x)
      : s(s),
        equivariant(equivariant),
        f(f),
        W(convert<T>(x.W)),
        b(convert<T>(x.b)),
        matrices(convert<T>(x.matrices)),
        psi(x.psi.begin(), x.psi.end()),
        saved(s.B * magep::Layout(s, operation(equivariant)).stride, T(NAN)) {}

  std::vector<std::vector<T>> forward(const Tensors& like, const Parallel& parallel) {
    outputs = unwritten<T>(like);
    before = unwritten<T>(like);
    const auto to = pointers(outputs), raw = pointers(before), w = pointers(W), bias = pointers(b),
               phi = pointers(matrices);
    const bool keep = f == Activation::sin;
    if (equivariant)
      equivariant_forward<T, T>(
          s, w.data(), bias.data(), phi.data(), psi.data(),
          {to.data(), to.data() + s.L(), keep ? raw.data() : nullptr, keep ? raw.data() + s.L() : nullptr, f},
          saved.data(), parallel);
    else
      invariant_forward<T, T>(s, w.data(), bias.data(), phi[0], psi.data(), to[0], saved.data(), parallel);
    return outputs;
  }

  // Gradients of W, b, matrices and psi, after forward.
  std::vector<std::vector<T>> backward(const Tensors& seeds, const Parallel& parallel) {
    Tensors like;
    for (auto* group : {&W, &b, &matrices})
      for (auto& tensor : *group) like.emplace_back(tensor.size());
    like.emplace_back(psi.size());
    auto out = unwritten<T>(like), bars = convert<T>(seeds);
    const auto to = pointers(out), bar = pointers(bars), w = pointers(W), bias = pointers(b), phi = pointers(matrices);
    const auto known = pointers(f == Activation::sin ? before : outputs);
    const int64_t L = s.L();
    if (equivariant)
      equivariant_backward<T, T>(s, {bar.data(), bar.data() + L, known.data(), known.data() + L, f}, w.data(),
                                 bias.data(), phi.data(), psi.data(), saved.data(), to.data(), to.data() + L,
                                 to.data() + 2 * L, to.back(), parallel);
    else
      invariant_backward<T, T>(s, bar[0], w.data(), bias.data(), phi[0], psi.data(), saved.data(), to.data(),
                               to.data() + L, to[2 * L], to.back(), parallel);
    return out;
  }
};

template <typename X>
void check_close(const std::vector<std::vector<X>>& found, const Tensors& expected, double tolerance, const char* what,
                 const char* name) {
  for (size_t k = 0; k < expected.size(); ++k) {
    const double error = relative_error(found[k], expected[k]);
    CHECK(error <= tolerance, "%s: %s %zu is off by %g", name, what, k, error);
  }
}

void test_layer(const Shape& s, bool equivariant, Activation f) {
  char name[200];
  int length = std::snprintf(name, sizeof name,
                             "%s, activation %d, B=%d d=%d e=%d n=", equivariant ? "equivariant" : "invariant", int(f),
                             int(s.B), int(s.d), int(s.e));
  for (int64_t n : s.n) length += std::snprintf(name + length, sizeof name - length, "%d ", int(n));

  Inputs x(s, equivariant);
  const auto outputs = [&] { return naive_outputs(s, equivariant, f, x); };
  const Tensors expected = outputs();
  Tensors seeds;
  for (const auto& out : expected) seeds.push_back(Inputs::random(out.size()));

  Run<double> plain(s, equivariant, f, x);
  check_close(plain.forward(expected, serial(1)), expected, 1e-12, "output", name);
  const Tensors gradients = plain.backward(seeds, serial(1));
  check_differences(x.tensors(), seeds, gradients, outputs, name);

  Run<float> single(s, equivariant, f, x);
  check_close(single.forward(expected, serial(1)), expected, 1e-4, "output in float", name);
  // A saturated tanh leaves few digits of its slope 1 - y^2.
  const double tolerance = f == Activation::tanh ? 1e-2 : 1e-4;
  check_close(single.backward(seeds, serial(1)), gradients, tolerance, "gradient in float", name);

  Run<double> split(s, equivariant, f, x), parallel(s, equivariant, f, x);
  const Tensors split_outputs = split.forward(expected, serial(3));
  CHECK(parallel.forward(expected, threaded(3)) == split_outputs, "%s: outputs depend on the order of threads", name);
  const Tensors split_gradients = split.backward(seeds, serial(3));
  CHECK(parallel.backward(seeds, threaded(3)) == split_gradients, "%s: gradients depend on the order of threads", name);
  check_close(split_outputs, expected, 1e-12, "output in three parts", name);
  check_close(split_gradients, gradients, 1e-11, "gradient in three parts", name);
}

int64_t last_row_parts(const Shape& s, int64_t threads) {
  const magep::Layout at(s, magep::Operation::equivariant);
  const Parallel parallel = serial(threads);
  return EquivariantCall<double, double>{{s, at, nullptr, nullptr, nullptr}, nullptr, parallel}.last_row_parts();
}

}  // namespace

void run_tests() {
  std::vector<Shape> shapes{
      {2, 2, 3, {2, 3, 2}},
      {1, 1, 1, {1, 1, 1}},
      {3, 1, 1, {1, 1, 1, 1}},
      {2, 3, 2, {3, 4, 5, 2}},
      {2, 3, 2, {2, 4, 5, 3}},
      {3, 3, 2, {3, 4, 5, 1}},
      {4, 5, 9, {1, 9, 8, 7, 1}},
      {5, 9, 17, {1, 3, 4, 2}},
      {1, 17, 3, {2, 3, 2, 4, 2}},
      {11, 2, 2, {2, 3, 4, 2}},
      {13, 2, 2, {2, 3, 4, 1}},
      {1, 2, 3, {2, 3, 70, 66, 2}},
      {1, 2, 3, {2, 3, 66, 70, 1}},
      {1, 2, 14, {2, 130, 3, 1}},
      {2, 2, 2, {3, 2, 3, 2, 3, 2, 3, 2}},
      {2, 3, 2, {2, 3, 4, 5, 2}, true},
      {3, 2, 3, {2, 3, 4, 1}, true},
      {2, 2, 3, {2, 3, 2}, true},
      {2, 3, 4, {1, 2, 2, 2, 2}},  // hidden layers of one whole vector on some level
      {2, 3, 4, {1, 4, 4, 4, 3}},
      {2, 3, 4, {1, 8, 8, 8, 5}, true},
      {2, 3, 4, {1, 16, 16, 16, 10}, true},
      {2, 2, 3, {2, 8, 8, 1}},
  };
  // Three threads divide the last layer by rows, networks in one group and in two, and fewer networks than threads.
  const std::vector<Shape> by_rows{
      {3, 9, 20, {2, 3, 3, 6}},
      {9, 4, 14, {2, 3, 3, 6}, true},
      {2, 10, 20, {1, 3, 8}},
  };
  for (const Shape& s : by_rows) {
    CHECK(last_row_parts(s, 3) == 3, "B=%d: the last layer is not divided by rows", int(s.B));
    shapes.push_back(s);
  }
  for (const Shape& s : shapes) {
    test_layer(s, false, Activation::none);
    for (Activation f : {Activation::none, Activation::tanh, Activation::sin}) test_layer(s, true, f);
  }
}
