import random
from itertools import pairwise
from re import escape

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from magep_fast import (
    BucketSampler,
    MagepEquivariant,
    MagepInvariant,
    NetworkDataset,
    RaggedBatch,
    WeightFeatures,
    WeightSpace,
    bucket,
    collate,
    collate_fn,
    from_modules,
    to_modules,
)
from tests.helpers import assert_same, random_features

SPACES = [WeightSpace(widths) for widths in ((2, 5, 4, 3), (2, 1, 7, 3), (2, 3, 3, 3), (2, 5, 4, 3))]


def ragged(channels=1, dtype=torch.float64):
    return [random_features(space, channels, batch_size=1, dtype=dtype) for space in SPACES]


def test_collate_pads_and_unpad_undoes_it():
    networks = ragged()
    batch = collate(networks)
    assert isinstance(batch, RaggedBatch) and len(batch) == 4
    assert batch.features.space == WeightSpace((2, 5, 7, 3))
    assert batch.widths == tuple(space.widths for space in SPACES) and batch.indices == (0, 1, 2, 3)
    for found, expected in zip(batch.unpad(), networks, strict=True):
        assert_same(found, expected)
    first, second, last = batch.masks
    assert first.sum(1).tolist() == [5, 1, 3, 5] and second.sum(1).tolist() == [4, 7, 3, 4] and last.all()
    assert not batch.features.biases[0].squeeze(1)[~first].any()


def test_collate_takes_batches_too():
    networks = [random_features(SPACES[0], batch_size=2), random_features(SPACES[1], batch_size=1)]
    batch = collate(networks)
    assert batch.indices == (0, 0, 1)
    assert_same(WeightFeatures.cat(batch.unpad()[:2]), networks[0])


def test_results_are_those_of_each_network_alone():
    equivariant = MagepEquivariant(SPACES[0].any_hidden_width(), 1, 3, activation="relu", dtype=torch.float64)
    invariant = MagepInvariant(SPACES[0].any_hidden_width(), 3, 2, dtype=torch.float64)
    networks = ragged()
    batch = collate(networks)
    features = equivariant(batch.features)
    answers = invariant(features)
    for k, (found, network) in enumerate(zip(batch.unpad(features), networks, strict=True)):
        alone = equivariant(network)
        assert_same(found, alone, 1e-13)
        assert_same(answers[k : k + 1], invariant(alone), 1e-13)
    for layer, mask in enumerate(batch.masks):
        assert not features.biases[layer].mT[~mask].any()


@pytest.mark.parametrize(
    ("other", "channels"),
    [((3, 5, 4, 3), 1), ((2, 5, 4, 2), 1), ((2, 5, 3), 1), ((2, 5, 4, 3), 2)],
)
def test_collate_refuses_what_needs_buckets(other, channels):
    networks = [*ragged(), random_features(WeightSpace(other), channels, batch_size=1)]
    with pytest.raises(ValueError, match=r"network 4 is .* bucket\(\) sorts networks"):
        collate(networks)
    batches = list(bucket(networks))
    assert [batch.indices for batch in batches] == [(0, 1, 2, 3), (4,)]
    assert_same(batches[1].features, networks[4])


def test_collate_refuses_nothing():
    with pytest.raises(ValueError, match="collate needs at least one network"):
        collate([])
    assert list(bucket([])) == []


def test_collate_refuses_modules_and_mixed_dtypes():
    with pytest.raises(TypeError, match="network 1 is of type Linear: from_modules"):
        collate([ragged()[0], torch.nn.Linear(2, 3)])
    networks = [*ragged(), ragged()[0].to(torch.float32)]
    with pytest.raises(ValueError, match=r"network 4 is torch.float32, network 0 torch.float64: .to\(dtype\)"):
        collate(networks)
    assert [batch.indices for batch in bucket(networks)] == [(0, 1, 2, 3), (4,)]


def test_unpad_refuses_other_features():
    batch = collate(ragged())
    with pytest.raises(TypeError, match="unpad takes WeightFeatures that layers made of this batch; found Tensor"):
        batch.unpad(torch.zeros(4, 3))
    with pytest.raises(ValueError, match=escape("expected features made of this batch, 4 networks")):
        batch.unpad(random_features(SPACES[0]))


def test_buckets_of_a_size_hold_networks_of_about_one_size():
    batches = list(bucket(ragged(), batch_size=2))
    assert [batch.indices for batch in batches] == [(2, 1), (0, 3)]
    with pytest.raises(ValueError, match="batch_size must be positive; found 0"):
        list(bucket(ragged(), batch_size=0))


