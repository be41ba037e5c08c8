"""What a task is to the training loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.data import Networks
from magep_fast import WeightFeatures, WeightSpace

BuildSystem = Callable[[WeightSpace, dict[str, Any]], nn.Module]


@dataclass(frozen=True)
class Task:
    """A task of the paper on one data set.

    Args:
        activation: of the networks it is about.
        metric: its name, for people.
        higher_is_better: of the metric.
        systems: how to build every model of the task's table, given the space and settings of the model.
        prepare: networks to what models are given of them.
        targets: of networks, `[N, …]`: what the loss compares with.
        loss: mean over a batch, of the model's output and the targets, in float32.
        predictions: of the model's output and the targets, `[B, …]`: what is gathered from all batches and processes.
        score: the metric, of all predictions and targets.
        augment: networks to their augmented form, with a seed; None leaves them.
    """

    name: str
    activation: str
    metric: str
    higher_is_better: bool
    systems: dict[str, BuildSystem]
    prepare: Callable[[Networks], WeightFeatures]
    targets: Callable[[Networks], Tensor]
    loss: Callable[[Any, Tensor], Tensor]
    predictions: Callable[[Any, Tensor], Tensor]
    score: Callable[[Tensor, Tensor], float]
    augment: Callable[[Networks, torch.Generator], Networks] | None = None

    def better(self, new: float, old: float) -> bool:
        return new > old if self.higher_is_better else new < old
