from copy import deepcopy
from re import escape

import pytest
import torch
from torch import nn

from magep_fast import WeightSpace, from_modules, to_modules
from tests.helpers import assert_same


def mlp(bias=True, hidden=5):
    return nn.Sequential(nn.Linear(3, hidden, bias), nn.Tanh(), nn.Linear(hidden, 2, bias))


def cnn():
    return nn.Sequential(nn.Conv2d(2, 4, (3, 2)), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 6, 3))


@pytest.mark.parametrize("make", [mlp, cnn])
def test_round_trip(make):
    networks = [make() for _ in range(3)]
    features = from_modules(networks)
    assert features.space == WeightSpace.of(networks[0])
    assert (features.batch_size, features.channels) == (3, 1)
    others = [make() for _ in range(3)]
    to_modules(features, others)
    for network, other in zip(networks, others, strict=True):
        for x, y in zip(network.parameters(), other.parameters(), strict=True):
            assert torch.equal(x, y)


def test_taps_join_the_channels():
    network = cnn()
    conv, dense = network[0], network[3]
    features = from_modules(network)
    for row in range(3):
        for column in range(2):
            assert torch.equal(features.weights[0][0, 2 * row + column], conv.weight[:, :, row, column])
    for position in range(6):
        assert torch.equal(features.weights[1][0, position], dense.weight[:, position::6])


def test_features_do_not_share_memory_with_the_modules():
    network = mlp()
    features = from_modules(network)
    before = features.map(torch.clone)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
    assert_same(features, before)


def test_one_module_is_a_batch_of_one():
    network = mlp()
    assert_same(from_modules(network), from_modules([network]))
    other = mlp()
    to_modules(from_modules(network), other)
    assert_same(from_modules(other), from_modules(network))


def test_layer_without_bias_has_a_zero_bias():
    network = mlp(bias=False)
    features = from_modules(network)
    assert not any(b.any() for b in features.biases)
    other = mlp(bias=False)
    to_modules(features, other)
    assert_same(from_modules(other), features)
    with pytest.raises(ValueError, match="layer '0' has no bias but the features of network 0 have one"):
        to_modules(from_modules(mlp()), network)


def test_from_modules_refuses_an_empty_list():
    with pytest.raises(ValueError, match="from_modules needs at least one network"):
        from_modules([])


def test_from_modules_refuses_mixed_architectures():
    message = "network 1 is WeightSpace(3-6-2); expected WeightSpace(3-5-2) as network 0"
    with pytest.raises(ValueError, match=escape(message)):
        from_modules([mlp(), mlp(hidden=6)])


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ([mlp()], "2 networks of features cannot be written into 1 modules"),
        ([mlp(), nn.Linear(3, 2)], "WeightSpace(3-2) has 1 layers; the features have 2"),
        ([mlp(), mlp(hidden=6)], "layer 1: weights are (2, 1, 5, 3); expected (2, 1, 6, 3)"),
    ],
)
def test_to_modules_refuses_other_targets(targets, message):
    with pytest.raises(ValueError, match=escape(message)):
        to_modules(from_modules([mlp(), mlp()]), targets)


def test_to_modules_takes_one_channel():
    features = from_modules(mlp()).map(lambda x: torch.cat([x, x], dim=1))
    with pytest.raises(ValueError, match="expected features of 1 channels; found 2"):
        to_modules(features, mlp())


def test_refused_features_leave_the_modules_untouched():
    network = mlp(bias=False)
    before = deepcopy(network.state_dict())
    with pytest.raises(ValueError, match="has no bias"):
        to_modules(from_modules(mlp()), network)
    for name, value in network.state_dict().items():
        assert torch.equal(value, before[name])
