#include "stack.h"

#include <cmath>
#include <cstring>
#include <utility>

#include "tensors.h"

namespace magep {
namespace {

int64_t numbers(const Sizes& shape) {
  int64_t count = 1;
  for (int64_t n : shape) count *= n;
  return count;
}

// Arrays one behind the other, each at a multiple of a cache line.
int64_t room(const Sizes& shape) { return whole_lines(numbers(shape)); }
int64_t room(const std::vector<Sizes>& shapes) {
  int64_t total = 0;
  for (const Sizes& shape : shapes) total += room(shape);
  return total;
}
template <typename T>
std::vector<T*> arrays(T* first, const std::vector<Sizes>& shapes) {
  std::vector<T*> data;
  for (const Sizes& shape : shapes) {
    data.push_back(first);
    first += room(shape);
  }
  return data;
}

constexpr int64_t kMostDense = 1000;

// One layer of a stack: its sizes, its share of the parameters, and where the workspace has what it keeps.
struct Stage {
  StageKind kind = StageKind::linear;
  Activation f = Activation::none;
  Shape shape{};          // of an equivariant or invariant layer
  LinearShape linear{};   // of a linear one
  DenseShape dense{};     // of dense ones
  size_t first = 0;       // of its parameters
  int64_t offset = 0;     // numbers before its parameters, where those of all stages lie in one array
  int64_t gradients = 0;  // where an update has its gradients
  std::vector<Sizes> parameters, inputs, outputs;
  std::vector<Sizes> hidden;  // values of dense layers but the last
  // Where the workspace has its outputs (of dense layers: `hidden`), those before sin, and what its kernel saves,
  // saved_size numbers a network.
  int64_t kept = 0, before = 0, saved = 0, saved_size = 0;

  // Those of its outputs that slopes are computed from: all or none.
  std::vector<Sizes> known_outputs() const {
    const bool known = kind == StageKind::dense ? dense.sigmoid : f == Activation::relu || f == Activation::tanh;
    return known ? outputs : std::vector<Sizes>{};
  }
};

struct Plan {
  FeatureSizes features;  // what it was made for
  std::vector<int64_t> layers;
  std::vector<Stage> stages;
  std::vector<Sizes> parameters;  // shapes of those of all stages
  int64_t parameter_numbers = 0;  // in one array of them all
  int64_t gradient_numbers = 0;   // where stages of the same shapes use the same memory
  int64_t workspace = 0;

