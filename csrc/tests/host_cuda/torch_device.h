// Host stand-in: the operators run on CPU tensors, in place of those of the backend `cpu`.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#define MAGEP_DISPATCH_KEY CPU

namespace magep::cuda {

constexpr const char* kDeviceName = "CPU";
struct DeviceGuard {
  explicit DeviceGuard(int32_t) {}
};

inline bool on_device(const torch::stable::Tensor& x) { return x.is_cpu(); }
inline void* current_stream(int32_t) { return nullptr; }

}  // namespace magep::cuda
