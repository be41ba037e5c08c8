// Operator schemas and registration on the torch stable ABI, and the operators of single layers.

#include <torch/csrc/stable/library.h>

#include "stack.h"
#include "tensors.h"

namespace magep {
namespace {

// -> A_1 ... A_L, S_1 ... S_(L-1)
std::vector<Tensor> chain(std::vector<Tensor> weights, std::vector<Tensor> biases) {
  const char* op = "magep_fast::chain";
  const Shape s = shape_of(op, weights, biases, 1, 1);
  const ScalarType dtype = weights[0].scalar_type();
  return with_types(dtype, op, [&](auto storage, auto compute) {
    using S = decltype(storage);
    using T = decltype(compute);
    const auto x = features<S>(weights, biases);
    std::vector<Tensor> results;
    const auto out = allocate<S>(results, weights[0], chain_shapes(s), dtype);
    if (s.B > 0)
      kernels().of<S, T>().chain_forward(s, x.get(), x.get() + s.L(), out.data(), out.data() + s.L(), torch_threads());
    return results;
  });
}

// -> gradients of weights, biases
std::vector<Tensor> chain_backward(std::vector<Tensor> grads, std::vector<Tensor> weights, std::vector<Tensor> biases) {
  const char* op = "magep_fast::chain_backward";
  const Shape s = shape_of(op, weights, biases, 1, 1);
  const ScalarType dtype = weights[0].scalar_type();
  return with_types(dtype, op, [&](auto storage, auto compute) {
    using S = decltype(storage);
    using T = decltype(compute);
    const auto bar = checked<S>(grads, op, "grads", chain_shapes(s), dtype);
    const auto x = features<S>(weights, biases);
    std::vector<Tensor> results;
    const auto out = allocate<S>(results, weights[0], feature_shapes(s, s.d), dtype);
    if (s.B > 0)
      kernels().of<S, T>().chain_backward(s, bar.get(), bar.get() + s.L(), x.get(), x.get() + s.L(), out.data(),
                                          out.data() + s.L(), torch_threads());
    return results;
  });
}

// -> new weights, new biases, saved, and with `training` and sin the weights and biases before the activation
std::vector<Tensor> equivariant(std::vector<Tensor> weights, std::vector<Tensor> biases, std::vector<Tensor> matrices,
                                Tensor psi, int64_t out_channels, int64_t activation, bool training) {
  const char* op = "magep_fast::equivariant";
  const Shape s = with_sharing(shape_of(op, weights, biases, out_channels), matrices);
  const Activation f = activation_of(op, activation);
  const ScalarType dtype = weights[0].scalar_type();
  return with_types(dtype, op, [&](auto storage, auto compute) {
    using S = decltype(storage);
    using T = decltype(compute);
    const auto phi = parameters<T>(matrices, op, "matrices", matrix_shapes(s), dtype);
    const auto connections = parameters<T>({psi}, op, "psi", {psi_shape(s, true)}, dtype);
    const auto x = features<S>(weights, biases);
    std::vector<Tensor> results;
    LayerResults<S> out(results, weights[0], feature_shapes(s, s.e));
    const auto saved =
        allocate<T>(results, weights[0], {{s.B, saved_size(s, Operation::equivariant)}}, scalar_type<T>());
    if (training && f == Activation::sin) out.keep_before(results, weights[0], feature_shapes(s, s.e));
    if (s.B > 0)
      kernels().of<S, T>().equivariant_forward(s, x.get(), x.get() + s.L(), phi.get(), connections.data[0],
                                               out.outputs(f), saved[0], torch_threads());
    return results;
  });
}

// -> gradients of weights, biases, matrices, psi
std::vector<Tensor> equivariant_backward(std::vector<Tensor> grads, std::vector<Tensor> weights,
                                         std::vector<Tensor> biases, std::vector<Tensor> matrices, Tensor psi,
                                         Tensor saved, std::vector<Tensor> known, int64_t out_channels,
                                         int64_t activation) {
  const char* op = "magep_fast::equivariant_backward";
  const Shape s = with_sharing(shape_of(op, weights, biases, out_channels), matrices);
  const Activation f = activation_of(op, activation);
  const ScalarType dtype = weights[0].scalar_type();
  return with_types(dtype, op, [&](auto storage, auto compute) {
    using S = decltype(storage);
    using T = decltype(compute);
    const LayerGradients<S> bars(op, grads, known, feature_shapes(s, s.e), dtype, f);
    const auto phi = parameters<T>(matrices, op, "matrices", matrix_shapes(s), dtype);
    const auto connections = parameters<T>({psi}, op, "psi", {psi_shape(s, true)}, dtype);
    const auto kept =
        checked<T>({saved}, op, "saved", {{s.B, saved_size(s, Operation::equivariant)}}, scalar_type<T>());
    const auto x = features<S>(weights, biases);
    std::vector<Tensor> results;
    const auto x_bar = allocate<S>(results, weights[0], feature_shapes(s, s.d), dtype);
    const auto phi_bar = allocate<T>(results, weights[0], matrix_shapes(s), scalar_type<T>());
    const auto psi_bar = allocate<T>(results, weights[0], {psi_shape(s, true)}, scalar_type<T>());
    if (s.B > 0)
      kernels().of<S, T>().equivariant_backward(s, bars.get(), x.get(), x.get() + s.L(), phi.get(), connections.data[0],
                                                kept.data[0], x_bar.data(), x_bar.data() + s.L(), phi_bar.data(),
                                                psi_bar[0], torch_threads());
    finish(results, x_bar.size(), s.B, dtype);
    return results;
  });
}

// -> new weights, new biases, and with `training` and sin the weights and biases before the activation
std::vector<Tensor> linear(std::vector<Tensor> weights, std::vector<Tensor> biases, std::vector<Tensor> matrices,
                           int64_t out_channels, int64_t activation, bool training) {
  const char* op = "magep_fast::linear";
  const LinearShape s = linear_shape(op, sizes_of_features(op, weights, biases), matrices, out_channels);
  const Activation f = activation_of(op, activation);
  const ScalarType dtype = weights[0].scalar_type();
  return with_types(dtype, op, [&](auto storage, auto compute) {
    using S = decltype(storage);
    using T = decltype(compute);
    const auto phi = parameters<T>(matrices, op, "matrices", matrix_shapes(s), dtype);
    const auto x = features<S>(weights, biases);
    const auto shapes = feature_shapes(s.B, s.out, s.e, s.n);
    std::vector<Tensor> results;
    LayerResults<S> out(results, weights[0], shapes);
    if (training && f == Activation::sin) out.keep_before(results, weights[0], shapes);
    if (s.B > 0)
      kernels().of<S, T>().linear_forward(s, x.get(), x.get() + s.L(), phi.get(), out.outputs(f), torch_threads());
    return results;
  });
}

// -> gradients of matrices, and with `inputs` before them those of weights and biases
std::vector<Tensor> linear_backward(std::vector<Tensor> grads, std::vector<Tensor> weights, std::vector<Tensor> biases,
                                    std::vector<Tensor> matrices, std::vector<Tensor> known, int64_t out_channels,
                                    int64_t activation, bool inputs) {
  const char* op = "magep_fast::linear_backward";
  const LinearShape s = linear_shape(op, sizes_of_features(op, weights, biases), matrices, out_channels);
  const Activation f = activation_of(op, activation);
  const ScalarType dtype = weights[0].scalar_type();
  return with_types(dtype, op, [&](auto storage, auto compute) {
    using S = decltype(storage);
    using T = decltype(compute);
    const LayerGradients<S> bars(op, grads, known, feature_shapes(s.B, s.out, s.e, s.n), dtype, f);
    const auto phi = parameters<T>(matrices, op, "matrices", matrix_shapes(s), dtype);
    const auto x = features<S>(weights, biases);
    std::vector<Tensor> results;
    std::vector<S*> x_bar;
    if (inputs) x_bar = allocate<S>(results, weights[0], feature_shapes(s.B, s.in, s.d, s.n), dtype);
    const auto phi_bar = allocate<T>(results, weights[0], matrix_shapes(s), scalar_type<T>());
    if (s.B > 0)
      kernels().of<S, T>().linear_backward(s, bars.get(), x.get(), x.get() + s.L(), phi.get(),
                                           inputs ? x_bar.data() : nullptr, inputs ? x_bar.data() + s.L() : nullptr,
                                           phi_bar.data(), torch_threads());
    finish(results, x_bar.size(), s.B, dtype);
    return results;
  });
}

// -> out, saved
std::vector<Tensor> invariant(std::vector<Tensor> weights, std::vector<Tensor> biases, Tensor matrix, Tensor psi) {
  const char* op = "magep_fast::invariant";
  const Shape s = with_sharing(shape_of(op, weights, biases, rows_of(op, matrix)), {matrix});
  const ScalarType dtype = weights[0].scalar_type();
  return with_types(dtype, op, [&](auto storage, auto compute) {
    using S = decltype(storage);
    using T = decltype(compute);
    const auto phi = parameters<T>({matrix}, op, "matrix", matrix_shapes(s, false), dtype);
    const auto connections = parameters<T>({psi}, op, "psi", {psi_shape(s, false)}, dtype);
    const auto x = features<S>(weights, biases);
    std::vector<Tensor> results;
    const auto out = allocate<S>(results, weights[0], {{s.B, s.e}}, dtype);
    const auto saved = allocate<T>(results, weights[0], {{s.B, saved_size(s, Operation::invariant)}}, scalar_type<T>());
    if (s.B > 0)
      kernels().of<S, T>().invariant_forward(s, x.get(), x.get() + s.L(), phi.data[0],
                                             spread_psi(s, connections.data[0]).data(), out[0], saved[0],
                                             torch_threads());
    return results;
  });
}

// -> gradients of weights, biases, matrix, psi
std::vector<Tensor> invariant_backward(Tensor grad, std::vector<Tensor> weights, std::vector<Tensor> biases,
                                       Tensor matrix, Tensor psi, Tensor saved) {
  const char* op = "magep_fast::invariant_backward";
  const Shape s = with_sharing(shape_of(op, weights, biases, rows_of(op, matrix)), {matrix});
  const ScalarType dtype = weights[0].scalar_type();
  return with_types(dtype, op, [&](auto storage, auto compute) {
    using S = decltype(storage);
    using T = decltype(compute);
    const auto bar = checked<S>({grad}, op, "grad", {{s.B, s.e}}, dtype);
    const auto phi = parameters<T>({matrix}, op, "matrix", matrix_shapes(s, false), dtype);
    const auto connections = parameters<T>({psi}, op, "psi", {psi_shape(s, false)}, dtype);
    const auto kept = checked<T>({saved}, op, "saved", {{s.B, saved_size(s, Operation::invariant)}}, scalar_type<T>());
    const auto x = features<S>(weights, biases);
    std::vector<Tensor> results;
    const auto x_bar = allocate<S>(results, weights[0], feature_shapes(s, s.d), dtype);
    const auto phi_bar = allocate<T>(results, weights[0], matrix_shapes(s, false), scalar_type<T>());
    const auto psi_bar = allocate<T>(results, weights[0], {psi_shape(s, false)}, scalar_type<T>());
    if (s.B > 0) {
      std::vector<T> all_bar(s.psi_size());
      kernels().of<S, T>().invariant_backward(s, bar.data[0], x.get(), x.get() + s.L(), phi.data[0],
                                              spread_psi(s, connections.data[0]).data(), kept.data[0], x_bar.data(),
                                              x_bar.data() + s.L(), phi_bar[0], all_bar.data(), torch_threads());
      gather_psi(s, all_bar.data(), psi_bar[0]);
    }
    finish(results, x_bar.size(), s.B, dtype);
    return results;
  });
}

}  // namespace
}  // namespace magep

