"""Layers one after another as one operation."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from magep_fast.ops.operations import Operation, run


def stack(operation: Operation, inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> Sequence[Tensor]:
    """The outputs of the last layer.

    Args:
        operation: of `Backend.stack_of`.
        inputs: weights and biases, which the first layer takes.
        parameters: of all layers, in order.
    """
    return run(operation, (*inputs, *parameters))
