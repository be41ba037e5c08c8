import copy
import gc
import io
import types
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer
from torch.overrides import BaseTorchFunctionMode

from magep_fast import (
    MagepEquivariant,
    MagepInvariant,
    MonomialEquivariant,
    Stack,
    TrainingStep,
    WeightSpace,
    ops,
    training_step,
    use_backend,
)
from magep_fast import stack as stack_module
from magep_fast.models import mlp
from magep_fast.ops import native
from magep_fast.ops.library import missing_library
from tests.helpers import assert_same, random_features, threads

CNN = WeightSpace((1, 4, 6, 2), taps=(9, 9, 1))
SPACE = WeightSpace((2, 5, 4, 3))
STEPS = 4

needs_kernels = pytest.mark.skipif(missing_library() is not None, reason=f"no native library: {missing_library()}")


@pytest.fixture
def updates(monkeypatch):
    """A list that grows with every fused step."""
    calls = []
    original = ops.stack_update

    def counted(*arguments):
        original(*arguments)
        calls.append(arguments)

    monkeypatch.setattr(ops, "stack_update", counted)
    return calls


@pytest.fixture
def whole_steps(monkeypatch):
    """A list that grows with every call of the operator that takes steps, loss included, by how many it has taken."""
    calls = []
    original = ops.stack_train

    def counted(*arguments):
        losses = original(*arguments)
        if len(losses):
            calls.append(len(losses))
        return losses

    monkeypatch.setattr(ops, "stack_train", counted)
    return calls


def model_of(activation="relu", sigmoid=True, dtype=torch.float64):
    flat = CNN.with_taps(1)
    return Stack(
        MonomialEquivariant(CNN, 1, 3),
        MagepEquivariant(flat, 3, 4, activation=activation),
        MagepInvariant(flat, 4, 5),
        mlp(5, 90, 100, 2),  # enough numbers for a second thread of Adam
        *([nn.Sigmoid()] if sigmoid else []),
    ).to(dtype)


def square(outputs, targets):
    return (outputs - targets).square().mean()


def batches(count=STEPS, batch_size=3, dtype=torch.float64, space=CNN, channels=1, width=2):
    return [
        (random_features(space, channels, batch_size, dtype), torch.rand(batch_size, width, dtype=dtype))
        for _ in range(count)
    ]


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.01)


def ordinary_step(model, loss, optimizer, features, targets):
    value = loss(model(features), targets)
    optimizer.zero_grad()
    value.backward()
    optimizer.step()
    return value.detach()


def assert_same_training(step, model, optimizer, data, tolerance=1e-11, after=lambda k: None):
    """The step does to its model and optimizer what ordinary steps do to `model` and `optimizer`. after(k) is called
    after the k-th of both."""
    for k, (features, targets) in enumerate(data):
        found = step(features, targets)
        expected = ordinary_step(model, step.loss, optimizer, features, targets)
        assert not found.requires_grad and found.shape == ()
        assert_same(found, expected, tolerance)
        after(k)
    for p, q in zip(step.model.parameters(), model.parameters(), strict=True):
        assert_same(p.detach(), q.detach(), tolerance)
        ours, theirs = step.optimizer.state[p], optimizer.state[q]
        assert list(ours) == list(theirs)
        for name in theirs:
            assert_same(ours[name], theirs[name], 2 * tolerance)


def pair(model, make_optimizer=adam, loss=square):
    """A TrainingStep, and a copy of the model with an optimizer of its own."""
    other = copy.deepcopy(model)
    return TrainingStep(model, loss, make_optimizer(model)), other, make_optimizer(other)


@needs_kernels
@pytest.mark.parametrize("activation", ["relu", "tanh", "sin", None])
@pytest.mark.parametrize("sigmoid", [True, False])
@pytest.mark.parametrize("count", [1, 2])
def test_steps_are_those_of_torch(activation, sigmoid, count, updates):
    step, model, optimizer = pair(model_of(activation, sigmoid))
    with threads(count):
        assert_same_training(step, model, optimizer, batches())
    assert len(updates) == STEPS
    assert all(p.grad is None for p in step.model.parameters())


@needs_kernels
@pytest.mark.parametrize("count", [1, 2])
def test_float32(count, updates):
    step, model, optimizer = pair(model_of(dtype=torch.float32))
    # Adam divides gradients by their size: where they are rounding errors, so are steps. A large eps takes that away.
    for each in (step.optimizer, optimizer):
        each.param_groups[0]["eps"] = 1e-3
    with threads(count):
        assert_same_training(step, model, optimizer, batches(dtype=torch.float32), 1e-4)
    assert len(updates) == STEPS


KNOWN_LOSSES = [nn.functional.binary_cross_entropy, nn.functional.mse_loss]


@needs_kernels
@pytest.mark.parametrize("loss", KNOWN_LOSSES)
@pytest.mark.parametrize("activation", ["relu", "sin"])
@pytest.mark.parametrize("count", [1, 2])
def test_steps_with_a_known_loss_are_one_operator(loss, activation, count, whole_steps, updates):
    step, model, optimizer = pair(model_of(activation), loss=loss)
    data = batches()
    data[1][1][:] = torch.tensor([0.0, 1.0])  # where a logarithm has no weight
    with threads(count):
        assert_same_training(step, model, optimizer, data)
    assert len(whole_steps) == STEPS and not updates
    assert all(p.grad is None for p in step.model.parameters())


@needs_kernels
@pytest.mark.parametrize("loss", KNOWN_LOSSES)
def test_known_losses_in_float32(loss, whole_steps):
    step, model, optimizer = pair(model_of(dtype=torch.float32), loss=loss)
    for each in (step.optimizer, optimizer):
        each.param_groups[0]["eps"] = 1e-3
    assert_same_training(step, model, optimizer, batches(dtype=torch.float32), 1e-4)
    assert len(whole_steps) == STEPS


