// The operators of csrc/ops.cpp for CUDA tensors: argument checks, allocation and registration on the torch stable ABI.

#include <torch/csrc/stable/library.h>
#include <torch_device.h>

#include <vector>

#include "arguments.h"
#include "cuda/launchers.h"

namespace {

using magep::ScalarType;
using magep::Shape;
using magep::Sizes;
using magep::Tensor;
using namespace magep::cuda;
using Tensors = std::vector<Tensor>;

// One operator call: its sizes, its device, and the contiguous tensors it reads.
class Call {
 public:
  Call(const char* op, int operation, const Tensors& weights, const Tensors& biases, int64_t out_channels,
       int64_t activation = MAGEP_NONE)
      : op_(op),
        shape_(magep::claimed_shape(op, weights, biases, out_channels, operation == MAGEP_CHAIN ? 1 : 2)),
        like_(weights[0]) {
    magep::check_activation(op, activation);
    call_ = {operation,   dtype_number(), static_cast<int>(activation),     shape_.B,
             shape_.d,    shape_.e,       static_cast<int>(weights.size()), shape_.n.data(),
             /*tiled=*/0, nullptr};
    const auto shapes = feature_shapes(shape_, shape_.d);
    const auto middle = shapes.begin() + shape_.L();
    weights_ = take(weights, "weights", {shapes.begin(), middle}, dtype());
    biases_ = take(biases, "biases", {middle, shapes.end()}, dtype());
  }

  const Shape& shape() const { return shape_; }
  ScalarType dtype() const { return like_.scalar_type(); }
  // Of parameters and of what is saved.
  ScalarType computation() const { return dtype() == ScalarType::Double ? ScalarType::Double : ScalarType::Float; }
  bool empty() const { return shape_.B == 0; }
  int64_t saved_size() const {
    const int64_t size = magep_cuda_saved_size(&call_);
    STD_TORCH_CHECK(size >= 0, op_, ": the networks are too large or too deep for the CUDA kernels");
    return size;
  }

  // Pointers of tensors that must have these shapes and this dtype. Copies are kept until the call ends; the caching
  // allocator hands their memory out in stream order.
  std::vector<void*> take(const Tensors& tensors, const char* name, const std::vector<Sizes>& shapes,
                          ScalarType dtype) {
    STD_TORCH_CHECK(tensors.size() == shapes.size(), op_, ": expected ", shapes.size(), " ", name, "; found ",
                    tensors.size());
    std::vector<void*> pointers;
    for (size_t k = 0; k < tensors.size(); ++k) {
      const Tensor& x = tensors[k];
      const bool here = on_device(x) && x.get_device_index() == like_.get_device_index();
      magep::check(x, here, kDeviceName, op_, magep::Item{name, k}, shapes[k], dtype);
      kept_.push_back(x.is_contiguous() ? x : torch::stable::contiguous(x));
      pointers.push_back(kept_.back().data_ptr());
    }
    return pointers;
  }
  // The same for parameters, which the kernels read in the type of computation.
  std::vector<void*> take_parameters(const Tensors& tensors, const char* name, const std::vector<Sizes>& shapes) {
    auto pointers = take(tensors, name, shapes, dtype());
    for (size_t k = 0; dtype() != computation() && k < pointers.size(); ++k) {
      kept_.push_back(torch::stable::to(kept_[kept_.size() - pointers.size()], computation()));
      pointers[k] = kept_.back().data_ptr();
    }
    return pointers;
  }
  std::vector<void*> allocate(Tensors& results, const std::vector<Sizes>& shapes, ScalarType dtype) const {
    std::vector<void*> pointers;
    for (const Sizes& shape : shapes) {
      results.push_back(torch::stable::new_empty(like_, shape, dtype));
      pointers.push_back(results.back().mutable_data_ptr());
    }
    return pointers;
  }

