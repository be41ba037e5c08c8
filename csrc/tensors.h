// From tensors on the CPU to pointers for the kernels: checks, conversion, allocation, threads.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <atomic>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "arguments.h"
#include "cpu/kernels.h"
#include "cpu/storage_types.h"

namespace magep {

// Becomes a MemoryError.
class OutOfMemory : public std::bad_alloc {
 public:
  explicit OutOfMemory(const std::string& what) : message("magep_fast: not enough memory for " + what) {}
  explicit OutOfMemory(const Sizes& shape) : OutOfMemory("a tensor of shape " + text(shape)) {}
  const char* what() const noexcept override { return message.c_str(); }

 private:
  std::string message;
};

// Runs what torch does to tensors that are good: what it may lack is memory, and its own message names a line of torch.
template <typename What, typename Body>
auto within_memory(const What& what, const Body& body) {
  try {
    return body();
  } catch (const std::runtime_error&) {
    throw OutOfMemory(what);
  }
}

inline const Parallel& torch_threads() {
  static thread_local Parallel parallel;
  parallel.threads = torch::stable::get_num_threads();
  if (!parallel.run)
    parallel.run = [](int64_t count, const std::function<void(int64_t)>& body) {
      if (count == 1) return body(0);
      std::atomic<bool> out_of_memory{false};  // the stable ABI passes on that there was an error, not which
      torch::stable::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
        try {
          for (int64_t t = begin; t < end; ++t) body(t);
        } catch (const std::bad_alloc&) {
          out_of_memory = true;
        }
      });
      if (out_of_memory) throw OutOfMemory("a workspace");
    };
  return parallel;
}

// Calls body with a storage type S and a computation type T.
template <typename Body>
auto with_types(ScalarType dtype, const char* op, Body&& body) {
  try {
    switch (dtype) {
      case ScalarType::Float: return body(float{}, float{});
      case ScalarType::Double: return body(double{}, double{});
      case ScalarType::BFloat16: return body(BFloat16{}, float{});
      case ScalarType::Half: return body(Float16{}, float{});
      default: break;
    }
  } catch (const OutOfMemory&) {
    throw;
  } catch (const std::bad_alloc&) {
    throw OutOfMemory("a workspace");
  }
  STD_TORCH_CHECK(false, op, ": expected float32, float64, bfloat16 or float16 features");
  return body(float{}, float{});
}

inline void check(const Tensor& x, const char* op, const Item& item, const Sizes& shape, ScalarType dtype) {
  check(x, x.is_cpu(), "CPU", op, item, shape, dtype);
}

// Tensors made contiguous, with their pointers.
template <typename X>
struct Pointers {
  std::vector<Tensor> keep;
  std::vector<X*> data;

  void add(const Tensor& x) {
    keep.push_back(x.is_contiguous() ? x : within_memory(sizes_of(x), [&] { return torch::stable::contiguous(x); }));
    data.push_back(static_cast<X*>(keep.back().data_ptr()));
  }
  void add(const std::vector<Tensor>& tensors) {
    for (const Tensor& x : tensors) add(x);
  }
  X* const* get() const { return data.data(); }
};

// Pages of a large new tensor are wanted 2 MiB at a time: written for the first time, each costs the system a fault,
// which with 4 KiB pages takes longer than the arithmetic.
inline void prefer_huge_pages(void* data, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kHuge = 2 << 20;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + kHuge - 1) / kHuge * kHuge;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) / kHuge * kHuge;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // advice: it may be ignored
#else
  (void)data, (void)bytes;
#endif
}

// torch::stable::new_empty looks its operator up by name, which takes longer than the rest.
inline Tensor new_empty(const Tensor& like, const Sizes& shape, ScalarType dtype) {
  auto code = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_aten_new_empty(like.get(), shape.data(), static_cast<int64_t>(shape.size()), &code,
                                                   nullptr, nullptr, 0, nullptr, &handle));
  return Tensor(handle);
}

// New tensors appended to `results`, and their pointers.
template <typename X>
std::vector<X*> allocate(std::vector<Tensor>& results, const Tensor& like, const std::vector<Sizes>& shapes,
                         ScalarType dtype) {
  std::vector<X*> data;
  for (const Sizes& shape : shapes) {
    results.push_back(within_memory(shape, [&] { return new_empty(like, shape, dtype); }));
    data.push_back(static_cast<X*>(results.back().mutable_data_ptr()));
    prefer_huge_pages(data.back(), results.back().numel() * static_cast<int64_t>(sizeof(X)));
  }
  return data;
}

template <typename X>
Pointers<const X> features(const std::vector<Tensor>& weights, const std::vector<Tensor>& biases) {
  Pointers<const X> pointers;
  pointers.add(weights);
  pointers.add(biases);
  return pointers;
}

