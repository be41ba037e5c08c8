// The outputs of a layer as products of their matrix of coefficients with data of one network, and the reverse. The
// data of an output are never stored: W is read where it lies, [WW] and [bW] are made from their factors.
#pragma once

#include "readout.cuh"

namespace magep::cuda {

// What the weights of layer i > 1 are made of: [W], [WW], [bW] at (j, k) of channel c.
template <typename T, typename X>
struct WeightTerms {
  const T *left, *right, *bias, *bias_factor;
  int64_t left_stride, right_stride;
  int rank, n, m;
  Weight<X> W;

  __device__ WeightTerms(const Shape& s, int i, const Sections<T>& x, Weight<X> W)
      : left(x.left(i, 0)),
        right(x.right(i, 0)),
        bias(x.bias(i, 0)),
        bias_factor(x.bias_factor(i, 0)),
        left_stride(x.row_stride(s.n[i])),
        right_stride(x.row_stride(s.n[i - 1])),
        rank(s.rank(i)),
        n(s.n[i]),
        m(s.n[i - 1]),
        W(W) {}
  __device__ T operator()(int term, int c, int j, int k) const {
    if (term == 0) return load(W.data[c * W.channel + j * W.ld + k]);
    if (term == 2) return bias[c * n + j] * bias_factor[c * m + k];
    T value = 0;
    for (int l = 0; l < rank; ++l) value += left[l * left_stride + c * n + j] * right[l * right_stride + c * m + k];
    return value;
  }
};

// What the bias of hidden layer i, and the weights of layer 1, are made of: row x of channel c at j.
template <typename T>
__device__ T hidden_term(const Shape& s, int i, const Sections<T>& at, int x, int c, int j) {
  const int n_0 = s.n_0();
  if (x < n_0) return at.A(i, x, c)[j];
  if (x < 2 * n_0) {
    T value = 0;
    for (int q = 0; q < n_0; ++q) value += at.A(i, q, c)[j] * at.G0(i, q, x - n_0, c);
    return value;
  }
  if (x < 3 * n_0) return at.bias(i, c)[j] * at.G0(i, n_0, x - 2 * n_0, c);
  return at.A(i, x - 2 * n_0, c)[j];
}

// Writes activated outputs, and their arguments where the backward pass will need them.
template <typename S>
struct Writer {
  using T = Computed<S>;
  S *out, *pre;
  Activation activation;

  __device__ void operator()(int64_t at, T value) const {
    if (pre) store(value, pre[at]);
    store(activate(activation, value), out[at]);
  }
};

// Rows of output channels e_first ... e_first + count - 1 of one output of one network. Readouts are not among them.
template <typename S, typename Engine, typename X, typename T = Computed<S>>
__device__ void mix_forward(const Engine& engine, const Shape& s, int output, int net, int e_first, int count,
                            const T* matrix, const Sections<T>& x, Weight<X> W, const Writer<S>& write) {
  const int i = output / 2 + 1, n = s.n[i], m = s.n[i - 1], K = s.output_columns(output);
  const int rows_per_e = s.output_rows(output) / s.e;
  const int64_t to = (int64_t(net) * s.e + e_first) * rows_per_e * s.output_positions(output);
  const auto coefficients = rows(matrix + int64_t(e_first) * rows_per_e * K, 0, K);
  if (output == 0 || output % 2 == 1) {
    const auto data =
        generated<Along::outer>([&](int, int j, const Index& k) { return hidden_term(s, i, x, k.major, k.minor, j); });
    const int n_0 = s.n_0();
    engine.template product<T>(
        1, count * rows_per_e, n, inner(s.hidden_rows(i), s.d), coefficients, data,
        [&](int, int r, int j, T value) {  // weights of layer 1: r = (e, k), stored as (e, j, k)
          write(to + (output == 0 ? int64_t(r / n_0 * n + j) * n_0 + r % n_0 : int64_t(r) * n + j), value);
        });
  } else {
    const WeightTerms<T, X> terms(s, i, x, W);
    if (i < s.L)
      engine.template product<T>(
          1, count, n * m, inner(3, s.d), coefficients, generated<Along::outer>([&](int, int position, const Index& k) {
            return terms(k.major, k.minor, position / m, position % m);
          }),
          [&](int, int r, int position, T value) { write(to + int64_t(r) * n * m + position, value); });
    else
      engine.template product<T>(1, count * n, m, inner(3 * n, s.d), coefficients,
                                 generated<Along::outer>([&](int, int column, const Index& k) {
                                   return terms(k.major / n, k.minor, k.major % n, column);
                                 }),
                                 [&](int, int r, int k, T value) { write(to + int64_t(r) * m + k, value); });
  }
}

__device__ inline float from_lane(float x, int offset) { return __shfl_xor_sync(0xffffffffu, x, offset); }
__device__ inline double from_lane(double x, int offset) { return __shfl_xor_sync(0xffffffffu, x, offset); }

// Rows first ... last - 1 of the readout of one network, a warp for each: out[r] = sum_k matrix[r, k] F[k].
template <typename S, typename T = Computed<S>>
__device__ void readout_forward(const Shape& s, int net, int first, int last, const T* matrix, const T* F,
                                const Writer<S>& write) {
  constexpr int kWarp = 32;
  const int K = s.readout_columns(), lane = threadIdx.x % kWarp;
  for (int r = first + threadIdx.x / kWarp; r < last; r += blockDim.x / kWarp) {
    T sum = 0;
    for (int k = lane; k < K; k += kWarp) sum += matrix[int64_t(r) * K + k] * F[k];
    for (int offset = kWarp / 2; offset > 0; offset /= 2) sum += from_lane(sum, offset);
    if (lane == 0) write(int64_t(net) * s.readout_rows() + r, sum);
  }
}

// Gradients of one output before its activation.
template <typename S>
struct OutputGradient {
  using T = Computed<S>;
  const S *grad, *given;
  Activation activation;

