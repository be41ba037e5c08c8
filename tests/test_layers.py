import io
import pickle
from copy import deepcopy
from dataclasses import replace
from re import escape

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from magep_fast import (
    Activation,
    GroupElement,
    MagepEquivariant,
    MagepInvariant,
    MonomialEquivariant,
    WeightFeatures,
    WeightSpace,
    check_activation,
)
from magep_fast.activations import FUNCTIONS
from tests.helpers import BACKENDS, assert_same, cases, gradients, random_features, tensors_of

SPACE = WeightSpace((2, 5, 4, 3))
LAYERS = [MagepEquivariant, MagepInvariant]

every_layer = pytest.mark.parametrize("kind", LAYERS)
every_backend = pytest.mark.parametrize("backend", BACKENDS)
groups = st.sampled_from(["positive", "sign", "permutation"])


@every_backend
@given(case=cases(), group=groups)
def test_equivariance(backend, case, group):
    features = case.features()
    layer = case.layer(MagepEquivariant, backend=backend)
    g = GroupElement.sample(case.space, group)
    assert_same(layer(g @ features), g @ layer(features), 1e-9)


@every_backend
@given(case=cases(), group=groups)
def test_invariance(backend, case, group):
    features = case.features()
    layer = case.layer(MagepInvariant, backend=backend)
    g = GroupElement.sample(case.space, group, batch_size=case.batch_size)
    output = layer(features)
    assert output.shape == (case.batch_size, case.out_channels)
    assert_same(layer(g @ features), output, 1e-9)


@every_backend
@given(case=cases(taps=True), group=groups, out_taps=st.integers(1, 3))
def test_equivariance_with_several_weights_per_connection(backend, case, group, out_taps):
    features = case.features()
    layer = MonomialEquivariant(
        case.space, case.in_channels, case.out_channels, out_taps=out_taps, backend=backend, dtype=torch.float64
    )
    g = GroupElement.sample(case.space, group)
    output = layer(features)
    output.check(case.space.with_taps(out_taps), case.out_channels)
    assert_same(layer(g @ features), g @ output, 1e-9)


def test_taps_lead_in_and_back_out():
    kernels = WeightSpace((1, 4, 5, 3), (9, 9, 1))
    layers = nn.Sequential(
        MonomialEquivariant(kernels, 1, 4),
        MagepEquivariant(kernels.with_taps(1), 4, 4),
        MonomialEquivariant(kernels.with_taps(1), 4, 1, out_taps=kernels.taps),
    ).double()
    features = random_features(kernels, channels=1)
    g = GroupElement.sample(kernels)
    assert layers(features).space == kernels
    assert_same(layers(g @ features), g @ layers(features), 1e-12)


def wider(space, by):
    return (space.n_in, *(n + by for n in space.widths[1:-1]), space.n_out)


@every_backend
@given(case=cases(), extra=st.integers(1, 3))
def test_zero_neurons_stay_zero_and_change_nothing_else(backend, case, extra):
    features = case.features()
    layer = replace(case, space=case.space.any_hidden_width()).layer(MagepEquivariant, backend=backend)
    widths = wider(case.space, extra)
    assert_same(layer(features.pad(widths)), layer(features).pad(widths), 1e-12)


@every_backend
@every_layer
@pytest.mark.parametrize(("group", "scale"), [("positive", (1.0, 1e4)), ("sign", None)])
def test_augmented_networks_in_float32(backend, kind, group, scale):
    features = random_features(SPACE, channels=4, batch_size=8, dtype=torch.float32)
    layer = kind(SPACE, 4, 4, backend=backend)
    g = GroupElement.sample(SPACE, group, scale, batch_size=8)
    moved, still = layer(g @ features), layer(features)
    assert_same(moved, g @ still if kind is MagepEquivariant else still, 2e-6)  # a few roundings of 1e-7


@every_layer
@every_backend
def test_empty_batch(kind, backend):
    layer = kind(SPACE, 2, 3, backend=backend)
    output, derivatives = gradients(layer, random_features(SPACE, batch_size=0, dtype=torch.float32))
    assert all(x.shape[0] == 0 for x in tensors_of(output))
    assert not any(x.any() for x in derivatives)