  const Stage& last() const { return stages.back(); }
  const std::vector<Sizes>& inputs() const { return stages[0].inputs; }
  int64_t most_features() const {
    int64_t most = 0;
    for (const Stage& stage : stages) most = std::max(most, room(stage.inputs));
    return most;
  }
};

// Consecutive parameters of a stage; an error if there are not as many.
std::vector<Tensor> share(const char* op, const std::vector<Tensor>& parameters, size_t first, size_t count) {
  STD_TORCH_CHECK(count <= parameters.size() - first, op, ": expected at least ", first + count,
                  " parameters for these layers; found ", parameters.size());
  return {parameters.begin() + static_cast<int64_t>(first), parameters.begin() + static_cast<int64_t>(first + count)};
}

// Of weights, then biases.
FeatureSizes sizes_of(const char* op, const std::vector<Tensor>& features) {
  const size_t L = features.size() / 2;
  STD_TORCH_CHECK(features.size() == 2 * L && L >= 2, op,
                  ": expected as many weights as biases, at least two of each; found ", features.size(), " tensors");
  return sizes_of_features(op, {features.begin(), features.begin() + static_cast<int64_t>(L)},
                           {features.begin() + static_cast<int64_t>(L), features.end()});
}

Plan make_plan(const char* op, const FeatureSizes& features, const std::vector<Tensor>& parameters,
               const std::vector<int64_t>& layers) {
  STD_TORCH_CHECK(!layers.empty() && layers.size() % 3 == 0, op, ": expected three numbers for each layer; found ",
                  layers.size());
  FeatureSizes now = features;
  const size_t L = now.channels.size();
  Plan plan;
  size_t first = 0;
  for (size_t k = 0; k < layers.size(); k += 3) {
    Stage stage;
    stage.kind = static_cast<StageKind>(layers[k]);
    const int64_t width = layers[k + 1], flag = layers[k + 2];
    const bool on_features = k == 0 || plan.last().kind < StageKind::invariant;
    stage.first = first;
    stage.inputs = on_features ? feature_shapes(now.B, now.channels, now.d, now.n) : plan.last().outputs;
    if (stage.kind != StageKind::dense)
      STD_TORCH_CHECK(on_features, op, ": layer ", k / 3, " of a stack has no features to take");
    if (stage.kind == StageKind::equivariant || stage.kind == StageKind::invariant)
      for (int64_t channels : now.channels)
        STD_TORCH_CHECK(channels == now.d, op, ": layer ", k / 3, " takes one weight for each connection");
    switch (stage.kind) {
      case StageKind::linear: {
        stage.f = activation_of(op, flag);
        stage.linear = linear_shape(op, now, share(op, parameters, first, 2 * L), width);
        stage.parameters = matrix_shapes(stage.linear);
        now.channels = stage.linear.out;
        now.d = width;
        break;
      }
      case StageKind::equivariant: {
        stage.f = activation_of(op, flag);
        STD_TORCH_CHECK(now.d >= 1 && width >= 1, op, ": expected at least one channel in and out; found ", now.d,
                        " and ", width);
        stage.shape = with_sharing({now.B, now.d, width, now.n}, share(op, parameters, first, 2 * L));
        stage.parameters = matrix_shapes(stage.shape);
        stage.parameters.push_back(psi_shape(stage.shape));
        stage.saved_size = saved_size(stage.shape, Operation::equivariant);
        now.d = width;
        now.channels.assign(L, width);
        break;
      }
      case StageKind::invariant: {
        const auto matrix = share(op, parameters, first, 1);
        stage.shape = with_sharing({now.B, now.d, rows_of(op, matrix[0]), now.n}, matrix);
        STD_TORCH_CHECK(now.d >= 1 && stage.shape.e >= 1, op,
                        ": expected at least one channel and one invariant; found ", now.d, " and ", stage.shape.e);
        stage.parameters = matrix_shapes(stage.shape, false);
        stage.parameters.push_back(psi_shape(stage.shape, false));
        stage.saved_size = saved_size(stage.shape, Operation::invariant);
        stage.outputs = {{now.B, stage.shape.e}};
        break;
      }
      case StageKind::dense: {
        STD_TORCH_CHECK(k > 0 && plan.last().kind == StageKind::invariant && 1 <= width && width <= kMostDense, op,
                        ": dense layers, 1 to ", kMostDense, " of them, must follow an invariant layer");
        stage.dense = {now.B, {plan.last().shape.e}, flag != 0};
        const auto own = share(op, parameters, first, 2 * static_cast<size_t>(width));
        for (size_t p = 0; p < own.size(); p += 2) {
          stage.dense.widths.push_back(rows_of(op, own[p]));
          STD_TORCH_CHECK(stage.dense.widths.back() >= 1, op, ": every dense layer must have at least one output");
          stage.parameters.push_back({stage.dense.widths[p / 2 + 1], stage.dense.widths[p / 2]});
          stage.parameters.push_back({stage.dense.widths[p / 2 + 1]});
          stage.hidden.push_back({now.B, stage.dense.widths[p / 2 + 1]});
        }
        stage.outputs = {stage.hidden.back()};
        stage.hidden.pop_back();
        break;
      }
      default: STD_TORCH_CHECK(false, op, ": a layer's kind must be 0, 1, 2 or 3; found ", layers[k]);
    }
    if (stage.kind < StageKind::invariant) stage.outputs = feature_shapes(now.B, now.channels, now.d, now.n);
    first += stage.parameters.size();
    plan.stages.push_back(stage);
  }
  STD_TORCH_CHECK(first == parameters.size(), op, ": expected ", first, " parameters for these layers; found ",
                  parameters.size());
  plan.features = features;
  plan.layers = layers;
  for (Stage& stage : plan.stages) {
    plan.parameters.insert(plan.parameters.end(), stage.parameters.begin(), stage.parameters.end());
    stage.offset = plan.parameter_numbers;
    plan.parameter_numbers += room(stage.parameters);
    // Memory that another core has written last is slow to write to. Stages of the same shapes are divided among
    // threads in the same way, so that every thread gets back what it has written; others have memory of their own.
    const auto alike = std::find_if(plan.stages.begin(), plan.stages.end(),
                                    [&](const Stage& other) { return other.parameters == stage.parameters; });
    stage.gradients = &*alike == &stage ? plan.gradient_numbers : alike->gradients;
    if (&*alike == &stage) plan.gradient_numbers += room(stage.parameters);
    const auto reserve = [&](int64_t count) {
      const int64_t at = plan.workspace;
      plan.workspace += count;
      return at;
    };
    stage.kept = reserve(stage.kind == StageKind::dense  ? room(stage.hidden)
                         : &stage == &plan.stages.back() ? 0
                                                         : room(stage.outputs));
    if (stage.f == Activation::sin) stage.before = reserve(room(stage.outputs));
    if (stage.kind == StageKind::equivariant || stage.kind == StageKind::invariant)
      stage.saved = reserve(room(Sizes{now.B, stage.saved_size}));
  }
  return plan;
}

bool have_shapes(const std::vector<Tensor>& tensors, const std::vector<Sizes>& shapes) {
  bool same = tensors.size() == shapes.size();
  for (size_t k = 0; same && k < shapes.size(); ++k) same = has_shape(tensors[k], shapes[k]);
  return same;
}

// The plan of the call before, if it fits: a training loop asks for the same one at every step.
const Plan& plan_of(const char* op, const FeatureSizes& features, const std::vector<Tensor>& parameters,
                    const std::vector<int64_t>& layers) {
  thread_local Plan plan;
  if (plan.stages.empty() || plan.layers != layers || !(plan.features == features) ||
      !have_shapes(parameters, plan.parameters))
    plan = make_plan(op, features, parameters, layers);
  return plan;
}

// The values of dense layers as their kernels want them: the outputs, then the others.
template <typename T>
std::vector<T*> dense_values(const Stage& stage, T* outputs, T* workspace) {
  std::vector<T*> values{outputs};
  for (T* hidden : arrays(workspace + stage.kept, stage.hidden)) values.push_back(hidden);
  return values;
}

template <typename T>
void forward(const Plan& plan, std::vector<const T*> x, const T* const* parameters, const std::vector<T*>& results,
             T* workspace, const Parallel& parallel) {
  const Kernels<T, T>& kernel = kernels().of<T, T>();
  for (const Stage& stage : plan.stages) {
    const T* const* own = parameters + stage.first;
    const int64_t L = static_cast<int64_t>(x.size()) / 2;
    const auto y = &stage == &plan.last() ? results : arrays(workspace + stage.kept, stage.outputs);
    std::vector<T*> before;
    if (stage.f == Activation::sin) before = arrays(workspace + stage.before, stage.outputs);
    T* const* b = before.empty() ? nullptr : before.data();
    const Outputs<T> out{y.data(), y.data() + L, b, b ? b + L : nullptr, stage.f};
    switch (stage.kind) {
      case StageKind::linear: kernel.linear_forward(stage.linear, x.data(), x.data() + L, own, out, parallel); break;
      case StageKind::equivariant:
        kernel.equivariant_forward(stage.shape, x.data(), x.data() + L, own, own[2 * L], out, workspace + stage.saved,
                                   parallel);
        break;
      case StageKind::invariant:
        kernel.invariant_forward(stage.shape, x.data(), x.data() + L, own[0], spread_psi(stage.shape, own[1]).data(),
                                 y[0], workspace + stage.saved, parallel);
        break;
      case StageKind::dense:
        kernel.dense_forward(stage.dense, x[0], own, dense_values(stage, y[0], workspace).data(), parallel);
        break;
    }
    x.assign(y.begin(), y.end());
  }
}

// outputs: empty unless slopes are computed from them. x_bar: where the gradients of the features go; empty if nobody
// asks for them. gradients_of(stage): where those of its parameters go; finished(stage) is called when they are there,
// and from then on nobody reads the parameters.
template <typename T, typename GradientsOf, typename Finished>
void backward(const Plan& plan, std::vector<const T*> bars, const std::vector<const T*>& features,
              const T* const* parameters, const std::vector<const T*>& outputs, const T* workspace,
              const std::vector<T*>& x_bar, const GradientsOf& gradients_of, const Finished& finished,
              const Parallel& parallel) {
  const Kernels<T, T>& kernel = kernels().of<T, T>();
  // Gradients of what lies between layers, for one layer and the next in turn.
  thread_local std::vector<T> memory;
  const int64_t most = plan.most_features();
  T* between = at_least(2 * most, memory);
  for (size_t k = plan.stages.size(); k-- > 0;) {
    const Stage& stage = plan.stages[k];
    const T* const* own = parameters + stage.first;
    T* const* own_bar = gradients_of(stage);
    const auto x = k == 0 ? features : arrays(workspace + plan.stages[k - 1].kept, stage.inputs);
    const auto y = &stage == &plan.last() ? outputs : arrays(workspace + stage.kept, stage.outputs);
    const bool wanted = k > 0 || !x_bar.empty();
    const auto bar = k == 0 && wanted ? x_bar : arrays(between + k % 2 * most, stage.inputs);
    const int64_t L = static_cast<int64_t>(x.size()) / 2;
    const auto known = stage.f == Activation::sin ? arrays(workspace + stage.before, stage.outputs) : y;
    const T* const* from = known.empty() ? nullptr : known.data();
    const OutputGradients<T> out_bar{bars.data(), bars.data() + L, from, from ? from + L : nullptr, stage.f};
    switch (stage.kind) {
      case StageKind::linear:
        kernel.linear_backward(stage.linear, out_bar, x.data(), x.data() + L, own, wanted ? bar.data() : nullptr,
                               wanted ? bar.data() + L : nullptr, own_bar, parallel);
        break;
      case StageKind::equivariant:
        kernel.equivariant_backward(stage.shape, out_bar, x.data(), x.data() + L, own, own[2 * L],
                                    workspace + stage.saved, bar.data(), bar.data() + L, own_bar, own_bar[2 * L],
                                    parallel);
        break;
      case StageKind::invariant: {
        std::vector<T> psi_bar(stage.shape.psi_size());
        kernel.invariant_backward(stage.shape, bars[0], x.data(), x.data() + L, own[0],
                                  spread_psi(stage.shape, own[1]).data(), workspace + stage.saved, bar.data(),
                                  bar.data() + L, own_bar[0], psi_bar.data(), parallel);
        gather_psi(stage.shape, psi_bar.data(), own_bar[1]);
        break;
      }
      case StageKind::dense:
        kernel.dense_backward(stage.dense, bars[0], x[0], own,
                              dense_values(stage, y.empty() ? nullptr : y[0], workspace).data(), bar[0], own_bar,
                              parallel);
        break;
    }
    finished(stage);
    bars.assign(bar.begin(), bar.end());
  }
}

// A step of Adam on the parameters of each stage as soon as their gradients are known.
template <typename T>
void update(const Plan& plan, const std::vector<const T*>& bars, const std::vector<const T*>& features,
            T* const* parameters, const std::vector<const T*>& outputs, const T* workspace, T* means, T* squares,
            const AdamStep& step, const Parallel& parallel) {
  thread_local std::vector<T> memory;
  T* all_gradients = at_least(plan.gradient_numbers, memory);
  std::vector<T*> gradients;
  const auto gradients_of = [&](const Stage& stage) {
    gradients = arrays(all_gradients + stage.gradients, stage.parameters);
    return gradients.data();
  };
  const auto take_step = [&](const Stage& stage) {
    Sizes sizes;
    for (const Sizes& shape : stage.parameters) sizes.push_back(numbers(shape));
    kernels().of<T, T>().adam(step, sizes, gradients.data(), parameters + stage.first,
                              arrays(means + stage.offset, stage.parameters).data(),
                              arrays(squares + stage.offset, stage.parameters).data(), parallel);
  };
  backward<T>(plan, bars, features, parameters, outputs, workspace, {}, gradients_of, take_step, parallel);
}

// How many steps of Adam each parameter has made: all the same number, float32 or float64 as torch has it.
class StepCounter {
 public:
  StepCounter(const char* op, const Tensor& steps, size_t parameters)
      : wide_(steps.scalar_type() == ScalarType::Double) {
    const ScalarType dtype = wide_ ? ScalarType::Double : ScalarType::Float;
    const std::vector<Sizes> shape{{static_cast<int64_t>(parameters)}};
    if (wide_)
      doubles_ = changeable<double>({steps}, op, "steps", shape, dtype);
    else
      floats_ = changeable<float>({steps}, op, "steps", shape, dtype);
    for (int64_t k = 0; k < steps.numel(); ++k)
      STD_TORCH_CHECK(at(k) == at(0) && at(0) >= 0, op, ": all parameters must have made as many steps; found ", at(k),
                      " for parameter ", k, " and ", at(0), " for the first");
    count_ = steps.numel();
  }
  double next() const { return at(0) + 1; }
  void advance() const {
    for (int64_t k = 0; k < count_; ++k) wide_ ? doubles_.data[0][k] += 1 : floats_.data[0][k] += 1;
  }

