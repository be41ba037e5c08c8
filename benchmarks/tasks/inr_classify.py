"""Classifying the image that a SIREN holds: accuracy."""

from __future__ import annotations

from typing import Any

from torch import nn

from benchmarks.data.siren import UnitForm
from benchmarks.peers.mlp import Flatten, numbers
from benchmarks.tasks.task import BuildSystem, Task
from magep_fast import WeightSpace
from magep_fast.models import FashionClassification, InrClassification, mlp

CLASSES = 10


def inr_classify(form: UnitForm) -> Task:
    return Task(
        name="inr-classify",
        activation="sin",
        metric="accuracy, %",
        higher_is_better=True,
        systems=SYSTEMS,
        prepare=lambda networks: form.to(networks.features),
        targets=lambda networks: networks.columns["label"],
        loss=nn.functional.cross_entropy,
        predictions=lambda output, targets: output.argmax(-1),
        score=lambda predictions, targets: 100 * float((predictions == targets).float().mean()),
    )


def _mlp(space: WeightSpace, settings: dict[str, Any]) -> nn.Module:
    hidden = settings.get("hidden", 1000)
    return nn.Sequential(Flatten(), mlp(numbers(space), hidden, hidden, CLASSES, dropout=settings.get("dropout", 0.1)))


def _nfn(
    kind: str,
    space: WeightSpace,
    channels: int = 256,
    layers: int = 3,
    fourier: int = 256,
    fourier_scale: float = 3.0,
    hidden: int = 1000,
) -> nn.Module:
    """NP or HNP of Zhou et al. 2023: Gaussian Fourier features, positions for NP, layers with ReLU, pool, MLP."""
    from nfn.layers import HNPPool

    from benchmarks.peers.nfn_layers import Chain, EncodedLayers

    parts = EncodedLayers(kind, space, channels, layers, fourier, fourier_scale, layer_positions=True)
    head = mlp(channels * HNPPool.get_num_outs(parts.spec), hidden, hidden, CLASSES, dropout=0.1)
    return nn.Sequential(*parts.encoders, Chain(space, [*parts.body, HNPPool(parts.spec), nn.Flatten(), head]))


def _monomial(space: WeightSpace, settings: dict[str, Any]) -> nn.Module:
    """Linear monomial layers with sine, features that no sign changes, an NP network."""
    return FashionClassification(terms="linear", **settings).build(space)


def _magep(space: WeightSpace, settings: dict[str, Any]) -> nn.Module:
    return InrClassification(**{"channels": 128 if space.n_out == 1 else 64} | settings).build(space)


def _magep_np(space: WeightSpace, settings: dict[str, Any]) -> nn.Module:
    return FashionClassification(**settings).build(space)


SYSTEMS: dict[str, BuildSystem] = {
    "MLP": _mlp,
    "NP": lambda space, settings: _nfn("np", space, **settings),
    "HNP": lambda space, settings: _nfn("hnp", space, **settings),
    "Monomial-NFN": _monomial,
    "MAGEP": _magep,
    "MAGEP-NP": _magep_np,
}
"""MAGEP-NP is the paper's network for Fashion-MNIST: a MAGEP layer in front of an NP network."""
