// Host stand-in for the CUDA runtime: the unchanged sources of csrc/cuda compile with a C++ compiler and run block by
// block, every thread of a block a fiber of its own, so that barriers are barriers.
//
//   __syncthreads        a fiber waits until all of its block have arrived; a thread that has left is an error
//   __shfl_xor_sync      likewise for the lanes of a warp
//   __shared__           one copy for the block that runs; dynamic shared memory ends where the launch says
//   schedules            between barriers, fibers run one after the other in an order drawn from a seed: a result that
//                        depends on the seed shows a missing barrier
//   limits               threads, grid, shared memory (also what was asked for by cudaFuncSetAttribute) are checked
//
// With AddressSanitizer, shared memory beyond the launch's size is poisoned.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#define HOST_CUDA_ASAN 1
#else
#define HOST_CUDA_ASAN 0
#endif

#define __host__
#define __device__
#define __global__
#define __noinline__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1 };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
enum cudaDeviceAttr { cudaDevAttrMaxSharedMemoryPerBlockOptin = 97 };
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
};

namespace host_cuda {

struct Device {
  int shared_per_block = 163 << 10;  // what a launch may ask for; an A100's
  uint64_t seed = 0;                 // of the schedules; 0 runs threads in order
  int64_t launches = 0;
  std::map<const void*, size_t> shared_asked;
};
inline Device device;

[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "host_cuda: %s\n", what);
  std::abort();
}

constexpr size_t kSharedMost = 256 << 10, kStack = 256 << 10;
// Allocated, not static: of a static array the compiler takes accesses to be in bounds that the launch's size forbids.
inline unsigned char* const shared_memory = static_cast<unsigned char*>(std::aligned_alloc(128, kSharedMost));
inline void* dynamic_shared() { return shared_memory; }

constexpr int kWarp = 32;

struct Fiber {
  ucontext_t context;
  std::unique_ptr<unsigned char[]> stack{new unsigned char[kStack]};
  enum { running, at_barrier, at_shuffle, done } state = running;
  uint64_t exchanged = 0;
  void* sanitizer_stack = nullptr;
};

// The block that runs.
struct Block {
  std::vector<Fiber> fibers;
  ucontext_t scheduler;
  int threads = 0, current = 0;
  const std::function<void()>* body = nullptr;
  void* sanitizer_stack = nullptr;
  const void* scheduler_bottom = nullptr;
  size_t scheduler_size = 0;
};
inline Block block;

inline void leave_fiber(bool for_good) {
  Fiber& fiber = block.fibers[block.current];
#if HOST_CUDA_ASAN
  __sanitizer_start_switch_fiber(for_good ? nullptr : &fiber.sanitizer_stack, block.scheduler_bottom,
                                 block.scheduler_size);
#endif
  if (for_good) {
    setcontext(&block.scheduler);
  } else {
    swapcontext(&fiber.context, &block.scheduler);
#if HOST_CUDA_ASAN
    __sanitizer_finish_switch_fiber(fiber.sanitizer_stack, &block.scheduler_bottom, &block.scheduler_size);
#endif
  }
}

inline void enter_fiber(int thread);

inline void wait(decltype(Fiber::state) state) {
  block.fibers[block.current].state = state;
  leave_fiber(false);
}

}  // namespace host_cuda

// As variables of the kernels' language; set before a fiber runs.
inline dim3 blockIdx{0, 0, 0}, threadIdx{0, 0, 0}, blockDim, gridDim;