@needs_kernels
def test_sure_and_wrong_outputs_have_the_loss_and_slope_of_torch(whole_steps):
    """A sigmoid of 0 or 1 to the last digit: logarithms end at -100, slopes before they are infinite."""
    model = model_of()
    with torch.no_grad():
        model[3][4].weight.zero_()
        model[3][4].bias[:] = torch.tensor([800.0, -800.0])
    step, other, optimizer = pair(model, loss=nn.functional.binary_cross_entropy)
    data = [(features, torch.tensor([[0.0, 1.0]], dtype=torch.float64).expand(3, 2)) for features, _ in batches()]
    assert_same_training(step, other, optimizer, data)
    assert len(whole_steps) == STEPS
    value = step(*data[0])
    assert value == 100


def data_set(networks=11):
    return random_features(CNN, 1, networks, torch.float64), torch.rand(networks, 2, dtype=torch.float64)


def assert_trains_as_steps_do(step, model, optimizer, features, targets, order, batch_size):
    found = step.train(features, targets, order, batch_size)
    index = list(order.split(batch_size))
    expected = [ordinary_step(model, step.loss, optimizer, features[i], targets[i]) for i in index]
    assert not found.requires_grad
    assert_same(found, torch.stack(expected), 1e-11)
    assert_same_training(step, model, optimizer, [])


@needs_kernels
@pytest.mark.parametrize("loss", KNOWN_LOSSES)
@pytest.mark.parametrize("count", [1, 2])
def test_many_steps_are_one_operator(loss, count, whole_steps):
    step, model, optimizer = pair(model_of(), loss=loss)
    features, targets = data_set()
    with threads(count):
        for _ in range(2):  # the last batch of an epoch is smaller
            assert_trains_as_steps_do(step, model, optimizer, features, targets, torch.randperm(11), 4)
        assert_trains_as_steps_do(step, model, optimizer, features, targets, torch.tensor([3, 3, 10, 0]), 3)
        assert_trains_as_steps_do(step, model, optimizer, features, targets, torch.tensor([7, 2]), 64)
    assert whole_steps == [3, 3, 2, 1]
    assert all(p.grad is None for p in step.model.parameters())
    assert {entry["step"].item() for entry in step.optimizer.state.values()} == {9}


@needs_kernels
def test_many_steps_on_features_that_are_not_contiguous(whole_steps):
    step, model, optimizer = pair(model_of(), loss=nn.functional.mse_loss)
    features, targets = data_set(22)
    features = features.map(lambda x: x[::2])
    targets = targets.t().contiguous().t()[::2]
    assert_trains_as_steps_do(step, model, optimizer, features, targets, torch.randperm(11).int(), 4)
    assert whole_steps == [3]


@needs_kernels
def test_what_the_operator_refuses_it_is_not_asked_again(monkeypatch, updates, whole_steps):
    step, model, optimizer = pair(model_of(), loss=nn.functional.mse_loss)
    features, targets = data_set()
    calls = []
    original = ops.stack_train
    monkeypatch.setattr(ops, "stack_train", lambda *arguments: calls.append(1) or original(*arguments))
    assert_trains_as_steps_do(step, model, optimizer, features, targets.float(), torch.randperm(11), 4)
    assert len(calls) == 1 and len(updates) == 3 and not whole_steps


@needs_kernels
def test_no_memory_for_steps(monkeypatch):
    """Some may have been taken, which graphs from before must notice."""
    step, _, _ = pair(model_of(), loss=nn.functional.mse_loss)
    features, targets = data_set()
    step.train(features, targets, torch.arange(11), 4)
    parameter = next(step.model.parameters())
    version = parameter._version

    def fails(*_):
        raise MemoryError

    monkeypatch.setattr(native._Stack, "train", fails)
    with pytest.raises(MemoryError):
        step.train(features, targets, torch.arange(11), 4)
    assert parameter._version > version


@needs_kernels
def test_batches_in_the_order_in_which_they_lie():
    """Without an order, the operator reads features where they are."""
    found = []
    for order in (None, torch.arange(5)):
        arguments = arguments_of_train()
        features = random_features(SPACE, 2, 5, torch.float32)
        torch.manual_seed(1)
        targets = torch.rand(5, 2)
        arguments |= {"features": [torch.linspace(-1, 1, x.numel()).view(x.shape) for x in features.tensors()]}
        parameters = [torch.linspace(-1, 1, p.numel()).view(p.shape) for p in arguments["parameters"]]
        arguments |= {"parameters": parameters, "targets": targets, "order": order}
        found.append([torch.ops.magep_fast._stack_train(**arguments), *parameters])
    assert found[0][0].shape == (3,)
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


@needs_kernels
def test_many_steps_with_another_loss(updates, whole_steps):
    step, model, optimizer = pair(model_of())
    assert_trains_as_steps_do(step, model, optimizer, *data_set(), torch.randperm(11), 4)
    assert len(updates) == 3 and not whole_steps


@needs_kernels
@pytest.mark.parametrize("change", ["requires grad", "too many"])
def test_many_ordinary_steps(change, monkeypatch, updates, whole_steps):
    step, model, optimizer = pair(model_of(), loss=nn.functional.mse_loss)
    features, targets = data_set()
    if change == "requires grad":
        features.weights[0].requires_grad_()
    else:
        monkeypatch.setattr(stack_module, "MOST_NETWORKS", 2)  # the last batch has three
    assert_trains_as_steps_do(step, model, optimizer, features, targets, torch.randperm(11), 4)
    assert not updates and not whole_steps


@needs_kernels
def test_steps_before_a_bad_batch_are_taken(whole_steps):
    step, model, optimizer = pair(model_of(), loss=nn.functional.binary_cross_entropy)
    features, targets = data_set()
    targets[9, 1] = 1.5
    with pytest.raises(RuntimeError, match="between 0 and 1"):
        step.train(features, targets, torch.arange(11), 4)
    assert whole_steps == [2]
    for index in torch.arange(8).split(4):
        ordinary_step(model, step.loss, optimizer, features[index], targets[index])
    assert_same_training(step, model, optimizer, [])


