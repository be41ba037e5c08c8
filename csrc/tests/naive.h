// The layers term by term, as the paper defines them, in double: what the kernels are compared with.
#pragma once

#include <cmath>
#include <string>

#include "check.h"

struct Matrix {
  int64_t rows, columns;
  std::vector<double> data;
  Matrix(int64_t rows, int64_t columns) : rows(rows), columns(columns), data(rows * columns) {}
  double& operator()(int64_t r, int64_t c) { return data[r * columns + c]; }
  double operator()(int64_t r, int64_t c) const { return data[r * columns + c]; }
};

inline Matrix operator*(const Matrix& a, const Matrix& b) {
  Matrix out(a.rows, b.columns);
  for (int64_t i = 0; i < a.rows; ++i)
    for (int64_t j = 0; j < b.columns; ++j)
      for (int64_t k = 0; k < a.columns; ++k) out(i, j) += a(i, k) * b(k, j);
  return out;
}

using Tensors = std::vector<std::vector<double>>;

template <typename T>
std::vector<T*> pointers(std::vector<std::vector<T>>& tensors) {
  std::vector<T*> out;
  for (auto& tensor : tensors) out.push_back(tensor.data());
  return out;
}

// Tensors of a layer, laid out as the kernels take them.
struct Inputs {
  Tensors W, b, matrices;
  std::vector<double> psi;

  static std::vector<double> random(int64_t count) {
    std::vector<double> values(count);
    for (double& x : values) x = std::normal_distribution<double>(0, 0.5)(generator);
    return values;
  }
  Inputs(const magep::Shape& s, bool equivariant) : psi(random(s.psi_size())) {
    for (int64_t i = 1; i <= s.L(); ++i) {
      W.push_back(random(s.B * s.d * s.n[i] * s.n[i - 1]));
      b.push_back(random(s.B * s.d * s.n[i]));
      if (!equivariant) continue;
      const bool last = i == s.L();
      matrices.push_back(random(last     ? s.e * s.n_L() * 3 * s.n_L() * s.d
                                : i == 1 ? s.e * s.n_0() * s.hidden_columns(1)
                                         : s.e * 3 * s.d));
      matrices.push_back(random(last ? s.e * s.n_L() * s.readout_columns() : s.e * s.hidden_columns(i)));
    }
    if (!equivariant) matrices.push_back(random(s.e * s.readout_columns()));
  }
  std::vector<std::vector<double>*> tensors() {
    std::vector<std::vector<double>*> all;
    for (Tensors* group : {&W, &b, &matrices})
      for (auto& tensor : *group) all.push_back(&tensor);
    all.push_back(&psi);
    return all;
  }
};

// The terms of one network.
struct Terms {
  const magep::Shape& s;
  const Inputs& x;
  int64_t net;

  Matrix weight(int64_t i, int64_t c) const {
    Matrix out(s.n[i], s.n[i - 1]);
    const double* from = x.W[i - 1].data() + (net * s.d + c) * s.n[i] * s.n[i - 1];
    std::copy(from, from + out.data.size(), out.data.begin());
    return out;
  }
  Matrix bias(int64_t i, int64_t c) const {
    Matrix out(s.n[i], 1);
    const double* from = x.b[i - 1].data() + (net * s.d + c) * s.n[i];
    std::copy(from, from + out.data.size(), out.data.begin());
    return out;
  }
  Matrix product(int64_t to, int64_t from, int64_t c) const {  // W_to ... W_(from+1)
    Matrix out = weight(to, c);
    for (int64_t i = to - 1; i > from; --i) out = out * weight(i, c);
    return out;
  }
  Matrix Wb(int64_t i, int64_t t, int64_t c) const { return product(i, t, c) * bias(t, c); }
  // For every t, or summed over t where the coefficient is shared.
  std::vector<Matrix> Wb_data(int64_t i, int64_t c) const {
    std::vector<Matrix> all;
    for (int64_t t = 1; t < i; ++t) {
      const Matrix v = Wb(i, t, c);
      if (s.share_Wb && t > 1)
        for (size_t k = 0; k < v.data.size(); ++k) all[0].data[k] += v.data[k];
      else
        all.push_back(v);
    }
    return all;
  }
  Matrix connection(int64_t pair, int64_t c, bool last_row) const {
    Matrix out(last_row ? 1 : s.n_0(), s.n_L());
    for (int64_t q = 0; q < out.rows; ++q)
      for (int64_t p = 0; p < s.n_L(); ++p)
        out(q, p) = x.psi[((pair * (s.n_0() + 1) + (last_row ? s.n_0() : q)) * s.n_L() + p) * s.d + c];
    return out;
  }
  Matrix WW(int64_t i, int64_t t, int64_t pair, int64_t c) const {
    return product(i, 0, c) * connection(pair, c, false) * product(s.L(), t, c);
  }
  Matrix bW(int64_t i, int64_t t, int64_t pair, int64_t c) const {
    return bias(i, c) * connection(pair, c, true) * product(s.L(), t, c);
  }

