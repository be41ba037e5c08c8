// The entry points of the CPU kernels, one table for each instruction set, chosen when first used.
#pragma once

#include "layout.h"
#include "storage_types.h"

namespace magep {

// S is how tensors of features are stored, T what is computed with and how parameters come.
template <typename S, typename T>
struct Kernels {
  void (*chain_forward)(const Shape&, const S* const* W, const S* const* b, S* const* A, S* const* suffixes,
                        const Parallel&);
  void (*chain_backward)(const Shape&, const S* const* A_bar, const S* const* suffixes_bar, const S* const* W,
                         const S* const* b, S* const* W_bar, S* const* b_bar, const Parallel&);
  void (*equivariant_forward)(const Shape&, const S* const* W, const S* const* b, const T* const* matrices,
                              const T* psi, const Outputs<S>&, T* saved, const Parallel&);
  void (*equivariant_backward)(const Shape&, const OutputGradients<S>&, const S* const* W, const S* const* b,
                               const T* const* matrices, const T* psi, const T* saved, S* const* W_bar, S* const* b_bar,
                               T* const* matrices_bar, T* psi_bar, const Parallel&);
  void (*linear_forward)(const LinearShape&, const S* const* W, const S* const* b, const T* const* matrices,
                         const Outputs<S>&, const Parallel&);
  void (*linear_backward)(const LinearShape&, const OutputGradients<S>&, const S* const* W, const S* const* b,
                          const T* const* matrices, S* const* W_bar, S* const* b_bar, T* const* matrices_bar,
                          const Parallel&);
  void (*invariant_forward)(const Shape&, const S* const* W, const S* const* b, const T* matrix, const T* psi, S* out,
                            T* saved, const Parallel&);
  void (*invariant_backward)(const Shape&, const S* out_bar, const S* const* W, const S* const* b, const T* matrix,
                             const T* psi, const T* saved, S* const* W_bar, S* const* b_bar, T* matrix_bar, T* psi_bar,
                             const Parallel&);
  void (*dense_forward)(const DenseShape&, const T* x, const T* const* layers, T* const* values, const Parallel&);
  void (*dense_backward)(const DenseShape&, const T* out_bar, const T* x, const T* const* layers,
                         const T* const* values, T* x_bar, T* const* layers_bar, const Parallel&);
  void (*adam)(const AdamStep&, const std::vector<int64_t>& sizes, const T* const* gradients, T* const* parameters,
               T* const* means, T* const* squares, const Parallel&);
};

struct KernelTable {
  const char* isa;
  Kernels<float, float> f32;
  Kernels<double, double> f64;
  Kernels<BFloat16, float> bf16;
  Kernels<Float16, float> f16;

  template <typename S, typename T>
  const Kernels<S, T>& of() const;
};

template <>
inline const Kernels<float, float>& KernelTable::of() const {
  return f32;
}
template <>
inline const Kernels<double, double>& KernelTable::of() const {
  return f64;
}
template <>
inline const Kernels<BFloat16, float>& KernelTable::of() const {
  return bf16;
}
template <>
inline const Kernels<Float16, float>& KernelTable::of() const {
  return f16;
}

// Numbers the forward pass keeps per network for the backward pass.
int64_t saved_size(const Shape& shape, Operation operation);

// The table for this processor, or the one MAGEP_FAST_ISA (avx512, avx2, portable) asks for; throws std::runtime_error
// if that is unknown or not supported here.
const KernelTable& kernels();

}  // namespace magep