def test_no_steps():
    step, _, _ = pair(model_of())
    features, targets = data_set()
    found = step.train(features, targets.long(), torch.arange(0), 4)
    assert found.shape == (0,) and found.dtype == torch.float64


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"batch_size": 0}, ValueError, "batch_size must be at least 1; found 0"),
        ({"batch_size": -2}, ValueError, "batch_size must be at least 1; found -2"),
        ({"targets": torch.rand(12, 2)}, ValueError, "expected targets for each of the 11 samples; found 12"),
        ({"order": [0, 1]}, TypeError, "order must be a tensor of indices of one dimension, int64; found list"),
        ({"order": torch.ones(3)}, TypeError, r"found torch\.float32 of shape \[3\]"),
        ({"order": torch.arange(4).view(2, 2)}, TypeError, r"found torch\.int64 of shape \[2, 2\]"),
        ({"order": torch.tensor([3, 11])}, IndexError, "order must name samples 0 to 10; found 11"),
        ({"order": torch.tensor([3, -1])}, IndexError, "order must name samples 0 to 10; found -1"),
    ],
)
def test_arguments_of_many_steps(change, error, message):
    step, _, _ = pair(model_of())
    before = [p.detach().clone() for p in step.model.parameters()]
    features, targets = data_set()
    with pytest.raises(error, match=message):
        step.train(**{"features": features, "targets": targets, "order": torch.arange(11), "batch_size": 4, **change})
    assert all(torch.equal(p, q) for p, q in zip(step.model.parameters(), before, strict=True))


def test_many_steps_of_any_model():
    linear = nn.Linear(3, 2)
    other = copy.deepcopy(linear)
    step = TrainingStep(linear, nn.MSELoss(), torch.optim.SGD(linear.parameters(), lr=0.1))
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    features, targets = torch.randn(7, 3), torch.randn(7, 2)
    assert_trains_as_steps_do(step, other, optimizer, features, targets, torch.randperm(7), 3)


@needs_kernels
@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize(
    "change",
    [lambda x: x[:, :1], lambda x: x.float(), lambda x: x.requires_grad_(), lambda x: nn.Parameter(x)],
    ids=["broadcast", "another dtype", "requires grad", "another type"],
)
def test_targets_that_the_operator_does_not_take(change, whole_steps):
    step, model, optimizer = pair(model_of(), loss=nn.functional.mse_loss)
    assert_same_training(step, model, optimizer, [(x, change(y)) for x, y in batches()])
    assert not whole_steps


@needs_kernels
@pytest.mark.parametrize("wrong", [1.5, -0.5, torch.nan])
def test_targets_that_are_no_probabilities_change_nothing(wrong, whole_steps):
    step, _, _ = pair(model_of(), loss=nn.functional.binary_cross_entropy)
    before = [p.detach().clone() for p in step.model.parameters()]
    features, targets = batches(1)[0]
    targets[1, 1] = wrong
    with pytest.raises(RuntimeError, match="between 0 and 1"):
        step(features, targets)
    assert not whole_steps
    assert all(torch.equal(p, q) for p, q in zip(step.model.parameters(), before, strict=True))


@needs_kernels
def test_outputs_that_are_no_probabilities_change_nothing(whole_steps):
    step, _, _ = pair(model_of(sigmoid=False), loss=nn.functional.binary_cross_entropy)
    before = [p.detach().clone() for p in step.model.parameters()]
    features, targets = batches(1)[0]
    with pytest.raises(RuntimeError, match="between 0 and 1"):
        step(features.map(lambda x: 100 * x), targets)
    assert not whole_steps
    assert all(torch.equal(p, q) for p, q in zip(step.model.parameters(), before, strict=True))
    assert all(entry["step"] == 0 for entry in step.optimizer.state.values())


@needs_kernels
@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda model: torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.1),
        lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5),
        lambda model: torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.5, decoupled_weight_decay=True),
        lambda model: torch.optim.Adam(model.parameters(), lr=0.02, betas=(0.2, 0.7), eps=1e-3),
        lambda model: torch.optim.Adam(model.parameters(), lr=0.02, betas=(0.0, 0.9)),
        lambda model: torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01, dtype=torch.float64)),
        lambda model: torch.optim.Adam(model.parameters(), lr=0.01, fused=True),
        lambda model: torch.optim.Adam(list(model.parameters())[::-1], lr=0.01, foreach=True),
    ],
)
@pytest.mark.parametrize("loss", [square, nn.functional.mse_loss])
def test_hyperparameters(make_optimizer, loss, updates, whole_steps):
    step, model, optimizer = pair(model_of(), make_optimizer, loss)
    assert_same_training(step, model, optimizer, batches())
    assert len(updates if loss is square else whole_steps) == STEPS
    given = step.optimizer.state_dict()["param_groups"]
    assert given == optimizer.state_dict()["param_groups"]


@needs_kernels
def test_schedulers_of_the_learning_rate(updates):
    step, model, optimizer = pair(model_of())
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.3) for each in (step.optimizer, optimizer)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same_training(
            step, model, optimizer, batches(), after=lambda k: [scheduler.step() for scheduler in schedulers]
        )
    assert len(updates) == STEPS
    assert schedulers[0].get_last_lr() == schedulers[1].get_last_lr() == pytest.approx([0.01 * 0.3**STEPS])


@needs_kernels
def test_stacks_that_return_features(updates):
    """Where the loss does not use all of the outputs, the gradients of the others are zero."""

    def loss(outputs, targets):
        return (outputs.weights[0].mean((2, 3)) - targets).square().mean() + outputs.biases[1].square().mean()

    model = Stack(MagepEquivariant(SPACE, 2, 3, activation="sin"), MagepEquivariant(SPACE, 3, 4, activation="tanh"))
    step, other, optimizer = pair(model.double(), loss=loss)
    assert_same_training(step, other, optimizer, batches(space=SPACE, channels=2, width=4))
    assert len(updates) == STEPS


