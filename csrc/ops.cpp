// Operator schemas, argument checks and registration on the torch stable ABI.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <string>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/storage_types.h"

namespace {

using magep::Shape;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

const magep::Parallel& torch_threads() {
  static thread_local magep::Parallel parallel;
  parallel.threads = torch::stable::get_num_threads();
  if (!parallel.run)
    parallel.run = [](int64_t count, const std::function<void(int64_t)>& body) {
      if (count == 1) return body(0);
      torch::stable::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) body(t);
      });
    };
  return parallel;
}

// Calls body with a storage type S and a computation type T.
template <typename Body>
auto with_types(ScalarType dtype, const char* op, Body&& body) {
  switch (dtype) {
    case ScalarType::Float: return body(float{}, float{});
    case ScalarType::Double: return body(double{}, double{});
    case ScalarType::BFloat16: return body(magep::BFloat16{}, float{});
    case ScalarType::Half: return body(magep::Float16{}, float{});
    default: break;
  }
  STD_TORCH_CHECK(false, op, ": expected float32, float64, bfloat16 or float16 features");
  return body(float{}, float{});
}

void check(const Tensor& x, const char* op, const std::string& name, const std::vector<int64_t>& shape,
           ScalarType dtype) {
  bool right = x.is_cpu() && x.scalar_type() == dtype && x.dim() == static_cast<int64_t>(shape.size());
  for (size_t k = 0; right && k < shape.size(); ++k) right = x.size(static_cast<int64_t>(k)) == shape[k];
  if (right) return;
  const auto list = [](int64_t rank, auto&& at) {
    std::string text = "[";
    for (int64_t k = 0; k < rank; ++k) text += (k ? ", " : "") + std::to_string(at(k));
    return text + "]";
  };
  STD_TORCH_CHECK(false, op, ": ", name, " must be a CPU tensor of shape ",
                  list(static_cast<int64_t>(shape.size()), [&](int64_t k) { return shape[k]; }), " and dtype ",
                  torch::headeronly::toString(dtype), "; found shape ",
                  list(x.dim(), [&](int64_t k) { return x.size(k); }), " and dtype ",
                  torch::headeronly::toString(x.scalar_type()), x.is_cpu() ? "" : " on another device");
}

std::string item(const char* name, size_t k) { return std::string(name) + "[" + std::to_string(k) + "]"; }

// One call's tensors, checked, contiguous, with their pointers.
template <typename X>
struct Pointers {
  std::vector<Tensor> keep;
  std::vector<X*> data;

  void add(const Tensor& x) {
    keep.push_back(x.is_contiguous() ? x : torch::stable::contiguous(x));
    data.push_back(static_cast<X*>(keep.back().data_ptr()));
  }
  X* const* get() const { return data.data(); }
};

Shape shape_of(const char* op, const std::vector<Tensor>& weights, const std::vector<Tensor>& biases,
               int64_t out_channels, size_t fewest = 2) {
  STD_TORCH_CHECK(weights.size() >= fewest && weights.size() == biases.size(), op,
                  ": expected as many weights as biases, at least ", fewest, " of each");
  STD_TORCH_CHECK(weights[0].dim() == 4, op, ": weights[0] must have rank 4");
  Shape s{weights[0].size(0), weights[0].size(1), out_channels, {weights[0].size(3)}};
  const auto dtype = weights[0].scalar_type();
  for (size_t i = 0; i < weights.size(); ++i) {
    STD_TORCH_CHECK(weights[i].dim() == 4, op, ": weights[", i, "] must have rank 4; found ", weights[i].dim());
    s.n.push_back(weights[i].size(2));
    check(weights[i], op, item("weights", i), {s.B, s.d, s.n[i + 1], s.n[i]}, dtype);
    check(biases[i], op, item("biases", i), {s.B, s.d, s.n[i + 1]}, dtype);
  }
  for (int64_t n : s.n) STD_TORCH_CHECK(n >= 1, op, ": every width must be at least 1");
  STD_TORCH_CHECK(s.d >= 1 && s.e >= 1, op, ": expected at least one channel in and out; found ", s.d, " and ", s.e);
  return s;
}

template <typename T>
constexpr ScalarType scalar_type() {
  return sizeof(T) == 8 ? ScalarType::Double : ScalarType::Float;
}

