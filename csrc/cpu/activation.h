// The activations a layer may apply to its outputs, vectorised: y = f(x) as outputs are stored, and the gradient that
// comes in times f'(x) as it is loaded.
#pragma once

#include <cmath>

#include "lanes.h"
#include "layout.h"
#include "storage.h"

namespace magep {
namespace MAGEP_ISA {

template <typename T>
struct Integer;
template <>
struct Integer<float> {
  using type = int32_t;
  static constexpr int kMantissa = 23, kBias = 127;
};
template <>
struct Integer<double> {
  using type = int64_t;
  static constexpr int kMantissa = 52, kBias = 1023;
};

template <typename T>
struct Elementary {
  using Lanes = Simd<T>;
  using Vec = typename Lanes::Vec;
  using Int = typename Integer<T>::type;
  typedef Int IntVec __attribute__((vector_size(kVectorBytes)));
  static constexpr bool kSingle = sizeof(T) == 4;

  static inline Vec absolute(Vec x) { return x < 0 ? -x : x; }
  // To the nearest integer, |x| < 2^22 or 2^51: adding 1.5 * 2^mantissa leaves no bit for a fraction.
  static inline Vec nearest(Vec x) {
    constexpr T shift = T(3) * (Int(1) << (Integer<T>::kMantissa - 1));
    return (x + shift) - shift;
  }
  // 2^k for a whole k of normal range.
  static inline Vec power_of_two(Vec k) {
    const IntVec exponent = __builtin_convertvector(k, IntVec) + Integer<T>::kBias;
    return reinterpret_cast<Vec>(exponent << Integer<T>::kMantissa);
  }

  // Beyond this the three parts of pi no longer leave an exact remainder.
  static constexpr T kLargestAngle = kSingle ? T(8192) : T(1 << 20);

  // x - k pi, pi in three parts with few bits each, so that the products with k are exact.
  static inline Vec remainder(Vec x, Vec k) {
    if constexpr (kSingle)
      return ((x - k * T(3.140625)) - k * T(9.67502593994140625e-4)) - k * T(1.509957990978376432e-7);
    else
      return ((x - k * T(3.14159250259399414062)) - k * T(1.50995788317231927067e-7)) - k * T(1.07806057163162381e-14);
  }

  // sin(r) on [-pi/2, pi/2] by its Taylor series, to degree 13 (remainder 7e-10) or 23 (1e-20).
  static inline Vec sine_of_remainder(Vec r) {
    const Vec z = r * r;
    constexpr int degree = kSingle ? 13 : 23;
    Vec sum = Lanes::broadcast(T(1));
#pragma GCC unroll 16
    for (int k = degree; k > 1; k -= 2) sum = T(1) - z * sum * (T(1) / T(k * (k - 1)));
    return r * sum;
  }
  static inline Vec alternate(Vec k, Vec x) {  // (-1)^k x
    const Vec half = k * T(0.5);
    return nearest(half) == half ? x : -x;
  }

  template <typename Scalar>
  static inline Vec each(Vec x, Scalar&& f) {
    for (int k = 0; k < Lanes::kWidth; ++k) x[k] = f(x[k]);
    return x;
  }
  static inline bool all_small(Vec x) {
    const IntVec small = absolute(x) <= kLargestAngle;
    Int all = small[0];
    for (int k = 1; k < Lanes::kWidth; ++k) all &= small[k];
    return all != 0;
  }

  static inline Vec sine(Vec x) {
    if (!all_small(x)) return each(x, [](T t) { return std::sin(t); });
    const Vec k = nearest(x * T(0.318309886183790671538));
    return alternate(k, sine_of_remainder(remainder(x, k)));
  }
  // With x = (q + 1/2) pi + r, cos(x) = -(-1)^q sin(r).
  static inline Vec cosine(Vec x) {
    if (!all_small(x)) return each(x, [](T t) { return std::cos(t); });
    const Vec q = nearest(x * T(0.318309886183790671538) - T(0.5));
    return -alternate(q, sine_of_remainder(remainder(x, q + T(0.5))));
  }

