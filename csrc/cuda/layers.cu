// Launchers of `equivariant` and `invariant`.
#include <algorithm>

#include "call.h"
#include "kernels.cuh"

namespace magep::cuda {
namespace {

// A layer is small if the weights and intermediates of one network fit into the shared memory of one block of an A100.
constexpr size_t kSmallNetwork = 160 << 10;
// Channels of a block of data_gradients, and its rectangles: small ones cover a CNN-zoo layer at once; of large ones, 3
// terms of 10 channels and 64 positions fill a tile of 32 by 64.
constexpr int kSmallChannels = 4, kLargeChannels = 10;
constexpr Rectangle kSmallRectangle{16, 16}, kMiddleRectangle{8, 8}, kLastRectangle{1, 64};
// Blocks that matrix_gradients aims at for one output, and the fewest samples worth a block.
constexpr int kBlocksPerOutput = 128, kFewestSamples = 256;

int ceil_div(int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); }

template <typename S>
struct Plan {
  using T = Computed<S>;
  Shape s;
  Layout at;
  StagedWeights staged;
  GradientLayout gradients;
  bool small, small_chain;
  int part[kOutputs], parts[kOutputs];

  explicit Plan(const MagepCudaCall& call)
      : s(make_shape(call)),
        at(s),
        staged(s),
        gradients(s),
        small(!call.tiled && fused_bytes(true) <= kSmallNetwork),
        small_chain(!call.tiled && chain_gradient_bytes() <= kDefaultShared),
        part{},
        parts{} {
    for (int output = 0; output < s.outputs(); ++output) {
      const int64_t samples = int64_t(s.B) * s.output_positions(output);
      const int tiles = Staged<MixTile<T>>::tiles(s.output_rows(output), s.output_columns(output));
      const int wanted = std::min(ceil_div(kBlocksPerOutput, tiles), ceil_div(samples, kFewestSamples));
      part[output] = ceil_div(ceil_div(samples, wanted), MixTile<T>::K) * MixTile<T>::K;
      parts[output] = ceil_div(samples, part[output]);
    }
  }

  size_t fused_bytes(bool resident) const {
    return sizeof(T) * ((size_t(at.size) + (resident ? staged.size : 0)) * s.d + 1);
  }
  size_t chain_gradient_bytes() const { return sizeof(T) * (2 * size_t(at.chains) + staged.size); }

