"""The Triton kernels against the reference: on a GPU where there is one, else in Triton's interpreter.

TRITON_INTERPRET=1 python -m pytest -m gpu
"""

from copy import deepcopy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.library import opcheck

from magep_fast import Activation, MagepEquivariant, MagepInvariant, WeightFeatures, WeightSpace, use_backend
from magep_fast.ops import chain, triton
from tests.helpers import Case, assert_same, random_features, tensors_of
from tests.interpreter import quicken

pytestmark = pytest.mark.gpu
if triton.missing() is not None:
    pytest.skip(triton.missing(), allow_module_level=True)

if triton.interpreted():
    quicken()
    DEVICE, EXACT, TOLERANCE = torch.device("cpu"), torch.float64, 1e-10
else:
    DEVICE, EXACT, TOLERANCE = torch.device("cuda"), torch.float32, 1e-4

from magep_fast.triton_kernels import launch  # noqa: E402

only_on_a_gpu = pytest.mark.skipif(triton.interpreted(), reason="the interpreter has no CUDA graphs")
LAYERS = [MagepEquivariant, MagepInvariant]
every_layer = pytest.mark.parametrize("kind", LAYERS)


@pytest.fixture(autouse=True)
def on_triton(clean_state):
    with use_backend("triton"):
        yield


def make_case(widths, batch_size=2, in_channels=2, out_channels=3):
    return Case(WeightSpace(widths), batch_size, in_channels, out_channels, frozenset({"all"}), seed=0)


def made(case, kind, dtype=EXACT, **options):
    """Layer and features of a case on the device."""
    return case.layer(kind, dtype, **options).to(DEVICE), case.features(dtype).to(DEVICE)


def derivatives(layer, features, seeds=None):
    """Outputs and gradients by all features and parameters, from seeds or from fixed numbers."""
    features = features.map(lambda x: x.detach().requires_grad_())
    outputs = tensors_of(layer(features))
    if seeds is None:
        generator = torch.Generator().manual_seed(1)
        seeds = [torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y) for y in outputs]
    return *outputs, *torch.autograd.grad(outputs, (*features.tensors(), *layer.parameters()), seeds)


def exact_derivatives(layer, features):
    """The same by the reference in float64 on the CPU."""
    with use_backend("reference"):
        return derivatives(deepcopy(layer).cpu().double(), features.to("cpu").to(torch.float64))


def errors(found, exact):
    """The largest error of each tensor, relative to its largest magnitude."""
    for x, y in zip(found, exact, strict=True):
        assert x.shape == y.shape
        difference = (x.cpu().double() - y).abs()
        yield (difference.max() / y.abs().max()).item() if y.numel() and y.any() else x.abs().sum().item()


def assert_exact(layer, features):
    assert max(errors(derivatives(layer, features), exact_derivatives(layer, features))) <= TOLERANCE


@st.composite
def shapes(draw):
    widths = draw(st.lists(st.integers(1, 6), min_size=3, max_size=5))
    sizes = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    return make_case(tuple(widths), *sizes)


# The interpreter takes seconds where a GPU takes microseconds.
FEW, MANY = (5, 10) if triton.interpreted() else (50, 50)


@settings(max_examples=FEW)
@given(case=shapes(), activation=st.sampled_from([None, "relu", "tanh", "sin"]))
def test_equivariant_agrees_with_the_reference(case, activation):
    assert_exact(*made(case, MagepEquivariant, activation=activation))


@settings(max_examples=MANY)
@given(case=shapes())
def test_invariant_agrees_with_the_reference(case):
    assert_exact(*made(case, MagepInvariant))


@every_layer
@pytest.mark.parametrize(
    "case",
    [
        make_case((2, 3, 2), batch_size=0),
        make_case((1, 1, 1), 1, 1, 1),
        make_case((2, 1, 2, 1, 2, 1), 1, 1, 2),
        make_case((1, 2, 2, 1), 1, 17, 18),
    ],
    ids=lambda case: f"{case.space}-{case.batch_size}x{case.in_channels}->{case.out_channels}",
)
def test_edges_agree_with_the_reference(kind, case):
    assert_exact(*made(case, kind))


@every_layer
def test_layers_larger_than_tiles(kind, monkeypatch):
    tiles = launch.Config(e=16, j=16, k=16, short=8, long=16, r=16, y=16, z=2, n=16)
    monkeypatch.setattr(launch, "default_config", lambda problem: tiles)
    assert_exact(*made(make_case((2, 18, 17, 2), 1, 1, 17), kind))


