"""The kernels of the GPU backends against the reference: on a GPU where there is one, else `triton` in its interpreter.

TRITON_INTERPRET=1 python -m pytest -m gpu
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from magep_fast import Activation, MagepEquivariant, MagepInvariant, WeightFeatures, WeightSpace, use_backend
from magep_fast.ops import chain
from tests.gpu import (
    DEVICE,
    EXACT,
    MISSING,
    NEEDS_A_GPU,
    ON_HOST,
    TOLERANCE,
    assert_captured_in_a_graph,
    assert_exact,
    derivatives,
    errors,
    exact_derivatives,
    made,
    make_case,
)
from tests.helpers import assert_same, assert_second_derivatives_are_those_of_torch_ops, random_features

pytestmark = pytest.mark.gpu
only_on_a_gpu = pytest.mark.skipif(ON_HOST, reason=NEEDS_A_GPU)
LAYERS = [MagepEquivariant, MagepInvariant]
every_layer = pytest.mark.parametrize("kind", LAYERS)


@pytest.fixture(autouse=True, scope="module", params=sorted(MISSING))
def backend(request):
    """The name of the backend that runs; the whole suite is skipped where it cannot."""
    if MISSING[request.param] is not None:
        pytest.skip(f"{request.param}: {MISSING[request.param]}")
    return request.param


@pytest.fixture(autouse=True)
def on_backend(clean_state, backend):
    with use_backend(backend):
        yield


@st.composite
def shapes(draw):
    widths = draw(st.lists(st.integers(1, 6), min_size=3, max_size=5))
    sizes = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    return make_case(tuple(widths), *sizes)


# The interpreter takes seconds where a GPU takes microseconds.
FEW, MANY = (5, 10) if ON_HOST else (50, 50)


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
    assert_second_derivatives_are_those_of_torch_ops(layer, features, TOLERANCE)


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


def test_exported_model_computes_the_same(backend):
    model, features = small_model(), random_features(SPACE, dtype=torch.float32).to(DEVICE)
    exported = torch.export.export(model, (features,))
    names = [str(node.target) for node in exported.graph.nodes]
    operator = "magep_fast.triton_equivariant" if backend == "triton" else "magep_fast.equivariant"
    assert any(operator in name for name in names)
    other = random_features(SPACE, dtype=torch.float32).to(DEVICE)
    assert_same(exported.module()(other), model(other), 1e-6)


@only_on_a_gpu
@every_layer
def test_training_is_captured_in_a_graph(kind):
    layer, features = made(make_case((2, 8, 8, 3), 4, 16, 16), kind, torch.float32)
    assert_captured_in_a_graph(layer, features)


@only_on_a_gpu
@every_layer
def test_double_precision_is_exact(kind, backend):
    if backend == "triton":
        pytest.skip("triton computes in float64 only in its interpreter")
    layer, features = made(make_case((2, 8, 8, 3), 2, 4, 5), kind, torch.float64)
    assert max(errors(derivatives(layer, features), exact_derivatives(layer, features))) <= 1e-10