  // The workspace of the backward pass, in numbers: gradients of the mixing, of the chains, of psi by network, and
  // parts of the gradients of matrices.
  int64_t mix_size() const { return int64_t(s.B) * gradients.size * s.d; }
  int64_t bars_size() const { return small_chain ? 0 : int64_t(s.B) * at.chains * s.d; }
  int64_t psi_parts_size() const { return s.B > 1 ? int64_t(s.B) * s.psi_size() : 0; }
  int64_t matrix_parts_size(int output) const {
    return parts[output] > 1 ? int64_t(parts[output]) * s.output_rows(output) * s.output_columns(output) : 0;
  }
  int64_t workspace_size() const {
    int64_t size = mix_size() + bars_size() + psi_parts_size();
    for (int output = 0; output < s.outputs(); ++output) size += matrix_parts_size(output);
    return size;
  }
};

cudaError_t shared_limit(size_t& bytes) {
  int device = 0, value = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&value, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  bytes = static_cast<size_t>(value);
  return error;
}

template <typename S>
const char* forward(const MagepCudaCall& call, const MagepCudaNetworks& networks, const MagepCudaParameters& parameters,
                    void* const* outputs, void* const* pre, void* saved, int64_t saved_stride) {
  const Plan<S> plan(call);
  const Shape& s = plan.s;
  ForwardParameters<S> p{
      s, plan.at, plan.staged, {}, {}, {}, nullptr, {}, {}, nullptr, saved_stride, Activation(call.activation), {}};
  const char* wrong = nullptr;
  if ((wrong = take("weights", networks.weights, s.L, p.W))) return wrong;
  if ((wrong = take("biases", networks.biases, s.L, p.b))) return wrong;
  if ((wrong = take("matrices", parameters.matrices, s.outputs(), p.matrices))) return wrong;
  if ((wrong = take("psi", &parameters.psi, 1, &p.psi))) return wrong;
  if ((wrong = take("outputs", outputs, s.outputs(), p.out))) return wrong;
  if (pre && (wrong = take("pre", pre, s.outputs(), p.pre))) return wrong;
  if ((wrong = take("saved", &saved, 1, &p.saved))) return wrong;
  const auto stream = static_cast<cudaStream_t>(call.stream);

  size_t limit = 0;
  if ((wrong = status(shared_limit(limit), "shared memory of the device"))) return wrong;
  if (plan.small && plan.fused_bytes(false) <= limit) {
    const int64_t blocks = int64_t(s.B) * ceil_div(s.e, kSlice);
    const bool resident = plan.fused_bytes(true) <= limit;
    return status(
        launch(resident ? layer_fused<S, true> : layer_fused<S, false>, blocks, plan.fused_bytes(resident), stream, p),
        "layer_fused");
  }
  for (int output = 0; output < s.outputs(); ++output) {
    const int M = s.output_rows(output);
    const int tiles = s.is_readout(output) ? ceil_div(M, kReadoutRows)
                                           : Staged<MixTile<Computed<S>>>::tiles(M, s.output_positions(output));
    p.first_tile[output + 1] = p.first_tile[output] + tiles;
  }
  if ((wrong = status(launch(layer_chain<S>, int64_t(s.B) * s.d, 0, stream, p), "layer_chain"))) return wrong;
  return status(launch(layer_mix<S>, int64_t(s.B) * p.first_tile[s.outputs()], 0, stream, p), "layer_mix");
}

template <typename S>
const char* backward(const MagepCudaCall& call, const void* const* output_grads, const void* const* given,
                     const MagepCudaNetworks& networks, const MagepCudaParameters& parameters, const void* saved,
                     int64_t saved_stride, void* const* weight_grads, void* const* bias_grads,
                     void* const* matrix_grads, void* psi_grad, void* workspace) {
  using T = Computed<S>;
  const Plan<S> plan(call);
  const Shape& s = plan.s;
  const auto activation = Activation(call.activation);
  const auto stream = static_cast<cudaStream_t>(call.stream);
  const char* wrong = nullptr;
  T *next = nullptr, *kept = nullptr, *psi_bar = nullptr, *matrix_bar[kOutputs] = {};
  if ((wrong = take("workspace", &workspace, 1, &next))) return wrong;
  if ((wrong = take("saved", &saved, 1, &kept))) return wrong;
  if ((wrong = take("psi_grad", &psi_grad, 1, &psi_bar))) return wrong;
  if ((wrong = take("matrix_grads", matrix_grads, s.outputs(), matrix_bar))) return wrong;
  const auto reserve = [&next](int64_t count) {
    T* slice = next;
    next += count;
    return slice;
  };
  T *mix = reserve(plan.mix_size()), *bars = reserve(plan.bars_size());
  const int64_t mix_stride = int64_t(plan.gradients.size) * s.d;

  SumParameters<T> sums{};
  const auto sum_later = [&](const T* partial, T* out, int64_t count, int parts) {
    const int job = sums.jobs++;
    sums.partial[job] = partial;
    sums.out[job] = out;
    sums.count[job] = static_cast<int>(count);
    sums.parts[job] = parts;
    sums.first_block[job + 1] = sums.first_block[job] + ceil_div(count, kThreads);
  };
  T* psi_parts = psi_bar;
  if (s.B > 1) {
    psi_parts = reserve(plan.psi_parts_size());
    sum_later(psi_parts, psi_bar, s.psi_size(), s.B);
  }

  MatrixGradientParameters<S> m{s,          plan.at,    {},           {},      {},
                                {},         kept,       saved_stride, nullptr, mix + int64_t(plan.gradients.F) * s.d,
                                mix_stride, activation, {},           {}};
  if ((wrong = take("weights", networks.weights, s.L, m.W))) return wrong;
  if ((wrong = take("output_grads", output_grads, s.outputs(), m.grads))) return wrong;
  if (activation != Activation::none && (wrong = take("given", given, s.outputs(), m.given))) return wrong;
  for (int output = 0; output < s.outputs(); ++output) {
    const int64_t count = int64_t(s.output_rows(output)) * s.output_columns(output);
    const int tiles = Staged<MixTile<T>>::tiles(s.output_rows(output), s.output_columns(output));
    m.part[output] = plan.part[output];
    m.first_block[output + 1] = m.first_block[output] + tiles * plan.parts[output];
    m.partial[output] = matrix_bar[output];
    if (plan.parts[output] > 1) {
      m.partial[output] = reserve(plan.matrix_parts_size(output));
      sum_later(m.partial[output], matrix_bar[output], count, plan.parts[output]);
    }
  }

  const int channels = plan.small ? kSmallChannels : kLargeChannels;
  DataGradientParameters<S> data{s,
                                 plan.at,
                                 plan.gradients,
                                 {},
                                 {},
                                 {},
                                 kept,
                                 saved_stride,
                                 mix,
                                 {},
                                 activation,
                                 channels,
                                 plan.small ? kSmallRectangle : kMiddleRectangle,
                                 plan.small ? kSmallRectangle : kLastRectangle};
  if ((wrong = take("matrices", parameters.matrices, s.outputs(), data.matrices))) return wrong;
  if ((wrong = take("weight_grads", weight_grads, s.L, data.W_bar))) return wrong;
  m.readout_matrix = data.matrices[s.outputs() - 1];
  std::copy(m.grads, m.grads + s.outputs(), data.grads);
  std::copy(m.given, m.given + s.outputs(), data.given);

  ChainGradientParameters<S> chain{s,   plan.at, plan.gradients, plan.staged, {}, nullptr, kept, saved_stride,
                                   mix, bars,    psi_parts,      {},          {}};
  if ((wrong = take("psi", &parameters.psi, 1, &chain.psi))) return wrong;
  if ((wrong = take("bias_grads", bias_grads, s.L, chain.b_bar))) return wrong;
  std::copy(m.W, m.W + s.L, chain.W);
  std::copy(data.W_bar, data.W_bar + s.L, chain.W_bar);

  const int64_t blocks =
      m.first_block[s.outputs()] + int64_t(ceil_div(s.readout_columns(), kThreads)) * ceil_div(s.B, kReadoutNetworks);
  if ((wrong = status(launch(matrix_gradients<S>, blocks, 0, stream, m), "matrix_gradients"))) return wrong;
  if (s.equivariant()) {
    const size_t shared = sizeof(T) * 2 * channels * std::max(data.middle.size(), data.last.size());
    wrong = status(launch(plan.small ? data_gradients<S, true> : data_gradients<S, false>,
                          int64_t(s.B) * 2 * (s.L - 1) * ceil_div(s.d, channels), shared, stream, data),
                   "data_gradients");
    if (wrong) return wrong;
  }
  wrong = status(launch(plan.small_chain ? chain_gradients<S, true> : chain_gradients<S, false>, int64_t(s.B) * s.d,
                        plan.small_chain ? plan.chain_gradient_bytes() : 0, stream, chain),
                 "chain_gradients");
  if (wrong || sums.jobs == 0) return wrong;
  return status(launch(sum_parts<T>, sums.first_block[sums.jobs], 0, stream, sums), "sum_parts");
}

}  // namespace
}  // namespace magep::cuda

