#include "layout.h"

namespace magep {

Layout::Layout(const Shape& s, Operation operation) : A(s.L() + 1), S(s.L() + 1), R(s.L() + 1), G0(s.L() + 1) {
  lay_out(s, operation);
  stride = whole_lines(size + s.readout_columns());
  grad_size = whole_lines(grad_size);
}

void Layout::lay_out(const Shape& s, Operation operation) {
  const int64_t L = s.L();
  for (int64_t i = 1; i <= L; ++i) A[i] = section(s.columns(i), s.d, s.n[i]);
  PL = reserve(s.n_L() * s.n_0() * s.d);
  if (operation != Operation::invariant)
    for (int64_t t = 1; t < L; ++t) S[t] = section(s.n_L(), s.d, s.n[t]);
  if (operation == Operation::chain) return;
  G0[L] = reserve(s.connected_size());
  if (s.Wb_blocks(L) < L - 1) vL = reserve((L - 1) * s.n_L() * s.d);
  if (operation == Operation::invariant) return;
  for (int64_t i = 2; i <= L; ++i) {
    R[i] = section(s.through_output() && i < L ? 1 : s.n_0() + 1, s.d, s.n[i - 1]);
  }
  grad_size = size;
  for (int64_t i = 1; i < L; ++i) {
    G0[i] = grad_size;
    grad_size += s.connected_size();
  }
}

// No gaps: every number is written, so that equal calls leave equal memory.
int64_t Layout::reserve(int64_t count) {
  const int64_t offset = size;
  size += count;
  return offset;
}

Section Layout::section(int64_t rows, int64_t channels, int64_t n) {
  Section s;
  s.rows = rows;
  s.ld = n;
  s.channel_stride = s.ld;
  s.row_stride = channels * s.ld;
  s.offset = reserve(rows * s.row_stride);
  return s;
}

}  // namespace magep
