"""The backend `cpu`: one native operator call per layer and direction.

Each operator has a fake kernel (for torch.compile and torch.export) and an autograd formula, whose backward is an
operator too. A second derivative differentiates the `torch` backend instead: the same function, in torch ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from magep_fast import factored
from magep_fast.ops.library import missing_library
from magep_fast.spaces import WeightSpace
from magep_fast.terms import GROUPS, Table, equivariant_table, invariant_table

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def unsupported(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why tensors of this kind cannot be taken, or None."""
    if device.type != "cpu":
        return "it runs on CPU tensors only"
    if dtype not in DTYPES:
        return f"it computes in {', '.join(str(d).removeprefix('torch.') for d in DTYPES)}"
    return None


def has_kernel(table: Table) -> bool:
    """Whether the fused kernels cover a table: all terms, one weight per connection, a hidden layer. Others run as torch
    ops."""
    taps = set(table.space.taps + table.out_taps)
    return table.terms == GROUPS["all"] and taps == {1} and table.space.num_layers > 1


def equivariant(
    table: Table, weights: Sequence[Tensor], biases: Sequence[Tensor], matrices: Sequence[Tensor], psi: Tensor | None
) -> tuple[list[Tensor], list[Tensor]]:
    """As `factored.equivariant`."""
    if not has_kernel(table):
        return factored.equivariant(table, weights, biases, matrices, psi)
    L = len(weights)
    results = _ops().equivariant(list(weights), list(biases), list(matrices), psi, table.out_channels)
    return results[:L], results[L : 2 * L]


def invariant(
    table: Table, weights: Sequence[Tensor], biases: Sequence[Tensor], matrix: Tensor, psi: Tensor | None
) -> Tensor:
    """As `factored.invariant`."""
    if not has_kernel(table):
        return factored.invariant(table, weights, biases, matrix, psi)
    return _ops().invariant(list(weights), list(biases), matrix, psi, table.out_channels)[0]


@cache
def _ops() -> Any:
    """torch.ops.magep_fast with everything registered."""
    reason = missing_library()
    if reason is not None:
        raise RuntimeError(reason)
    library = torch.library
    for name in ("equivariant", "invariant"):
        library.register_fake(f"magep_fast::{name}", globals()[f"_fake_{name}"])
        library.register_fake(f"magep_fast::{name}_backward", globals()[f"_fake_{name}_backward"])
        library.register_autograd(
            f"magep_fast::{name}",
            globals()[f"_backward_of_{name}"],
            setup_context=globals()[f"_save_for_{name}"],
        )
        library.register_autograd(
            f"magep_fast::{name}_backward",
            globals()[f"_double_backward_of_{name}"],
            setup_context=globals()[f"_save_for_{name}_backward"],
        )
    return torch.ops.magep_fast


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _padded(count: int, multiple: int) -> int:
    return (count + multiple - 1) // multiple * multiple


def _saved_size(widths: Sequence[int], d: int, equivariant: bool) -> int:
    """Numbers kept per network for the backward pass: `Layout` and the features in csrc/cpu/layout.h."""
    L, n_0, n_L = len(widths) - 1, widths[0], widths[-1]
    rows = [(n_0 + i, widths[i]) for i in range(1, L + 1)]
    sizes = [n_L * n_0 * d] + [(n_0 + 1) * n_0 * d] * (L if equivariant else 1)
    if equivariant:
        rows += [(n_L, widths[t]) for t in range(1, L)]
        for i in range(2, L + 1):
            factored_left = n_L < n_0 and i < L
            rows.append((1 if factored_left else n_0 + 1, widths[i - 1]))
            if factored_left:
                rows.append((n_L, widths[i]))
    sizes += [r * d * _padded(n, 8) for r, n in rows]
    features = d * (3 * n_L * n_0 + (L - 1) * n_L + n_L + 2 * (L - 1)) + 1
    return sum(_padded(size, 16) for size in sizes) + features


def _widths(weights: Sequence[Tensor]) -> list[int]:
    return [weights[0].shape[3], *(w.shape[2] for w in weights)]


def _fake_equivariant(
    weights: list[Tensor], biases: list[Tensor], matrices: list[Tensor], psi: Tensor, out_channels: int
) -> list[Tensor]:
    B, d = biases[0].shape[:2]
    results = [w.new_empty(B, out_channels, *w.shape[2:]) for w in weights]
    results += [b.new_empty(B, out_channels, b.shape[2]) for b in biases]
    saved = _saved_size(_widths(weights), d, True)
    return [*results, psi.new_empty(B, saved, dtype=_compute_dtype(psi.dtype))]


def _fake_equivariant_backward(
    grads: list[Tensor],
    weights: list[Tensor],
    biases: list[Tensor],
    matrices: list[Tensor],
    psi: Tensor,
    saved: Tensor,
    out_channels: int,
) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in (*weights, *biases, *matrices, psi)]


def _fake_invariant(
    weights: list[Tensor], biases: list[Tensor], matrix: Tensor, psi: Tensor, out_features: int
) -> list[Tensor]:
    B, d = biases[0].shape[:2]
    saved = _saved_size(_widths(weights), d, False)
    return [biases[0].new_empty(B, out_features), psi.new_empty(B, saved, dtype=_compute_dtype(psi.dtype))]