@every_layer
@every_backend
def test_nan_stays_in_its_network(kind, backend):
    layer = kind(SPACE, 2, 3, backend=backend, dtype=torch.float64)
    features = random_features(SPACE, batch_size=4)
    expected = layer(features)
    features.weights[1][2, 0, 0, 0] = torch.nan
    for x, y in zip(tensors_of(layer(features)), tensors_of(expected), strict=True):
        assert x[2].isnan().any()
        assert_same(x[[0, 1, 3]], y[[0, 1, 3]], 1e-14)


LAYOUTS = {
    "transposed": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "strided": lambda x: torch.stack([x, x + 1], dim=-1)[..., 0],
    "batch last": lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0),
    "offset": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
}


@every_layer
@every_backend
@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_layout_does_not_matter(kind, backend, layout):
    layer = kind(SPACE, 2, 3, backend=backend, dtype=torch.float64)
    features = random_features(SPACE)
    assert_same(layer(features.map(LAYOUTS[layout])), layer(features), 1e-14)


@every_layer
@every_backend
def test_expanded_batch(kind, backend):
    layer = kind(SPACE, 2, 3, backend=backend, dtype=torch.float64)
    features = random_features(SPACE, batch_size=1)
    expanded = layer(features.map(lambda x: x.expand(3, *x.shape[1:])))
    expected = layer(features)
    for x, y in zip(tensors_of(expanded), tensors_of(expected), strict=True):
        assert_same(x, torch.cat([y, y, y]), 1e-14)


@every_layer
@pytest.mark.parametrize(
    ("features", "error", "message"),
    [
        (((torch.zeros(1),), (torch.zeros(1),)), TypeError, " takes WeightFeatures; found tuple"),
        (torch.zeros(2, 2), TypeError, " takes WeightFeatures; found Tensor"),
        (
            WeightFeatures([torch.zeros(2, 5, 2)] * 3, [torch.zeros(2, 2, 5)] * 3),
            ValueError,
            "layer 1: weights are (2, 5, 2), of rank 3; expected [batch, channels·taps, n_1, n_0]",
        ),
        (random_features(SPACE, 3, dtype=torch.float32), ValueError, "expected features of 2 channels; found 3"),
        (
            random_features(WeightSpace((2, 5, 6, 3)), dtype=torch.float32),
            ValueError,
            "layer 2: weights are (2, 2, 6, 5); expected (2, 2, 4, 5)",
        ),
        (
            random_features(WeightSpace((2, 5, 3)), dtype=torch.float32),
            ValueError,
            "WeightSpace(2-5-4-3) has 3 layers; the features have 2",
        ),
        (
            random_features(SPACE, dtype=torch.float64),
            ValueError,
            "features are torch.float64 but the layer's parameters are torch.float32: use features.to(torch.float32) "
            "or layer.to(torch.float64)",
        ),
        (
            random_features(SPACE, dtype=torch.float32).to("meta"),
            ValueError,
            "features are on meta but the layer is on cpu: move one",
        ),
    ],
)
def test_layer_refuses(kind, features, error, message):
    with pytest.raises(error, match=escape(message)):
        kind(SPACE, 2, 3)(features)


@every_layer
@pytest.mark.parametrize("stray", [torch.zeros(2, 2, 4).double(), torch.zeros(2, 2, 4, device="meta")])
def test_layer_refuses_a_stray_tensor(kind, stray):
    features = random_features(SPACE, dtype=torch.float32)
    mixed = WeightFeatures(features.weights, (features.biases[0], stray, features.biases[2]))
    with pytest.raises(ValueError, match=f"layer 2: biases are {stray.dtype} on {stray.device}; expected"):
        kind(SPACE, 2, 3)(mixed)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MagepEquivariant(SPACE, 0, 3), "in_channels must be a positive int; found 0"),
        (lambda: MagepEquivariant(SPACE, 2, 1.5), "out_channels must be a positive int; found 1.5"),
        (lambda: MagepInvariant(SPACE, 2, -1), "out_features must be a positive int; found -1"),
        (lambda: MonomialEquivariant(SPACE, 2, 0), "out_channels must be a positive int; found 0"),
        (lambda: MagepEquivariant(SPACE, 2, 3, init="zeros"), "init must be one of ('unit', 'xavier_normal'); found"),
        (lambda: MagepInvariant(SPACE, 2, 3, backend="fpga"), "unknown backend 'fpga'; expected 'auto' or one of"),
        (lambda: MonomialEquivariant(SPACE, 2, 3, out_taps=(1, 2)), "taps must list one number per layer (3)"),
    ],
)
def test_layer_refuses_wrong_arguments(make, message):
    with pytest.raises(ValueError, match=escape(message)):
        make()