using namespace magep::cuda;

int64_t magep_cuda_saved_size(const MagepCudaCall* call) {
  MagepCudaCall any = *call;
  any.batch = std::max<int64_t>(any.batch, 1);  // no network needs no less
  if (check(any)) return -1;
  const Shape s = make_shape(any);
  return int64_t(Layout(s).size) * s.d + 1;
}

int64_t magep_cuda_layer_backward_workspace(const MagepCudaCall* call) {
  if (check(*call)) return -1;
  return with_storage(call->dtype, [&](auto tag) {
    using S = decltype(tag);
    return Plan<S>(*call).workspace_size() * int64_t(sizeof(Computed<S>));
  });
}

const char* magep_cuda_layer_forward(const MagepCudaCall* call, const MagepCudaNetworks* networks,
                                     const MagepCudaParameters* parameters, void* const* outputs, void* const* pre,
                                     void* saved, int64_t saved_stride) {
  if (const char* wrong = check(*call)) return wrong;
  if (saved_stride < magep_cuda_saved_size(call)) return message("saved has too few numbers per network");
  return with_storage(call->dtype, [&](auto tag) {
    return forward<decltype(tag)>(*call, *networks, *parameters, outputs, pre, saved, saved_stride);
  });
}

const char* magep_cuda_layer_backward(const MagepCudaCall* call, const void* const* output_grads,
                                      const void* const* given, const MagepCudaNetworks* networks,
                                      const MagepCudaParameters* parameters, const void* saved, int64_t saved_stride,
                                      void* const* weight_grads, void* const* bias_grads, void* const* matrix_grads,
                                      void* psi_grad, void* workspace) {
  if (const char* wrong = check(*call)) return wrong;
  if (saved_stride < magep_cuda_saved_size(call)) return message("saved has too few numbers per network");
  return with_storage(call->dtype, [&](auto tag) {
    return backward<decltype(tag)>(*call, output_grads, given, *networks, *parameters, saved, saved_stride,
                                   weight_grads, bias_grads, matrix_grads, psi_grad, workspace);
  });
}