def test_halves_of_a_batch(monkeypatch):
    monkeypatch.setattr(launch, "CACHE", 0)
    layer, features = made(make_case((2, 3, 2, 1), 3, 1, 2), MagepEquivariant)
    assert len(launch.chunks_of(launch.Problem(3, 1, 2, (2, 3, 2, 1), EXACT))) == 2
    assert_exact(layer, features)


@every_layer
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_is_no_worse_than_in_torch_ops(kind, dtype):
    layer, features = made(make_case((2, 6, 5, 3), 1, 2, 3), kind, dtype)
    exact = exact_derivatives(layer, features)
    found = derivatives(layer, features)
    assert {x.dtype for x in found} == {dtype}
    with use_backend("torch"):
        allowed = [2 * x + 2 * torch.finfo(dtype).eps for x in errors(derivatives(layer, features), exact)]
    for error, limit in zip(errors(found, exact), allowed, strict=True):
        assert error <= limit


@pytest.mark.parametrize("widths", [(2, 3, 4), (2, 3, 4, 3, 2)])
def test_chain_agrees_with_the_reference(widths):
    features = random_features(WeightSpace(widths), 2, 2, EXACT).to(DEVICE)

    def results(backend):
        inputs = [x.detach().requires_grad_() for x in features.tensors()]
        L = len(widths) - 1
        prefixes, suffixes = chain(WeightFeatures(inputs[:L], inputs[L:]), backend)
        outputs = [*prefixes, *suffixes]
        seeds = [torch.linspace(-1, 1, y.numel(), dtype=EXACT, device=DEVICE).view(y.shape) for y in outputs]
        return *outputs, *torch.autograd.grad(outputs, inputs, seeds, allow_unused=True, materialize_grads=True)

    for x, y in zip(results("triton"), results("reference"), strict=True):
        assert_same(x, y, TOLERANCE)


@every_layer
@pytest.mark.parametrize(("terms", "widths"), [("linear", (2, 3, 2)), ("all", (3, 2)), ({"W", "WW"}, (2, 3, 2))])
def test_tables_without_kernels_run_in_torch_ops(kind, terms, widths):
    space = WeightSpace(widths)
    layer = kind(space, 2, 3, terms=terms, dtype=EXACT, device=DEVICE)
    features = random_features(space, 2, 2, EXACT).to(DEVICE)
    found = layer(features)
    with use_backend("torch"):
        assert_same(found, layer(features))


def layouts(x):
    yield torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
    yield x.transpose(0, -1).contiguous().transpose(0, -1)


@every_layer
def test_memory_layout_of_features_does_not_matter(kind):
    layer, features = made(make_case((2, 3, 2)), kind)
    expected = layer(features)
    for k in range(2):
        assert_same(layer(features.map(lambda x, k=k: list(layouts(x))[k])), expected)


@every_layer
def test_repeated_runs_are_bitwise_equal(kind):
    layer, features = made(make_case((2, 3, 2, 1), 2, 1, 2), kind, torch.float32)
    for x, y in zip(derivatives(layer, features), derivatives(layer, features), strict=True):
        assert torch.equal(x, y)


@every_layer
def test_uninitialised_memory_does_not_matter(kind):
    layer, features = made(make_case((2, 3, 2, 1), 2, 1, 2), kind)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(7, device=DEVICE).isnan().all()
        found = derivatives(layer, features)
    finally:
        torch.use_deterministic_algorithms(False)
    assert max(errors(found, exact_derivatives(layer, features))) <= TOLERANCE


@every_layer
def test_second_derivatives_agree_with_torch_ops(kind):
    layer, features = made(make_case((2, 3, 2), 1, 2, 2), kind)
    features = features.map(lambda x: x.requires_grad_())
    inputs = (*features.tensors(), *layer.parameters())

    def second():
        loss = sum(x.square().sum() for x in tensors_of(layer(features)))
        first = torch.autograd.grad(loss, inputs, create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in first), inputs)

    found = second()
    with use_backend("torch"):
        expected = second()
    for x, y in zip(found, expected, strict=True):
        assert_same(x, y, TOLERANCE)


def test_transforms_run_in_torch_ops():
    layer, features = made(make_case((2, 3, 2)), MagepInvariant)

    def function(w):
        return layer(WeightFeatures([w, *features.weights[1:]], features.biases))

    gradient = torch.func.grad(lambda w: function(w).square().sum())
    found = gradient(features.weights[0])
    with use_backend("torch"):
        assert_same(found, gradient(features.weights[0]), TOLERANCE)