@pytest.mark.parametrize("kind", [MagepEquivariant, MonomialEquivariant, MagepInvariant])
def test_layer_refuses_what_is_no_space(kind):
    with pytest.raises(TypeError, match=escape("must be a WeightSpace, such as WeightSpace((1, 16, 10)); found str")):
        kind("1-16", 2, 3)


def unit_ratios(features):
    """Root mean squares relative to freshly initialised networks, layer by layer."""
    for w, b in zip(features.weights, features.biases, strict=True):
        yield (w.square().mean() * w.shape[3]).sqrt().item()
        yield b.square().mean().sqrt().item()


@pytest.mark.parametrize("L", range(2, 17))
def test_unit_initialisation_keeps_the_scale_of_features(L):
    space = WeightSpace((3, *(24,) * (L - 1), 4))
    ratios = list(unit_ratios(MagepEquivariant(space, 8, 8)(random_features(space, 8, 16, torch.float32))))
    assert min(ratios) > 0.7 and max(ratios) < 1.4


@pytest.mark.parametrize("L", range(2, 17))
def test_unit_initialisation_keeps_the_scale_through_three_layers(L):
    space = WeightSpace((3, *(24,) * (L - 1), 4))
    layers = nn.Sequential(*(MagepEquivariant(space, 8, 8) for _ in range(3)))
    ratios = list(unit_ratios(layers(random_features(space, 8, 16, torch.float32))))
    assert min(ratios) > 0.4 and max(ratios) < 2.5


def test_xavier_initialisation():
    layer = MagepEquivariant(SPACE, 64, 64, init="xavier_normal")
    assert layer.coefficient("W", 2).std().item() == pytest.approx((2 / 128) ** 0.5, rel=0.05)
    assert layer.coefficient("W", 3).std().item() == pytest.approx((2 / (128 * 9)) ** 0.5, rel=0.05)
    unit = MagepEquivariant(SPACE, 64, 64)
    L = SPACE.num_layers  # [WW] and [bW] have 1/L² of the variance of [W]
    assert unit.coefficient("W", 2).std().item() == pytest.approx((64 * (1 + 2 / L**2)) ** -0.5, rel=0.05)
    assert unit.coefficient("WW", 2).std().item() == pytest.approx((64 * (L**2 + 2)) ** -0.5, rel=0.05)


