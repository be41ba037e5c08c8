// The CUDA kernels, run on the host by host_cuda/cuda_runtime.h, against the layers as the paper defines them.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <string>

#include "cuda/launchers.h"
#include "naive.h"

namespace {

using magep::Shape;

template <typename S>
struct Storage {
  static constexpr int dtype = sizeof(S) == 8 ? MAGEP_F64 : MAGEP_F32;
  using Compute = S;
  static S from(double x) { return static_cast<S>(x); }
  static double to(S x) { return x; }
};
template <>
struct Storage<__nv_bfloat16> {
  static constexpr int dtype = MAGEP_BF16;
  using Compute = float;
  static __nv_bfloat16 from(double x) { return __float2bfloat16(static_cast<float>(x)); }
  static double to(__nv_bfloat16 x) { return __bfloat162float(x); }
};
template <>
struct Storage<__half> {
  static constexpr int dtype = MAGEP_F16;
  using Compute = float;
  static __half from(double x) { return __float2half(static_cast<float>(x)); }
  static double to(__half x) { return __half2float(x); }
};

// Device tensors, each in memory of its own, so that AddressSanitizer sees where they end.
template <typename S>
struct Tensors_ {
  std::vector<std::vector<S>> data;
  std::vector<void*> pointers;

  void add(size_t count, double fill = NAN) {
    data.emplace_back(count, Storage<S>::from(fill));
    pointers.push_back(data.back().data());
  }
  void add(const std::vector<double>& values) {
    data.emplace_back();
    for (double x : values) data.back().push_back(Storage<S>::from(x));
    pointers.push_back(data.back().data());
  }
  std::vector<double> values(size_t k) const {
    std::vector<double> out;
    for (S x : data[k]) out.push_back(Storage<S>::to(x));
    return out;
  }
  void* const* get() { return pointers.data(); }
};

std::string name_of(const char* what, const Shape& s) {
  std::string name = std::string(what) + ", B=" + std::to_string(s.B) + " d=" + std::to_string(s.d) +
                     " e=" + std::to_string(s.e) + " n=";
  for (int64_t n : s.n) name += std::to_string(n) + " ";
  return name;
}

// Where the launcher's output k is among the naive one's: weights and biases take turns there.
size_t output_index(const Shape& s, size_t count, size_t k) { return count == 1 ? 0 : k / 2 + k % 2 * s.L(); }

// The connections that the invariant layer has, out of the equivariant layer's.
std::vector<double> invariant_psi(const Shape& s, const std::vector<double>& psi) {
  const int64_t size = (s.n_0() + 1) * s.n_L() * s.d;
  std::vector<double> own(psi.begin() + s.pair_to_input(s.L()) * size,
                          psi.begin() + (s.pair_to_input(s.L()) + 1) * size);
  own.insert(own.end(), psi.begin() + s.pair_of_trace(1) * size, psi.end());
  return own;
}
std::vector<double> spread_psi(const Shape& s, const std::vector<double>& own) {
  const int64_t size = (s.n_0() + 1) * s.n_L() * s.d;
  std::vector<double> psi(s.psi_size());
  std::copy(own.begin(), own.begin() + size, psi.begin() + s.pair_to_input(s.L()) * size);
  std::copy(own.begin() + size, own.end(), psi.begin() + s.pair_of_trace(1) * size);
  return psi;
}

// How a layer is run: which kernels, on which device, in which order of threads.
struct Setting {
  bool tiled = false;
  int shared_per_block = 163 << 10;
  uint64_t seed = 0;
};

struct Results {
  Tensors outputs;    // as the naive functions order them
  Tensors gradients;  // of weights, biases, matrices, psi
  int64_t forward_launches, backward_launches;
};

template <typename S>
Results run(const Shape& s, bool equivariant, int activation, const Inputs& x, const Tensors& seeds, Setting setting) {
  using T = typename Storage<S>::Compute;
  const size_t L = s.L(), outputs = equivariant ? 2 * L : 1;
  auto& device = host_cuda::device;
  device.shared_per_block = setting.shared_per_block;
  device.seed = setting.seed;
  const MagepCudaCall call{equivariant ? MAGEP_EQUIVARIANT : MAGEP_INVARIANT,
                           Storage<S>::dtype,
                           activation,
                           s.B,
                           s.d,
                           s.e,
                           int(L),
                           s.n.data(),
                           setting.tiled,
                           nullptr};
  Tensors_<S> W, b, out, pre, W_bar, b_bar, out_bar;
  Tensors_<T> matrices, psi, saved, matrices_bar, psi_bar, workspace;
  for (size_t i = 0; i < L; ++i) {
    W.add(x.W[i]);
    b.add(x.b[i]);
    W_bar.add(x.W[i].size());
    b_bar.add(x.b[i].size());
  }
  for (const auto& matrix : x.matrices) {
    matrices.add(matrix);
    matrices_bar.add(matrix.size());
  }
  psi.add(equivariant ? x.psi : invariant_psi(s, x.psi));
  psi_bar.add(psi.data[0].size());
  for (size_t k = 0; k < outputs; ++k) {
    const auto& like = seeds[output_index(s, outputs, k)];
    out.add(like.size());
    pre.add(like.size());
    out_bar.add(like);
  }
  const int64_t stride = magep_cuda_saved_size(&call) + 3;  // any distance will do
  saved.add(s.B * stride);
  workspace.add(magep_cuda_layer_backward_workspace(&call) / sizeof(T));
  const MagepCudaNetworks networks{W.get(), b.get()};
  const MagepCudaParameters parameters{matrices.get(), psi.get()[0]};
  const bool keeps = activation == MAGEP_SIN;

  Results results;
  int64_t before = device.launches;
  const char* wrong = magep_cuda_layer_forward(&call, &networks, &parameters, out.get(), keeps ? pre.get() : nullptr,
                                               saved.get()[0], stride);
  CHECK(wrong == nullptr, "%s", wrong);
  results.forward_launches = device.launches - before;
  before = device.launches;
  wrong = magep_cuda_layer_backward(&call, out_bar.get(), keeps ? pre.get() : out.get(), &networks, &parameters,
                                    saved.get()[0], stride, W_bar.get(), b_bar.get(), matrices_bar.get(),
                                    psi_bar.get()[0], workspace.get()[0]);
  CHECK(wrong == nullptr, "%s", wrong);
  results.backward_launches = device.launches - before;

  results.outputs.resize(outputs);
  for (size_t k = 0; k < outputs; ++k) results.outputs[output_index(s, outputs, k)] = out.values(k);
  for (size_t i = 0; i < L; ++i) results.gradients.push_back(W_bar.values(i));
  for (size_t i = 0; i < L; ++i) results.gradients.push_back(b_bar.values(i));
  for (size_t k = 0; k < outputs; ++k) results.gradients.push_back(matrices_bar.values(k));
  results.gradients.push_back(equivariant ? psi_bar.values(0) : spread_psi(s, psi_bar.values(0)));
  return results;
}

void check_close(const Tensors& found, const Tensors& expected, double tolerance, const std::string& name) {
  CHECK(found.size() == expected.size(), "%s: %zu tensors", name.c_str(), found.size());
  for (size_t k = 0; k < expected.size(); ++k) {
    const double error = relative_error(found[k], expected[k]);
    CHECK(error <= tolerance, "%s: tensor %zu is off by %g", name.c_str(), k, error);
  }
}

void check_same(const Results& found, const Results& expected, const std::string& name) {
  CHECK(found.outputs == expected.outputs, "%s: outputs depend on the order of threads", name.c_str());
  CHECK(found.gradients == expected.gradients, "%s: gradients depend on the order of threads", name.c_str());
}

struct Case {
  Inputs x;
  Tensors expected, seeds;
  Case(const Shape& s, bool equivariant, int activation)
      : x(s, equivariant), expected(outputs(s, equivariant, activation)) {
    for (const auto& out : expected) seeds.push_back(Inputs::random(out.size()));
  }
  Tensors outputs(const Shape& s, bool equivariant, int activation) const {
    return naive_outputs(s, equivariant, static_cast<magep::Activation>(activation), x);
  }
};

void test_layer(const Shape& s, bool equivariant, int activation = MAGEP_NONE) {
  Case c(s, equivariant, activation);
  const auto run_in = [&](auto tag, Setting setting) {
    return run<decltype(tag)>(s, equivariant, activation, c.x, c.seeds, setting);
  };
  const std::string kind = equivariant ? "equivariant" : "invariant";
  std::vector<Results> exact;
  for (bool tiled : {false, true}) {
    const std::string name = name_of((kind + (tiled ? ", tiled" : ", small")).c_str(), s);
    exact.push_back(run_in(double{}, {tiled}));
    check_close(exact.back().outputs, c.expected, 1e-12, name + "outputs");
    if (!tiled)
      check_differences(
          c.x.tensors(), c.seeds, exact[0].gradients, [&] { return c.outputs(s, equivariant, activation); }, name,
          2e-5);
    check_close(exact.back().gradients, exact[0].gradients, 1e-11, name + "gradients");
    CHECK(exact.back().forward_launches <= 2 && exact.back().backward_launches <= 4, "%s: %d and %d launches",
          name.c_str(), int(exact.back().forward_launches), int(exact.back().backward_launches));
    const Results single = run_in(float{}, {tiled});
    check_close(single.outputs, c.expected, 1e-4, name + "outputs in float");
    check_close(single.gradients, exact[0].gradients, 2e-4, name + "gradients in float");
    for (uint64_t seed : {1, 2}) {
      check_same(run_in(float{}, {tiled, 163 << 10, seed}), single, name);
      check_same(run_in(double{}, {tiled, 163 << 10, seed}), exact.back(), name);
    }
  }
}

// Any order of threads, and every decision that the shared memory of a device can change.
void test_devices() {
  const Shape s{2, 3, 5, {2, 4, 5, 3}};
  for (bool equivariant : {true, false}) {
    Case c(s, equivariant, MAGEP_NONE);
    const auto forward_launches = [&](int shared) {
      const Results found = run<float>(s, equivariant, MAGEP_NONE, c.x, c.seeds, {false, shared, 3});
      check_close(found.outputs, c.expected, 1e-4, name_of("devices", s));
      return found.forward_launches;
    };
    CHECK(forward_launches(48 << 10) == 1, "a small layer is one launch");
    CHECK(forward_launches(2600) == 1, "weights are left in global memory");
    CHECK(forward_launches(100) == 2, "a device without shared memory needs two launches");
  }
}

template <typename S>
void test_storage(double epsilon) {
  const Shape s{2, 4, 5, {2, 9, 8, 3}};
  for (bool equivariant : {true, false})
    for (bool tiled : {false, true}) {
      Case c(s, equivariant, MAGEP_RELU);
      // Features as they are stored, so that only the arithmetic and the results' rounding are judged.
      for (Tensors* group : {&c.x.W, &c.x.b, &c.seeds})
        for (auto& tensor : *group)
          for (double& value : tensor) value = Storage<S>::to(Storage<S>::from(value));
      const Results exact = run<double>(s, equivariant, MAGEP_RELU, c.x, c.seeds, {tiled});
      const Results found = run<S>(s, equivariant, MAGEP_RELU, c.x, c.seeds, {tiled});
      check_close(found.outputs, exact.outputs, epsilon, name_of("16 bits", s));
      check_close(found.gradients, exact.gradients, 2 * epsilon, name_of("16 bits", s));
    }
}

// The CNN zoo's layer: launches, and that 16 schedules agree.
void test_zoo() {
  const Shape s{8, 20, 20, {1, 16, 16, 16, 10}};
  Case c(s, true, MAGEP_RELU);
  const Results plain = run<float>(s, true, MAGEP_RELU, c.x, c.seeds, {});
  check_close(plain.outputs, c.expected, 1e-4, name_of("zoo", s));
  CHECK(plain.forward_launches == 1, "%d launches forward", int(plain.forward_launches));
  CHECK(plain.backward_launches == 4, "%d launches backward", int(plain.backward_launches));
  const Results smaller = run<float>(s, true, MAGEP_RELU, c.x, c.seeds, {false, 99 << 10, 4});
  CHECK(smaller.forward_launches == 1, "%d launches forward with 99 KiB", int(smaller.forward_launches));
  check_same(smaller, plain, "zoo");
  std::printf("CNN zoo: %d launch forward, %d backward\n", int(plain.forward_launches), int(plain.backward_launches));
}

// A_i, i = 1 ... L, and S_t, t = 1 ... L - 1, of the whole batch.
Tensors naive_chain(const Shape& s, const Inputs& x) {
  const int64_t L = s.L();
  Tensors out(2 * L - 1);
  for (int64_t net = 0; net < s.B; ++net)
    for (int64_t c = 0; c < s.d; ++c) {
      const Terms terms{s, x, net};
      for (int64_t i = 1; i <= L; ++i) {
        const Matrix P = terms.product(i, 0, c);
        for (int64_t j = 0; j < s.n[i]; ++j) {
          for (int64_t q = 0; q < s.n_0(); ++q) out[i - 1].push_back(P(j, q));
          for (int64_t t = 1; t < i; ++t) out[i - 1].push_back(terms.Wb(i, t, c)(j, 0));
        }
      }
      for (int64_t t = 1; t < L; ++t) {
        const Matrix S = terms.product(L, t, c);
        out[L + t - 1].insert(out[L + t - 1].end(), S.data.begin(), S.data.end());
      }
    }
  return out;
}

template <typename T>
std::pair<Tensors, Tensors> run_chain(const Shape& s, const Inputs& x, const Tensors& seeds, Setting setting) {
  const size_t L = s.L();
  host_cuda::device.seed = setting.seed;
  const MagepCudaCall call{MAGEP_CHAIN, Storage<T>::dtype, MAGEP_NONE,    s.B,    s.d, 1,
                           int(L),      s.n.data(),        setting.tiled, nullptr};
  Tensors_<T> W, b, out, out_bar, W_bar, b_bar, workspace;
  for (size_t i = 0; i < L; ++i) {
    W.add(x.W[i]);
    b.add(x.b[i]);
    W_bar.add(x.W[i].size());
    b_bar.add(x.b[i].size());
  }
  for (const auto& seed : seeds) {
    out.add(seed.size());
    out_bar.add(seed);
  }
  for (int backward : {0, 1}) workspace.add(magep_cuda_chain_workspace(&call, backward) / sizeof(T));
  const MagepCudaNetworks networks{W.get(), b.get()};
  const char* wrong = magep_cuda_chain_forward(&call, &networks, out.get(), out.get() + L, workspace.get()[0]);
  CHECK(wrong == nullptr, "%s", wrong);
  wrong = magep_cuda_chain_backward(&call, out_bar.get(), out_bar.get() + L, &networks, W_bar.get(), b_bar.get(),
                                    workspace.get()[1]);
  CHECK(wrong == nullptr, "%s", wrong);
  std::pair<Tensors, Tensors> results;
  for (size_t k = 0; k < seeds.size(); ++k) results.first.push_back(out.values(k));
  for (const auto* group : {&W_bar, &b_bar})
    for (size_t i = 0; i < L; ++i) results.second.push_back(group->values(i));
  return results;
}

void test_chain(const Shape& s) {
  Inputs x(s, false);
  const Tensors expected = naive_chain(s, x);
  Tensors seeds;
  for (const auto& out : expected) seeds.push_back(Inputs::random(out.size()));
  std::vector<std::vector<double>*> inputs;
  for (Tensors* group : {&x.W, &x.b})
    for (auto& tensor : *group) inputs.push_back(&tensor);
  for (bool tiled : {false, true}) {
    const std::string name = name_of(tiled ? "chain, tiled" : "chain, small", s);
    const auto found = run_chain<double>(s, x, seeds, {tiled});
    check_close(found.first, expected, 1e-12, name);
    const auto single = run_chain<float>(s, x, seeds, {tiled});
    check_close(single.first, expected, 1e-4, name);
    for (uint64_t seed : {1, 2})
      CHECK(run_chain<float>(s, x, seeds, {tiled, 0, seed}) == single, "%s: depends on the order", name.c_str());
    check_differences(inputs, seeds, found.second, [&] { return naive_chain(s, x); }, name);
    for (size_t k = 0; k < inputs.size(); ++k)
      CHECK(relative_error(single.second[k], found.second[k]) <= 1e-4, "%s: gradient %zu in float", name.c_str(), k);
  }
}

// Launchers say what is wrong, and launch nothing.
void test_messages() {
  const int64_t widths[] = {2, 3, 2};
  MagepCudaCall call{MAGEP_CHAIN, MAGEP_F32, MAGEP_NONE, 1, 1, 1, 2, widths, 0, nullptr};
  float numbers[64] = {};
  void *whole[] = {numbers, numbers}, *odd[] = {numbers, reinterpret_cast<char*>(numbers) + 2},
       *none[] = {numbers, nullptr};
  const auto expect = [&](void* const* weights, const char* text) {
    const MagepCudaNetworks networks{weights, whole};
    const int64_t before = host_cuda::device.launches;
    const char* found = magep_cuda_chain_forward(&call, &networks, whole, whole, nullptr);
    CHECK(found && std::strstr(found, text), "expected \"%s\", found \"%s\"", text, found ? found : "success");
    CHECK(host_cuda::device.launches == before, "a kernel was launched");
  };
  expect(none, "weights[1] is a null pointer");
  expect(odd, "weights[1] must be aligned to its elements of 4 bytes");
  call.batch = 0;
  expect(whole, "at least one network");
  call.batch = int64_t(1) << 33;
  expect(whole, "too large");
  call.batch = 1;
  call.layers = 33;
  expect(whole, "expected 1 to 32 layers; found 33");
  call.layers = 2;
  call.dtype = 9;
  expect(whole, "float32, float64, bfloat16 or float16");
  call.dtype = MAGEP_F32;
  call.activation = 7;
  expect(whole, "unknown activation 7");
  call.activation = MAGEP_NONE;
  const int64_t empty[] = {2, 0, 2};
  call.widths = empty;
  expect(whole, "found n_1 = 0");
}

// The same for every pointer of a layer, null and misaligned, forward and backward.
void test_layer_messages() {
  const int64_t widths[] = {1, 1, 1};
  const MagepCudaCall call{MAGEP_EQUIVARIANT, MAGEP_F32, MAGEP_SIN, 1, 1, 1, 2, widths, 0, nullptr};
  std::vector<float> numbers(4096);
  void* const good = numbers.data();
  std::vector<void*> W(2, good), b(2, good), matrices(4, good), out(4, good), pre(4, good), W_bar(2, good),
      b_bar(2, good), matrix_bar(4, good), out_bar(4, good);
  std::vector<void*> psi(1, good), saved(1, good), psi_bar(1, good), workspace(1, good);
  int64_t stride = magep_cuda_saved_size(&call);
  const auto forward = [&] {
    const MagepCudaNetworks networks{W.data(), b.data()};
    const MagepCudaParameters parameters{matrices.data(), psi[0]};
    return magep_cuda_layer_forward(&call, &networks, &parameters, out.data(), pre.data(), saved[0], stride);
  };
  const auto backward = [&] {
    const MagepCudaNetworks networks{W.data(), b.data()};
    const MagepCudaParameters parameters{matrices.data(), psi[0]};
    return magep_cuda_layer_backward(&call, out_bar.data(), pre.data(), &networks, &parameters, saved[0], stride,
                                     W_bar.data(), b_bar.data(), matrix_bar.data(), psi_bar[0], workspace[0]);
  };
  const auto expect = [&](const char* found, const std::string& text) {
    CHECK(found && std::strstr(found, text.c_str()), "expected \"%s\", found \"%s\"", text.c_str(),
          found ? found : "success");
  };
  const int64_t before = host_cuda::device.launches;
  const auto refuse = [&](std::vector<void*>& pointers, const char* name, const auto& launcher) {
    const std::string last = std::string(name) + "[" + std::to_string(pointers.size() - 1) + "]";
    pointers.back() = nullptr;
    expect(launcher(), last + " is a null pointer");
    pointers.back() = reinterpret_cast<char*>(good) + 2;
    expect(launcher(), last + " must be aligned to its elements of 4 bytes");
    pointers.back() = good;
  };
  refuse(W, "weights", forward);
  refuse(b, "biases", forward);
  refuse(matrices, "matrices", forward);
  refuse(psi, "psi", forward);
  refuse(out, "outputs", forward);
  refuse(pre, "pre", forward);
  refuse(saved, "saved", forward);
  refuse(W, "weights", backward);
  refuse(matrices, "matrices", backward);
  refuse(psi, "psi", backward);
  refuse(out_bar, "output_grads", backward);
  refuse(pre, "given", backward);
  refuse(saved, "saved", backward);
  refuse(W_bar, "weight_grads", backward);
  refuse(b_bar, "bias_grads", backward);
  refuse(matrix_bar, "matrix_grads", backward);
  refuse(psi_bar, "psi_grad", backward);
  refuse(workspace, "workspace", backward);
  --stride;
  expect(forward(), "saved has too few numbers per network");
  expect(backward(), "saved has too few numbers per network");
  CHECK(host_cuda::device.launches == before, "a kernel was launched");
}

int draw(int low, int high) { return std::uniform_int_distribution<int>(low, high)(generator); }

Shape random_shape() {
  Shape s{draw(1, 3), draw(1, 6), draw(1, 6), {}};
  const int L = draw(2, 5);
  for (int i = 0; i <= L; ++i) s.n.push_back(draw(1, 7));
  return s;
}

}  // namespace

