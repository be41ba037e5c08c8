"""Predicting the test accuracy of CNNs from their weights: Kendall's τ between predictions and accuracies."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.data import Networks
from benchmarks.peers import Subset, peers
from benchmarks.tasks.task import BuildSystem, Task
from magep_fast import ABLATION, GroupElement, WeightFeatures, WeightSpace
from magep_fast.models import CnnGeneralization, UnitPaths, mlp
from magep_fast.symmetry import Kind


def generalization(subset: Subset, augment: int = 0) -> Task:
    """The task on networks with one activation.

    Args:
        augment: i adds to every network, in every split, a copy with permuted neurons whose scales are uniform in
            [1, 10^i] (of tanh networks: signs); 0 adds nothing.
    """
    return Task(
        name="generalization",
        activation=subset,
        metric="Kendall's τ",
        higher_is_better=True,
        systems=systems(subset),
        prepare=lambda networks: networks.features,
        targets=lambda networks: networks.columns["accuracy"].unsqueeze(1),
        loss=nn.functional.binary_cross_entropy,
        predictions=lambda output, targets: output.flatten(),
        score=lambda predictions, targets: kendall_tau(predictions, targets.flatten()),
        augment=partial(add_copies, exponent=augment) if augment else None,
    )


def systems(subset: Subset) -> dict[str, BuildSystem]:
    """Every rival, MAGEP, MAGEP with some of its terms as "MAGEP: <row of the ablation>", and its path norms alone."""

    def rival(build: Callable[[WeightSpace], nn.Module]) -> BuildSystem:
        return lambda space, settings: build(space, **settings)

    def magep(terms: str | frozenset[str]) -> BuildSystem:
        chosen = terms if isinstance(terms, str) else tuple(sorted(terms))

        def build(space: WeightSpace, settings: dict[str, Any]) -> nn.Module:
            return CnnGeneralization(activation=subset, terms=chosen, **settings).build(space)

        return build

    def path_norms(space: WeightSpace, settings: dict[str, Any]) -> nn.Module:
        return PathNorms(space, **settings)

    ablation = {f"MAGEP: {name}": magep(terms) for name, terms in ABLATION.items()}
    rivals = {peer.name: rival(peer.build) for peer in peers(subset)}
    return rivals | {"path norms": path_norms, "MAGEP": magep("all")} | ablation


class PathNorms(nn.Module):
    """Accuracy from what `CnnGeneralization(unit_paths=True)` knows without its MAGEP layers: the control for them."""

    def __init__(self, space: WeightSpace, hidden: int = 500):
        super().__init__()
        self.paths = UnitPaths(space)
        self.head = nn.Sequential(mlp(self.paths.norms, hidden, hidden, 1), nn.Sigmoid())

    def forward(self, features: WeightFeatures) -> Tensor:
        output: Tensor = self.head(self.paths(features)[1])
        return output


def add_copies(networks: Networks, generator: torch.Generator, exponent: int) -> Networks:
    """Each network and a copy of it moved by a random element of its symmetry group."""
    kind: Kind = "positive" if networks.activation == "relu" else "sign"
    scale = (1.0, 10.0**exponent) if kind == "positive" else None
    moved = GroupElement.sample(networks.space, kind, scale, batch_size=len(networks), generator=generator)
    copies = Networks(moved @ networks.features, networks.activation, networks.columns, networks.options)
    return Networks.cat([networks, copies])


def kendall_tau(x: Tensor, y: Tensor) -> float:
    """Kendall's τ-b of two lists: (concordant − discordant pairs) / √(pairs not tied in x · pairs not tied in y).

    A list that is all ties, or has a NaN, is in no order: 0.
    """
    if x.shape != y.shape or x.dim() != 1:
        raise ValueError(f"expected two lists of one length; found {tuple(x.shape)} and {tuple(y.shape)}")
    if not (x.isfinite().all() and y.isfinite().all()):
        return 0.0
    x, y = x.unique(return_inverse=True)[1], y.unique(return_inverse=True)[1]  # ranks: exact, ties included
    agreement = untied_x = untied_y = 0
    for a, b in zip(x.split(1024), y.split(1024), strict=True):
        by_x, by_y = (a[:, None] - x).sign(), (b[:, None] - y).sign()
        agreement += int((by_x * by_y).sum())
        untied_x += int((by_x != 0).sum())
        untied_y += int((by_y != 0).sum())
    return agreement / (untied_x * untied_y) ** 0.5 if untied_x and untied_y else 0.0