namespace host_cuda {

inline void fiber_main() {
#if HOST_CUDA_ASAN
  __sanitizer_finish_switch_fiber(nullptr, &block.scheduler_bottom, &block.scheduler_size);
#endif
  (*block.body)();
  block.fibers[block.current].state = Fiber::done;
  leave_fiber(true);
}

inline void enter_fiber(int thread) {
  block.current = thread;
  threadIdx.x = static_cast<unsigned>(thread);
  Fiber& fiber = block.fibers[thread];
  fiber.state = Fiber::running;
#if HOST_CUDA_ASAN
  __sanitizer_start_switch_fiber(&block.sanitizer_stack, fiber.stack.get(), kStack);
#endif
  swapcontext(&block.scheduler, &fiber.context);
#if HOST_CUDA_ASAN
  __sanitizer_finish_switch_fiber(block.sanitizer_stack, nullptr, nullptr);
#endif
}

// Runs every thread of a block to its end.
inline void run_block(int threads, std::mt19937_64* schedule) {
  if (static_cast<int>(block.fibers.size()) < threads) block.fibers.resize(threads);
  block.threads = threads;
  for (int t = 0; t < threads; ++t) {
    Fiber& fiber = block.fibers[t];
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStack;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, fiber_main, 0);
    fiber.state = Fiber::running;
  }
  std::vector<int> order(threads);
  std::iota(order.begin(), order.end(), 0);
  std::vector<bool> ready(threads, true);
  while (true) {
    if (schedule) std::shuffle(order.begin(), order.end(), *schedule);
    for (int t : order)
      if (ready[t]) enter_fiber(t);
    const auto count = [&](int first, int last, auto state) {
      int found = 0;
      for (int t = first; t < last; ++t) found += block.fibers[t].state == state;
      return found;
    };
    if (count(0, threads, Fiber::done) == threads) return;
    std::fill(ready.begin(), ready.end(), false);
    bool progress = false;
    for (int first = 0; first < threads; first += kWarp) {
      const int last = std::min(first + kWarp, threads), waiting = count(first, last, Fiber::at_shuffle);
      if (waiting == 0) continue;
      if (waiting < last - first) fail("not all lanes of a warp take part in a shuffle");
      std::fill(ready.begin() + first, ready.begin() + last, true);
      progress = true;
    }
    if (progress) continue;
    if (count(0, threads, Fiber::at_barrier) < threads) fail("a thread left while others wait at __syncthreads");
    std::fill(ready.begin(), ready.end(), true);
  }
}

inline cudaError_t launch(const void* kernel, const cudaLaunchConfig_t& config, const std::function<void()>& body) {
  const size_t shared = config.dynamicSmemBytes;
  const auto asked = device.shared_asked.find(kernel);
  const size_t allowed = asked == device.shared_asked.end() ? 48 << 10 : asked->second;
  if (config.blockDim.x < 1 || config.blockDim.x > 1024) fail("a block must have 1 to 1024 threads");
  if (config.gridDim.x < 1 || config.gridDim.x > 0x7fffffffu) fail("a grid must have 1 to 2^31 - 1 blocks");
  if (shared > allowed) fail("a launch asks for more shared memory than its kernel was given");
  ++device.launches;
  blockDim = config.blockDim;
  gridDim = config.gridDim;
  block.body = &body;
  std::mt19937_64 schedule(device.seed);
#if HOST_CUDA_ASAN
  __asan_poison_memory_region(shared_memory + (shared + 7) / 8 * 8, kSharedMost - (shared + 7) / 8 * 8);
#endif
  // Blocks have no order either.
  std::vector<unsigned> blocks(config.gridDim.x);
  std::iota(blocks.begin(), blocks.end(), 0u);
  if (device.seed) std::shuffle(blocks.begin(), blocks.end(), schedule);
  for (unsigned index : blocks) {
    blockIdx.x = index;
    std::memset(shared_memory, 0xff, shared);  // NaN, so that what nobody wrote cannot pass
    run_block(static_cast<int>(config.blockDim.x), device.seed ? &schedule : nullptr);
  }
#if HOST_CUDA_ASAN
  __asan_unpoison_memory_region(shared_memory, kSharedMost);
#endif
  return cudaSuccess;
}

}  // namespace host_cuda

inline void __syncthreads() { host_cuda::wait(host_cuda::Fiber::at_barrier); }
inline void __syncwarp(unsigned = ~0u) { host_cuda::wait(host_cuda::Fiber::at_shuffle); }

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lanes) {
  static_assert(sizeof(T) <= 8, "shuffles exchange at most 8 bytes");
  if (mask != ~0u) host_cuda::fail("shuffles of parts of a warp are not supported");
  auto& block = host_cuda::block;
  std::memcpy(&block.fibers[block.current].exchanged, &value, sizeof value);
  host_cuda::wait(host_cuda::Fiber::at_shuffle);
  std::memcpy(&value, &block.fibers[block.current ^ lanes].exchanged, sizeof value);
  host_cuda::wait(host_cuda::Fiber::at_shuffle);  // all have read before any writes again
  return value;
}

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  return host_cuda::launch(reinterpret_cast<const void*>(kernel), *config, [&] { kernel(arguments...); });
}

inline cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute, int bytes) {
  if (bytes > host_cuda::device.shared_per_block) return cudaErrorInvalidValue;
  host_cuda::device.shared_asked[kernel] = static_cast<size_t>(bytes);
  return cudaSuccess;
}
inline cudaError_t cudaGetDevice(int* index) {
  *index = 0;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = host_cuda::device.shared_per_block;
  return cudaSuccess;
}
inline const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : "invalid argument";
}

template <typename T>
T min(T a, T b) {
  return a < b ? a : b;
}