  // Blocks of columns of a matrix of coefficients are filled one after the other, channels innermost.
  static void append(std::vector<std::vector<double>>& rows, const Matrix& data) {
    for (int64_t q = 0; q < data.columns; ++q) {
      rows.emplace_back();
      for (int64_t j = 0; j < data.rows; ++j) rows.back().push_back(data(j, q));
    }
  }
  // [column of the coefficients][j], for the bias of a hidden layer.
  std::vector<std::vector<double>> hidden(int64_t i) const {
    std::vector<std::vector<double>> rows(s.hidden_columns(i));
    for (int64_t c = 0; c < s.d; ++c) {
      std::vector<std::vector<double>> own;
      append(own, product(i, 0, c));
      append(own, WW(i, 0, s.pair_to_input(i), c));
      append(own, bW(i, 0, s.pair_to_input(i), c));
      for (const Matrix& v : Wb_data(i, c)) append(own, v);
      append(own, bias(i, c));
      for (size_t k = 0; k < own.size(); ++k) rows[k * s.d + c] = own[k];
    }
    return rows;
  }
  std::vector<double> invariants() const {
    const int64_t L = s.L();
    std::vector<double> all(s.readout_columns());
    all.back() = 1;
    for (int64_t c = 0; c < s.d; ++c) {
      int64_t k = 0;
      const auto add = [&](const Matrix& data) {
        for (double value : data.data) all[k++ * s.d + c] = value;
      };
      const auto add_trace = [&](const Matrix& data) {
        double sum = 0;
        for (int64_t p = 0; p < data.rows; ++p) sum += data(p, p);
        all[k++ * s.d + c] = sum;
      };
      add(product(L, 0, c));
      add(WW(L, 0, s.pair_to_input(L), c));
      add(bW(L, 0, s.pair_to_input(L), c));
      for (const Matrix& v : Wb_data(L, c)) add(v);
      add(bias(L, c));
      for (int64_t t = 1; t < L; ++t) add_trace(WW(t, t, s.pair_of_trace(t), c));
      for (int64_t t = 1; t < L; ++t) add_trace(bW(t, t, s.pair_of_trace(t), c));
    }
    return all;
  }
};

inline std::vector<double> naive_invariant(const magep::Shape& s, const Inputs& x) {
  std::vector<double> out;
  for (int64_t net = 0; net < s.B; ++net) {
    const auto F = Terms{s, x, net}.invariants();
    for (int64_t e = 0; e < s.e; ++e) {
      out.push_back(0);
      for (size_t k = 0; k < F.size(); ++k) out.back() += x.matrices[0][e * F.size() + k] * F[k];
    }
  }
  return out;
}

