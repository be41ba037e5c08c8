"""The elementwise functions a layer may apply to its own outputs: what kernels can fuse."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": torch.relu, "tanh": torch.tanh, "sin": torch.sin}
"""By name. "relu" respects positive scaling, "tanh" and "sin" respect sign flips."""


def activate(tensors: Sequence[Tensor], activation: str | None) -> list[Tensor]:
    """The function of this name applied to each tensor; None leaves them."""
    return list(tensors) if activation is None else [FUNCTIONS[activation](x) for x in tensors]
