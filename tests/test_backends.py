import pytest
import torch
from hypothesis import given
from torch.autograd import gradcheck, gradgradcheck

from magep_fast import MagepEquivariant, MagepInvariant, WeightFeatures, WeightSpace, available_backends, use_backend
from magep_fast.ops import backends
from magep_fast.ops.backends import Backend, choose_backend, register_backend
from tests.helpers import BACKENDS, Case, assert_same, cases, gradients, random_features, tensors_of

CPU = torch.device("cpu")
every_layer = pytest.mark.parametrize("kind", [MagepEquivariant, MagepInvariant])
every_backend = pytest.mark.parametrize("backend", BACKENDS)
other_backends = pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "reference"])


def chosen(requested="auto", dtype=torch.float32):
    return choose_backend(requested, CPU, dtype).name


@pytest.fixture
def registered(monkeypatch):
    """Registers backends for the length of a test."""
    monkeypatch.setattr(backends, "_backends", dict(backends._backends))

    def register(name, **options):
        register_backend(Backend(name, chain=None, equivariant=None, invariant=None, **options))

    return register


def test_portable_backends_are_always_available():
    assert {"reference", "torch"} <= set(available_backends())


def test_use_backend_sets():
    use_backend("reference")
    assert chosen() == "reference"
    use_backend("auto")
    assert chosen() != "reference"


def test_use_backend_nests_and_restores():
    with use_backend("reference"):
        with use_backend("torch"):
            assert chosen() == "torch"
        assert chosen() == "reference"
        with use_backend("auto"):
            assert chosen("torch") == "torch"
        with pytest.raises(ZeroDivisionError), use_backend("torch"):
            raise ZeroDivisionError
        assert chosen("torch") == "reference"
    assert chosen("torch") == "torch"


def test_precedence(monkeypatch):
    automatic = chosen()
    assert automatic != "reference"
    monkeypatch.setenv("MAGEP_FAST_BACKEND", "reference")
    assert chosen() == "reference"
    assert chosen("torch") == "torch"
    with use_backend("reference"):
        assert chosen("torch") == "reference"
    monkeypatch.setenv("MAGEP_FAST_BACKEND", "auto")
    assert chosen() == automatic


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_automatic_choice_is_never_the_reference(dtype):
    assert chosen(dtype=dtype) != "reference"


def test_automatic_choice_is_the_last_that_fits(registered):
    registered("fast")
    assert chosen() == "fast"
    registered("faster", unsupported=lambda device, dtype: None if dtype == torch.float64 else "float64 only")
    assert (chosen(dtype=torch.float64), chosen(dtype=torch.float32)) == ("faster", "fast")
    registered("absent", missing=lambda: "no such device")
    assert chosen() == "fast" and "absent" not in available_backends()
    with pytest.raises(RuntimeError, match=r"backend 'faster' cannot take torch.float32 tensors on cpu: float64 only"):
        chosen("faster")
    with pytest.raises(RuntimeError, match=r"backend 'absent' cannot run here: no such device. Available: "):
        use_backend("absent")


def test_layers_obey_the_choice(registered, monkeypatch):
    calls = []

    def spy(table, weights, biases, matrix, psi):
        calls.append(weights)
        return matrix.new_zeros(biases[0].shape[0], table.out_channels)

    register_backend(Backend("spy", chain=None, equivariant=None, invariant=spy, automatic=False))
    space = WeightSpace((2, 4, 3))
    features = random_features(space, dtype=torch.float32)
    plain, spying = MagepInvariant(space, 2, 1), MagepInvariant(space, 2, 1, backend="spy")
    plain(features)
    assert len(calls) == 0
    spying(features)
    assert len(calls) == 1
    with use_backend("spy"):
        plain(features)
    assert len(calls) == 2
    monkeypatch.setenv("MAGEP_FAST_BACKEND", "spy")
    plain(features)
    assert len(calls) == 3
    with use_backend("torch"):
        spying(features)
    assert len(calls) == 3


@pytest.mark.parametrize("choose", [use_backend, chosen])
def test_unknown_backend_is_an_error(choose):
    with pytest.raises(ValueError, match=r"unknown backend 'fpga'; expected 'auto' or one of .'reference', 'torch'"):
        choose("fpga")
    assert chosen("torch") == "torch"


def test_unknown_backend_in_the_environment_is_an_error(monkeypatch):
    monkeypatch.setenv("MAGEP_FAST_BACKEND", "fpga")
    with pytest.raises(ValueError, match=r"unknown backend 'fpga'"):
        chosen()


def assert_agrees_with_reference(layer, features, backend, tolerance):
    with use_backend("reference"):
        expected_output, expected = gradients(layer, features)
    with use_backend(backend):
        output, found = gradients(layer, features)
    assert_same(output, expected_output, tolerance)
    for x, y in zip(found, expected, strict=True):
        assert_same(x, y, tolerance)


@every_layer
@other_backends
@given(case=cases())
def test_agrees_with_the_reference(kind, backend, case):
    assert_agrees_with_reference(case.layer(kind), case.features(), backend, 1e-10)


@every_layer
@other_backends
@pytest.mark.parametrize("widths", [(2, 16, 16, 1), (3, 24, 24, 24, 10), (5, 2), (1, 33, 1)])
def test_agrees_with_the_reference_in_float32(kind, backend, widths):
    case = Case(WeightSpace(widths), 4, 6, 5, frozenset({"linear", "inter-layer"}), 0)
    layer, features = case.layer(kind, torch.float32), case.features(torch.float32)
    assert_agrees_with_reference(layer, features, backend, 1e-5)


@every_backend
@every_layer
@pytest.mark.parametrize("check", [gradcheck, gradgradcheck])
def test_derivatives(backend, kind, check):
    space = WeightSpace((2, 3, 2, 1))
    case = Case(space, 2, 2, 1, frozenset({"all"}), 0)
    layer, features = case.layer(kind, backend=backend), case.features()
    names = [name for name, _ in layer.named_parameters()]
    L = space.num_layers

    def function(*inputs):
        parameters = dict(zip(names, inputs[2 * L :], strict=True))
        x = WeightFeatures(inputs[:L], inputs[L : 2 * L])
        return tensors_of(torch.func.functional_call(layer, parameters, (x,)))

    inputs = (*features.tensors(), *layer.parameters())
    assert check(function, [x.detach().requires_grad_() for x in inputs])


@pytest.mark.parametrize(
    ("features_dtype", "layer_dtype"), [(torch.float64, torch.float32), (torch.float32, torch.float64)]
)
def test_autocast_does_not_mix_float64(features_dtype, layer_dtype):
    space = WeightSpace((2, 4, 3))
    layer = MagepInvariant(space, 2, 3, dtype=layer_dtype)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="layer's parameters are"):
        layer(random_features(space, 2, 2, features_dtype))