// Tensors that must have the given shapes, such as gradients of outputs.
template <typename X>
Pointers<const X> checked(const std::vector<Tensor>& tensors, const char* op, const char* name,
                          const std::vector<Sizes>& shapes, ScalarType dtype) {
  STD_TORCH_CHECK(tensors.size() == shapes.size(), op, ": expected ", shapes.size(), " ", name, "; found ",
                  tensors.size());
  Pointers<const X> pointers;
  for (size_t k = 0; k < shapes.size(); ++k) {
    check(tensors[k], op, Item{name, k}, shapes[k], dtype);
    pointers.add(tensors[k]);
  }
  return pointers;
}

// Tensors that must have the given shapes and are written to.
template <typename X>
Pointers<X> changeable(const std::vector<Tensor>& tensors, const char* op, const char* name,
                       const std::vector<Sizes>& shapes, ScalarType dtype) {
  for (size_t k = 0; k < tensors.size(); ++k)
    STD_TORCH_CHECK(tensors[k].is_contiguous(), op, ": ", text(Item{name, k}),
                    " must be contiguous, as it is changed in place");
  const auto known = checked<X>(tensors, op, name, shapes, dtype);
  Pointers<X> pointers;
  for (const Tensor& x : known.keep) pointers.add(x);
  return pointers;
}

template <typename T>
constexpr ScalarType scalar_type() {
  return sizeof(T) == 8 ? ScalarType::Double : ScalarType::Float;
}

// Parameters in the type of computation.
template <typename T>
Pointers<const T> parameters(const std::vector<Tensor>& tensors, const char* op, const char* name,
                             const std::vector<Sizes>& shapes, ScalarType dtype) {
  if (dtype == scalar_type<T>()) return checked<T>(tensors, op, name, shapes, dtype);
  const auto narrow = checked<T>(tensors, op, name, shapes, dtype);
  Pointers<const T> pointers;
  for (const Tensor& x : narrow.keep)
    pointers.add(within_memory(sizes_of(x), [&] { return torch::stable::to(x, scalar_type<T>()); }));
  return pointers;
}

inline void finish(std::vector<Tensor>& results, size_t first, int64_t B, ScalarType dtype) {
  within_memory("gradients of parameters", [&] { finish_gradients(results, first, B, dtype); });
}

inline Activation activation_of(const char* op, int64_t code) {
  check_activation(op, code);
  return static_cast<Activation>(code);
}

// The outputs of an equivariant layer as `results`, followed by the values before the activation if the backward pass
// will ask for them.
template <typename S>
struct LayerResults {
  std::vector<S*> values, before;

  LayerResults(std::vector<Tensor>& results, const Tensor& like, const std::vector<Sizes>& shapes)
      : values(allocate<S>(results, like, shapes, like.scalar_type())) {}
  void keep_before(std::vector<Tensor>& results, const Tensor& like, const std::vector<Sizes>& shapes) {
    before = allocate<S>(results, like, shapes, like.scalar_type());
  }
  Outputs<S> outputs(Activation f) const {
    const size_t L = values.size() / 2;
    S* const* b = before.empty() ? nullptr : before.data();
    return {values.data(), values.data() + L, b, b ? b + L : nullptr, f};
  }
};

// Gradients of the outputs with what the activation's slope is computed from.
template <typename S>
struct LayerGradients {
  Pointers<const S> bars, known;
  Activation f;

  LayerGradients(const char* op, const std::vector<Tensor>& grads, const std::vector<Tensor>& known_tensors,
                 const std::vector<Sizes>& shapes, ScalarType dtype, Activation f)
      : bars(checked<S>(grads, op, "grads", shapes, dtype)), f(f) {
    if (f != Activation::none) known = checked<S>(known_tensors, op, "known", shapes, dtype);
  }
  OutputGradients<S> get() const {
    const size_t L = bars.data.size() / 2;
    const S* const* k = known.data.empty() ? nullptr : known.get();
    return {bars.get(), bars.get() + L, k, k ? k + L : nullptr, f};
  }
};

inline Shape shape_of(const char* op, const std::vector<Tensor>& weights, const std::vector<Tensor>& biases,
                      int64_t out_channels, size_t fewest = 2) {
  const Shape s = claimed_shape(op, weights, biases, out_channels, fewest);
  const auto shapes = feature_shapes(s, s.d);
  for (size_t i = 0; i < weights.size(); ++i) {
    check(weights[i], op, Item{"weights", i}, shapes[i], weights[0].scalar_type());
    check(biases[i], op, Item{"biases", i}, shapes[weights.size() + i], weights[0].scalar_type());
  }
  return s;
}

// [Wb] has one coefficient for all t if the last matrix has the columns for it.
inline Shape with_sharing(Shape s, const std::vector<Tensor>& matrices) {
  s.share_Wb = true;
  if (matrices.empty() || matrices.back().dim() != 2 || matrices.back().size(1) != s.readout_columns())
    s.share_Wb = false;
  return s;
}