  // Runs launcher(call, networks, workspace) on the current stream of the tensors' device.
  template <typename WorkspaceSize, typename Launcher>
  void run(const WorkspaceSize& workspace_size, const Launcher& launcher) {
    if (empty()) return;
    const DeviceGuard guard(like_.get_device_index());
    call_.stream = current_stream(like_.get_device_index());
    const int64_t bytes = std::max<int64_t>(0, workspace_size(&call_));
    const Tensor workspace = torch::stable::new_empty(like_, {bytes / 8 + 1}, ScalarType::Double);
    const MagepCudaNetworks networks{weights_.data(), biases_.data()};
    const char* wrong = launcher(&call_, &networks, workspace.mutable_data_ptr());
    STD_TORCH_CHECK(wrong == nullptr, op_, ": ", wrong);
  }

  // As the kernels number outputs: weights and biases in turn.
  static std::vector<void*> interleaved(const std::vector<void*>& features) {
    std::vector<void*> turns;
    const size_t L = features.size() / 2;
    for (size_t k = 0; k < features.size(); ++k) turns.push_back(features[k / 2 + k % 2 * L]);
    return turns;
  }

 private:
  int dtype_number() const {
    switch (dtype()) {
      case ScalarType::Float: return MAGEP_F32;
      case ScalarType::Double: return MAGEP_F64;
      case ScalarType::BFloat16: return MAGEP_BF16;
      case ScalarType::Half: return MAGEP_F16;
      default: STD_TORCH_CHECK(false, op_, ": expected float32, float64, bfloat16 or float16 features"); return -1;
    }
  }