// Parameters in the type of computation.
template <typename T>
Tensor parameter(const Tensor& x) {
  return x.scalar_type() == scalar_type<T>() ? x : torch::stable::to(x, scalar_type<T>());
}

std::vector<std::vector<int64_t>> matrix_shapes(const Shape& s) {
  std::vector<std::vector<int64_t>> shapes;
  for (int64_t i = 1; i <= s.L(); ++i) {
    if (i == s.L()) {
      shapes.push_back({s.e * s.n_L(), 3 * s.n_L() * s.d});
      shapes.push_back({s.e * s.n_L(), s.readout_columns()});
    } else {
      shapes.push_back(i == 1 ? std::vector<int64_t>{s.e * s.n_0(), s.hidden_columns(1)}
                              : std::vector<int64_t>{s.e, 3 * s.d});
      shapes.push_back({s.e, s.hidden_columns(i)});
    }
  }
  return shapes;
}

template <typename T>
Pointers<const T> parameters(const char* op, const std::vector<Tensor>& matrices,
                             const std::vector<std::vector<int64_t>>& shapes, ScalarType dtype) {
  STD_TORCH_CHECK(matrices.size() == shapes.size(), op, ": expected ", shapes.size(), " matrices; found ",
                  matrices.size());
  Pointers<const T> pointers;
  for (size_t k = 0; k < shapes.size(); ++k) {
    check(matrices[k], op, item("matrices", k), shapes[k], dtype);
    pointers.add(parameter<T>(matrices[k]));
  }
  return pointers;
}

std::vector<int64_t> psi_shape(const Shape& s, bool equivariant) {
  return {equivariant ? s.num_pairs() : s.L(), s.n_0() + 1, s.n_L(), s.d};
}

// Shapes of the results of chain: A_1 ... A_L, S_1 ... S_(L-1).
std::vector<std::vector<int64_t>> chain_shapes(const Shape& s) {
  std::vector<std::vector<int64_t>> shapes;
  for (int64_t i = 1; i <= s.L(); ++i) shapes.push_back({s.B, s.d, s.n[i], s.columns(i) - 1});
  for (int64_t t = 1; t < s.L(); ++t) shapes.push_back({s.B, s.d, s.n_L(), s.n[t]});
  return shapes;
}

// -> A_1 ... A_L, S_1 ... S_(L-1)
std::vector<Tensor> chain(std::vector<Tensor> weights, std::vector<Tensor> biases) {
  const char* op = "magep_fast::chain";
  const Shape s = shape_of(op, weights, biases, 1, 1);
  return with_types(weights[0].scalar_type(), op, [&](auto storage, auto compute) {
    using S = decltype(storage);
    using T = decltype(compute);
    Pointers<const S> W, b;
    for (int64_t i = 0; i < s.L(); ++i) {
      W.add(weights[i]);
      b.add(biases[i]);
    }
    std::vector<Tensor> results;
    std::vector<S*> out;
    for (const auto& shape : chain_shapes(s)) {
      results.push_back(torch::stable::new_empty(weights[0], shape));
      out.push_back(static_cast<S*>(results.back().mutable_data_ptr()));
    }
    if (s.B > 0)
      magep::kernels().of<S, T>().chain_forward(s, W.get(), b.get(), out.data(), out.data() + s.L(), torch_threads());
    return results;
  });
}

// -> gradients of weights, biases
std::vector<Tensor> chain_backward(std::vector<Tensor> grads, std::vector<Tensor> weights, std::vector<Tensor> biases) {
  const char* op = "magep_fast::chain_backward";
  const Shape s = shape_of(op, weights, biases, 1, 1);
  const ScalarType dtype = weights[0].scalar_type();
  const auto shapes = chain_shapes(s);
  STD_TORCH_CHECK(grads.size() == shapes.size(), op, ": expected ", shapes.size(), " gradients; found ", grads.size());
  return with_types(dtype, op, [&](auto storage, auto compute) {
    using S = decltype(storage);
    using T = decltype(compute);
    Pointers<const S> W, b, bar;
    std::vector<Tensor> results;
    std::vector<S*> out;
    for (size_t k = 0; k < shapes.size(); ++k) {
      check(grads[k], op, item("grads", k), shapes[k], dtype);
      bar.add(grads[k]);
    }
    for (int64_t i = 0; i < s.L(); ++i) {
      W.add(weights[i]);
      b.add(biases[i]);
      results.push_back(torch::stable::new_empty(weights[0], {s.B, s.d, s.n[i + 1], s.n[i]}));
    }
    for (int64_t i = 0; i < s.L(); ++i) results.push_back(torch::stable::new_empty(weights[0], {s.B, s.d, s.n[i + 1]}));
    for (const Tensor& x : results) out.push_back(static_cast<S*>(x.mutable_data_ptr()));
    if (s.B > 0)
      magep::kernels().of<S, T>().chain_backward(s, bar.get(), bar.get() + s.L(), W.get(), b.get(), out.data(),
                                                 out.data() + s.L(), torch_threads());
    return results;
  });
}