STABLE_TORCH_LIBRARY(magep_fast, m) {
  m.def("chain(Tensor[] weights, Tensor[] biases) -> Tensor[]");
  m.def("chain_backward(Tensor[] grads, Tensor[] weights, Tensor[] biases) -> Tensor[]");
  // Each layer returns its outputs and what the backward pass needs; the backward returns the gradients of weights,
  // biases, matrices and psi, in this order. activation: 0 none, 1 relu, 2 tanh, 3 sin. known: what its slope is
  // computed from, the outputs, or for sin (which returns them last, when training) the values before it.
  m.def(
      "equivariant(Tensor[] weights, Tensor[] biases, Tensor[] matrices, Tensor psi, int out_channels, int activation, "
      "bool training) -> Tensor[]");
  m.def(
      "equivariant_backward(Tensor[] grads, Tensor[] weights, Tensor[] biases, Tensor[] matrices, Tensor psi, "
      "Tensor saved, Tensor[] known, int out_channels, int activation) -> Tensor[]");
  m.def(
      "linear(Tensor[] weights, Tensor[] biases, Tensor[] matrices, int out_channels, int activation, bool training) "
      "-> Tensor[]");
  m.def(
      "linear_backward(Tensor[] grads, Tensor[] weights, Tensor[] biases, Tensor[] matrices, Tensor[] known, "
      "int out_channels, int activation, bool inputs) -> Tensor[]");
  m.def("invariant(Tensor[] weights, Tensor[] biases, Tensor matrix, Tensor psi) -> Tensor[]");
  m.def(
      "invariant_backward(Tensor grad, Tensor[] weights, Tensor[] biases, Tensor matrix, Tensor psi, Tensor saved) "
      "-> Tensor[]");
  // Layers one after another, see stack.h; the backward returns the gradients of features, if `inputs`, and of
  // parameters, the update takes a step of Adam instead, and training many, with the forward pass and the loss before.
  m.def("_stack(Tensor[] features, Tensor[] parameters, int[] layers) -> Tensor[]");
  m.def(
      "_stack_backward(Tensor[] grads, Tensor[] features, Tensor[] parameters, Tensor[] outputs, Tensor workspace, "
      "int[] layers, bool inputs) -> Tensor[]");
  m.def(
      "_stack_update(Tensor[] grads, Tensor[] features, Tensor(a!)[] parameters, Tensor[] outputs, Tensor workspace, "
      "Tensor(b!) means, Tensor(c!) squares, Tensor(d!) steps, int[] layers, float lr, float beta1, float beta2, "
      "float eps, float weight_decay, bool decoupled) -> ()");
  m.def(
      "_stack_train(Tensor[] features, Tensor(a!)[] parameters, Tensor targets, Tensor(b!) means, Tensor(c!) squares, "
      "Tensor(d!) steps, Tensor? order, int batch_size, int[] layers, int loss, float lr, float beta1, float beta2, "
      "float eps, float weight_decay, bool decoupled) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(magep_fast, CPU, m) {
  m.impl("chain", TORCH_BOX(&magep::chain));
  m.impl("chain_backward", TORCH_BOX(&magep::chain_backward));
  m.impl("equivariant", TORCH_BOX(&magep::equivariant));
  m.impl("equivariant_backward", TORCH_BOX(&magep::equivariant_backward));
  m.impl("linear", TORCH_BOX(&magep::linear));
  m.impl("linear_backward", TORCH_BOX(&magep::linear_backward));
  m.impl("invariant", TORCH_BOX(&magep::invariant));
  m.impl("invariant_backward", TORCH_BOX(&magep::invariant_backward));
  m.impl("_stack", TORCH_BOX(&magep::stack));
  m.impl("_stack_backward", TORCH_BOX(&magep::stack_backward));
  m.impl("_stack_update", TORCH_BOX(&magep::stack_update));
  m.impl("_stack_train", TORCH_BOX(&magep::stack_train));
}
