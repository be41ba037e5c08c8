#include <cstdlib>
#include <stdexcept>
#include <string>

#include "kernels.h"

namespace magep {

namespace portable {
extern const KernelTable table;
}
#if defined(__x86_64__)
namespace avx2 {
extern const KernelTable table;
}
namespace avx512 {
extern const KernelTable table;
}
#endif

namespace {

const KernelTable& choose() {
  const char* asked = std::getenv("MAGEP_FAST_ISA");
  const std::string wanted = asked ? asked : "";
  const auto want = [&](const char* name, bool supported) {
    if (wanted == name && !supported)
      throw std::runtime_error(std::string("MAGEP_FAST_ISA=") + name + " is not supported by this processor");
    return supported && (wanted.empty() || wanted == name);
  };
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool has_avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (want("avx512", has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl")))
    return avx512::table;
  if (want("avx2", has_avx2)) return avx2::table;
#endif
  if (want("portable", true)) return portable::table;
  throw std::runtime_error("MAGEP_FAST_ISA=" + wanted + " is unknown; expected avx512, avx2 or portable");
}

}  // namespace

const KernelTable& kernels() {
  static const KernelTable& chosen = choose();
  return chosen;
}

// The instruction set in use, or why there is none: for the report of magep_fast.info.
extern "C" __attribute__((visibility("default"))) const char* magep_fast_isa() {
  try {
    return kernels().isa;
  } catch (const std::exception& error) {
    static const std::string reason = error.what();
    return reason.c_str();
  }
}

int64_t saved_size(const Shape& shape, Operation operation) { return Layout(shape, operation).stride; }

}  // namespace magep
