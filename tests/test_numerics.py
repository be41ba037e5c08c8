"""The figures of docs/numerics.md: rounding, and how far neurons can be rescaled before invariance suffers."""

import pytest
import torch

from magep_fast import MagepInvariant, WeightFeatures, WeightSpace
from tests.helpers import random_features

SPACES = [WeightSpace(widths) for widths in ((1, 16, 16, 16, 10), (2, 32, 32, 1), (16, *(64,) * 7, 10))]


def distance(found, expected):
    return ((found.double() - expected.double()).abs().max() / expected.double().abs().max()).item()


def rescaled(features, span):
    """Every hidden neuron scaled by a factor between 1 and `span`, evenly in its logarithm."""
    widths = features.space.widths
    ends = [torch.ones(n, dtype=features.dtype) for n in (widths[0], widths[-1])]
    factors = [ends[0], *(span ** torch.rand(n, dtype=features.dtype) for n in widths[1:-1]), ends[1]]
    return WeightFeatures(
        (w * factors[i + 1][:, None] / factors[i] for i, w in enumerate(features.weights)),
        (b * factors[i + 1] for i, b in enumerate(features.biases)),
    )


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize(
    ("dtype", "rounding", "spans", "drift"),
    [
        (torch.float32, 3e-6, (1e4, 1e12, 1e20), 2e-6),
        (torch.bfloat16, 5e-3, (1e4, 1e12, 1e20), 1e-2),
        (torch.float16, 1e-3, (1e4,), 2e-3),
    ],
)
def test_rounding_and_range(space, dtype, rounding, spans, drift):
    features = random_features(space, channels=16, batch_size=4)
    layer = MagepInvariant(space, 16, 16, dtype=dtype)
    exact = MagepInvariant(space, 16, 16, dtype=torch.float64)
    exact.load_state_dict(layer.state_dict())
    answers = layer(features.to(dtype))
    assert distance(answers, exact(features.to(dtype).to(torch.float64))) < rounding
    for span in spans:
        assert distance(layer(rescaled(features, span).to(dtype)), answers) < drift


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_repeated_call_gives_the_same_bits(dtype):
    features = random_features(SPACES[0], channels=16, batch_size=4, dtype=dtype)
    layer = MagepInvariant(SPACES[0], 16, 16, dtype=dtype)
    runs = []
    for _ in range(3):
        answers = layer(features)
        runs.append([answers, *torch.autograd.grad(answers.sum(), list(layer.parameters()))])
    for first, *others in zip(*runs, strict=True):
        assert all(torch.equal(first, other) for other in others)