@needs_kernels
def test_batches_of_other_sizes(updates):
    step, model, optimizer = pair(model_of())
    data = [batch for size in (3, 1, 5, 3) for batch in batches(1, size)]
    assert_same_training(step, model, optimizer, data)
    assert len(updates) == 4


def a_hook(*_):
    return None


def hook_parameter(model, optimizer):
    model[1].weight_1.register_hook(lambda grad: 2 * grad)


def hook_after_accumulation(model, optimizer):
    def double(p):
        p.grad.mul_(2)

    model[1].weight_1.register_post_accumulate_grad_hook(double)


def hook_optimizer(model, optimizer):
    def negate(*_):
        for p in model.parameters():
            p.grad.neg_()

    optimizer.register_step_pre_hook(negate)


def hook_after_optimizer(model, optimizer):
    optimizer.register_step_post_hook(lambda optimizer, *_: optimizer.param_groups[0].update(lr=0.03))


def replace_step(model, optimizer):
    original = optimizer.step

    def clipped():
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        original()

    optimizer.step = clipped


def replace_step_under_a_scheduler(model, optimizer):
    step = type(optimizer).step

    def clipped(self):
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        step(self)

    optimizer.step = types.MethodType(clipped, optimizer)
    torch.optim.lr_scheduler.ConstantLR(optimizer)


def freeze(model, optimizer):
    model[1].bias_2.requires_grad_(False)


def without_a_layer(model):
    return torch.optim.Adam(list(model.parameters())[:-2], lr=0.01)


def with_another_parameter(model):
    return torch.optim.Adam([*model.parameters(), nn.Parameter(torch.ones(3, dtype=torch.float64))], lr=0.01)


def in_two_groups(model):
    first, *rest = model.parameters()
    return torch.optim.Adam([{"params": [first], "lr": 0.1}, {"params": rest}], lr=0.01)


def with_another_group(model):
    other = nn.Parameter(torch.ones(3, dtype=torch.float64))
    return torch.optim.Adam([{"params": list(model.parameters())}, {"params": [other]}], lr=0.01)


class Clipping(torch.optim.Adam):
    def step(self, closure=None):
        nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 1e-3)
        return super().step(closure)


def nothing(model, optimizer):
    pass


ORDINARY = {
    "a hook on a layer": (adam, lambda model, _: model[1].register_forward_hook(lambda *a: a[2].map(torch.sin))),
    "a hook on the model": (adam, lambda model, _: model.register_forward_hook(lambda *a: 2 * a[2])),
    "a hook on a container": (adam, lambda model, _: model[3].register_full_backward_hook(a_hook)),
    "a forward of its own": (adam, lambda model, _: setattr(model, "forward", lambda x: 2 * Stack.forward(model, x))),
    "a hook on a parameter": (adam, hook_parameter),
    "a hook behind the accumulation": (adam, hook_after_accumulation),
    "a hook before the optimizer": (adam, hook_optimizer),
    "a hook behind the optimizer": (adam, hook_after_optimizer),
    "a step of the instance": (adam, replace_step),
    "a step of the instance under a scheduler": (adam, replace_step_under_a_scheduler),
    "a step of the class": (lambda model: Clipping(model.parameters(), lr=0.01), nothing),
    "a frozen parameter": (adam, freeze),
    "amsgrad": (lambda model: torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=True), nothing),
    "maximize": (lambda model: torch.optim.Adam(model.parameters(), lr=0.01, maximize=True), nothing),
    "two groups": (in_two_groups, nothing),
    "a group of others": (with_another_group, nothing),
    "a layer that is not trained": (without_a_layer, nothing),
    "another parameter": (with_another_parameter, nothing),
    "another optimizer": (lambda model: torch.optim.SGD(model.parameters(), lr=0.01), nothing),
    "an optimizer like it": (lambda model: torch.optim.RAdam(model.parameters(), lr=0.01), nothing),
    "a backend of a layer": (adam, lambda model, _: setattr(model[2], "backend", "reference")),
    "several parts": (adam, lambda model, _: model.append(nn.Softmax(dim=1))),
    "a transposed parameter": (
        adam,
        lambda model, _: setattr(model[1].weight_1, "data", model[1].weight_1.data.t().contiguous().t()),
    ),
}


