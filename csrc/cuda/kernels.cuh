// The kernels. Each takes one struct by value, with the pointers of up to kMaxLayers layers in it: nothing is copied to
// the device before a launch. Grids are one-dimensional, blocks have kThreads threads. No atomics: every number has one
// writer, and sums over blocks are a launch of their own, so equal calls give equal bits.
// Launch bounds promise one block per multiprocessor and no more, which leaves the compiler all the registers it wants:
// nothing is spilled.
#pragma once

#include "launch.cuh"
#include "mix.cuh"

namespace magep::cuda {

template <typename T>
using MixTile = Tile<T, 32, 64, 2, 4>;

constexpr int kOutputs = 2 * kMaxLayers;

template <typename S>
struct ForwardParameters {
  using T = Computed<S>;
  Shape s;
  Layout at;
  StagedWeights staged;
  const S* W[kMaxLayers];
  const S* b[kMaxLayers];
  const T* matrices[kOutputs];
  const T* psi;
  S* out[kOutputs];
  S* pre[kOutputs];
  T* saved;
  int64_t saved_stride;
  Activation activation;
  int first_tile[kOutputs + 1];  // of each output, among the tiles of one network

  __device__ Writer<S> writer(int output) const { return {out[output], pre[output], activation}; }
};

// Output channels of one block of the fused kernel.
constexpr int kSlice = Direct::kRows;

// A whole layer of one network for a slice of output channels, with chains and connections in shared memory (and, if
// `resident`, the weights, which are then read once). Blocks of the same network repeat the chains, which is cheaper
// than a second launch.
template <typename S, bool resident>
__global__ void __launch_bounds__(kThreads, 1) layer_fused(const __grid_constant__ ForwardParameters<S> p) {
  using T = Computed<S>;
  const Shape& s = p.s;
  const int slices = (s.e + kSlice - 1) / kSlice, net = blockIdx.x / slices, slice = blockIdx.x % slices;
  const int e_first = slice * kSlice, count = min(kSlice, s.e - e_first);
  const int64_t first = int64_t(net) * s.d;
  T* memory = dynamic_shared<T>();
  const Sections<T> x{s, p.at, memory, s.d, 0};
  const auto layer = [&](const auto& weights) {
    chain_forward(Direct{}, s, weights, p.b, first, s.d, s.equivariant(), x);
    connect(s, Connections<const T>{s, p.psi, 0}, s.d, x);
    if (slice == 0) {
      T* saved = p.saved + net * p.saved_stride;
      for_each(p.at.size * s.d + 1, [&](int k) { saved[k] = memory[k]; });
    }
    for (int output = 0; output + 1 < s.outputs(); ++output)
      mix_forward(Direct{}, s, output, net, e_first, count, p.matrices[output], x, weights.weight(output / 2 + 1),
                  p.writer(output));
    const int last = s.outputs() - 1, rows_per_e = s.readout_rows() / s.e;
    readout_forward(s, net, e_first * rows_per_e, (e_first + count) * rows_per_e, p.matrices[last], &x.F(0, 0),
                    p.writer(last));
  };
  const GlobalWeights<S> global{s, p.W, first};
  if constexpr (resident) {
    const SharedWeights<T> shared{s, p.staged, memory + p.at.size * s.d + 1, s.d};
    shared.copy(global);
    __syncthreads();
    layer(shared);
  } else {
    layer(global);
  }
}

// The first of two launches for larger layers: chains and connections of one channel, straight into `saved`.
template <typename S>
__global__ void __launch_bounds__(kThreads, 1) layer_chain(const __grid_constant__ ForwardParameters<S> p) {
  using T = Computed<S>;
  __shared__ typename MixTile<T>::Buffers buffers;
  const Shape& s = p.s;
  const int net = blockIdx.x / s.d, c = blockIdx.x % s.d;
  const Sections<T> x{s, p.at, p.saved + net * p.saved_stride, s.d, c};
  const GlobalWeights<S> weights{s, p.W, blockIdx.x};
  chain_forward(Staged<MixTile<T>>{buffers}, s, weights, p.b, blockIdx.x, 1, s.equivariant(), x);
  connect(s, Connections<const T>{s, p.psi, c}, 1, x);
}

// Rows of a readout that a block computes.
constexpr int kReadoutRows = 32;

// The second: one tile of one output of one network.
template <typename S>
__global__ void __launch_bounds__(kThreads, 1) layer_mix(const __grid_constant__ ForwardParameters<S> p) {
  using T = Computed<S>;
  __shared__ typename MixTile<T>::Buffers buffers;
  const Shape& s = p.s;
  const int tiles = p.first_tile[s.outputs()], net = blockIdx.x / tiles, tile = blockIdx.x % tiles;
  int output = 0;
  while (p.first_tile[output + 1] <= tile) ++output;
  const Sections<T> x{s, p.at, p.saved + net * p.saved_stride, s.d, 0};
  const int own = tile - p.first_tile[output];
  if (s.is_readout(output)) {
    const int first = own * kReadoutRows;
    readout_forward(s, net, first, min(first + kReadoutRows, s.readout_rows()), p.matrices[output], &x.F(0, 0),
                    p.writer(output));
  } else {
    const GlobalWeights<S> weights{s, p.W, int64_t(net) * s.d};
    constexpr int kAll = 1 << 30;  // this tile and no other
    mix_forward(Staged<MixTile<T>>{buffers, own, kAll}, s, output, net, 0, s.e, p.matrices[output], x,
                weights.weight(output / 2 + 1), p.writer(output));
  }
}

template <typename S>
struct MatrixGradientParameters {
  using T = Computed<S>;
  Shape s;
  Layout at;
  const S* W[kMaxLayers];
  const S* grads[kOutputs];
  const S* given[kOutputs];
  T* partial[kOutputs];  // [parts][rows][columns], the gradient itself where there is one part
  T* saved;
  int64_t saved_stride;
  const T* readout_matrix;
  T* F_bar;  // of the first network; others follow in the distance of F_stride
  int64_t F_stride;
  Activation activation;
  int first_block[kOutputs + 1];  // blocks after the last are for F_bar
  int part[kOutputs];             // samples of one part

