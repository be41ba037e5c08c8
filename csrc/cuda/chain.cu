// Launchers of `chain`.
#include "call.h"
#include "kernels.cuh"

namespace magep::cuda {
namespace {

// Bytes of shared memory for sections and weights of one channel, or 0 if that is more than every device gives.
template <typename S>
size_t shared_bytes(const MagepCudaCall& call, const Layout& at, const StagedWeights& staged, bool backward) {
  const size_t bytes = sizeof(Computed<S>) * (size_t(at.size) * (backward ? 2 : 1) + staged.size);
  return bytes <= kDefaultShared && !call.tiled ? bytes : 0;
}

template <typename S>
const char* run(const MagepCudaCall& call, ChainParameters<S>& p, bool backward, void* workspace) {
  const size_t shared = shared_bytes<S>(call, p.at, p.staged, backward);
  const bool small = shared > 0;
  if (!small)
    if (const char* wrong = take("workspace", &workspace, 1, &p.workspace)) return wrong;
  using Kernel = void (*)(ChainParameters<S>);
  const Kernel kernel = small ? (backward ? Kernel(chain_products<S, true, true>) : chain_products<S, true, false>)
                              : (backward ? Kernel(chain_products<S, false, true>) : chain_products<S, false, false>);
  return status(launch(kernel, int64_t(p.s.B) * p.s.d, shared, static_cast<cudaStream_t>(call.stream), p), "chain");
}

template <typename S>
ChainParameters<S> parameters(const MagepCudaCall& call) {
  const Shape s = make_shape(call);
  return {s, Layout(s), StagedWeights(s), {}, {}, {}, {}, {}, {}, {}, {}, nullptr};
}

}  // namespace
}  // namespace magep::cuda

using namespace magep::cuda;

int64_t magep_cuda_chain_workspace(const MagepCudaCall* call, int backward) {
  if (check(*call)) return -1;
  const Shape s = make_shape(*call);
  const Layout at(s);
  return with_storage(call->dtype, [&](auto tag) -> int64_t {
    using S = decltype(tag);
    if (shared_bytes<S>(*call, at, StagedWeights(s), backward) > 0) return 0;
    return int64_t(sizeof(Computed<S>)) * at.size * (backward ? 2 : 1) * s.B * s.d;
  });
}

const char* magep_cuda_chain_forward(const MagepCudaCall* call, const MagepCudaNetworks* networks,
                                     void* const* prefixes, void* const* suffixes, void* workspace) {
  if (const char* wrong = check(*call)) return wrong;
  return with_storage(call->dtype, [&](auto tag) -> const char* {
    using S = decltype(tag);
    auto p = parameters<S>(*call);
    const char* wrong = nullptr;
    if ((wrong = take("weights", networks->weights, p.s.L, p.W))) return wrong;
    if ((wrong = take("biases", networks->biases, p.s.L, p.b))) return wrong;
    if ((wrong = take("prefixes", prefixes, p.s.L, p.prefixes))) return wrong;
    if ((wrong = take("suffixes", suffixes, p.s.L - 1, p.suffixes))) return wrong;
    return run(*call, p, false, workspace);
  });
}

const char* magep_cuda_chain_backward(const MagepCudaCall* call, const void* const* prefix_grads,
                                      const void* const* suffix_grads, const MagepCudaNetworks* networks,
                                      void* const* weight_grads, void* const* bias_grads, void* workspace) {
  if (const char* wrong = check(*call)) return wrong;
  return with_storage(call->dtype, [&](auto tag) -> const char* {
    using S = decltype(tag);
    auto p = parameters<S>(*call);
    const char* wrong = nullptr;
    if ((wrong = take("prefix_grads", prefix_grads, p.s.L, p.prefix_grads))) return wrong;
    if ((wrong = take("suffix_grads", suffix_grads, p.s.L - 1, p.suffix_grads))) return wrong;
    if ((wrong = take("weights", networks->weights, p.s.L, p.W))) return wrong;
    if ((wrong = take("biases", networks->biases, p.s.L, p.b))) return wrong;
    if ((wrong = take("weight_grads", weight_grads, p.s.L, p.W_bar))) return wrong;
    if ((wrong = take("bias_grads", bias_grads, p.s.L, p.b_bar))) return wrong;
    return run(*call, p, true, workspace);
  });
}