def test_inference_keeps_nothing_and_trains_on_demand():
    layer, features = made(make_case((2, 3, 2)), MagepEquivariant, activation="sin")
    with torch.no_grad():
        expected = layer(features)
    assert_same(layer(features), expected)


SPACE = WeightSpace((2, 3, 2))


def small_model():
    model = nn.Sequential(
        MagepEquivariant(SPACE, 2, 3, activation="relu"),
        Activation(nn.ReLU(), kind="positive"),
        MagepInvariant(SPACE, 3, 2),
    )
    return model.to(DEVICE)


def parameter_gradients(model, call, features):
    loss = call(features).square().sum()
    return loss, *torch.autograd.grad(loss, tuple(model.parameters()))


def test_compiled_gradients_equal_eager_ones():
    model, features = small_model(), random_features(SPACE, dtype=torch.float32).to(DEVICE)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    found, expected = parameter_gradients(model, compiled, features), parameter_gradients(model, model, features)
    for x, y in zip(found, expected, strict=True):
        assert_same(x, y, 1e-6)


def test_exported_model_computes_the_same():
    model, features = small_model(), random_features(SPACE, dtype=torch.float32).to(DEVICE)
    exported = torch.export.export(model, (features,))
    names = [str(node.target) for node in exported.graph.nodes]
    assert any("magep_fast.triton_equivariant" in name for name in names)
    other = random_features(SPACE, dtype=torch.float32).to(DEVICE)
    assert_same(exported.module()(other), model(other), 1e-6)


def operator_arguments(kind, requires_grad):
    layer, features = made(make_case((2, 3, 2), 1, 2, 2), kind, torch.float32)
    matrices = [getattr(layer, output.name) for output in layer.table.outputs]
    weights, biases, matrices, (psi,) = (
        [x.detach().clone().requires_grad_(requires_grad) for x in group]
        for group in (features.weights, features.biases, matrices, [layer.psi])
    )
    return weights, biases, matrices, psi


def test_operators_are_registered_completely():
    ops = torch.ops.magep_fast
    weights, biases, matrices, psi = operator_arguments(MagepEquivariant, True)
    opcheck(ops.triton_equivariant.default, (weights, biases, matrices, psi, 2, 2, True))
    opcheck(ops.triton_chain.default, (weights, biases))
    weights, biases, (matrix,), psi = operator_arguments(MagepInvariant, True)
    opcheck(ops.triton_invariant.default, (weights, biases, matrix, psi))


@pytest.mark.parametrize(
    ("position", "index", "change", "message"),
    [
        (0, 1, lambda x: x[..., 1:], r"weights\[1\] must have shape \[1, 2, 2, 3\]"),
        (0, 0, lambda x: x[0], r"weights\[0\] must have rank 4; found 3"),
        (1, 0, lambda x: x.half(), r"biases\[0\] .* dtype torch.float32 .*; found .* dtype torch.float16"),
        (2, 0, lambda x: x[:, 1:], r"matrices\[0\] must have shape"),
        (0, None, lambda x: x[:-1], "as many weights as biases"),
        (2, None, lambda x: x[:-1], "expected 4 matrices; found 3"),
        (3, None, lambda x: x[1:], "psi must have shape"),
    ],
)
def test_operators_refuse(position, index, change, message):
    given = list(operator_arguments(MagepEquivariant, False))
    if index is None:
        given[position] = change(given[position])
    else:
        given[position] = list(given[position])
        given[position][index] = change(given[position][index])
    with pytest.raises(RuntimeError, match=f"magep_fast::triton_equivariant: .*{message}"):
        torch.ops.magep_fast.triton_equivariant(*given, 2, 0, False)


@only_on_a_gpu
def test_tf32_is_used_only_where_torch_allows_it():
    layer, features = made(make_case((2, 40, 40, 3), 4, 32, 32), MagepEquivariant, torch.float32)
    exact = exact_derivatives(layer, features)
    plain = max(errors(derivatives(layer, features), exact))
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        allowed = max(errors(derivatives(layer, features), exact))
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert plain < 1e-5 < allowed < 1e-2


@only_on_a_gpu
@every_layer
def test_training_is_captured_in_a_graph(kind):
    layer, features = made(make_case((2, 8, 8, 3), 4, 16, 16), kind, torch.float32)
    for _ in range(3):
        expected = derivatives(layer, features)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = derivatives(layer, features, [torch.ones_like(y) for y in tensors_of(layer(features))])
    graph.replay()
    expected = derivatives(layer, features, [torch.ones_like(y) for y in tensors_of(layer(features))])
    for x, y in zip(found, expected, strict=True):
        assert_same(x, y)