int main() {
  test_messages();
  test_layer_messages();
  for (const Shape& s : std::vector<Shape>{
           {1, 1, 1, {3, 2}}, {2, 2, 1, {2, 3, 2}}, {2, 3, 1, {1, 9, 17, 8, 1}}, {1, 2, 1, {2, 33, 70, 7, 3}}})
    test_chain(s);
  test_devices();
  test_storage<__nv_bfloat16>(1.0 / 128);
  test_storage<__half>(1.0 / 1024);
  for (int activation : {MAGEP_RELU, MAGEP_TANH, MAGEP_SIN})
    for (bool equivariant : {true, false}) test_layer({2, 2, 3, {2, 4, 3, 2}}, equivariant, activation);
  for (int count = 0; count < 12; ++count)
    for (bool equivariant : {true, false}) test_layer(random_shape(), equivariant);
  // Shapes with more than one tile, more networks than a block takes, and the deepest network.
  for (const Shape& s : std::vector<Shape>{{1, 2, 3, {2, 3, 70, 66, 2}},
                                           {1, 11, 3, {3, 20, 19, 1}},
                                           {11, 2, 2, {2, 3, 4, 2}},
                                           {1, 2, 35, {5, 3, 4, 2}},
                                           {1, 1, 1, std::vector<int64_t>(33, 1)}})
    for (bool equivariant : {true, false}) test_layer(s, equivariant);
  test_zoo();
}
