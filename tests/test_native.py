from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import nn

from magep_fast import (
    Activation,
    MagepEquivariant,
    MagepInvariant,
    MonomialEquivariant,
    WeightFeatures,
    WeightSpace,
    use_backend,
)
from magep_fast.ops import native
from magep_fast.ops.library import missing_library
from tests.helpers import (
    Case,
    assert_same,
    assert_second_derivatives_are_those_of_torch_ops,
    random_features,
    tensors_of,
    threads,
)

if missing_library() is not None:
    pytest.skip(missing_library(), allow_module_level=True)

OPERATORS = {MagepEquivariant: "equivariant", MonomialEquivariant: "linear", MagepInvariant: "invariant"}
LAYERS = list(OPERATORS)
every_layer = pytest.mark.parametrize("kind", LAYERS)
AROUND_VECTORS = (7, 8, 9, 15, 16, 17, 31, 33)


@pytest.fixture(autouse=True)
def on_cpu_kernels(clean_state):
    with use_backend("cpu"):
        yield


def make_case(widths, batch_size=3, in_channels=4, out_channels=5, activation=None):
    terms = frozenset({"all"})
    return Case(WeightSpace(widths), batch_size, in_channels, out_channels, terms, seed=0, activation=activation)


def seeds_for(layer, features):
    """Output gradients of the dtype of the features."""
    with torch.no_grad():
        return [torch.randn_like(x) for x in tensors_of(layer(features))]


def derivatives(layer, features, seeds):
    """Outputs, and gradients by all features and parameters."""
    features = features.map(lambda x: x.detach().requires_grad_())
    outputs = tensors_of(layer(features))
    return *outputs, *torch.autograd.grad(outputs, (*features.tensors(), *layer.parameters()), seeds)


def exact_derivatives(layer, features, seeds):
    """The same numbers in float64 by the reference."""
    with use_backend("reference"):
        return derivatives(deepcopy(layer).double(), features.to(torch.float64), [x.double() for x in seeds])


def errors(found, exact):
    """The largest error of each tensor, relative to its largest magnitude."""
    for x, y in zip(found, exact, strict=True):
        assert x.shape == y.shape
        yield ((x.double() - y).abs().max() / y.abs().max()).item() if y.numel() and y.any() else x.abs().sum().item()


def operator(kind, suffix=""):
    return getattr(torch.ops.magep_fast, OPERATORS[kind] + suffix)


def arguments(case, kind, dtype=torch.float64, requires_grad=False):
    """Of the operator of a layer, for training."""
    layer, features = case.layer(kind, dtype), case.features(dtype)

    def copy(x):
        return x.detach().clone().requires_grad_(requires_grad)

    matrices = [copy(getattr(layer, output.name)) for output in layer.table.outputs]
    given = [[copy(x) for x in features.weights], [copy(x) for x in features.biases]]
    given += [matrices[0] if kind is MagepInvariant else matrices]
    given += [] if layer.psi is None else [copy(layer.psi)]
    if kind is not MagepInvariant:
        given += [case.out_channels, native.ACTIVATIONS.index(case.activation), True]
    return given


def outputs_of(kind, given):
    """The outputs among the operator's results at these arguments, and the other results."""
    results = operator(kind)(*given)
    count = 1 if kind is MagepInvariant else 2 * len(given[0])
    return results[:count], results[count:]


def backward_arguments(kind, given, requires_grad=False):
    """Of the backward operator, for the outputs of the operator at these arguments."""
    outputs, kept = outputs_of(kind, given)
    grads = [torch.randn_like(x).requires_grad_(requires_grad) for x in outputs]
    kept = [x.detach() for x in kept]
    if kind is MagepInvariant:
        return [grads[0], *given, *kept]
    activation = native.ACTIVATIONS[given[-2]]
    known = [x.detach() for x in outputs] if activation in ("relu", "tanh") else []
    if kind is MonomialEquivariant:
        return [grads, *given[:3], known or kept, *given[3:5], True]
    return [grads, *given[:4], kept[0], known or kept[1:], *given[4:6]]