def test_reset_parameters_draws_anew():
    layer = MagepEquivariant(SPACE, 2, 3)
    before = deepcopy(layer.state_dict())
    layer.reset_parameters()
    assert not any(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


@every_layer
def test_connections_can_be_frozen(kind):
    layer = kind(SPACE, 2, 3, learn_psi=False)
    assert not layer.psi.requires_grad and "psi" in layer.state_dict()
    assert all(p.requires_grad for name, p in layer.named_parameters() if name != "psi")


def own_function(x):
    return x + x * x


ACCEPTED = {
    "positive": [nn.ReLU(), nn.LeakyReLU(), nn.PReLU(), nn.Identity(), torch.abs],
    "sign": [nn.Tanh(), torch.sin, nn.Softsign(), nn.Identity()],
    "permutation": [nn.ReLU(), nn.Tanh(), nn.GELU(), torch.sin, torch.cos, nn.Sigmoid(), own_function],
}
REFUSED = {
    "positive": [
        (nn.Tanh(), "Tanh"),
        (nn.Sigmoid(), "Sigmoid"),
        (nn.ELU(), "ELU"),
        (nn.GELU(), "GELU"),
        (torch.sin, "sin"),
    ],
    "sign": [(nn.ReLU(), "ReLU"), (torch.abs, "abs"), (torch.cos, "cos"), (own_function, "own_function")],
}


@pytest.mark.parametrize(("kind", "function"), [(kind, f) for kind, fs in ACCEPTED.items() for f in fs])
def test_activation_accepts(kind, function):
    features = random_features(SPACE, dtype=torch.float32)
    assert_same(Activation(function, kind)(features), features.map(function))


@pytest.mark.parametrize(("kind", "function", "name"), [(kind, *f) for kind, fs in REFUSED.items() for f in fs])
def test_activation_refuses(kind, function, name):
    suggestion = {"positive": "nn.ReLU()", "sign": "nn.Tanh()"}[kind]
    message = f"^{name}.* does not respect .* For kind='{kind}' use {escape(suggestion)}"
    with pytest.raises(ValueError, match=message):
        check_activation(kind, function)
    with pytest.raises(ValueError, match=message):
        Activation(function, kind)


def test_activation_refuses_an_unknown_group():
    with pytest.raises(ValueError, match=r"kind must be one of .*'permutation'.; found 'odd'"):
        Activation(nn.ReLU(), "odd")


def test_activation_with_a_slope_per_channel():
    features = random_features(SPACE, channels=3, dtype=torch.float32)
    activation = Activation(nn.PReLU(3), "positive")
    assert_same(activation(features), features.map(activation.function))


def small_model(function=nn.ReLU, kind="positive", backend="auto"):
    """Equivariant layers with an activation between them, then the invariant layer."""
    return nn.Sequential(
        MagepEquivariant(SPACE, 2, 4, backend=backend),
        Activation(function(), kind),
        MagepEquivariant(SPACE, 4, 4, backend=backend),
        Activation(function(), kind),
        MagepInvariant(SPACE, 4, 3, backend=backend),
    )


@every_backend
@pytest.mark.parametrize(("function", "kind"), [(nn.ReLU, "positive"), (nn.Tanh, "sign"), (nn.GELU, "permutation")])
def test_whole_model_respects_the_group(backend, function, kind):
    model = small_model(function, kind, backend).double()
    features = random_features(SPACE)
    g = GroupElement.sample(SPACE, kind)
    assert_same(model[:4](g @ features), g @ model[:4](features), 1e-11)
    assert_same(model(g @ features), model(features), 1e-11)


@every_backend
def test_autocast_gives_one_dtype_throughout(backend):
    model = small_model(backend=backend)
    features = random_features(SPACE, dtype=torch.float32)
    expected = model(features)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden, output = model[:4](features), model(features)
    assert {x.dtype for x in hidden.tensors()} == {output.dtype} == {torch.bfloat16}
    assert_same(output.float(), expected, 0.1)
    output.float().square().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


def test_autocast_leaves_float64_alone():
    model = small_model().double()
    features = random_features(SPACE)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(model(features), model(features))
        assert model(features).dtype == torch.float64


def test_vmap_over_sets_of_batches():
    model = small_model(backend="torch").double()
    sets = [random_features(SPACE) for _ in range(3)]
    stacked = WeightFeatures(
        (torch.stack(layer) for layer in zip(*(f.weights for f in sets), strict=True)),
        (torch.stack(layer) for layer in zip(*(f.biases for f in sets), strict=True)),
    )
    assert_same(torch.func.vmap(model)(stacked), torch.stack([model(f) for f in sets]), 1e-12)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_functional_derivatives_agree_with_autograd():
    layer = MagepInvariant(SPACE, 2, 3, backend="torch", dtype=torch.float64)
    features, direction = random_features(SPACE), random_features(SPACE)

    def loss(x):
        return layer(x).square().sum()

    tracked = features.map(lambda x: x.detach().requires_grad_())
    expected = torch.autograd.grad(loss(tracked), tracked.tensors())
    functional = torch.func.grad(loss)(features)
    _, slope = torch.func.jvp(loss, (features,), (direction,))
    for x, y in zip(functional.tensors(), expected, strict=True):
        assert_same(x, y, 1e-12)
    product = sum((x * y).sum() for x, y in zip(expected, direction.tensors(), strict=True))
    assert_same(slope, product, 1e-12)


def test_functional_derivatives_by_parameters():
    layer = MagepInvariant(SPACE, 2, 3, backend="torch", dtype=torch.float64)
    features = random_features(SPACE)

    def loss(parameters):
        return torch.func.functional_call(layer, parameters, (features,)).square().sum()

    functional = torch.func.grad(loss)(dict(layer.named_parameters()))
    layer(features).square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert_same(functional[name], parameter.grad, 1e-12)


def test_compiled_model_computes_the_same():
    model = small_model(backend="torch")
    features = random_features(SPACE, dtype=torch.float32)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert_same(compiled(features), model(features), 1e-6)


def test_exported_model_computes_the_same():
    model = small_model(backend="torch")
    features = random_features(SPACE, dtype=torch.float32)
    exported = torch.export.export(model, (features,)).module()
    other = random_features(SPACE, dtype=torch.float32)
    assert_same(exported(other), model(other), 1e-6)


def through_pickle(layer):
    return pickle.loads(pickle.dumps(layer))


def through_torch_save(layer):
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    fresh = type(layer)(SPACE, 2, 3)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    return fresh


@pytest.mark.parametrize("copy", [deepcopy, through_pickle, through_torch_save])
@pytest.mark.parametrize("kind", [*LAYERS, MonomialEquivariant])
def test_layers_can_be_copied_and_stored(copy, kind):
    layer = kind(SPACE, 2, 3)
    features = random_features(SPACE, dtype=torch.float32)
    copied = copy(layer)
    assert_same(copied(features), layer(features))
    with torch.no_grad():
        next(copied.parameters()).add_(1)
    assert not torch.equal(next(copied.parameters()), next(layer.parameters()))


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (MagepEquivariant(SPACE, 2, 3), "MagepEquivariant(WeightSpace(2-5-4-3), 2 -> 3, terms='all')"),
        (
            MagepInvariant(SPACE.any_hidden_width(), 2, 3, terms={"bW", "W_prod"}, learn_psi=False, backend="torch"),
            "MagepInvariant(WeightSpace(2-*-*-3), 2 -> 3, terms={W_prod, bW}, learn_psi=False, backend='torch')",
        ),
        (
            MonomialEquivariant(WeightSpace((2, 5, 3), (9, 1)), 1, 4, out_taps=(1, 2)),
            "MonomialEquivariant(WeightSpace(2-5-3, taps=(9, 1)), 1 -> 4, out_taps=(1, 2), terms='linear')",
        ),
        (Activation(torch.sin, "sign"), "Activation(sin, kind='sign')"),
    ],
)
def test_layers_are_readable(module, text):
    assert repr(module) == text


