// What the launchers share: checks of a call, messages, choice of types.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <string>

#include "launchers.h"
#include "shape.h"

namespace magep::cuda {

// A message to return from a launcher, valid until the thread's next call.
inline const char* message(std::string text) {
  thread_local std::string kept;
  kept = "magep_fast (cuda): " + std::move(text);
  return kept.c_str();
}

inline const char* status(cudaError_t error, const char* kernel) {
  return error == cudaSuccess ? nullptr : message(std::string(kernel) + ": " + cudaGetErrorString(error));
}

// NULL, or what is wrong with the sizes of a call.
inline const char* check(const MagepCudaCall& call) {
  const auto text = [](int64_t value) { return std::to_string(value); };
  const bool chain = call.operation == MAGEP_CHAIN;
  if (call.operation < MAGEP_CHAIN || call.operation > MAGEP_INVARIANT)
    return message("unknown operation " + text(call.operation));
  if (call.dtype < MAGEP_F32 || call.dtype > MAGEP_F16)
    return message("expected float32, float64, bfloat16 or float16; found dtype number " + text(call.dtype));
  if (call.activation < MAGEP_NONE || call.activation > MAGEP_SIN)
    return message("unknown activation " + text(call.activation) + "; expected 0 (none), 1 (relu), 2 (tanh), 3 (sin)");
  if (call.layers < (chain ? 1 : 2) || call.layers > kMaxLayers)
    return message("expected " + text(chain ? 1 : 2) + " to " + text(kMaxLayers) + " layers; found " +
                   text(call.layers));
  if (call.batch < 1 || call.in_channels < 1 || call.out_channels < 1)
    return message("expected at least one network and one channel in and out; found " + text(call.batch) + ", " +
                   text(call.in_channels) + " and " + text(call.out_channels));
  // Kernels count in 32 bits what belongs to one network, one matrix of coefficients, or one position of every network.
  // The bounds are estimates, in floating point so that they cannot overflow.
  constexpr double kMost = 2147483648.0;
  const double L = call.layers, d = double(call.in_channels), n_0 = double(call.widths[0]),
               n_L = double(call.widths[call.layers]);
  double numbers = 4 * L * (n_0 + n_L) * (n_0 + 1), positions = d;
  for (int i = 0; i <= call.layers; ++i) {
    const double n = double(call.widths[i]), m = double(call.widths[i == 0 ? 0 : i - 1]);
    if (n < 1) return message("every width must be at least 1; found n_" + text(i) + " = " + text(call.widths[i]));
    numbers += n * (m + 4 * (n_0 + n_L + L));
    positions = std::max(positions, n * m);
  }
  const double rows = chain ? 0 : double(call.out_channels) * std::max(n_0, n_L);
  const double columns = d * (3 * n_0 * n_L + (L + 3) * (n_0 + n_L) + 2 * L);
  if (numbers * d >= kMost || positions * double(call.batch) >= kMost || rows * columns >= kMost)
    return message(
        "the networks are too large: numbers per network, of a matrix of coefficients, and positions per batch must "
        "stay below 2^31");
  return nullptr;
}

inline Shape make_shape(const MagepCudaCall& call) {
  Shape s{int(call.batch),
          int(call.in_channels),
          int(call.out_channels),
          call.layers,
          static_cast<Operation>(call.operation),
          {}};
  for (int i = 0; i <= call.layers; ++i) s.n[i] = int(call.widths[i]);
  return s;
}

// Copies `count` pointers to a kernel's parameters, or says which is missing or misaligned.
template <typename X>
const char* take(const char* name, const void* const* from, int count, X* const* to) {
  for (int k = 0; k < count; ++k) {
    const void* pointer = from ? from[k] : nullptr;
    if (pointer == nullptr) return message(std::string(name) + "[" + std::to_string(k) + "] is a null pointer");
    if (reinterpret_cast<uintptr_t>(pointer) % sizeof(X) != 0)
      return message(std::string(name) + "[" + std::to_string(k) + "] must be aligned to its elements of " +
                     std::to_string(sizeof(X)) + " bytes");
    const_cast<X**>(to)[k] = static_cast<X*>(const_cast<void*>(pointer));
  }
  return nullptr;
}

template <typename Body>
auto with_storage(int dtype, const Body& body) {
  switch (dtype) {
    case MAGEP_F64: return body(double{});
    case MAGEP_BF16: return body(__nv_bfloat16{});
    case MAGEP_F16: return body(__half{});
    default: return body(float{});
  }
}

}  // namespace magep::cuda