ACTIVATIONS = pytest.mark.parametrize("activation", native.ACTIVATIONS)


@every_layer
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize(
    ("widths", "dtype"),
    [
        ((3, 5, 1), torch.float64),
        ((1, 4, 3), torch.float32),
        ((2, 3, 4, 2), torch.float64),
        ((3, 4, 5, 1), torch.float32),
        ((2, 3, 4, 3, 2, 4), torch.float64),
        ((4, 3, 2, 3, 4, 2), torch.float32),
    ],
)
class TestOperators:
    def test_forward(self, kind, widths, dtype, requires_grad):
        torch.library.opcheck(operator(kind), arguments(make_case(widths, 2, 3, 2), kind, dtype, requires_grad))

    def test_backward(self, kind, widths, dtype, requires_grad):
        given = backward_arguments(
            kind, arguments(make_case(widths, 2, 3, 2), kind, dtype, requires_grad), requires_grad
        )
        torch.library.opcheck(operator(kind, "_backward"), given)


@pytest.mark.parametrize("kind", [MagepEquivariant, MagepInvariant])
@pytest.mark.parametrize("widths", [(2, 4, 3, 2), (2, 3, 4, 3, 1), (2, 3, 2)])
def test_operators_with_shared_Wb(kind, widths):
    case = replace(make_case(widths, 2, 3, 2), share_Wb=True)
    given = arguments(case, kind, torch.float64, True)
    torch.library.opcheck(operator(kind), given)
    torch.library.opcheck(operator(kind, "_backward"), backward_arguments(kind, given, True))


@ACTIVATIONS
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("kind", [MagepEquivariant, MonomialEquivariant])
def test_operators_with_activations(kind, requires_grad, activation):
    given = arguments(make_case((2, 4, 3, 2), 2, 3, 2, activation), kind, torch.float64, requires_grad)
    torch.library.opcheck(operator(kind), given)
    torch.library.opcheck(operator(kind, "_backward"), backward_arguments(kind, given, requires_grad))


TAPS = [
    Case(WeightSpace((2, 4, 5, 3), (9, 3, 1)), 3, 2, 4, None, 0, out_taps=1),
    Case(WeightSpace((1, 16, 16, 16, 10), (9, 9, 9, 1)), 4, 1, 20, None, 0, out_taps=1, activation="relu"),
    Case(WeightSpace((2, 4, 5, 3)), 3, 4, 2, None, 0, out_taps=(2, 1, 3), activation="sin"),
    Case(WeightSpace((3, 20, 2), (2, 3)), 1, 3, 2, None, 0, out_taps=(3, 2), activation="tanh"),
    Case(WeightSpace((2, 300, 30, 1), (1, 2, 1)), 2, 3, 2, None, 0),
    Case(WeightSpace((2, 4, 5, 3), (9, 3, 1)), 0, 2, 4, None, 0),
]