 private:
  double at(int64_t k) const { return wide_ ? doubles_.data[0][k] : floats_.data[0][k]; }

  bool wide_;
  Pointers<double> doubles_;
  Pointers<float> floats_;
  int64_t count_ = 0;
};

// The mean loss of `count` outputs y, and its gradient; false if it is not defined for them.
template <typename T>
bool loss_and_gradient(Loss loss, int64_t count, const T* y, const T* targets, T* value, T* y_bar) {
  const double share = 1.0 / static_cast<double>(count);
  double sum = 0;
  for (int64_t k = 0; k < count; ++k) {
    const T difference = y[k] - targets[k];
    if (loss == Loss::squared_error) {
      sum += static_cast<double>(difference) * difference;
      y_bar[k] = static_cast<T>(2 * difference * share);
      continue;
    }
    if (!(y[k] >= 0 && y[k] <= 1 && targets[k] >= 0 && targets[k] <= 1)) return false;
    // As torch does, logarithms end at -100, and slopes before the denominator vanishes.
    const T log = std::max(std::log(y[k]), T(-100)), log_of_rest = std::max(std::log1p(-y[k]), T(-100));
    sum -= targets[k] * log + (1 - targets[k]) * log_of_rest;
    y_bar[k] = static_cast<T>(difference / std::max(y[k] * (1 - y[k]), T(1e-12)) * share);
  }
  *value = static_cast<T>(sum * share);
  return true;
}

// Arrays that have a row for each network, and the rows of one batch after the other: where they lie, or with an order
// of the networks copied one behind the other.
template <typename T>
class Batches {
 public:
  // shapes: of a batch.
  Batches(std::vector<const T*> data, const std::vector<Sizes>& shapes, const int64_t* order)
      : data_(std::move(data)), order_(order) {
    for (const Sizes& shape : shapes) sizes_.push_back(numbers(shape) / shape[0]);
    if (!order) return;
    thread_local std::vector<T> memory;
    copies_ = arrays(at_least(room(shapes), memory), shapes);
  }

