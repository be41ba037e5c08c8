"""The backend `cpu`: one native operator call per layer and direction.

The operators `magep_fast::chain`, `::equivariant`, `::invariant` and their backwards take and return lists of tensors.
They have fake kernels (for torch.compile and torch.export) and autograd formulas. Layers call them through the autograd
Functions below, which do the same with less overhead.

What no kernel computes is done by the `torch` backend, the same function in torch ops: second derivatives, forward
mode, and every transform of torch.func.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from magep_fast import factored
from magep_fast.activations import activate
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
    """Whether the fused kernels cover a table: all terms, one weight per connection, a hidden layer, and few enough
    inputs. (Layer 1 is mixed by n_0 × n_0 matrices of each network, which does not pay beyond.) Other tables run in
    torch ops."""
    space, taps = table.space, set(table.space.taps + table.out_taps)
    return table.terms == GROUPS["all"] and taps == {1} and space.num_layers > 1 and space.n_in <= MOST_INPUTS


MOST_INPUTS = 64


def _transformed() -> bool:
    """Whether a transform of torch.func or a forward-mode level is active, of which the operators know nothing."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def chain(weights: Sequence[Tensor], biases: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """As `factored.chain`."""
    if _transformed():
        return factored.chain(weights, biases)
    results = torch.ops.magep_fast.chain(list(weights), list(biases))
    return results[: len(weights)], results[len(weights) :]


def equivariant(
    table: Table,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    matrices: Sequence[Tensor],
    psi: Tensor | None,
    activation: str | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """As `factored.equivariant`."""
    if psi is None or not has_kernel(table) or _transformed():
        return factored.equivariant(table, weights, biases, matrices, psi, activation)
    L = len(weights)
    if torch.compiler.is_compiling():  # a graph holds operators
        results = torch.ops.magep_fast.equivariant(list(weights), list(biases), list(matrices), psi, table.out_channels)
    else:
        results = _Equivariant.apply(L, table.out_channels, *weights, *biases, *matrices, psi)
    return activate(results[:L], activation), activate(results[L : 2 * L], activation)


def invariant(
    table: Table, weights: Sequence[Tensor], biases: Sequence[Tensor], matrix: Tensor, psi: Tensor | None
) -> Tensor:
    """As `factored.invariant`."""
    if psi is None or not has_kernel(table) or _transformed():
        return factored.invariant(table, weights, biases, matrix, psi)
    if torch.compiler.is_compiling():
        return torch.ops.magep_fast.invariant(list(weights), list(biases), [matrix], psi, table.out_channels)[0]
    return _Invariant.apply(len(weights), table.out_channels, *weights, *biases, matrix, psi)[0]


def _split(L: int, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor], Tensor]:
    """Weights, biases, matrices and psi out of a flat sequence of them."""
    return list(tensors[:L]), list(tensors[L : 2 * L]), list(tensors[2 * L : -1]), tensors[-1]


def _widths(weights: Sequence[Tensor]) -> list[int]:
    return [weights[0].shape[-1], *(w.shape[-2] for w in weights)]


def _space(weights: Sequence[Tensor]) -> WeightSpace:
    """The space of the weights with hidden widths left open: no table depends on them, and they may be symbolic."""
    return WeightSpace((int(weights[0].shape[-1]), *(None,) * (len(weights) - 1), int(weights[-1].shape[-2])))


def _torch_equivariant(L: int, out_channels: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    weights, biases, matrices, psi = _split(L, tensors)
    space = _space(weights)
    table = equivariant_table(space, space.taps, int(weights[0].shape[1]), out_channels, GROUPS["all"])
    new_weights, new_biases = factored.equivariant(table, weights, biases, matrices, psi)
    return (*new_weights, *new_biases)


def _torch_invariant(L: int, out_channels: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    weights, biases, (matrix,), psi = _split(L, tensors)
    table = invariant_table(_space(weights), int(weights[0].shape[1]), out_channels, GROUPS["all"])
    return (factored.invariant(table, weights, biases, matrix, psi),)


class _Operation(torch.autograd.Function):
    """(L, out_channels, weights…, biases…, matrices…, psi) -> (outputs…, saved), by the operator of this name."""

    name: str
    in_torch: Callable[..., tuple[Tensor, ...]]

    @classmethod
    def run(cls, ctx: Any, L: int, out_channels: int, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        results = tuple(getattr(torch.ops.magep_fast, cls.name)(*_split(L, tensors), out_channels))
        ctx.L, ctx.out_channels, ctx.shapes = L, out_channels, [y.shape for y in results[:-1]]
        ctx.mark_non_differentiable(results[-1])
        ctx.set_materialize_grads(False)  # `saved` is large and would get a gradient of zeros
        ctx.save_for_backward(*tensors, results[-1])
        return results

    @classmethod
    def gradient(cls, ctx: Any, grads: Sequence[Tensor | None]) -> tuple:
        *tensors, saved = ctx.saved_tensors
        known = [tensors[0].new_zeros(n) if g is None else g for n, g in zip(ctx.shapes, grads, strict=False)]
        if torch.is_grad_enabled():  # a further derivative is wanted
            vjp = torch.func.vjp(lambda *x: cls.in_torch(ctx.L, ctx.out_channels, *x), *tensors)[1]
            return None, None, *vjp(tuple(known))
        return None, None, *_first_derivative(cls, ctx.L, ctx.out_channels, known, tensors, saved)


class _Equivariant(_Operation):
    name, in_torch = "equivariant", staticmethod(_torch_equivariant)

    @staticmethod
    def forward(ctx: Any, L: int, out_channels: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return _Equivariant.run(ctx, L, out_channels, tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple:
        return _Equivariant.gradient(ctx, grads)


class _Invariant(_Operation):
    name, in_torch = "invariant", staticmethod(_torch_invariant)

    @staticmethod
    def forward(ctx: Any, L: int, out_channels: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return _Invariant.run(ctx, L, out_channels, tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple:
        return _Invariant.gradient(ctx, grads)


def _first_derivative(
    operation: type[_Operation],
    L: int,
    out_channels: int,
    grads: Sequence[Tensor],
    tensors: Sequence[Tensor],
    saved: Tensor,
) -> tuple[Tensor, ...]:
    """The backward pass by its operator."""
    operator = getattr(torch.ops.magep_fast, f"{operation.name}_backward")
    return tuple(operator(list(grads), *_split(L, tensors), saved, out_channels))


def _second_derivative(
    function: Callable[..., tuple[Tensor, ...]],
    inputs: Sequence[Tensor],
    grads: Sequence[Tensor],
    seeds: Sequence[Tensor | None],
) -> tuple[list[Tensor], list[Tensor]]:
    """The gradient of ⟨seeds, vjp(grads)⟩ in `grads` and in `inputs`, where vjp is that of `function` at `inputs`."""
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # Aliases, so that the caller's graph stays connected for a third derivative.
        inputs = [x.view_as(x) if x.requires_grad else x.detach().requires_grad_() for x in inputs]
        grads = [g.view_as(g) if g.requires_grad else g.detach().requires_grad_() for g in grads]
        first = torch.autograd.grad(function(*inputs), inputs, grads, create_graph=True, allow_unused=True)
        pairs = [(f, s) for f, s in zip(first, seeds, strict=True) if f is not None and s is not None]
        wanted = [*grads, *inputs]
        second = torch.autograd.grad(
            [f for f, _ in pairs], wanted, [s for _, s in pairs], create_graph=create_graph, allow_unused=True
        )
    filled = [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, second, strict=True)]
    return filled[: len(grads)], filled[len(grads) :]


def register() -> None:
    """Fake kernels and autograd formulas of the operators themselves, for those who call or export them. Once, after
    the library is loaded."""
    _register_chain()
    for operation in (_Equivariant, _Invariant):
        _register_operation(operation)


def _register_chain() -> None:
    def fake(weights: list[Tensor], biases: list[Tensor]) -> list[Tensor]:
        (B, d), n = biases[0].shape[:2], _widths(weights)
        prefixes = [w.new_empty(B, d, n[i + 1], n[0] + i) for i, w in enumerate(weights)]
        return prefixes + [weights[0].new_empty(B, d, n[-1], width) for width in n[1:-1]]

    def fake_backward(grads: list[Tensor], weights: list[Tensor], biases: list[Tensor]) -> list[Tensor]:
        return [x.new_empty(x.shape) for x in (*weights, *biases)]

    def save(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
        ctx.L = len(inputs[0])
        ctx.save_for_backward(*inputs[0], *inputs[1])

    def backward(ctx: Any, grads: list[Tensor]) -> tuple:
        weights, biases = list(ctx.saved_tensors[: ctx.L]), list(ctx.saved_tensors[ctx.L :])
        found = torch.ops.magep_fast.chain_backward(grads, weights, biases)
        return found[: ctx.L], found[ctx.L :]

    def save_backward(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
        grads, weights, biases = inputs
        ctx.L = len(weights)
        ctx.save_for_backward(*grads, *weights, *biases)

    def double_backward(ctx: Any, seeds: list[Tensor]) -> tuple:
        L = ctx.L
        grads, tensors = ctx.saved_tensors[: -2 * L], ctx.saved_tensors[-2 * L :]

        def function(*x: Tensor) -> tuple[Tensor, ...]:
            prefixes, suffixes = factored.chain(x[:L], x[L:])
            return *prefixes, *suffixes

        by_grads, by_inputs = _second_derivative(function, tensors, grads, seeds)
        return by_grads, by_inputs[:L], by_inputs[L:]

    torch.library.register_fake("magep_fast::chain", fake)
    torch.library.register_fake("magep_fast::chain_backward", fake_backward)
    torch.library.register_autograd("magep_fast::chain", backward, setup_context=save)
    torch.library.register_autograd("magep_fast::chain_backward", double_backward, setup_context=save_backward)


def _register_operation(operation: type[_Operation]) -> None:
    name, is_equivariant = f"magep_fast::{operation.name}", operation is _Equivariant

    def fake(
        weights: list[Tensor], biases: list[Tensor], matrices: list[Tensor], psi: Tensor, out_channels: int
    ) -> list[Tensor]:
        B, d = biases[0].shape[:2]
        if is_equivariant:
            outputs = [w.new_empty(B, out_channels, *w.shape[2:]) for w in weights]
            outputs += [b.new_empty(B, out_channels, b.shape[2]) for b in biases]
        else:
            outputs = [biases[0].new_empty(B, out_channels)]
        compute = torch.float64 if psi.dtype == torch.float64 else torch.float32
        return [*outputs, psi.new_empty(B, _saved_size(_widths(weights), d, is_equivariant), dtype=compute)]

    def fake_backward(
        grads: list[Tensor],
        weights: list[Tensor],
        biases: list[Tensor],
        matrices: list[Tensor],
        psi: Tensor,
        saved: Tensor,
        out_channels: int,
    ) -> list[Tensor]:
        return [x.new_empty(x.shape) for x in (*weights, *biases, *matrices, psi)]

    def save(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
        weights, biases, matrices, psi, ctx.out_channels = inputs
        ctx.L = len(weights)
        ctx.save_for_backward(*weights, *biases, *matrices, psi, output[-1])

    def backward(ctx: Any, grads: list[Tensor]) -> tuple:
        *tensors, saved = ctx.saved_tensors
        found = _first_derivative(operation, ctx.L, ctx.out_channels, grads[:-1], tensors, saved)
        return *_split(ctx.L, found), None

    def save_backward(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
        grads, weights, biases, matrices, psi, _, ctx.out_channels = inputs
        ctx.L, ctx.count = len(weights), len(grads)
        ctx.save_for_backward(*grads, *weights, *biases, *matrices, psi)

    def double_backward(ctx: Any, seeds: list[Tensor]) -> tuple:
        grads, tensors = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
        by_grads, by_inputs = _second_derivative(
            lambda *x: operation.in_torch(ctx.L, ctx.out_channels, *x), tensors, grads, seeds
        )
        return by_grads, *_split(ctx.L, by_inputs), None, None

    torch.library.register_fake(name, fake)
    torch.library.register_fake(f"{name}_backward", fake_backward)
    torch.library.register_autograd(name, backward, setup_context=save)
    torch.library.register_autograd(f"{name}_backward", double_backward, setup_context=save_backward)


def _saved_size(widths: Sequence[int], d: int, is_equivariant: bool) -> int:
    """Numbers kept per network for the backward pass, as csrc/cpu/layout.h lays them out."""
    L, n_0, n_L = len(widths) - 1, widths[0], widths[-1]
    rows = [(n_0 + i, widths[i]) for i in range(1, L + 1)]
    sizes = [n_L * n_0 * d] + [(n_0 + 1) * n_0 * d] * (L if is_equivariant else 1)
    if is_equivariant:
        rows += [(n_L, widths[t]) for t in range(1, L)]
        for i in range(2, L + 1):
            through_output = (n_L < n_0 or n_L == 1) and i < L
            rows.append((1 if through_output else n_0 + 1, widths[i - 1]))
            if through_output:
                rows.append((n_L, widths[i]))
    sizes += [r * d * n for r, n in rows]
    features = d * (3 * n_L * n_0 + (L - 1) * n_L + n_L + 2 * (L - 1)) + 1
    return sum(sizes) + features
