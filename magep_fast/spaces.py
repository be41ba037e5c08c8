"""The spaces the layers act on: `WeightSpace`, one architecture; `WeightFeatures`, a batch of its networks."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import register_dataclass

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


@dataclass(frozen=True)
class WeightSpace:
    """The shape of one network: widths n_0 … n_L, and how many weights each connection has.

    Args:
        widths: n_0, n_1, …, n_L. A hidden width may be `None`, meaning any: no parameter of any layer depends on the
            hidden widths. n_0 and n_L must be known.
        taps: weights per connection of each layer, first layer first: 9 for a 3×3 kernel, 1 for a dense layer. An int
            stands for all layers; the default is 1.
    """

    widths: tuple[int | None, ...]
    taps: tuple[int, ...] = ()

    def __init__(self, widths: Iterable[int | None], taps: int | Iterable[int] | None = None):
        widths = tuple(widths)
        if len(widths) < 2:
            raise ValueError(f"widths must list n_0, …, n_L with L >= 1, so at least two numbers; found {widths}")
        for i, n in enumerate(widths):
            if n is None and i in (0, len(widths) - 1):
                end = "n_0" if i == 0 else "n_L"
                raise ValueError(f"{end} must be a number, only hidden widths may be None; found widths={widths}")
            if n is not None and (not isinstance(n, int) or n < 1):
                raise ValueError(f"every width must be a positive int or None; found n_{i} = {n!r} in {widths}")
        num_layers = len(widths) - 1
        if taps is None:
            taps = 1
        taps = (taps,) * num_layers if isinstance(taps, int) else tuple(taps)
        if len(taps) != num_layers:
            raise ValueError(f"taps must list one number per layer ({num_layers}) or be an int; found {taps}")
        if any(not isinstance(f, int) or f < 1 for f in taps):
            raise ValueError(f"every entry of taps must be a positive int; found {taps}")
        object.__setattr__(self, "widths", widths)
        object.__setattr__(self, "taps", taps)

    @property
    def num_layers(self) -> int:
        """L, the number of weight matrices."""
        return len(self.widths) - 1

    @property
    def n_in(self) -> int:
        """n_0."""
        return self.widths[0]  # type: ignore[return-value]

    @property
    def n_out(self) -> int:
        """n_L."""
        return self.widths[-1]  # type: ignore[return-value]

    def with_taps(self, taps: int | Iterable[int] | None) -> WeightSpace:
        """The same widths with other taps."""
        return WeightSpace(self.widths, taps)

    def any_hidden_width(self) -> WeightSpace:
        """The same space with every hidden width left open."""
        return WeightSpace((self.n_in, *(None,) * (self.num_layers - 1), self.n_out), self.taps)

    @staticmethod
    def of(module: nn.Module) -> WeightSpace:
        """The space of an `nn.Sequential`-like chain of dense and convolution layers, in order of registration.

        A dense layer that follows a flattened convolution has one tap per position of the feature map. Layers
        without parameters (activations, pooling, dropout, flatten) are looked through, BatchNorm belongs to the layer
        in front of it.
        """
        return WeightSpace.of_layers(chained_layers(module))

    @staticmethod
    def of_layers(layers: Sequence[ChainedLayer]) -> WeightSpace:
        """The space of a chain of layers, each of which reads the one before it."""
        widths, taps = [layers[0].weight.shape[1]], []
        for i, layer in enumerate(layers):
            n_in, known = layer.weight.shape[1], widths[-1]
            flattens = i > 0 and layer.weight.dim() == 2 and layers[i - 1].weight.dim() > 2
            if not known or n_in % known or (n_in != known and not flattens):
                raise ValueError(
                    f"layer {layer} reads {n_in} features but the layer before it gives {known}; "
                    "expected a chain in which each layer reads the one registered before it"
                )
            taps.append(n_in // known * prod(layer.weight.shape[2:]))
            widths.append(layer.weight.shape[0])
        return WeightSpace(widths, taps)

    def __repr__(self) -> str:
        widths = "-".join("*" if n is None else str(n) for n in self.widths)
        return f"WeightSpace({widths})" if set(self.taps) == {1} else f"WeightSpace({widths}, taps={self.taps})"


@dataclass(frozen=True, eq=False)
class Norm:
    """A BatchNorm in evaluation: (x − mean) / √(variance + eps) · scale + shift, where it has scale and shift."""

    mean: Tensor
    variance: Tensor
    scale: Tensor | None
    shift: Tensor | None
    eps: float


@dataclass(frozen=True, eq=False)
class ChainedLayer:
    """A dense or convolution layer as it stands in a network: weight `[n_i, n_(i-1)·positions]` or
    `[n_i, n_(i-1), *kernel]`, bias `[n_i]` or None, and the BatchNorm behind it. The tensors are the network's own.
    """

    name: str
    weight: Tensor
    bias: Tensor | None
    norm: Norm | None = None

    def followed_by(self, norm: Norm, name: str) -> ChainedLayer:
        """The layer with a BatchNorm behind it."""
        if self.norm is not None:
            raise ValueError(f"'{name}' is a second BatchNorm behind layer {self}; expected one at most")
        if norm.mean.shape != self.weight.shape[:1]:
            raise ValueError(
                f"BatchNorm '{name}' has {tuple(norm.mean.shape)} statistics but layer {self} in front of it has "
                f"{self.weight.shape[0]} neurons; expected one per neuron"
            )
        return replace(self, norm=norm)

    def __str__(self) -> str:
        return f"'{self.name}' ({tuple(self.weight.shape)})"


def chained_layers(module: nn.Module) -> list[ChainedLayer]:
    """The dense and convolution layers of a module, in order; refuses layers a weight space cannot describe."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"found {type(module).__name__}; expected an nn.Module")
    layers: list[ChainedLayer] = []
    between: str | None = None  # what stands between the last layer and here and does not commute with a BatchNorm
    for name, layer in module.named_modules(remove_duplicate=False):  # a layer used twice is two layers
        if any(isinstance(x, nn.parameter.UninitializedParameter) for x in layer.parameters(recurse=False)):
            raise ValueError(f"layer '{name}' ({layer}) has no shape yet; run the network once on data")
        if isinstance(layer, _CONVOLUTIONS) and layer.groups != 1:
            raise ValueError(f"layer '{name}' ({layer}) has groups={layer.groups}; only groups=1 is supported")
        if isinstance(layer, (nn.Linear, *_CONVOLUTIONS)):
            layers.append(ChainedLayer(name, layer.weight, layer.bias))
            between = None
        elif isinstance(layer, nn.modules.batchnorm._BatchNorm):
            if not layers or between is not None:
                place = f"behind {between}" if layers else "in front of the first layer"
                raise ValueError(
                    f"layer '{name}' ({layer}) stands {place}; a BatchNorm can be folded only into a dense or "
                    "convolution layer directly in front of it: fold it into the layer that follows it, or remove it"
                )
            layers[-1] = layers[-1].followed_by(_norm_of(name, layer), name)
        elif next(layer.parameters(recurse=False), None) is not None:
            raise ValueError(
                f"layer '{name}' ({layer}) has parameters but is neither nn.Linear nor nn.Conv1d/2d/3d nor BatchNorm; "
                "fold it into its neighbour or remove it, or leave it out and convert the state_dict of the rest"
            )
        elif not list(layer.children()) and not isinstance(layer, (nn.Identity, nn.Flatten, *_DROPOUTS)):
            between = f"'{name}' ({layer})"
    if not layers:
        raise ValueError(f"{type(module).__name__} has no nn.Linear or nn.Conv1d/2d/3d layer")
    return layers


