"""What the kernels share: where factors lie, tiles, products through memory, activations, the final sums.

Letters as in the table of terms; `item` is b·d + channel, a network and channel. Offsets are int64. Per item and layer
i, with n_i the width, the factors are matrices whose rows run over neurons:

    prefixes      A_i  [n_0 + i, n_i]     rows P_i (n_0), v_(i,1) … v_(i,i-1), b_i           i = 1 … L
    suffixes      S_t  [n_L, n_t]                                                            t = 1 … L − 1
    connections   G_i  [n_0 + 1, n_0]     [Ψ; ψ]_(i,0) S_0, channels innermost               i = L … 1
                  H    [n_L, 2 n_L]       H[p', z] = (P_L Ψ)[z, p'], then b_L[z] ψ[p'], of pair (L, L − 1)

each kind in one buffer, layer after layer, and within a layer network after network.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from magep_fast.triton_kernels.launch import Launch, Problem, cdiv
from torch import Tensor

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Triton's interpreter multiplies the bits of bfloat16 operands, not their values."""


@triton.jit
def pick(items, index):
    """items[index] for an index known at run time only."""
    chosen = items[0]
    for k in tl.static_range(1, len(items)):
        if index == k:
            chosen = items[k]
    return chosen


@triton.jit
def number(items, index):
    """items[index] of a tuple of integers, of which the compiler may know some."""
    chosen = tl.full((), 0, tl.int32)
    for k in tl.static_range(len(items)):
        chosen += tl.where(index == k, items[k], 0)
    return chosen


@triton.jit
def wide(x):
    """An argument in 64 bits; Triton makes a constant of an argument that is 1, which knows no conversion."""
    return tl.full((), 1, tl.int64) * x


@triton.jit
def prefix_at(widths, i, items, item, N_0: tl.constexpr):
    """Offset of A_i of an item; items = B·d."""
    before = tl.full((), 0, tl.int64)
    for k in tl.static_range(1, len(widths)):
        before += tl.where(k < i, (N_0 + k) * widths[k], 0)
    return wide(items) * before + item.to(tl.int64) * ((N_0 + i) * number(widths, i))


@triton.jit
def section_at(widths, i, items, item, ROWS: tl.constexpr):
    """Offset of an item's [ROWS, n_i] in a buffer that holds one for each hidden layer: S_i, or gradients like it."""
    before = tl.full((), 0, tl.int64)
    for k in tl.static_range(1, len(widths)):
        before += tl.where(k < i, widths[k], 0)
    return ROWS * (wide(items) * before + item.to(tl.int64) * number(widths, i))


@triton.jit
def connection_at(i, b, batch, d, L: tl.constexpr, N_0: tl.constexpr):
    """Offset of G_i of a network, first channel; G_L comes first because the invariant layer has no other."""
    return ((L - i) * batch + b).to(tl.int64) * ((N_0 + 1) * N_0 * d)


@triton.jit
def last_connection_at(b, batch, d, L: tl.constexpr, N_0: tl.constexpr, N_L: tl.constexpr):
    """Offset of H of a network, first channel."""
    return wide(batch) * (L * (N_0 + 1) * N_0 * d) + b.to(tl.int64) * (2 * N_L * N_L * d)


