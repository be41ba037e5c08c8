"""Layers one after another as one operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from magep_fast.ops.operations import AdamState, AdamStep, Operation, UpdatingOperation, run


def stack(operation: Operation, inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> Sequence[Tensor]:
    """The outputs of the last layer.

    Args:
        operation: of `Backend.stack_of`.
        inputs: weights and biases, which the first layer takes.
        parameters: of all layers, in order.
    """
    return run(operation, (*inputs, *parameters))


def updating(operation: Operation) -> UpdatingOperation | None:
    """The operation itself, if it can take a step of Adam in its backward pass."""
    return cast(UpdatingOperation, operation) if hasattr(operation, "update") else None


def stack_forward(operation: Operation, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs, of which autograd knows nothing, and what the way back needs besides `tensors`, which are inputs and
    parameters."""
    with torch._C._AutoDispatchBelowAutograd():
        return operation.keep(operation.forward(tensors, True))


def stack_backward(
    operation: Operation, grads: Sequence[Tensor], tensors: Sequence[Tensor], kept: Sequence[Tensor]
) -> list[Tensor]:
    """Gradients of the parameters."""
    first = operation.inputs
    wanted = [False] * first + [True] * (operation.count - first)
    with torch._C._AutoDispatchBelowAutograd():
        found = operation.backward(grads, tensors, kept, wanted)
    return [grad for grad in found[first:] if grad is not None]


def stack_update(
    operation: UpdatingOperation,
    grads: Sequence[Tensor],
    tensors: Sequence[Tensor],
    kept: Sequence[Tensor],
    state: AdamState,
    step: AdamStep,
) -> None:
    """A step of Adam, see `UpdatingOperation.update`."""
    with torch._C._AutoDispatchBelowAutograd():
        operation.update(grads, tensors, kept, state, step)
    _count_changes(operation, tensors, state)


def stack_train(
    operation: UpdatingOperation,
    tensors: Sequence[Tensor],
    targets: Tensor,
    order: Tensor | None,
    batch_size: int,
    loss: str,
    state: AdamState,
    step: AdamStep,
) -> Tensor:
    """The losses of batches before a step of Adam on each, see `UpdatingOperation.train`."""
    try:
        with torch._C._AutoDispatchBelowAutograd():
            losses = operation.train(tensors, targets, order, batch_size, loss, state, step)
    except MemoryError:  # after some of the steps, perhaps
        _count_changes(operation, tensors, state)
        raise
    if len(losses):
        _count_changes(operation, tensors, state)
    return losses


def _count_changes(operation: Operation, tensors: Sequence[Tensor], state: AdamState) -> None:
    """Tells autograd that parameters and state were changed, which nobody counts below it."""
    torch.autograd.graph.increment_version([*tensors[operation.inputs :], *state])
