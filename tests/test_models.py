from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from magep_fast import GroupElement, WeightFeatures, WeightSpace, from_modules
from magep_fast.models import (
    CIFAR10,
    MNIST,
    CnnGeneralization,
    FashionClassification,
    InrClassification,
    StyleEditing,
    UnitPaths,
)
from tests.helpers import BACKENDS, assert_same, random_features

CNN = WeightSpace((1, 16, 16, 16, 10), (9, 9, 9, 1))
GRAY = WeightSpace((2, 32, 32, 1))
COLOUR = WeightSpace((2, 32, 32, 3))


def count(model):
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize(
    ("config", "space", "millions"),
    [
        (CnnGeneralization(activation="relu"), CNN, 0.99),
        (CnnGeneralization(activation="tanh"), CNN, 0.99),
        (InrClassification(channels=128, fourier=256), GRAY, 4.1),
        (InrClassification(channels=64, fourier=256), COLOUR, 3.4),
        (FashionClassification(), GRAY, 4.9),
        (StyleEditing(), GRAY, 4.1),
        (StyleEditing(), COLOUR, 4.1),
    ],
    ids=lambda x: type(x).__name__,
)
def test_parameter_counts_are_the_paper_s(config, space, millions):
    assert count(config.build(space)) == pytest.approx(millions * 1e6, rel=0.02)


def test_with_frozen_connections_the_cnn_model_has_as_many_parameters_as_the_authors():
    model = CnnGeneralization(learn_psi=False).build(CNN)
    connections = model[3].psi.numel()  # the authors train those of the invariant layer
    assert count(model) + connections == 998_121


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("activation", "kind"), [("relu", "positive"), ("tanh", "sign")])
def test_cnn_model_is_invariant_to_its_group(activation, kind, backend):
    space = WeightSpace((1, 6, 5, 4, 3), (9, 9, 9, 1))
    model = CnnGeneralization(activation=activation, channels=4, hidden=8, backend=backend).build(space).double()
    features = random_features(space, channels=1)
    g = GroupElement.sample(space, kind, batch_size=2)
    y = model(features)
    assert y.shape == (2, 1) and ((y > 0) & (y < 1)).all()
    assert_same(model(g @ features), y, 1e-10)


@pytest.mark.parametrize(
    "config", [InrClassification(channels=4, hidden=8), FashionClassification(channels=4, hidden=8)]
)
def test_classifiers_are_invariant_to_signs(config):
    model = config.build(GRAY).double().eval()
    features = random_features(GRAY, channels=1)
    g = GroupElement.sample(GRAY, "sign", batch_size=2)
    y = model(features)
    assert y.shape == (2, 10)
    assert_same(model(g @ features), y, 1e-8)


def test_fourier_features_of_raw_weights_leave_permutations_only():
    model = InrClassification(channels=4, hidden=8, fourier=16).build(GRAY).double().eval()
    features = random_features(GRAY, channels=1)
    y = model(features)
    assert_same(model(GroupElement.sample(GRAY, "permutation") @ features), y, 1e-10)
    assert (model(GroupElement.sample(GRAY, "sign") @ features) - y).abs().max() > 1e-3 * y.abs().max()


def test_editing_starts_near_the_input_and_is_equivariant():
    model = StyleEditing(np_channels=8).build(COLOUR).double()
    features = random_features(COLOUR, channels=1)
    edited = model(features)
    g = GroupElement.sample(COLOUR, "permutation", batch_size=2)
    assert_same(model(g @ features), g @ edited, 1e-8)
    for x, y in zip(edited.tensors(), features.tensors(), strict=True):
        assert 0 < (x - y).abs().max() < 0.1 * y.abs().max()


@pytest.mark.parametrize(
    "config",
    [InrClassification(channels=2, hidden=4, fourier=8), FashionClassification(channels=2), StyleEditing(channels=2)],
)
def test_the_scale_of_fourier_features_is_that_of_their_frequencies(config):
    def projections(scale):
        torch.manual_seed(0)
        model = replace(config, fourier_scale=scale).build(GRAY)
        return next(x for name, x in model.named_buffers() if name.endswith("projections"))

    torch.testing.assert_close(projections(0.5), projections(2.0) / 4)


def fresh_cnns(number):
    return from_modules(
        nn.Sequential(
            *(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)),
        )
        for _ in range(number)
    )


@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_fresh_cnn_model_tells_fresh_cnns_apart(activation):
    features = fresh_cnns(16)

    def spread(init):
        torch.manual_seed(0)
        return CnnGeneralization(activation=activation, init=init).build(CNN)[:-1](features).std().item()

    assert spread("unit") > 1e-3 > spread("xavier_normal")


@pytest.mark.parametrize(("config", "space"), [(MNIST, GRAY), (CIFAR10, COLOUR)])
def test_siren_models_keep_a_sane_scale(config, space):
    model = config.build(space).eval()
    features = random_features(space, channels=1, batch_size=8, dtype=torch.float32)
    invariants = model[:-1](features)
    assert 0.1 < invariants.std() < 10
    assert 0.01 < model(features).std(0).mean() < 5


@pytest.mark.parametrize("backend", BACKENDS)
def test_backends_agree_on_a_training_step(backend):
    features, target = fresh_cnns(4), torch.rand(4, 1)
    found = []
    for name in ("reference", backend):
        torch.manual_seed(0)
        model = CnnGeneralization(backend=name).build(CNN)
        loss = nn.functional.binary_cross_entropy(model(features), target)
        found.append((loss, *torch.autograd.grad(loss, [p for p in model.parameters()])))
    for x, y in zip(*found, strict=True):
        assert (x - y).abs().max() <= 1e-3 * y.abs().max() + 1e-9


def test_unit_paths_of_networks_of_zeros_and_in_16_bits():
    space = WeightSpace((1, 16, 16, 10))
    features = random_features(space, 1, 3, torch.float32).map(lambda x: 30 * x)
    divided, norms = UnitPaths(space)(features)
    with torch.autocast("cpu", torch.bfloat16):
        again, same_norms = UnitPaths(space)(features)
    assert_close(same_norms, norms)
    assert_close(again.weights, divided.weights)
    _, half = UnitPaths(space)(features.to(torch.float16))
    assert_close(half, norms, atol=1e-2, rtol=1e-2)
    nothing, of_nothing = UnitPaths(space)(features.map(torch.zeros_like))
    assert of_nothing.isfinite().all() and all((x == 0).all() for x in nothing.tensors())
    last_is_zero = WeightFeatures(
        (*features.weights[:-1], 0 * features.weights[-1]), (*features.biases[:-1], 0 * features.biases[-1])
    )
    found, of_last = UnitPaths(space)(last_is_zero)
    assert of_last.isfinite().all() and all(x.isfinite().all() for x in found.tensors())


def test_a_network_is_no_space():
    with pytest.raises(TypeError, match=r"the space must be a WeightSpace, .*; found Linear"):
        CnnGeneralization().build(nn.Linear(2, 3))
