"""The backend `triton`: registered operators that launch the Triton kernels, a fixed few per layer and direction.

The operators `magep_fast::triton_chain`, `::triton_equivariant`, `::triton_invariant` and their backwards have fake
kernels and autograd formulas, so that torch.compile, torch.export and CUDA graphs take them as they are: nothing waits
for the device, and no size depends on data.

As for `cpu`, what no kernel computes is done in torch ops: second derivatives, forward mode, torch.func, and the tables
that `has_kernel` refuses.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from magep_fast import factored
from magep_fast.ops.native import _second_derivative, _space, _transformed, has_kernel
from magep_fast.terms import GROUPS, Table, equivariant_table, invariant_table

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NEEDS_ARGUMENT = "sin"
"""The activation whose derivative is taken from its argument; that of the others is taken from the output."""


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, on the CPU, for tests."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


@cache
def missing() -> str | None:
    """Why the backend cannot run here, or None. Found out once, so that torch.compile sees a constant."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; run pip install triton"
    if importlib.util.find_spec("magep_fast.triton_kernels") is None:
        return "magep_fast.triton_kernels is not installed; run pip install again"
    if not torch.cuda.is_available() and not interpreted():
        return "torch sees no GPU (for tests without one, set TRITON_INTERPRET=1)"
    return None


