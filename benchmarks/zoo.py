"""Networks to train on: those of the Small CNN Zoo (Unterthiner et al. 2020), from a folder, or networks made here."""

from __future__ import annotations

import ast
import csv
import gzip
from itertools import pairwise
from pathlib import Path

import numpy
import torch
from torch import Tensor

from magep_fast import WeightFeatures, WeightSpace

CNN = WeightSpace((1, 16, 16, 16, 10), (9, 9, 9, 1))
FINAL_STEP = "86"


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
    """The first `count` fully trained networks with this activation, and their test accuracies `[N, 1]`.

    The folder holds weights.npy, layout.csv and metrics.csv.gz as published.
    """
    missing = [name for name in ("weights.npy", "layout.csv", "metrics.csv.gz") if not (folder / name).exists()]
    if missing:
        raise FileNotFoundError(f"{folder} has no {', '.join(missing)}; expected the folder of one data set of the zoo")
    with gzip.open(folder / "metrics.csv.gz", "rt", newline="") as file:
        metrics = list(csv.DictReader(file))
    chosen = [
        k
        for k, row in enumerate(metrics)
        if float(row["step"]) == float(FINAL_STEP) and row["config.activation"] == activation
    ][:count]
    if not chosen:
        found = sorted({row["config.activation"] for row in metrics})
        raise ValueError(f"{folder} has no network with activation {activation!r} at step {FINAL_STEP}; it has {found}")
    rows = torch.from_numpy(numpy.load(folder / "weights.npy", mmap_mode="r")[chosen].astype(numpy.float32))
    weights, biases = [], []
    with (folder / "layout.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            block = rows[:, int(row["start_idx"]) : int(row["end_idx"])]
            shape = ast.literal_eval(row["shape"])
            if row["varname"].endswith("bias:0"):
                biases.append(block.unsqueeze(1).contiguous())
            else:  # [..., in, out], the kernel's positions first
                kernel = block.reshape(len(chosen), -1, *shape[-2:])
                weights.append(kernel.transpose(2, 3).contiguous())
    accuracies = [float(metrics[k]["test_accuracy"]) for k in chosen]
    return WeightFeatures(weights, biases), torch.tensor(accuracies).unsqueeze(1)
