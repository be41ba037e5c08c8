from dataclasses import FrozenInstanceError
from re import escape

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from magep_fast import WeightFeatures, WeightSpace
from tests.helpers import assert_same, random_features

SPACE = WeightSpace((2, 5, 4, 3))


def test_space_describes_its_architecture():
    space = WeightSpace([2, 5, 4, 3], taps=[9, 1, 4])
    assert (space.widths, space.taps) == ((2, 5, 4, 3), (9, 1, 4))
    assert (space.num_layers, space.n_in, space.n_out) == (3, 2, 3)
    assert space.with_taps(2) == WeightSpace((2, 5, 4, 3), 2)
    assert space.any_hidden_width() == WeightSpace((2, None, None, 3), (9, 1, 4))


def test_space_is_a_value():
    assert WeightSpace((2, 5, 3)) == WeightSpace([2, 5, 3], taps=1) == WeightSpace((2, 5, 3), (1, 1))
    assert len({WeightSpace((2, 5, 3)), WeightSpace((2, 5, 3), 1), WeightSpace((2, 5, 3), 9)}) == 2
    assert WeightSpace((2, 5, 3)) != WeightSpace((2, None, 3))
    with pytest.raises(FrozenInstanceError):
        SPACE.widths = (1, 1)


@pytest.mark.parametrize(
    ("space", "text"),
    [
        (WeightSpace((2, 5, 3)), "WeightSpace(2-5-3)"),
        (WeightSpace((2, None, 3)), "WeightSpace(2-*-3)"),
        (WeightSpace((2, 5, 3), (9, 1)), "WeightSpace(2-5-3, taps=(9, 1))"),
    ],
)
def test_space_is_readable(space, text):
    assert repr(space) == text


@pytest.mark.parametrize(
    ("widths", "taps", "message"),
    [
        ((), None, "at least two numbers; found ()"),
        ((3,), None, "at least two numbers; found (3,)"),
        ((None, 5, 3), None, "n_0 must be a number, only hidden widths may be None; found widths=(None, 5, 3)"),
        ((2, 5, None), None, "n_L must be a number, only hidden widths may be None; found widths=(2, 5, None)"),
        ((2, 0, 3), None, "every width must be a positive int or None; found n_1 = 0 in (2, 0, 3)"),
        ((2, -1, 3), None, "found n_1 = -1"),
        ((2, 5, 3.0), None, "found n_2 = 3.0"),
        ((2, 5, 3), (1,), "taps must list one number per layer (2) or be an int; found (1,)"),
        ((2, 5, 3), (1, 0), "every entry of taps must be a positive int; found (1, 0)"),
        ((2, 5, 3), 0, "every entry of taps must be a positive int; found (0, 0)"),
        ((2, 5, 3), (1, 1.5), "every entry of taps must be a positive int; found (1, 1.5)"),
    ],
)
def test_space_refuses_what_is_no_architecture(widths, taps, message):
    with pytest.raises(ValueError, match=escape(message)):
        WeightSpace(widths, taps)


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 5)
        self.second = nn.Linear(5, 3)

    def forward(self, x):
        return self.second(self.first(x).relu())


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.Linear(2, 3), WeightSpace((2, 3))),
        (nn.Sequential(nn.Linear(2, 5), nn.ReLU(), nn.Dropout(), nn.Linear(5, 3)), WeightSpace((2, 5, 3))),
        (TwoLayers(), WeightSpace((2, 5, 3))),
        (
            nn.Sequential(
                nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(),
                nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
            ),
            WeightSpace((1, 16, 16, 16, 10), (9, 9, 9, 1)),
        ),
        (
            nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(4 * 6 * 6, 10)),
            WeightSpace((1, 4, 10), (9, 36)),
        ),
        (nn.Sequential(nn.Conv1d(2, 4, 5), nn.Conv1d(4, 3, 1)), WeightSpace((2, 4, 3), (5, 1))),
        (
            nn.Sequential(nn.Linear(2, 5), nn.Dropout(), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)),
            WeightSpace((2, 5, 3)),
        ),
        (nn.Sequential(nn.Conv3d(2, 4, (1, 2, 3)), nn.Conv3d(4, 3, 2)), WeightSpace((2, 4, 3), (6, 8))),
    ],
)  # fmt: skip
def test_space_of_a_module(module, expected):
    assert WeightSpace.of(module) == expected


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.Sequential(nn.Linear(2, 5), nn.LayerNorm(5), nn.Linear(5, 3)), "layer '1' (LayerNorm((5,)"),
        (nn.Sequential(nn.Linear(2, 5), nn.ReLU(), nn.BatchNorm1d(5), nn.Linear(5, 3)), "stands behind '1' (ReLU())"),
        (nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 3)), "stands in front of the first layer"),
        (nn.Sequential(nn.Linear(2, 5), nn.BatchNorm1d(5), nn.BatchNorm1d(5)), "a second BatchNorm behind layer '0'"),
        (nn.Sequential(nn.Linear(2, 5), nn.BatchNorm1d(4)), "has (4,) statistics but layer '0' ((5, 2))"),
        (nn.Sequential(nn.Linear(2, 5), nn.BatchNorm1d(5, track_running_stats=False)), "has no running statistics"),
        (nn.Sequential(nn.LazyLinear(5)), "has no shape yet; run the network once on data"),
        (nn.Sequential(nn.Conv2d(4, 4, 3, groups=2)), "has groups=2; only groups=1 is supported"),
        (nn.Sequential(nn.ReLU()), "Sequential has no nn.Linear or nn.Conv1d/2d/3d layer"),
        (nn.Sequential(nn.Linear(2, 5), nn.Linear(4, 3)), "reads 4 features but the layer before it gives 5"),
        (nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(8, 3, 3)), "reads 8 features but the layer before it gives 4"),
    ],
)
def test_space_of_a_module_it_cannot_describe(module, message):
    with pytest.raises(ValueError, match=escape(message)):
        WeightSpace.of(module)


