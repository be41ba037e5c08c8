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

template <typename T>
__device__ T activate(Activation f, T x) {
  switch (f) {
    case Activation::relu: return x > T(0) ? x : x != x ? x : T(0);
    case Activation::tanh: return ::tanh(x);
    case Activation::sin: return ::sin(x);
    default: return x;
  }
}

// f'(x): of relu and tanh from f(x), of sin from x.
template <typename T>
__device__ T derivative(Activation f, T given) {
  switch (f) {
    case Activation::relu: return given > T(0) ? T(1) : T(0);
    case Activation::tanh: return T(1) - given * given;
    case Activation::sin: return ::cos(given);
    default: return T(1);
  }
}

}  // namespace magep::cuda
