// Compiled for any processor: the tests of a level run only where its instructions exist.
#include <cstdio>
#include <cstring>

void run_tests();

static bool supported(const char* level) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (!std::strcmp(level, "avx2")) return avx2;
  if (!std::strcmp(level, "avx512"))
    return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl");
#endif
  return !std::strcmp(level, "portable");
}

int main() {
  constexpr int kSkipped = 77;
  if (!supported(LEVEL)) {
    std::puts("this processor lacks " LEVEL);
    return kSkipped;
  }
  run_tests();
}