def _fake_invariant_backward(
    grad: Tensor, weights: list[Tensor], biases: list[Tensor], matrix: Tensor, psi: Tensor, saved: Tensor
) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in (*weights, *biases, matrix, psi)]


def _save_for_equivariant(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    weights, biases, matrices, psi, ctx.out_channels = inputs
    ctx.L = len(weights)
    ctx.save_for_backward(*weights, *biases, *matrices, psi, output[-1])


def _backward_of_equivariant(ctx: Any, grads: list[Tensor]) -> tuple:
    L, (*inputs, psi, saved) = ctx.L, ctx.saved_tensors
    weights, biases, matrices = inputs[:L], inputs[L : 2 * L], inputs[2 * L :]
    results = torch.ops.magep_fast.equivariant_backward(
        list(grads[: 2 * L]), weights, biases, matrices, psi, saved, ctx.out_channels
    )
    return results[:L], results[L : 2 * L], results[2 * L : 4 * L], results[4 * L], None


def _save_for_invariant(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    weights, biases, matrix, psi, _ = inputs
    ctx.L = len(weights)
    ctx.save_for_backward(*weights, *biases, matrix, psi, output[-1])


def _backward_of_invariant(ctx: Any, grads: list[Tensor]) -> tuple:
    L, (*inputs, matrix, psi, saved) = ctx.L, ctx.saved_tensors
    results = torch.ops.magep_fast.invariant_backward(grads[0], inputs[:L], inputs[L:], matrix, psi, saved)
    return results[:L], results[L : 2 * L], results[2 * L], results[2 * L + 1], None


def _save_for_equivariant_backward(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    grads, weights, biases, matrices, psi, _, ctx.out_channels = inputs
    ctx.L = len(weights)
    ctx.save_for_backward(*grads, *weights, *biases, *matrices, psi)


def _double_backward_of_equivariant(ctx: Any, seeds: list[Tensor]) -> tuple:
    L, tensors = ctx.L, ctx.saved_tensors
    grads, inputs = tensors[: 2 * L], tensors[2 * L :]
    space = WeightSpace(_widths(inputs[:L]))
    table = equivariant_table(space, space.taps, inputs[0].shape[1], ctx.out_channels, GROUPS["all"])

    def outputs(*inputs: Tensor) -> tuple[Tensor, ...]:
        weights, biases = factored.equivariant(
            table, inputs[:L], inputs[L : 2 * L], inputs[2 * L : 4 * L], inputs[4 * L]
        )
        return (*weights, *biases)

    by_grad, by_input = _second_derivative(outputs, inputs, grads, seeds)
    return by_grad, by_input[:L], by_input[L : 2 * L], by_input[2 * L : 4 * L], by_input[4 * L], None, None


def _save_for_invariant_backward(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    grad, weights, biases, matrix, psi, _ = inputs
    ctx.L = len(weights)
    ctx.save_for_backward(grad, *weights, *biases, matrix, psi)


def _double_backward_of_invariant(ctx: Any, seeds: list[Tensor]) -> tuple:
    L, (grad, *inputs) = ctx.L, ctx.saved_tensors
    space = WeightSpace(_widths(inputs[:L]))
    table = invariant_table(space, inputs[0].shape[1], inputs[2 * L].shape[0], GROUPS["all"])

    def outputs(*inputs: Tensor) -> tuple[Tensor, ...]:
        return (factored.invariant(table, inputs[:L], inputs[L : 2 * L], inputs[2 * L], inputs[2 * L + 1]),)

    (by_grad,), by_input = _second_derivative(outputs, inputs, [grad], seeds)
    return by_grad, by_input[:L], by_input[L : 2 * L], by_input[2 * L], by_input[2 * L + 1], None


def _second_derivative(
    function: Any, inputs: Sequence[Tensor], grads: Sequence[Tensor], seeds: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """The gradient of ⟨seeds, vjp(grads)⟩ in `grads` and in `inputs`, where vjp is that of `function` at `inputs`.

    If a third derivative is wanted, grad mode is on here and the torch ops below are recorded.
    """
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views, so that the graph of the caller stays connected and leaves can be asked for their gradient.
        inputs = [x.view_as(x) if x.requires_grad else x.detach().requires_grad_() for x in inputs]
        grads = [g.view_as(g) if g.requires_grad else g.detach().requires_grad_() for g in grads]
        first = torch.autograd.grad(function(*inputs), inputs, grads, create_graph=True, allow_unused=True)
        pairs = [(f, s) for f, s in zip(first, seeds, strict=True) if f is not None and s is not None]
        total = [*grads, *inputs]
        second = torch.autograd.grad(
            [f for f, _ in pairs], total, [s for _, s in pairs], create_graph=create_graph, allow_unused=True
        )
    second = [torch.zeros_like(x) if g is None else g for x, g in zip(total, second, strict=True)]
    return second[: len(grads)], second[len(grads) :]