// -> new weights, new biases
inline Tensors naive_equivariant(const magep::Shape& s, const Inputs& x) {
  const int64_t L = s.L();
  Tensors out(2 * L);
  for (int64_t net = 0; net < s.B; ++net) {
    const Terms terms{s, x, net};
    for (int64_t i = 1; i <= L; ++i) {
      const auto &phi = x.matrices[2 * i - 2], &phi_bias = x.matrices[2 * i - 1];
      auto &W = out[i - 1], &b = out[L + i - 1];
      const int64_t n = s.n[i], m = s.n[i - 1];
      std::vector<Matrix> parts;  // [W; WW; bW], each in all channels
      for (int64_t c = 0; i > 1 && c < s.d; ++c) parts.push_back(terms.weight(i, c));
      for (int64_t c = 0; i > 1 && c < s.d; ++c) parts.push_back(terms.WW(i, i - 1, s.pair_to_neighbour(i), c));
      for (int64_t c = 0; i > 1 && c < s.d; ++c) parts.push_back(terms.bW(i, i - 1, s.pair_to_neighbour(i), c));
      const auto hidden = i < L ? terms.hidden(i) : Tensors{};
      for (int64_t e = 0; e < s.e; ++e)
        for (int64_t j = 0; j < n; ++j)
          for (int64_t k = 0; k < m; ++k) {
            double sum = 0;
            if (i == 1)
              for (size_t r = 0; r < hidden.size(); ++r) sum += phi[(e * m + k) * hidden.size() + r] * hidden[r][j];
            else if (i < L)
              for (int64_t r = 0; r < 3 * s.d; ++r) sum += phi[e * 3 * s.d + r] * parts[r](j, k);
            else
              for (int64_t r = 0; r < 3 * s.d; ++r)
                for (int64_t p = 0; p < n; ++p)
                  sum += phi[((e * n + j) * 3 + r / s.d) * n * s.d + p * s.d + r % s.d] * parts[r](p, k);
            W.push_back(sum);
          }
      const auto invariants = i == L ? terms.invariants() : std::vector<double>{};
      for (int64_t e = 0; e < s.e; ++e)
        for (int64_t j = 0; j < n; ++j) {
          double sum = 0;
          for (size_t r = 0; r < hidden.size(); ++r) sum += phi_bias[e * hidden.size() + r] * hidden[r][j];
          for (size_t r = 0; r < invariants.size(); ++r)
            sum += phi_bias[(e * n + j) * invariants.size() + r] * invariants[r];
          b.push_back(sum);
        }
    }
  }
  return out;
}

inline double naive_activation(magep::Activation f, double x) {
  switch (f) {
    case magep::Activation::relu: return x > 0 ? x : 0;
    case magep::Activation::tanh: return std::tanh(x);
    case magep::Activation::sin: return std::sin(x);
    case magep::Activation::none: break;
  }
  return x;
}

template <typename X, typename Y>
double relative_error(const std::vector<X>& found, const std::vector<Y>& expected) {
  double error = 0, scale = 1e-300;
  CHECK(found.size() == expected.size(), "%zu != %zu", found.size(), expected.size());
  for (size_t k = 0; k < found.size(); ++k) {
    error = std::max(error, std::abs(static_cast<double>(found[k]) - static_cast<double>(expected[k])));
    scale = std::max(scale, std::abs(static_cast<double>(expected[k])));
    if (std::isnan(found[k])) return NAN;
  }
  return error / scale;
}

inline double inner_product(const std::vector<double>& x, const std::vector<double>& y) {
  double sum = 0;
  for (size_t k = 0; k < x.size(); ++k) sum += x[k] * y[k];
  return sum;
}

inline Tensors naive_outputs(const magep::Shape& s, bool equivariant, magep::Activation f, const Inputs& x) {
  Tensors out = equivariant ? naive_equivariant(s, x) : Tensors{naive_invariant(s, x)};
  for (auto& tensor : out)
    for (double& value : tensor) value = naive_activation(f, value);
  return out;
}

// Each gradient of <seeds, outputs()> along a random direction against the difference of the outputs as defined.
template <typename Outputs>
void check_differences(const std::vector<std::vector<double>*>& inputs, const Tensors& seeds, const Tensors& gradients,
                       const Outputs& outputs, const std::string& name, double tolerance = 1e-5) {
  constexpr double kStep = 1e-5;
  for (size_t k = 0; k < inputs.size(); ++k) {
    const std::vector<double> before = *inputs[k], direction = Inputs::random(before.size());
    double difference = 0, scale = 0;
    for (int sign : {1, -1}) {
      for (size_t at = 0; at < before.size(); ++at) (*inputs[k])[at] = before[at] + sign * kStep * direction[at];
      const Tensors moved = outputs();
      for (size_t o = 0; o < moved.size(); ++o) difference += sign * inner_product(seeds[o], moved[o]) / (2 * kStep);
    }
    *inputs[k] = before;
    for (size_t at = 0; at < before.size(); ++at) scale += std::abs(gradients[k][at] * direction[at]);
    const double error = std::abs(inner_product(gradients[k], direction) - difference);
    CHECK(error <= tolerance * scale + 1e-7, "%s: gradient %zu is off by %g of %g", name.c_str(), k, error, scale);
  }
}
