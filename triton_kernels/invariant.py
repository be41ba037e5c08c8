"""The readout: one skinny product of the invariants with their coefficients, the invariant layer or the last bias."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from magep_fast.triton_kernels.chain import chain_backward_launch, chain_launch, weight_gradient_launch
from magep_fast.triton_kernels.launch import Chunk, Config, Launch, Problem, block, cdiv, run
from magep_fast.triton_kernels.tiles import activated, dot, load_gradient, sum_launch
from torch import Tensor


@triton.jit
def readout_kernel(
    matrix, features, out, argument, batch, rows, columns,
    ACTIVATION: tl.constexpr, KEEP: tl.constexpr, OPERAND: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """out[b, r] = f(Σ_c features[b, c] matrix[r, c]); KEEP: the argument of f too. Grid: row blocks, network blocks."""
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    b = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    acc = tl.zeros((BLOCK_B, BLOCK_R), COMPUTE)
    for c_0 in range(0, columns, BLOCK_C):
        c = c_0 + tl.arange(0, BLOCK_C)
        F = tl.load(
            features + b.to(tl.int64)[:, None] * columns + c[None, :],
            mask=(b < batch)[:, None] & (c < columns)[None, :],
            other=0.0,
        )
        phi = tl.load(
            matrix + r.to(tl.int64)[None, :] * columns + c[:, None],
            mask=(r < rows)[None, :] & (c < columns)[:, None],
            other=0.0,
        )
        acc = dot(F, phi, acc, OPERAND, PRECISION)
    at = b.to(tl.int64)[:, None] * rows + r[None, :]
    inside = (b < batch)[:, None] & (r < rows)[None, :]
    if KEEP:
        tl.store(argument + at, acc.to(argument.dtype.element_ty), mask=inside)
    tl.store(out + at, activated(acc, ACTIVATION).to(out.dtype.element_ty), mask=inside)


@triton.jit
def features_backward(
    matrix, grad, kept, features_bar, batch, rows, columns, block,
    ACTIVATION: tl.constexpr, OPERAND: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """ō matrix for BLOCK_B networks and BLOCK_C columns."""
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    b = block * BLOCK_B + tl.arange(0, BLOCK_B)
    acc = tl.zeros((BLOCK_B, BLOCK_C), COMPUTE)
    for r_0 in range(0, rows, BLOCK_R):
        r = r_0 + tl.arange(0, BLOCK_R)
        bar = load_gradient(
            grad, kept, b.to(tl.int64)[:, None] * rows + r[None, :],
            (b < batch)[:, None] & (r < rows)[None, :], COMPUTE, ACTIVATION,
        )  # fmt: skip
        phi = tl.load(
            matrix + r.to(tl.int64)[:, None] * columns + c[None, :],
            mask=(r < rows)[:, None] & (c < columns)[None, :],
            other=0.0,
            cache_modifier=".cs",
        )
        acc = dot(bar, phi, acc, OPERAND, PRECISION)
    at = features_bar + b.to(tl.int64)[:, None] * columns + c[None, :]
    tl.store(at, acc, mask=(b < batch)[:, None] & (c < columns)[None, :])


@triton.jit
def matrix_backward(
    features, grad, kept, matrix_bar, batch, rows, columns, block,
    ACTIVATION: tl.constexpr, OPERAND: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """ōᵀ features for BLOCK_R rows and BLOCK_C columns."""
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    r = block * BLOCK_R + tl.arange(0, BLOCK_R)
    acc = tl.zeros((BLOCK_R, BLOCK_C), COMPUTE)
    for b_0 in range(0, batch, BLOCK_B):
        b = b_0 + tl.arange(0, BLOCK_B)
        bar = load_gradient(
            grad, kept, b.to(tl.int64)[None, :] * rows + r[:, None],
            (b < batch)[None, :] & (r < rows)[:, None], COMPUTE, ACTIVATION,
        )  # fmt: skip
        F = tl.load(
            features + b.to(tl.int64)[:, None] * columns + c[None, :],
            mask=(b < batch)[:, None] & (c < columns)[None, :],
            other=0.0,
        )
        acc = dot(bar, F, acc, OPERAND, PRECISION)
    at = matrix_bar + r.to(tl.int64)[:, None] * columns + c[None, :]
    inside = (r < rows)[:, None] & (c < columns)[None, :]
    tl.store(at, acc.to(matrix_bar.dtype.element_ty), mask=inside, cache_modifier=".cs")


@triton.jit
def readout_backward_kernel(
    matrix, features, grad, kept, matrix_bar, features_bar, batch, rows, columns,
    ACTIVATION: tl.constexpr, OPERAND: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """features_bar = ō matrix, matrix_bar = ōᵀ features. Grid: column blocks, then network blocks and row blocks."""
    block = tl.program_id(1)
    b_blocks = tl.cdiv(batch, BLOCK_B)
    if block < b_blocks:
        features_backward(
            matrix, grad, kept, features_bar, batch, rows, columns, block,
            ACTIVATION, OPERAND, COMPUTE, PRECISION, BLOCK_B, BLOCK_R, BLOCK_C,
        )  # fmt: skip
    else:
        matrix_backward(
            features, grad, kept, matrix_bar, batch, rows, columns, block - b_blocks,
            ACTIVATION, OPERAND, COMPUTE, PRECISION, BLOCK_B, BLOCK_R, BLOCK_C,
        )  # fmt: skip


def readout_launch(
    problem: Problem, config: Config, matrix: Tensor, features: Tensor, out: Tensor, argument: Tensor | None
) -> Launch:
    """`out` is [B, rows]; the argument of the activation is kept too where a place for it is given."""
    rows, blocks = matrix.shape[0], _blocks(problem)
    arguments = {
        "matrix": matrix,
        "features": features,
        "out": out,
        "argument": argument,
        "batch": problem.batch,
        "rows": rows,
        "columns": problem.readout_columns,
        "ACTIVATION": problem.activation,
        "KEEP": argument is not None,
        **problem.arithmetic,
        **blocks,
    }
    grid = (cdiv(rows, blocks["BLOCK_R"]), cdiv(problem.batch, blocks["BLOCK_B"]))
    return Launch(readout_kernel, grid, arguments, config.back_warps)


def readout_backward_launch(
    problem: Problem,
    config: Config,
    matrix: Tensor,
    features: Tensor,
    grad: Tensor,
    kept: Tensor,
    matrix_bar: Tensor,
    features_bar: Tensor,
) -> Launch:
    rows, blocks = matrix.shape[0], _blocks(problem)
    arguments = {
        "matrix": matrix,
        "features": features,
        "grad": grad,
        "kept": kept,
        "matrix_bar": matrix_bar,
        "features_bar": features_bar,
        "batch": problem.batch,
        "rows": rows,
        "columns": problem.readout_columns,
        "ACTIVATION": problem.activation,
        **problem.arithmetic,
        **blocks,
    }
    owners = cdiv(problem.batch, blocks["BLOCK_B"]) + cdiv(rows, blocks["BLOCK_R"])
    return Launch(
        readout_backward_kernel,
        (cdiv(problem.readout_columns, blocks["BLOCK_C"]), owners),
        arguments,
        config.back_warps,
    )


def _blocks(problem: Problem) -> dict[str, int]:
    """Few rows a program: the matrix, which is all there is to read, is spread over the whole machine."""
    return {"BLOCK_B": block(problem.batch, 64, 16), "BLOCK_R": 16, "BLOCK_C": 64}


def forward(
    problem: Problem,
    config: Config,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    matrix: Tensor,
    psi: Tensor,
) -> list[Tensor]:
    """I(U) `[B, out_features]`, then what the backward pass needs: prefixes, connections, features."""

    def new(size: int) -> Tensor:
        return psi.new_empty(size, dtype=problem.compute_dtype)

    prefixes, connections = new(problem.prefix_size), new(problem.connection_size(mix=False))
    features = new(problem.batch * problem.readout_columns)
    out = psi.new_empty(problem.batch, problem.e)
    run(
        [
            chain_launch(problem, config, weights, biases, psi, prefixes, None, connections, features),
            readout_launch(problem, config, matrix, features, out, None),
        ]
    )
    return [out, prefixes, connections, features]


def backward(
    problem: Problem,
    config: Config,
    grad: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    matrix: Tensor,
    psi: Tensor,
    saved: Sequence[Tensor],
) -> list[Tensor]:
    """The gradients of weights, biases, matrix and psi."""
    prefixes, connections, features = saved
    prefixes_bar, connections_bar, features_bar = (x.new_empty(x.shape) for x in saved)
    shares = prefixes.new_empty(problem.batch * psi.numel())
    weights_bar, biases_bar = [w.new_empty(w.shape) for w in weights], [b.new_empty(b.shape) for b in biases]
    matrix_bar, psi_bar = matrix.new_empty(matrix.shape), psi.new_empty(psi.shape)
    factors, factors_bar = (prefixes, None, connections), (prefixes_bar, None, connections_bar)
    everything = Chunk(0, 1, 0, problem.batch)
    run(
        [
            readout_backward_launch(problem, config, matrix, features, grad, grad, matrix_bar, features_bar),
            chain_backward_launch(
                problem, config, weights, psi, factors, factors_bar,
                None, None, features_bar, shares, weights_bar[0], biases_bar, everything,
            ),
            weight_gradient_launch(problem, config, None, None, None, factors, factors_bar, weights_bar, everything),
            sum_launch(problem, shares, [psi_bar], [problem.batch]),
        ]
    )  # fmt: skip
    return [*weights_bar, *biases_bar, matrix_bar, psi_bar]