@needs_kernels
@pytest.mark.parametrize("case", ORDINARY)
def test_ordinary_steps(case, updates):
    make_optimizer, change = ORDINARY[case]
    model = model_of()
    other = copy.deepcopy(model)
    optimizers = [make_optimizer(each) for each in (model, other)]
    for each, optimizer in zip((model, other), optimizers, strict=True):
        change(each, optimizer)
    before = [p.detach().clone() for p in model.parameters()]
    assert_same_training(TrainingStep(model, square, optimizers[0]), other, optimizers[1], batches())
    assert not updates
    assert any(not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


@needs_kernels
def test_an_optimizer_that_says_that_it_steps_like_adam(updates):
    class Lean(torch.optim.Adam):
        steps_like_adam = True

        def step(self, closure=None):
            raise AssertionError("not called")

    class Named(torch.optim.Adam):
        """With no step of its own it is Adam."""

    for kind in (Lean, Named):
        model = model_of()
        other = copy.deepcopy(model)
        step = TrainingStep(model, square, kind(model.parameters(), lr=0.01))
        assert_same_training(step, other, adam(other), batches())
    assert len(updates) == 2 * STEPS


@needs_kernels
def test_ordinary_steps_of_other_models(updates):
    layers = nn.Sequential(*model_of())
    step, model, optimizer = pair(layers)
    assert_same_training(step, model, optimizer, batches())

    class Twice(Stack):
        def forward(self, input):
            return 2 * super().forward(input)

    step, model, optimizer = pair(Twice(*model_of()))
    assert_same_training(step, model, optimizer, batches())
    layer = MagepEquivariant(SPACE, 2, 2, activation="tanh")
    step, model, optimizer = pair(Stack(layer, layer, MagepInvariant(SPACE, 2, 2)).double())
    assert_same_training(step, model, optimizer, batches(space=SPACE, channels=2))
    assert not updates


@needs_kernels
def test_parameters_of_the_same_memory(updates):
    def tie(model):
        model[1].weight_1.data = model[0].weight_1.data
        return model

    first, second = (
        tie(Stack(MagepEquivariant(SPACE, 2, 2), MagepEquivariant(SPACE, 2, 2), MagepInvariant(SPACE, 2, 2)).double())
        for _ in range(2)
    )
    second.load_state_dict(first.state_dict())
    data = batches(space=SPACE, channels=2)
    assert_same_training(TrainingStep(first, square, adam(first)), second, adam(second), data)
    assert not updates


@needs_kernels
def test_ordinary_steps_around_the_call(updates):
    for each in ("torch", "reference"):
        step, model, optimizer = pair(model_of())
        with use_backend(each):
            assert_same_training(step, model, optimizer, batches())
    step, model, optimizer = pair(model_of())
    assert_same_training(step, model, optimizer, batches(batch_size=stack_module.MOST_NETWORKS + 1))
    step, model, optimizer = pair(model_of())
    data = [(features.map(lambda x: x.requires_grad_()), targets) for features, targets in batches()]
    assert_same_training(step, model, optimizer, data)
    assert all(x.grad is not None for features, _ in data for x in features.tensors())
    step, model, optimizer = pair(model_of(dtype=torch.float32))
    for each in (step.optimizer, optimizer):
        each.param_groups[0]["eps"] = 1e-3
    with torch.autocast("cpu", torch.bfloat16):
        assert_same_training(step, model, optimizer, batches(dtype=torch.float32), 1e-5)
    step, model, optimizer = pair(model_of())
    with torch.autograd.set_detect_anomaly(True):
        assert_same_training(step, model, optimizer, batches())
    with BaseTorchFunctionMode():
        assert_same_training(step, model, optimizer, batches())
    with torch.nn.modules.module.register_module_forward_hook(a_hook):
        assert_same_training(step, model, optimizer, batches())
    assert not updates
    with torch_optimizer.register_optimizer_step_pre_hook(a_hook):
        assert_same_training(step, model, optimizer, batches())
    with torch_optimizer.register_optimizer_step_post_hook(a_hook):
        assert_same_training(step, model, optimizer, batches())
    assert not updates
    with torch.no_grad(), pytest.raises(RuntimeError, match="does not require grad"):
        step(*batches(1)[0])
    with torch.no_grad(), pytest.raises(RuntimeError, match="does not require grad"):
        TrainingStep(step.model, torch.enable_grad()(square), step.optimizer)(*batches(1)[0])
    assert not updates
    assert_same_training(step, model, optimizer, batches())
    assert len(updates) == STEPS


@needs_kernels
def test_a_compiled_model_runs_as_compiled(updates, monkeypatch):
    seen = []
    step, model, optimizer = pair(model_of())
    monkeypatch.setattr(step.model, "_compiled_call_impl", lambda x: seen.append(x) or Stack.forward(step.model, x))
    assert_same_training(step, model, optimizer, batches())
    assert len(seen) == STEPS and not updates


@needs_kernels
def test_fused_and_ordinary_steps_in_turn(updates):
    step, model, optimizer = pair(model_of())
    for fused in (True, False, True, True, False):
        count = len(updates)
        handle = None if fused else step.model[1].register_forward_hook(a_hook)
        assert_same_training(step, model, optimizer, batches(2))
        assert len(updates) - count == (2 if fused else 0)
        if handle is not None:
            handle.remove()
    # A step of the optimizer that is not ours at all.
    for each, its in ((step.model, step.optimizer), (model, optimizer)):
        for p in each.parameters():
            p.grad = torch.full_like(p, 0.1)
        its.step()
    assert_same_training(step, model, optimizer, batches(2))
    assert {entry["step"].item() for entry in step.optimizer.state.values()} == {13}


@needs_kernels
def test_parameters_that_have_made_fewer_steps(updates):
    step, model, optimizer = pair(model_of())
    for each in (step.model, model):
        each[1].weight_1.requires_grad_(False)
    assert_same_training(step, model, optimizer, batches(2))
    for each in (step.model, model):
        each[1].weight_1.requires_grad_(True)
    assert_same_training(step, model, optimizer, batches(2))
    assert not updates
    assert step.optimizer.state[step.model[1].weight_1]["step"] == 2


@needs_kernels
def test_gradients_from_before_are_forgotten(updates):
    step, model, optimizer = pair(model_of())
    for p in step.model.parameters():
        p.grad = torch.full_like(p, 100.0)
    assert_same_training(step, model, optimizer, batches())
    assert len(updates) == STEPS and all(p.grad is None for p in step.model.parameters())


@needs_kernels
@pytest.mark.parametrize("through_a_file", [True, False])
def test_a_state_dict_goes_on_where_it_was(through_a_file, updates):
    step, model, optimizer = pair(model_of())
    assert_same_training(step, model, optimizer, batches())
    saved = {"model": step.model.state_dict(), "optimizer": step.optimizer.state_dict()}
    if through_a_file:
        stream = io.BytesIO()
        torch.save(saved, stream)
        stream.seek(0)
        saved = torch.load(stream)
    else:
        saved = copy.deepcopy(saved)
    assert all(x["step"].dtype == torch.float32 and x["step"].shape == () for x in saved["optimizer"]["state"].values())
    data = batches()
    assert_same_training(step, model, optimizer, data)
    # In a new model and optimizer, one that makes ordinary steps, and in the old ones.
    for kind in ("fused", "ordinary", "the old one"):
        restored = step if kind == "the old one" else pair(model_of())[0]
        restored.model.load_state_dict(saved["model"])
        restored.optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
        count = len(updates)
        for features, targets in data:
            if kind == "ordinary":
                ordinary_step(restored.model, square, restored.optimizer, features, targets)
            else:
                restored(features, targets)
        assert len(updates) - count == (0 if kind == "ordinary" else STEPS)
        for p, q in zip(restored.model.parameters(), model.parameters(), strict=True):
            assert_same(p.detach(), q.detach(), 1e-11)


@needs_kernels
def test_two_optimizers_do_not_share_a_state(updates):
    step, _, _ = pair(model_of())
    data = batches()
    for batch in data:
        step(*batch)
    other = copy.deepcopy(step)
    step(*data[0])
    expected = [entry["exp_avg"].clone() for entry in step.optimizer.state.values()]
    other(*data[0])
    other(*data[1])
    for entry, mean in zip(step.optimizer.state.values(), expected, strict=True):
        assert torch.equal(entry["exp_avg"], mean)
    step(*data[1])
    for p, q in zip(step.model.parameters(), other.model.parameters(), strict=True):
        assert_same(p.detach(), q.detach(), 1e-14)


@needs_kernels
def test_two_losses_share_an_optimizer(updates):
    """Neither copies the state at every step."""
    step, _, _ = pair(model_of())
    second = TrainingStep(step.model, lambda x, y: (x - y).abs().sum(), step.optimizer)
    step(*batches(1)[0])
    kept = [entry["exp_avg"] for entry in step.optimizer.state.values()]
    second(*batches(1)[0])
    step(*batches(1)[0])
    assert all(entry["exp_avg"] is x for entry, x in zip(step.optimizer.state.values(), kept, strict=True))
    assert len(updates) == 3


@needs_kernels
def test_entries_of_the_state_that_were_replaced(updates):
    step, model, optimizer = pair(model_of())
    assert_same_training(step, model, optimizer, batches())
    for each, its in ((step.model, step.optimizer), (model, optimizer)):
        entry = its.state[each[1].weight_1]
        entry["exp_avg"] = torch.ones_like(entry["exp_avg"])
    assert_same_training(step, model, optimizer, batches())
    for each, its in ((step.model, step.optimizer), (model, optimizer)):
        its.state[each[1].weight_2] = {name: x.clone() for name, x in its.state[each[1].weight_2].items()}
    assert_same_training(step, model, optimizer, batches())
    for its in (step.optimizer, optimizer):
        for entry in its.state.values():
            entry["step"].zero_()
    assert_same_training(step, model, optimizer, batches())
    assert len(updates) == 4 * STEPS


@needs_kernels
def test_a_layer_that_was_replaced_is_not_the_optimizer_s(updates):
    step, model, optimizer = pair(model_of())
    assert_same_training(step, model, optimizer, batches())
    layer = MagepInvariant(CNN.with_taps(1), 4, 5).double()
    step.model[2], model[2] = layer, copy.deepcopy(layer)
    before = len(updates)
    for features, targets in batches():
        assert_same(step(features, targets), ordinary_step(model, square, optimizer, features, targets), 1e-11)
    assert len(updates) == before
    assert torch.equal(step.model[2].psi, model[2].psi)


@needs_kernels
def test_a_parameter_that_was_taken_from_the_optimizer(updates):
    step, model, optimizer = pair(model_of())
    assert_same_training(step, model, optimizer, batches())
    before = len(updates)
    for its in (step.optimizer, optimizer):
        its.param_groups[0]["params"].pop()
    assert_same_training(step, model, optimizer, batches())
    assert len(updates) == before


@needs_kernels
@pytest.mark.parametrize("change", ["dtype", "shape"])
def test_parameters_that_no_longer_fit_the_state(change):
    """As for torch itself, whose error it is."""
    step, model, optimizer = pair(model_of())
    features, targets = batches(1)[0]
    step(features, targets)
    ordinary_step(model, square, optimizer, features, targets)
    for each in (step.model, model):
        if change == "dtype":
            each.float()
        else:
            first, _, second = each[3][:3]
            first.weight.data, first.bias.data = first.weight.data[:-20].clone(), first.bias.data[:-20].clone()
            second.weight.data = second.weight.data[:, :-20].clone()
    dtype = step.model[0].weight_1.dtype
    errors = []
    for call in (step, lambda *data: ordinary_step(model, square, optimizer, *data)):
        with pytest.raises(RuntimeError) as caught:
            call(features.to(dtype), targets.to(dtype))
        errors.append(str(caught.value))
    assert errors[0] == errors[1]


@needs_kernels
def test_the_state_lives_no_longer_than_the_optimizer():
    step, _, _ = pair(model_of())
    step(*batches(1)[0])
    assert len(training_step._states) >= 1
    means = weakref.ref(training_step._states[step.optimizer])
    del step
    gc.collect()
    assert means() is None


@needs_kernels
def test_losses_that_do_more(updates):
    """They may change their argument, and depend on parameters by themselves."""

    def in_place(outputs, targets):
        return outputs.sub_(targets).square_().mean()

    step, model, optimizer = pair(model_of(), loss=in_place)
    for features, targets in batches():
        expected = ordinary_step(model, square, optimizer, features, targets)
        assert_same(step(features, targets), expected, 1e-11)
    assert len(updates) == STEPS
    for penalty in (lambda outputs: 0 * outputs.sum(), square):
        count = len(updates)
        step, model, optimizer = pair(model_of())
        losses = [
            lambda x, y, each=each, penalty=penalty: (
                (penalty(x) if penalty is not square else square(x, y)) + each[1].weight_1.square().sum()
            )
            for each in (step.model, model)
        ]
        for features, targets in batches():
            step.loss = losses[0]
            expected = ordinary_step(model, losses[1], optimizer, features, targets)
            assert_same(step(features, targets), expected, 1e-11)
        assert len(updates) == count
        for p, q in zip(step.model.parameters(), model.parameters(), strict=True):
            assert_same(p.detach(), q.detach(), 1e-11)
        assert step.model[1].weight_1.grad is not None


@needs_kernels
def test_a_loss_of_parameters_alone():
    step, model, optimizer = pair(model_of())
    step.loss = lambda x, y: step.model[1].weight_1.square().sum()
    for features, targets in batches():
        ordinary_step(model, lambda x, y: model[1].weight_1.square().sum(), optimizer, features, targets)
        step(features, targets)
    assert_same(step.model[1].weight_1.detach(), model[1].weight_1.detach(), 1e-11)
    assert len(step.optimizer.state[step.model[1].weight_1]) == 3
    for p, q in zip(step.model.parameters(), model.parameters(), strict=True):
        assert_same(p.detach(), q.detach(), 1e-11)


@needs_kernels
def test_a_trained_part_of_the_loss_gets_its_gradients():
    step, model, optimizer = pair(model_of())
    scales = [nn.Parameter(torch.ones((), dtype=torch.float64)) for _ in range(2)]
    step.loss = lambda x, y: square(scales[0] * x, y)
    for features, targets in batches():
        ordinary_step(model, lambda x, y: square(scales[1] * x, y), optimizer, features, targets)
        step(features, targets)
    assert_same(scales[0].grad, scales[1].grad, 1e-11)


@needs_kernels
@pytest.mark.parametrize(
    ("loss", "error", "message"),
    [
        (lambda x, y: x - y, RuntimeError, "only for scalar outputs"),
        (lambda x, y: y.sum(), RuntimeError, "does not require grad"),
        (lambda x, y: x.detach().sum(), RuntimeError, "does not require grad"),
        (lambda x, y: 1 / 0, ZeroDivisionError, "division by zero"),
        (lambda x, y: 1.0, AttributeError, "backward"),
    ],
)
def test_errors_of_losses_are_those_of_torch(loss, error, message):
    step, model, optimizer = pair(model_of(), loss=loss)
    before = [p.detach().clone() for p in step.model.parameters()]
    data = batches(1)[0]
    with pytest.raises(error, match=message):
        step(*data)
    with pytest.raises(error, match=message):
        ordinary_step(model, loss, optimizer, *data)
    assert all(torch.equal(p, q) for p, q in zip(step.model.parameters(), before, strict=True))


@needs_kernels
def test_errors_of_features_are_those_of_the_layers():
    step, _, _ = pair(model_of())
    features, targets = batches(1)[0]
    step(features, targets)
    with pytest.raises(ValueError, match="expected features of 1 channels"):
        step(random_features(CNN, 3, 2), targets)
    with pytest.raises(ValueError, match=r"features are torch.float32 .* use features.to\(torch.float64\)"):
        step(features.to(torch.float32), targets)
    step.model[1].float()
    with pytest.raises(ValueError, match=r"features are torch\.float64 but the layer's parameters are torch\.float32"):
        step(features, targets)


@needs_kernels
def test_graphs_from_before_a_step_notice_it(updates):
    step, _, _ = pair(model_of())
    features, targets = batches(1)[0]
    value = square(step.model(features), targets)
    value.backward(retain_graph=True)
    step(features, targets)
    assert updates
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


@needs_kernels
@pytest.mark.parametrize("count", [1, 2])
def test_uninitialised_and_earlier_memory_does_not_matter(count, updates, uninitialised_memory_is_nan):
    with threads(count):
        for activation in ("relu", "sin"):
            # Threads keep their working memory: a step on NaN leaves it full of them.
            spoilt, _, _ = pair(model_of(activation))
            features, targets = batches(1)[0]
            assert spoilt(features.map(lambda x: x * torch.nan), targets).isnan()
            step, model, optimizer = pair(model_of(activation))
            assert_same_training(step, model, optimizer, batches())
    assert len(updates) == 2 * (STEPS + 1)


def arguments_of_update():
    """Of the operator, for a stack of one invariant and two dense layers with a sigmoid."""
    model = Stack(MagepInvariant(SPACE, 2, 3), nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2), nn.Sigmoid())
    features, layers = list(random_features(SPACE, 2, 2, torch.float32).tensors()), [2, 0, 0, 3, 2, 1]
    parameters = [p.detach().clone() for p in model.parameters()]
    output, workspace = torch.ops.magep_fast._stack(features, parameters, layers)
    size = sum(-(-p.numel() // 16) * 16 for p in parameters)
    return {
        "grads": [torch.ones(2, 2)],
        "features": features,
        "parameters": parameters,
        "outputs": [output],
        "workspace": workspace,
        "means": torch.zeros(size),
        "squares": torch.zeros(size),
        "steps": torch.zeros(len(parameters)),
        "layers": layers,
        "lr": 0.01,
        "beta1": 0.9,
        "beta2": 0.999,
        "eps": 1e-8,
        "weight_decay": 0.0,
        "decoupled": False,
    }


@needs_kernels
@pytest.mark.parametrize("name", ["grads", "features", "parameters", "outputs", "workspace", "means", "squares"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.double(), "float|Double"),
        (lambda x: torch.cat([x, x]), r"must be a CPU tensor of shape|expected"),
        (lambda x: x.unsqueeze(0), r"must be a CPU tensor of shape|rank|expected"),
        (lambda x: x.to("meta"), "another device|meta|Meta"),
    ],
)
def test_the_operator_checks_its_tensors(name, change, message):
    arguments = arguments_of_update()
    given = arguments[name]
    before = [p.clone() for p in arguments["parameters"]]
    arguments[name] = [*given[:-1], change(given[-1])] if isinstance(given, list) else change(given)
    with pytest.raises((RuntimeError, NotImplementedError), match=message):
        torch.ops.magep_fast._stack_update(**arguments)
    if name != "parameters":
        assert all(torch.equal(p, q) for p, q in zip(arguments["parameters"], before, strict=True))


@needs_kernels
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x["grads"].clear(), "expected 1 grads; found 0"),
        (lambda x: x["outputs"].clear(), "expected 1 outputs; found 0"),
        (lambda x: x["parameters"].pop(), "expected at least 6 parameters for these layers; found 5"),
        (
            lambda x: x.update(means=torch.zeros(5)),
            r"means\[0\] must be a CPU tensor of shape \[\d+\] .*; found shape \[5\]",
        ),
        (
            lambda x: x.update(squares=torch.zeros(2 * len(x["squares"]))[::2]),
            r"squares\[0\] must be contiguous, as it is changed in place",
        ),
        (
            lambda x: x["parameters"].__setitem__(2, x["parameters"][2].t().contiguous().t()),
            r"parameters\[2\] must be contiguous",
        ),
        (
            lambda x: x["steps"].__setitem__(3, 2.0),
            "all parameters must have made as many steps; found 2 for parameter 3 and 0 for the first",
        ),
        (lambda x: x.update(steps=torch.zeros(3)), r"steps\[0\] must be a CPU tensor of shape \[6\]"),
        (
            lambda x: x.update(steps=torch.zeros(6, dtype=torch.int64)),
            r"steps\[0\] .* dtype Float; found .* dtype Long",
        ),
        (lambda x: x["layers"].pop(), "three numbers for each layer"),
    ],
)
def test_the_operator_checks_its_arguments(change, message):
    arguments = arguments_of_update()
    change(arguments)
    with pytest.raises(RuntimeError, match=message):
        torch.ops.magep_fast._stack_update(**arguments)


