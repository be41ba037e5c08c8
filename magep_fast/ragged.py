"""Batches of networks whose hidden widths differ: padded with zero neurons, which changes no result.

A neuron of zeros stays zero through every term of the layers and through every activation with f(0) = 0, so the other
neurons come out as if each network had been processed alone: exactly in the algebra, to rounding in floating point, as
sums of another length are split otherwise. What does not hold: layers that take means over neurons (those of
`magep_fast.permutation`) or activations with f(0) ≠ 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler, default_collate

from magep_fast.spaces import WeightFeatures, WeightSpace


@dataclass(frozen=True, eq=False)
class RaggedBatch:
    """Networks of different hidden widths as one batch.

    Args:
        features: all networks, hidden widths padded with zeros to the widest.
        widths: n_0 … n_L of each network.
        indices: where in the list that was collated each network stood.
    """

    features: WeightFeatures
    widths: tuple[tuple[int, ...], ...]
    indices: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.widths)

    @property
    def masks(self) -> tuple[Tensor, ...]:
        """Which neurons of layer i = 1 … L are real: L tensors of bools, `[B, n_i]`."""
        return tuple(
            torch.arange(b.shape[2], device=b.device)
            < torch.tensor([w[i] for w in self.widths], device=b.device)[:, None]
            for i, b in enumerate(self.features.biases, start=1)
        )

    def unpad(self, features: WeightFeatures | None = None) -> list[WeightFeatures]:
        """Each network without its padding, as a batch of one that shares memory.

        Args:
            features: what layers made of this batch, of any number of channels; default the batch itself.
        """
        padded = self.features if features is None else features
        if not isinstance(padded, WeightFeatures):
            raise TypeError(f"unpad takes WeightFeatures that layers made of this batch; found {type(padded).__name__}")
        if padded.space.widths != self.features.space.widths or padded.batch_size != len(self):
            raise ValueError(
                f"found {padded}; expected features made of this batch, {len(self)} networks in {self.features.space}"
            )
        return [
            WeightFeatures(
                (w[k : k + 1, :, : widths[i + 1], : widths[i]] for i, w in enumerate(padded.weights)),
                (b[k : k + 1, :, : widths[i + 1]] for i, b in enumerate(padded.biases)),
            )
            for k, widths in enumerate(self.widths)
        ]

    def map(self, function: Callable[[Tensor], Tensor]) -> RaggedBatch:
        """Applies `function` to every tensor of the features."""
        return replace(self, features=self.features.map(function))

    def to(self, *args: Any, **kwargs: Any) -> RaggedBatch:
        """As `Tensor.to`, for every tensor."""
        return self.map(lambda x: x.to(*args, **kwargs))

    def pin_memory(self) -> RaggedBatch:
        """As `Tensor.pin_memory`, for every tensor: a DataLoader with `pin_memory=True` calls it."""
        return self.map(Tensor.pin_memory)


def collate(networks: Sequence[WeightFeatures]) -> RaggedBatch:
    """One batch of networks whose hidden widths may differ; all else (n_0, n_L, L, taps, channels, dtype) must
    agree.

    Args:
        networks: each of them one network or a batch of networks of equal widths.
    """
    if not networks:
        raise ValueError("collate needs at least one network")
    for number, network in enumerate(networks):
        if not isinstance(network, WeightFeatures):
            raise TypeError(
                f"collate takes WeightFeatures; network {number} is of type {type(network).__name__}: "
                "from_modules and the other converters make them"
            )
        if network.dtype != networks[0].dtype:
            raise ValueError(
                f"network {number} is {network.dtype}, network 0 {networks[0].dtype}: .to(dtype) makes them the same"
            )
    first = _bucket_of(networks[0])
    for number, network in enumerate(networks):
        if _bucket_of(network) != first:
            raise ValueError(
                f"network {number} is {network}; expected all but the hidden widths as in network 0, {networks[0]}: "
                "bucket() sorts networks into batches that can be collated"
            )
    own = [network.space.widths for network in networks]
    widest = [max(n) for n in zip(*own, strict=True)]
    sizes = [network.batch_size for network in networks]
    return RaggedBatch(
        WeightFeatures.cat(network.pad(widest) for network in networks),
        tuple(w for w, size in zip(own, sizes, strict=True) for _ in range(size)),  # type: ignore[misc]
        tuple(k for k, size in enumerate(sizes) for _ in range(size)),
    )


def bucket(networks: Sequence[WeightFeatures], batch_size: int | None = None) -> Iterator[RaggedBatch]:
    """Networks of any architectures as batches, one after the other; `indices` of each say which networks it holds.

    Networks that differ in n_0, n_L, L, taps, channels or dtype, which no layer can take together, come in different
    batches.

    Args:
        networks: each of them one network or a batch of networks of equal widths, which stay together.
        batch_size: most items of the list in a batch; those of about the same size come together, to pad little.
            Default: each bucket is one batch.
    """
    for chosen in _batches(_kinds(networks), batch_size, range(len(networks))):
        batch = collate([networks[k] for k in chosen])
        yield replace(batch, indices=tuple(chosen[k] for k in batch.indices))


class NetworkDataset(Dataset[Any]):
    """Networks, and what is to be learned about each, for a `DataLoader`.

        data = NetworkDataset(networks, accuracies)
        loader = DataLoader(data, batch_sampler=BucketSampler(data, 32, shuffle=True), collate_fn=collate_fn)
        for batch, targets in loader:
            loss = (model(batch.features).squeeze(1) - targets).square().mean()  # [B, 1] and [B]

    Args:
        networks: of one network each.
        targets: one for each network, or None.
    """

    def __init__(self, networks: Sequence[WeightFeatures], targets: Sequence[Any] | Tensor | None = None):
        if targets is not None and len(targets) != len(networks):
            raise ValueError(f"found {len(networks)} networks and {len(targets)} targets; expected one target for each")
        for number, network in enumerate(networks):
            if network.batch_size != 1:
                raise ValueError(
                    f"item {number} is a batch of {network.batch_size} networks; expected one network: take a batch "
                    "apart with [batch[k] for k in range(batch.batch_size)]"
                )
        self.networks = networks
        self.targets = targets

    def __len__(self) -> int:
        return len(self.networks)

    def __getitem__(self, index: int) -> WeightFeatures | tuple[WeightFeatures, Any]:
        """The network `index`, with its target if there are targets."""
        return self.networks[index] if self.targets is None else (self.networks[index], self.targets[index])


def collate_fn(items: Sequence[Any]) -> Any:
    """For a `DataLoader`: networks, or tuples of a network and targets, as a RaggedBatch and tensors of targets."""
    if isinstance(items[0], WeightFeatures):
        return collate(items)
    networks, *targets = zip(*items, strict=True)
    return collate(networks), *(default_collate(list(x)) for x in targets)


class BucketSampler(Sampler[list[int]]):
    """For a `DataLoader`'s `batch_sampler`: batches of networks that can be collated, of about the same size each.

    Args:
        data: a data set of networks.
        batch_size: most networks in a batch.
        shuffle: new batches for each epoch, in a new order: among networks sorted by size, each comes less
            than two batches earlier or later. Networks that fit into one batch stay together.
        generator: where the order comes from.
    """

    def __init__(
        self, data: NetworkDataset, batch_size: int, shuffle: bool = False, generator: torch.Generator | None = None
    ):
        self.kinds = _kinds(data.networks)
        self.batch_size, self.shuffle, self.generator = batch_size, shuffle, generator
        self.batches = _batches(self.kinds, batch_size, range(len(self.kinds)))

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        if not self.shuffle:
            yield from self.batches
            return
        order = torch.randperm(len(self.kinds), generator=self.generator).tolist()
        shifts = (torch.rand(len(self.kinds), generator=self.generator) * 2 * self.batch_size).tolist()
        batches = _batches(self.kinds, self.batch_size, order, shifts)
        for k in torch.randperm(len(batches), generator=self.generator).tolist():
            yield batches[k]


_Bucket = tuple[WeightSpace, int, torch.dtype]


def _bucket_of(network: WeightFeatures) -> _Bucket:
    return network.space.any_hidden_width(), network.channels, network.dtype


_Kind = tuple[_Bucket, int]


def _kinds(networks: Iterable[WeightFeatures]) -> list[_Kind]:
    """The bucket of each network and its size."""
    return [(_bucket_of(network), network.numbers_per_network) for network in networks]


def _batches(
    kinds: Sequence[_Kind], batch_size: int | None, order: Iterable[int], shifts: Sequence[float] | None = None
) -> list[list[int]]:
    """Which networks to collate: buckets, each cut into batches of similar sizes, equal sizes in the order given.

    `shifts`: how much later than its place by size each network comes.
    """
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size must be positive; found {batch_size}")
    buckets: dict[_Bucket, list[int]] = {}
    for k in order:
        buckets.setdefault(kinds[k][0], []).append(k)
    batches = []
    for members in buckets.values():
        if batch_size is not None:
            members.sort(key=lambda k: kinds[k][1])
        if shifts is not None:
            places = {k: place + shifts[k] for place, k in enumerate(members)}
            members.sort(key=places.__getitem__)
        size = batch_size or len(members)
        batches += [members[start : start + size] for start in range(0, len(members), size)]
    return batches
