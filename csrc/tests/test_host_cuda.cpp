// The stand-in for the CUDA runtime itself: what it must compute, and what it must catch.
#include <cuda_runtime.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

namespace {

constexpr int kThreads = 64;

__device__ int* numbers() { return static_cast<int*>(host_cuda::dynamic_shared()); }

// Each thread reads its neighbour's number; `barrier` says whether it waits for it.
__global__ void neighbours(int* out, bool barrier) {
  numbers()[threadIdx.x] = static_cast<int>(threadIdx.x);
  if (barrier) __syncthreads();
  out[blockIdx.x * kThreads + threadIdx.x] = numbers()[(threadIdx.x + 1) % kThreads];
}

__global__ void butterfly(int* out) {
  int sum = static_cast<int>(threadIdx.x);
  for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
  out[threadIdx.x] = sum;
}

__global__ void leave_early(int*) {
  if (threadIdx.x > 0) __syncthreads();
}

__global__ void part_of_a_warp(int* out) {
  if (threadIdx.x % 2 == 0) out[0] = __shfl_xor_sync(0xffffffffu, 1, 2);
}

__global__ void beyond_shared(int* out) { out[0] = numbers()[kThreads]; }

__global__ void beyond_global(int* out) { out[kThreads] = 1; }

template <typename... Parameters, typename... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), int blocks, size_t shared, Arguments... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = shared;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

std::vector<int> run_neighbours(uint64_t seed, bool barrier) {
  host_cuda::device.seed = seed;
  std::vector<int> out(2 * kThreads);
  launch(neighbours, 2, kThreads * sizeof(int), out.data(), barrier);
  return out;
}

// Whether `body` ends its process, in a copy of this one.
template <typename Body>
bool dies(const Body& body) {
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    if (!std::freopen("/dev/null", "w", stderr)) _exit(0);
    body();
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return !WIFEXITED(status) || WEXITSTATUS(status) != 0;
}

}  // namespace

int main() {
  const std::vector<int> plain = run_neighbours(0, true);
  for (int k = 0; k < 2 * kThreads; ++k) CHECK(plain[k] == (k + 1) % kThreads, "thread %d read %d", k, plain[k]);
  bool race_found = false;
  for (uint64_t seed = 1; seed <= 4; ++seed) {
    CHECK(run_neighbours(seed, true) == plain, "a schedule changed a result that has its barrier");
    race_found = race_found || run_neighbours(seed, false) != plain;
  }
  CHECK(race_found, "no schedule showed the missing barrier");

  std::vector<int> out(kThreads);
  const int64_t before = host_cuda::device.launches;
  launch(butterfly, 1, 0, out.data());
  CHECK(host_cuda::device.launches == before + 1, "launches are not counted");
  for (int k = 0; k < kThreads; ++k) CHECK(out[k] == 32 * (k / 32 * 32) + 31 * 32 / 2, "lane %d has %d", k, out[k]);

  CHECK(dies([&] { launch(leave_early, 1, 0, out.data()); }), "a barrier that not all reach was not found");
  CHECK(dies([&] { launch(part_of_a_warp, 1, 0, out.data()); }), "a shuffle without all lanes was not found");
  const size_t much = 64 << 10, too_much = host_cuda::device.shared_per_block + 1;
  CHECK(dies([&] { launch(beyond_shared, 1, much, out.data()); }), "shared memory was given without being asked for");
  const auto kernel = reinterpret_cast<const void*>(beyond_shared);
  CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(too_much)) != cudaSuccess,
        "more shared memory was given than the device has");
  if (HOST_CUDA_ASAN) {
    CHECK(dies([&] { launch(beyond_shared, 1, kThreads * sizeof(int), out.data()); }), "shared memory has no end");
    CHECK(dies([&] { launch(beyond_global, 1, 0, out.data()); }), "global memory has no end");
  }
}
