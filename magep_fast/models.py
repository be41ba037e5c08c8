"""The paper's architectures, each from a small config: `CnnGeneralization().build(space)` is an `nn.Module`.

Parameter counts are those of the paper's tables, which fit one [Wb] coefficient for all t (`share_Wb`) rather than the
paper's formulas, and three frequency bands rather than its text. Both can be set.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn

from magep_fast.layers import Activation, MagepEquivariant, MagepInvariant, MonomialEquivariant, check_space
from magep_fast.permutation import FourierFeatures, LearnedScale, NPEquivariant, NPPool, PositionEncoding
from magep_fast.spaces import WeightFeatures, WeightSpace
from magep_fast.stack import Stack


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
        check_space(space)
        return self._network(space)

    def _network(self, space: WeightSpace) -> nn.Module:
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


def path_sums(features: WeightFeatures, power: float) -> Tensor:
    """Σ |product of weights|^power over all paths to an output, by where they start, `[B, L + 1]`: at an input, at b_1,
    …, at b_L. Kernels count every tap. Invariant to permutations, positive scales and signs."""
    onward = features.weights[-1].new_ones(features.batch_size, 1, features.weights[-1].shape[-2])
    sums = []
    for w, b in zip(reversed(features.weights), reversed(features.biases), strict=True):
        sums.append(onward @ b.abs().pow(power).sum(1).unsqueeze(-1))
        onward = onward @ w.abs().pow(power).sum(1)
    sums.append(onward.sum(-1, keepdim=True))
    return torch.cat(sums[::-1], dim=1).squeeze(-1)


class UnitPaths(nn.Module):
    """Networks divided by their scale s, W_i / s and b_i / s^i, and their path norms `[B, norms]` beside them.

    s is such that the absolute values of all paths from an input or a bias to an output sum to what they would in a
    network of unit variance. That sum is invariant to permutations, positive scales and signs, so the division respects
    every symmetry. A ReLU network computes its old function over s^L: of a classifier, all decisions stay. What it buys
    is range: MAGEP layers multiply the weights of all layers, so a few of them overflow on networks of large weights.

    The path norms are log s, and of the divided network the logarithms of `path_sums` of powers 1 and 2: what products
    with signs do not show, as paths cancel.
    """

    POWERS = (1, 2)

    def __init__(self, space: WeightSpace):
        super().__init__()
        fans = [m * f for m, f in zip(space.widths[:-1], space.taps, strict=True) if m is not None]
        if len(fans) < space.num_layers:
            raise ValueError(f"the scale of networks needs every width; some are open in {space}")
        # Of weights of variance 1/fan the absolute values of a row sum to √(2 fan / π) on average.
        self.log_unit = math.log(space.n_out) + sum(0.5 * math.log(2 * fan / math.pi) for fan in fans)
        self.norms = 1 + len(self.POWERS) * (space.num_layers + 1)

    def forward(self, features: WeightFeatures) -> tuple[WeightFeatures, Tensor]:
        # Sums over paths leave the range of 16 bits long before weights do.
        with torch.autocast(features.device.type, enabled=False):
            return self._divide(features if features.dtype == torch.float64 else features.to(torch.float32))

    def _divide(self, features: WeightFeatures) -> tuple[WeightFeatures, Tensor]:
        # The root of the smallest number, so that a network of zeros is divided by something whose powers are numbers.
        total = path_sums(features, 1).sum(1).clamp_min(math.sqrt(torch.finfo(features.dtype).tiny))
        log_scale = (total.log() - self.log_unit) / features.num_layers
        shrink = (-log_scale).exp()
        divided = WeightFeatures(
            (w * shrink.view(-1, 1, 1, 1) for w in features.weights),
            (b * shrink.view(-1, 1, 1) ** i for i, b in enumerate(features.biases, start=1)),
        )
        sums = [path_sums(divided, power) for power in self.POWERS]
        # Of biases that are zero the sum is zero; 1e-6 is far below what a trained one has.
        return divided, torch.cat([log_scale.unsqueeze(1), *((x + 1e-6).log() for x in sums)], dim=1)


class UnitPathInvariants(nn.Module):
    """Invariants `[B, n]` of networks divided by their scale, and their path norms. Large invariants are compressed."""

    def __init__(self, space: WeightSpace, invariants: nn.Module):
        super().__init__()
        self.divide, self.invariants = UnitPaths(space), invariants

    def forward(self, features: WeightFeatures) -> Tensor:
        divided, norms = self.divide(features)
        return torch.cat([self.invariants(divided).asinh(), norms], dim=1)


@dataclass(frozen=True, kw_only=True)
class CnnGeneralization(Config):
    """Accuracy of a CNN from its weights: `[B, 1]` in (0, 1). Invariant to scaling for "relu", to signs for "tanh".

    Monomial layer 1 → channels, which brings kernels to one feature per connection, equivariant layers with the
    activation, an invariant layer, an MLP of two hidden layers, a sigmoid.

    Args:
        unit_paths: divide networks by their scale first and give the head their path norms, see `UnitPaths`. For
            networks of very different scales.
    """

    activation: Literal["relu", "tanh"] = "relu"
    channels: int = 20
    layers: int = 2
    invariants: int = 20
    hidden: int = 500
    unit_paths: bool = False

    def _network(self, space: WeightSpace) -> Stack:
        c, flat = self.channels, space.with_taps(1)
        layers = [
            self.monomial(space, 1, c),
            *(self.equivariant(flat, c, c, self.activation) for _ in range(self.layers)),
            self.invariant(flat, c, self.invariants),
        ]
        inputs = self.invariants
        if self.unit_paths:
            with_norms = UnitPathInvariants(space, Stack(*layers))
            layers, inputs = [with_norms], inputs + with_norms.divide.norms
        return Stack(*layers, mlp(inputs, self.hidden, self.hidden, 1), nn.Sigmoid())


@dataclass(frozen=True, kw_only=True)
class InrClassification(Config):
    """Class of the image that a SIREN holds: logits `[B, classes]`, invariant to signs of neurons.

    `MNIST` and `CIFAR10` are the paper's, of 128 and 64 channels.

    Args:
        channels: of the Monomial and the equivariant layers, and as many invariants.
        layers: equivariant ones.
        hidden: width of the head's two hidden layers.
        classes, dropout: of the head.
        fourier: this many Gaussian Fourier features of the raw weights come first, 0 for none. With 256 the parameter
            counts are the paper's (4.1M for MNIST, 3.4M for CIFAR-10), but only permutations leave the output as it is.
        fourier_scale: of their frequencies; see `FourierFeatures`.
    """

    channels: int
    layers: int = 3
    hidden: int = 1000
    classes: int = 10
    dropout: float = 0.1
    fourier: int = 0
    fourier_scale: float = 3.0

    def _network(self, space: WeightSpace) -> Stack:
        c, flat = self.channels, space.with_taps(1)
        return Stack(
            *([FourierFeatures(1, self.fourier, self.fourier_scale)] if self.fourier else []),
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
    fourier_scale: float = 3.0
    bands: int = 3
    max_frequency: float = 3.0
    np_channels: int = 128
    np_layers: int = 3
    hidden: int = 500
    classes: int = 10
    dropout: float = 0.1

    def _network(self, space: WeightSpace) -> Stack:
        c, flat = self.channels, space.with_taps(1)
        position = PositionEncoding(flat, self.max_frequency, self.bands)
        pooled = 2 * space.num_layers * self.np_channels
        return Stack(
            self.monomial(space, 1, c, "sin"),
            self.equivariant(flat, c, c, "sin"),
            self.monomial(flat, c, 1),
            Activation(torch.abs, kind="positive"),
            FourierFeatures(1, self.fourier, self.fourier_scale),
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
    fourier_scale: float = 3.0
    bands: int = 3
    max_frequency: float = 3.0
    np_channels: int = 128
    np_layers: int = 3
    start_scale: float = 0.01

    def _network(self, space: WeightSpace) -> nn.Module:
        channels = (1, *(self.channels,) * self.layers)
        position = PositionEncoding(space, self.max_frequency, self.bands, layers=False)
        change = Stack(
            *(self.equivariant(space, d, e, "sin") for d, e in pairwise(channels)),
            FourierFeatures(self.channels, self.fourier, self.fourier_scale),
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
