// Products of matrices computed by one block, in two ways.
//   Direct  one thread per column and four rows: for operands in shared memory or cache, and small sizes
//   Staged  tiles of both operands in shared memory, a few rows and columns per thread: for operands in global memory
// Both compute, for every c < batch,  C(c, m, n) = sum_k A(c, m, k) B(c, n, k)  and call store(c, m, n, value).
// Operands are functions of (c, row or column, k). Neither starts nor ends with a barrier that the caller could rely
// on.
#pragma once

#include <cstdint>

#include "numbers.cuh"

namespace magep::cuda {

constexpr int kThreads = 256;

template <typename Body>
__device__ void for_each(int count, const Body& body) {
  for (int k = threadIdx.x; k < count; k += blockDim.x) body(k);
}

// The index that is summed over, begin ... end - 1, also as (major, minor) = (at / width, at % width).
struct Inner {
  int begin, end, width;
};
__device__ inline Inner inner(int major, int minor) { return {0, major * minor, minor}; }
__device__ inline Inner inner(int count) { return {0, count, count}; }

struct Index {
  int at, major, minor;
};

// Which neighbours in memory an operand has: along the inner index, or along its rows or columns.
enum class Along { inner, outer };

template <Along kAlong, typename Function>
struct Generated {
  static constexpr Along along = kAlong;
  static constexpr int vector = 1;
  Function function;
  __device__ auto operator()(int c, int outer, const Index& k) const { return function(c, outer, k); }
};
template <Along along, typename Function>
__device__ Generated<along, Function> generated(const Function& function) {
  return {function};
}

// A matrix in memory. Whole 16-byte words are read where all rows are aligned to them.
template <Along kAlong, typename X>
struct Stored {
  static constexpr Along along = kAlong;
  static constexpr int vector = 16 / sizeof(X);
  const X* data;
  int64_t channel, stride;
  bool aligned;

  __device__ Stored(const X* data, int64_t channel, int64_t stride)
      : data(data),
        channel(channel),
        stride(stride),
        aligned(reinterpret_cast<uintptr_t>(data) % 16 == 0 && channel % vector == 0 && stride % vector == 0) {}
  __device__ const X* address(int c, int outer, int k) const {
    return data + c * channel + (along == Along::inner ? outer * stride + k : k * stride + outer);
  }
  __device__ auto operator()(int c, int outer, const Index& k) const { return load(*address(c, outer, k.at)); }
};

template <typename X>
__device__ Stored<Along::inner, X> rows(const X* data, int64_t channel, int64_t stride) {
  return {data, channel, stride};
}
template <typename X>
__device__ Stored<Along::outer, X> columns(const X* data, int64_t channel, int64_t stride) {
  return {data, channel, stride};
}

struct Direct {
  static constexpr int kRows = 4;

  template <typename T, typename A, typename B, typename Store>
  __device__ void product(int batch, int M, int N, Inner range, const A& a, const B& b, const Store& store) const {
    const int groups = (M + kRows - 1) / kRows;
    for_each(batch * groups * N, [&](int task) {
      const int n = task % N, first = task / N % groups * kRows, c = task / N / groups;
      T sum[kRows] = {};
      Index k{range.begin, range.begin / range.width, range.begin % range.width};
      for (; k.at < range.end; ++k.major, k.minor = 0)
        for (; k.minor < range.width && k.at < range.end; ++k.minor, ++k.at) {
          const T y = b(c, n, k);
#pragma unroll
          for (int r = 0; r < kRows; ++r) sum[r] += a(c, first + r < M ? first + r : M - 1, k) * y;
        }
#pragma unroll
      for (int r = 0; r < kRows; ++r)
        if (first + r < M) store(c, first + r, n, sum[r]);
    });
  }
};

template <typename T, int kM, int kN, int kRowsPerThread, int kColumnsPerThread>
struct Tile {
  using Type = T;
  static constexpr int M = kM, N = kN, K = 16, m = kRowsPerThread, n = kColumnsPerThread;
  // Between rows: four more than a multiple of the 32 banks of 4 bytes. A warp that writes 8 steps of k for 4 rows
  // (or, by words of 16 bytes, 4 steps of 8 for 16 rows) then meets every bank once.
  static constexpr int kPadding = 4;
  static_assert((kM / kRowsPerThread) * (kN / kColumnsPerThread) == kThreads, "one thread per block of results");
  static_assert(kM % 16 == 0 && kN % 16 == 0, "rows keep their words of 16 bytes aligned");