  __device__ T operator()(int64_t at) const {
    const T value = load(grad[at]);
    if (activation == Activation::none) return value;
    const T known = load(given[at]);
    if (activation == Activation::relu) return known <= T(0) ? T(0) : value;
    return value * derivative(activation, known);
  }
};

// Of output `output`, row r of its matrix, at column `position` of network `net`.
template <typename S>
__device__ Computed<S> output_gradient(const Shape& s, int output, const OutputGradient<S>& bar, int net, int r,
                                       int position) {
  if (output == 0 && s.equivariant()) {  // r = (e, k), stored as (e, j, k)
    const int n_0 = s.n_0();
    return bar(((int64_t(net) * s.e + r / n_0) * s.n[1] + position) * n_0 + r % n_0);
  }
  return bar((int64_t(net) * s.output_rows(output) + r) * s.output_positions(output) + position);
}

// H_bar of hidden layer i for `count` channels: the transposed matrices times the gradients of its bias and, for
// i = 1, of its weights.
template <typename S, typename Engine, typename T = Computed<S>>
__device__ void hidden_backward(const Engine& engine, const Shape& s, int i, int net, int first, int count,
                                const T* weight_matrix, const T* bias_matrix, const OutputGradient<S>& weight_bar,
                                const OutputGradient<S>& bias_bar, const MixGradients<T>& mix) {
  const int K = s.hidden_rows(i) * s.d, weight_rows = i == 1 ? s.e * s.n_0() : 0;
  engine.template product<T>(1, s.hidden_rows(i) * count, s.n[i], inner(weight_rows + s.e),
                             generated<Along::outer>([&](int, int r, const Index& k) {
                               const int column = r / count * s.d + first + r % count;
                               return k.at < weight_rows ? weight_matrix[int64_t(k.at) * K + column]
                                                         : bias_matrix[int64_t(k.at - weight_rows) * K + column];
                             }),
                             generated<Along::outer>([&](int, int j, const Index& k) {
                               return k.at < weight_rows
                                          ? output_gradient(s, 0, weight_bar, net, k.at, j)
                                          : output_gradient(s, 2 * i - 1, bias_bar, net, k.at - weight_rows, j);
                             }),
                             [&](int, int r, int j, T value) { mix.H(i, r / count, r % count)[j] = value; });
}

// A rectangle of positions (j, k) of a layer's weights, whose gradients of [WW] and [bW] meet their factors in shared
// memory: [2 terms][channels][rows][columns], with columns of odd distance.
struct Rectangle {
  int rows, columns;
  __host__ __device__ int ld() const { return columns | 1; }
  __host__ __device__ int size() const { return rows * ld(); }
};

// Gradients that the weights of layer i > 1 leave to `count` channels: W_bar = sum Phi_1 Y_bar directly, and with
// Z = sum Phi_2 Y_bar, those of the factors, left_bar = Z right^T and right_bar = left^T Z; likewise for [bW].
template <typename S, typename Engine, typename T = Computed<S>>
__device__ void weights_backward(const Engine& engine, const Shape& s, int i, int net, int first, int count,
                                 const T* matrix, const OutputGradient<S>& bar, const Sections<T>& x,
                                 const MixGradients<T>& mix, S* W_bar, T* Z, const Rectangle& rectangle) {
  const int n = s.n[i], m = s.n[i - 1], d = s.d, output = 2 * i - 2, rank = s.rank(i), ld = rectangle.ld();
  const bool last = i == s.L;
  const int64_t K = s.output_columns(output);
  const auto at = [&](int term, int c, int j, int k) -> T& {
    return Z[((term - 1) * count + c) * rectangle.size() + j * ld + k];
  };
  for (int j_0 = 0; j_0 < n; j_0 += rectangle.rows)
    for (int k_0 = 0; k_0 < m; k_0 += rectangle.columns) {
      const int J = min(rectangle.rows, n - j_0), columns_here = min(rectangle.columns, m - k_0);
      const auto keep = [&](int term, int c, int j, int k, T value) {
        if (term == 0)
          store(value, W_bar[((int64_t(net) * d + first + c) * n + j_0 + j) * m + k_0 + k]);
        else
          at(term, c, j, k) = value;
      };
      if (last)  // rows (term, p, c) of the transposed matrix, summed over (e, j)
        engine.template product<T>(
            1, 3 * J * count, columns_here, inner(s.e * n), generated<Along::outer>([&](int, int r, const Index& k) {
              const int term = r / (J * count), p = r / count % J;
              return matrix[k.at * K + (term * n + j_0 + p) * d + first + r % count];
            }),
            generated<Along::outer>(
                [&](int, int k, const Index& row) { return output_gradient(s, output, bar, net, row.at, k_0 + k); }),
            [&](int, int r, int k, T value) { keep(r / (J * count), r % count, r / count % J, k, value); });
      else  // rows (term, c), summed over e
        engine.template product<T>(
            1, 3 * count, J * columns_here, inner(s.e), generated<Along::outer>([&](int, int r, const Index& k) {
              return matrix[k.at * K + r / count * d + first + r % count];
            }),
            generated<Along::outer>([&](int, int position, const Index& row) {
              const int j = j_0 + position / columns_here, k = k_0 + position % columns_here;
              return output_gradient(s, output, bar, net, row.at, j * m + k);
            }),
            [&](int, int r, int position, T value) {
              keep(r / count, r % count, position / columns_here, position % columns_here, value);
            });
      __syncthreads();
      const T *left = x.left(i, 0), *right = x.right(i, 0), *bias = x.bias(i, 0), *bias_factor = x.bias_factor(i, 0);
      const int64_t left_stride = x.row_stride(n), right_stride = x.row_stride(m);
      // Rows 0 ... rank - 1 by [WW], row `rank` by [bW].
      for_each(count * (rank + 1) * J, [&](int task) {
        const int j = task % J, l = task / J % (rank + 1), c = task / J / (rank + 1);
        const T* factor = l < rank ? right + l * right_stride + c * m : bias_factor + c * m;
        const T* row = &at(l < rank ? 1 : 2, c, j, 0);
        T value = k_0 == 0 ? T(0) : mix.left(i, l, c)[j_0 + j];
        for (int k = 0; k < columns_here; ++k) value += row[k] * factor[k_0 + k];
        mix.left(i, l, c)[j_0 + j] = value;
      });
      for_each(count * (rank + 1) * columns_here, [&](int task) {
        const int k = task % columns_here, l = task / columns_here % (rank + 1), c = task / columns_here / (rank + 1);
        const T* factor = l < rank ? left + l * left_stride + c * n : bias + c * n;
        const T* column = &at(l < rank ? 1 : 2, c, 0, k);
        T value = j_0 == 0 ? T(0) : mix.right(i, l, c)[k_0 + k];
        for (int j = 0; j < J; ++j) value += column[j * ld] * factor[j_0 + j];
        mix.right(i, l, c)[k_0 + k] = value;
      });
      __syncthreads();
    }
}

// A part of the gradient of one output's matrix: the sum over samples begin ... end - 1, which are numbered
// (net, position), of the output's gradient times its data.
template <typename S, typename Engine, typename T = Computed<S>, typename Store>
__device__ void matrix_backward(const Engine& engine, const Shape& s, int output, int begin, int end,
                                const OutputGradient<S>& bar, const S* const* W, const Layout& at, T* saved,
                                int64_t saved_stride, const Store& store) {
  const int i = output / 2 + 1, n = s.n[i], m = s.n[i - 1], d = s.d;
  const Inner samples{begin, end, s.output_positions(output)};
  const auto left = generated<Along::inner>(
      [&](int, int r, const Index& sample) { return output_gradient(s, output, bar, sample.major, r, sample.minor); });
  const auto network = [&](int net) { return Sections<T>{s, at, saved + net * saved_stride, d, 0}; };
  const int M = s.output_rows(output), N = s.output_columns(output);
  if (s.is_readout(output)) {
    engine.template product<T>(1, M, N, samples, left, generated<Along::outer>([&](int, int k, const Index& sample) {
                                 return network(sample.major).base[int64_t(at.F) * d + k];
                               }),
                               store);
  } else if (output == 0 || output % 2 == 1) {
    engine.template product<T>(1, M, N, samples, left, generated<Along::inner>([&](int, int k, const Index& sample) {
                                 return hidden_term(s, i, network(sample.major), k / d, k % d, sample.minor);
                               }),
                               store);
  } else {
    engine.template product<T>(
        1, M, N, samples, left, generated<Along::inner>([&](int, int column, const Index& sample) {
          const GlobalWeights<S> weights{s, W, int64_t(sample.major) * d};
          const WeightTerms<T, S> terms(s, i, network(sample.major), weights.weight(i));
          const int c = column % d, row = column / d;
          return i < s.L ? terms(row, c, sample.minor / m, sample.minor % m) : terms(row / n, c, row % n, sample.minor);
        }),
        store);
  }
}

}  // namespace magep::cuda