def arguments_of_train():
    arguments = arguments_of_update()
    for name in ("grads", "outputs", "workspace"):
        del arguments[name]
    return arguments | {"targets": torch.full((2, 2), 0.25), "order": torch.tensor([1, 0]), "batch_size": 2, "loss": 1}


@needs_kernels
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.update(targets=torch.zeros(2, 3)), r"targets\[0\] must be a CPU tensor of shape \[2, 2\]"),
        (lambda x: x.update(targets=torch.zeros(2, 2).double()), r"targets\[0\] .* dtype Float; found .* dtype Double"),
        (lambda x: x.update(loss=2), r"loss must be 0 \(binary cross entropy\) or 1 \(squared error\); found 2"),
        (lambda x: x.update(steps=torch.zeros(3)), r"steps\[0\] must be a CPU tensor of shape \[6\]"),
        (
            lambda x: x.update(squares=torch.zeros(2 * len(x["squares"]))[::2]),
            r"squares\[0\] must be contiguous, as it is changed in place",
        ),
        (
            lambda x: x.update(features=[y[:0] for y in x["features"]], targets=x["targets"][:0], order=None),
            "expected at least one network",
        ),
        (lambda x: x.update(order=torch.empty(0, dtype=torch.int64)), "expected at least one network"),
        (lambda x: x.update(order=torch.tensor([0, 2])), "order must name networks 0 to 1; found 2"),
        (lambda x: x.update(order=torch.tensor([-1])), "order must name networks 0 to 1; found -1"),
        (lambda x: x.update(order=torch.tensor([0.0])), r"order\[0\] .* dtype Long; found .* dtype Float"),
        (lambda x: x.update(order=torch.tensor([[0]])), r"order\[0\] must be a CPU tensor of shape \[1\]"),
        (lambda x: x.update(batch_size=0), "batch_size must be at least 1; found 0"),
    ],
)
def test_the_operator_of_whole_steps_checks_its_arguments(change, message):
    arguments = arguments_of_train()
    before = [p.clone() for p in arguments["parameters"]]
    change(arguments)
    with pytest.raises(RuntimeError, match=message):
        torch.ops.magep_fast._stack_train(**arguments)
    assert all(torch.equal(p, q) for p, q in zip(arguments["parameters"], before, strict=True))


