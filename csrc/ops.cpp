// Operator schemas, argument checks and registration on the torch stable ABI.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <tuple>
#include <vector>

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// out[m, c] = sum_k a[m, k] b[k, c]
template <typename T>
void multiply(const T* a, const T* b, T* out, int64_t rows, int64_t inner, int64_t columns) {
  for (int64_t m = 0; m < rows; ++m) {
    T* row = out + m * columns;
    for (int64_t c = 0; c < columns; ++c) row[c] = 0;
    for (int64_t k = 0; k < inner; ++k)
      for (int64_t c = 0; c < columns; ++c) row[c] += a[m * inner + k] * b[k * columns + c];
  }
}

// S_t = S_(t+1) W_(t+1) for t = L-1 ... 0, at index t.
template <typename T>
std::vector<Tensor> suffixes(const std::vector<Tensor>& weights) {
  const auto L = static_cast<int64_t>(weights.size());
  const int64_t networks = weights[0].size(0) * weights[0].size(1), n_L = weights[L - 1].size(2);
  std::vector<Tensor> chain(L);
  chain[L - 1] = torch::stable::clone(weights[L - 1]);
  for (int64_t t = L - 2; t >= 0; --t) {
    const int64_t inner = weights[t].size(2), columns = weights[t].size(3);
    chain[t] = torch::stable::new_empty(weights[t], {weights[t].size(0), weights[t].size(1), n_L, columns});
    const T* left = static_cast<const T*>(chain[t + 1].const_data_ptr());
    const T* w = static_cast<const T*>(weights[t].const_data_ptr());
    T* out = static_cast<T*>(chain[t].mutable_data_ptr());
    torch::stable::parallel_for(0, networks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n)
        multiply(left + n * n_L * inner, w + n * inner * columns, out + n * n_L * columns, n_L, inner, columns);
    });
  }
  return chain;
}

std::vector<Tensor> chain_cpu(std::vector<Tensor> weights) {
  STD_TORCH_CHECK(!weights.empty(), "chain: expected at least one weight tensor");
  const auto dtype = weights[0].scalar_type();
  for (size_t i = 0; i < weights.size(); ++i) {
    STD_TORCH_CHECK(weights[i].dim() == 4, "chain: weights[", i, "] must be [B, d, n_i, n_(i-1)]; found rank ",
                    weights[i].dim());
    STD_TORCH_CHECK(weights[i].scalar_type() == dtype, "chain: weights[", i, "] differs in dtype from weights[0]");
    if (i > 0)
      STD_TORCH_CHECK(weights[i].size(3) == weights[i - 1].size(2), "chain: weights[", i, "] reads ",
                      weights[i].size(3), " neurons; the layer before has ", weights[i - 1].size(2));
    weights[i] = torch::stable::contiguous(weights[i]);
  }
  switch (dtype) {
    case ScalarType::Float: return suffixes<float>(weights);
    case ScalarType::Double: return suffixes<double>(weights);
    default: STD_TORCH_CHECK(false, "chain: expected float32 or float64 weights");
  }
  return {};
}

}  // namespace

STABLE_TORCH_LIBRARY(magep_fast, m) { m.def("chain(Tensor[] weights) -> Tensor[]"); }

STABLE_TORCH_LIBRARY_IMPL(magep_fast, CPU, m) { m.impl("chain", TORCH_BOX(&chain_cpu)); }