  std::vector<const T*> at(int64_t first, int64_t count, const Parallel& parallel) const {
    if (order_) {
      parallel.split(count, [&](int64_t, int64_t begin, int64_t end) {
        for (size_t k = 0; k < data_.size(); ++k)
          for (int64_t row = begin; row < end; ++row)
            std::memcpy(copies_[k] + row * sizes_[k], data_[k] + order_[first + row] * sizes_[k],
                        sizes_[k] * sizeof(T));
      });
      return {copies_.begin(), copies_.end()};
    }
    std::vector<const T*> rows = data_;
    for (size_t k = 0; k < rows.size(); ++k) rows[k] += first * sizes_[k];
    return rows;
  }

 private:
  std::vector<const T*> data_;
  const int64_t* order_;
  Sizes sizes_;  // of a row
  std::vector<T*> copies_;
};

// Shapes of a batch as those of all networks.
std::vector<Sizes> with_rows(std::vector<Sizes> shapes, int64_t rows) {
  for (Sizes& shape : shapes) shape[0] = rows;
  return shapes;
}

// Calls body with the type of features and parameters: float or double.
template <typename Body>
auto with_type(ScalarType dtype, const char* op, Body&& body) {
  STD_TORCH_CHECK(dtype == ScalarType::Float || dtype == ScalarType::Double, op,
                  ": expected float32 or float64 features");
  return with_types(dtype, op, [&](auto storage, auto compute) {
    if constexpr (std::is_same_v<decltype(storage), decltype(compute)>)
      return body(compute);
    else
      return std::vector<Tensor>{};
  });
}

}  // namespace

std::vector<Tensor> stack(std::vector<Tensor> features, std::vector<Tensor> parameters, std::vector<int64_t> layers) {
  const char* op = "magep_fast::_stack";
  const Plan& plan = plan_of(op, sizes_of(op, features), parameters, layers);
  const ScalarType dtype = features[0].scalar_type();
  return with_type(dtype, op, [&](auto type) {
    using T = decltype(type);
    const auto x = checked<T>(features, op, "features", plan.inputs(), dtype);
    const auto phi = checked<T>(parameters, op, "parameters", plan.parameters, dtype);
    std::vector<Tensor> results;
    const auto y = allocate<T>(results, features[0], plan.last().outputs, dtype);
    const auto workspace = allocate<T>(results, features[0], {{plan.workspace}}, dtype);
    if (plan.features.B > 0) forward<T>(plan, x.data, phi.get(), y, workspace[0], torch_threads());
    return results;
  });
}

std::vector<Tensor> stack_backward(std::vector<Tensor> grads, std::vector<Tensor> features,
                                   std::vector<Tensor> parameters, std::vector<Tensor> outputs, Tensor workspace,
                                   std::vector<int64_t> layers, bool inputs) {
  const char* op = "magep_fast::_stack_backward";
  const Plan& plan = plan_of(op, sizes_of(op, features), parameters, layers);
  const ScalarType dtype = features[0].scalar_type();
  return with_type(dtype, op, [&](auto type) {
    using T = decltype(type);
    const auto bars = checked<T>(grads, op, "grads", plan.last().outputs, dtype);
    const auto x = checked<T>(features, op, "features", plan.inputs(), dtype);
    const auto phi = checked<T>(parameters, op, "parameters", plan.parameters, dtype);
    const auto y = checked<T>(outputs, op, "outputs", plan.last().known_outputs(), dtype);
    const auto kept = checked<T>({workspace}, op, "workspace", {{plan.workspace}}, dtype);
    std::vector<Tensor> results;
    std::vector<T*> x_bar;
    if (inputs) x_bar = allocate<T>(results, features[0], plan.inputs(), dtype);
    const auto phi_bar = allocate<T>(results, features[0], plan.parameters, dtype);
    if (plan.features.B > 0)
      backward<T>(
          plan, bars.data, x.data, phi.get(), y.data, kept.data[0], x_bar,
          [&](const Stage& stage) { return phi_bar.data() + stage.first; }, [](const Stage&) {}, torch_threads());
    finish(results, x_bar.size(), plan.features.B, dtype);
    return results;
  });
}

void stack_update(std::vector<Tensor> grads, std::vector<Tensor> features, std::vector<Tensor> parameters,
                  std::vector<Tensor> outputs, Tensor workspace, Tensor means, Tensor squares, Tensor steps,
                  std::vector<int64_t> layers, double lr, double beta1, double beta2, double eps, double weight_decay,
                  bool decoupled) {
  const char* op = "magep_fast::_stack_update";
  const Plan& plan = plan_of(op, sizes_of(op, features), parameters, layers);
  STD_TORCH_CHECK(plan.features.B > 0, op, ": expected at least one network");
  const StepCounter counter(op, steps, parameters.size());
  const ScalarType dtype = features[0].scalar_type();
  with_type(dtype, op, [&](auto type) {
    using T = decltype(type);
    const auto bars = checked<T>(grads, op, "grads", plan.last().outputs, dtype);
    const auto x = checked<T>(features, op, "features", plan.inputs(), dtype);
    const auto phi = changeable<T>(parameters, op, "parameters", plan.parameters, dtype);
    const auto y = checked<T>(outputs, op, "outputs", plan.last().known_outputs(), dtype);
    const auto kept = checked<T>({workspace}, op, "workspace", {{plan.workspace}}, dtype);
    const auto m = changeable<T>({means}, op, "means", {{plan.parameter_numbers}}, dtype);
    const auto v = changeable<T>({squares}, op, "squares", {{plan.parameter_numbers}}, dtype);
    update<T>(plan, bars.data, x.data, phi.get(), y.data, kept.data[0], m.data[0], v.data[0],
              {lr, beta1, beta2, eps, weight_decay, decoupled, counter.next()}, torch_threads());
    counter.advance();
    return std::vector<Tensor>{};
  });
}

Tensor stack_train(std::vector<Tensor> features, std::vector<Tensor> parameters, Tensor targets, Tensor means,
                   Tensor squares, Tensor steps, std::optional<Tensor> order, int64_t batch_size,
                   std::vector<int64_t> layers, int64_t loss, double lr, double beta1, double beta2, double eps,
                   double weight_decay, bool decoupled) {
  const char* op = "magep_fast::_stack_train";
  FeatureSizes sizes = sizes_of(op, features);
  const int64_t networks = sizes.B, count = order ? order->numel() : networks;
  STD_TORCH_CHECK(count > 0, op, ": expected at least one network");
  STD_TORCH_CHECK(batch_size > 0, op, ": batch_size must be at least 1; found ", batch_size);
  sizes.B = std::min(batch_size, count);
  const Plan& plan = plan_of(op, sizes, parameters, layers);
  const StepCounter counter(op, steps, parameters.size());
  STD_TORCH_CHECK(plan.last().outputs.size() == 1, op, ": the last layer must be an invariant or a dense one");
  STD_TORCH_CHECK(loss == 0 || loss == 1, op, ": loss must be 0 (binary cross entropy) or 1 (squared error); found ",
                  loss);
  Pointers<const int64_t> rows;
  if (order) rows = checked<int64_t>({*order}, op, "order", {{count}}, ScalarType::Long);
  for (int64_t k = 0; order && k < count; ++k)
    STD_TORCH_CHECK(0 <= rows.data[0][k] && rows.data[0][k] < networks, op, ": order must name networks 0 to ",
                    networks - 1, "; found ", rows.data[0][k]);
  const ScalarType dtype = features[0].scalar_type();
  return with_type(dtype, op, [&](auto type) {
    using T = decltype(type);
    const auto phi = changeable<T>(parameters, op, "parameters", plan.parameters, dtype);
    const auto expected = checked<T>({targets}, op, "targets", with_rows(plan.last().outputs, networks), dtype);
    const auto x = checked<T>(features, op, "features", with_rows(plan.inputs(), networks), dtype);
    const auto m = changeable<T>({means}, op, "means", {{plan.parameter_numbers}}, dtype);
    const auto v = changeable<T>({squares}, op, "squares", {{plan.parameter_numbers}}, dtype);
    const int64_t outputs = room(plan.last().outputs);
    thread_local std::vector<T> memory;
    T *y = at_least(2 * outputs + plan.workspace, memory), *y_bar = y + outputs, *workspace = y_bar + outputs;
    std::vector<Tensor> results;
    T* losses = allocate<T>(results, features[0], {{(count + sizes.B - 1) / sizes.B}}, dtype)[0];
    auto data = x.data;
    data.push_back(expected.data[0]);
    auto shapes = plan.inputs();
    shapes.push_back(plan.last().outputs[0]);
    const Batches<T> batches(data, shapes, order ? rows.data[0] : nullptr);
    const Parallel& parallel = torch_threads();
    int64_t taken = 0;
    // `plan` is good until the last batch, which may need another one in its place.
    for (int64_t first = 0; first < count; first += sizes.B, ++taken) {
      FeatureSizes now = sizes;
      now.B = std::min(sizes.B, count - first);
      const Plan& own = now.B == sizes.B ? plan : plan_of(op, now, parameters, layers);
      auto inputs = batches.at(first, now.B, parallel);
      const T* wanted = inputs.back();
      inputs.pop_back();
      forward<T>(own, inputs, phi.get(), {y}, workspace, parallel);
      if (!loss_and_gradient(static_cast<Loss>(loss), numbers(own.last().outputs[0]), y, wanted, losses + taken, y_bar))
        break;
      const std::vector<const T*> known(own.last().known_outputs().size(), y);
      update<T>(own, {y_bar}, inputs, phi.get(), known, workspace, m.data[0], v.data[0],
                {lr, beta1, beta2, eps, weight_decay, decoupled, counter.next()}, parallel);
      counter.advance();
    }
    if (taken < results[0].size(0)) results[0] = torch::stable::narrow(results[0], 0, 0, taken);
    return results;
  })[0];
}

}  // namespace magep
