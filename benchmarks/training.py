"""The training loop that every row of the tables runs: data in memory, `TrainingStep` with fused Adam."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from magep_fast import TrainingStep, WeightFeatures


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


class Adam(torch.optim.Adam):
    """torch's fused Adam without the work that it repeats in Python at every step: the lists of tensors stay.
    Parameters that have no gradient at the first step are left alone, and all others must have one at every step."""

    steps_like_adam = True

    def __init__(self, parameters: Iterable[nn.Parameter], learning_rate: float):
        super().__init__(parameters, learning_rate, fused=True)
        self.trained: list[Tensor] = []
        self.lists: tuple[list[Tensor], list[Tensor], list[Tensor]] = [], [], []

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        if not self.trained:
            self.trained = [p for p in group["params"] if p.grad is not None]
        grads = [p.grad for p in self.trained if p.grad is not None]
        if len(grads) != len(self.trained):
            raise RuntimeError("a parameter that was trained before has no gradient at this step")
        means, squares, steps = self._lists()
        torch._foreach_add_(steps, 1)
        beta1, beta2 = group["betas"]
        torch._fused_adam_(
            self.trained,
            grads,
            means,
            squares,
            [],
            steps,
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )

    def _lists(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Means, squares and steps of what is trained, made at the first step, and found anew if the state is another:
        all of it is then, as when it was loaded or when fused steps have put it elsewhere."""
        if self.trained[0] not in self.state:
            for p in self.trained:
                moments = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                self.state[p] = {"step": torch.zeros((), device=p.device), **moments}
        means = self.lists[0]
        if not means or means[0] is not self.state[self.trained[0]]["exp_avg"]:
            names = ("exp_avg", "exp_avg_sq", "step")
            means, squares, steps = ([self.state[p][name] for p in self.trained] for name in names)
            self.lists = means, squares, steps
        return self.lists


class Trainer:
    """Adam on batches in random order, epoch after epoch: `run(n)` takes the next n steps, a batch each."""

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
        self.training_step = TrainingStep(model, loss, Adam(trained, learning_rate))
        self.generator = torch.Generator().manual_seed(seed)
        self.order = torch.empty(0, dtype=torch.int64)  # what is left of the epoch

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.data) // self.batch_size)

    def run(self, steps: int) -> Tensor:
        """Forward, loss, backward, Adam, for each step; the losses, left on the device."""
        losses = []
        while steps > 0:
            if not len(self.order):
                self.order = torch.randperm(len(self.data), generator=self.generator).to(self.data.networks.device)
            now, self.order = self.order[: steps * self.batch_size], self.order[steps * self.batch_size :]
            losses.append(self.training_step.train(self.data.networks, self.data.targets, now, self.batch_size))
            steps -= len(losses[-1])
        return torch.cat(losses)
