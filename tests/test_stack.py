import copy
import io

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from magep_fast import (
    MagepEquivariant,
    MagepInvariant,
    MonomialEquivariant,
    Stack,
    WeightFeatures,
    WeightSpace,
    use_backend,
)
from magep_fast import stack as stack_module
from magep_fast.models import CnnGeneralization, mlp
from magep_fast.ops.library import missing_library
from tests.helpers import assert_same, gradients, random_features, runs_together, threads

SPACE = WeightSpace((2, 5, 4, 3))
CNN = WeightSpace((1, 4, 6, 2), taps=(9, 9, 1))

needs_kernels = pytest.mark.skipif(missing_library() is not None, reason=f"no native library: {missing_library()}")


def whole(activation="relu", sigmoid=True, space=CNN, share_Wb=True):
    """Layers of every kind."""
    flat = space.with_taps(1)
    return Stack(
        MonomialEquivariant(space, 2, 3),
        MagepEquivariant(flat, 3, 4, activation=activation, share_Wb=share_Wb),
        MagepEquivariant(flat, 4, 2, share_Wb=share_Wb),
        MagepInvariant(flat, 2, 5, share_Wb=share_Wb),
        mlp(5, 7, 6, 2),
        *([nn.Sigmoid()] if sigmoid else []),
    ).double()


def equivariant():
    return Stack(
        MagepEquivariant(SPACE, 2, 3, activation="tanh"), MagepEquivariant(SPACE, 3, 4, activation="sin")
    ).double()


def short():
    return Stack(MagepInvariant(SPACE, 2, 3), nn.Linear(3, 1)).double()


def assert_like_sequential(model, features):
    """Outputs and gradients are those of the layers one by one."""
    found, expected = gradients(model, features), gradients(nn.Sequential(*model), features)
    assert_same(found[0], expected[0], 1e-14)
    for x, y in zip(found[1], expected[1], strict=True):
        assert_same(x, y, 1e-12)


@needs_kernels
@pytest.mark.parametrize("activation", ["relu", "tanh", "sin", None])
@pytest.mark.parametrize("sigmoid", [True, False])
@pytest.mark.parametrize("share_Wb", [True, False])
def test_values_and_gradients_are_those_of_the_layers(activation, sigmoid, share_Wb):
    model, features = whole(activation, sigmoid, share_Wb=share_Wb), random_features(CNN, 2, 3)
    assert runs_together(model, features)
    assert_like_sequential(model, features)


@needs_kernels
@pytest.mark.parametrize("make", [equivariant, short])
@pytest.mark.parametrize("count", [1, 3])
def test_part_of_the_kinds(make, count):
    model, features = make(), random_features(SPACE, 2, 4)
    assert runs_together(model, features)
    with threads(count):
        assert_like_sequential(model, features)


@needs_kernels
def test_float32_and_features_that_are_views():
    model, features = whole().float(), random_features(CNN, 2, 6, torch.float32)
    strided = features.map(lambda x: torch.stack([x, x])[0].mT.contiguous().mT if x.dim() == 4 else x)
    assert not strided.weights[1].is_contiguous()
    assert_same(model(strided), nn.Sequential(*model)(features), 1e-6)
    assert_same(model(features[1:4]), model(features)[1:4], 1e-6)


@needs_kernels
def test_second_derivatives():
    model, features = whole("tanh"), random_features(CNN, 2, 2)

    def second(net):
        inputs = features.map(lambda x: x.detach().requires_grad_())
        loss = net(inputs).square().sum()
        first = torch.autograd.grad(loss, inputs.tensors(), create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), [*inputs.tensors(), *net.parameters()])

    for x, y in zip(second(model), second(nn.Sequential(*model)), strict=True):
        assert_same(x, y, 1e-10)


