"""The symmetry group of a weight space: permuted neurons, each with a positive scale or a sign."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, overload

import torch
from torch import Tensor

from magep_fast.spaces import WeightFeatures, WeightSpace

Kind = Literal["positive", "sign", "permutation"]
KINDS: tuple[Kind, ...] = ("positive", "sign", "permutation")


@dataclass(frozen=True, eq=False)
class GroupElement:
    """g = (g_1, …, g_(L-1)), a monomial matrix g_i = D_i P_i for each hidden layer; the identity on n_0 and n_L.

    Acts as `W_i -> g_i W_i g_(i-1)^-1`, `b_i -> g_i b_i`. A network with an activation that commutes with g computes
    the same function before and after: positive scales for ReLU, signs for tanh and sin.

    Args:
        sources: for each hidden layer the neuron that lands in place j, `[n_i]`, or `[B, n_i]` for one element per
            network of a batch.
        scales: the diagonal of D_i, of the same shapes.
    """

    sources: tuple[Tensor, ...]
    scales: tuple[Tensor, ...]

    @staticmethod
    def sample(
        space: WeightSpace,
        kind: Kind = "positive",
        scale: tuple[float, float] | None = None,
        *,
        batch_size: int | None = None,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
    ) -> GroupElement:
        """A random element: uniform permutations, times scales uniform in `scale` (default (0.5, 2)) for
        `kind="positive"`, random signs for `"sign"`, nothing for `"permutation"`.

        With `batch_size`, one element for each network of a batch.
        """
        if kind not in KINDS:
            raise ValueError(f"kind must be one of {KINDS}; found {kind!r}")
        if scale is not None and kind != "positive":
            raise ValueError(f"scale={scale} only goes with kind='positive'; found kind={kind!r}")
        lo, hi = scale or (0.5, 2.0)
        if not 0 < lo <= hi:
            raise ValueError(f"scale must be (lo, hi) with 0 < lo <= hi; found {scale}")
        if generator is not None:
            device = generator.device
        batch = () if batch_size is None else (batch_size,)
        sources, scales = [], []
        for i, n in enumerate(space.widths[1:-1], start=1):
            if n is None:
                raise ValueError(f"n_{i} of {space} is open; sample needs a space whose widths are all known")
            noise = torch.rand(*batch, n, generator=generator, device=device)
            sources.append(noise.argsort(-1))
            uniform = torch.rand(*batch, n, generator=generator, device=device, dtype=torch.float64)
            if kind == "positive":
                scales.append(lo + (hi - lo) * uniform)
            elif kind == "sign":
                scales.append(torch.where(uniform < 0.5, -1.0, 1.0).double())
            else:
                scales.append(torch.ones_like(uniform))
        return GroupElement(tuple(sources), tuple(scales))

    def act(self, features: WeightFeatures) -> WeightFeatures:
        """g U, computed in the dtype of the features."""
        if features.num_layers != len(self.sources) + 1:
            raise ValueError(
                f"this element has {len(self.sources)} hidden layers; the features have {features.num_layers - 1}"
            )
        for i, (source, b) in enumerate(zip(self.sources, features.biases, strict=False), start=1):
            if source.shape[-1] != b.shape[-1]:
                raise ValueError(
                    f"layer {i}: the element acts on {source.shape[-1]} neurons; the features have {b.shape[-1]}"
                )
            if source.dim() == 2 and source.shape[0] != features.batch_size:
                raise ValueError(
                    f"an element for each of {source.shape[0]} networks cannot act on a batch of {features.batch_size}"
                )
        weights, biases = [], []
        for i, (w, b) in enumerate(zip(features.weights, features.biases, strict=True)):
            if i < len(self.sources):
                w, b = self._gather(w, i, -2), self._gather(b, i, -1)
            if i > 0:
                w = self._gather(w, i - 1, -1)
            weights.append(w * self._ratio(i, w))
            biases.append(b * self._scale(i, 1).to(b.dtype) if i < len(self.sources) else b)
        return WeightFeatures(weights, biases)

    def inverse(self) -> GroupElement:
        """g^-1."""
        sources = tuple(source.argsort(-1) for source in self.sources)
        scales = tuple(1 / scale.gather(-1, back) for scale, back in zip(self.scales, sources, strict=True))
        return GroupElement(sources, scales)

    def compose(self, other: GroupElement) -> GroupElement:
        """g h, so that `(g @ h) @ features == g @ (h @ features)`."""
        if len(self.sources) != len(other.sources):
            raise ValueError(f"cannot compose elements of {len(self.sources)} and {len(other.sources)} hidden layers")
        sources, scales = [], []
        for g_source, g_scale, h_source, h_scale in zip(
            self.sources, self.scales, other.sources, other.scales, strict=True
        ):
            g_source, h_source = torch.broadcast_tensors(g_source, h_source)
            sources.append(h_source.gather(-1, g_source))
            scales.append(g_scale * h_scale.expand(g_source.shape).gather(-1, g_source))
        return GroupElement(tuple(sources), tuple(scales))

    @overload
    def __matmul__(self, other: WeightFeatures) -> WeightFeatures: ...
    @overload
    def __matmul__(self, other: GroupElement) -> GroupElement: ...
    def __matmul__(self, other: WeightFeatures | GroupElement) -> WeightFeatures | GroupElement:
        if isinstance(other, WeightFeatures):
            return self.act(other)
        if isinstance(other, GroupElement):
            return self.compose(other)
        return NotImplemented

    def to(self, device: torch.device | str) -> GroupElement:
        """The same element on another device. It acts on features of any dtype."""
        if isinstance(device, torch.dtype):
            raise TypeError(f"expected a device; found {device}. A group element acts on features of any dtype")
        return GroupElement(tuple(s.to(device) for s in self.sources), tuple(s.to(device) for s in self.scales))

    def _gather(self, x: Tensor, hidden: int, dim: int) -> Tensor:
        """Neurons of hidden layer `hidden` (0-based) along `dim` of x in the order of their sources."""
        source = self.sources[hidden]
        if source.dim() == 1:
            return x.index_select(dim, source)
        shape = [source.shape[0]] + [1] * (x.dim() - 1)
        shape[dim] = source.shape[1]
        return x.gather(dim, source.view(shape).expand(*x.shape[:dim], source.shape[1], *x.shape[x.dim() + dim + 1 :]))

    def _scale(self, hidden: int, middle: int) -> Tensor:
        """Scales of a hidden layer as `[n]` or `[B, 1 × middle, n]`."""
        scale = self.scales[hidden]
        return scale if scale.dim() == 1 else scale.view(scale.shape[0], *(1,) * middle, scale.shape[1])

    def _ratio(self, layer: int, w: Tensor) -> Tensor:
        """d_i[j] / d_(i-1)[k], rounded once to the dtype of w."""
        ratio = torch.ones((), dtype=torch.float64, device=w.device)
        if layer < len(self.scales):
            ratio = ratio * self._scale(layer, 1).unsqueeze(-1)
        if layer > 0:
            ratio = ratio / self._scale(layer - 1, 2)
        return ratio.to(w.dtype)