@pytest.mark.parametrize("kind", [*LAYERS, MonomialEquivariant])
def test_layers_can_be_made_on_another_device_and_dtype(kind):
    layer = kind(SPACE, 2, 3, device="meta", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in layer.parameters()} == {("meta", torch.bfloat16)}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", [MagepEquivariant, MonomialEquivariant])
@pytest.mark.parametrize("activation", list(FUNCTIONS))
def test_fused_activation_is_the_activation_after_the_layer(kind, activation, backend):
    torch.manual_seed(0)
    space = WeightSpace((2, 5, 4, 3))
    features = random_features(space, 3)
    layer = kind(space, 3, 4, backend=backend, dtype=torch.float64)
    fused = kind(space, 3, 4, backend=backend, dtype=torch.float64, activation=activation)
    fused.load_state_dict(layer.state_dict())
    expected, expected_gradients = gradients(
        nn.Sequential(layer, Activation(FUNCTIONS[activation], "permutation")), features
    )
    found, found_gradients = gradients(fused, features)
    assert_same(found, expected, 1e-12)
    for x, y in zip(found_gradients, expected_gradients, strict=True):
        assert_same(x, y, 1e-12)
    assert f"activation='{activation}'" in repr(fused)


def test_unknown_activation_is_an_error():
    with pytest.raises(ValueError, match=r"activation must be None or one of .'relu', 'tanh', 'sin'.; found 'gelu'"):
        MagepEquivariant(WeightSpace((2, 5, 3)), 1, 1, activation="gelu")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("widths", [(2, 4, 3), (2, 4, 3, 5, 2)])