  const char* op_;
  Shape shape_;
  Tensor like_;
  MagepCudaCall call_;
  Tensors kept_;
  std::vector<void*> weights_, biases_;
};

int64_t no_workspace(const MagepCudaCall*) { return 0; }

Tensors chain(Tensors weights, Tensors biases) {
  Call call("magep_fast::chain", MAGEP_CHAIN, weights, biases, 1);
  Tensors results;
  const auto out = call.allocate(results, chain_shapes(call.shape()), call.dtype());
  call.run([](const MagepCudaCall* c) { return magep_cuda_chain_workspace(c, 0); },
           [&](const MagepCudaCall* c, const MagepCudaNetworks* networks, void* workspace) {
             return magep_cuda_chain_forward(c, networks, out.data(), out.data() + c->layers, workspace);
           });
  return results;
}

Tensors chain_backward(Tensors grads, Tensors weights, Tensors biases) {
  Call call("magep_fast::chain_backward", MAGEP_CHAIN, weights, biases, 1);
  const auto bars = call.take(grads, "grads", chain_shapes(call.shape()), call.dtype());
  Tensors results;
  const auto out = call.allocate(results, feature_shapes(call.shape(), call.shape().d), call.dtype());
  call.run([](const MagepCudaCall* c) { return magep_cuda_chain_workspace(c, 1); },
           [&](const MagepCudaCall* c, const MagepCudaNetworks* networks, void* workspace) {
             return magep_cuda_chain_backward(c, bars.data(), bars.data() + c->layers, networks, out.data(),
                                              out.data() + c->layers, workspace);
           });
  return results;
}

void layer_forward(Call& call, bool equivariant, const Tensors& matrices, const Tensor& psi,
                   const std::vector<void*>& outputs, const std::vector<void*>& before, void* saved) {
  const Shape& s = call.shape();
  const auto phi = call.take_parameters(matrices, equivariant ? "matrices" : "matrix", matrix_shapes(s, equivariant));
  const auto connections = call.take_parameters({psi}, "psi", {psi_shape(s, equivariant)});
  const MagepCudaParameters parameters{phi.data(), connections[0]};
  call.run(no_workspace, [&](const MagepCudaCall* c, const MagepCudaNetworks* networks, void*) {
    return magep_cuda_layer_forward(c, networks, &parameters, outputs.data(), before.empty() ? nullptr : before.data(),
                                    saved, call.saved_size());
  });
}

// -> gradients of weights, biases, matrices, psi
Tensors layer_backward(Call& call, bool equivariant, const std::vector<void*>& bars, const std::vector<void*>& known,
                       const Tensors& matrices, const Tensor& psi, const Tensor& saved) {
  const Shape& s = call.shape();
  const auto phi_shapes = matrix_shapes(s, equivariant);
  const auto phi = call.take_parameters(matrices, equivariant ? "matrices" : "matrix", phi_shapes);
  const auto connections = call.take_parameters({psi}, "psi", {psi_shape(s, equivariant)});
  const auto kept = call.take({saved}, "saved", {{s.B, call.saved_size()}}, call.computation());
  const MagepCudaParameters parameters{phi.data(), connections[0]};
  Tensors results;
  const auto x_bar = call.allocate(results, feature_shapes(s, s.d), call.dtype());
  const auto phi_bar = call.allocate(results, phi_shapes, call.computation());
  const auto psi_bar = call.allocate(results, {psi_shape(s, equivariant)}, call.computation());
  call.run(magep_cuda_layer_backward_workspace, [&](const MagepCudaCall* c, const MagepCudaNetworks* networks,
                                                    void* workspace) {
    return magep_cuda_layer_backward(c, bars.data(), known.data(), networks, &parameters, kept[0], call.saved_size(),
                                     x_bar.data(), x_bar.data() + c->layers, phi_bar.data(), psi_bar[0], workspace);
  });
  magep::finish_gradients(results, x_bar.size(), s.B, call.dtype());
  return results;
}

Tensors equivariant(Tensors weights, Tensors biases, Tensors matrices, Tensor psi, int64_t out_channels,
                    int64_t activation, bool training) {
  Call call("magep_fast::equivariant", MAGEP_EQUIVARIANT, weights, biases, out_channels, activation);
  const Shape& s = call.shape();
  Tensors results;
  const auto out = call.allocate(results, feature_shapes(s, s.e), call.dtype());
  const auto saved = call.allocate(results, {{s.B, call.saved_size()}}, call.computation());
  std::vector<void*> before;
  if (training && activation == MAGEP_SIN) before = call.allocate(results, feature_shapes(s, s.e), call.dtype());
  layer_forward(call, true, matrices, psi, Call::interleaved(out), Call::interleaved(before), saved[0]);
  return results;
}

Tensors equivariant_backward(Tensors grads, Tensors weights, Tensors biases, Tensors matrices, Tensor psi, Tensor saved,
                             Tensors known, int64_t out_channels, int64_t activation) {
  Call call("magep_fast::equivariant_backward", MAGEP_EQUIVARIANT, weights, biases, out_channels, activation);
  const auto shapes = feature_shapes(call.shape(), call.shape().e);
  const auto bars = call.take(grads, "grads", shapes, call.dtype());
  std::vector<void*> given;
  if (activation != MAGEP_NONE) given = call.take(known, "known", shapes, call.dtype());
  return layer_backward(call, true, Call::interleaved(bars), Call::interleaved(given), matrices, psi, saved);
}

Tensors invariant(Tensors weights, Tensors biases, Tensor matrix, Tensor psi) {
  const char* op = "magep_fast::invariant";
  Call call(op, MAGEP_INVARIANT, weights, biases, magep::rows_of(op, matrix));
  const Shape& s = call.shape();
  Tensors results;
  const auto out = call.allocate(results, {{s.B, s.e}}, call.dtype());
  const auto saved = call.allocate(results, {{s.B, call.saved_size()}}, call.computation());
  layer_forward(call, false, {matrix}, psi, out, {}, saved[0]);
  return results;
}

Tensors invariant_backward(Tensor grad, Tensors weights, Tensors biases, Tensor matrix, Tensor psi, Tensor saved) {
  const char* op = "magep_fast::invariant_backward";
  Call call(op, MAGEP_INVARIANT, weights, biases, magep::rows_of(op, matrix));
  const auto bars = call.take({grad}, "grad", {{call.shape().B, call.shape().e}}, call.dtype());
  return layer_backward(call, false, bars, {}, {matrix}, psi, saved);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(magep_fast, MAGEP_DISPATCH_KEY, m) {
  m.impl("chain", TORCH_BOX(&chain));
  m.impl("chain_backward", TORCH_BOX(&chain_backward));
  m.impl("equivariant", TORCH_BOX(&equivariant));
  m.impl("equivariant_backward", TORCH_BOX(&equivariant_backward));
  m.impl("invariant", TORCH_BOX(&invariant));
  m.impl("invariant_backward", TORCH_BOX(&invariant_backward));
}
