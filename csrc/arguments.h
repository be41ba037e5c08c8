// What the operators' tensors must be, the same for every device: shapes, checks, and errors that say what was found.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <string>
#include <vector>

#include "cpu/layout.h"

namespace magep {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Sizes = std::vector<int64_t>;

inline std::string text(const Sizes& sizes) {
  std::string out = "[";
  for (size_t k = 0; k < sizes.size(); ++k) out += (k ? ", " : "") + std::to_string(sizes[k]);
  return out + "]";
}

inline Sizes sizes_of(const Tensor& x) {
  Sizes sizes;
  for (int64_t k = 0; k < x.dim(); ++k) sizes.push_back(x.size(k));
  return sizes;
}

inline bool has_shape(const Tensor& x, const Sizes& shape) {
  bool same = x.dim() == static_cast<int64_t>(shape.size());
  for (size_t k = 0; same && k < shape.size(); ++k) same = x.size(static_cast<int64_t>(k)) == shape[k];
  return same;
}

// What a tensor is called in messages: spelt out only where there is one.
struct Item {
  const char* list;
  size_t index;
};
inline std::string text(const Item& item) { return std::string(item.list) + "[" + std::to_string(item.index) + "]"; }

// `here`: whether the tensor is on the device that is called so.
inline void check(const Tensor& x, bool here, const char* device, const char* op, const Item& item, const Sizes& shape,
                  ScalarType dtype) {
  if (here && x.scalar_type() == dtype && has_shape(x, shape)) return;
  STD_TORCH_CHECK(false, op, ": ", text(item), " must be a ", device, " tensor of shape ", text(shape), " and dtype ",
                  torch::headeronly::toString(dtype), "; found shape ", text(sizes_of(x)), " and dtype ",
                  torch::headeronly::toString(x.scalar_type()), here ? "" : " on another device");
}

inline void check_activation(const char* op, int64_t code) {
  STD_TORCH_CHECK(0 <= code && code <= static_cast<int64_t>(Activation::sin), op,
                  ": activation must be 0 (none), 1 (relu), 2 (tanh) or 3 (sin); found ", code);
}

inline int64_t rows_of(const char* op, const Tensor& matrix) {
  STD_TORCH_CHECK(matrix.dim() == 2, op, ": matrix must have rank 2; found ", matrix.dim());
  return matrix.size(0);
}

// The sizes that the weights claim; whether every tensor has them is still to be checked.
inline Shape claimed_shape(const char* op, const std::vector<Tensor>& weights, const std::vector<Tensor>& biases,
                           int64_t out_channels, size_t fewest) {
  STD_TORCH_CHECK(weights.size() >= fewest && weights.size() == biases.size(), op,
                  ": expected as many weights as biases, at least ", fewest, " of each; found ", weights.size(),
                  " and ", biases.size());
  for (size_t i = 0; i < weights.size(); ++i)
    STD_TORCH_CHECK(weights[i].dim() == 4, op, ": weights[", i, "] must have rank 4; found ", weights[i].dim());
  Shape s{weights[0].size(0), weights[0].size(1), out_channels, {weights[0].size(3)}};
  for (const Tensor& w : weights) s.n.push_back(w.size(2));
  for (int64_t n : s.n) STD_TORCH_CHECK(n >= 1, op, ": every width must be at least 1");
  STD_TORCH_CHECK(s.d >= 1 && s.e >= 1, op, ": expected at least one channel in and out; found ", s.d, " and ", s.e);
  return s;
}

// Weights [B, channels_i, n_i, n_(i-1)], then biases [B, bias_channels, n_i].
inline std::vector<Sizes> feature_shapes(int64_t B, const Sizes& channels, int64_t bias_channels, const Sizes& n) {
  std::vector<Sizes> shapes;
  for (size_t i = 1; i < n.size(); ++i) shapes.push_back({B, channels[i - 1], n[i], n[i - 1]});
  for (size_t i = 1; i < n.size(); ++i) shapes.push_back({B, bias_channels, n[i]});
  return shapes;
}
inline std::vector<Sizes> feature_shapes(const Shape& s, int64_t channels) {
  return feature_shapes(s.B, Sizes(s.L(), channels), channels, s.n);
}

// A_1 ... A_L, S_1 ... S_(L-1).
inline std::vector<Sizes> chain_shapes(const Shape& s) {
  std::vector<Sizes> shapes;
  for (int64_t i = 1; i <= s.L(); ++i) shapes.push_back({s.B, s.d, s.n[i], s.columns(i) - 1});
  for (int64_t t = 1; t < s.L(); ++t) shapes.push_back({s.B, s.d, s.n_L(), s.n[t]});
  return shapes;
}

inline std::vector<Sizes> matrix_shapes(const Shape& s, bool equivariant = true) {
  if (!equivariant) return {{s.e, s.readout_columns()}};
  std::vector<Sizes> shapes;
  for (int64_t i = 1; i <= s.L(); ++i) {
    if (i == s.L()) {
      shapes.push_back({s.e * s.n_L(), 3 * s.n_L() * s.d});
      shapes.push_back({s.e * s.n_L(), s.readout_columns()});
    } else {
      shapes.push_back(i == 1 ? Sizes{s.e * s.n_0(), s.hidden_columns(1)} : Sizes{s.e, 3 * s.d});
      shapes.push_back({s.e, s.hidden_columns(i)});
    }
  }
  return shapes;
}

inline Sizes psi_shape(const Shape& s, bool equivariant = true) {
  return {equivariant ? s.num_pairs() : s.L(), s.n_0() + 1, s.n_L(), s.d};
}

// Gradients of parameters, from the type of computation to that of the parameters; zero for an empty batch.
inline void finish_gradients(std::vector<Tensor>& results, size_t first, int64_t B, ScalarType dtype) {
  for (size_t k = first; k < results.size(); ++k) {
    if (B == 0) torch::stable::zero_(results[k]);
    if (results[k].scalar_type() != dtype) results[k] = torch::stable::to(results[k], dtype);
  }
}

}  // namespace magep