@needs_kernels
def test_only_gradients_that_are_asked_for():
    model, features = whole(), random_features(CNN, 2, 2)
    for parameter in model[1].parameters():
        parameter.requires_grad_(False)
    model(features).sum().backward()
    assert all(p.grad is None for p in model[1].parameters())
    assert all(p.grad is not None for layer in (model[0], *model[2:]) for p in layer.parameters())
    assert all(x.grad is None for x in features.tensors())
    with torch.no_grad():
        assert model(features).grad_fn is None
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    assert not model(features).requires_grad


@needs_kernels
def test_backward_twice_through_a_kept_graph():
    model, features = whole(), random_features(CNN, 2, 2)
    loss = model(features).sum()
    first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    for x, y in zip(torch.autograd.grad(loss, list(model.parameters())), first, strict=True):
        assert torch.equal(x, y)
    loss = model(features).sum()
    with torch.no_grad():
        model[1].weight_1.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@needs_kernels
@pytest.mark.parametrize("which", [0, 3, 4, 5])
def test_hooks_are_called(which):
    model, features = whole(), random_features(CNN, 2, 2)
    assert runs_together(model, features)
    seen = []
    handle = model[which].register_forward_hook(lambda module, inputs, output: seen.append(module))
    expected = model(features)
    assert seen == [model[which]]
    handle.remove()
    assert_same(model(features), expected, 1e-14)
    assert len(seen) == 1 and runs_together(model, features)
    with torch.nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module)):
        model(features)
    assert model[4][0] in seen


@needs_kernels
def test_layers_can_be_replaced_and_changed():
    model, features = whole(), random_features(CNN, 2, 2)
    before = model(features)
    model[4][0] = nn.Linear(5, 7).double()
    assert not torch.equal(model(features), before)
    assert_same(model(features), nn.Sequential(*model)(features), 1e-14)
    model[1].activation = "tanh"
    assert_same(model(features), nn.Sequential(*model)(features), 1e-14)
    model[4][1] = nn.Tanh()
    assert not runs_together(model, features)
    assert_same(model(features), nn.Sequential(*model)(features), 1e-14)


@needs_kernels
def test_modules_that_no_longer_do_what_their_class_says():
    model, features = whole(), random_features(CNN, 2, 2)
    expected = model(features)

    class Double(nn.Module):
        def forward(self, x):
            return 2 * x

    torch.nn.utils.parametrize.register_parametrization(model[4][0], "weight", Double())
    assert not torch.equal(model(features), expected)
    assert_same(model(features), nn.Sequential(*model)(features), 1e-14)
    torch.nn.utils.parametrize.remove_parametrizations(model[4][0], "weight", leave_parametrized=False)
    assert_same(model(features), expected, 1e-14)
    assert runs_together(model, features)
    model[4][2].forward = lambda x: torch.zeros(2, 6, dtype=x.dtype)
    assert_same(model(features), nn.Sequential(*model)(features), 1e-14)
    del model[4][2].forward
    model[4][2].bias = None
    assert_same(model(features), nn.Sequential(*model)(features), 1e-14)


@needs_kernels
def test_a_layer_that_was_of_another_dtype_at_first():
    model, features = whole(), random_features(CNN, 2, 2)
    model[2].float()
    with pytest.raises(ValueError, match=r"features are torch\.float64 but the layer's parameters are torch\.float32"):
        model(features)
    model.double()
    assert runs_together(model, features)


@needs_kernels
def test_a_layer_may_stand_twice():
    layer = MagepEquivariant(SPACE, 2, 2, activation="tanh")
    model, features = Stack(layer, layer, MagepInvariant(SPACE, 2, 3)).double(), random_features(SPACE, 2, 2)
    assert runs_together(model, features)
    assert_like_sequential(model, features)


