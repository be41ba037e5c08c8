"""Layers one after another as one operation."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from magep_fast.ops.operations import Operation, Stacked, run


def stack(operations: Sequence[Operation], inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> Sequence[Tensor]:
    """The outputs of the last operation.

    Args:
        operations: of `Backend.operation_of`, each taking the outputs of the one before.
        inputs: of the first.
        parameters: of all of them, in order.
    """
    return run(Stacked(operations), (*inputs, *parameters))