@pytest.mark.parametrize("space", [SPACE, WeightSpace((2, 3)), WeightSpace((1, 4, 3), (9, 5))])
def test_features_describe_themselves(space):
    features = random_features(space, channels=3, batch_size=4, dtype=torch.float32)
    assert features.space == space
    assert (features.num_layers, features.channels, features.batch_size) == (space.num_layers, 3, 4)
    assert (features.dtype, features.device) == (torch.float32, torch.device("cpu"))
    assert repr(features) == f"WeightFeatures({space}, batch=4, channels=3, torch.float32, cpu)"
    assert features.tensors() == features.weights + features.biases


def test_features_map_and_to():
    features = random_features(SPACE)
    doubled = features.map(lambda x: 2 * x)
    assert_same(doubled, WeightFeatures([2 * w for w in features.weights], [2 * b for b in features.biases]))
    assert features.to(torch.float32).dtype == torch.float32
    assert features.to(device="meta").device.type == "meta"


def test_features_detach():
    features = random_features(SPACE).map(lambda x: x.requires_grad_())
    assert not any(x.requires_grad for x in features.detach().tensors())
    assert_same(features.detach(), features)


def test_features_are_a_pytree():
    features = random_features(SPACE)
    leaves, structure = pytree.tree_flatten(features)
    assert all(leaf is x for leaf, x in zip(leaves, features.tensors(), strict=True))
    restored = pytree.tree_unflatten(leaves, structure)
    assert isinstance(restored, WeightFeatures)
    assert_same(restored, features)
    assert_same(pytree.tree_map(torch.neg, features), features.map(torch.neg))
    assert pytree.tree_map(lambda x: None, features).weights == (None,) * 3


@pytest.mark.parametrize(
    ("index", "chosen"),
    [
        (0, [0]),
        (3, [3]),
        (-1, [3]),
        (slice(1, 3), [1, 2]),
        (slice(None, None, 2), [0, 2]),
        ([2, 0], [2, 0]),
        (torch.tensor([3, 3, 0]), [3, 3, 0]),
        (torch.tensor([True, False, True, False]), [0, 2]),
        (slice(0, 0), []),
    ],
)
def test_features_index_gives_a_batch(index, chosen):
    features = random_features(SPACE, batch_size=4)
    assert_same(features[index], features.map(lambda x: torch.stack([x[i] for i in chosen]) if chosen else x[:0]))


