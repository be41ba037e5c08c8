from copy import deepcopy
from re import escape

import pytest
import torch
from torch import nn

from magep_fast import GroupElement, WeightFeatures, WeightSpace, from_modules, to_modules
from tests.helpers import assert_same, random_features

SPACE = WeightSpace((2, 5, 4, 3))
KERNELS = WeightSpace((2, 5, 4, 3), (9, 4, 1))


class Sine(nn.Module):
    def forward(self, x):
        return torch.sin(x)


def mlp(activation):
    return nn.Sequential(nn.Linear(3, 7), activation, nn.Linear(7, 6), activation, nn.Linear(6, 2))


def pooled_cnn():
    return nn.Sequential(
        nn.Conv2d(2, 5, 3), nn.ReLU(), nn.Conv2d(5, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(4, 3),
    )  # fmt: skip


def flattened_cnn():
    return nn.Sequential(nn.Conv2d(2, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(5 * 36, 6), nn.ReLU(), nn.Linear(6, 3))


@pytest.mark.parametrize(
    ("network", "input_shape", "kind"),
    [
        (mlp(nn.ReLU()), (10, 3), "positive"),
        (mlp(nn.Tanh()), (10, 3), "sign"),
        (mlp(Sine()), (10, 3), "sign"),
        (mlp(nn.GELU()), (10, 3), "permutation"),
        (pooled_cnn(), (10, 2, 8, 8), "positive"),
        (flattened_cnn(), (10, 2, 8, 8), "positive"),
    ],
)
def test_network_computes_the_same_function_after_the_action(network, input_shape, kind):
    network = network.double()
    x = torch.randn(input_shape, dtype=torch.float64)
    before = network(x)
    features = from_modules(network)
    moved = GroupElement.sample(features.space, kind) @ features
    to_modules(moved, network)
    for old, new in zip(features.tensors()[:-1], moved.tensors()[:-1], strict=True):
        assert (old - new).abs().max() > 1e-3
    torch.testing.assert_close(network(x), before, rtol=0, atol=1e-10)


def test_wrong_kind_changes_the_function():
    network = mlp(nn.Tanh()).double()
    moved = deepcopy(network)
    features = from_modules(network)
    to_modules(GroupElement.sample(features.space, "positive") @ features, moved)
    x = torch.randn(10, 3, dtype=torch.float64)
    assert (network(x) - moved(x)).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["positive", "sign", "permutation"])
@pytest.mark.parametrize("space", [SPACE, KERNELS], ids=repr)
@pytest.mark.parametrize("batch_size", [None, 3])
def test_elements_form_a_group(kind, space, batch_size):
    features = random_features(space, batch_size=3)
    g, h = (GroupElement.sample(space, kind, batch_size=batch_size) for _ in range(2))
    assert_same((g @ h) @ features, g @ (h @ features), 1e-14)
    assert_same(g.inverse() @ (g @ features), features, 1e-14)
    assert_same((g @ g.inverse()) @ features, features, 1e-14)


def test_one_element_composes_with_one_per_network():
    features = random_features(SPACE, batch_size=3)
    shared, individual = GroupElement.sample(SPACE), GroupElement.sample(SPACE, batch_size=3)
    for g, h in ((shared, individual), (individual, shared)):
        assert_same((g @ h) @ features, g @ (h @ features), 1e-14)


def test_inputs_and_outputs_stay_in_place():
    features = random_features(WeightSpace((3, 2)))
    assert_same(GroupElement.sample(features.space) @ features, features)
    deeper = random_features(SPACE)
    assert torch.equal((GroupElement.sample(SPACE) @ deeper).biases[-1], deeper.biases[-1])


@pytest.mark.parametrize("space", [SPACE, KERNELS], ids=repr)
def test_one_element_per_network_acts_network_by_network(space):
    features = random_features(space, batch_size=3)
    g = GroupElement.sample(space, batch_size=3)
    elements = [GroupElement(tuple(s[b] for s in g.sources), tuple(s[b] for s in g.scales)) for b in range(3)]
    assert_same(g @ features, WeightFeatures.cat(element @ features[b] for b, element in enumerate(elements)))


def test_action_is_by_monomial_matrices():
    features = random_features(SPACE, channels=1, batch_size=1)
    g = GroupElement.sample(SPACE)
    eye = [torch.eye(n, dtype=torch.float64) for n in SPACE.widths]
    hidden = [scale[:, None] * one[source] for one, source, scale in zip(eye[1:-1], g.sources, g.scales, strict=True)]
    matrices = [eye[0], *hidden, eye[-1]]
    weights = (new @ w @ old.inverse() for new, w, old in zip(matrices[1:], features.weights, matrices, strict=False))
    biases = (b @ new.T for new, b in zip(matrices[1:], features.biases, strict=True))
    assert_same(g @ features, WeightFeatures(weights, biases), 1e-14)


def test_generator_makes_elements_reproducible():
    first, again, other = (
        GroupElement.sample(SPACE, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )
    features = random_features(SPACE)
    assert_same(first @ features, again @ features)
    assert not torch.equal((first @ features).weights[0], (other @ features).weights[0])


@pytest.mark.parametrize(("scale", "lo", "hi"), [(None, 0.5, 2), ((1, 1e4), 1, 1e4), ((3, 3), 3, 3)])
def test_positive_scales_stay_in_range(scale, lo, hi):
    wide = WeightSpace((1, 500, 1))
    scales = GroupElement.sample(wide, scale=scale).scales[0]
    assert lo <= scales.min() <= lo + 0.05 * (hi - lo) and hi - 0.05 * (hi - lo) <= scales.max() <= hi


def test_sign_and_permutation_scales():
    wide = WeightSpace((1, 500, 1))
    assert set(GroupElement.sample(wide, "sign").scales[0].tolist()) == {-1.0, 1.0}
    assert set(GroupElement.sample(wide, "permutation").scales[0].tolist()) == {1.0}
    assert sorted(GroupElement.sample(wide).sources[0].tolist()) == list(range(500))


def test_element_moves_between_devices():
    moved = GroupElement.sample(SPACE).to("meta")
    assert {x.device.type for x in moved.sources + moved.scales} == {"meta"}


@pytest.mark.parametrize(
    ("space", "options", "message"),
    [
        (SPACE, {"kind": "affine"}, "kind must be one of ('positive', 'sign', 'permutation'); found 'affine'"),
        (SPACE, {"kind": "sign", "scale": (1, 2)}, "scale=(1, 2) only goes with kind='positive'; found kind='sign'"),
        (SPACE, {"scale": (0, 1)}, "scale must be (lo, hi) with 0 < lo <= hi; found (0, 1)"),
        (SPACE, {"scale": (2, 1)}, "scale must be (lo, hi) with 0 < lo <= hi; found (2, 1)"),
        (WeightSpace((2, 5, None, 3)), {}, "n_2 of WeightSpace(2-5-*-3) is open"),
    ],
)
def test_sample_refuses(space, options, message):
    with pytest.raises(ValueError, match=escape(message)):
        GroupElement.sample(space, **options)


@pytest.mark.parametrize(
    ("space", "batch_size", "message"),
    [
        (WeightSpace((2, 5, 3)), None, "this element has 1 hidden layers; the features have 2"),
        (WeightSpace((2, 5, 6, 3)), None, "layer 2: the element acts on 6 neurons; the features have 4"),
        (SPACE, 5, "an element for each of 5 networks cannot act on a batch of 2"),
    ],
)
def test_action_refuses_other_features(space, batch_size, message):
    with pytest.raises(ValueError, match=escape(message)):
        GroupElement.sample(space, batch_size=batch_size) @ random_features(SPACE)


def test_composition_and_action_refuse_other_things():
    with pytest.raises(ValueError, match="cannot compose elements of 2 and 1 hidden layers"):
        GroupElement.sample(SPACE) @ GroupElement.sample(WeightSpace((2, 5, 3)))
    with pytest.raises(TypeError, match="unsupported operand"):
        GroupElement.sample(SPACE) @ 2.0