// -> new weights, new biases, saved
std::vector<Tensor> equivariant(std::vector<Tensor> weights, std::vector<Tensor> biases, std::vector<Tensor> matrices,
                                Tensor psi, int64_t out_channels) {
  const char* op = "magep_fast::equivariant";
  const Shape s = shape_of(op, weights, biases, out_channels);
  const ScalarType dtype = weights[0].scalar_type();
  return with_types(dtype, op, [&](auto storage, auto compute) {
    using S = decltype(storage);
    using T = decltype(compute);
    check(psi, op, "psi", psi_shape(s, true), dtype);
    const auto phi = parameters<T>(op, matrices, matrix_shapes(s), dtype);
    Pointers<const T> connections;
    connections.add(parameter<T>(psi));
    Pointers<const S> W, b;
    std::vector<Tensor> results;
    std::vector<S*> W_out, b_out;
    for (int64_t i = 1; i <= s.L(); ++i) {
      W.add(weights[i - 1]);
      b.add(biases[i - 1]);
      results.push_back(torch::stable::new_empty(weights[0], {s.B, s.e, s.n[i], s.n[i - 1]}));
      W_out.push_back(static_cast<S*>(results.back().mutable_data_ptr()));
    }
    for (int64_t i = 1; i <= s.L(); ++i) {
      results.push_back(torch::stable::new_empty(weights[0], {s.B, s.e, s.n[i]}));
      b_out.push_back(static_cast<S*>(results.back().mutable_data_ptr()));
    }
    results.push_back(torch::stable::new_empty(weights[0], {s.B, magep::saved_size(s, magep::Operation::equivariant)},
                                               scalar_type<T>()));
    if (s.B > 0)
      magep::kernels().of<S, T>().equivariant_forward(s, W.get(), b.get(), phi.get(), connections.data[0], W_out.data(),
                                                      b_out.data(), static_cast<T*>(results.back().mutable_data_ptr()),
                                                      torch_threads());
    return results;
  });
}

// -> gradients of weights, biases, matrices, psi
std::vector<Tensor> equivariant_backward(std::vector<Tensor> grads, std::vector<Tensor> weights,
                                         std::vector<Tensor> biases, std::vector<Tensor> matrices, Tensor psi,
                                         Tensor saved, int64_t out_channels) {
  const char* op = "magep_fast::equivariant_backward";
  const Shape s = shape_of(op, weights, biases, out_channels);
  const ScalarType dtype = weights[0].scalar_type();
  const auto L = static_cast<size_t>(s.L());
  STD_TORCH_CHECK(grads.size() == 2 * L, op, ": expected ", 2 * L, " gradients; found ", grads.size());
  return with_types(dtype, op, [&](auto storage, auto compute) {
    using S = decltype(storage);
    using T = decltype(compute);
    check(psi, op, "psi", psi_shape(s, true), dtype);
    check(saved, op, "saved", {s.B, magep::saved_size(s, magep::Operation::equivariant)}, scalar_type<T>());
    Pointers<const T> kept;
    kept.add(saved);
    const auto phi = parameters<T>(op, matrices, matrix_shapes(s), dtype);
    Pointers<const T> connections;
    connections.add(parameter<T>(psi));
    Pointers<const S> W, b, W_out_bar, b_out_bar;
    std::vector<Tensor> results;
    std::vector<S*> W_bar, b_bar;
    std::vector<T*> phi_bar;
    for (size_t i = 0; i < L; ++i) {
      check(grads[i], op, item("grads", i), {s.B, s.e, s.n[i + 1], s.n[i]}, dtype);
      check(grads[L + i], op, item("grads", L + i), {s.B, s.e, s.n[i + 1]}, dtype);
      W.add(weights[i]);
      b.add(biases[i]);
      W_out_bar.add(grads[i]);
      b_out_bar.add(grads[L + i]);
      results.push_back(torch::stable::new_empty(weights[0], {s.B, s.d, s.n[i + 1], s.n[i]}));
      W_bar.push_back(static_cast<S*>(results.back().mutable_data_ptr()));
    }
    for (size_t i = 0; i < L; ++i) {
      results.push_back(torch::stable::new_empty(weights[0], {s.B, s.d, s.n[i + 1]}));
      b_bar.push_back(static_cast<S*>(results.back().mutable_data_ptr()));
    }
    for (const auto& shape : matrix_shapes(s)) {
      results.push_back(torch::stable::new_empty(weights[0], shape, scalar_type<T>()));
      phi_bar.push_back(static_cast<T*>(results.back().mutable_data_ptr()));
    }
    results.push_back(torch::stable::new_empty(weights[0], psi_shape(s, true), scalar_type<T>()));
    if (s.B > 0) {
      magep::kernels().of<S, T>().equivariant_backward(
          s, W_out_bar.get(), b_out_bar.get(), W.get(), b.get(), phi.get(), connections.data[0], kept.data[0],
          W_bar.data(), b_bar.data(), phi_bar.data(), static_cast<T*>(results.back().mutable_data_ptr()),
          torch_threads());
    } else {
      for (size_t k = 2 * L; k < results.size(); ++k) torch::stable::zero_(results[k]);
    }
    if (dtype != scalar_type<T>())
      for (size_t k = 2 * L; k < results.size(); ++k) results[k] = torch::stable::to(results[k], dtype);
    return results;
  });
}