def _norm_of(name: str, layer: nn.modules.batchnorm._BatchNorm) -> Norm:
    if layer.running_mean is None or layer.running_var is None:
        raise ValueError(
            f"layer '{name}' ({layer}) normalises by each batch and has no running statistics, so no fixed weights "
            "stand for it; expected track_running_stats=True"
        )
    return Norm(layer.running_mean, layer.running_var, layer.weight, layer.bias, layer.eps)


@dataclass(frozen=True, eq=False)
class WeightFeatures:
    """A batch of networks, or of features of the same shape as networks, first layer first.

    Args:
        weights: L tensors `[B, C·taps_i, n_i, n_(i-1)]`, i = 1 … L, the channel outermost of C·taps.
        biases: L tensors `[B, C, n_i]`.

    It is a pytree node: `torch.utils._pytree`, `torch.export`, `torch.func` and DDP see the tensors in it.
    """

    weights: tuple[Tensor, ...]
    biases: tuple[Tensor, ...]

    def __init__(self, weights: Iterable[Tensor], biases: Iterable[Tensor]):
        object.__setattr__(self, "weights", tuple(weights))
        object.__setattr__(self, "biases", tuple(biases))

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.weights)

    @property
    def batch_size(self) -> int:
        """B."""
        return self.biases[0].shape[0]

    @property
    def channels(self) -> int:
        """C, the channels of the biases; weights have C·taps_i."""
        return self.biases[0].shape[1]

    @property
    def numbers_per_network(self) -> int:
        """Weights and biases of one network, in all channels."""
        return sum(x.shape[1:].numel() for x in self.tensors())

    @property
    def dtype(self) -> torch.dtype:
        return self.biases[0].dtype

    @property
    def device(self) -> torch.device:
        return self.biases[0].device

    @property
    def space(self) -> WeightSpace:
        """The space these features live in, with the hidden widths they have."""
        self._check_structure()
        widths = (self.weights[0].shape[3], *(b.shape[2] for b in self.biases))
        return WeightSpace(widths, (w.shape[1] // max(self.channels, 1) for w in self.weights))

    def map(self, function: Callable[[Tensor], Tensor]) -> WeightFeatures:
        """Applies `function` to every weight and bias tensor."""
        return WeightFeatures(map(function, self.weights), map(function, self.biases))

    def to(self, *args: Any, **kwargs: Any) -> WeightFeatures:
        """As `Tensor.to`, for every tensor."""
        return self.map(lambda x: x.to(*args, **kwargs))

    def detach(self) -> WeightFeatures:
        """As `Tensor.detach`, for every tensor."""
        return self.map(Tensor.detach)

    def tensors(self) -> tuple[Tensor, ...]:
        """All weights, then all biases."""
        return self.weights + self.biases

    def __getitem__(self, index: int | slice | Sequence[int] | Tensor) -> WeightFeatures:
        """The networks `index` of the batch, as a batch: one index gives a batch of one network."""
        if hasattr(index, "__index__") and getattr(index, "ndim", 0) == 0:  # ints, NumPy's and 0-d tensors too
            index = operator.index(index)
            if not -self.batch_size <= index < self.batch_size:
                raise IndexError(f"network {index} of a batch of {self.batch_size}")
            index %= self.batch_size
            return self.map(lambda x: x[index : index + 1])
        return self.map(lambda x: x[index])

    @staticmethod
    def cat(features: Iterable[WeightFeatures]) -> WeightFeatures:
        """One batch out of several of the same space."""
        batches = list(features)
        if not batches:
            raise ValueError("cat needs at least one batch of features")
        return WeightFeatures(
            (torch.cat(layer) for layer in zip(*(f.weights for f in batches), strict=True)),
            (torch.cat(layer) for layer in zip(*(f.biases for f in batches), strict=True)),
        )

    def pad(self, widths: Sequence[int | None]) -> WeightFeatures:
        """Zero neurons added up to the given hidden widths (n_0 … n_L; `None` keeps a width).

        Exact: a neuron of zeros stays zero through every term of the layers and through activations with f(0) = 0.
        """
        have = self.space.widths
        if len(widths) != len(have):
            raise ValueError(f"pad needs n_0 … n_L, {len(have)} widths; found {tuple(widths)}")
        grow = [0 if want is None else want - n for n, want in zip(have, widths, strict=True)]  # type: ignore[operator]
        if min(grow) < 0 or grow[0] or grow[-1]:
            raise ValueError(f"pad can only widen hidden layers: from {have} to {tuple(widths)} is not possible")
        pad = nn.functional.pad
        return WeightFeatures(
            (pad(w, (0, grow[i], 0, grow[i + 1])) for i, w in enumerate(self.weights)),
            (pad(b, (0, grow[i + 1])) for i, b in enumerate(self.biases)),
        )

    def check(self, space: WeightSpace, channels: int) -> None:
        """Raises an error that names the layer, what was found and what was expected, unless these features are a
        batch of networks of `space` with the given number of channels."""
        if self.num_layers != space.num_layers:
            raise ValueError(f"{space} has {space.num_layers} layers; the features have {self.num_layers}")
        self._check_structure()
        if self.channels != channels:
            raise ValueError(f"expected features of {channels} channels; found {self.channels}")
        for i, (w, b) in enumerate(zip(self.weights, self.biases, strict=True), start=1):
            # An open width takes what the layer has; _check_structure saw to it that neighbours agree.
            n, m = space.widths[i] or w.shape[2], space.widths[i - 1] or w.shape[3]
            expected = (self.batch_size, channels * space.taps[i - 1], n, m)
            if tuple(w.shape) != expected:
                taps = "" if w.shape[1] <= expected[1] else ". MonomialEquivariant brings several taps to one"
                raise ValueError(
                    f"layer {i}: weights are {tuple(w.shape)}; expected {expected}, "
                    f"[batch, channels·taps, n_{i}, n_{i - 1}] of {space}{taps}"
                )
            if b.shape[2] != n:
                raise ValueError(f"layer {i}: biases are {tuple(b.shape)}; expected {(self.batch_size, channels, n)}")

    def _check_structure(self) -> None:
        """Ranks, batch, channels, neighbouring widths, dtype and device agree among all tensors."""
        if not self.weights or len(self.weights) != len(self.biases):
            raise ValueError(
                f"features need as many weights as biases, at least one of each; "
                f"found {len(self.weights)} weights and {len(self.biases)} biases"
            )
        for i, (w, b) in enumerate(zip(self.weights, self.biases, strict=True), start=1):
            # Biases first: batch, channels, dtype and device are read off those of layer 1.
            for what, x, rank, form in (
                ("biases", b, 3, f"[batch, channels, n_{i}]"),
                ("weights", w, 4, f"[batch, channels·taps, n_{i}, n_{i - 1}]"),
            ):
                if not isinstance(x, Tensor):
                    raise TypeError(f"layer {i}: {what} must be a tensor {form}; found {type(x).__name__}")
                if x.dim() != rank:
                    raise ValueError(f"layer {i}: {what} are {tuple(x.shape)}, of rank {x.dim()}; expected {form}")
                if x.shape[0] != self.batch_size:
                    raise ValueError(
                        f"layer {i}: {what} are {tuple(x.shape)}, a batch of {x.shape[0]}; "
                        f"expected the batch of {self.batch_size} that the first layer's biases have"
                    )
                if x.dtype != self.dtype or x.device != self.device:
                    raise ValueError(
                        f"layer {i}: {what} are {x.dtype} on {x.device}; expected {self.dtype} on {self.device} "
                        "as the first layer's biases are: bring all tensors to one dtype and device with .to()"
                    )
            if b.shape[1] != self.channels:
                raise ValueError(
                    f"layer {i}: biases are {tuple(b.shape)}; expected {self.channels} channels as in layer 1"
                )
            if self.channels and w.shape[1] % self.channels:
                raise ValueError(
                    f"layer {i}: weights are {tuple(w.shape)}; expected channels·taps = a multiple of the "
                    f"{self.channels} channels that the biases have"
                )
            if w.shape[2] != b.shape[2]:
                raise ValueError(
                    f"layer {i}: weights are {tuple(w.shape)} and biases {tuple(b.shape)}; "
                    f"expected the same n_{i} in both, found {w.shape[2]} and {b.shape[2]}"
                )
            if i > 1 and w.shape[3] != self.biases[i - 2].shape[2]:
                raise ValueError(
                    f"layer {i}: weights are {tuple(w.shape)}; expected [..., n_{i}, n_{i - 1} = "
                    f"{self.biases[i - 2].shape[2]}], as layer {i - 1} has {self.biases[i - 2].shape[2]} neurons"
                )

    def __repr__(self) -> str:
        try:
            return (
                f"WeightFeatures({self.space}, batch={self.batch_size}, channels={self.channels}, "
                f"{self.dtype}, {self.device})"
            )
        except Exception:  # leaves need not be tensors inside a pytree transform
            return f"WeightFeatures(weights={self.weights!r}, biases={self.biases!r})"


register_dataclass(WeightFeatures, serialized_type_name="magep_fast.WeightFeatures")
torch.serialization.add_safe_globals([WeightFeatures])  # torch.load with weights_only reads saved features
