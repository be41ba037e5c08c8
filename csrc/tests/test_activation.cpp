#include <cmath>
#include <limits>

#include "check.h"
#include "cpu/activation.h"

namespace {

using magep::Activation;
using namespace magep::MAGEP_ISA;

template <typename T>
T value(Activation f, T x) {
  T y[1];
  Destination<T, T>{y, nullptr, f}.store(&x, 1);
  return y[0];
}

template <typename T>
T slope(Activation f, T known) {
  const T one = 1;
  T y[1];
  load_row(Incoming<T, T>{&one, &known, f}, 1, y);
  return y[0];
}

// Points dense near zero and far out, of both signs.
template <typename T, typename Visit>
void for_points(T largest, Visit&& visit) {
  for (T x = T(1e-30); x < largest; x *= T(1.0017))
    for (T point : {x, -x}) visit(point);
  visit(T(0));
}

// In units of the last place of the largest of the result and `floor`.
template <typename T>
double error_in_ulp(double found, double exact, double floor) {
  return std::abs(found - exact) / (std::numeric_limits<T>::epsilon() * std::max(std::abs(exact), floor));
}

template <typename T>
void test_functions() {
  const double tiny = 1e-300;
  // Beyond the range of the reduction the library's function takes over.
  for_points<T>(T(1e7), [&](T x) {
    const double sine = std::sin(static_cast<double>(x)), cosine = std::cos(static_cast<double>(x));
    CHECK(error_in_ulp<T>(value(Activation::sin, x), sine, std::abs(x) < 1 ? tiny : 0.25) <= 3, "sin(%g)", double(x));
    CHECK(error_in_ulp<T>(slope(Activation::sin, x), cosine, 0.25) <= 3, "cos(%g)", double(x));
  });
  for_points<T>(T(1e3), [&](T x) {
    const double exact = std::tanh(static_cast<double>(x));
    CHECK(error_in_ulp<T>(value(Activation::tanh, x), exact, tiny) <= 4, "tanh(%g) is off by %g ulp", double(x),
          error_in_ulp<T>(value(Activation::tanh, x), exact, tiny));
    CHECK(value(Activation::relu, x) == (x > 0 ? x : T(0)), "relu(%g)", double(x));
    CHECK(slope(Activation::relu, x) == (x > 0 ? T(1) : T(0)), "relu'(%g)", double(x));
  });
  // One number of a vector beyond the range, in each place.
  constexpr int kCount = Simd<T>::kWidth;
  for (T far : {T(1e7), std::numeric_limits<T>::infinity(), std::numeric_limits<T>::quiet_NaN()})
    for (int place = 0; place < kCount; ++place) {
      T x[kCount], y[kCount], y_bar[kCount], ones[kCount];
      for (int k = 0; k < kCount; ++k) x[k] = k == place ? far : T(k) - 3, ones[k] = 1;
      Destination<T, T>{y, nullptr, Activation::sin}.store(x, kCount);
      load_row(Incoming<T, T>{ones, x, Activation::sin}, kCount, y_bar);
      for (int k = 0; k < kCount; ++k) {
        const double sine = std::sin(static_cast<double>(x[k])), cosine = std::cos(static_cast<double>(x[k]));
        CHECK(std::isnan(sine) ? std::isnan(y[k]) : error_in_ulp<T>(y[k], sine, 0.25) <= 3, "sin in place %d", k);
        CHECK(std::isnan(cosine) ? std::isnan(y_bar[k]) : error_in_ulp<T>(y_bar[k], cosine, 0.25) <= 3,
              "cos in place %d", k);
      }
    }
  const T infinity = std::numeric_limits<T>::infinity(), nan = std::numeric_limits<T>::quiet_NaN();
  for (Activation f : {Activation::none, Activation::relu, Activation::tanh, Activation::sin})
    CHECK(std::isnan(value(f, nan)), "activation %d of NaN", int(f));
  CHECK(value(Activation::tanh, infinity) == 1 && value(Activation::tanh, -infinity) == -1, "tanh of infinity");
  CHECK(std::isnan(value(Activation::sin, infinity)), "sin of infinity");
  CHECK(value(Activation::relu, infinity) == infinity && value(Activation::relu, -infinity) == 0, "relu of infinity");
}

// Rows of every length around the vectors, into storage of every kind, with and without the values before.
template <typename S, typename T>
void test_rows() {
  for (int64_t count = 1; count < 40; ++count) {
    std::vector<T> from = random_integers<T>(count), to(count), seen(count), loaded(count), ones(count, T(1));
    std::vector<S> stored(count + 1), before(count + 1), bars(count + 1);
    store_row(ones.data(), count, bars.data());
    S guard;
    store_one(T(77), guard);
    stored[count] = before[count] = guard;
    Destination<S, T>{stored.data(), before.data(), Activation::tanh}.store(from.data(), count);
    load_row(stored.data(), count, to.data());
    load_row(before.data(), count, seen.data());
    CHECK(seen == from, "values before, %d of them", int(count));
    load_row(Incoming<S, T>{bars.data(), stored.data(), Activation::tanh}, count, loaded.data());
    for (int64_t k = 0; k < count; ++k) {
      CHECK(std::abs(to[k] - std::tanh(from[k])) < 1e-2, "row of %d", int(count));
      CHECK(std::abs(loaded[k] - (1 - to[k] * to[k])) < 1e-6, "slopes of %d", int(count));
    }
    CHECK((load_one<S, T>(stored[count]) == 77 && load_one<S, T>(before[count]) == 77), "written past %d", int(count));
  }
}

}  // namespace

void run_tests() {
  test_functions<float>();
  test_functions<double>();
  test_rows<float, float>();
  test_rows<double, double>();
  test_rows<magep::BFloat16, float>();
  test_rows<magep::Float16, float>();
}
