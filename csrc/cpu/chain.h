// The two chains of one network and channel, and their reverse.
//   A_1 = W_1, A_i = W_i [A_(i-1) | b_(i-1)]      S_(L-1) = W_L, S_t = S_(t+1) W_(t+1)
#pragma once

#include <stdexcept>
#include <vector>

#include "gemm.h"
#include "lanes.h"
#include "layout.h"
#include "storage.h"

namespace magep {
namespace MAGEP_ISA {

// At least `count` numbers of a vector that is kept between calls. It never shrinks: growing back clears what is new.
template <typename T>
inline T* at_least(int64_t count, std::vector<T>& memory) {
  if (static_cast<int64_t>(memory.size()) < count) memory.resize(count);
  return memory.data();
}

// Memory of one thread, kept between calls: taking a slice costs nothing, growing happens before the work starts.
template <typename T>
class Scratch {
 public:
  // A buffer for this thread of at least `count` numbers, valid until the next call of `begin`.
  static Scratch begin(int64_t count) {
    constexpr int64_t kLine = 64 / sizeof(T);
    thread_local std::vector<T> memory;
    T* first = at_least(count + kLine, memory);
    return Scratch(first + (kLine - reinterpret_cast<uintptr_t>(first) / sizeof(T) % kLine) % kLine, count);
  }
  T* take(int64_t count) {
    T* slice = next_;
    next_ += (count + 15) / 16 * 16;
    if (next_ > end_) throw std::length_error("magep_fast: scratch memory was reserved too small");
    return slice;
  }

 private:
  Scratch(T* memory, int64_t count) : next_(memory), end_(memory + count) {}
  T *next_, *end_;
};

template <typename S, typename T>
struct Network {
  const Shape& s;
  const Layout& at;
  const S* const* W;  // [B, d, n_i, n_(i-1)], at i - 1
  const S* const* b;  // [B, d, n_i]
  const T* psi;       // [pairs, n_0 + 1, n_L, d]