// The invariant layer's connections are (L, 0), then the traces' (1, 1) ... (L - 1, L - 1); the kernels number the
// pairs of the equivariant layer.
template <typename T>
std::vector<T> spread_psi(const Shape& s, const T* psi) {
  const int64_t size = (s.n_0() + 1) * s.n_L() * s.d;
  std::vector<T> all(s.num_pairs() * size);
  std::copy(psi, psi + size, all.data() + s.pair_to_input(s.L()) * size);
  std::copy(psi + size, psi + s.L() * size, all.data() + s.pair_of_trace(1) * size);
  return all;
}

// -> out, saved
std::vector<Tensor> invariant(std::vector<Tensor> weights, std::vector<Tensor> biases, std::vector<Tensor> matrices,
                              Tensor psi, int64_t out_features) {
  const char* op = "magep_fast::invariant";
  const Shape s = shape_of(op, weights, biases, out_features);
  const ScalarType dtype = weights[0].scalar_type();
  return with_types(dtype, op, [&](auto storage, auto compute) {
    using S = decltype(storage);
    using T = decltype(compute);
    check(psi, op, "psi", psi_shape(s, false), dtype);
    auto phi = parameters<T>(op, matrices, {{s.e, s.readout_columns()}}, dtype);
    phi.add(parameter<T>(psi));
    Pointers<const S> W, b;
    for (int64_t i = 0; i < s.L(); ++i) {
      W.add(weights[i]);
      b.add(biases[i]);
    }
    std::vector<Tensor> results{
        torch::stable::new_empty(weights[0], {s.B, s.e}),
        torch::stable::new_empty(weights[0], {s.B, magep::saved_size(s, magep::Operation::invariant)},
                                 scalar_type<T>())};
    if (s.B > 0)
      magep::kernels().of<S, T>().invariant_forward(s, W.get(), b.get(), phi.data[0], spread_psi(s, phi.data[1]).data(),
                                                    static_cast<S*>(results[0].mutable_data_ptr()),
                                                    static_cast<T*>(results[1].mutable_data_ptr()), torch_threads());
    return results;
  });
}

