// How numbers are stored and computed with, and the activations.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

namespace magep::cuda {

// The type of computation of a storage type.
template <typename S>
struct Computation {
  using type = float;
};
template <>
struct Computation<double> {
  using type = double;
};
template <typename S>
using Computed = typename Computation<S>::type;

__device__ inline float load(float x) { return x; }
__device__ inline double load(double x) { return x; }
__device__ inline float load(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float load(__half x) { return __half2float(x); }

__device__ inline void store(float x, float& to) { to = x; }
__device__ inline void store(double x, double& to) { to = x; }
__device__ inline void store(float x, __nv_bfloat16& to) { to = __float2bfloat16(x); }
__device__ inline void store(float x, __half& to) { to = __float2half(x); }

enum class Activation : int { none, relu, tanh, sin };

// Out of line: their range reductions would otherwise be repeated wherever a number is loaded or stored.
template <typename T>
__noinline__ __device__ T transcendental(Activation f, T x) {
  return f == Activation::tanh ? ::tanh(x) : ::sin(x);
}
template <typename T>
__noinline__ __device__ T cosine(T x) {
  return ::cos(x);
}

template <typename T>
__device__ T activate(Activation f, T x) {
  if (f == Activation::none) return x;
  if (f == Activation::relu) return x > T(0) || x != x ? x : T(0);
  return transcendental(f, x);
}

// f'(x): of relu and tanh from f(x), of sin from x.
template <typename T>
__device__ T derivative(Activation f, T given) {
  if (f == Activation::relu) return given > T(0) ? T(1) : T(0);
  if (f == Activation::tanh) return T(1) - given * given;
  return cosine(given);
}

}  // namespace magep::cuda
