#include <cmath>
#include <limits>

#include "check.h"
#include "cpu/storage.h"

namespace {

using namespace magep::MAGEP_ISA;

template <typename S>
uint16_t bits_of(float x) {
  S stored;
  narrow(x, stored);
  return stored.bits;
}

// `infinity` is the pattern of +inf; every pattern above it, up to the sign, is NaN.
template <typename S>
void test_storage(uint16_t infinity) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const S stored{static_cast<uint16_t>(bits)};
    const float value = widen(stored);
    const uint32_t magnitude = bits & 0x7fff;
    CHECK(std::isnan(value) == (magnitude > infinity), "bits %x", bits);
    if (magnitude > infinity)
      CHECK(std::isnan(widen(S{bits_of<S>(value)})), "bits %x", bits);
    else
      CHECK(bits_of<S>(value) == bits, "bits %x", bits);
    if (magnitude + 1 >= infinity) continue;
    // Half-way to the next number the even one wins, anything off the middle goes to the nearer.
    const float next = widen(S{static_cast<uint16_t>(bits + 1)}), middle = value + (next - value) / 2;
    CHECK(bits_of<S>(middle) == bits + (bits & 1), "middle above bits %x", bits);
    CHECK(bits_of<S>(std::nextafter(middle, value)) == bits, "below the middle above bits %x", bits);
    CHECK(bits_of<S>(std::nextafter(middle, next)) == bits + 1, "above the middle above bits %x", bits);
  }
  const float largest = std::numeric_limits<float>::max();
  CHECK(bits_of<S>(largest) == infinity && bits_of<S>(-largest) == (infinity | 0x8000), "overflow");
  CHECK(bits_of<S>(std::numeric_limits<float>::denorm_min()) == 0, "underflow");
}

}  // namespace

void run_tests() {
  test_storage<magep::BFloat16>(0x7f80);
  test_storage<magep::Float16>(0x7c00);
}
