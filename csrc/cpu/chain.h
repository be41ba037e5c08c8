// The two chains of one network and channel, and their reverse.
//   A_1 = W_1, A_i = W_i [A_(i-1) | b_(i-1)]      S_(L-1) = W_L, S_t = S_(t+1) W_(t+1)
#pragma once

#include "narrow_chain.h"

namespace magep {
namespace MAGEP_ISA {

template <typename S, typename T>
int64_t chain_scratch(const Shape& s) {
  const int64_t products = (s.n_0() + 1) * s.n_L() + kTransposedBlock + 64;
  return largest_matrix<S, T>(s) +
         (is_narrow<T>(s) ? std::max(products, NarrowChain<S, T, false>::scratch_size(s)) : products);
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
  if (is_narrow<T>(s))
    return with_narrow_chain(x, net, channel, space, [&](const auto& chain) { chain.forward(suffix, saved, scratch); });
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
  T* space = scratch.take(largest_matrix<S, T>(s));
  if (is_narrow<T>(s) && how != WeightGradients::stream)
    return with_narrow_chain(x, net, channel, space, [&](const auto& chain) {
      chain.backward(suffix, saved, grad, psi_bar, W_bar, b_bar, how == WeightGradients::write, scratch);
    });
  const auto part = [&](const Section& section) { return saved + section.offset + channel * section.channel_stride; };
  const auto grad_part = [&](const Section& section) {
    return grad + section.offset + channel * section.channel_stride;
  };
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
