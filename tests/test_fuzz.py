import random
from dataclasses import replace

import pytest
import torch
from torch import nn

from magep_fast import MagepEquivariant, MagepInvariant, MonomialEquivariant, Stack, WeightSpace, use_backend
from magep_fast.activations import FUNCTIONS
from magep_fast.models import mlp
from magep_fast.ops.library import missing_library
from magep_fast.terms import NAMES
from tests.helpers import Case, assert_same, gradients, runs_together, threads

if missing_library() is not None:
    pytest.skip(missing_library(), allow_module_level=True)

NUM_CASES = 2000
CHUNKS = 8


def random_case(seed):
    """Mostly small; now and then a width, a number of channels or of networks beyond a vector, a tile or a group, or
    matrices of the last layer that outweigh the networks, which threads then divide by rows."""
    draw = random.Random(seed)

    def size(usual, rare):
        return draw.randint(1, usual if draw.random() < 0.9 else rare)

    L = draw.randint(1, 5)
    widths = (size(4, 10), *(size(9, 40) for _ in range(L - 1)), draw.choice((1, size(4, 10))))
    channels = size(5, 20), size(5, 20)
    if draw.random() < 0.05:
        widths, channels = (draw.randint(1, 2), *widths[1:-1], draw.randint(8, 12)), (16, draw.randint(12, 20))
    terms = frozenset({"all"}) if draw.random() < 0.9 else frozenset(draw.sample(NAMES, draw.randint(1, len(NAMES))))
    activation = draw.choice((None, *FUNCTIONS))
    return Case(
        WeightSpace(widths),
        size(4, 20),
        *channels,
        terms,
        seed,
        activation=activation,
        share_Wb=draw.random() < 0.3,
    )


def random_taps(case):
    """The case with weights of several taps, in and out."""
    draw, L = random.Random(case.seed), case.space.num_layers
    taps = [draw.randint(1, 4) for _ in range(L)]
    return replace(case, space=case.space.with_taps(taps), out_taps=tuple(draw.randint(1, 3) for _ in range(L)))


@pytest.mark.parametrize("kind", [MagepEquivariant, MonomialEquivariant, MagepInvariant])
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_shapes_agree_with_torch_ops(kind, chunk):
    for seed in range(chunk, NUM_CASES, CHUNKS):
        case = random_taps(random_case(seed)) if kind is MonomialEquivariant else random_case(seed)
        features, layer = case.features(), case.layer(kind)
        with use_backend("torch"):
            expected_output, expected = gradients(layer, features)
        several = seed % 5 == 0 or case.out_channels * case.space.n_out > 90  # they cost more than the cases themselves
        with use_backend("cpu"), threads(2 + seed % 3 if several else 1):
            output, found = gradients(layer, features)
        try:
            assert_same(output, expected_output, 1e-10)
            for x, y in zip(found, expected, strict=True):
                assert_same(x, y, 1e-10)
        except AssertionError as error:
            raise AssertionError(f"{layer} on {case.batch_size} networks, seed {seed}") from error


def test_most_cases_reach_the_kernels():
    cases = [random_case(seed) for seed in range(NUM_CASES)]
    fused = [case for case in cases if case.terms == {"all"} and case.space.num_layers > 1]
    assert len(fused) > NUM_CASES / 2
    assert len({case.space for case in fused}) > NUM_CASES / 4
    assert {case.space.n_out == 1 for case in fused} == {True, False}


def random_stack(case):
    """One to three equivariant layers from the case's features on, most often an invariant one and dense ones."""
    draw = random.Random(case.seed)
    flat, channels = case.space.with_taps(1), case.in_channels
    layers = [MonomialEquivariant(case.space, channels, channels, activation=case.activation)]
    for _ in range(draw.randint(0, 2)):
        before, channels = channels, draw.randint(1, 5)
        layers.append(MagepEquivariant(flat, before, channels, activation=draw.choice((None, *FUNCTIONS))))
    if len(layers) == 1 or draw.random() < 0.7:
        width = draw.randint(1, 20)
        layers.append(MagepInvariant(flat, channels, width, share_Wb=case.share_Wb))
        if draw.random() < 0.7:
            layers.append(mlp(width, *(draw.randint(1, 40) for _ in range(draw.randint(1, 3)))))
            layers += [nn.Sigmoid()] if draw.random() < 0.5 else []
    return Stack(*layers).double()


@pytest.mark.parametrize("chunk", range(2))
def test_random_stacks_agree_with_their_layers(chunk):
    together = 0
    for seed in range(chunk, 400, 2):
        case = random_case(seed)
        case = random_taps(case) if seed % 3 == 0 else case
        features, stack = case.features(), random_stack(case)
        together += runs_together(stack, features)
        with threads(3 if seed % 5 == 0 else 1):
            output, found = gradients(stack, features)
            expected_output, expected = gradients(nn.Sequential(*stack), features)
        assert_same(output, expected_output, 1e-12)
        largest = max(x.abs().max().item() for x in expected)  # of those that cancel, only rounding is left
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-11 * largest)
    assert together > 100  # but for networks without a hidden layer, which have no kernels