  struct Buffers {
    alignas(16) T a[K][kM + kPadding];
    alignas(16) T b[K][kN + kPadding];
  };
};

// Tiles `first`, `first + step`, ... of the results.
template <typename Tile>
struct Staged {
  using T = typename Tile::Type;
  typename Tile::Buffers& shared;
  int first = 0, step = 1;

  static __host__ __device__ int tiles(int M, int N) {
    return ((M + Tile::M - 1) / Tile::M) * ((N + Tile::N - 1) / Tile::N);
  }

  template <typename, typename A, typename B, typename Store>
  __device__ void product(int batch, int M, int N, Inner range, const A& a, const B& b, const Store& store) const {
    const int across = (N + Tile::N - 1) / Tile::N, per_channel = tiles(M, N);
    const int row = threadIdx.x / (Tile::N / Tile::n) * Tile::m, column = threadIdx.x % (Tile::N / Tile::n) * Tile::n;
    for (int task = first; task < batch * per_channel; task += step) {
      const int c = task / per_channel, tile = task % per_channel;
      const int m = tile / across * Tile::M, n = tile % across * Tile::N;
      T sum[Tile::m][Tile::n] = {};
      for (int k = range.begin; k < range.end; k += Tile::K) {
        __syncthreads();
        stage(a, c, m, M, k, range, shared.a);
        stage(b, c, n, N, k, range, shared.b);
        __syncthreads();
#pragma unroll
        for (int step_k = 0; step_k < Tile::K; ++step_k) {
          T x[Tile::m], y[Tile::n];
#pragma unroll
          for (int r = 0; r < Tile::m; ++r) x[r] = shared.a[step_k][row + r];
#pragma unroll
          for (int s = 0; s < Tile::n; ++s) y[s] = shared.b[step_k][column + s];
#pragma unroll
          for (int r = 0; r < Tile::m; ++r)
#pragma unroll
            for (int s = 0; s < Tile::n; ++s) sum[r][s] += x[r] * y[s];
        }
      }
#pragma unroll
      for (int r = 0; r < Tile::m; ++r)
#pragma unroll
        for (int s = 0; s < Tile::n; ++s)
          if (m + row + r < M && n + column + s < N) store(c, m + row + r, n + column + s, sum[r][s]);
    }
  }

 private:
  // tile[k][outer], with zeros beyond the ends.
  template <typename Operand, int kLength>
  static __device__ void stage(const Operand& operand, int c, int first, int count, int begin, const Inner& range,
                               T (&tile)[Tile::K][kLength]) {
    constexpr int kOuter = kLength - Tile::kPadding, kVector = Operand::vector;
    const auto one = [&](int outer, int k) {
      const int at = begin + k;
      tile[k][outer] = first + outer < count && at < range.end
                           ? T(operand(c, first + outer, Index{at, at / range.width, at % range.width}))
                           : T(0);
    };
    if constexpr (kVector > 1) {
      if (operand.aligned && begin % kVector == 0) {
        for_each(kOuter * Tile::K / kVector, [&](int task) {
          constexpr bool kAlongInner = Operand::along == Along::inner;
          constexpr int kWords = 8 / kVector;
          const int outer = kAlongInner ? task / kWords % kOuter : task % (kOuter / kVector) * kVector;
          const int k =
              kAlongInner ? task / (kWords * kOuter) * 8 + task % kWords * kVector : task / (kOuter / kVector);
          const bool inside = kAlongInner ? first + outer < count && begin + k + kVector <= range.end
                                          : first + outer + kVector <= count && begin + k < range.end;
          if (inside) {
            struct alignas(16) Word {
              std::remove_const_t<std::remove_pointer_t<decltype(operand.data)>> x[kVector];
            };
            const Word word = *reinterpret_cast<const Word*>(operand.address(c, first + outer, begin + k));
#pragma unroll
            for (int v = 0; v < kVector; ++v)
              tile[kAlongInner ? k + v : k][kAlongInner ? outer : outer + v] = load(word.x[v]);
          } else {
            for (int v = 0; v < kVector; ++v) one(kAlongInner ? outer : outer + v, kAlongInner ? k + v : k);
          }
        });
        return;
      }
    }
    for_each(kOuter * Tile::K, [&](int task) {
      if (Operand::along == Along::inner)
        one(task / 8 % kOuter, task / (8 * kOuter) * 8 + task % 8);
      else
        one(task % kOuter, task / kOuter);
    });
  }
};

}  // namespace magep::cuda
