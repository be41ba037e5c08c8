// Shapes of a call and where each intermediate lives. Indices follow the paper: layers i = 1 ... L, widths n[0] ...
// n[L].
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <vector>

namespace magep {

// Vectors of 64 bytes that begin on a cache line are loaded and stored at once, others in two halves: arrays begin at
// multiples of as many numbers as a line has at most.
constexpr int64_t kLine = 16;
inline int64_t whole_lines(int64_t count) { return (count + kLine - 1) / kLine * kLine; }

// At least `count` numbers, from a cache line on, of a vector that is kept between calls. It never shrinks: growing
// back clears what is new.
template <typename T>
T* at_least(int64_t count, std::vector<T>& memory) {
  if (static_cast<int64_t>(memory.size()) < count + kLine) memory.resize(count + kLine);
  constexpr uintptr_t line = kLine * sizeof(float);
  const uintptr_t behind = reinterpret_cast<uintptr_t>(memory.data()) % line;
  return memory.data() + (line - behind) % line / sizeof(T);
}

struct Shape {
  int64_t B, d, e;  // networks, channels in, channels (or features) out
  std::vector<int64_t> n;
  bool share_Wb = false;  // one coefficient of [Wb]^(i,t)(t) for all t

  int64_t L() const { return static_cast<int64_t>(n.size()) - 1; }
  int64_t n_0() const { return n.front(); }
  int64_t n_L() const { return n.back(); }
  // Columns of [A_i | b_i] = [P_i | v_(i,1) ... v_(i,i-1) | b_i].
  int64_t columns(int64_t i) const { return n_0() + i; }
  // [WW] of a middle layer has two factorisations, P (Psi S) of inner size n_0 and (P Psi) S of inner size n_L.
  bool through_output() const { return n_L() < n_0() || n_L() == 1; }
  int64_t rank() const { return std::min(n_0(), n_L()); }

  // Pairs (s, t) of the connections, in the order of the table of terms.
  int64_t pair_to_input(int64_t i) const { return i - 1; }
  int64_t pair_to_neighbour(int64_t i) const { return L() + i - 2; }
  int64_t pair_of_trace(int64_t s) const { return 2 * L() - 1 + s - 1; }
  int64_t num_pairs() const { return 3 * L() - 2; }
  int64_t connected_size() const { return (n_0() + 1) * n_0() * d; }  // of [Psi; psi]_(i,0) S_0
  int64_t psi_size() const { return num_pairs() * (n_0() + 1) * n_L() * d; }
  // Columns of the matrices of coefficients, one block a term.
  int64_t Wb_blocks(int64_t i) const { return share_Wb ? std::min<int64_t>(i - 1, 1) : i - 1; }
  int64_t hidden_columns(int64_t i) const { return d * (3 * n_0() + Wb_blocks(i) + 1); }
  int64_t readout_columns() const {
    return d * (3 * n_L() * n_0() + Wb_blocks(L()) * n_L() + n_L() + 2 * (L() - 1)) + 1;
  }
};

// A call of the linear layer, whose weights may have taps: channels of the weights of each layer, in and out.
struct LinearShape {
  int64_t B, d, e;  // networks, channels of the biases in and out
  std::vector<int64_t> n, in, out;

  int64_t L() const { return static_cast<int64_t>(n.size()) - 1; }
};

// Dense layers one after another, ReLU between them; the last one may have a sigmoid behind it.
struct DenseShape {
  int64_t B;
  std::vector<int64_t> widths;  // of the input, then of every layer
  bool sigmoid;

  int64_t layers() const { return static_cast<int64_t>(widths.size()) - 1; }
  int64_t widest() const { return *std::max_element(widths.begin(), widths.end()); }
};

// A step of Adam, in the terms of torch.optim.Adam and, with `decoupled`, AdamW; `step` counts from 1.
struct AdamStep {
  double lr, beta1, beta2, eps, weight_decay;
  bool decoupled;
  double step;
};

// An array [rows][channels][ld] inside the buffer of one network.
struct Section {
  int64_t offset = 0, rows = 0, ld = 0, row_stride = 0, channel_stride = 0;
};

enum class Operation { chain, equivariant, invariant };

// What the forward pass keeps for the backward pass, per network, and what the backward pass accumulates gradients of.
//   A[i]   columns of [A_i | b_i], transposed:  [c][d][n_i]       rows ordered as the coefficients that meet them
//   S[t]   suffix chain, t >= 1:                [p][d][n_t]
//   P_L, v_L, b_L, G_0: the small ones, channels innermost, for lane-wise algebra:
//   PL     P_L = S_0                            [p][q][d]
//   G0[i]  [Psi; psi]_(i,0) S_0                 [q'][q][d]        q' = 0 ... n_0; kept for i = L only
//   vL     v_(L,1) ... v_(L,L-1)                [t][p][d]         only where [Wb] is summed over t
//   R[i]   right factor of [WW] and [bW], i > 1: [q][d][n_(i-1)]  n_0 rows of Psi S (or none, through_output) and psi S
struct Layout {
  std::vector<Section> A, S, R;
  std::vector<int64_t> G0;
  int64_t PL = 0, vL = 0, size = 0;
  int64_t stride = 0;     // from one network to the next, with the features of the readout behind what is kept
  int64_t grad_size = 0;  // with the G0[i] of hidden layers behind what is kept

  Layout(const Shape& s, Operation operation);  // in layout.cpp: compiled once, for any processor

 private:
  void lay_out(const Shape& s, Operation operation);
  int64_t reserve(int64_t count);
  Section section(int64_t rows, int64_t channels, int64_t n);
};

enum class Activation : int64_t { none, relu, tanh, sin };

// The tensors an equivariant layer writes, at i - 1: f(E(U)), and where the backward pass wants it (sin) E(U) as well.
template <typename S>
struct Outputs {
  S* const* W;
  S* const* b;
  S* const* W_before;  // or null
  S* const* b_before;
  Activation f;
};

// Their gradients, and what f' is computed from: f(E(U)) for relu and tanh, E(U) for sin, nothing for none.
template <typename S>
struct OutputGradients {
  const S* const* W;
  const S* const* b;
  const S* const* W_known;
  const S* const* b_known;
  Activation f;
};

// Networks, or rows of a matrix: begin ... end - 1.
struct Range {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
  // One of `parts` nearly equal parts of 0 ... count - 1.
  static Range part(int64_t count, int64_t index, int64_t parts) {
    return {count * index / parts, count * (index + 1) / parts};
  }
};

// Runs body(t) for t = 0 ... count - 1, possibly at the same time.
struct Parallel {
  int64_t threads;
  std::function<void(int64_t count, const std::function<void(int64_t)>& body)> run;

  // Splits tasks into at most `threads` contiguous ranges: body(chunk, begin, end).
  int64_t chunks(int64_t tasks) const { return std::max<int64_t>(1, std::min(threads, tasks)); }
  void split(int64_t tasks, const std::function<void(int64_t, int64_t, int64_t)>& body) const {
    const int64_t count = chunks(tasks);
    run(count, [&](int64_t t) { body(t, tasks * t / count, tasks * (t + 1) / count); });
  }
};

}  // namespace magep
