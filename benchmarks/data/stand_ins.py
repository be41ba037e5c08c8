"""What the efficiency tables train on: networks of the Small CNN Zoo (Unterthiner et al. 2020) from a folder, or
stand-ins of the same shape, untrained."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.data.readers import read_cnn_zoo
from magep_fast import WeightFeatures, WeightSpace

CNN = WeightSpace((1, 16, 16, 16, 10), (9, 9, 9, 1))


def make_networks(space: WeightSpace, count: int, seed: int = 0) -> WeightFeatures:
    """Networks of one channel at the scale of their own initialisation: weights of variance 1/fan-in, biases 0.01."""
    generator = torch.Generator().manual_seed(seed)
    weights, biases = [], []
    for (m, n), f in zip(pairwise(space.widths), space.taps, strict=True):
        assert m is not None and n is not None
        weights.append((m * f) ** -0.5 * torch.randn(count, f, n, m, generator=generator))
        biases.append(0.1 * torch.randn(count, 1, n, generator=generator))
    return WeightFeatures(weights, biases)


def make_accuracies(networks: WeightFeatures) -> Tensor:
    """A number in (0, 1) for each network, `[N, 1]`, that no symmetry of its neurons changes: of its last bias."""
    return torch.sigmoid(10 * networks.biases[-1].mean(dim=-1))


def make_classes(networks: WeightFeatures, classes: int = 10) -> Tensor:
    """A class for each network, `[N]`, read off its last bias likewise."""
    ranks = networks.biases[-1].mean(dim=(1, 2)).argsort().argsort()
    return ranks * classes // networks.batch_size


def read_zoo(folder: Path, activation: str, count: int) -> tuple[WeightFeatures, Tensor]:
    """The first `count` fully trained networks of a zoo with this activation, and their accuracies `[N, 1]`."""
    networks = read_cnn_zoo(folder, activation)[:count]
    return networks.features, networks.columns["accuracy"].unsqueeze(1)
