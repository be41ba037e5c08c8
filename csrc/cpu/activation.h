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

// 1 / n!, computed when this is compiled.
template <typename T>
struct ExponentialSeries {
  T of[24];
  constexpr ExponentialSeries() : of() {
    double factorial = 1;
    for (int n = 0; n < 24; ++n) {
      of[n] = static_cast<T>(1 / factorial);
      factorial *= n + 1;
    }
  }
};

template <typename T>
struct Elementary {
  using Lanes = Simd<T>;
  using Vec = typename Lanes::Vec;
  using Int = typename Integer<T>::type;
  typedef Int IntVec __attribute__((vector_size(kVectorBytes)));
  static constexpr bool kSingle = sizeof(T) == 4;
  static constexpr ExponentialSeries<T> kSeries{};

  static inline Vec absolute(Vec x) { return x < 0 ? -x : x; }
  // Added to x, |x| < 2^22 or 2^51, it leaves no bit for a fraction: the sum, less it again, is the integer next to x.
  static constexpr T kShift = T(3) * (Int(1) << (Integer<T>::kMantissa - 1));
  static inline Vec nearest(Vec x) { return (x + kShift) - kShift; }
  // 2^k for a whole k of normal range.
  static inline Vec power_of_two(Vec k) {
    const IntVec exponent = __builtin_convertvector(k, IntVec) + Integer<T>::kBias;
    return reinterpret_cast<Vec>(exponent << Integer<T>::kMantissa);
  }

  // Beyond this the three parts of pi no longer leave an exact remainder.
  static constexpr T kLargestAngle = kSingle ? T(8192) : T(1 << 20);
  static inline bool all_small(Vec x) {
#if defined(__AVX512F__)
    if constexpr (kSingle)
      return !_mm512_cmp_ps_mask(_mm512_abs_ps(reinterpret_cast<__m512>(x)), _mm512_set1_ps(kLargestAngle),
                                 _CMP_NLE_UQ);
    else
      return !_mm512_cmp_pd_mask(_mm512_abs_pd(reinterpret_cast<__m512d>(x)), _mm512_set1_pd(kLargestAngle),
                                 _CMP_NLE_UQ);
#else
    const IntVec small = absolute(x) <= kLargestAngle;
    Int all = small[0];
    for (int k = 1; k < Lanes::kWidth; ++k) all &= small[k];
    return all != 0;
#endif
  }
  template <typename F>
  [[gnu::noinline]] static Vec each(Vec x, F f) {
    for (int k = 0; k < Lanes::kWidth; ++k) x[k] = f(x[k]);
    return x;
  }

  // (-1)^k sin(r) with x = (k - offset) pi + r, |r| <= pi/2: the sine of x for offset 0, its cosine for 1/2.
  static inline Vec turned_sine(Vec x, T offset) {
    const Vec shifted = (x * T(0.318309886183790671538) + offset) + kShift, turns = (shifted - kShift) - offset;
    // pi in three parts with few bits each, so that the products with the turns are exact.
    constexpr T first = kSingle ? T(3.140625) : T(3.14159250259399414062);
    constexpr T second = kSingle ? T(9.67502593994140625e-4) : T(1.50995788317231927067e-7);
    constexpr T third = kSingle ? T(1.509957990978376432e-7) : T(1.07806057163162381e-14);
    const Vec r = ((x - turns * first) - turns * second) - turns * third, z = r * r;
    // sin(r) = r + r z p(z) by its Taylor series, to degree 13 (remainder 7e-10) or 23 (1e-20).
    Vec p{};
#pragma GCC unroll 16
    for (int degree = kSingle ? 13 : 23; degree > 1; degree -= 2)
      p = degree % 4 == 1 ? p * z + kSeries.of[degree] : p * z - kSeries.of[degree];
    const Vec y = r + r * z * p;
    // The last bit of `shifted` says whether k is odd.
    const IntVec sign = reinterpret_cast<IntVec>(shifted) << (8 * sizeof(T) - 1);
    return reinterpret_cast<Vec>(reinterpret_cast<IntVec>(y) ^ sign);
  }