@pytest.mark.parametrize("index", [4, -5])
def test_features_index_out_of_range(index):
    with pytest.raises(IndexError, match=f"network {index} of a batch of 4"):
        random_features(SPACE, batch_size=4)[index]


def test_features_cat_undoes_slicing():
    features = random_features(SPACE, batch_size=4)
    assert_same(WeightFeatures.cat([features[:1], features[1:3], features[3]]), features)


def test_features_cat_refuses_another_number_of_layers():
    with pytest.raises(ValueError):
        WeightFeatures.cat([random_features(SPACE), random_features(WeightSpace((2, 5, 4)))])


def test_features_pad_adds_zero_neurons():
    features = random_features(SPACE)
    padded = features.pad((2, 7, None, 3))
    assert padded.space == WeightSpace((2, 7, 4, 3))
    for x, y in zip(padded.tensors(), features.tensors(), strict=True):
        kept = x[tuple(map(slice, y.shape))]
        assert torch.equal(kept, y) and x.count_nonzero() == y.count_nonzero()


@pytest.mark.parametrize(
    ("widths", "message"),
    [
        ((2, 5, 3), "pad needs n_0 … n_L, 4 widths; found (2, 5, 3)"),
        ((2, 4, 4, 3), "pad can only widen hidden layers: from (2, 5, 4, 3) to (2, 4, 4, 3) is not possible"),
        ((3, 5, 4, 3), "pad can only widen hidden layers"),
        ((2, 5, 4, 4), "pad can only widen hidden layers"),
    ],
)
def test_features_pad_refuses(widths, message):
    with pytest.raises(ValueError, match=escape(message)):
        random_features(SPACE).pad(widths)


def replaced(what, layer, tensor):
    """Valid features [B=2, C=2] of SPACE but for one tensor."""
    features = random_features(SPACE)
    tensors = {"weights": list(features.weights), "biases": list(features.biases)}
    tensors[what][layer - 1] = tensor
    return WeightFeatures(**tensors)


def zeros(*shape):
    return torch.zeros(shape, dtype=torch.float64)


@pytest.mark.parametrize(
    ("what", "layer", "tensor", "message"),
    [
        ("weights", 2, zeros(2, 4, 5), "weights are (2, 4, 5), of rank 3; expected [batch, channels·taps, n_2, n_1]"),
        ("weights", 1, zeros(2, 2, 5, 2, 1), "weights are (2, 2, 5, 2, 1), of rank 5; expected [batch,"),
        ("biases", 1, zeros(2, 2, 5, 1), "biases are (2, 2, 5, 1), of rank 4; expected [batch, channels, n_1]"),
        ("biases", 1, zeros(5), "biases are (5,), of rank 1; expected [batch, channels, n_1]"),
        ("biases", 1, zeros(), "biases are (), of rank 0; expected [batch, channels, n_1]"),
        ("biases", 3, zeros(2, 3), "biases are (2, 3), of rank 2; expected [batch, channels, n_3]"),
        ("biases", 2, zeros(2, 3, 4), "biases are (2, 3, 4); expected 2 channels as in layer 1"),
        ("weights", 2, zeros(2, 3, 4, 5), "weights are (2, 3, 4, 5); expected channels·taps = a multiple of the 2"),
        ("weights", 3, zeros(2, 4, 3, 4), "weights are (2, 4, 3, 4); expected (2, 2, 3, 4)"),
        ("weights", 2, zeros(3, 2, 4, 5), "weights are (3, 2, 4, 5), a batch of 3; expected the batch of 2"),
        ("biases", 3, zeros(1, 2, 3), "biases are (1, 2, 3), a batch of 1; expected the batch of 2"),
        ("weights", 2, zeros(2, 2, 6, 5), "weights are (2, 2, 6, 5) and biases (2, 2, 4); expected the same n_2"),
        ("biases", 2, zeros(2, 2, 6), "weights are (2, 2, 4, 5) and biases (2, 2, 6); expected the same n_2"),
        ("weights", 2, zeros(2, 2, 4, 6), "weights are (2, 2, 4, 6); expected [..., n_2, n_1 = 5]"),
        ("weights", 1, zeros(2, 2, 5, 3), "weights are (2, 2, 5, 3); expected (2, 2, 5, 2)"),
        ("weights", 2, zeros(2, 2, 4, 5).float(), "weights are torch.float32 on cpu; expected torch.float64 on cpu"),
        ("biases", 3, zeros(2, 2, 3).float(), "biases are torch.float32 on cpu; expected torch.float64 on cpu"),
        (
            "weights",
            3,
            zeros(2, 2, 3, 4).to("meta"),
            "weights are torch.float64 on meta; expected torch.float64 on cpu",
        ),
        ("biases", 2, zeros(2, 2, 4).to("meta"), "biases are torch.float64 on meta; expected torch.float64 on cpu"),
    ],
)
def test_check_names_the_tensor_at_fault(what, layer, tensor, message):
    with pytest.raises(ValueError, match=escape(f"layer {layer}: {message}")):
        replaced(what, layer, tensor).check(SPACE, channels=2)