@triton.jit
def dot(a, b, acc, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """acc + a b with operands rounded to OPERAND, sums in the dtype of acc."""
    a, b = a.to(OPERAND), b.to(OPERAND)
    if INTERPRETED:
        a, b = a.to(acc.dtype), b.to(acc.dtype)
    return tl.dot(a, b, acc, input_precision=PRECISION, out_dtype=acc.dtype)


@triton.jit
def gemm(
    a, a_row, a_col, b, b_row, b_col, c, c_row, c_col, M, N, K,
    ACCUMULATE: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """c[M, N] = a[M, K] b[K, N], or added to c: operands in memory with any strides, by one program.

    The barrier lets whatever follows read c, whichever threads wrote it.
    """
    for m in range(0, M, BLOCK_M):
        rows = m + tl.arange(0, BLOCK_M)
        for n in range(0, N, BLOCK_N):
            columns = n + tl.arange(0, BLOCK_N)
            acc = tl.zeros((BLOCK_M, BLOCK_N), COMPUTE)
            for k in range(0, K, BLOCK_K):
                inner = k + tl.arange(0, BLOCK_K)
                left = tl.load(
                    a + rows[:, None] * a_row + inner[None, :] * a_col,
                    mask=(rows < M)[:, None] & (inner < K)[None, :],
                    other=0.0,
                )
                right = tl.load(
                    b + inner[:, None] * b_row + columns[None, :] * b_col,
                    mask=(inner < K)[:, None] & (columns < N)[None, :],
                    other=0.0,
                )
                acc = dot(left, right, acc, COMPUTE, PRECISION)
            at = c + rows[:, None] * c_row + columns[None, :] * c_col
            inside = (rows < M)[:, None] & (columns < N)[None, :]
            if ACCUMULATE:
                acc += tl.load(at, mask=inside, other=0.0)
            tl.store(at, acc, mask=inside)
    tl.debug_barrier()


@triton.jit
def copy(
    a, a_row, a_col, c, c_row, c_col, M, N,
    ACCUMULATE: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """c[M, N] = a[M, N], or added to c, by one program."""
    for m in range(0, M, BLOCK_M):
        rows = m + tl.arange(0, BLOCK_M)
        for n in range(0, N, BLOCK_N):
            columns = n + tl.arange(0, BLOCK_N)
            inside = (rows < M)[:, None] & (columns < N)[None, :]
            x = tl.load(a + rows[:, None] * a_row + columns[None, :] * a_col, mask=inside, other=0.0).to(COMPUTE)
            at = c + rows[:, None] * c_row + columns[None, :] * c_col
            if ACCUMULATE:
                x += tl.load(at, mask=inside, other=0.0)
            tl.store(at, x, mask=inside)
    tl.debug_barrier()


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """f(x) in the dtype of x."""
    if ACTIVATION == "relu":
        x = tl.where(x < 0, 0.0, x)  # NaN stays NaN
    elif ACTIVATION == "tanh":
        # 1 − 2/(e^2|x| + 1), exact for large |x|, and its series where the difference would cancel.
        size = tl.abs(x)
        far = 1.0 - 2.0 / (tl.exp(2.0 * size) + 1.0)
        square = x * x
        series = 62 / 2835 + square * (-1382 / 155925 + square * (21844 / 6081075))
        near = size * (1.0 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * series))))
        y = tl.where(size < 0.25, near, far)
        x = tl.where(x < 0, -y, y)
    elif ACTIVATION == "sin":
        x = tl.sin(x)
    return x


@triton.jit
def load_gradient(grad, kept, offsets, mask, COMPUTE: tl.constexpr, ACTIVATION: tl.constexpr):
    """The gradient of what the activation was applied to; `kept` is its result, or its argument for sin."""
    g = tl.load(grad + offsets, mask=mask, other=0.0).to(COMPUTE)
    if ACTIVATION is not None:
        y = tl.load(kept + offsets, mask=mask, other=0.0).to(COMPUTE)
        if ACTIVATION == "relu":
            g = tl.where(y <= 0, 0.0, g)
        elif ACTIVATION == "tanh":
            g = g * (1.0 - y * y)
        else:
            g = g * tl.cos(y)
    return g


@triton.jit
def sum_kernel(partials, targets, sizes, splits, COMPUTE: tl.constexpr, BLOCK: tl.constexpr):
    """targets[o] = Σ_s partials[o][s]: gradients of parameters, [splits_o, size_o] one after the other, in order."""
    block = tl.program_id(0)
    o = tl.full((), 0, tl.int32)
    base = tl.full((), 0, tl.int64)
    while block >= tl.cdiv(number(sizes, o), BLOCK):
        block -= tl.cdiv(number(sizes, o), BLOCK)
        base += number(splits, o).to(tl.int64) * number(sizes, o)
        o += 1
    size = number(sizes, o)
    at = block * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), COMPUTE)
    for s in range(number(splits, o)):
        total += tl.load(partials + base + s * size.to(tl.int64) + at, mask=at < size, other=0.0)
    target = pick(targets, o)
    tl.store(target + at, total.to(target.dtype.element_ty), mask=at < size)


def sum_launch(problem: Problem, partials: Tensor, targets: Sequence[Tensor], splits: Sequence[int]) -> Launch:
    BLOCK = 512
    arguments = {
        "partials": partials,
        "targets": tuple(targets),
        "sizes": tuple(x.numel() for x in targets),
        "splits": tuple(splits),
        "COMPUTE": problem.arithmetic["COMPUTE"],
        "BLOCK": BLOCK,
    }
    return Launch(sum_kernel, (sum(cdiv(x.numel(), BLOCK) for x in targets),), arguments, warps=4)
