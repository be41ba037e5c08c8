"""The paper's architectures, each from a small config: `CnnGeneralization().build(space)` is an `nn.Module`.

Parameter counts are those of the paper's tables, which fit one [Wb] coefficient for all t (`share_Wb`) rather than the
paper's formulas, and three frequency bands rather than its text. Both can be set.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import nn

from magep_fast.layers import Activation, MagepEquivariant, MagepInvariant, MonomialEquivariant
from magep_fast.permutation import FourierFeatures, LearnedScale, NPEquivariant, NPPool, PositionEncoding
from magep_fast.spaces import WeightFeatures, WeightSpace


@dataclass(frozen=True, kw_only=True)
class Config:
    """What all architectures have in common: how their MAGEP layers are made.

    Args:
        share_Wb: one [Wb] coefficient for all t; see `MagepEquivariant`.
        terms: of the MAGEP layers; "linear" makes them Monomial-NFN, the values of `ABLATION` give the paper's study.
        learn_psi: whether the connections Ψ, ψ are trained. The authors' code freezes those of equivariant layers.
        init: of the MAGEP layers, "unit" or "xavier_normal".
        backend: of the MAGEP layers.
    """

    share_Wb: bool = True
    terms: str | tuple[str, ...] = "all"
    learn_psi: bool = True
    init: str = "unit"
    backend: str = "auto"

    def build(self, space: WeightSpace) -> nn.Module:
        """The network for inputs of one channel in this space."""
        raise NotImplementedError

    def monomial(self, space: WeightSpace, d: int, e: int, activation: str | None = None) -> nn.Module:
        return MonomialEquivariant(space, d, e, activation=activation, init=self.init, backend=self.backend)

    def equivariant(self, space: WeightSpace, d: int, e: int, activation: str) -> nn.Module:
        return MagepEquivariant(space, d, e, activation=activation, **self._options())

    def invariant(self, space: WeightSpace, d: int, e: int) -> nn.Module:
        return MagepInvariant(space, d, e, **self._options())

    def _options(self) -> dict[str, Any]:
        return {
            "share_Wb": self.share_Wb,
            "terms": self.terms,
            "learn_psi": self.learn_psi,
            "init": self.init,
            "backend": self.backend,
        }


@dataclass(frozen=True, kw_only=True)
class CnnGeneralization(Config):
    """Accuracy of a CNN from its weights: `[B, 1]` in (0, 1). Invariant to scaling for "relu", to signs for "tanh".

    Monomial layer 1 → channels, which brings kernels to one feature per connection, equivariant layers with the
    activation, an invariant layer, an MLP of two hidden layers, a sigmoid.
    """

    activation: Literal["relu", "tanh"] = "relu"
    channels: int = 20
    layers: int = 2
    invariants: int = 20
    hidden: int = 500

    def build(self, space: WeightSpace) -> nn.Sequential:
        c, flat = self.channels, space.with_taps(1)
        return nn.Sequential(
            self.monomial(space, 1, c),
            *(self.equivariant(flat, c, c, self.activation) for _ in range(self.layers)),
            self.invariant(flat, c, self.invariants),
            mlp(self.invariants, self.hidden, self.hidden, 1),
            nn.Sigmoid(),
        )


@dataclass(frozen=True, kw_only=True)
class InrClassification(Config):
    """Class of the image that a SIREN holds: logits `[B, classes]`, invariant to signs of neurons.

    Args:
        fourier: this many Gaussian Fourier features of the raw weights come first, 0 for none. With 256 the parameter
            counts are the paper's (4.1M for MNIST, 3.4M for CIFAR-10), but only permutations leave the output as it is.
    """

    channels: int
    layers: int = 3
    hidden: int = 1000
    classes: int = 10
    dropout: float = 0.1
    fourier: int = 0

    def build(self, space: WeightSpace) -> nn.Sequential:
        c, flat = self.channels, space.with_taps(1)
        return nn.Sequential(
            *([FourierFeatures(1, self.fourier)] if self.fourier else []),
            self.monomial(space, self.fourier or 1, c),
            *(self.equivariant(flat, c, c, "sin") for _ in range(self.layers)),
            self.invariant(flat, c, c),
            mlp(c, self.hidden, self.hidden, self.classes, dropout=self.dropout),
        )


MNIST = InrClassification(channels=128)
CIFAR10 = InrClassification(channels=64)


@dataclass(frozen=True, kw_only=True)
class FashionClassification(Config):
    """The Fashion-MNIST variant: logits `[B, classes]`, invariant to signs of neurons.

    Monomial and equivariant layer with sine, a Monomial layer to one channel whose absolute value no sign changes, then
    an NP network: Fourier features, positions, NP layers with ReLU, the mean, an MLP of two hidden layers.
    """

    channels: int = 64
    fourier: int = 256
    bands: int = 3
    max_frequency: float = 3.0
    np_channels: int = 128
    np_layers: int = 3
    hidden: int = 500
    classes: int = 10
    dropout: float = 0.1

    def build(self, space: WeightSpace) -> nn.Sequential:
        c, flat = self.channels, space.with_taps(1)
        position = PositionEncoding(flat, self.max_frequency, self.bands)
        pooled = 2 * space.num_layers * self.np_channels
        return nn.Sequential(
            self.monomial(space, 1, c, "sin"),
            self.equivariant(flat, c, c, "sin"),
            self.monomial(flat, c, 1),
            Activation(torch.abs, kind="positive"),
            FourierFeatures(1, self.fourier),
            position,
            *np_layers(flat, self.fourier + position.channels, *(self.np_channels,) * self.np_layers),
            NPPool(),
            mlp(pooled, self.hidden, self.hidden, self.classes, dropout=self.dropout),
        )


@dataclass(frozen=True, kw_only=True)
class StyleEditing(Config):
    """Networks in, edited networks out: the input plus a learned change. Equivariant to permutations.

    Equivariant layers with sine, Fourier features, positions, NP layers with ReLU, an NP layer to one channel, a scale
    that is learned.
    """

    channels: int = 16
    layers: int = 2
    fourier: int = 256
    bands: int = 3
    max_frequency: float = 3.0
    np_channels: int = 128
    np_layers: int = 3
    start_scale: float = 0.01

    def build(self, space: WeightSpace) -> nn.Module:
        channels = (1, *(self.channels,) * self.layers)
        position = PositionEncoding(space, self.max_frequency, self.bands, layers=False)
        change = nn.Sequential(
            *(self.equivariant(space, d, e, "sin") for d, e in pairwise(channels)),
            FourierFeatures(self.channels, self.fourier),
            position,
            *np_layers(space, self.fourier + position.channels, *(self.np_channels,) * self.np_layers),
            NPEquivariant(space, self.np_channels, 1),
            LearnedScale(space, self.start_scale),
        )
        return Edit(change)


class Edit(nn.Module):
    """U + change(U)."""

    def __init__(self, change: nn.Module):
        super().__init__()
        self.change = change

    def forward(self, features: WeightFeatures) -> WeightFeatures:
        change = self.change(features)
        return WeightFeatures(
            (w + x for w, x in zip(features.weights, change.weights, strict=True)),
            (b + x for b, x in zip(features.biases, change.biases, strict=True)),
        )


def mlp(*widths: int, dropout: float = 0.0) -> nn.Sequential:
    """Dense layers of these widths with ReLU, and dropout if any, between them."""
    layers: list[nn.Module] = []
    for n_in, n_out in pairwise(widths):
        layers += [nn.Linear(n_in, n_out), nn.ReLU(), *([nn.Dropout(dropout)] if dropout else [])]
    return nn.Sequential(*layers[: -2 if dropout else -1])


def np_layers(space: WeightSpace, *channels: int) -> list[nn.Module]:
    """NP layers between these numbers of channels, each followed by ReLU."""
    return [
        layer
        for d, e in pairwise(channels)
        for layer in (NPEquivariant(space, d, e), Activation(nn.ReLU(), kind="permutation"))
    ]