@pytest.mark.parametrize(("what", "layer"), [("weights", 1), ("weights", 3), ("biases", 1), ("biases", 2)])
def test_check_refuses_what_is_no_tensor(what, layer):
    with pytest.raises(TypeError, match=f"layer {layer}: {what} must be a tensor .*; found list"):
        replaced(what, layer, [1.0]).check(SPACE, channels=2)


@pytest.mark.parametrize(
    ("space", "channels", "message"),
    [
        (SPACE, 3, "expected features of 3 channels; found 2"),
        (WeightSpace((2, 5, 3)), 2, "WeightSpace(2-5-3) has 2 layers; the features have 3"),
        (WeightSpace((3, 5, 4, 3)), 2, "layer 1: weights are (2, 2, 5, 2); expected (2, 2, 5, 3)"),
        (WeightSpace((2, 5, 6, 3)), 2, "layer 2: weights are (2, 2, 4, 5); expected (2, 2, 6, 5)"),
        (WeightSpace((2, None, None, 5)), 2, "layer 3: weights are (2, 2, 3, 4); expected (2, 2, 5, 4)"),
        (WeightSpace((2, 5, 4, 3), (9, 1, 1)), 2, "layer 1: weights are (2, 2, 5, 2); expected (2, 18, 5, 2)"),
    ],
)
def test_check_against_another_space(space, channels, message):
    with pytest.raises(ValueError, match=escape(message)):
        random_features(SPACE).check(space, channels)


@pytest.mark.parametrize(("num_weights", "num_biases"), [(3, 2), (2, 3), (0, 0)])
def test_features_have_as_many_weights_as_biases(num_weights, num_biases):
    features = random_features(SPACE)
    uneven = WeightFeatures(features.weights[:num_weights], features.biases[:num_biases])
    with pytest.raises(ValueError, match=f"found {num_weights} weights and {num_biases} biases"):
        _ = uneven.space


def test_check_wants_as_many_biases_as_layers():
    features = random_features(SPACE)
    with pytest.raises(ValueError, match="found 3 weights and 2 biases"):
        WeightFeatures(features.weights, features.biases[:2]).check(SPACE, channels=2)


@pytest.mark.parametrize("space", [SPACE, SPACE.any_hidden_width(), WeightSpace((2, None, 4, 3))])
def test_check_accepts(space):
    random_features(SPACE).check(space, channels=2)


def test_a_layer_used_twice_is_two_layers():
    layer = nn.Linear(4, 4)
    assert WeightSpace.of(nn.Sequential(layer, nn.ReLU(), layer)) == WeightSpace((4, 4, 4))


def test_only_convolutions_are_flattened_into_taps():
    with pytest.raises(ValueError, match="reads 16 features but the layer before it gives 8"):
        WeightSpace.of(nn.Sequential(nn.Linear(4, 8), nn.Linear(16, 3)))


@pytest.mark.parametrize("index", [1, -1, np.int64(1), torch.tensor(1)])
def test_one_index_of_any_integer_type_is_a_batch_of_one(index):
    features = WeightFeatures([torch.arange(2.0).view(2, 1, 1, 1)], [torch.zeros(2, 1, 1)])
    assert features[index].batch_size == 1
    assert features[index].weights[0].item() == 1


def test_saved_features_are_read_without_running_code(tmp_path):
    features = random_features(SPACE)
    torch.save(features, tmp_path / "features.pt")
    assert_same(torch.load(tmp_path / "features.pt", weights_only=True), features)
