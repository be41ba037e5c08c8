import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.library import opcheck

from magep_fast import WeightFeatures, WeightSpace
from magep_fast.ops import chain
from magep_fast.ops.library import missing_library
from tests.helpers import BACKENDS, random_features

SPACES = [WeightSpace(widths) for widths in [(3, 2), (2, 5, 3), (3, 1, 4, 2), (1, 17, 9, 33, 8), (2, 3, 4, 5, 3, 2)]]


def flat(features, backend):
    prefixes, suffixes = chain(features, backend)
    return [*prefixes, *suffixes]


@pytest.mark.parametrize("space", SPACES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_chain_is_the_product_of_weights_and_biases(space, backend):
    features = random_features(space, 3, 2, torch.float64)
    W, b, L = features.weights, features.biases, space.num_layers
    prefixes, suffixes = chain(features, backend)
    for i in range(1, L + 1):
        product, columns = torch.eye(space.widths[i], dtype=torch.float64), []
        for t in range(i - 1, 0, -1):
            product = product @ W[t]
            columns.insert(0, product @ b[t - 1].unsqueeze(-1))
        expected = torch.cat([product @ W[0], *columns], dim=-1)
        torch.testing.assert_close(prefixes[i - 1], expected.expand_as(prefixes[i - 1]))
    assert len(suffixes) == L - 1
    product = W[-1]
    for t in range(L - 1, 0, -1):
        torch.testing.assert_close(suffixes[t - 1], product)
        product = product @ W[t - 1]
    torch.testing.assert_close(prefixes[-1][..., : space.n_in], product)


@pytest.mark.parametrize("backend", BACKENDS)
def test_derivatives(backend):
    features = random_features(WeightSpace((2, 3, 4, 2)), 2, 2, torch.float64)
    tensors = [x.requires_grad_() for x in features.tensors()]

    def function(*x):
        return tuple(flat(WeightFeatures(x[:3], x[3:]), backend))

    assert gradcheck(function, tensors)
    assert gradgradcheck(function, tensors)


def test_taps_are_refused():
    features = random_features(WeightSpace((2, 3, 2), taps=(4, 1)), 1, 2, torch.float64)
    with pytest.raises(ValueError, match="one weight per connection"):
        chain(features)


@pytest.mark.skipif(missing_library() is not None, reason=f"no native library: {missing_library()}")
@pytest.mark.parametrize("requires_grad", [False, True])
def test_operators_are_registered_completely(requires_grad):
    features = random_features(WeightSpace((2, 3, 4, 2)), 2, 2, torch.float32)
    weights, biases = (
        [x.requires_grad_(requires_grad) for x in group] for group in (features.weights, features.biases)
    )
    results = flat(features, "cpu")
    opcheck(torch.ops.magep_fast.chain.default, (weights, biases))
    grads = [torch.randn_like(x) for x in results]
    opcheck(torch.ops.magep_fast.chain_backward.default, (grads, weights, biases))