  const S* weight(int64_t i, int64_t net, int64_t channel) const {
    return W[i - 1] + (net * s.d + channel) * s.n[i] * s.n[i - 1];
  }
  const S* bias(int64_t i, int64_t net, int64_t channel) const { return b[i - 1] + (net * s.d + channel) * s.n[i]; }
  const T* connection(int64_t pair) const { return psi + pair * (s.n_0() + 1) * s.n_L() * s.d; }
  // Psi_(pair) of one channel as an operand (q, p), and its transpose (p, q); row n_0 is psi.
  Operand<T> psi_qp(int64_t pair, int64_t channel) const { return {connection(pair) + channel, s.n_L() * s.d, s.d}; }
  Operand<T> psi_pq(int64_t pair, int64_t channel) const { return {connection(pair) + channel, s.d, s.n_L() * s.d}; }
};

// W_i of one network and channel in the type of computation: where it lies, or converted into `space`.
template <typename S, typename T>
inline const T* weight_as(const Network<S, T>& x, int64_t i, int64_t net, int64_t channel, T* space) {
  const S* w = x.weight(i, net, channel);
  if constexpr (std::is_same_v<S, T>) {
    (void)space;
    return w;
  } else {
    load_row(w, x.s.n[i] * x.s.n[i - 1], space);
    return space;
  }
}

template <typename S, typename T>
int64_t largest_matrix(const Shape& s) {
  if (std::is_same_v<S, T>) return 0;
  int64_t size = 0;
  for (int64_t i = 1; i <= s.L(); ++i) size = std::max(size, s.n[i] * s.n[i - 1]);
  return size;
}

inline int64_t widest(const Shape& s) { return *std::max_element(s.n.begin(), s.n.end()); }

template <typename S, typename T>
int64_t chain_scratch(const Shape& s) {
  return (s.n_0() + 1) * s.n_L() + largest_matrix<S, T>(s) + kTransposedBlock + 64;
}

// How far ahead of the weights in use to fetch: the next channel, or some pages of a large matrix.
template <typename S, typename T>
inline int64_t next_weights(const Shape& s, int64_t i) {
  return std::is_same_v<S, T> ? std::min<int64_t>(4096, s.n[i] * s.n[i - 1]) : 0;  // converted ones lie elsewhere
}

// Fills A (and with `suffix` S and R) of one network and channel.
template <typename S, typename T>
void chain_forward(const Network<S, T>& x, int64_t net, int64_t channel, bool suffix, T* saved, Scratch<T> scratch) {
  const Shape& s = x.s;
  const Layout& at = x.at;
  const int64_t L = s.L(), n_0 = s.n_0(), n_L = s.n_L();
  T* space = scratch.take(largest_matrix<S, T>(s));
  T* transposed = scratch.take(kTransposedBlock);
  const auto part = [&](const Section& section) { return saved + section.offset + channel * section.channel_stride; };
  for (int64_t i = 1; i <= L; ++i) {
    const Section& to = at.A[i];
    if (i == 1) {
      const S* w = x.weight(1, net, channel);
      for (int64_t q = 0; q < n_0; ++q)
        for (int64_t j = 0; j < s.n[1]; ++j) part(to)[q * to.row_stride + j] = load_one<S, T>(w[j * n_0 + q]);
    } else {
      const Section& from = at.A[i - 1];
      const T* w = weight_as(x, i, net, channel, space);
      gemm_transposed<T>(from.rows, s.n[i], s.n[i - 1], part(from), from.row_stride, w, s.n[i - 1], part(to),
                         to.row_stride, false, transposed, next_weights<S, T>(s, i));
    }
    load_row(x.bias(i, net, channel), s.n[i], part(to) + (to.rows - 1) * to.row_stride);
  }
  T* PL = saved + at.PL;
  const Section& last = at.A[L];
  for (int64_t p = 0; p < n_L; ++p)
    for (int64_t q = 0; q < n_0; ++q) PL[(p * n_0 + q) * s.d + channel] = part(last)[q * last.row_stride + p];
  if (!suffix) return;

  for (int64_t t = L - 1; t >= 1; --t) {
    const Section& to = at.S[t];
    if (t == L - 1) {
      const S* w = x.weight(L, net, channel);
      for (int64_t p = 0; p < n_L; ++p) load_row(w + p * s.n[t], s.n[t], part(to) + p * to.row_stride);
    } else {
      const Section& from = at.S[t + 1];
      const T* w = weight_as(x, t + 1, net, channel, space);
      gemm<T>(n_L, s.n[t], s.n[t + 1], {part(from), from.row_stride, 1}, w, s.n[t], part(to), to.row_stride, false);
    }
  }
  for (int64_t i = 2; i <= L; ++i) {
    const Section &right = at.R[i], &S_t = at.S[i - 1];
    if (right.rows == 0) continue;
    const Operand<T> psi = x.psi_qp(s.pair_to_neighbour(i), channel);
    // All of [Psi; psi] S, or only its last row.
    const int64_t skip = n_0 + 1 - right.rows;
    gemm<T>(right.rows, s.n[i - 1], n_L, {psi.data + skip * psi.row_stride, psi.row_stride, psi.column_stride},
            part(S_t), S_t.row_stride, part(right), right.row_stride, false);
  }
}

// What is done with gradients of weights of all layers but the first: added to those already there, or written for the
// first time, around the caches where there are so many that they would not stay.
enum class WeightGradients { add, write, stream };

// The gradients that reach the weights through the chains. `grad` holds the gradients of everything in `saved`.
template <typename S, typename T>
void chain_backward(const Network<S, T>& x, int64_t net, int64_t channel, bool suffix, const T* saved, T* grad,
                    T* psi_bar, S* const* W_bar, S* const* b_bar, WeightGradients how, Scratch<T> scratch) {
  const Shape& s = x.s;
  const Layout& at = x.at;
  const int64_t L = s.L(), n_0 = s.n_0(), n_L = s.n_L(), d = s.d;
  const auto part = [&](const Section& section) { return saved + section.offset + channel * section.channel_stride; };
  const auto grad_part = [&](const Section& section) {
    return grad + section.offset + channel * section.channel_stride;
  };
  T* space = scratch.take(largest_matrix<S, T>(s));
  T* transposed = scratch.take(kTransposedBlock);
  T* product = scratch.take((n_0 + 1) * n_L);

  if (suffix) {
    for (int64_t i = 2; i <= L; ++i) {
      const Section &right = at.R[i], &S_t = at.S[i - 1];
      if (right.rows == 0) continue;
      const int64_t pair = s.pair_to_neighbour(i), skip = n_0 + 1 - right.rows;
      const Operand<T> psi = x.psi_qp(pair, channel);
      const T* R_bar = grad_part(right);
      T* pair_bar = psi_bar + pair * (n_0 + 1) * n_L * d + channel;
      // S_bar += [Psi; psi]^T R_bar
      gemm<T>(n_L, s.n[i - 1], right.rows, {psi.data + skip * psi.row_stride, psi.column_stride, psi.row_stride}, R_bar,
              right.row_stride, grad_part(S_t), S_t.row_stride, true);
      // [Psi; psi]_bar += R_bar S^T
      gemm_transposed<T>(right.rows, n_L, s.n[i - 1], R_bar, right.row_stride, part(S_t), S_t.row_stride, product, n_L,
                         false, transposed);
      for (int64_t q = 0; q < right.rows; ++q)
        for (int64_t p = 0; p < n_L; ++p) pair_bar[((q + skip) * n_L + p) * d] += product[q * n_L + p];
    }
    // S_bar_(t+1) += S_bar_t W_(t+1)^T
    for (int64_t t = 1; t + 1 < L; ++t) {
      const Section &from = at.S[t], &to = at.S[t + 1];
      const T* w = weight_as(x, t + 1, net, channel, space);
      gemm_transposed<T>(n_L, s.n[t + 1], s.n[t], grad_part(from), from.row_stride, w, s.n[t], grad_part(to),
                         to.row_stride, true, transposed, next_weights<S, T>(s, t + 1));
    }
  }

  // P_L is kept channels innermost too; its gradient there joins that of A_L.
  const Section& last = at.A[L];
  const T* PL_bar = grad + at.PL;
  for (int64_t p = 0; p < n_L; ++p)
    for (int64_t q = 0; q < n_0; ++q) grad_part(last)[q * last.row_stride + p] += PL_bar[(p * n_0 + q) * d + channel];

  for (int64_t i = L; i >= 1; --i) {
    const Section& a = at.A[i];
    const T* A_bar = grad_part(a);
    const int64_t c = s.columns(i), n = s.n[i], m = s.n[i - 1];
    store_row(A_bar + (c - 1) * a.row_stride, n, b_bar[i - 1] + (net * d + channel) * n);
    S* out = W_bar[i - 1] + (net * d + channel) * n * m;
    if (i == 1) {
      for (int64_t j = 0; j < n; ++j)
        for (int64_t q = 0; q < n_0; ++q) store_one(A_bar[q * a.row_stride + j], out[j * n_0 + q]);
      break;
    }
    const Section& before = at.A[i - 1];
    {
      const T* w = weight_as(x, i, net, channel, space);
      // Without suffixes nothing else uses A_(i-1), so that this is all of its gradient.
      gemm<T>(c - 1, m, n, {A_bar, a.row_stride, 1}, w, m, grad_part(before), before.row_stride, suffix,
              next_weights<S, T>(s, i));
    }
    // W_bar_i += A_bar_i [A_(i-1) | b_(i-1)]^T + S_i^T S_bar_(i-1), and S_bar_(L-1) itself for i = L.
    T* sum;
    bool accumulate = how == WeightGradients::add;
    if constexpr (std::is_same_v<S, T>) {
      sum = out;
    } else {
      sum = space;
      if (accumulate) load_row(out, n * m, sum);
    }
    if (suffix && i == L) {
      const Section& S_t = at.S[L - 1];
      for (int64_t p = 0; p < n; ++p) std::memcpy(sum + p * m, grad_part(S_t) + p * S_t.row_stride, m * sizeof(T));
      accumulate = true;
    }
    const bool stream = std::is_same_v<S, T> && how == WeightGradients::stream && !suffix && m <= kTransposedBlock;
    const int64_t size = stream ? std::min<int64_t>(48, kTransposedBlock / m) : 48;
    for (int64_t j = 0; j < n; j += size) {
      const int64_t rows = std::min(size, n - j);
      T* to = stream ? transposed : sum + j * m;
      gemm<T>(rows, m, c - 1, {A_bar + j, 1, a.row_stride}, part(before), before.row_stride, to, m, accumulate);
      if (suffix && i < L) {
        const Section &S_i = at.S[i], &S_t = at.S[i - 1];
        gemm<T>(rows, m, n_L, {part(S_i) + j, 1, S_i.row_stride}, grad_part(S_t), S_t.row_stride, to, m, true);
      }
      if (stream) stream_row(to, rows * m, sum + j * m);
    }
    if constexpr (!std::is_same_v<S, T>) store_row(sum, n * m, out);
  }
}

// The chains by themselves: A_i as [B, d, n_i, n_0 + i - 1], i = 1 ... L, and S_t as [B, d, n_L, n_t], t = 1 ... L - 1;
// S_0 is the first n_0 columns of A_L. Every channel is a network of its own here.
template <typename S, typename T>
void chain_products(const Shape& batch, const S* const* W, const S* const* b, S* const* A, S* const* suffixes,
                    const Parallel& parallel) {
  const Shape s{batch.B * batch.d, 1, 1, batch.n};
  const Layout at(s, Operation::chain);
  const Network<S, T> x{s, at, W, b, nullptr};
  const int64_t L = s.L(), need = at.size + chain_scratch<S, T>(s) + 64;
  parallel.split(s.B, [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t net = begin; net < end; ++net) {
      Scratch<T> scratch = Scratch<T>::begin(need);
      T* own = scratch.take(at.size);
      chain_forward(x, net, 0, true, own, scratch);
      for (int64_t i = 1; i <= L; ++i) {
        const int64_t columns = s.columns(i) - 1;
        S* out = A[i - 1] + net * s.n[i] * columns;
        for (int64_t j = 0; j < s.n[i]; ++j)
          for (int64_t c = 0; c < columns; ++c)
            store_one(own[at.A[i].offset + c * at.A[i].row_stride + j], out[j * columns + c]);
      }
      for (int64_t t = 1; t < L; ++t)
        for (int64_t p = 0; p < s.n_L(); ++p)
          store_row(own + at.S[t].offset + p * at.S[t].row_stride, s.n[t],
                    suffixes[t - 1] + (net * s.n_L() + p) * s.n[t]);
    }
  });
}

// Gradients of all of them to those of weights and biases; the chains are computed again.
template <typename S, typename T>
void chain_products_backward(const Shape& batch, const S* const* A_bar, const S* const* suffixes_bar, const S* const* W,
                             const S* const* b, S* const* W_bar, S* const* b_bar, const Parallel& parallel) {
  const Shape s{batch.B * batch.d, 1, 1, batch.n};
  const Layout at(s, Operation::chain);
  const Network<S, T> x{s, at, W, b, nullptr};
  const int64_t L = s.L(), need = 2 * at.size + chain_scratch<S, T>(s) + 64;
  parallel.split(s.B, [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t net = begin; net < end; ++net) {
      Scratch<T> scratch = Scratch<T>::begin(need);
      T *own = scratch.take(at.size), *grad = scratch.take(at.size);
      chain_forward(x, net, 0, true, own, scratch);
      std::fill(grad, grad + at.size, T(0));
      for (int64_t i = 1; i <= L; ++i) {
        const int64_t columns = s.columns(i) - 1;
        const S* bar = A_bar[i - 1] + net * s.n[i] * columns;
        for (int64_t j = 0; j < s.n[i]; ++j)
          for (int64_t c = 0; c < columns; ++c)
            grad[at.A[i].offset + c * at.A[i].row_stride + j] = load_one<S, T>(bar[j * columns + c]);
      }
      for (int64_t t = 1; t < L; ++t)
        for (int64_t p = 0; p < s.n_L(); ++p)
          load_row(suffixes_bar[t - 1] + (net * s.n_L() + p) * s.n[t], s.n[t],
                   grad + at.S[t].offset + p * at.S[t].row_stride);
      chain_backward(x, net, 0, true, own, grad, static_cast<T*>(nullptr), W_bar, b_bar, WeightGradients::write,
                     scratch);
    }
  });
}

}  // namespace MAGEP_ISA
}  // namespace magep