def test_buckets_of_batches_say_where_each_network_stood():
    networks = [random_features(SPACES[k], batch_size=size) for k, size in ((0, 2), (1, 3), (2, 1))]
    (batch,) = bucket(networks)
    assert batch.indices == (0, 0, 1, 1, 1, 2)
    assert [x.indices for x in bucket(networks, batch_size=2)] == [(2, 1, 1, 1), (0, 0)]


def test_data_sets_hold_one_network_per_item():
    with pytest.raises(ValueError, match="item 1 is a batch of 2 networks; expected one network"):
        NetworkDataset([*ragged()[:1], random_features(SPACES[0], batch_size=2)])


def test_batches_move_and_keep_their_widths():
    batch = collate(ragged()).to(torch.float32)
    assert batch.features.dtype == torch.float32 and len(batch.unpad()) == 4


@pytest.mark.parametrize("workers", [0, 1])
def test_data_loader(workers):
    networks = [*ragged(), *(random_features(WeightSpace((1, 4, 2)), 1, 1) for _ in range(3))]
    data = NetworkDataset(networks, torch.arange(7.0))
    sampler = BucketSampler(data, 2, shuffle=True)
    assert len(sampler) == 4
    seen = []
    for batch, targets in DataLoader(data, batch_sampler=sampler, collate_fn=collate_fn, num_workers=workers):
        assert len(batch) <= 2 and len(targets) == len(batch)
        for network, target in zip(batch.unpad(), targets, strict=True):
            assert_same(network, networks[int(target)])
            seen.append(int(target))
    assert sorted(seen) == list(range(7))


def test_samplers_have_a_new_order_each_epoch():
    data = NetworkDataset(ragged() * 8)
    shuffled = BucketSampler(data, 3, shuffle=True, generator=torch.Generator().manual_seed(1))
    assert list(shuffled) != list(shuffled)
    assert list(BucketSampler(data, 3)) == list(BucketSampler(data, 3))
    (batch, *_) = DataLoader(data, batch_size=4, collate_fn=collate_fn)
    assert len(batch) == 4
    with pytest.raises(ValueError, match="found 32 networks and 3 targets"):
        NetworkDataset(data.networks, [1, 2, 3])


def test_batches_of_networks_of_distinct_sizes_differ_from_epoch_to_epoch():
    data = NetworkDataset([random_features(WeightSpace((2, n, 3)), 1, 1) for n in range(1, 17)])
    sampler = BucketSampler(data, 4, shuffle=True, generator=torch.Generator().manual_seed(1))
    epochs = [list(sampler) for _ in range(20)]
    assert len({frozenset(map(frozenset, epoch)) for epoch in epochs}) > 15
    for epoch in epochs:
        assert len(epoch) == len(sampler) and sorted(k for batch in epoch for k in batch) == list(range(16))
        assert not any({0, 15} <= set(batch) for batch in epoch)  # the narrowest with the widest


def random_network(dice):
    """An MLP of 1 to 6 layers and hidden widths 1 to 300, with or without biases, of one of eight ends."""
    hidden = [dice.choice((dice.randint(1, 300), dice.randint(1, 20))) for _ in range(dice.randint(0, 5))]
    widths = [dice.choice((2, 3)), *hidden, dice.choice((1, 10))]
    bias = dice.random() < 0.5
    layers = [nn.Linear(m, n, bias=bias and dice.random() < 0.8) for m, n in pairwise(widths)]
    return nn.Sequential(*(x for layer in layers for x in (layer, nn.Dropout(), nn.ReLU())))


def test_a_hundred_random_networks_there_and_back():
    dice = random.Random(0)
    networks = [random_network(dice) for _ in range(100)]
    converted = [from_modules(network) for network in networks]
    seen = []
    for batch in bucket(converted, batch_size=8):
        space = batch.features.space.any_hidden_width()
        # In float64, as sums that are split otherwise may cancel to little more than float32 rounds.
        layer, head = MagepEquivariant(space, 1, 1, activation="relu").double(), MagepInvariant(space, 1, 2).double()
        edited = layer(batch.features.to(torch.float64))
        answers = head(edited)
        for place, (k, back, edit) in enumerate(zip(batch.indices, batch.unpad(), batch.unpad(edited), strict=True)):
            assert_same(back, converted[k])
            copy = nn.Sequential(*(nn.Linear(x.in_features, x.out_features, x.bias is not None)
                                   for x in networks[k] if isinstance(x, nn.Linear)))  # fmt: skip
            to_modules(back, copy)
            for x, y in zip(copy.parameters(), networks[k].parameters(), strict=True):
                assert torch.equal(x, y)
            alone = layer(converted[k].to(torch.float64))
            assert_same(edit, alone, 1e-11)
            assert_same(answers[place : place + 1], head(alone), 1e-10)
            seen.append(k)
    assert sorted(seen) == list(range(100))