  static inline Vec sine(Vec x) {
    return all_small(x) ? turned_sine(x, 0) : each(x, [](T t) { return std::sin(t); });
  }
  static inline Vec cosine(Vec x) {
    return all_small(x) ? turned_sine(x, T(0.5)) : each(x, [](T t) { return std::cos(t); });
  }

  // tanh |x| = -m / (2 + m) with m = exp(-2|x|) - 1 = 2^k (exp(r) - 1) + (2^k - 1), |r| <= log(2)/2.
  static inline Vec hyperbolic_tangent(Vec x) {
    constexpr T limit = 44;  // tanh is 1 to the last bit, and 2^k stays normal
    Vec y = absolute(x) * T(-2);
    y = y < -limit ? Lanes::broadcast(-limit) : y;
    const Vec k = nearest(y * T(1.44269504088896340736));
    const Vec r = (y - k * T(kSingle ? 0.693359375 : 0.693145751953125)) -
                  k * T(kSingle ? -2.12194440054690583e-4 : 1.42860682030941723e-6);
    Vec sum{};  // (exp(r) - 1) / r by its Taylor series
#pragma GCC unroll 16
    for (int n = kSingle ? 8 : 14; n > 0; --n) sum = sum * r + kSeries.of[n];
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
inline void store_vector(typename Simd<T>::Vec v, int lanes, S* to) {
  if constexpr (std::is_same_v<S, T>) {
    store_lanes(to, v, lanes);
  } else {
    T row[Simd<T>::kWidth];
    Simd<T>::store(row, v);
    store_row(row, lanes, to);
  }
}

// Calls body with f as a constant: loops in it do not ask again for every vector.
template <typename Body>
inline void with_constant(Activation f, Body&& body) {
  switch (f) {
    case Activation::relu: return body(std::integral_constant<Activation, Activation::relu>{});
    case Activation::tanh: return body(std::integral_constant<Activation, Activation::tanh>{});
    case Activation::sin: return body(std::integral_constant<Activation, Activation::sin>{});
    case Activation::none: return body(std::integral_constant<Activation, Activation::none>{});
  }
}

// A tensor of the layer's outputs: f is applied as values are stored, and where the backward pass needs them the values
// before it are stored too.
template <typename S, typename T>
struct Destination {
  S *value, *before;  // before may be null
  Activation f;

  Destination operator+(int64_t offset) const { return {value + offset, before ? before + offset : nullptr, f}; }

  // `from` may be the same memory as either.
  void store(const T* from, int64_t count) const {
    if (f == Activation::none) return store_row(from, count, value);
    with_constant(f, [&](auto known) {
      for_lanes<T>(count, [&](int64_t k, auto lanes) {
        const auto x = load_lanes(from + k, lanes);
        if (before) store_vector<S, T>(x, lanes, before + k);
        store_vector<S, T>(activation_value<T>(known, x), lanes, value + k);
      });
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

// Asks for memory that is about to be read, where the processor does not see it coming: it follows a sequence of
// addresses to the end of a page only.
template <typename S>
inline void fetch(const S* from, int64_t count) {
  for (int64_t k = 0; k < count; k += 64 / sizeof(S)) __builtin_prefetch(from + k);
}
template <typename S, typename T>
inline void fetch(Incoming<S, T> from, int64_t count) {
  fetch(from.bar, count);
  if (from.known) fetch(from.known, count);
}

template <typename S, typename T>
inline void load_row(Incoming<S, T> from, int64_t count, T* to) {
  if (from.f == Activation::none) return load_row(from.bar, count, to);
  with_constant(from.f, [&](auto f) {
    for_lanes<T>(count, [&](int64_t k, auto lanes) {
      const auto bar = load_vector<S, T>(from.bar + k, lanes), known = load_vector<S, T>(from.known + k, lanes);
      store_lanes(to + k, activation_gradient<T>(f, bar, known), lanes);
    });
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