@pytest.mark.parametrize("inputs", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("case", TAPS, ids=str)
def test_linear_layers_with_taps_agree_with_the_reference(case, dtype, tolerance, inputs):
    layer, features = case.layer(MonomialEquivariant, dtype), case.features(dtype)
    seeds = seeds_for(layer, features)

    def differentiate(layer, features, seeds):
        if inputs:
            return derivatives(layer, features, seeds)
        outputs = tensors_of(layer(features))
        return *outputs, *torch.autograd.grad(outputs, tuple(layer.parameters()), seeds)

    found = differentiate(layer, features, seeds)
    with use_backend("reference"):
        exact = differentiate(
            deepcopy(layer).double(), features.to(torch.float64), [x.to(torch.float64) for x in seeds]
        )
    assert max(errors(found, exact)) <= tolerance


@ACTIVATIONS
@pytest.mark.parametrize("kind", [MagepEquivariant, MonomialEquivariant])
@pytest.mark.parametrize("widths", [(2, 9, 17, 1), (3, 16, 130, 4), (2, 5, 3), (1, 16, 16, 16, 10), (2, 16, 8, 11)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_activations_agree_with_the_reference(kind, widths, dtype, activation):
    case = make_case(widths, 3, 4, 5, activation)
    layer, features = case.layer(kind, dtype), case.features(dtype)
    seeds = seeds_for(layer, features)
    found, exact = derivatives(layer, features, seeds), exact_derivatives(layer, features, seeds)
    with use_backend("torch"):
        plain = derivatives(layer, features, seeds)
    allowed = [2 * error + 32 * torch.finfo(dtype).eps for error in errors(plain, exact)]
    for error, limit in zip(errors(found, exact), allowed, strict=True):
        assert error <= limit
    with torch.no_grad():
        for x, y in zip(tensors_of(layer(features)), found, strict=False):
            assert torch.equal(x, y)


@ACTIVATIONS
@pytest.mark.parametrize("kind", [MagepEquivariant, MonomialEquivariant])
def test_activations_keep_special_values(kind, activation):
    layer = make_case((2, 4, 5, 3), 2, 3, 3, activation).layer(kind, torch.float32)
    features = random_features(layer.table.space, 3, 2, torch.float32)
    features.biases[1][0, 1, 2] = torch.nan
    features.biases[2][1, 2, 0] = 1e30
    output = layer(features)
    with use_backend("torch"):
        expected = layer(features)
    for x, y in zip(output.tensors(), expected.tensors(), strict=True):
        assert torch.equal(x.isnan(), y.isnan())


EDGES = [
    make_case((3, 4, 5, 2), batch_size=1),
    make_case((3, 4, 5, 2), batch_size=0),
    make_case((3, 4, 5, 1), batch_size=0),
    make_case((3, 1, 2)),
    make_case((2, 1, 1, 1, 3)),
    make_case((3, 1, 1, 1)),
    make_case((1, 1, 1), 1, 1, 1),
    make_case((1, 1, 1, 1), 2, 1, 1),
    make_case((3, 4, 5, 2), in_channels=1),
    make_case((3, 4, 5, 2), out_channels=1),
    make_case((3, 4, 5, 1), in_channels=1, out_channels=1),
    make_case((2, 70, 130, 3), 1, 2, 3),
    make_case((2, 130, 70, 1), 1, 2, 3),
    make_case((2, 3, 4, 3, 2, 3, 4, 3, 2)),
    make_case((3, 2, 3, 4, 3, 2, 3, 4, 1)),
    make_case((2, 5, 4, 3), batch_size=37),
    make_case((2, 5, 4, 1), batch_size=37),
    *(make_case((3, n, n, 2), 2) for n in AROUND_VECTORS),
    *(make_case((2, n, n, 1), 2) for n in AROUND_VECTORS),
    *(make_case((2, 5, 4, 3), 2, n, n) for n in AROUND_VECTORS),
    *(make_case((2, 5, 4, 1), 2, n, n) for n in AROUND_VECTORS),
    *(make_case((n, 3, 4, 2), 2, 2, 2) for n in AROUND_VECTORS),
    *(make_case((2, 3, 4, n), 2, 2, 2) for n in AROUND_VECTORS),
]


def name_of(case):
    return f"{case.space}-{case.batch_size}x{case.in_channels}->{case.out_channels}"


@every_layer
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("case", EDGES, ids=name_of)
def test_edges_agree_with_the_reference(kind, case, dtype, tolerance):
    layer, features = case.layer(kind, dtype), case.features(dtype)
    seeds = seeds_for(layer, features)
    found = derivatives(layer, features, seeds)
    assert {x.dtype for x in found} == {dtype}
    assert max(errors(found, exact_derivatives(layer, features, seeds))) <= tolerance


@pytest.mark.parametrize("width", [256, 257])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_large_gradients_of_invariant_layers(width, dtype):
    """Those of more than 8 MiB are written around the caches, where rows begin at a vector's boundary."""
    layer = MagepInvariant(WeightSpace((2, width, width, 1)), 8, 3, dtype=dtype)
    features = random_features(layer.table.space, 8, 5).to(dtype).map(lambda x: x.requires_grad_())
    found, expected = [], []
    with threads(2):
        for backend, gradients in (("cpu", found), ("torch", expected)):
            with use_backend(backend):
                gradients += torch.autograd.grad(layer(features).square().sum(), features.tensors())
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() <= tolerance * b.norm()


@pytest.mark.parametrize("width", [128, 129])
@pytest.mark.parametrize("activation", ["sin", "relu", None])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_large_outputs_of_equivariant_layers(width, activation, dtype):
    """With one output, those of more than 8 MiB are written around the caches too."""
    layer = MagepEquivariant(WeightSpace((2, width, width, 1)), 2, 48, activation=activation, dtype=dtype)
    features = random_features(layer.table.space, 2, 3).to(dtype).map(lambda x: x.requires_grad_())
    found, expected = [], []
    with threads(2):
        for backend, results in (("cpu", found), ("torch", expected)):
            with use_backend(backend):
                outputs = layer(features).tensors()
                loss = sum(y.square().sum() for y in outputs)
                inputs = [*features.tensors(), *layer.parameters()]
                results += [*outputs, *torch.autograd.grad(loss, inputs)]
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() <= tolerance * b.norm()


@every_layer
@pytest.mark.parametrize("batch_size", [1, 2, 3])
@pytest.mark.parametrize("widths", [(3, 9, 8, 2), (3, 9, 8, 1), (2, 5, 3)])
def test_fewer_networks_than_threads(kind, widths, batch_size):
    case = make_case(widths, batch_size)
    layer, features = case.layer(kind), case.features()
    seeds = seeds_for(layer, features)
    with threads(4):
        found = derivatives(layer, features, seeds)
    assert max(errors(found, exact_derivatives(layer, features, seeds))) <= 1e-10


@every_layer
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("widths", [(2, 16, 16, 1), (3, 24, 17, 5), (1, 9, 1), (2, 8, 9, 8, 9, 3)])
def test_low_precision_is_no_worse_than_in_torch_ops(kind, dtype, widths):
    case = make_case(widths, 4, 6, 5)
    layer, features = case.layer(kind, dtype), case.features(dtype)
    seeds = seeds_for(layer, features)
    exact = exact_derivatives(layer, features, seeds)
    found = derivatives(layer, features, seeds)
    assert {x.dtype for x in found} == {dtype}
    with use_backend("torch"):
        allowed = [2 * error + torch.finfo(dtype).eps for error in errors(derivatives(layer, features, seeds), exact)]
    for error, limit in zip(errors(found, exact), allowed, strict=True):
        assert error <= limit


def unaligned(x):
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


def transposed(x):
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def strided(x):
    return x.repeat_interleave(2, dim=-1)[..., ::2]


def expanded(x):
    return x[:1].expand(x.shape)


@every_layer
@pytest.mark.parametrize("layout", [unaligned, transposed, strided, expanded, torch._neg_view])
@pytest.mark.parametrize("widths", [(3, 4, 5, 2), (3, 4, 5, 1)])
def test_memory_layout_of_arguments(kind, layout, widths):
    def moved(given):
        return torch.utils._pytree.tree_map_only(torch.Tensor, layout, given)

    def plain(given):
        return torch.utils._pytree.tree_map_only(
            torch.Tensor, lambda x: layout(x).clone(memory_format=torch.contiguous_format), given
        )

    given = arguments(make_case(widths, activation="sin"), kind)
    for x, y in zip(operator(kind)(*moved(given)), operator(kind)(*plain(given)), strict=True):
        assert torch.equal(x, y)
    given = backward_arguments(kind, given)
    found, expected = operator(kind, "_backward")(*moved(given)), operator(kind, "_backward")(*plain(given))
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)


@every_layer
@pytest.mark.parametrize("batch_size", [1, 2, 9])
@pytest.mark.parametrize("widths", [(3, 20, 17, 2), (3, 20, 17, 1)])
def test_repeated_runs_are_bitwise_equal(kind, widths, batch_size):
    case = make_case(widths, batch_size, 9, 10)
    layer, features = case.layer(kind, torch.float32), case.features(torch.float32)
    seeds = seeds_for(layer, features)
    results = {}
    for count in (1, 2):
        with threads(count):
            first, second = (derivatives(layer, features, seeds) for _ in range(2))
        for x, y in zip(first, second, strict=True):
            assert torch.equal(x, y)
        results[count] = first
    for x, y in zip(results[1], results[2], strict=True):
        assert_same(x, y, 1e-5)


@every_layer
@pytest.mark.parametrize("widths", [(3, 5, 6, 2), (3, 5, 6, 1), (2, 3, 5)])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_uninitialised_memory_does_not_matter(kind, widths, batch_size, uninitialised_memory_is_nan):
    case = make_case(widths, batch_size)
    layer, features = case.layer(kind), case.features()
    seeds = seeds_for(layer, features)
    found = derivatives(layer, features, seeds)
    assert max(errors(found, exact_derivatives(layer, features, seeds))) <= 1e-10


@every_layer
def test_memory_of_earlier_calls_does_not_matter(kind):
    """Threads keep their working memory: a call on NaN leaves it full of them."""
    for widths in [(3, 9, 8, 2), (3, 9, 8, 1), (3, 9, 2)]:
        case = make_case(widths)
        layer, features = case.layer(kind), case.features()
        seeds = seeds_for(layer, features)
        derivatives(layer, features.map(lambda x: x * torch.nan), seeds)
        found = derivatives(layer, features, seeds)
        assert max(errors(found, exact_derivatives(layer, features, seeds))) <= 1e-10


def divided_by_rows(batch_size, activation=None):
    """Networks of the CNN zoo, for which two threads divide the last layer by the rows of its matrices."""
    return make_case((1, 16, 16, 16, 10), batch_size, 20, 20, activation)


@ACTIVATIONS
@pytest.mark.parametrize("batch_size", [1, 2, 9])
def test_last_layer_divided_by_rows(activation, batch_size, uninitialised_memory_is_nan):
    case = divided_by_rows(batch_size, activation)
    layer, features = case.layer(MagepEquivariant), case.features()
    seeds = seeds_for(layer, features)
    with threads(2):
        derivatives(layer, features.map(lambda x: x * torch.nan), seeds)
        found, again = (derivatives(layer, features, seeds) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(found, again, strict=True))
    assert max(errors(found, exact_derivatives(layer, features, seeds))) <= 1e-10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_last_layer_divided_by_rows_in_low_precision(dtype):
    case = divided_by_rows(4)
    layer, features = case.layer(MagepEquivariant, dtype), case.features(dtype)
    seeds = seeds_for(layer, features)
    whole = derivatives(layer, features, seeds)
    with threads(2):
        found = derivatives(layer, features, seeds)
    exact = exact_derivatives(layer, features, seeds)
    for error, limit in zip(errors(found, exact), errors(whole, exact), strict=True):
        assert error <= 2 * limit + torch.finfo(dtype).eps


SPACE = WeightSpace((2, 5, 4, 3))


def small_model(dtype=torch.float32):
    return nn.Sequential(
        MagepEquivariant(SPACE, 2, 3, dtype=dtype),
        Activation(nn.ReLU(), kind="positive"),
        MagepInvariant(SPACE, 3, 2, dtype=dtype),
    )


def parameter_gradients(model, call, features):
    loss = call(features).square().sum()
    return loss, *torch.autograd.grad(loss, tuple(model.parameters()))


def test_compiled_gradients_equal_eager_ones():
    model, features = small_model(), random_features(SPACE, dtype=torch.float32)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    found, expected = parameter_gradients(model, compiled, features), parameter_gradients(model, model, features)
    for x, y in zip(found, expected, strict=True):
        assert_same(x, y, 1e-6)


def test_exported_model_computes_the_same():
    model, features = small_model(), random_features(SPACE, dtype=torch.float32)
    exported = torch.export.export(model, (features,))
    names = [str(node.target) for node in exported.graph.nodes]
    assert any("magep_fast.equivariant" in name for name in names)
    other = random_features(SPACE, dtype=torch.float32)
    assert_same(exported.module()(other), model(other), 1e-6)


def replaced(given, position, value, index=None):
    """A copy of the arguments with one of them, or one of its elements, replaced."""
    given = list(given)
    if index is None:
        given[position] = value(given[position])
    else:
        given[position] = list(given[position])
        given[position][index] = value(given[position][index])
    return given


WEIGHTS, BIASES, MATRICES, PSI = range(4)


@pytest.mark.parametrize("kind", [MagepEquivariant])
@pytest.mark.parametrize(
    ("position", "index", "value", "message"),
    [
        (WEIGHTS, 1, lambda x: x.float(), r"weights\[1\] must be a CPU tensor of shape \[3, 4, 4, 5\]"),
        (WEIGHTS, 0, lambda x: x[0], r"weights\[0\] must have rank 4"),
        (WEIGHTS, 1, lambda x: x[0], r"weights\[1\] must have rank 4; found 3"),
        (WEIGHTS, 1, lambda x: x[:, :, :, 1:], r"weights\[1\] .*found shape \[3, 4, 4, 4\]"),
        (WEIGHTS, None, lambda x: x[:-1], "as many weights as biases"),
        (WEIGHTS, 2, lambda x: x[:2], r"weights\[2\] must be a CPU tensor"),
        (BIASES, 2, lambda x: x.half(), r"biases\[2\] .*and dtype Double; found .* dtype Half"),
        (BIASES, 0, lambda x: x[0], r"biases\[0\] .*found shape \[4, 5\]"),
        (BIASES, 1, lambda x: x[:, :, 1:], r"biases\[1\] .*found shape \[3, 4, 3\]"),
        (MATRICES, None, lambda x: x[:-1], r"expected \d matrices; found \d"),
        (MATRICES, 0, lambda x: x.float(), r"matrices\[0\] .*and dtype Double; found .* dtype Float"),
        (MATRICES, 0, lambda x: x[:, 1:], r"matrices\[0\] must be a CPU tensor of shape"),
        (MATRICES, 0, lambda x: x.flatten(), r"matrices\[0\] must be a CPU tensor of shape"),
        (PSI, None, lambda x: x[0], "psi.* must be a CPU tensor of shape"),
        (PSI, None, lambda x: x[:, 1:], "psi.* must be a CPU tensor of shape"),
        (PSI, None, lambda x: x.float(), "psi.* and dtype Double; found .* dtype Float"),
    ],
)
def test_operators_refuse(kind, position, index, value, message):
    given = arguments(make_case((3, 5, 4, 2)), kind)
    wrong_backward = replaced(backward_arguments(kind, given), position + 1, value, index)
    for suffix, wrong in (("", replaced(given, position, value, index)), ("_backward", wrong_backward)):
        with pytest.raises(RuntimeError, match=f"magep_fast::{operator(kind, suffix).__name__}: .*{message}"):
            operator(kind, suffix)(*wrong)


@pytest.mark.parametrize("kind", [MagepEquivariant])
@pytest.mark.parametrize(
    ("position", "index", "value", "message"),
    [
        (0, None, lambda x: x[:-1], "expected 6 grads; found 5"),
        (0, 0, lambda x: x.float(), r"grads\[0\] .*and dtype Double; found .* dtype Float"),
        (0, 0, lambda x: x[..., :-1], r"grads\[0\] must be a CPU tensor of shape"),
        (5, None, lambda x: x[:, 1:], "saved.* must be a CPU tensor of shape"),
        (5, None, lambda x: x.float(), "saved.* must be a CPU tensor of shape"),
        (6, None, lambda x: x[:-1], "expected 6 known; found 5"),
        (6, 1, lambda x: x[1:], r"known\[1\] must be a CPU tensor of shape"),
        (8, None, lambda x: 4, "activation must be 0 .none., 1 .relu., 2 .tanh. or 3 .sin.; found 4"),
    ],
)
def test_backward_operators_refuse(kind, position, index, value, message):
    given = backward_arguments(kind, arguments(make_case((3, 5, 4, 2), activation="sin"), kind))
    with pytest.raises(RuntimeError, match=message):
        operator(kind, "_backward")(*replaced(given, position, value, index))


@pytest.mark.parametrize(
    ("position", "index", "value", "message"),
    [
        (WEIGHTS, 1, lambda x: x[:, :1], r"channels of weights must be multiples"),
        (WEIGHTS, 0, lambda x: x[0], "weights must have rank 4 and biases rank 3; found 3 and 3"),
        (WEIGHTS, 1, lambda x: x[0], r"weights\[1\] must have rank 4; found 3"),
        (WEIGHTS, None, lambda x: x[:-1], "as many weights as biases"),
        (BIASES, 1, lambda x: x[:, :, 1:], r"biases\[1\] .*found shape"),
        (MATRICES, None, lambda x: x[:-1], "expected two matrices for each of 3 layers; found 5"),
        (MATRICES, 2, lambda x: x[0], r"matrices\[2\] must have rank 2; found 1"),
        (MATRICES, 0, lambda x: x[:, 1:], r"matrices\[0\] must be a CPU tensor of shape"),
        (MATRICES, 1, lambda x: x.float(), r"matrices\[1\] .*and dtype Double; found .* dtype Float"),
        (MATRICES, 4, lambda x: x[1:], "(multiples|must be a CPU tensor of shape)"),
        (4, None, lambda x: -1, "activation must be 0"),
    ],
)
def test_the_linear_operator_refuses(position, index, value, message):
    given = arguments(make_case((3, 5, 4, 2), in_channels=2), MonomialEquivariant)
    with pytest.raises(RuntimeError, match=f"magep_fast::linear: .*{message}"):
        operator(MonomialEquivariant)(*replaced(given, position, value, index))


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (0, lambda x: x[:, 1:], "grad.* must be a CPU tensor of shape"),
        (3, lambda x: x.flatten(), "matrix must have rank 2; found 1"),
        (3, lambda x: x[:, 1:], "matrix.* must be a CPU tensor of shape"),
        (4, lambda x: x.float(), "psi.* and dtype Double; found .* dtype Float"),
        (5, lambda x: x[:, 1:], "saved.* must be a CPU tensor of shape"),
    ],
)
def test_the_invariant_backward_operator_refuses(position, value, message):
    given = backward_arguments(MagepInvariant, arguments(make_case((3, 5, 4, 2)), MagepInvariant))
    with pytest.raises(RuntimeError, match=f"magep_fast::invariant_backward: .*{message}"):
        operator(MagepInvariant, "_backward")(*replaced(given, position, value))


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64])
def test_operators_refuse_other_dtypes(dtype):
    given = arguments(make_case((3, 5, 4, 2)), MagepInvariant)
    given = torch.utils._pytree.tree_map_only(torch.Tensor, lambda x: x.to(dtype), given)
    with pytest.raises(RuntimeError, match="expected float32, float64, bfloat16 or float16 features"):
        operator(MagepInvariant)(*given)


