/* The launchers: plain C, free of torch. Every pointer is to device memory, contiguous, aligned to its elements. Work
 * is queued on the stream; nothing is allocated and nothing waits, so calls may be captured in CUDA graphs. Each
 * launcher returns NULL, or a message that is valid until the thread's next call. */
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { MAGEP_F32, MAGEP_F64, MAGEP_BF16, MAGEP_F16 };
enum { MAGEP_CHAIN, MAGEP_EQUIVARIANT, MAGEP_INVARIANT };
enum { MAGEP_NONE, MAGEP_RELU, MAGEP_TANH, MAGEP_SIN };

/* One call's sizes. Features are stored as `dtype`; parameters and `saved` are double for f64, otherwise float. */
typedef struct {
  int operation, dtype, activation;
  int64_t batch, in_channels, out_channels;
  int layers;
  const int64_t* widths; /* layers + 1 */
  int tiled;             /* 1: the kernels for large networks, whatever the size */
  void* stream;
} MagepCudaCall;

/* Weights [batch, in_channels, n_i, n_(i-1)] and biases [batch, in_channels, n_i], one per layer. */
typedef struct {
  const void *const *weights, *const *biases;
} MagepCudaNetworks;

/* Matrices of coefficients: weight 1, bias 1, ..., weight L, bias L, or the invariant layer's one; and connections. */
typedef struct {
  const void* const* matrices;
  const void* psi;
} MagepCudaParameters;

/* A_1 ... A_L, [batch, in_channels, n_i, n_0 + i - 1], and S_1 ... S_(L-1), [batch, in_channels, n_L, n_t]. */
int64_t magep_cuda_chain_workspace(const MagepCudaCall* call, int backward); /* bytes; -1: the call is not valid */
const char* magep_cuda_chain_forward(const MagepCudaCall* call, const MagepCudaNetworks* networks,
                                     void* const* prefixes, void* const* suffixes, void* workspace);
const char* magep_cuda_chain_backward(const MagepCudaCall* call, const void* const* prefix_grads,
                                      const void* const* suffix_grads, const MagepCudaNetworks* networks,
                                      void* const* weight_grads, void* const* bias_grads, void* workspace);

/* Outputs are numbered as the matrices. `pre` takes the outputs before the activation, as the backward pass of sin
 * needs them; it may be NULL. `saved` is [batch, saved_stride] numbers. */
int64_t magep_cuda_saved_size(const MagepCudaCall* call); /* numbers per network; -1: the call is not valid */
const char* magep_cuda_layer_forward(const MagepCudaCall* call, const MagepCudaNetworks* networks,
                                     const MagepCudaParameters* parameters, void* const* outputs, void* const* pre,
                                     void* saved, int64_t saved_stride);

/* `given`: for relu and tanh the outputs, for sin the outputs before it; NULL without an activation. */
int64_t magep_cuda_layer_backward_workspace(const MagepCudaCall* call); /* bytes; -1: the call is not valid */
const char* magep_cuda_layer_backward(const MagepCudaCall* call, const void* const* output_grads,
                                      const void* const* given, const MagepCudaNetworks* networks,
                                      const MagepCudaParameters* parameters, const void* saved, int64_t saved_stride,
                                      void* const* weight_grads, void* const* bias_grads, void* const* matrix_grads,
                                      void* psi_grad, void* workspace);

#ifdef __cplusplus
}
#endif
