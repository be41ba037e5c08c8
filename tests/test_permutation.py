import pytest
import torch

from magep_fast import GroupElement, WeightSpace
from magep_fast.permutation import FourierFeatures, LearnedScale, NPEquivariant, NPPool, PositionEncoding
from tests.helpers import assert_same, random_features

SPACES = [WeightSpace((2, 5, 4, 3)), WeightSpace((1, 4, 6, 2), (9, 4, 1)), WeightSpace((3, 4, 2))]


def nfn_spec(space):
    common = pytest.importorskip("nfn.common", reason="compares with PyPI's nfn: pip install .[bench]")
    filters = [() if f == 1 else (f, 1) for f in space.taps]
    return common.NetworkSpec(
        [common.ArraySpec((n, m, *f)) for m, n, f in zip(space.widths, space.widths[1:], filters, strict=False)],
        [common.ArraySpec((n,)) for n in space.widths[1:]],
    )


def to_nfn(features):
    """Taps leave the channel dimension: `[B, C, n, m, taps, 1]`."""
    common = pytest.importorskip("nfn.common", reason="compares with PyPI's nfn: pip install .[bench]")
    weights = []
    for w, f in zip(features.weights, features.space.taps, strict=True):
        w = w if f == 1 else w.unflatten(1, (-1, f, 1)).permute(0, 1, 4, 5, 2, 3)
        weights.append(w)
    return common.WeightSpaceFeatures(weights, features.biases)


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_np_layer_is_nfn_s(space):
    layers = pytest.importorskip("nfn.layers", reason="compares with PyPI's nfn: pip install .[bench]")
    ours = NPEquivariant(space, 2, 3).double()
    theirs = layers.NPLinear(nfn_spec(space), 2, 3).double()
    with torch.no_grad():
        for i in range(space.num_layers):
            own, rows, columns, whole = (getattr(theirs, f"layer_{i}{part}") for part in ("", "_r", "_c", "_rc"))
            parts = (own, rows, columns, whole)
            ours.weight_maps[i].weight.copy_(torch.cat([p.weight.flatten(1) for p in parts], dim=1))
            ours.weight_maps[i].bias.copy_(sum(p.bias for p in parts))
            parts = (getattr(theirs, f"bias_{i}"), getattr(theirs, f"bias_{i}_rc"))
            ours.bias_maps[i].weight.copy_(torch.cat([p.weight.flatten(1) for p in parts], dim=1))
            ours.bias_maps[i].bias.copy_(sum(p.bias for p in parts))
    features = random_features(space, channels=2)
    expected = theirs(to_nfn(features))
    found = to_nfn(ours(features))
    for x, y in zip((*found.weights, *found.biases), (*expected.weights, *expected.biases), strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_np_layer_is_equivariant_to_permutations(space):
    layer = NPEquivariant(space, 2, 3).double()
    features = random_features(space, channels=2)
    g = GroupElement.sample(space, "permutation", batch_size=2)
    assert_same(layer(g @ features), g @ layer(features), 1e-12)
    assert_same(NPPool()(g @ features), NPPool()(features), 1e-12)


def test_np_layer_names_what_does_not_fit():
    with pytest.raises(ValueError, match="expected features of 3 channels; found 2"):
        NPEquivariant(SPACES[0], 3, 3)(random_features(SPACES[0], channels=2, dtype=torch.float32))


@pytest.mark.parametrize("layers", [True, False])
def test_positions_are_nfn_s(layers):
    encoding = pytest.importorskip("nfn.layers.encoding")
    space = SPACES[0]
    features = random_features(space, channels=2, dtype=torch.float32)
    expected = encoding.IOSinusoidalEncoding(nfn_spec(space), max_freq=3, num_bands=3, enc_layers=layers)(
        to_nfn(features)
    )
    found = PositionEncoding(space, max_frequency=3, bands=3, layers=layers)(features)
    for x, y in zip(found.tensors(), (*expected.weights, *expected.biases), strict=True):
        torch.testing.assert_close(x, y)


def test_positions_know_inputs_outputs_and_layers_only():
    space = WeightSpace((2, 5, 4, 3))
    features = random_features(space, channels=1, dtype=torch.float32)
    g = GroupElement.sample(space, "permutation")
    encoding = PositionEncoding(space)
    assert_same(encoding(g @ features), g @ encoding(features))
    first = encoding(features).weights[0][0, 1:]
    assert not torch.equal(first[:, :, 0], first[:, :, 1])


def test_fourier_features_are_sines_and_cosines_of_projections():
    encoder = FourierFeatures(2, 6, scale=0.5)
    features = random_features(SPACES[0], channels=2, dtype=torch.float32)
    bias = encoder(features).biases[1]
    angles = 2 * torch.pi * torch.einsum("fc,bcn->bfn", encoder.projections, features.biases[1])
    torch.testing.assert_close(bias, torch.cat([angles.sin(), angles.cos()], dim=1), rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="out_channels must be even"):
        FourierFeatures(1, 7)


def test_learned_scale_starts_small_and_learns_one_number_per_tensor():
    scale = LearnedScale(SPACES[0], start=0.25)
    features = random_features(SPACES[0], dtype=torch.float32)
    assert_same(scale(features), features.map(lambda x: 0.25 * x))
    sum(x.sum() for x in scale(features).tensors()).backward()
    torch.testing.assert_close(scale.scale.grad, torch.stack([x.sum() for x in features.tensors()]))