// Sizes of features whose weights may have taps: channels of the weights of each layer, d those of the biases.
struct FeatureSizes {
  int64_t B, d;
  Sizes n, channels;

  bool operator==(const FeatureSizes& other) const {
    return B == other.B && d == other.d && n == other.n && channels == other.channels;
  }
};

inline FeatureSizes sizes_of_features(const char* op, const std::vector<Tensor>& weights,
                                      const std::vector<Tensor>& biases) {
  const size_t L = weights.size();
  STD_TORCH_CHECK(L >= 2 && L == biases.size(), op,
                  ": expected as many weights as biases, at least two of each; found ", L, " and ", biases.size());
  STD_TORCH_CHECK(weights[0].dim() == 4 && biases[0].dim() == 3, op,
                  ": weights must have rank 4 and biases rank 3; found ", weights[0].dim(), " and ", biases[0].dim());
  FeatureSizes f{weights[0].size(0), biases[0].size(1), {weights[0].size(3)}, {}};
  const auto dtype = weights[0].scalar_type();
  for (size_t i = 0; i < L; ++i) {
    STD_TORCH_CHECK(weights[i].dim() == 4, op, ": weights[", i, "] must have rank 4; found ", weights[i].dim());
    f.n.push_back(weights[i].size(2));
    f.channels.push_back(weights[i].size(1));
    check(weights[i], op, Item{"weights", i}, {f.B, f.channels[i], f.n[i + 1], f.n[i]}, dtype);
    check(biases[i], op, Item{"biases", i}, {f.B, f.d, f.n[i + 1]}, dtype);
  }
  for (int64_t n : f.n) STD_TORCH_CHECK(n >= 1, op, ": every width must be at least 1");
  return f;
}

inline LinearShape linear_shape(const char* op, const FeatureSizes& f, const std::vector<Tensor>& matrices,
                                int64_t out_channels) {
  const size_t L = f.channels.size();
  STD_TORCH_CHECK(matrices.size() == 2 * L, op, ": expected two matrices for each of ", L, " layers; found ",
                  matrices.size());
  LinearShape s{f.B, f.d, out_channels, f.n, f.channels, {}};
  STD_TORCH_CHECK(s.d >= 1 && s.e >= 1, op, ": expected at least one channel in and out; found ", s.d, " and ", s.e);
  for (size_t i = 0; i < L; ++i) {
    STD_TORCH_CHECK(matrices[2 * i].dim() == 2, op, ": matrices[", 2 * i, "] must have rank 2; found ",
                    matrices[2 * i].dim());
    const int64_t rows = i == 0 ? s.n[0] : i == L - 1 ? s.n[L] : 1;  // of the matrix for each channel out
    s.out.push_back(matrices[2 * i].size(0) / rows);
    STD_TORCH_CHECK(s.in[i] % s.d == 0 && s.in[i] > 0 && s.out[i] % s.e == 0 && s.out[i] > 0, op,
                    ": channels of weights must be multiples of those of biases; layer ", i + 1, " has ", s.in[i],
                    " in and ", s.out[i], " out");
  }
  return s;
}

inline std::vector<Sizes> matrix_shapes(const LinearShape& s) {
  const size_t L = s.in.size();
  std::vector<Sizes> shapes;
  for (size_t i = 0; i < L; ++i) {
    if (i == 0) {
      const int64_t columns = s.n[0] * s.in[0] + s.d;
      shapes.push_back({s.out[0] * s.n[0], columns});
      shapes.push_back({s.e, columns});
    } else if (i < L - 1) {
      shapes.push_back({s.out[i], s.in[i]});
      shapes.push_back({s.e, s.d});
    } else {
      shapes.push_back({s.out[i] * s.n[L], s.n[L] * s.in[i]});
      shapes.push_back({s.e * s.n[L], s.n[L] * s.d + 1});
    }
  }
  return shapes;
}

// The invariant layer's connections are (L, 0), then the traces' (1, 1) ... (L - 1, L - 1); the kernels number the
// pairs of the equivariant layer.
template <typename T>
std::vector<T> spread_psi(const Shape& s, const T* psi) {
  const int64_t size = (s.n_0() + 1) * s.n_L() * s.d;
  std::vector<T> all(s.num_pairs() * size);
  std::copy(psi, psi + size, all.data() + s.pair_to_input(s.L()) * size);
  std::copy(psi + size, psi + s.L() * size, all.data() + s.pair_of_trace(1) * size);
  return all;
}
template <typename T>
void gather_psi(const Shape& s, const T* all, T* psi) {
  const int64_t size = (s.n_0() + 1) * s.n_L() * s.d;
  const T *to_input = all + s.pair_to_input(s.L()) * size, *traces = all + s.pair_of_trace(1) * size;
  std::copy(to_input, to_input + size, psi);
  std::copy(traces, traces + (s.L() - 1) * size, psi + size);
}

}  // namespace magep