@needs_kernels
def test_whole_steps_need_one_tensor_of_outputs():
    model = Stack(MagepEquivariant(SPACE, 2, 3))
    parameters = [p.detach() for p in model.parameters()]
    arguments = arguments_of_train() | {"parameters": parameters, "layers": [1, 3, 0]}
    arguments["steps"] = torch.zeros(len(parameters))
    with pytest.raises(RuntimeError, match="the last layer must be an invariant or a dense one"):
        torch.ops.magep_fast._stack_train(**arguments)


@needs_kernels
def test_the_operator_takes_a_step():
    arguments = arguments_of_update()
    before = [p.clone() for p in arguments["parameters"]]
    torch.ops.magep_fast._stack_update(**arguments)
    # At the first step Adam moves every parameter that has a gradient by the learning rate.
    moved = (arguments["parameters"][-1] - before[-1]).abs()
    torch.testing.assert_close(moved, torch.full((2,), 0.01), rtol=1e-3, atol=0)
    assert arguments["steps"].tolist() == [1] * len(before)
    assert (arguments["means"] != 0).any() and (arguments["squares"] != 0).any()


def test_any_model_optimizer_and_loss():
    """Without kernels too."""
    step, model, optimizer = pair(model_of())
    assert_same_training(step, model, optimizer, batches())
    linear = nn.Linear(3, 2)
    other = copy.deepcopy(linear)
    step = TrainingStep(linear, nn.MSELoss(), torch.optim.SGD(linear.parameters(), lr=0.1))
    data = [(torch.randn(4, 3), torch.randn(4, 2)) for _ in range(3)]
    expected = torch.optim.SGD(other.parameters(), lr=0.1)
    assert_same_training(step, other, expected, data, 1e-6)