  __device__ OutputGradient<S> bar(int output) const { return {grads[output], given[output], activation}; }
};

// Networks and columns of the readout for which a block computes F_bar.
constexpr int kReadoutNetworks = 8;

// F_bar[net, k] = sum_r bar[net, r] matrix[r, k], for a strip of columns and some networks.
template <typename S, typename T = Computed<S>>
__device__ void readout_backward(const MatrixGradientParameters<S>& p, int block,
                                 T (&bars)[kReadoutNetworks][kThreads]) {
  const Shape& s = p.s;
  const int K = s.readout_columns(), M = s.readout_rows(), strips = (K + kThreads - 1) / kThreads;
  const int k = block % strips * kThreads + threadIdx.x, first = block / strips * kReadoutNetworks;
  const int nets = min(kReadoutNetworks, s.B - first);
  const auto bar = p.bar(s.outputs() - 1);
  T sum[kReadoutNetworks] = {};
  for (int r_0 = 0; r_0 < M; r_0 += kThreads) {
    const int count = min(kThreads, M - r_0);
    __syncthreads();
    for_each(kReadoutNetworks * kThreads, [&](int task) {
      const int net = task / kThreads, r = task % kThreads;
      bars[net][r] = net < nets && r < count ? bar(int64_t(first + net) * M + r_0 + r) : T(0);
    });
    __syncthreads();
    for (int r = 0; k < K && r < count; ++r) {
      const T coefficient = p.readout_matrix[int64_t(r_0 + r) * K + k];
#pragma unroll
      for (int net = 0; net < kReadoutNetworks; ++net) sum[net] += coefficient * bars[net][r];
    }
  }
  // The last column is of the constant 1, whose gradient nobody needs.
#pragma unroll
  for (int net = 0; net < kReadoutNetworks; ++net)
    if (net < nets && k < K - 1) p.F_bar[(first + net) * p.F_stride + k] = sum[net];
}

// Gradients of the matrices, or parts of them, and of the invariants: everything that sums over networks or over the
// rows of the readout.
template <typename S>
__global__ void __launch_bounds__(kThreads, 1) matrix_gradients(const __grid_constant__ MatrixGradientParameters<S> p) {
  using T = Computed<S>;
  union Shared {
    typename MixTile<T>::Buffers tile;
    T bars[kReadoutNetworks][kThreads];
  };
  __shared__ Shared shared;
  const Shape& s = p.s;
  const int block = blockIdx.x;
  if (block >= p.first_block[s.outputs()]) {
    readout_backward(p, block - p.first_block[s.outputs()], shared.bars);
    return;
  }
  int output = 0;
  while (p.first_block[output + 1] <= block) ++output;
  const int M = s.output_rows(output), N = s.output_columns(output);
  const int tiles = Staged<MixTile<T>>::tiles(M, N), own = block - p.first_block[output];
  const int begin = own / tiles * p.part[output], samples = s.B * s.output_positions(output);
  T* to = p.partial[output] + int64_t(own / tiles) * M * N;
  constexpr int kAll = 1 << 30;
  matrix_backward(Staged<MixTile<T>>{shared.tile, own % tiles, kAll}, s, output, begin,
                  min(begin + p.part[output], samples), p.bar(output), p.W, p.at, p.saved, p.saved_stride,
                  [&](int, int r, int k, T value) { to[int64_t(r) * N + k] = value; });
}

template <typename S>
struct DataGradientParameters {
  using T = Computed<S>;
  Shape s;
  Layout at;
  GradientLayout gradients;
  const T* matrices[kOutputs];
  const S* grads[kOutputs];
  const S* given[kOutputs];
  T* saved;
  int64_t saved_stride;
  T* mix;  // [B][gradients.size * d]
  S* W_bar[kMaxLayers];
  Activation activation;
  int channels;  // of a block
  Rectangle middle, last;

