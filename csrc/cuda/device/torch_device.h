// Where the operators run: on CUDA tensors, on torch's current stream.
#pragma once

#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#define MAGEP_DISPATCH_KEY CUDA

namespace magep::cuda {

constexpr const char* kDeviceName = "CUDA";
using DeviceGuard = torch::stable::accelerator::DeviceGuard;

inline bool on_device(const torch::stable::Tensor& x) { return x.is_cuda(); }

// libtorch_cuda has it. It is looked up in the process, not linked, so that the library builds where torch has no CUDA.
inline void* current_stream(int32_t device) {
  using Function = int32_t (*)(int32_t device, void** stream);
  static const auto function = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    return reinterpret_cast<Function>(library ? dlsym(library, "aoti_torch_get_current_cuda_stream") : nullptr);
  }();
  STD_TORCH_CHECK(function, "magep_fast: this torch has no CUDA: aoti_torch_get_current_cuda_stream is not loaded");
  void* stream = nullptr;
  STD_TORCH_CHECK(function(device, &stream) == 0, "magep_fast: torch has no current stream for device ", device);
  return stream;
}

}  // namespace magep::cuda
