// Launching a kernel of one block size with one argument, and the shared memory its launch asks for.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

#include "product.cuh"

namespace magep::cuda {

// What every device gives a block without being asked.
constexpr size_t kDefaultShared = 48 << 10;

template <typename Parameters>
cudaError_t launch(void (*kernel)(Parameters), int64_t blocks, size_t shared, cudaStream_t stream,
                   const Parameters& parameters) {
  static_assert(sizeof(Parameters) <= 4096, "kernel parameters are limited to 4 KiB on older drivers");
  if (blocks > 0x7fffffff) return cudaErrorInvalidValue;
  if (shared > kDefaultShared) {
    const auto error = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                            cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
    if (error != cudaSuccess) return error;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, parameters);
}

#ifdef __CUDACC__
template <typename T>
__device__ T* dynamic_shared() {
  extern __shared__ __align__(16) unsigned char memory[];
  return reinterpret_cast<T*>(memory);
}
#else  // the host shim has no extern arrays
template <typename T>
T* dynamic_shared() {
  return static_cast<T*>(host_cuda::dynamic_shared());
}
#endif

}  // namespace magep::cuda