  __device__ OutputGradient<S> bar(int output) const { return {grads[output], given[output], activation}; }
};

// Gradients of what the mixing of an equivariant layer reads, for some channels of one network: either of a hidden
// layer's rows or of the terms of a layer's weights.
template <typename S, bool small>
__global__ void __launch_bounds__(kThreads, 1) data_gradients(const __grid_constant__ DataGradientParameters<S> p) {
  using T = Computed<S>;
  const Shape& s = p.s;
  const int L = s.L, jobs = 2 * (L - 1), channel_blocks = (s.d + p.channels - 1) / p.channels;
  const int net = blockIdx.x / (jobs * channel_blocks), rest = blockIdx.x % (jobs * channel_blocks);
  const int job = rest / channel_blocks, first = rest % channel_blocks * p.channels;
  const int count = min(p.channels, s.d - first);
  const MixGradients<T> mix{s, p.gradients, p.mix + int64_t(net) * p.gradients.size * s.d, first};
  const auto run = [&](const auto& engine) {
    if (job < L - 1) {
      const int i = job + 2;
      weights_backward(engine, s, i, net, first, count, p.matrices[2 * i - 2], p.bar(2 * i - 2),
                       Sections<T>{s, p.at, p.saved + net * p.saved_stride, s.d, first}, mix, p.W_bar[i - 1],
                       dynamic_shared<T>(), i < L ? p.middle : p.last);
    } else {
      const int i = job - (L - 1) + 1;
      hidden_backward(engine, s, i, net, first, count, p.matrices[0], p.matrices[2 * i - 1], p.bar(0), p.bar(2 * i - 1),
                      mix);
    }
  };
  if constexpr (small) {
    run(Direct{});
  } else {
    __shared__ typename MixTile<T>::Buffers buffers;
    run(Staged<MixTile<T>>{buffers});
  }
}

template <typename S>
struct ChainGradientParameters {
  using T = Computed<S>;
  Shape s;
  Layout at;
  GradientLayout gradients;
  StagedWeights staged;
  const S* W[kMaxLayers];
  const T* psi;
  T* saved;
  int64_t saved_stride;
  const T* mix;
  T* bars;     // [B][at.chains * d], unless small
  T* psi_bar;  // [B][psi_size]
  S* W_bar[kMaxLayers];
  S* b_bar[kMaxLayers];
};

// Intermediates of one channel, from a network in global memory to a section of one channel.
template <typename T>
__device__ void copy_channel(const Shape& s, const Sections<T>& from, const Sections<T>& to) {
  const auto rows_of = [](int count, int n, T* source, int64_t stride, T* target) {
    for_each(count * n, [&](int k) { target[k] = source[k / n * stride + k % n]; });
  };
  for (int i = 1; i <= s.L; ++i) rows_of(s.columns(i), s.n[i], from.A(i, 0, 0), from.row_stride(s.n[i]), to.A(i, 0, 0));
  const int entries = (s.n_0() + 1) * s.n_0();
  for (int i = s.equivariant() ? 1 : s.L; i <= s.L; ++i)
    rows_of(entries, 1, &from.G0(i, 0, 0, 0), from.channels, &to.G0(i, 0, 0, 0));
  for (int t = 1; s.equivariant() && t < s.L; ++t)
    rows_of(s.n_L(), s.n[t], from.S(t, 0, 0), from.row_stride(s.n[t]), to.S(t, 0, 0));
}

// The reverse of connections and chains of one channel of one network.
template <typename S, bool small>
__global__ void __launch_bounds__(kThreads, 1) chain_gradients(const __grid_constant__ ChainGradientParameters<S> p) {
  using T = Computed<S>;
  const Shape& s = p.s;
  const int net = blockIdx.x / s.d, c = blockIdx.x % s.d;
  const bool equivariant = s.equivariant();
  const Sections<T> saved{s, p.at, p.saved + net * p.saved_stride, s.d, c};
  const MixGradients<const T> mix{s, p.gradients, p.mix + int64_t(net) * p.gradients.size * s.d, c};
  const Connections<const T> psi{s, p.psi, c};
  const Connections<T> psi_bar{s, p.psi_bar + int64_t(net) * s.psi_size(), c};
  const GlobalWeights<S> global{s, p.W, blockIdx.x};
  if constexpr (small) {
    T* memory = dynamic_shared<T>();
    const Sections<T> x{s, p.at, memory, 1, 0}, bar{s, p.at, memory + p.at.chains, 1, 0};
    const SharedWeights<T> weights{s, p.staged, memory + 2 * p.at.chains, 1};
    copy_channel(s, saved, x);
    weights.copy(global);
    __syncthreads();
    connect_backward(s, psi, 1, x, mix, bar, psi_bar);
    chain_backward(Direct{}, s, weights, x, bar, blockIdx.x, 1, equivariant, equivariant, p.W_bar, p.b_bar);
  } else {
    __shared__ typename MixTile<T>::Buffers buffers;
    const Sections<T> bar{s, p.at, p.bars + int64_t(net) * p.at.chains * s.d, s.d, c};
    connect_backward(s, psi, 1, saved, mix, bar, psi_bar);
    chain_backward(Staged<MixTile<T>>{buffers}, s, global, saved, bar, blockIdx.x, 1, equivariant, equivariant, p.W_bar,
                   p.b_bar);
  }
}

template <typename T>
struct SumParameters {
  int jobs;
  int first_block[kOutputs + 2];
  const T* partial[kOutputs + 1];  // [parts][count]
  T* out[kOutputs + 1];
  int count[kOutputs + 1], parts[kOutputs + 1];
};

// Sums parts in their order.
template <typename T>
__global__ void __launch_bounds__(kThreads, 1) sum_parts(const __grid_constant__ SumParameters<T> p) {
  int job = 0;
  while (p.first_block[job + 1] <= int(blockIdx.x)) ++job;
  const int at = (blockIdx.x - p.first_block[job]) * kThreads + threadIdx.x;
  if (at >= p.count[job]) return;
  T sum = 0;
  for (int part = 0; part < p.parts[job]; ++part) sum += p.partial[job][int64_t(part) * p.count[job] + at];
  p.out[job][at] = sum;
}

template <typename S>
struct ChainParameters {
  using T = Computed<S>;
  Shape s;
  Layout at;
  StagedWeights staged;
  const S* W[kMaxLayers];
  const S* b[kMaxLayers];
  S* prefixes[kMaxLayers];
  S* suffixes[kMaxLayers];
  const S* prefix_grads[kMaxLayers];
  const S* suffix_grads[kMaxLayers];
  S* W_bar[kMaxLayers];
  S* b_bar[kMaxLayers];
  T* workspace;  // [B d][sections of one channel: once forward, twice backward], unless small
};

// The chains by themselves, of one channel of one network: forward writes them, backward computes them again and takes
// their gradients to those of weights and biases.
template <typename S, bool small, bool backward>
__global__ void __launch_bounds__(kThreads, 1) chain_products(const __grid_constant__ ChainParameters<S> p) {
  using T = Computed<S>;
  const Shape& s = p.s;
  const int64_t channel = blockIdx.x;
  T* memory = small ? dynamic_shared<T>() : p.workspace + channel * p.at.size * (backward ? 2 : 1);
  const Sections<T> x{s, p.at, memory, 1, 0}, bar{s, p.at, memory + p.at.size, 1, 0};
  // body(i, column, j, index in the tensor), and likewise for suffixes
  const auto for_prefixes = [&](const auto& body) {
    for (int i = 1; i <= s.L; ++i) {
      const int columns = s.columns(i) - 1, size = s.n[i] * columns;
      for_each(size, [&](int k) { body(i, k % columns, k / columns, channel * size + k); });
    }
  };
  const auto for_suffixes = [&](const auto& body) {
    for (int t = 1; t < s.L; ++t) {
      const int size = s.n_L() * s.n[t];
      for_each(size, [&](int k) { body(t, k / s.n[t], k % s.n[t], channel * size + k); });
    }
  };
  const auto run = [&](const auto& engine, const auto& weights) {
    chain_forward(engine, s, weights, p.b, channel, 1, true, x);
    if constexpr (!backward) {
      for_prefixes([&](int i, int column, int j, int64_t at) { store(x.A(i, column, 0)[j], p.prefixes[i - 1][at]); });
      for_suffixes([&](int t, int row, int k, int64_t at) { store(x.S(t, row, 0)[k], p.suffixes[t - 1][at]); });
    } else {
      for_prefixes(
          [&](int i, int column, int j, int64_t at) { bar.A(i, column, 0)[j] = load(p.prefix_grads[i - 1][at]); });
      for_suffixes([&](int t, int row, int k, int64_t at) { bar.S(t, row, 0)[k] = load(p.suffix_grads[t - 1][at]); });
      for (int i = 1; i <= s.L; ++i) for_each(s.n[i], [&](int j) { bar.bias(i, 0)[j] = 0; });
      __syncthreads();
      chain_backward(engine, s, weights, x, bar, channel, 1, true, false, p.W_bar, p.b_bar);
    }
  };
  const GlobalWeights<S> global{s, p.W, channel};
  if constexpr (small) {
    const SharedWeights<T> weights{s, p.staged, memory + p.at.size * (backward ? 2 : 1), 1};
    weights.copy(global);
    __syncthreads();
    run(Direct{}, weights);
  } else {
    __shared__ typename MixTile<T>::Buffers buffers;
    run(Staged<MixTile<T>>{buffers}, global);
  }
}

}  // namespace magep::cuda