def test_shared_Wb_is_one_coefficient_for_all_t(kind, widths, backend):
    space = WeightSpace(widths)
    shared = kind(space, 2, 3, share_Wb=True, backend=backend, dtype=torch.float64)
    separate = kind(space, 2, 3, backend=backend, dtype=torch.float64)
    with torch.no_grad():
        separate.psi.copy_(shared.psi)
        for index, output in enumerate(separate.table.outputs):
            for term in output.terms:
                separate._coefficient(index, term.name).copy_(shared._coefficient(index, term.name))
    features = random_features(space)
    output, grads = gradients(shared, features)
    expected, expected_grads = gradients(separate, features)
    assert_same(output, expected, 1e-12)
    count = 2 * space.num_layers
    for x, y in zip(grads[:count], expected_grads[:count], strict=True):
        assert_same(x, y, 1e-12)
    for index, (x, y) in enumerate(zip(grads[count:-1], expected_grads[count:-1], strict=True)):
        for term in separate.table.outputs[index].terms:
            one = shared.table.outputs[index].coefficient(x, term.name)
            each = separate.table.outputs[index].coefficient(y, term.name)
            assert_same(one, each.sum(2, keepdim=True) if term.name == "Wb" else each, 1e-12)
    assert "share_Wb=True" in repr(shared)


def test_shared_Wb_has_fewer_parameters():
    space = WeightSpace((2, 3, 4, 5, 2))
    for kind in LAYERS:
        full, shared = (kind(space, 3, 2, share_Wb=share) for share in (False, True))
        fewer = sum(p.numel() for p in full.parameters()) - sum(p.numel() for p in shared.parameters())
        readout = 2 * 3 * 2 * 2 * (2 if kind is MagepEquivariant else 1)  # 2 of 3 t: d·n_L columns, e (·n_L) rows
        hidden = 3 * 2 if kind is MagepEquivariant else 0  # 1 of 2 t in layer 3
        assert fewer == readout + hidden


def test_features_are_checked_again_when_anything_about_them_changes():
    layer = MagepInvariant(WeightSpace((2, 3, 1)), 2, 4)
    good = random_features(WeightSpace((2, 3, 1)), 2, 5, torch.float32)
    wide = random_features(WeightSpace((2, 4, 1)), 2, 5, torch.float32)
    for _ in range(2):
        layer(good)
        with pytest.raises(ValueError, match="expected"):
            layer(wide)
        with pytest.raises(ValueError, match="float64"):
            layer(good.to(torch.float64))
    layer(good)
    layer.double()
    with pytest.raises(ValueError, match="float32"):
        layer(good)
    with pytest.raises(ValueError, match="has 2 layers; the features have 0"):
        layer(WeightFeatures([], []))
    with pytest.raises(TypeError, match="must be a tensor"):
        layer(WeightFeatures([None] * 2, [None] * 2))


def test_tracing_with_symbolic_sizes_leaves_nothing_in_the_layer():
    layer = MagepInvariant(WeightSpace((2, None, 1)), 2, 4, backend="torch")
    features = random_features(WeightSpace((2, 3, 1)), 2, 5, torch.float32)
    layer(features)
    trace = make_fx(
        lambda *x: layer(WeightFeatures(x[:2], x[2:])), tracing_mode="symbolic", _allow_non_fake_inputs=True
    )
    graph = trace(*features.tensors())
    pickle.loads(pickle.dumps(layer))
    wider = random_features(WeightSpace((2, 6, 1)), 2, 7, torch.float32)
    torch.testing.assert_close(graph(*wider.tensors()), layer(wider))
