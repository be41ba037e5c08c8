// Build and CPU facts for Python.

#include <pybind11/pybind11.h>

#include <string>
#include <vector>

namespace py = pybind11;

namespace {

// Features that decide which kernels run, as the processor and the operating system together support them.
py::dict cpu_features() {
  py::dict features;
#if defined(__x86_64__)
  __builtin_cpu_init();
  features["avx2"] = static_cast<bool>(__builtin_cpu_supports("avx2"));
  features["fma"] = static_cast<bool>(__builtin_cpu_supports("fma"));
  features["avx512f"] = static_cast<bool>(__builtin_cpu_supports("avx512f"));
  features["avx512bf16"] = static_cast<bool>(__builtin_cpu_supports("avx512bf16"));
#endif
  return features;
}

}  // namespace

PYBIND11_MODULE(_native, m) {
  m.doc() = "Build and CPU facts of magep-fast.";
  m.attr("version") = MAGEP_VERSION;
  m.attr("torch_version") = MAGEP_TORCH_VERSION;
  m.attr("build_type") = MAGEP_BUILD_TYPE;
  m.attr("cuda_architectures") = MAGEP_CUDA_ARCHITECTURES;
  m.attr("compiler") = std::string(
#if defined(__clang__)
      "clang " __clang_version__
#else
      "gcc " __VERSION__
#endif
  );
  m.def("cpu_features", &cpu_features, "Instruction set extensions that this processor and system support.");
}
