// Layers one after another as one operator: what lies between them never becomes a tensor of its own.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace magep {

// What a layer of a stack is, three numbers each: its kind, then
//   linear, equivariant   channels out, activation
//   invariant             0, 0
//   dense                 how many dense layers with ReLU between them, whether a sigmoid follows
// In front of a linear, equivariant or invariant one only linear and equivariant ones may stand; a dense one comes
// last, behind an invariant one.
enum class StageKind : int64_t { linear, equivariant, invariant, dense };

// features: weights, then biases. parameters: the matrices and psi of each layer, weight and bias of each dense one.
// -> outputs (weights and biases, or one tensor [B, n]), then a workspace that the backward pass needs
std::vector<torch::stable::Tensor> stack(std::vector<torch::stable::Tensor> features,
                                         std::vector<torch::stable::Tensor> parameters, std::vector<int64_t> layers);

// outputs: of the forward pass, if the last layer computes slopes from them (relu, tanh, sigmoid), else none.
// -> gradients of parameters, and with `inputs` before them those of features
std::vector<torch::stable::Tensor> stack_backward(std::vector<torch::stable::Tensor> grads,
                                                  std::vector<torch::stable::Tensor> features,
                                                  std::vector<torch::stable::Tensor> parameters,
                                                  std::vector<torch::stable::Tensor> outputs,
                                                  torch::stable::Tensor workspace, std::vector<int64_t> layers,
                                                  bool inputs);

// The backward pass and a step of Adam, layer by layer: gradients of parameters are used while they are in cache, and
// never become tensors. Parameters, means and squares are changed in place; the latter are those of all parameters one
// behind the other, each at a multiple of 16 numbers. steps: how many each parameter has made, equal numbers to which
// one is added.
void stack_update(std::vector<torch::stable::Tensor> grads, std::vector<torch::stable::Tensor> features,
                  std::vector<torch::stable::Tensor> parameters, std::vector<torch::stable::Tensor> outputs,
                  torch::stable::Tensor workspace, torch::stable::Tensor means, torch::stable::Tensor squares,
                  torch::stable::Tensor steps, std::vector<int64_t> layers, double lr, double beta1, double beta2,
                  double eps, double weight_decay, bool decoupled);

// Losses that stack_train knows, each the mean over all numbers of the outputs, of which there is one tensor.
enum class Loss : int64_t { binary_cross_entropy, squared_error };

// For one batch after the other the forward pass, the loss, and all of stack_update, without a tensor in between -> the
// losses of the batches. features and targets: of all networks, which are taken in their order or in the one given,
// batch_size at a time, fewer at the end. Nothing is changed unless all arguments are good; a batch whose outputs or
// targets are no probabilities where the loss takes them for such ends the training before it.
torch::stable::Tensor stack_train(std::vector<torch::stable::Tensor> features,
                                  std::vector<torch::stable::Tensor> parameters, torch::stable::Tensor targets,
                                  torch::stable::Tensor means, torch::stable::Tensor squares,
                                  torch::stable::Tensor steps, std::optional<torch::stable::Tensor> order,
                                  int64_t batch_size, std::vector<int64_t> layers, int64_t loss, double lr,
                                  double beta1, double beta2, double eps, double weight_decay, bool decoupled);

}  // namespace magep