  // tanh |x| = -m / (2 + m) with m = exp(-2|x|) - 1 = 2^k (exp(r) - 1) + (2^k - 1), |r| <= log(2)/2.
  static inline Vec hyperbolic_tangent(Vec x) {
    constexpr T limit = 44;  // tanh is 1 to the last bit, and 2^k stays normal
    Vec y = absolute(x) * T(-2);
    y = y < -limit ? Lanes::broadcast(-limit) : y;
    const Vec k = nearest(y * T(1.44269504088896340736));
    const Vec r = (y - k * T(kSingle ? 0.693359375 : 0.693145751953125)) -
                  k * T(kSingle ? -2.12194440054690583e-4 : 1.42860682030941723e-6);
    constexpr int degree = kSingle ? 8 : 14;
    Vec sum = Lanes::broadcast(T(1));  // (exp(r) - 1) / r by its Taylor series
#pragma GCC unroll 16
    for (int n = degree; n > 1; --n) sum = T(1) + r * sum * (T(1) / T(n));
    const Vec scale = power_of_two(k), m = scale * (r * sum) + (scale - T(1));
    const Vec t = -m / (m + T(2));
    return x < 0 ? -t : t;
  }
};

template <typename T>
inline typename Simd<T>::Vec activation_value(Activation f, typename Simd<T>::Vec x) {
  switch (f) {
    case Activation::relu: return x < 0 ? typename Simd<T>::Vec{} : x;
    case Activation::tanh: return Elementary<T>::hyperbolic_tangent(x);
    case Activation::sin: return Elementary<T>::sine(x);
    case Activation::none: break;
  }
  return x;
}

// bar f'(x) from what the forward pass leaves: y = f(x) for relu and tanh, x for sin.
template <typename T>
inline typename Simd<T>::Vec activation_gradient(Activation f, typename Simd<T>::Vec bar, typename Simd<T>::Vec known) {
  switch (f) {
    case Activation::relu: return known <= 0 ? typename Simd<T>::Vec{} : bar;
    case Activation::tanh: return bar * (T(1) - known * known);
    case Activation::sin: return bar * Elementary<T>::cosine(known);
    case Activation::none: break;
  }
  return bar;
}

// A tensor of the layer's outputs: f is applied as values are stored, and where the backward pass needs them the values
// before it are stored too.
template <typename S, typename T>
struct Destination {
  S *value, *before;  // before may be null
  Activation f;

  Destination operator+(int64_t offset) const { return {value + offset, before ? before + offset : nullptr, f}; }

  void store(const T* from, int64_t count) const {
    if (before) store_row(from, count, before);
    activate(from, count);
  }
  // Only the value; `from` may be the same memory.
  void activate(const T* from, int64_t count) const {
    if (f == Activation::none) return store_row(from, count, value);
    for_lanes<T>(count, [&](int64_t k, auto lanes) {
      const auto y = activation_value<T>(f, load_lanes(from + k, lanes));
      if constexpr (std::is_same_v<S, T>) {
        store_lanes(value + k, y, lanes);
      } else {
        T row[Simd<T>::kWidth];
        Simd<T>::store(row, y);
        store_row(row, lanes, value + k);
      }
    });
  }
};

// The gradient of a tensor of the layer's outputs, loaded as the gradient before the activation.
template <typename S, typename T>
struct Incoming {
  const S *bar, *known;  // known: what activation_gradient takes
  Activation f;

  Incoming operator+(int64_t offset) const { return {bar + offset, known ? known + offset : nullptr, f}; }
};

template <typename S, typename T>
inline typename Simd<T>::Vec load_vector(const S* from, int lanes) {
  if constexpr (std::is_same_v<S, T>) {
    return load_lanes(from, lanes);
  } else {
    T row[Simd<T>::kWidth] = {};
    load_row(from, lanes, row);
    return Simd<T>::load(row);
  }
}

template <typename S, typename T>
inline void load_row(Incoming<S, T> from, int64_t count, T* to) {
  if (from.f == Activation::none) return load_row(from.bar, count, to);
  for_lanes<T>(count, [&](int64_t k, auto lanes) {
    const auto bar = load_vector<S, T>(from.bar + k, lanes), known = load_vector<S, T>(from.known + k, lanes);
    store_lanes(to + k, activation_gradient<T>(from.f, bar, known), lanes);
  });
}

template <typename S, typename T>
struct LayerOutputs : Outputs<S> {
  Destination<S, T> weight(int64_t i) const { return at(this->W, this->W_before, i); }
  Destination<S, T> bias(int64_t i) const { return at(this->b, this->b_before, i); }

 private:
  Destination<S, T> at(S* const* value, S* const* before, int64_t i) const {
    return {value[i - 1], before ? before[i - 1] : nullptr, this->f};
  }
};

template <typename S, typename T>
struct LayerGradients : OutputGradients<S> {
  Incoming<S, T> weight(int64_t i) const { return at(this->W, this->W_known, i); }
  Incoming<S, T> bias(int64_t i) const { return at(this->b, this->b_known, i); }

 private:
  Incoming<S, T> at(const S* const* bar, const S* const* known, int64_t i) const {
    return {bar[i - 1], known ? known[i - 1] : nullptr, this->f};
  }
};

}  // namespace MAGEP_ISA
}  // namespace magep