@needs_kernels
def test_backends_without_a_stack(monkeypatch):
    model, features = whole(), random_features(CNN, 2, 2)
    expected = model(features)
    with use_backend("torch"):
        assert not runs_together(model, features)
        assert_same(model(features), expected, 1e-12)
    model[2].backend = "reference"
    assert not runs_together(model, features)
    assert_same(model(features), expected, 1e-12)
    model[2].backend = "auto"
    assert runs_together(model, features)
    narrow = whole().to(torch.bfloat16)
    assert not runs_together(narrow, features.to(torch.bfloat16))


@needs_kernels
def test_large_batches_run_layer_by_layer(monkeypatch):
    model, features = whole(), random_features(CNN, 2, 2)
    many = random_features(CNN, 2, stack_module.MOST_NETWORKS + 1)
    assert not runs_together(model, many)
    assert_same(model(many)[:3], model(many[:3]), 1e-13)
    wide = Stack(MagepEquivariant(SPACE, 2, 2), MagepEquivariant(SPACE, 2, 600)).double()
    assert not runs_together(wide, random_features(SPACE, 2, 60))
    monkeypatch.setattr(stack_module, "LARGEST", 100)
    assert not runs_together(whole(), features)


@needs_kernels
def test_what_looks_into_layers_sees_them():
    model, features = whole().float(), random_features(CNN, 2, 2, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(features).dtype == torch.bfloat16
    with FlopCounterMode(display=False) as counter:
        model(features)
    assert counter.get_total_flops() > 0
    seen = []

    class Calls(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Calls():
        model(features)
    assert seen.count(nn.functional.linear) == 3
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_same(compiled(features), model(features), 1e-5)
    jacobian = torch.func.jacrev(lambda x: model(WeightFeatures((x, *features.weights[1:]), features.biases)))
    assert jacobian(features.weights[0]).shape == (2, 2, *features.weights[0].shape)


@needs_kernels
def test_outputs_may_be_changed_in_place():
    features = random_features(SPACE, 2, 2)
    for tail in ([nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Dropout(0.0), nn.Linear(4, 2)], [nn.Linear(4, 2)], []):
        model = Stack(MagepEquivariant(SPACE, 2, 3), MagepInvariant(SPACE, 3, 4), *tail).double()
        found = torch.autograd.grad(model(features).mul_(2).sum(), list(model.parameters()))
        expected = torch.autograd.grad(2 * nn.Sequential(*model)(features).sum(), list(model.parameters()))
        for x, y in zip(found, expected, strict=True):
            assert_same(x, y, 1e-12)


@needs_kernels
def test_batches_of_gradients():
    model, features = whole(), random_features(CNN, 2, 2)
    output = model(features)
    seeds = torch.eye(output.numel(), dtype=output.dtype).view(-1, *output.shape)
    parameters = list(model.parameters())

    def backward(seed):
        return torch.autograd.grad(output, parameters, seed, retain_graph=True)

    found = torch.func.vmap(backward)(seeds)
    for k, seed in enumerate(seeds):
        for x, y in zip(found, backward(seed), strict=True):
            assert_same(x[k], y, 1e-11)


@needs_kernels
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_dense_layers_without_neurons():
    features = random_features(SPACE, 2, 2)
    for tail in ([nn.Linear(4, 0), nn.ReLU(), nn.Linear(0, 2)], [nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 0)]):
        model = Stack(MagepInvariant(SPACE, 2, 4), *tail).double()
        assert_like_sequential(model, features)


def test_other_modules_stand_where_they_stood():
    features = random_features(SPACE, 2, 2)
    model = Stack(
        nn.Identity(),
        MagepEquivariant(SPACE, 2, 3, activation="tanh"),
        nn.Sequential(MagepEquivariant(SPACE, 3, 3), MagepInvariant(SPACE, 3, 4)),
        nn.Linear(4, 4),
        nn.ReLU(),
        nn.Dropout(0.0),
        nn.Linear(4, 2, bias=False),
        nn.Softmax(dim=1),
    ).double()
    assert_same(model(features), nn.Sequential(*model)(features), 1e-14)
    # Layers whose channels do not fit are not taken together, and say what they found.
    wrong = Stack(MagepEquivariant(SPACE, 2, 3), MagepInvariant(SPACE, 2, 4)).double()
    with pytest.raises(ValueError, match="expected features of 2 channels; found 3"):
        wrong(features)


def test_errors_are_those_of_the_layers():
    model = whole()
    with pytest.raises(TypeError, match="takes WeightFeatures"):
        model(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="expected features of 2 channels"):
        model(random_features(CNN, 3, 2))
    features = random_features(CNN, 2, 2)
    model(features)
    with pytest.raises(ValueError, match=r"features are torch.float32 .* use features.to\(torch.float64\)"):
        model(features.to(torch.float32))
    mixed = WeightFeatures((features.weights[0].float(), *features.weights[1:]), features.biases)
    with pytest.raises(ValueError, match=r"layer 1: weights are torch\.float32 on cpu; expected torch\.float64"):
        model(mixed)
    model[2].float()
    with pytest.raises(ValueError, match=r"features are torch\.float64 but the layer's parameters are torch\.float32"):
        model(features)


def test_no_networks():
    model, features = whole(), random_features(CNN, 2, 0)
    output, found = gradients(model, features)
    assert output.shape == (0, 2)
    assert all(not x.any() for x in found)


def test_names_and_copies_are_those_of_sequential():
    model = CnnGeneralization(channels=2, hidden=3).build(WeightSpace((1, 4, 4, 2)))
    assert isinstance(model, Stack) and list(model.state_dict()) == list(nn.Sequential(*model).state_dict())
    features = random_features(WeightSpace((1, 4, 4, 2)), 1, 2, torch.float32)
    expected = model(features)
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    for other in (copy.deepcopy(model), torch.load(stream, weights_only=False)):
        other[0].weight_1.data.zero_()
        assert not torch.equal(other(features), expected)
    assert torch.equal(model(features), expected)


@needs_kernels
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x["layers"].pop(), "three numbers for each layer"),
        (lambda x: x["layers"].__setitem__(0, 7), "kind must be 0, 1, 2 or 3; found 7"),
        (lambda x: x["layers"].clear(), "three numbers for each layer"),
        (lambda x: x["layers"].extend((1, 2, 0)), "expected at least 20 parameters for these layers; found 14"),
        (lambda x: x.update(layers=[2, 0, 0, 1, 4, 3]), "layer 1 of a stack has no features to take"),
        (lambda x: x.update(layers=[3, 1, 0]), "must follow an invariant layer"),
        (lambda x: x.update(layers=[2, 0, 0, 3, 2**62, 0]), "1 to 1000 of them, must follow"),
        (lambda x: x["layers"].__setitem__(2, 9), "activation must be"),
        (lambda x: x["layers"].__setitem__(1, 0), "at least one channel"),
        (lambda x: x["parameters"].pop(), "expected 14 parameters for these layers; found 13"),
        (lambda x: x["parameters"].append(torch.zeros(1)), "expected 14 parameters for these layers; found 15"),
        (lambda x: x["parameters"].__setitem__(0, torch.zeros(3, 3)), r"parameters\[0\] must be a CPU tensor of shape"),
        (lambda x: x["features"].pop(), "as many weights as biases"),
        (lambda x: x.update(features=[f.half() for f in x["features"]]), "float32 or float64"),
    ],
)
def test_the_operator_checks_its_arguments(change, message):
    model = equivariant().float()
    features = random_features(SPACE, 2, 2, torch.float32)
    arguments = {
        "features": list(features.tensors()),
        "parameters": [p.detach() for p in model.parameters()],
        "layers": [1, 3, 2, 1, 4, 3],
    }
    torch.ops.magep_fast._stack(**arguments)
    change(arguments)
    with pytest.raises(RuntimeError, match=message):
        torch.ops.magep_fast._stack(**arguments)