// -> gradients of weights, biases, matrices, psi
std::vector<Tensor> invariant_backward(std::vector<Tensor> grads, std::vector<Tensor> weights,
                                       std::vector<Tensor> biases, std::vector<Tensor> matrices, Tensor psi,
                                       Tensor saved, int64_t out_features) {
  const char* op = "magep_fast::invariant_backward";
  const Shape s = shape_of(op, weights, biases, out_features);
  STD_TORCH_CHECK(grads.size() == 1, op, ": expected one gradient; found ", grads.size());
  const ScalarType dtype = weights[0].scalar_type();
  const auto L = static_cast<size_t>(s.L());
  return with_types(dtype, op, [&](auto storage, auto compute) {
    using S = decltype(storage);
    using T = decltype(compute);
    check(grads[0], op, item("grads", 0), {s.B, s.e}, dtype);
    check(psi, op, "psi", psi_shape(s, false), dtype);
    check(saved, op, "saved", {s.B, magep::saved_size(s, magep::Operation::invariant)}, scalar_type<T>());
    Pointers<const T> kept;
    kept.add(saved);
    auto phi = parameters<T>(op, matrices, {{s.e, s.readout_columns()}}, dtype);
    phi.add(parameter<T>(psi));
    Pointers<const S> W, b, out_bar;
    out_bar.add(grads[0]);
    std::vector<Tensor> results;
    std::vector<S*> W_bar, b_bar;
    for (size_t i = 0; i < L; ++i) {
      W.add(weights[i]);
      b.add(biases[i]);
      results.push_back(torch::stable::new_empty(weights[0], {s.B, s.d, s.n[i + 1], s.n[i]}));
      W_bar.push_back(static_cast<S*>(results.back().mutable_data_ptr()));
    }
    for (size_t i = 0; i < L; ++i) {
      results.push_back(torch::stable::new_empty(weights[0], {s.B, s.d, s.n[i + 1]}));
      b_bar.push_back(static_cast<S*>(results.back().mutable_data_ptr()));
    }
    results.push_back(torch::stable::new_empty(weights[0], {s.e, s.readout_columns()}, scalar_type<T>()));
    results.push_back(torch::stable::new_empty(weights[0], psi_shape(s, false), scalar_type<T>()));
    if (s.B > 0) {
      std::vector<T> psi_bar(s.psi_size());
      magep::kernels().of<S, T>().invariant_backward(s, out_bar.data[0], W.get(), b.get(), phi.data[0],
                                                     spread_psi(s, phi.data[1]).data(), kept.data[0], W_bar.data(),
                                                     b_bar.data(), static_cast<T*>(results[2 * L].mutable_data_ptr()),
                                                     psi_bar.data(), torch_threads());
      const int64_t size = (s.n_0() + 1) * s.n_L() * s.d;
      T* out = static_cast<T*>(results[2 * L + 1].mutable_data_ptr());
      const T *to_input = psi_bar.data() + s.pair_to_input(s.L()) * size,
              *traces = psi_bar.data() + s.pair_of_trace(1) * size;
      std::copy(to_input, to_input + size, out);
      std::copy(traces, traces + (s.L() - 1) * size, out + size);
    } else {
      for (size_t k = 2 * L; k < results.size(); ++k) torch::stable::zero_(results[k]);
    }
    if (dtype != scalar_type<T>())
      for (size_t k = 2 * L; k < results.size(); ++k) results[k] = torch::stable::to(results[k], dtype);
    return results;
  });
}

}  // namespace

STABLE_TORCH_LIBRARY(magep_fast, m) {
  m.def("chain(Tensor[] weights, Tensor[] biases) -> Tensor[]");
  m.def("chain_backward(Tensor[] grads, Tensor[] weights, Tensor[] biases) -> Tensor[]");
  // Each layer returns its outputs and last `saved`, what the backward pass needs; the backward returns the gradients
  // of weights, biases, matrices and psi, in this order.
  m.def("equivariant(Tensor[] weights, Tensor[] biases, Tensor[] matrices, Tensor psi, int out_channels) -> Tensor[]");
  m.def("invariant(Tensor[] weights, Tensor[] biases, Tensor[] matrices, Tensor psi, int out_channels) -> Tensor[]");
  m.def(
      "equivariant_backward(Tensor[] grads, Tensor[] weights, Tensor[] biases, Tensor[] matrices, Tensor psi, "
      "Tensor saved, int out_channels) -> Tensor[]");
  m.def(
      "invariant_backward(Tensor[] grads, Tensor[] weights, Tensor[] biases, Tensor[] matrices, Tensor psi, "
      "Tensor saved, int out_channels) -> Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(magep_fast, CPU, m) {
  m.impl("chain", TORCH_BOX(&chain));
  m.impl("chain_backward", TORCH_BOX(&chain_backward));
  m.impl("equivariant", TORCH_BOX(&equivariant));
  m.impl("equivariant_backward", TORCH_BOX(&equivariant_backward));
  m.impl("invariant", TORCH_BOX(&invariant));
  m.impl("invariant_backward", TORCH_BOX(&invariant_backward));
}