def unsupported(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why tensors of this kind cannot be taken, or None."""
    if interpreted():
        if device.type != "cpu":
            return "TRITON_INTERPRET=1 is set, which runs on CPU tensors"
        return None if dtype in (*DTYPES, torch.float64) else _dtypes("float64, ")
    if device.type != "cuda":
        return "it runs on GPU tensors only (on CPU tensors in Triton's interpreter: TRITON_INTERPRET=1)"
    return None if dtype in DTYPES else _dtypes("")


def _dtypes(more: str) -> str:
    return f"it computes in {more}{', '.join(str(d).removeprefix('torch.') for d in DTYPES)}"


def chain(weights: Sequence[Tensor], biases: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """As `factored.chain`."""
    if len(weights) == 1 or _transformed():
        return factored.chain(weights, biases)
    prefixes, suffixes = torch.ops.magep_fast.triton_chain(list(weights), list(biases))
    (B, d), n_0, dtype = biases[0].shape[:2], weights[0].shape[-1], weights[0].dtype
    widths = [w.shape[-2] for w in weights]
    found = []
    parts = prefixes.split([B * d * (n_0 + i) * n for i, n in enumerate(widths, start=1)])
    for i, (part, n) in enumerate(zip(parts, widths, strict=True), start=1):
        found.append(part.view(B, d, n_0 + i, n)[:, :, :-1].mT.to(dtype))
    hidden = widths[:-1]
    sections = suffixes.split([B * d * widths[-1] * n for n in hidden])
    return found, [part.view(B, d, widths[-1], n).to(dtype) for part, n in zip(sections, hidden, strict=True)]


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
    if table.share_Wb:
        table, matrices = factored.unshare_Wb(table, matrices)
    L, tensors = len(weights), (*weights, *biases, *matrices, psi)
    training = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    results = torch.ops.magep_fast.triton_equivariant(
        list(weights), list(biases), list(matrices), psi, table.out_channels, activation, training
    )
    return results[:L], results[L : 2 * L]


def invariant(
    table: Table, weights: Sequence[Tensor], biases: Sequence[Tensor], matrix: Tensor, psi: Tensor | None
) -> Tensor:
    """As `factored.invariant`."""
    if psi is None or not has_kernel(table) or _transformed():
        return factored.invariant(table, weights, biases, matrix, psi)
    if table.share_Wb:
        table, (matrix,) = factored.unshare_Wb(table, [matrix])
    return torch.ops.magep_fast.triton_invariant(list(weights), list(biases), matrix, psi, table.out_channels)[0]


def _split(L: int, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor], Tensor]:
    """Weights, biases, matrices and psi out of a flat sequence of them."""
    return list(tensors[:L]), list(tensors[L : 2 * L]), list(tensors[2 * L : -1]), tensors[-1]


def _kernels(name: str) -> ModuleType:
    """A file of kernels, imported when first used: importing triton takes a second."""
    return importlib.import_module(f"magep_fast.triton_kernels.{name}")


def _problem(weights: Sequence[Tensor], out_channels: int, dtype: torch.dtype, activation: str | None = None) -> Any:
    widths = (weights[0].shape[-1], *(w.shape[-2] for w in weights))
    tf32 = dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    B, d = weights[0].shape[:2]
    return _kernels("launch").Problem(B, d, out_channels, widths, dtype, activation, tf32)


def _run(name: str, problem: Any, function: Callable[[Any], Any], device: torch.device) -> Any:
    """function(config) on the device of its tensors."""
    config = _kernels("launch").choose_config(name, problem, function, device)
    if device.type == "cpu":
        return function(config)
    with torch.cuda.device(device):
        return function(config)


def _contiguous(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [x.contiguous() for x in tensors]


def _check(
    operator: str,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    matrices: Sequence[Tensor] = (),
    psi: Tensor | None = None,
    out_channels: int = 1,
) -> None:
    """Raises if the arguments do not fit each other: kernels trust shapes."""
    name = f"magep_fast::triton_{operator}"
    L = len(weights)
    if L < 2 or len(biases) != L:
        raise RuntimeError(f"{name}: expected as many weights as biases, at least two; found {L} and {len(biases)}")
    if weights[0].dim() != 4:
        raise RuntimeError(f"{name}: weights[0] must have rank 4; found {weights[0].dim()}")
    (B, d), device, dtype = weights[0].shape[:2], weights[0].device, weights[0].dtype
    reason = unsupported(device, dtype)
    if reason is not None and device.type != "meta":
        raise RuntimeError(f"{name}: cannot take {dtype} tensors on {device}: {reason}")
    if out_channels < 1 or d < 1:
        raise RuntimeError(f"{name}: expected at least one channel in and out; found {d} and {out_channels}")
    widths = [weights[0].shape[-1], *(w.shape[-2] for w in weights)]
    expected: list[tuple[str, Tensor, tuple[int, ...]]]
    expected = [(f"weights[{i}]", w, (B, d, widths[i + 1], widths[i])) for i, w in enumerate(weights)]
    expected += [(f"biases[{i}]", b, (B, d, widths[i + 1])) for i, b in enumerate(biases)]
    if psi is not None:
        space = _space(weights)
        if operator == "equivariant":
            table = equivariant_table(space, space.taps, int(d), out_channels, GROUPS["all"])
        else:
            table = invariant_table(space, int(d), out_channels, GROUPS["all"])
        if len(matrices) != len(table.outputs):
            raise RuntimeError(f"{name}: expected {len(table.outputs)} matrices; found {len(matrices)}")
        pairs = zip(matrices, table.outputs, strict=True)
        expected += [(f"matrices[{k}]", m, output.shape) for k, (m, output) in enumerate(pairs)]
        expected.append(("psi", psi, table.psi_shape))
    for label, x, shape in expected:
        if tuple(x.shape) != tuple(shape) or x.dtype != dtype or x.device != device:
            raise RuntimeError(
                f"{name}: {label} must have shape {list(shape)}, dtype {dtype} and device {device}; "
                f"found shape {list(x.shape)}, dtype {x.dtype} and device {x.device}"
            )


def _triton_chain(weights: list[Tensor], biases: list[Tensor]) -> tuple[Tensor, Tensor]:
    _check("chain", weights, biases)
    problem = _problem(weights, 1, weights[0].dtype)
    given = _contiguous(weights), _contiguous(biases)
    return _run("chain", problem, lambda config: _kernels("chain").forward(problem, config, *given), weights[0].device)


def _triton_chain_backward(
    prefixes_bar: Tensor,
    suffixes_bar: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    prefixes: Tensor,
    suffixes: Tensor,
) -> list[Tensor]:
    _check("chain", weights, biases)
    problem = _problem(weights, 1, weights[0].dtype)
    given = _contiguous(weights), prefixes, suffixes, prefixes_bar, suffixes_bar
    return _run("chain", problem, lambda config: _kernels("chain").backward(problem, config, *given), weights[0].device)


def _triton_equivariant(
    weights: list[Tensor],
    biases: list[Tensor],
    matrices: list[Tensor],
    psi: Tensor,
    out_channels: int,
    activation: str | None,
    training: bool,
) -> list[Tensor]:
    """Outputs, weights then biases; with `training` what the backward pass needs: the arguments of sin, the factors."""
    _check("equivariant", weights, biases, matrices, psi, out_channels)
    problem = _problem(weights, out_channels, psi.dtype, activation)
    given = _contiguous(weights), _contiguous(biases), _contiguous(matrices), psi.contiguous()
    keep = training and activation == NEEDS_ARGUMENT

    def function(config: Any) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        return _kernels("equivariant").forward(problem, config, *given, keep)

    outputs, arguments, factors = _run("equivariant", problem, function, psi.device)
    return [*outputs, *arguments, *factors] if training else outputs


def _triton_equivariant_backward(
    grads: list[Tensor],
    kept: list[Tensor],
    weights: list[Tensor],
    biases: list[Tensor],
    matrices: list[Tensor],
    psi: Tensor,
    factors: list[Tensor],
    out_channels: int,
    activation: str | None,
) -> list[Tensor]:
    """kept: the outputs, or for sin its arguments; without an activation it may be empty."""
    _check("equivariant", weights, biases, matrices, psi, out_channels)
    problem = _problem(weights, out_channels, psi.dtype, activation)
    grads = _contiguous(grads)
    given = (
        grads,
        _contiguous(kept) if activation is not None else grads,
        _contiguous(weights),
        _contiguous(biases),
        _contiguous(matrices),
        psi.contiguous(),
        factors,
    )

    def function(config: Any) -> list[Tensor]:
        return _kernels("equivariant").backward(problem, config, *given)

    return _run("equivariant_backward", problem, function, psi.device)


def _triton_invariant(
    weights: list[Tensor], biases: list[Tensor], matrix: Tensor, psi: Tensor, out_channels: int
) -> list[Tensor]:
    """The output and what the backward pass needs."""
    _check("invariant", weights, biases, [matrix], psi, out_channels)
    problem = _problem(weights, out_channels, psi.dtype)
    given = _contiguous(weights), _contiguous(biases), matrix.contiguous(), psi.contiguous()
    return _run("invariant", problem, lambda config: _kernels("invariant").forward(problem, config, *given), psi.device)


def _triton_invariant_backward(
    grad: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    matrix: Tensor,
    psi: Tensor,
    factors: list[Tensor],
    out_channels: int,
) -> list[Tensor]:
    _check("invariant", weights, biases, [matrix], psi, out_channels)
    problem = _problem(weights, out_channels, psi.dtype)
    given = (
        grad.contiguous(),
        _contiguous(weights),
        _contiguous(biases),
        matrix.contiguous(),
        psi.contiguous(),
        factors,
    )

    def function(config: Any) -> list[Tensor]:
        return _kernels("invariant").backward(problem, config, *given)

    return _run("invariant_backward", problem, function, psi.device)


def _torch_chain(L: int, *tensors: Tensor) -> tuple[Tensor, Tensor]:
    """The operator's results in torch ops."""
    weights, biases = tensors[:L], tensors[L:]
    compute = torch.float64 if weights[0].dtype == torch.float64 else torch.float32
    prefixes, suffixes = factored.chain([w.to(compute) for w in weights], [b.to(compute) for b in biases])
    rows = [torch.cat([A, b.to(compute).unsqueeze(-1)], dim=-1).mT for A, b in zip(prefixes, biases, strict=True)]
    return torch.cat([x.reshape(-1) for x in rows]), torch.cat([x.reshape(-1) for x in suffixes])


def _torch_equivariant(L: int, out_channels: int, activation: str | None, *tensors: Tensor) -> tuple[Tensor, ...]:
    weights, biases, matrices, psi = _split(L, tensors)
    space = _space(weights)
    table = equivariant_table(space, space.taps, int(weights[0].shape[1]), out_channels, GROUPS["all"])
    new_weights, new_biases = factored.equivariant(table, weights, biases, matrices, psi, activation)
    return *new_weights, *new_biases


def _torch_invariant(L: int, out_channels: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    weights, biases, (matrix,), psi = _split(L, tensors)
    table = invariant_table(_space(weights), int(weights[0].shape[1]), out_channels, GROUPS["all"])
    return (factored.invariant(table, weights, biases, matrix, psi),)


def _like(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in tensors]


def register() -> None:
    """Defines the operators. Once, whether or not there is a GPU: an exported graph may be read anywhere."""
    _register_chain()
    _register_equivariant()
    _register_invariant()


def _define(name: str, function: Callable[..., Any]) -> None:
    """An operator for GPU tensors, and for CPU tensors where the interpreter, or an error, is met."""
    torch.library.custom_op(f"magep_fast::triton_{name}", function, mutates_args=())


def _factor_sizes(problem: Any) -> list[int]:
    return [
        problem.prefix_size,
        problem.section_size(problem.n_L),
        problem.connection_size(mix=True),
        problem.batch * problem.readout_columns,
    ]


def _zeros_for_none(grads: Sequence[Tensor | None], shapes: Sequence[torch.Size], like: Tensor) -> list[Tensor]:
    return [like.new_zeros(n) if g is None else g for g, n in zip(grads, shapes, strict=True)]


def _register_chain() -> None:
    def fake(weights: list[Tensor], biases: list[Tensor]) -> tuple[Tensor, Tensor]:
        problem = _problem(weights, 1, weights[0].dtype)
        sizes = problem.prefix_size, problem.section_size(problem.n_L)
        prefixes, suffixes = (weights[0].new_empty(size, dtype=problem.compute_dtype) for size in sizes)
        return prefixes, suffixes

    def save(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
        ctx.L = len(inputs[0])
        ctx.save_for_backward(*inputs[0], *inputs[1], *output)

    def backward(ctx: Any, prefixes_bar: Tensor | None, suffixes_bar: Tensor | None) -> tuple:
        L = ctx.L
        *tensors, prefixes, suffixes = ctx.saved_tensors
        bars = _zeros_for_none((prefixes_bar, suffixes_bar), (prefixes.shape, suffixes.shape), prefixes)
        found = torch.ops.magep_fast.triton_chain_backward(*bars, tensors[:L], tensors[L:], prefixes, suffixes)
        return found[:L], found[L:]

    def save_backward(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
        prefixes_bar, suffixes_bar, weights, biases, _, _ = inputs
        ctx.L = len(weights)
        ctx.save_for_backward(prefixes_bar, suffixes_bar, *weights, *biases)

    def double_backward(ctx: Any, seeds: list[Tensor]) -> tuple:
        L = ctx.L
        grads, tensors = ctx.saved_tensors[:2], ctx.saved_tensors[2:]
        by_grads, by_inputs = _second_derivative(lambda *x: _torch_chain(L, *x), tensors, grads, seeds)
        return *by_grads, by_inputs[:L], by_inputs[L:], None, None

    def fake_backward(
        prefixes_bar: Tensor,
        suffixes_bar: Tensor,
        weights: list[Tensor],
        biases: list[Tensor],
        prefixes: Tensor,
        suffixes: Tensor,
    ) -> list[Tensor]:
        return _like([*weights, *biases])

    _define("chain", _triton_chain)
    _define("chain_backward", _triton_chain_backward)
    torch.library.register_fake("magep_fast::triton_chain", fake)
    torch.library.register_fake("magep_fast::triton_chain_backward", fake_backward)
    torch.library.register_autograd("magep_fast::triton_chain", backward, setup_context=save)
    torch.library.register_autograd("magep_fast::triton_chain_backward", double_backward, setup_context=save_backward)


def _register_equivariant() -> None:
    def fake(
        weights: list[Tensor],
        biases: list[Tensor],
        matrices: list[Tensor],
        psi: Tensor,
        out_channels: int,
        activation: str | None,
        training: bool,
    ) -> list[Tensor]:
        problem = _problem(weights, out_channels, psi.dtype, activation)

        def outputs() -> list[Tensor]:
            return [x.new_empty(problem.batch, out_channels, *x.shape[2:]) for x in (*weights, *biases)]

        if not training:
            return outputs()
        factors = [psi.new_empty(size, dtype=problem.compute_dtype) for size in _factor_sizes(problem)]
        return [*outputs(), *(outputs() if activation == NEEDS_ARGUMENT else []), *factors]

    def save(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
        weights, biases, matrices, psi, ctx.out_channels, ctx.activation, ctx.training = inputs
        L = ctx.L = len(weights)
        results, factors = output[: 2 * L], output[-4:] if ctx.training else []
        kept = output[2 * L : -4] if ctx.activation == NEEDS_ARGUMENT else results if ctx.activation else []
        ctx.shapes, ctx.num_kept = [y.shape for y in results], len(kept)
        ctx.set_materialize_grads(False)  # the factors are large and would get gradients of zeros
        ctx.save_for_backward(*kept, *weights, *biases, *matrices, psi, *factors)

    def backward(ctx: Any, grads: list[Tensor | None]) -> tuple:
        if not ctx.training:
            raise RuntimeError("magep_fast::triton_equivariant: differentiating needs training=True")
        L, saved = ctx.L, ctx.saved_tensors
        kept, tensors, factors = saved[: ctx.num_kept], saved[ctx.num_kept : -4], saved[-4:]
        known = _zeros_for_none(grads[: 2 * L], ctx.shapes, tensors[0])
        found = torch.ops.magep_fast.triton_equivariant_backward(
            known, list(kept), *_split(L, tensors), list(factors), ctx.out_channels, ctx.activation
        )
        return *_split(L, found), None, None, None

    def fake_backward(
        grads: list[Tensor],
        kept: list[Tensor],
        weights: list[Tensor],
        biases: list[Tensor],
        matrices: list[Tensor],
        psi: Tensor,
        factors: list[Tensor],
        out_channels: int,
        activation: str | None,
    ) -> list[Tensor]:
        return _like([*weights, *biases, *matrices, psi])

    def save_backward(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
        grads, kept, weights, biases, matrices, psi, factors, ctx.out_channels, ctx.activation = inputs
        ctx.L, ctx.count, ctx.num_kept, ctx.num_factors = len(weights), len(grads), len(kept), len(factors)
        ctx.save_for_backward(*grads, *weights, *biases, *matrices, psi)

    def double_backward(ctx: Any, seeds: list[Tensor]) -> tuple:
        grads, tensors = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]

        def function(*x: Tensor) -> tuple[Tensor, ...]:
            return _torch_equivariant(ctx.L, ctx.out_channels, ctx.activation, *x)

        by_grads, by_inputs = _second_derivative(function, tensors, grads, seeds)
        nothing = [None] * ctx.num_kept, [None] * ctx.num_factors
        return by_grads, nothing[0], *_split(ctx.L, by_inputs), nothing[1], None, None

    _define("equivariant", _triton_equivariant)
    _define("equivariant_backward", _triton_equivariant_backward)
    name = "magep_fast::triton_equivariant"
    torch.library.register_fake(name, fake)
    torch.library.register_fake(f"{name}_backward", fake_backward)
    torch.library.register_autograd(name, backward, setup_context=save)
    torch.library.register_autograd(f"{name}_backward", double_backward, setup_context=save_backward)


def _register_invariant() -> None:
    def fake(
        weights: list[Tensor], biases: list[Tensor], matrix: Tensor, psi: Tensor, out_channels: int
    ) -> list[Tensor]:
        problem = _problem(weights, out_channels, psi.dtype)
        sizes = (
            problem.prefix_size,
            problem.connection_size(mix=False),
            problem.batch * problem.readout_columns,
        )
        factors = [psi.new_empty(size, dtype=problem.compute_dtype) for size in sizes]
        return [psi.new_empty(problem.batch, out_channels), *factors]

    def save(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
        weights, biases, matrix, psi, ctx.out_channels = inputs
        ctx.L = len(weights)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*weights, *biases, matrix, psi, *output[1:])

    def backward(ctx: Any, grads: list[Tensor | None]) -> tuple:
        tensors, factors = ctx.saved_tensors[:-3], ctx.saved_tensors[-3:]
        weights, biases, (matrix,), psi = _split(ctx.L, tensors)
        grad = psi.new_zeros(weights[0].shape[0], ctx.out_channels) if grads[0] is None else grads[0]
        found = torch.ops.magep_fast.triton_invariant_backward(
            grad, weights, biases, matrix, psi, list(factors), ctx.out_channels
        )
        by_weights, by_biases, (by_matrix,), by_psi = _split(ctx.L, found)
        return by_weights, by_biases, by_matrix, by_psi, None

    def fake_backward(
        grad: Tensor,
        weights: list[Tensor],
        biases: list[Tensor],
        matrix: Tensor,
        psi: Tensor,
        factors: list[Tensor],
        out_channels: int,
    ) -> list[Tensor]:
        return _like([*weights, *biases, matrix, psi])

    def save_backward(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
        grad, weights, biases, matrix, psi, _, ctx.out_channels = inputs
        ctx.L = len(weights)
        ctx.save_for_backward(grad, *weights, *biases, matrix, psi)

    def double_backward(ctx: Any, seeds: list[Tensor]) -> tuple:
        grad, *tensors = ctx.saved_tensors
        (by_grad,), by_inputs = _second_derivative(
            lambda *x: _torch_invariant(ctx.L, ctx.out_channels, *x), tensors, [grad], seeds
        )
        by_weights, by_biases, (by_matrix,), by_psi = _split(ctx.L, by_inputs)
        return by_grad, by_weights, by_biases, by_matrix, by_psi, [None] * 3, None

    _define("invariant", _triton_invariant)
    _define("invariant_backward", _triton_invariant_backward)
    name = "magep_fast::triton_invariant"
    torch.library.register_fake(name, fake)
    torch.library.register_fake(f"{name}_backward", fake_backward)
    torch.library.register_autograd(name, backward, setup_context=save)
    torch.library.register_autograd(f"{name}_backward", double_backward, setup_context=save_backward)
