// Operator schemas, argument checks and registration on the torch stable ABI.

#include <torch/csrc/stable/library.h>
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

namespace {

using magep::Activation;
using magep::DenseShape;
using magep::feature_shapes;
using magep::item;
using magep::LinearShape;
using magep::matrix_shapes;
using magep::rows_of;
using magep::ScalarType;
using magep::Shape;
using magep::Sizes;
using magep::sizes_of;
using magep::Tensor;

// Becomes a MemoryError.
class OutOfMemory : public std::bad_alloc {
 public:
  explicit OutOfMemory(const std::string& what) : message("magep_fast: not enough memory for " + what) {}
  explicit OutOfMemory(const Sizes& shape) : OutOfMemory("a tensor of shape " + magep::text(shape)) {}
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

const magep::Parallel& torch_threads() {
  static thread_local magep::Parallel parallel;
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
      case ScalarType::BFloat16: return body(magep::BFloat16{}, float{});
      case ScalarType::Half: return body(magep::Float16{}, float{});
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

void check(const Tensor& x, const char* op, const std::string& name, const Sizes& shape, ScalarType dtype) {
  magep::check(x, x.is_cpu(), "CPU", op, name, shape, dtype);
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
void prefer_huge_pages(void* data, int64_t bytes) {
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
Tensor new_empty(const Tensor& like, const Sizes& shape, ScalarType dtype) {
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
    check(tensors[k], op, item(name, k), shapes[k], dtype);
    pointers.add(tensors[k]);
  }
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

void finish_gradients(std::vector<Tensor>& results, size_t first, int64_t B, ScalarType dtype) {
  within_memory("gradients of parameters", [&] { magep::finish_gradients(results, first, B, dtype); });
}

Activation activation_of(const char* op, int64_t code) {
  magep::check_activation(op, code);
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
  magep::Outputs<S> outputs(Activation f) const {
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
  magep::OutputGradients<S> get() const {
    const size_t L = bars.data.size() / 2;
    const S* const* k = known.data.empty() ? nullptr : known.get();
    return {bars.get(), bars.get() + L, k, k ? k + L : nullptr, f};
  }
};

Shape shape_of(const char* op, const std::vector<Tensor>& weights, const std::vector<Tensor>& biases,
               int64_t out_channels, size_t fewest = 2) {
  const Shape s = magep::claimed_shape(op, weights, biases, out_channels, fewest);
  const auto shapes = feature_shapes(s, s.d);
  for (size_t i = 0; i < weights.size(); ++i) {
    check(weights[i], op, item("weights", i), shapes[i], weights[0].scalar_type());
    check(biases[i], op, item("biases", i), shapes[weights.size() + i], weights[0].scalar_type());
  }
  return s;
}

// [Wb] has one coefficient for all t if the last matrix has the columns for it.
Shape with_sharing(Shape s, const std::vector<Tensor>& matrices) {
  s.share_Wb = true;
  if (matrices.empty() || matrices.back().dim() != 2 || matrices.back().size(1) != s.readout_columns())
    s.share_Wb = false;
  return s;
}

// -> A_1 ... A_L, S_1 ... S_(L-1)
std::vector<Tensor> chain(std::vector<Tensor> weights, std::vector<Tensor> biases) {
  const char* op = "magep_fast::chain";
  const Shape s = shape_of(op, weights, biases, 1, 1);
  const ScalarType dtype = weights[0].scalar_type();
  return with_types(dtype, op, [&](auto storage, auto compute) {
    using S = decltype(storage);
    using T = decltype(compute);
    const auto x = features<S>(weights, biases);
    std::vector<Tensor> results;
    const auto out = allocate<S>(results, weights[0], chain_shapes(s), dtype);
    if (s.B > 0)
      magep::kernels().of<S, T>().chain_forward(s, x.get(), x.get() + s.L(), out.data(), out.data() + s.L(),
                                                torch_threads());
    return results;
  });
}

// -> gradients of weights, biases
std::vector<Tensor> chain_backward(std::vector<Tensor> grads, std::vector<Tensor> weights, std::vector<Tensor> biases) {
  const char* op = "magep_fast::chain_backward";
  const Shape s = shape_of(op, weights, biases, 1, 1);
  const ScalarType dtype = weights[0].scalar_type();
  return with_types(dtype, op, [&](auto storage, auto compute) {
    using S = decltype(storage);
    using T = decltype(compute);
    const auto bar = checked<S>(grads, op, "grads", chain_shapes(s), dtype);
    const auto x = features<S>(weights, biases);
    std::vector<Tensor> results;
    const auto out = allocate<S>(results, weights[0], feature_shapes(s, s.d), dtype);
    if (s.B > 0)
      magep::kernels().of<S, T>().chain_backward(s, bar.get(), bar.get() + s.L(), x.get(), x.get() + s.L(), out.data(),
                                                 out.data() + s.L(), torch_threads());
    return results;
  });
}

// -> new weights, new biases, saved, and with `training` and sin the weights and biases before the activation
std::vector<Tensor> equivariant(std::vector<Tensor> weights, std::vector<Tensor> biases, std::vector<Tensor> matrices,
                                Tensor psi, int64_t out_channels, int64_t activation, bool training) {
  const char* op = "magep_fast::equivariant";
  const Shape s = with_sharing(shape_of(op, weights, biases, out_channels), matrices);
  const Activation f = activation_of(op, activation);
  const ScalarType dtype = weights[0].scalar_type();
  return with_types(dtype, op, [&](auto storage, auto compute) {
    using S = decltype(storage);
    using T = decltype(compute);
    const auto phi = parameters<T>(matrices, op, "matrices", matrix_shapes(s), dtype);
    const auto connections = parameters<T>({psi}, op, "psi", {psi_shape(s, true)}, dtype);
    const auto x = features<S>(weights, biases);
    std::vector<Tensor> results;
    LayerResults<S> out(results, weights[0], feature_shapes(s, s.e));
    const auto saved = allocate<T>(results, weights[0], {{s.B, magep::saved_size(s, magep::Operation::equivariant)}},
                                   scalar_type<T>());
    if (training && f == Activation::sin) out.keep_before(results, weights[0], feature_shapes(s, s.e));
    if (s.B > 0)
      magep::kernels().of<S, T>().equivariant_forward(s, x.get(), x.get() + s.L(), phi.get(), connections.data[0],
                                                      out.outputs(f), saved[0], torch_threads());
    return results;
  });
}

// -> gradients of weights, biases, matrices, psi
std::vector<Tensor> equivariant_backward(std::vector<Tensor> grads, std::vector<Tensor> weights,
                                         std::vector<Tensor> biases, std::vector<Tensor> matrices, Tensor psi,
                                         Tensor saved, std::vector<Tensor> known, int64_t out_channels,
                                         int64_t activation) {
  const char* op = "magep_fast::equivariant_backward";
  const Shape s = with_sharing(shape_of(op, weights, biases, out_channels), matrices);
  const Activation f = activation_of(op, activation);
  const ScalarType dtype = weights[0].scalar_type();
  return with_types(dtype, op, [&](auto storage, auto compute) {
    using S = decltype(storage);
    using T = decltype(compute);
    const LayerGradients<S> bars(op, grads, known, feature_shapes(s, s.e), dtype, f);
    const auto phi = parameters<T>(matrices, op, "matrices", matrix_shapes(s), dtype);
    const auto connections = parameters<T>({psi}, op, "psi", {psi_shape(s, true)}, dtype);
    const auto kept = checked<T>({saved}, op, "saved", {{s.B, magep::saved_size(s, magep::Operation::equivariant)}},
                                 scalar_type<T>());
    const auto x = features<S>(weights, biases);
    std::vector<Tensor> results;
    const auto x_bar = allocate<S>(results, weights[0], feature_shapes(s, s.d), dtype);
    const auto phi_bar = allocate<T>(results, weights[0], matrix_shapes(s), scalar_type<T>());
    const auto psi_bar = allocate<T>(results, weights[0], {psi_shape(s, true)}, scalar_type<T>());
    if (s.B > 0)
      magep::kernels().of<S, T>().equivariant_backward(
          s, bars.get(), x.get(), x.get() + s.L(), phi.get(), connections.data[0], kept.data[0], x_bar.data(),
          x_bar.data() + s.L(), phi_bar.data(), psi_bar[0], torch_threads());
    finish_gradients(results, x_bar.size(), s.B, dtype);
    return results;
  });
}

LinearShape linear_shape(const char* op, const std::vector<Tensor>& weights, const std::vector<Tensor>& biases,
                         const std::vector<Tensor>& matrices, int64_t out_channels) {
  const size_t L = weights.size();
  STD_TORCH_CHECK(L >= 2 && L == biases.size() && 2 * L == matrices.size(), op,
                  ": expected as many weights as biases, at least two of each, and two matrices for each; found ", L,
                  ", ", biases.size(), " and ", matrices.size());
  STD_TORCH_CHECK(weights[0].dim() == 4 && biases[0].dim() == 3, op,
                  ": weights must have rank 4 and biases rank 3; found ", weights[0].dim(), " and ", biases[0].dim());
  LinearShape s{weights[0].size(0), biases[0].size(1), out_channels, {weights[0].size(3)}, {}, {}};
  STD_TORCH_CHECK(s.d >= 1 && s.e >= 1, op, ": expected at least one channel in and out; found ", s.d, " and ", s.e);
  const auto dtype = weights[0].scalar_type();
  for (size_t i = 0; i < L; ++i) {
    STD_TORCH_CHECK(weights[i].dim() == 4, op, ": weights[", i, "] must have rank 4; found ", weights[i].dim());
    STD_TORCH_CHECK(matrices[2 * i].dim() == 2, op, ": matrices[", 2 * i, "] must have rank 2; found ",
                    matrices[2 * i].dim());
    s.n.push_back(weights[i].size(2));
    s.in.push_back(weights[i].size(1));
    check(weights[i], op, item("weights", i), {s.B, s.in[i], s.n[i + 1], s.n[i]}, dtype);
    check(biases[i], op, item("biases", i), {s.B, s.d, s.n[i + 1]}, dtype);
  }
  for (int64_t n : s.n) STD_TORCH_CHECK(n >= 1, op, ": every width must be at least 1");
  for (size_t i = 0; i < L; ++i) {
    const int64_t rows = i == 0 ? s.n[0] : i == L - 1 ? s.n[L] : 1;  // of the matrix for each channel out
    s.out.push_back(matrices[2 * i].size(0) / rows);
    STD_TORCH_CHECK(s.in[i] % s.d == 0 && s.in[i] > 0 && s.out[i] % s.e == 0 && s.out[i] > 0, op,
                    ": channels of weights must be multiples of those of biases; layer ", i + 1, " has ", s.in[i],
                    " in and ", s.out[i], " out");
  }
  return s;
}

std::vector<Sizes> matrix_shapes(const LinearShape& s) {
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

// -> new weights, new biases, and with `training` and sin the weights and biases before the activation
std::vector<Tensor> linear(std::vector<Tensor> weights, std::vector<Tensor> biases, std::vector<Tensor> matrices,
                           int64_t out_channels, int64_t activation, bool training) {
  const char* op = "magep_fast::linear";
  const LinearShape s = linear_shape(op, weights, biases, matrices, out_channels);
  const Activation f = activation_of(op, activation);
  const ScalarType dtype = weights[0].scalar_type();
  return with_types(dtype, op, [&](auto storage, auto compute) {
    using S = decltype(storage);
    using T = decltype(compute);
    const auto phi = parameters<T>(matrices, op, "matrices", matrix_shapes(s), dtype);
    const auto x = features<S>(weights, biases);
    const auto shapes = feature_shapes(s.B, s.out, s.e, s.n);
    std::vector<Tensor> results;
    LayerResults<S> out(results, weights[0], shapes);
    if (training && f == Activation::sin) out.keep_before(results, weights[0], shapes);
    if (s.B > 0)
      magep::kernels().of<S, T>().linear_forward(s, x.get(), x.get() + s.L(), phi.get(), out.outputs(f),
                                                 torch_threads());
    return results;
  });
}

// -> gradients of matrices, and with `inputs` before them those of weights and biases
std::vector<Tensor> linear_backward(std::vector<Tensor> grads, std::vector<Tensor> weights, std::vector<Tensor> biases,
                                    std::vector<Tensor> matrices, std::vector<Tensor> known, int64_t out_channels,
                                    int64_t activation, bool inputs) {
  const char* op = "magep_fast::linear_backward";
  const LinearShape s = linear_shape(op, weights, biases, matrices, out_channels);
  const Activation f = activation_of(op, activation);
  const ScalarType dtype = weights[0].scalar_type();
  return with_types(dtype, op, [&](auto storage, auto compute) {
    using S = decltype(storage);
    using T = decltype(compute);
    const LayerGradients<S> bars(op, grads, known, feature_shapes(s.B, s.out, s.e, s.n), dtype, f);
    const auto phi = parameters<T>(matrices, op, "matrices", matrix_shapes(s), dtype);
    const auto x = features<S>(weights, biases);
    std::vector<Tensor> results;
    std::vector<S*> x_bar;
    if (inputs) x_bar = allocate<S>(results, weights[0], feature_shapes(s.B, s.in, s.d, s.n), dtype);
    const auto phi_bar = allocate<T>(results, weights[0], matrix_shapes(s), scalar_type<T>());
    if (s.B > 0)
      magep::kernels().of<S, T>().linear_backward(
          s, bars.get(), x.get(), x.get() + s.L(), phi.get(), inputs ? x_bar.data() : nullptr,
          inputs ? x_bar.data() + s.L() : nullptr, phi_bar.data(), torch_threads());
    finish_gradients(results, x_bar.size(), s.B, dtype);
    return results;
  });
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

// -> out, saved
std::vector<Tensor> invariant(std::vector<Tensor> weights, std::vector<Tensor> biases, Tensor matrix, Tensor psi) {
  const char* op = "magep_fast::invariant";
  const Shape s = with_sharing(shape_of(op, weights, biases, rows_of(op, matrix)), {matrix});
  const ScalarType dtype = weights[0].scalar_type();
  return with_types(dtype, op, [&](auto storage, auto compute) {
    using S = decltype(storage);
    using T = decltype(compute);
    const auto phi = parameters<T>({matrix}, op, "matrix", matrix_shapes(s, false), dtype);
    const auto connections = parameters<T>({psi}, op, "psi", {psi_shape(s, false)}, dtype);
    const auto x = features<S>(weights, biases);
    std::vector<Tensor> results;
    const auto out = allocate<S>(results, weights[0], {{s.B, s.e}}, dtype);
    const auto saved =
        allocate<T>(results, weights[0], {{s.B, magep::saved_size(s, magep::Operation::invariant)}}, scalar_type<T>());
    if (s.B > 0)
      magep::kernels().of<S, T>().invariant_forward(s, x.get(), x.get() + s.L(), phi.data[0],
                                                    spread_psi(s, connections.data[0]).data(), out[0], saved[0],
                                                    torch_threads());
    return results;
  });
}

// -> gradients of weights, biases, matrix, psi
std::vector<Tensor> invariant_backward(Tensor grad, std::vector<Tensor> weights, std::vector<Tensor> biases,
                                       Tensor matrix, Tensor psi, Tensor saved) {
  const char* op = "magep_fast::invariant_backward";
  const Shape s = with_sharing(shape_of(op, weights, biases, rows_of(op, matrix)), {matrix});
  const ScalarType dtype = weights[0].scalar_type();
  return with_types(dtype, op, [&](auto storage, auto compute) {
    using S = decltype(storage);
    using T = decltype(compute);
    const auto bar = checked<S>({grad}, op, "grad", {{s.B, s.e}}, dtype);
    const auto phi = parameters<T>({matrix}, op, "matrix", matrix_shapes(s, false), dtype);
    const auto connections = parameters<T>({psi}, op, "psi", {psi_shape(s, false)}, dtype);
    const auto kept =
        checked<T>({saved}, op, "saved", {{s.B, magep::saved_size(s, magep::Operation::invariant)}}, scalar_type<T>());
    const auto x = features<S>(weights, biases);
    std::vector<Tensor> results;
    const auto x_bar = allocate<S>(results, weights[0], feature_shapes(s, s.d), dtype);
    const auto phi_bar = allocate<T>(results, weights[0], matrix_shapes(s, false), scalar_type<T>());
    const auto psi_bar = allocate<T>(results, weights[0], {psi_shape(s, false)}, scalar_type<T>());
    if (s.B > 0) {
      std::vector<T> all_bar(s.psi_size());
      magep::kernels().of<S, T>().invariant_backward(
          s, bar.data[0], x.get(), x.get() + s.L(), phi.data[0], spread_psi(s, connections.data[0]).data(),
          kept.data[0], x_bar.data(), x_bar.data() + s.L(), phi_bar[0], all_bar.data(), torch_threads());
      gather_psi(s, all_bar.data(), psi_bar[0]);
    }
    finish_gradients(results, x_bar.size(), s.B, dtype);
    return results;
  });
}

// parameters: weight [n_out, n_in] and bias [n_out] of every layer.
DenseShape dense_shape(const char* op, const Tensor& x, const std::vector<Tensor>& parameters, bool sigmoid) {
  STD_TORCH_CHECK(x.dim() == 2, op, ": x must have rank 2; found ", x.dim());
  STD_TORCH_CHECK(!parameters.empty() && parameters.size() % 2 == 0, op,
                  ": expected a weight and a bias for each layer, at least one; found ", parameters.size(), " tensors");
  DenseShape s{x.size(0), {x.size(1)}, sigmoid};
  for (size_t k = 0; k < parameters.size(); k += 2) s.widths.push_back(rows_of(op, parameters[k]));
  for (int64_t n : s.widths) STD_TORCH_CHECK(n >= 1, op, ": every width must be at least 1");
  return s;
}

std::vector<Sizes> parameter_shapes(const DenseShape& s) {
  std::vector<Sizes> shapes;
  for (size_t k = 1; k < s.widths.size(); ++k) {
    shapes.push_back({s.widths[k], s.widths[k - 1]});
    shapes.push_back({s.widths[k]});
  }
  return shapes;
}
// Of the last layer, then of the others.
std::vector<Sizes> value_shapes(const DenseShape& s) {
  std::vector<Sizes> shapes{{s.B, s.widths.back()}};
  for (size_t k = 1; k + 1 < s.widths.size(); ++k) shapes.push_back({s.B, s.widths[k]});
  return shapes;
}

// -> outputs, then the values of the other layers
std::vector<Tensor> dense(Tensor x, std::vector<Tensor> layers, bool sigmoid) {
  const char* op = "magep_fast::dense";
  const DenseShape s = dense_shape(op, x, layers, sigmoid);
  const ScalarType dtype = x.scalar_type();
  return with_types(dtype, op, [&](auto storage, auto compute) {
    using S = decltype(storage);
    using T = decltype(compute);
    const auto phi = parameters<T>(layers, op, "layers", parameter_shapes(s), dtype);
    const auto input = checked<S>({x}, op, "x", {{s.B, s.widths[0]}}, dtype);
    std::vector<Tensor> results;
    const auto values = allocate<S>(results, x, value_shapes(s), dtype);
    if (s.B > 0)
      magep::kernels().of<S, T>().dense_forward(s, input.data[0], phi.get(), values.data(), torch_threads());
    return results;
  });
}

// -> gradients of layers, and with `inputs` before them that of x
std::vector<Tensor> dense_backward(Tensor grad, Tensor x, std::vector<Tensor> layers, std::vector<Tensor> values,
                                   bool sigmoid, bool inputs) {
  const char* op = "magep_fast::dense_backward";
  const DenseShape s = dense_shape(op, x, layers, sigmoid);
  const ScalarType dtype = x.scalar_type();
  return with_types(dtype, op, [&](auto storage, auto compute) {
    using S = decltype(storage);
    using T = decltype(compute);
    const auto bar = checked<S>({grad}, op, "grad", {{s.B, s.widths.back()}}, dtype);
    const auto phi = parameters<T>(layers, op, "layers", parameter_shapes(s), dtype);
    const auto known = checked<S>(values, op, "values", value_shapes(s), dtype);
    const auto input = checked<S>({x}, op, "x", {{s.B, s.widths[0]}}, dtype);
    std::vector<Tensor> results;
    std::vector<S*> x_bar;
    if (inputs) x_bar = allocate<S>(results, x, {{s.B, s.widths[0]}}, dtype);
    const auto phi_bar = allocate<T>(results, x, parameter_shapes(s), scalar_type<T>());
    if (s.B > 0)
      magep::kernels().of<S, T>().dense_backward(s, bar.data[0], input.data[0], phi.get(), known.get(),
                                                 inputs ? x_bar[0] : nullptr, phi_bar.data(), torch_threads());
    finish_gradients(results, x_bar.size(), s.B, dtype);
    return results;
  });
}

}  // namespace

STABLE_TORCH_LIBRARY(magep_fast, m) {
  m.def("chain(Tensor[] weights, Tensor[] biases) -> Tensor[]");
  m.def("chain_backward(Tensor[] grads, Tensor[] weights, Tensor[] biases) -> Tensor[]");
  // Each layer returns its outputs and what the backward pass needs; the backward returns the gradients of weights,
  // biases, matrices and psi, in this order. activation: 0 none, 1 relu, 2 tanh, 3 sin. known: what its slope is
  // computed from, the outputs, or for sin (which returns them last, when training) the values before it.
  m.def(
      "equivariant(Tensor[] weights, Tensor[] biases, Tensor[] matrices, Tensor psi, int out_channels, int activation, "
      "bool training) -> Tensor[]");
  m.def(
      "equivariant_backward(Tensor[] grads, Tensor[] weights, Tensor[] biases, Tensor[] matrices, Tensor psi, "
      "Tensor saved, Tensor[] known, int out_channels, int activation) -> Tensor[]");
  m.def(
      "linear(Tensor[] weights, Tensor[] biases, Tensor[] matrices, int out_channels, int activation, bool training) "
      "-> Tensor[]");
  m.def(
      "linear_backward(Tensor[] grads, Tensor[] weights, Tensor[] biases, Tensor[] matrices, Tensor[] known, "
      "int out_channels, int activation, bool inputs) -> Tensor[]");
  m.def("invariant(Tensor[] weights, Tensor[] biases, Tensor matrix, Tensor psi) -> Tensor[]");
  m.def(
      "invariant_backward(Tensor grad, Tensor[] weights, Tensor[] biases, Tensor matrix, Tensor psi, Tensor saved) "
      "-> Tensor[]");
  // Dense layers, weight and bias of each, with ReLU between them. Returns the outputs and the values of the other
  // layers, in order; the backward returns the gradients of x, if `inputs`, and of layers.
  m.def("dense(Tensor x, Tensor[] layers, bool sigmoid) -> Tensor[]");
  m.def("dense_backward(Tensor grad, Tensor x, Tensor[] layers, Tensor[] values, bool sigmoid, bool inputs) -> Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(magep_fast, CPU, m) {
  m.impl("chain", TORCH_BOX(&chain));
  m.impl("chain_backward", TORCH_BOX(&chain_backward));
  m.impl("equivariant", TORCH_BOX(&equivariant));
  m.impl("equivariant_backward", TORCH_BOX(&equivariant_backward));
  m.impl("linear", TORCH_BOX(&linear));
  m.impl("linear_backward", TORCH_BOX(&linear_backward));
  m.impl("invariant", TORCH_BOX(&invariant));
  m.impl("invariant_backward", TORCH_BOX(&invariant_backward));
  m.impl("dense", TORCH_BOX(&dense));
  m.impl("dense_backward", TORCH_BOX(&dense_backward));
}
