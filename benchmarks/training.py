"""The training loop that every row of the tables runs: data in memory, fused Adam."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from magep_fast import WeightFeatures


def keep_freed_memory() -> bool:
    """Tells glibc's allocator to keep what is freed, as a training loop asks for the same sizes at every step: else
    the pages of every gradient come fresh from the system each time. Process-wide, so for all systems alike; says
    whether the allocator is one that listens."""
    if platform.libc_ver()[0] != "glibc":
        return False
    trim_threshold, mmap_threshold = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
    libc, most = ctypes.CDLL(None), 2**30
    return bool(libc.mallopt(mmap_threshold, most)) and bool(libc.mallopt(trim_threshold, most))


class Dataset:
    """Networks of one space, one tensor for the weights and one for the biases of each layer, and a target for each."""

    def __init__(self, networks: WeightFeatures, targets: Tensor):
        self.networks, self.targets = networks.map(Tensor.contiguous), targets

    def __len__(self) -> int:
        return self.networks.batch_size

    def to(self, device: torch.device) -> Dataset:
        self.networks, self.targets = self.networks.to(device), self.targets.to(device)
        return self

    def batch(self, index: Tensor) -> tuple[WeightFeatures, Tensor]:
        """The networks `index` and their targets, copied: contiguous, as kernels want them."""
        return self.networks.map(lambda x: x.index_select(0, index)), self.targets.index_select(0, index)


class Adam:
    """torch's fused Adam without the work that torch.optim.Adam repeats in Python at every step: the lists of tensors
    stay, and one counter of steps serves all parameters. Parameters that have no gradient at the first step are left
    alone, and all others must have one at every step."""

    def __init__(self, parameters: Iterable[nn.Parameter], learning_rate: float):
        self.parameters = list(parameters)
        self.learning_rate = learning_rate
        self.trained: list[Tensor] = []

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        if not self.trained:
            self.trained = [p for p in self.parameters if p.grad is not None]
            self.means = [torch.zeros_like(p) for p in self.trained]
            self.squares = [torch.zeros_like(p) for p in self.trained]
            self.count = torch.zeros((), device=self.trained[0].device)
        grads = [p.grad for p in self.trained if p.grad is not None]
        if len(grads) != len(self.trained):
            raise RuntimeError("a parameter that was trained before has no gradient at this step")
        self.count += 1
        torch._fused_adam_(
            self.trained,
            grads,
            self.means,
            self.squares,
            [],
            [self.count] * len(self.trained),
            lr=self.learning_rate,
            beta1=0.9,
            beta2=0.999,
            weight_decay=0.0,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )


class Trainer:
    """Adam on batches in random order, epoch after epoch: `step()` is one batch."""

    def __init__(
        self,
        model: nn.Module,
        data: Dataset,
        loss: Callable[[Tensor, Tensor], Tensor],
        batch_size: int,
        learning_rate: float = 1e-3,
        seed: int = 0,
    ):
        self.model, self.data, self.loss, self.batch_size = model, data, loss, batch_size
        trained = [p for p in model.parameters() if p.requires_grad]
        self.optimiser = Adam(trained, learning_rate)
        self.generator = torch.Generator().manual_seed(seed)
        self.batches = self._batches()

    def _batches(self) -> Iterator[Tensor]:
        while True:
            order = torch.randperm(len(self.data), generator=self.generator)
            yield from order.to(self.data.networks.device).split(self.batch_size)

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.data) // self.batch_size)

    def step(self) -> Tensor:
        """Forward, loss, backward, Adam; the loss, left on the device."""
        networks, targets = self.data.batch(next(self.batches))
        loss = self.loss(self.model(networks), targets)
        self.optimiser.zero_grad()
        loss.backward()
        self.optimiser.step()
        return loss.detach()
