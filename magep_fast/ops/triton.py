"""The backend `triton`: registered operators that launch the Triton kernels, a fixed few per layer and direction.

The operators `magep_fast::triton_chain`, `::triton_equivariant`, `::triton_invariant` and their backwards have fake
kernels and autograd formulas, so that torch.compile, torch.export and CUDA graphs take them as they are: nothing waits
for the device, and no size depends on data.

Tables of the linear terms alone, and those that `has_kernel` refuses, run in torch ops.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from magep_fast import factored
from magep_fast.ops.operations import (
    ACTIVATIONS,
    Equivariant,
    Invariant,
    empty_like,
    has_kernel,
    register_layer,
    run,
    second_derivative,
    space_of,
    split,
    transformed,
    widths_of,
    wrong_dtype,
)
from magep_fast.terms import GROUPS, Table, equivariant_table, invariant_table

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, on the CPU, for tests."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def find_missing() -> str | None:
    """Why the backend cannot run here, or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; run pip install triton"
    if importlib.util.find_spec("magep_fast.triton_kernels") is None:
        return "magep_fast.triton_kernels is not installed; run pip install again"
    # At import, so not is_available(): that starts CUDA, after which a forked process cannot use it.
    if torch.cuda.device_count() == 0 and not interpreted():
        return "torch sees no GPU (for tests without one, set TRITON_INTERPRET=1)"
    return None


_missing = find_missing()


def missing() -> str | None:
    """What `find_missing` found out once, at import, so that torch.compile sees a constant."""
    return _missing


