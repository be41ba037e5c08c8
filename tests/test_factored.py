import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from magep_fast import MagepEquivariant, MagepInvariant, WeightSpace
from magep_fast.factored import prefix_chain, suffix_chain
from tests.helpers import assert_same, gradients, random_features


class CountOps(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def count_ops(kind, num_layers):
    space = WeightSpace((2, *(4,) * (num_layers - 1), 3))
    layer = kind(space, 2, 2, backend="torch", dtype=torch.float64)
    features = random_features(space)
    with CountOps() as ops:
        gradients(layer, features)
    return ops.count


@pytest.mark.parametrize("kind", [MagepEquivariant, MagepInvariant])
def test_every_layer_of_a_network_costs_the_same_number_of_ops(kind):
    count = {L: count_ops(kind, L) for L in (2, 4, 5, 8, 16)}
    per_layer = count[5] - count[4]
    assert count[8] - count[4] == 4 * per_layer
    assert count[16] - count[8] == 8 * per_layer
    assert count[2] < count[4]


def test_chains_are_products_of_the_weights():
    features = random_features(WeightSpace((2, 5, 4, 3)))
    (W_1, W_2, W_3), (b_1, b_2, _) = features.weights, features.biases
    A = prefix_chain(features.weights, features.biases)
    Wb = (W_3 @ W_2 @ b_1.unsqueeze(-1), W_3 @ b_2.unsqueeze(-1))
    assert_same(A[2], torch.cat([W_3 @ W_2 @ W_1, *Wb], dim=-1), 1e-14)
    assert [tuple(x.shape[2:]) for x in A] == [(5, 2), (4, 3), (3, 4)]
    for found, expected in zip(suffix_chain(features.weights), (W_3, W_3 @ W_2), strict=True):
        assert_same(found, expected, 1e-14)