@every_layer
@pytest.mark.parametrize("widths", [(2, 3, 2), (2, 3, 4, 1)])
def test_second_derivatives_agree_with_torch_ops(kind, widths):
    case = make_case(widths, 2, 2, 2)
    assert_second_derivatives_are_those_of_torch_ops(case.layer(kind), case.features(), 1e-10)


@every_layer
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("widths", [(2, 3, 2), (2, 3, 4, 1)])
def test_forward_mode_agrees_with_torch_ops(kind, widths):
    case = make_case(widths, 2, 2, 2)
    layer, features = case.layer(kind), case.features()
    parameters = {name: x.detach() for name, x in layer.named_parameters()}
    directions = random_features(case.space, 2, 2), {name: torch.randn_like(x) for name, x in parameters.items()}

    def function(x, given):
        return torch.func.functional_call(layer, given, (x,))

    found = torch.func.jvp(function, (features, parameters), directions)
    with use_backend("torch"):
        expected = torch.func.jvp(function, (features, parameters), directions)
    for x, y in zip(found, expected, strict=True):
        assert_same(x, y, 1e-10)


@pytest.fixture
def process_group(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_distributed_data_parallel_trains_the_same(process_group):
    plain, features = small_model(), random_features(SPACE, dtype=torch.float32)
    wrapped = nn.parallel.DistributedDataParallel(deepcopy(plain))
    for model in (plain, wrapped):
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
        model(features).square().sum().backward()
        optimiser.step()
    for x, y in zip(wrapped.module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(x, y)


def test_autocast_is_the_same_as_bfloat16():
    model, features = small_model(), random_features(SPACE, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(features)
    expected = deepcopy(model).bfloat16()(features.to(torch.bfloat16))
    assert output.dtype == torch.bfloat16 and torch.equal(output, expected)
    output.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.any() for p in model.parameters())


def test_features_of_a_network_do_not_depend_on_its_batch():
    case = make_case((3, 17, 9, 2), 11, 5, 6)
    layer, features = case.layer(MagepEquivariant), case.features()
    whole = layer(features)
    for net in range(case.batch_size):
        alone = layer(features[net : net + 1])
        assert_same(alone, whole[net : net + 1], 1e-12)


def test_gradients_of_each_network_by_vmap():
    space = WeightSpace((2, 5, 4, 3))
    layer = MagepInvariant(space, 2, 3, dtype=torch.float64)
    features = random_features(space, 2, 4)
    parameters = dict(layer.named_parameters())

    def loss(parameters, weights, biases):
        network = WeightFeatures([w[None] for w in weights], [b[None] for b in biases])
        return torch.func.functional_call(layer, parameters, (network,)).square().sum()

    with use_backend("cpu"):
        by_network = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(
            parameters, features.weights, features.biases
        )
        for k in range(4):
            one = torch.autograd.grad(layer(features[k]).square().sum(), list(parameters.values()))
            for expected, found in zip(one, by_network.values(), strict=True):
                torch.testing.assert_close(found[k], expected)


@pytest.mark.parametrize("compiled", [False, True])
def test_transforms_agree_with_the_torch_backend(compiled):
    space = WeightSpace((2, 5, 4, 3))
    layer = MagepInvariant(space, 2, 3, dtype=torch.float64)
    features = random_features(space, 2, 2)
    first, step = features.weights[0], torch.randn_like(features.weights[0])

    def function(w):
        return layer(WeightFeatures([w, *features.weights[1:]], features.biases))

    def transforms(w):
        tangent = torch.func.jvp(function, (w,), (step,))[1]
        gradient = torch.func.grad(lambda x: function(x).square().sum())(w)
        return tangent, gradient, torch.func.vmap(function)(torch.stack([w, step]))

    run = torch.compile(transforms, backend="eager") if compiled else transforms
    with use_backend("torch"):
        expected = transforms(first)
    with use_backend("cpu"):
        found = run(first)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y)


def test_forward_mode_with_dual_tensors():
    space = WeightSpace((2, 5, 4, 3))
    features = random_features(space, 2, 2)
    for layer in (MagepEquivariant(space, 2, 3, dtype=torch.float64), MagepInvariant(space, 2, 3, dtype=torch.float64)):
        with use_backend("cpu"):
            assert torch.autograd.gradcheck(
                lambda w, b, layer=layer: tensors_of(
                    layer(WeightFeatures([w, *features.weights[1:]], [b, *features.biases[1:]]))
                ),
                (features.weights[0].requires_grad_(), features.biases[0].requires_grad_()),
                check_forward_ad=True,
                check_batched_grad=False,
            )


@every_layer
def test_operators_refuse_no_channels(kind):
    given = arguments(make_case((2, 3, 2)), kind)
    without = [x[:, :0] for x in given[0]], [x[:, :0] for x in given[1]], *given[2:]
    with pytest.raises(RuntimeError, match="at least one channel"):
        operator(kind)(*without)