def unsupported(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why tensors of this kind cannot be taken, or None."""
    if interpreted():
        if device.type != "cpu":
            return "TRITON_INTERPRET=1 is set, which runs on CPU tensors"
        return wrong_dtype(dtype, (torch.float64, *DTYPES))
    if device.type != "cuda":
        return "it runs on GPU tensors only (on CPU tensors in Triton's interpreter: TRITON_INTERPRET=1)"
    return wrong_dtype(dtype, DTYPES)


def chain(weights: Sequence[Tensor], biases: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """As `factored.chain`."""
    if len(weights) == 1 or transformed():
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
    if psi is None or not has_kernel(table) or transformed():
        return factored.equivariant(table, weights, biases, matrices, psi, activation)
    if table.share_Wb:
        table, matrices = factored.unshare_Wb(table, matrices)
    L = len(weights)
    operation = _Equivariant(L, table.out_channels, ACTIVATIONS.index(activation))
    results = run(operation, (*weights, *biases, *matrices, psi))
    return list(results[:L]), list(results[L:])


def invariant(
    table: Table, weights: Sequence[Tensor], biases: Sequence[Tensor], matrix: Tensor, psi: Tensor | None
) -> Tensor:
    """As `factored.invariant`."""
    if psi is None or not has_kernel(table) or transformed():
        return factored.invariant(table, weights, biases, matrix, psi)
    if table.share_Wb:
        table, (matrix,) = factored.unshare_Wb(table, [matrix])
    return run(_Invariant(len(weights)), (*weights, *biases, matrix, psi))[0]


class _Equivariant(Equivariant):
    num_factors = 4

    def forward(self, tensors: Sequence[Tensor], training: bool) -> list[Tensor]:
        weights, biases, (*matrices, psi) = split(self.L, tensors)
        return torch.ops.magep_fast.triton_equivariant.default(
            weights, biases, matrices, psi, self.out_channels, self.activation, training
        )

    def backward(
        self, grads: Sequence[Tensor], tensors: Sequence[Tensor], kept: Sequence[Tensor], wanted: Sequence[bool]
    ) -> list[Tensor | None]:
        weights, biases, (*matrices, psi) = split(self.L, tensors)
        factors, known = list(kept[: self.num_factors]), list(kept[self.num_factors :])
        return torch.ops.magep_fast.triton_equivariant_backward.default(
            list(grads), weights, biases, matrices, psi, factors, known, self.out_channels, self.activation
        )


class _Invariant(Invariant):
    def forward(self, tensors: Sequence[Tensor], training: bool) -> list[Tensor]:
        weights, biases, (matrix, psi) = split(self.L, tensors)
        return torch.ops.magep_fast.triton_invariant.default(weights, biases, matrix, psi)

    def backward(
        self, grads: Sequence[Tensor], tensors: Sequence[Tensor], kept: Sequence[Tensor], wanted: Sequence[bool]
    ) -> list[Tensor | None]:
        weights, biases, (matrix, psi) = split(self.L, tensors)
        return torch.ops.magep_fast.triton_invariant_backward.default(
            grads[0], weights, biases, matrix, psi, list(kept)
        )


def _kernels(name: str) -> ModuleType:
    """A file of kernels, imported when first used: importing triton takes a second."""
    return importlib.import_module(f"magep_fast.triton_kernels.{name}")


def _problem(weights: Sequence[Tensor], out_channels: int, activation: int = 0) -> Any:
    dtype = weights[0].dtype
    tf32 = dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    (B, d), widths = weights[0].shape[:2], tuple(widths_of(weights))
    return _kernels("launch").Problem(B, d, out_channels, widths, dtype, ACTIVATIONS[activation], tf32)


def _run(name: str, problem: Any, function: Callable[[Any], Any], device: torch.device) -> Any:
    """function(config) on the device of its tensors."""
    with nullcontext() if device.type == "cpu" else torch.cuda.device(device):
        return function(_kernels("launch").choose_config(name, problem, function, device))


def _contiguous(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [x.contiguous() for x in tensors]


def _checked_problem(
    operator: str,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    matrices: Sequence[Tensor] = (),
    psi: Tensor | None = None,
    out_channels: int = 1,
    activation: int = 0,
) -> Any:
    """The problem that the arguments of a call pose, if they fit each other: kernels trust shapes."""
    name = f"magep_fast::triton_{operator}"
    L = len(weights)
    if L < 2 or len(biases) != L:
        raise RuntimeError(f"{name}: expected as many weights as biases, at least two; found {L} and {len(biases)}")
    for i, w in enumerate(weights):
        if w.dim() != 4:
            raise RuntimeError(f"{name}: weights[{i}] must have rank 4; found {w.dim()}")
    (B, d), device, dtype = weights[0].shape[:2], weights[0].device, weights[0].dtype
    reason = unsupported(device, dtype)
    if reason is not None:
        raise RuntimeError(f"{name}: cannot take {dtype} tensors on {device}: {reason}")
    if out_channels < 1 or d < 1:
        raise RuntimeError(f"{name}: expected at least one channel in and out; found {d} and {out_channels}")
    if not 0 <= activation < len(ACTIVATIONS):
        names = ", ".join(f"{k} ({f or 'none'})" for k, f in enumerate(ACTIVATIONS))
        raise RuntimeError(f"{name}: activation must be one of {names}; found {activation}")
    widths = widths_of(weights)
    expected: list[tuple[str, Tensor, tuple[int, ...]]]
    expected = [(f"weights[{i}]", w, (B, d, widths[i + 1], widths[i])) for i, w in enumerate(weights)]
    expected += [(f"biases[{i}]", b, (B, d, widths[i + 1])) for i, b in enumerate(biases)]
    if psi is not None:
        space = space_of(weights)
        if operator.startswith("equivariant"):
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
    return _problem(weights, out_channels, activation)


def _triton_chain(weights: list[Tensor], biases: list[Tensor]) -> tuple[Tensor, Tensor]:
    problem = _checked_problem("chain", weights, biases)
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
    problem = _checked_problem("chain_backward", weights, biases)
    given = _contiguous([*weights]), *_contiguous([prefixes, suffixes, prefixes_bar, suffixes_bar])

    def function(config: Any) -> list[Tensor]:
        return _kernels("chain").backward(problem, config, *given)

    return _run("chain_backward", problem, function, weights[0].device)


def _triton_equivariant(
    weights: list[Tensor],
    biases: list[Tensor],
    matrices: list[Tensor],
    psi: Tensor,
    out_channels: int,
    activation: int,
    training: bool,
) -> list[Tensor]:
    """-> new weights, new biases, four factors, and with `training` and sin the values before it"""
    problem = _checked_problem("equivariant", weights, biases, matrices, psi, out_channels, activation)
    given = _contiguous(weights), _contiguous(biases), _contiguous(matrices), psi.contiguous()
    keep = training and problem.activation == "sin"

    def function(config: Any) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        return _kernels("equivariant").forward(problem, config, *given, keep)

    outputs, before, factors = _run("equivariant", problem, function, psi.device)
    return [*outputs, *factors, *before]


def _triton_equivariant_backward(
    grads: list[Tensor],
    weights: list[Tensor],
    biases: list[Tensor],
    matrices: list[Tensor],
    psi: Tensor,
    factors: list[Tensor],
    known: list[Tensor],
    out_channels: int,
    activation: int,
) -> list[Tensor]:
    """known: the outputs, or for sin the values before it; without an activation it may be empty."""
    name = "equivariant_backward"
    problem = _checked_problem(name, weights, biases, matrices, psi, out_channels, activation)
    if activation and len(known) != len(grads):
        raise RuntimeError(
            f"magep_fast::triton_{name}: expected {len(grads)} known tensors; found {len(known)} (values before sin "
            "are returned by the operator if training is true)"
        )
    grads = _contiguous(grads)
    given = (
        grads,
        _contiguous(known) if activation else grads,
        _contiguous(weights),
        _contiguous(biases),
        _contiguous(matrices),
        psi.contiguous(),
        factors,
    )

    def function(config: Any) -> list[Tensor]:
        return _kernels("equivariant").backward(problem, config, *given)

    return _run(name, problem, function, psi.device)


def _triton_invariant(weights: list[Tensor], biases: list[Tensor], matrix: Tensor, psi: Tensor) -> list[Tensor]:
    """-> output, three factors"""
    problem = _checked_problem("invariant", weights, biases, [matrix], psi, matrix.shape[0])
    given = _contiguous(weights), _contiguous(biases), matrix.contiguous(), psi.contiguous()
    return _run("invariant", problem, lambda config: _kernels("invariant").forward(problem, config, *given), psi.device)


def _triton_invariant_backward(
    grad: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    matrix: Tensor,
    psi: Tensor,
    factors: list[Tensor],
) -> list[Tensor]:
    problem = _checked_problem("invariant_backward", weights, biases, [matrix], psi, matrix.shape[0])
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
    weights, biases, _ = split(L, tensors)
    compute = torch.float64 if weights[0].dtype == torch.float64 else torch.float32
    prefixes, suffixes = factored.chain([w.to(compute) for w in weights], [b.to(compute) for b in biases])
    rows = [torch.cat([A, b.to(compute).unsqueeze(-1)], dim=-1).mT for A, b in zip(prefixes, biases, strict=True)]
    return torch.cat([x.reshape(-1) for x in rows]), torch.cat([x.reshape(-1) for x in suffixes])


def register() -> None:
    """Defines the operators. Once, whether or not there is a GPU: an exported graph may be read anywhere."""
    _register_chain()
    _register_layers()


def _define(name: str, function: Callable[..., Any]) -> None:
    """An operator for GPU tensors, and for CPU tensors where the interpreter, or an error, is met."""
    torch.library.custom_op(f"magep_fast::triton_{name}", function, mutates_args=())


def _register_chain() -> None:
    def fake(weights: list[Tensor], biases: list[Tensor]) -> tuple[Tensor, Tensor]:
        problem = _problem(weights, 1)
        sizes = problem.prefix_size, problem.section_size(problem.n_L)
        prefixes, suffixes = (weights[0].new_empty(size, dtype=problem.compute_dtype) for size in sizes)
        return prefixes, suffixes

    def save(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
        ctx.L = len(inputs[0])
        ctx.save_for_backward(*inputs[0], *inputs[1], *output)

    def backward(ctx: Any, prefixes_bar: Tensor, suffixes_bar: Tensor) -> tuple:
        L = ctx.L
        *tensors, prefixes, suffixes = ctx.saved_tensors
        found = torch.ops.magep_fast.triton_chain_backward(
            prefixes_bar, suffixes_bar, tensors[:L], tensors[L:], prefixes, suffixes
        )
        return found[:L], found[L:]

    def save_backward(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
        prefixes_bar, suffixes_bar, weights, biases, _, _ = inputs
        ctx.L = len(weights)
        ctx.save_for_backward(prefixes_bar, suffixes_bar, *weights, *biases)

    def double_backward(ctx: Any, seeds: list[Tensor]) -> tuple:
        L = ctx.L
        grads, tensors = ctx.saved_tensors[:2], ctx.saved_tensors[2:]
        by_grads, by_inputs = second_derivative(lambda *x: _torch_chain(L, *x), tensors, grads, seeds)
        return *by_grads, by_inputs[:L], by_inputs[L:], None, None

    def fake_backward(
        prefixes_bar: Tensor,
        suffixes_bar: Tensor,
        weights: list[Tensor],
        biases: list[Tensor],
        prefixes: Tensor,
        suffixes: Tensor,
    ) -> list[Tensor]:
        return empty_like(*weights, *biases)

    _define("chain", _triton_chain)
    _define("chain_backward", _triton_chain_backward)
    torch.library.register_fake("magep_fast::triton_chain", fake)
    torch.library.register_fake("magep_fast::triton_chain_backward", fake_backward)
    torch.library.register_autograd("magep_fast::triton_chain", backward, setup_context=save)
    torch.library.register_autograd("magep_fast::triton_chain_backward", double_backward, setup_context=save_backward)


def _register_layers() -> None:
    def fake_equivariant(
        weights: list[Tensor],
        biases: list[Tensor],
        matrices: list[Tensor],
        psi: Tensor,
        out_channels: int,
        activation: int,
        training: bool,
    ) -> list[Tensor]:
        problem = _problem(weights, out_channels, activation)
        outputs = [x.new_empty(problem.batch, out_channels, *x.shape[2:]) for x in (*weights, *biases)]
        sizes = (
            problem.prefix_size,
            problem.section_size(problem.n_L),
            problem.connection_size(mix=True),
            problem.batch * problem.readout_columns,
        )
        factors = [psi.new_empty(size, dtype=problem.compute_dtype) for size in sizes]
        return [*outputs, *factors, *(empty_like(*outputs) if training and problem.activation == "sin" else [])]

    def fake_invariant(weights: list[Tensor], biases: list[Tensor], matrix: Tensor, psi: Tensor) -> list[Tensor]:
        problem = _problem(weights, matrix.shape[0])
        sizes = problem.prefix_size, problem.connection_size(mix=False), problem.batch * problem.readout_columns
        factors = [psi.new_empty(size, dtype=problem.compute_dtype) for size in sizes]
        return [psi.new_empty(problem.batch, matrix.shape[0]), *factors]

    _define("equivariant", _triton_equivariant)
    _define("equivariant_backward", _triton_equivariant_backward)
    _define("invariant", _triton_invariant)
    _define("invariant_backward", _triton_invariant_backward)
    register_layer(
        "triton_equivariant",
        lambda weights, biases, matrices, psi, e, f, training: _Equivariant(len(weights), e, f),
        lambda grads, weights, biases, matrices, psi, factors, known, e, f: _Equivariant(len(weights), e, f),
        fake_equivariant,
        lambda grads, weights, biases, matrices, psi, *_: empty_like(*weights, *biases, *matrices, psi),
    )
    register_layer(
        "triton_invariant",
        lambda weights, biases, matrix, psi: _Invariant(len(weights)),
        lambda grad, weights, biases, matrix, psi, factors: _Invariant(len(weights)),
        fake_invariant,
        lambda grad, weights, biases, matrix, psi, factors: empty_like(*weights, *biases, matrix, psi),
    )
