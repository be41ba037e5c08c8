"""The equivariant layer: every output is one product of its coefficients with data of the network.

Middle weights, 1 < i < L, mix channels at every position (j, k):

    E(W)_i = Φ [W_i; [WW]; [bW]],    [WW] = U_i S_(i-1),  U_i = P_i Ψ,    [bW] = b_i (ψ S_(i-1))

with tiles of [WW] and [bW] made in registers from the factors. The edges, which are the weights of layers 1 and L and
the hidden biases, contract from the small side: a matrix C of each network, made in registers too, meets few rows Y,

    E[r, y] = Σ_x C[r, x] Y[x, y],    C[r, x] = Φ[r, x] + Σ_z Φ'[r, z] T[x, z]

    layer i < L   x over the n_0 + i rows Y of A_i: Φ' of [WW] meets T = G_i for the rows of P_i, Φ' of [bW] the last
                  row of G_i for b_i; rows v_(i,t) have no Φ'
    layer L       x over the n_L rows Y of W_L: Φ' of [WW] and [bW] together meets T = H

(channels, summed over as well, are left out). Edges are numbered o = 0, the weights of layer 1; o = 1 … L − 1, the
hidden biases; o = L, the weights of layer L. The last bias is `invariant.readout_kernel`.

Networks are taken in reverse order: what the launch before touched last is still in cache. What is used for the last
time is loaded and stored as a stream (".cs"), so that it does not push out the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from magep_fast.triton_kernels.chain import chain_backward_launch, chain_launch, weight_gradient_launch
from magep_fast.triton_kernels.invariant import readout_backward_launch, readout_launch
from magep_fast.triton_kernels.launch import Chunk, Config, Launch, Problem, block, cdiv, chunks_of, run
from magep_fast.triton_kernels.tiles import (
    activated,
    connection_at,
    dot,
    last_connection_at,
    load_gradient,
    number,
    pick,
    prefix_at,
    section_at,
    sum_launch,
    wide,
)
from torch import Tensor


@triton.jit
def middle_tiles(
    weights, psi, prefixes, suffixes, widths, batch, d, b, i, dd, j, k,
    N_0: tl.constexpr, N_L: tl.constexpr, COMPUTE: tl.constexpr, CACHE: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """W_i, [WW] and [bW] at channels dd and positions (j, k): each [BLOCK_D, BLOCK_J · BLOCK_K]. CACHE says how W_i is
    loaded."""
    L: tl.constexpr = len(weights)
    n = number(widths, i)
    m = number(widths, i - 1)
    items = batch * d
    item = b * d + dd
    weight = tl.load(
        pick(weights, i - 1) + item.to(tl.int64)[:, None, None] * (n * m) + (j[:, None] * m + k[None, :])[None, :, :],
        mask=(dd < d)[:, None, None] & (j < n)[None, :, None] & (k < m)[None, None, :],
        other=0.0,
        cache_modifier=CACHE,
    )
    left = prefixes + prefix_at(widths, i, items, item, N_0)
    bias = tl.load(left[:, None] + (N_0 + i - 1) * n + j[None, :], mask=(dd < d)[:, None] & (j < n)[None, :], other=0.0)
    right = suffixes + section_at(widths, i - 1, items, item, N_L)[:, None] + k[None, :]
    pair = psi + (L + i - 2) * ((N_0 + 1) * N_L * d)
    product = tl.zeros((BLOCK_D, BLOCK_J, BLOCK_K), COMPUTE)
    g = tl.zeros((BLOCK_D, BLOCK_K), COMPUTE)
    for p in range(N_L):
        S = tl.load(right + p * m, mask=(dd < d)[:, None] & (k < m)[None, :], other=0.0)
        U = left_factor(left, pair, p, dd, d, j, n, N_0, N_L, COMPUTE, BLOCK_D, BLOCK_Q, BLOCK_J)
        product += U[:, :, None] * S[:, None, :]
        small = tl.load(pair + (N_0 * N_L + p) * d + dd, mask=dd < d, other=0.0).to(COMPUTE)
        g += small[:, None] * S
    outer = bias[:, :, None] * g[:, None, :]
    return (
        tl.reshape(weight, (BLOCK_D, BLOCK_J * BLOCK_K)),
        tl.reshape(product, (BLOCK_D, BLOCK_J * BLOCK_K)),
        tl.reshape(outer, (BLOCK_D, BLOCK_J * BLOCK_K)),
    )


@triton.jit
def left_factor(
    left, pair, p, dd, d, j, n,
    N_0: tl.constexpr, N_L: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """Column p of U = P Ψ at channels dd and rows j: [BLOCK_D, BLOCK_J], from P at `left`."""
    U = tl.zeros((BLOCK_D, BLOCK_J), COMPUTE)
    for q_0 in range(0, N_0, BLOCK_Q):
        q = q_0 + tl.arange(0, BLOCK_Q)
        P = tl.load(
            left[None, :, None] + q[:, None, None] * n + j[None, None, :],
            mask=(q < N_0)[:, None, None] & (dd < d)[None, :, None] & (j < n)[None, None, :],
            other=0.0,
        )
        big = tl.load(
            pair + (q[:, None] * N_L + p) * d + dd[None, :], mask=(q < N_0)[:, None] & (dd < d)[None, :], other=0.0
        ).to(COMPUTE)
        U += tl.sum(P * big[:, :, None], axis=0)
    return U


@triton.jit
def edge(o, widths, e, L: tl.constexpr, N_0: tl.constexpr, N_L: tl.constexpr):
    """Layer, rows of coefficients and positions of an edge; `inner`: how many rows lie side by side in the output."""
    i = tl.maximum(o, 1)
    rows = e * tl.where(o == 0, N_0, tl.where(o == L, N_L, 1))
    inner = tl.where(o == 0, N_0, 1)
    return i, rows, number(widths, tl.where(o == L, L - 1, i)), inner


@triton.jit
def edge_layer(
    prefixes, suffixes, connections, widths, batch, d, b, i, dd, L: tl.constexpr, N_0: tl.constexpr, N_L: tl.constexpr
):
    """Of a layer's edges: X rows Y, of which `first` come before v and b; Z columns of T; slots, blocks of d columns of
    the matrix; and offsets of Y for channels dd, in prefixes or, for the last layer, in suffixes, and of T."""
    items = batch * d
    item = b * d + dd
    is_last = i == L
    X = tl.where(is_last, N_L, N_0 + i)
    first = tl.where(is_last, N_L, N_0)
    Z = tl.where(is_last, 2 * N_L, N_0)
    slots = tl.where(is_last, 3 * N_L, 3 * N_0 + i)
    Y_at = tl.where(
        is_last,
        section_at(widths, tl.minimum(i, L - 1), items, item, N_L),
        prefix_at(widths, i, items, item, N_0),
    )
    T_at = tl.where(
        is_last, last_connection_at(b, batch, d, L, N_0, N_L), connection_at(i, b, batch, d, L, N_0)
    )  # fmt: skip
    return X, first, Z, slots, Y_at, T_at


@triton.jit
def edge_coefficients(
    matrix, T, r, rows, x, X, first, Z, slots, dd, d, COMPUTE: tl.constexpr, BLOCK_Z: tl.constexpr
):  # fmt: skip
    """C[r, x] for channels dd: [BLOCK_R, BLOCK_D]."""
    at = matrix + r.to(tl.int64)[:, None] * (slots * d) + dd[None, :]
    inside = (r < rows)[:, None] & (dd < d)[None, :]
    own = tl.where(x < first, x, 2 * first + x)
    C = tl.load(at + own * d, mask=inside, other=0.0).to(COMPUTE)
    start = tl.where(x < first, first, 2 * first)
    for z_0 in range(0, tl.where((x < first) | (x == X - 1), Z, 0), BLOCK_Z):
        z = z_0 + tl.arange(0, BLOCK_Z)
        phi = tl.load(
            at[:, None, :] + (start + z)[None, :, None] * d,
            mask=inside[:, None, :] & (z < Z)[None, :, None],
            other=0.0,
        ).to(COMPUTE)
        weight = tl.load(
            T + (tl.minimum(x, first) * Z + z)[:, None] * d + dd[None, :],
            mask=(z < Z)[:, None] & (dd < d)[None, :],
            other=0.0,
        )
        C += tl.sum(phi * weight[None, :, :], axis=1)
    return C


@triton.jit
def mix_middle(
    weights, matrices, psi, prefixes, suffixes, outputs, arguments, widths, batch, d, e, b, tile,
    N_0: tl.constexpr, N_L: tl.constexpr, ACTIVATION: tl.constexpr, KEEP: tl.constexpr,
    OPERAND: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile of the weights of a middle layer: BLOCK_E channels, BLOCK_J × BLOCK_K positions."""
    e_blocks = tl.cdiv(e, BLOCK_E)
    i = tl.full((), 2, tl.int32)
    while tile >= e_blocks * tl.cdiv(number(widths, i), BLOCK_J) * tl.cdiv(number(widths, i - 1), BLOCK_K):
        tile -= e_blocks * tl.cdiv(number(widths, i), BLOCK_J) * tl.cdiv(number(widths, i - 1), BLOCK_K)
        i += 1
    n = number(widths, i)
    m = number(widths, i - 1)
    k_blocks = tl.cdiv(m, BLOCK_K)
    ee = tile % e_blocks * BLOCK_E + tl.arange(0, BLOCK_E)
    j = tile // e_blocks // k_blocks * BLOCK_J + tl.arange(0, BLOCK_J)
    k = tile // e_blocks % k_blocks * BLOCK_K + tl.arange(0, BLOCK_K)
    matrix = pick(matrices, 2 * i - 2)
    acc = tl.zeros((BLOCK_E, BLOCK_J * BLOCK_K), COMPUTE)
    for d_0 in range(0, d, BLOCK_D):
        dd = d_0 + tl.arange(0, BLOCK_D)
        weight, product, outer = middle_tiles(
            weights, psi, prefixes, suffixes, widths, batch, d, b, i, dd, j, k,
            N_0, N_L, COMPUTE, ".cs", BLOCK_D, BLOCK_Q, BLOCK_J, BLOCK_K,
        )  # fmt: skip
        phi = matrix + ee[:, None] * (3 * d) + dd[None, :]
        inside = (ee < e)[:, None] & (dd < d)[None, :]
        acc = dot(tl.load(phi, mask=inside, other=0.0), weight, acc, OPERAND, PRECISION)
        acc = dot(tl.load(phi + d, mask=inside, other=0.0), product, acc, OPERAND, PRECISION)
        acc = dot(tl.load(phi + 2 * d, mask=inside, other=0.0), outer, acc, OPERAND, PRECISION)
    result = tl.reshape(acc, (BLOCK_E, BLOCK_J, BLOCK_K))
    at = (b.to(tl.int64) * e + ee)[:, None, None] * (n * m) + (j[:, None] * m + k[None, :])[None, :, :]
    inside_3 = (ee < e)[:, None, None] & (j < n)[None, :, None] & (k < m)[None, None, :]
    out = pick(outputs, i - 1)
    if KEEP:
        tl.store(pick(arguments, i - 1) + at, result.to(out.dtype.element_ty), mask=inside_3, cache_modifier=".cs")
    value = activated(result, ACTIVATION).to(out.dtype.element_ty)
    tl.store(out + at, value, mask=inside_3, cache_modifier=".cs")


@triton.jit
def mix_edge(
    matrices, prefixes, suffixes, connections, outputs, arguments, widths, batch, d, e, b, tile,
    N_0: tl.constexpr, N_L: tl.constexpr, ACTIVATION: tl.constexpr, KEEP: tl.constexpr,
    OPERAND: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_Y: tl.constexpr, BLOCK_Z: tl.constexpr,
):  # fmt: skip
    """One tile of an edge: BLOCK_R rows, BLOCK_Y positions."""
    L: tl.constexpr = len(widths) - 1
    o = tl.full((), 0, tl.int32)
    i, rows, positions, inner = edge(o, widths, e, L, N_0, N_L)
    while tile >= tl.cdiv(rows, BLOCK_R) * tl.cdiv(positions, BLOCK_Y):
        tile -= tl.cdiv(rows, BLOCK_R) * tl.cdiv(positions, BLOCK_Y)
        o += 1
        i, rows, positions, inner = edge(o, widths, e, L, N_0, N_L)
    r_blocks = tl.cdiv(rows, BLOCK_R)
    r = tile % r_blocks * BLOCK_R + tl.arange(0, BLOCK_R)
    y = tile // r_blocks * BLOCK_Y + tl.arange(0, BLOCK_Y)
    matrix = pick(matrices, tl.where(o == 0, 0, tl.where(o == L, 2 * L - 2, 2 * o - 1)))
    sums = tl.zeros((BLOCK_R, BLOCK_Y), COMPUTE)
    for d_0 in range(0, d, BLOCK_D):
        dd = d_0 + tl.arange(0, BLOCK_D)
        X, first, Z, slots, Y_at, T_at = edge_layer(
            prefixes, suffixes, connections, widths, batch, d, b, i, dd, L, N_0, N_L
        )
        for x in range(X):
            C = edge_coefficients(
                matrix, connections + T_at, r, rows, x, X, first, Z, slots, dd, d, COMPUTE, BLOCK_Z
            )  # fmt: skip
            Y = load_rows(prefixes, suffixes, Y_at + x * positions, y, (dd < d), positions, i == L)
            sums = dot(C, Y, sums, OPERAND, PRECISION)
    at = edge_output_at(b, r, y, rows, positions, inner)
    inside_2 = (r < rows)[:, None] & (y < positions)[None, :]
    index = tl.where(o == 0, 0, tl.where(o == L, L - 1, L + o - 1))
    out = pick(outputs, index)
    if KEEP:
        tl.store(pick(arguments, index) + at, sums.to(out.dtype.element_ty), mask=inside_2, cache_modifier=".cs")
    value = activated(sums, ACTIVATION).to(out.dtype.element_ty)
    tl.store(out + at, value, mask=inside_2, cache_modifier=".cs")


@triton.jit
def mix_kernel(
    weights, matrices, psi, prefixes, suffixes, connections, outputs, arguments, widths, batch, d, e,
    N_0: tl.constexpr, N_L: tl.constexpr, ACTIVATION: tl.constexpr, KEEP: tl.constexpr,
    OPERAND: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_Y: tl.constexpr, BLOCK_Z: tl.constexpr,
):  # fmt: skip
    """All outputs but the last bias; KEEP: the arguments of the activation too.

    Grid: networks × tiles of middle layers, then networks × tiles of edges, which find the factors in cache.
    """
    L: tl.constexpr = len(weights)
    middle = 0
    e_blocks = tl.cdiv(e, BLOCK_E)
    for layer in tl.static_range(2, L):
        middle += e_blocks * tl.cdiv(widths[layer], BLOCK_J) * tl.cdiv(widths[layer - 1], BLOCK_K)
    edges = 0
    for k in tl.static_range(L + 1):
        _, rows, positions, _ = edge(tl.full((), k, tl.int32), widths, e, L, N_0, N_L)
        edges += tl.cdiv(rows, BLOCK_R) * tl.cdiv(positions, BLOCK_Y)
    pid = tl.program_id(0)
    if pid < batch * middle:
        mix_middle(
            weights, matrices, psi, prefixes, suffixes, outputs, arguments, widths, batch, d, e,
            batch - 1 - pid // middle, pid % middle,
            N_0, N_L, ACTIVATION, KEEP, OPERAND, COMPUTE, PRECISION, BLOCK_D, BLOCK_E, BLOCK_Q, BLOCK_J, BLOCK_K,
        )  # fmt: skip
    else:
        pid -= batch * middle
        mix_edge(
            matrices, prefixes, suffixes, connections, outputs, arguments, widths, batch, d, e,
            batch - 1 - pid // edges, pid % edges,
            N_0, N_L, ACTIVATION, KEEP, OPERAND, COMPUTE, PRECISION, BLOCK_D, BLOCK_R, BLOCK_Y, BLOCK_Z,
        )  # fmt: skip


@triton.jit
def load_rows(prefixes, suffixes, at, y, channel_inside, positions, is_last):
    """Rows Y of an edge, [BLOCK_D, BLOCK_Y], from prefixes or, for the last layer, from suffixes."""
    base = prefixes
    if is_last:
        base = suffixes
    return tl.load(
        base + at[:, None] + y[None, :], mask=channel_inside[:, None] & (y < positions)[None, :], other=0.0
    )  # fmt: skip


@triton.jit
def edge_output_at(b, r, y, rows, positions, inner):
    """Offsets [BLOCK_R, BLOCK_Y] in an output [B, rows / inner, positions, inner]."""
    row = b.to(tl.int64) * rows * positions + (r // inner).to(tl.int64) * (inner * positions) + r % inner
    return row[:, None] + (y * inner)[None, :]


@triton.jit
def middle_gradients(
    matrix, grad, kept, b, d, e, n, m, dd, j, k,
    ACTIVATION: tl.constexpr, OPERAND: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The gradients Φᵀ ō of [WW] and [bW] at channels dd and positions (j, k): each [BLOCK_D, BLOCK_J, BLOCK_K]."""
    product_bar = tl.zeros((BLOCK_D, BLOCK_J * BLOCK_K), COMPUTE)
    outer_bar = tl.zeros((BLOCK_D, BLOCK_J * BLOCK_K), COMPUTE)
    for e_0 in range(0, e, BLOCK_E):
        ee = e_0 + tl.arange(0, BLOCK_E)
        at = (b.to(tl.int64) * e + ee)[:, None, None] * (n * m) + (j[:, None] * m + k[None, :])[None, :, :]
        inside = (ee < e)[:, None, None] & (j < n)[None, :, None] & (k < m)[None, None, :]
        bar = load_gradient(grad, kept, at, inside, COMPUTE, ACTIVATION)
        bar_2 = tl.reshape(bar, (BLOCK_E, BLOCK_J * BLOCK_K))
        phi = matrix + ee[None, :] * (3 * d) + dd[:, None]
        known = (ee < e)[None, :] & (dd < d)[:, None]
        product_bar = dot(tl.load(phi + d, mask=known, other=0.0), bar_2, product_bar, OPERAND, PRECISION)
        outer_bar = dot(tl.load(phi + 2 * d, mask=known, other=0.0), bar_2, outer_bar, OPERAND, PRECISION)
    return (
        tl.reshape(product_bar, (BLOCK_D, BLOCK_J, BLOCK_K)),
        tl.reshape(outer_bar, (BLOCK_D, BLOCK_J, BLOCK_K)),
    )


@triton.jit
def add_to(at, x, mask, step):
    """Stores x, or adds it to what this program stored at earlier steps; the same thread owns an entry each time."""
    x += tl.load(at, mask=mask & (tl.full(mask.shape, step, tl.int32) > 0), other=0.0)
    tl.store(at, x, mask=mask)


@triton.jit
def rows_backward(
    matrix, grad, values, psi, suffixes, left_bar, widths, batch, d, e, b, i, dd, own,
    N_0: tl.constexpr, N_L: tl.constexpr, ACTIVATION: tl.constexpr,
    OPERAND: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_SHORT: tl.constexpr, BLOCK_LONG: tl.constexpr,
):  # fmt: skip
    """Ū_i and, in a row below, b̄_i for BLOCK_SHORT rows j."""
    L: tl.constexpr = len(widths) - 1
    n = number(widths, i)
    m = number(widths, i - 1)
    items = batch * d
    item = b * d + dd
    pair = psi + (L + i - 2) * ((N_0 + 1) * N_L * d)
    S_at = section_at(widths, i - 1, items, item, N_L)
    j = own * BLOCK_SHORT + tl.arange(0, BLOCK_SHORT)
    inside_j = (dd < d)[:, None] & (j < n)[None, :]
    U_bar = left_bar + section_at(widths, i, items, item, N_L + 1)[:, None] + j[None, :]
    for k_0 in range(0, m, BLOCK_LONG):
        k = k_0 + tl.arange(0, BLOCK_LONG)
        product_bar, outer_bar = middle_gradients(
            matrix, grad, values, b, d, e, n, m, dd, j, k,
            ACTIVATION, OPERAND, COMPUTE, PRECISION, BLOCK_D, BLOCK_E, BLOCK_SHORT, BLOCK_LONG,
        )  # fmt: skip
        g = tl.zeros((BLOCK_D, BLOCK_LONG), COMPUTE)
        for p in range(N_L):
            S = tl.load(
                suffixes + S_at[:, None] + p * m + k[None, :],
                mask=(dd < d)[:, None] & (k < m)[None, :],
                other=0.0,
            )
            small = tl.load(pair + (N_0 * N_L + p) * d + dd, mask=dd < d, other=0.0).to(COMPUTE)
            g += small[:, None] * S
            add_to(U_bar + p * n, tl.sum(product_bar * S[:, None, :], axis=2), inside_j, k_0)
        add_to(U_bar + N_L * n, tl.sum(outer_bar * g[:, None, :], axis=2), inside_j, k_0)


@triton.jit
def columns_backward(
    matrix, grad, values, psi, prefixes, suffixes_bar, right_bar, widths, batch, d, e, b, i, dd, own,
    N_0: tl.constexpr, N_L: tl.constexpr, ACTIVATION: tl.constexpr,
    OPERAND: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_SHORT: tl.constexpr, BLOCK_LONG: tl.constexpr,
):  # fmt: skip
    """S̄_(i-1) and (ψ S_(i-1))‾ for BLOCK_SHORT columns k."""
    L: tl.constexpr = len(widths) - 1
    n = number(widths, i)
    m = number(widths, i - 1)
    items = batch * d
    item = b * d + dd
    pair = psi + (L + i - 2) * ((N_0 + 1) * N_L * d)
    S_at = section_at(widths, i - 1, items, item, N_L)
    k = own * BLOCK_SHORT + tl.arange(0, BLOCK_SHORT)
    inside_k = (dd < d)[:, None] & (k < m)[None, :]
    S_bar = suffixes_bar + S_at[:, None] + k[None, :]
    g_bar = right_bar + section_at(widths, i - 1, items, item, 1)[:, None] + k[None, :]
    left = prefixes + prefix_at(widths, i, items, item, N_0)
    for j_0 in range(0, n, BLOCK_LONG):
        j = j_0 + tl.arange(0, BLOCK_LONG)
        product_bar, outer_bar = middle_gradients(
            matrix, grad, values, b, d, e, n, m, dd, j, k,
            ACTIVATION, OPERAND, COMPUTE, PRECISION, BLOCK_D, BLOCK_E, BLOCK_LONG, BLOCK_SHORT,
        )  # fmt: skip
        bias = tl.load(
            left[:, None] + (N_0 + i - 1) * n + j[None, :], mask=(dd < d)[:, None] & (j < n)[None, :], other=0.0
        )
        for p in range(N_L):
            U = left_factor(left, pair, p, dd, d, j, n, N_0, N_L, COMPUTE, BLOCK_D, BLOCK_Q, BLOCK_LONG)
            add_to(S_bar + p * m, tl.sum(product_bar * U[:, :, None], axis=1), inside_k, j_0)
        add_to(g_bar, tl.sum(outer_bar * bias[:, :, None], axis=1), inside_k, j_0)


@triton.jit
def middle_backward(
    matrices, psi, prefixes, suffixes, grads, kept, suffixes_bar, left_bar, right_bar, widths, batch, d, e, b, tile,
    N_0: tl.constexpr, N_L: tl.constexpr, ACTIVATION: tl.constexpr,
    OPERAND: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_SHORT: tl.constexpr, BLOCK_LONG: tl.constexpr,
):  # fmt: skip
    """The program of some rows or some columns of a middle layer, and of BLOCK_D channels."""
    d_blocks = tl.cdiv(d, BLOCK_D)
    i = tl.full((), 2, tl.int32)
    while tile >= d_blocks * (tl.cdiv(number(widths, i), BLOCK_SHORT) + tl.cdiv(number(widths, i - 1), BLOCK_SHORT)):
        tile -= d_blocks * (tl.cdiv(number(widths, i), BLOCK_SHORT) + tl.cdiv(number(widths, i - 1), BLOCK_SHORT))
        i += 1
    matrix, grad, values = pick(matrices, 2 * i - 2), pick(grads, i - 1), pick(kept, i - 1)
    dd = tile % d_blocks * BLOCK_D + tl.arange(0, BLOCK_D)
    own = tile // d_blocks
    own_rows = tl.cdiv(number(widths, i), BLOCK_SHORT)
    if own < own_rows:
        rows_backward(
            matrix, grad, values, psi, suffixes, left_bar, widths, batch, d, e, b, i, dd, own,
            N_0, N_L, ACTIVATION, OPERAND, COMPUTE, PRECISION, BLOCK_D, BLOCK_E, BLOCK_SHORT, BLOCK_LONG,
        )  # fmt: skip
    else:
        columns_backward(
            matrix, grad, values, psi, prefixes, suffixes_bar, right_bar, widths, batch, d, e, b, i, dd, own - own_rows,
            N_0, N_L, ACTIVATION, OPERAND, COMPUTE, PRECISION, BLOCK_D, BLOCK_E, BLOCK_Q, BLOCK_SHORT, BLOCK_LONG,
        )  # fmt: skip


@triton.jit
def edge_backward(
    matrices, prefixes, suffixes, connections, grads, kept, prefixes_bar, suffixes_bar, connections_bar,
    widths, batch, d, e, b, tile,
    N_0: tl.constexpr, N_L: tl.constexpr, ACTIVATION: tl.constexpr,
    OPERAND: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_Y: tl.constexpr, BLOCK_Z: tl.constexpr,
):  # fmt: skip
    """Ȳ and T̄ of a row x of a layer's edges, and of BLOCK_D channels."""
    L: tl.constexpr = len(widths) - 1
    d_blocks = tl.cdiv(d, BLOCK_D)
    dd = tile % d_blocks * BLOCK_D + tl.arange(0, BLOCK_D)
    x = tile // d_blocks
    i = tl.full((), 1, tl.int32)
    while (i < L) & (x >= N_0 + i):
        x -= N_0 + i
        i += 1
    X, first, Z, slots, Y_at, T_at = edge_layer(
        prefixes, suffixes, connections, widths, batch, d, b, i, dd, L, N_0, N_L
    )
    first_edge = tl.where(i == 1, 0, i)
    positions = number(widths, tl.minimum(i, L - 1))
    Y_at += x * positions
    bar_base = prefixes_bar
    if i == L:
        bar_base = suffixes_bar
    for y_0 in range(0, positions, BLOCK_Y):
        y = y_0 + tl.arange(0, BLOCK_Y)
        Y_bar = tl.zeros((BLOCK_D, BLOCK_Y), COMPUTE)
        for o in range(first_edge, i + 1):
            _, rows, _, inner = edge(o, widths, e, L, N_0, N_L)
            matrix = pick(matrices, tl.where(o == 0, 0, tl.where(o == L, 2 * L - 2, 2 * o - 1)))
            index = tl.where(o == 0, 0, tl.where(o == L, L - 1, L + o - 1))
            for r_0 in range(0, rows, BLOCK_R):
                r = r_0 + tl.arange(0, BLOCK_R)
                C = edge_coefficients(
                    matrix, connections + T_at, r, rows, x, X, first, Z, slots, dd, d, COMPUTE, BLOCK_Z
                )  # fmt: skip
                bar = load_gradient(
                    pick(grads, index), pick(kept, index), edge_output_at(b, r, y, rows, positions, inner),
                    (r < rows)[:, None] & (y < positions)[None, :], COMPUTE, ACTIVATION,
                )  # fmt: skip
                Y_bar = dot(tl.trans(C), bar, Y_bar, OPERAND, PRECISION)
        tl.store(
            bar_base + Y_at[:, None] + y[None, :], Y_bar, mask=(dd < d)[:, None] & (y < positions)[None, :]
        )  # fmt: skip
    start = tl.where(x < first, first, 2 * first)
    for z_0 in range(0, tl.where((x < first) | (x == X - 1), Z, 0), BLOCK_Z):
        z = z_0 + tl.arange(0, BLOCK_Z)
        T_bar = tl.zeros((BLOCK_Z, BLOCK_D), COMPUTE)
        for o in range(first_edge, i + 1):
            _, rows, _, inner = edge(o, widths, e, L, N_0, N_L)
            matrix = pick(matrices, tl.where(o == 0, 0, tl.where(o == L, 2 * L - 2, 2 * o - 1)))
            index = tl.where(o == 0, 0, tl.where(o == L, L - 1, L + o - 1))
            for r_0 in range(0, rows, BLOCK_R):
                r = r_0 + tl.arange(0, BLOCK_R)
                C_bar = tl.zeros((BLOCK_R, BLOCK_D), COMPUTE)
                for y_0 in range(0, positions, BLOCK_Y):
                    y = y_0 + tl.arange(0, BLOCK_Y)
                    bar = load_gradient(
                        pick(grads, index), pick(kept, index), edge_output_at(b, r, y, rows, positions, inner),
                        (r < rows)[:, None] & (y < positions)[None, :], COMPUTE, ACTIVATION,
                    )  # fmt: skip
                    Y = load_rows(prefixes, suffixes, Y_at, y, (dd < d), positions, i == L)
                    C_bar = dot(bar, tl.trans(Y), C_bar, OPERAND, PRECISION)
                phi = tl.load(
                    matrix + r.to(tl.int64)[:, None, None] * (slots * d)
                    + (start + z)[None, :, None] * d + dd[None, None, :],
                    mask=(r < rows)[:, None, None] & (z < Z)[None, :, None] & (dd < d)[None, None, :],
                    other=0.0,
                ).to(COMPUTE)  # fmt: skip
                T_bar += tl.sum(phi * C_bar[:, None, :], axis=0)
        tl.store(
            connections_bar + T_at + (tl.minimum(x, first) * Z + z)[:, None] * d + dd[None, :],
            T_bar,
            mask=(z < Z)[:, None] & (dd < d)[None, :],
        )


@triton.jit
def middle_parameters(
    weights, psi, prefixes, suffixes, grads, kept, partials, sizes, splits, shares, chunk, first, count,
    widths, batch, d, e, tile,
    N_0: tl.constexpr, N_L: tl.constexpr, ACTIVATION: tl.constexpr,
    OPERAND: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A share of Φ̄ of a middle layer, for BLOCK_E rows and BLOCK_D channels of each of its three terms."""
    d_blocks = tl.cdiv(d, BLOCK_D)
    e_blocks = tl.cdiv(e, BLOCK_E)
    layers: tl.constexpr = len(weights) - 2 if len(weights) > 2 else 1
    i = 2 + tile // (e_blocks * d_blocks) % layers
    n = number(widths, i)
    m = number(widths, i - 1)
    j_blocks = tl.cdiv(n, BLOCK_J)
    k_blocks = tl.cdiv(m, BLOCK_K)
    parts = number(splits, 2 * i - 2)
    split = tile // (e_blocks * d_blocks * layers)
    ee = tile % e_blocks * BLOCK_E + tl.arange(0, BLOCK_E)
    dd = tile // e_blocks % d_blocks * BLOCK_D + tl.arange(0, BLOCK_D)
    grad, values = pick(grads, i - 1), pick(kept, i - 1)
    weight_bar = tl.zeros((BLOCK_E, BLOCK_D), COMPUTE)
    product_bar = tl.zeros((BLOCK_E, BLOCK_D), COMPUTE)
    outer_bar = tl.zeros((BLOCK_E, BLOCK_D), COMPUTE)
    everything = wide(count) * (j_blocks * k_blocks)
    for step in range(everything * split // parts, everything * (split + 1) // parts):
        b = first + count - 1 - (step // (j_blocks * k_blocks)).to(tl.int32)
        place = (step % (j_blocks * k_blocks)).to(tl.int32)
        j = place // k_blocks * BLOCK_J + tl.arange(0, BLOCK_J)
        k = place % k_blocks * BLOCK_K + tl.arange(0, BLOCK_K)
        weight, product, outer = middle_tiles(
            weights, psi, prefixes, suffixes, widths, batch, d, b, i, dd, j, k,
            N_0, N_L, COMPUTE, "", BLOCK_D, BLOCK_Q, BLOCK_J, BLOCK_K,
        )  # fmt: skip
        at = (b.to(tl.int64) * e + ee)[:, None, None] * (n * m) + (j[:, None] * m + k[None, :])[None, :, :]
        inside = (ee < e)[:, None, None] & (j < n)[None, :, None] & (k < m)[None, None, :]
        bar = tl.reshape(
            load_gradient(grad, values, at, inside, COMPUTE, ACTIVATION), (BLOCK_E, BLOCK_J * BLOCK_K)
        )  # fmt: skip
        weight_bar = dot(bar, tl.trans(weight), weight_bar, OPERAND, PRECISION)
        product_bar = dot(bar, tl.trans(product), product_bar, OPERAND, PRECISION)
        outer_bar = dot(bar, tl.trans(outer), outer_bar, OPERAND, PRECISION)
    to = partials + partial_at(2 * i - 2, chunk * parts + split, sizes, shares) + ee[:, None] * (3 * d) + dd[None, :]
    inside_2 = (ee < e)[:, None] & (dd < d)[None, :]
    tl.store(to, weight_bar, mask=inside_2, cache_modifier=".cs")
    tl.store(to + d, product_bar, mask=inside_2, cache_modifier=".cs")
    tl.store(to + 2 * d, outer_bar, mask=inside_2, cache_modifier=".cs")


@triton.jit
def edge_parameters(
    prefixes, suffixes, connections, grads, kept, partials, sizes, splits, shares,
    widths, batch, d, e, tile,
    N_0: tl.constexpr, N_L: tl.constexpr, ACTIVATION: tl.constexpr,
    OPERAND: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_Y: tl.constexpr,
):  # fmt: skip
    """A share of Φ̄ of an edge, for BLOCK_R rows and BLOCK_D columns of one slot."""
    L: tl.constexpr = len(widths) - 1
    d_blocks = tl.cdiv(d, BLOCK_D)
    o = tl.full((), 0, tl.int32)
    i, rows, positions, inner = edge(o, widths, e, L, N_0, N_L)
    index = tl.full((), 0, tl.int32)
    slots = tl.full((), 3 * N_0 + 1, tl.int32)
    while tile >= number(splits, index) * tl.cdiv(rows, BLOCK_R) * slots * d_blocks:
        tile -= number(splits, index) * tl.cdiv(rows, BLOCK_R) * slots * d_blocks
        o += 1
        i, rows, positions, inner = edge(o, widths, e, L, N_0, N_L)
        index = tl.where(o == L, 2 * L - 2, 2 * o - 1)
        slots = tl.where(o == L, 3 * N_L, 3 * N_0 + i)
    r_blocks = tl.cdiv(rows, BLOCK_R)
    parts = number(splits, index)
    dd = tile % d_blocks * BLOCK_D + tl.arange(0, BLOCK_D)
    slot = tile // d_blocks % slots
    r = tile // (d_blocks * slots) % r_blocks * BLOCK_R + tl.arange(0, BLOCK_R)
    split = tile // (d_blocks * slots * r_blocks)
    is_last = o == L
    small = tl.where(is_last, N_L, N_0)
    X = tl.where(is_last, N_L, N_0 + i)
    # Which rows of Y a block of columns meets, and with which weights: one row as it is, or several through T.
    through_T = (slot >= small) & (slot < 3 * small)
    is_bias = through_T & (slot >= 2 * small) & (o < L)
    z = tl.where(is_bias, slot - 2 * small, tl.where(through_T, slot - small, 0))
    x_first = tl.where(slot < small, slot, tl.where(is_bias, X - 1, tl.where(through_T, 0, slot - 2 * small)))
    x_end = tl.where(through_T & (is_bias == 0), small, x_first + 1)
    out_index = tl.where(o == 0, 0, tl.where(is_last, L - 1, L + o - 1))
    grad, values = pick(grads, out_index), pick(kept, out_index)
    y_blocks = tl.cdiv(positions, BLOCK_Y)
    matrix_bar = tl.zeros((BLOCK_R, BLOCK_D), COMPUTE)
    everything = wide(batch) * y_blocks
    for step in range(everything * split // parts, everything * (split + 1) // parts):
        b = (step // y_blocks).to(tl.int32)
        y = (step % y_blocks).to(tl.int32) * BLOCK_Y + tl.arange(0, BLOCK_Y)
        _, _, Z, _, Y_at, T_at = edge_layer(prefixes, suffixes, connections, widths, batch, d, b, i, dd, L, N_0, N_L)
        data = tl.zeros((BLOCK_D, BLOCK_Y), COMPUTE)
        for x in range(x_first, x_end):
            Y = load_rows(prefixes, suffixes, Y_at + x * positions, y, (dd < d), positions, is_last)
            T = tl.load(connections + T_at + (tl.minimum(x, small) * Z + z) * d + dd, mask=dd < d, other=0.0)
            data += tl.where(through_T, T, 1.0)[:, None] * Y
        bar = load_gradient(
            grad, values, edge_output_at(b, r, y, rows, positions, inner),
            (r < rows)[:, None] & (y < positions)[None, :], COMPUTE, ACTIVATION,
        )  # fmt: skip
        matrix_bar = dot(bar, tl.trans(data), matrix_bar, OPERAND, PRECISION)
    to = partials + partial_at(index, split, sizes, shares)
    to += r.to(tl.int64)[:, None] * (slots * d) + slot * d + dd[None, :]
    tl.store(to, matrix_bar, mask=(r < rows)[:, None] & (dd < d)[None, :], cache_modifier=".cs")


@triton.jit
def mix_backward_kernel(
    weights, matrices, psi, prefixes, suffixes, connections, grads, kept,
    prefixes_bar, suffixes_bar, connections_bar, left_bar, right_bar, partials, sizes, splits, shares,
    shared_edges, chunk, first, count, widths, batch, d, e,
    N_0: tl.constexpr, N_L: tl.constexpr, ACTIVATION: tl.constexpr,
    OPERAND: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_E_STEP: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_J: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_SHORT: tl.constexpr, BLOCK_LONG: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_R_STEP: tl.constexpr, BLOCK_Y: tl.constexpr, BLOCK_Y_STEP: tl.constexpr,
    BLOCK_Z: tl.constexpr,
):  # fmt: skip
    """The gradients of a chunk of networks, first … first + count − 1, that reach the parameters and, as
    `chain.chain_backward_kernel` takes them, the factors directly.

    Of the parameters, Φ̄ = Σ ō Xᵀ over networks and positions, as `splits` partial sums, `shares` over all chunks. X is
    the data that an output is linear in: the tiles of a middle layer, or of an edge Y and, for Φ', Σ_x T[x, z] Y[x].
    Edges, whose matrices are larger than their data, wait for the last chunk and are summed over all networks there.
    Of a middle layer, by programs that own rows j and sum over k, and programs that own columns k and sum over j:
        Ū[p, j] = Σ_k [WW]‾[j, k] S[p, k]       b̄[j] = Σ_k [bW]‾[j, k] (ψ S)[k]
        S̄[p, k] = Σ_j [WW]‾[j, k] U[j, p]       (ψ S)‾[k] = Σ_j [bW]‾[j, k] b[j]
    Of an edge, by programs that own a row x:
        Ȳ[x, y] = Σ_r C[r, x] ō[r, y]           T̄[x, z] = Σ_r Φ'[r, z] Σ_y ō[r, y] Y[x, y]

    Grid: edges' split × block of rows × slot × block of d, shared_edges in all; networks × rows of edges; networks ×
    rows and columns of middle layers; and in reverse order of networks, so that weights are the last thing touched,
    middle layers' split × layer × block of d × block of e.
    """
    L: tl.constexpr = len(widths) - 1
    d_blocks = tl.cdiv(d, BLOCK_D)
    middle = 0
    for layer in tl.static_range(2, L):
        middle += d_blocks * (tl.cdiv(widths[layer], BLOCK_SHORT) + tl.cdiv(widths[layer - 1], BLOCK_SHORT))
    edges = d_blocks * (N_L + (L - 1) * N_0 + L * (L - 1) // 2)
    tile = tl.program_id(0)
    if tile < shared_edges:
        edge_parameters(
            prefixes, suffixes, connections, grads, kept, partials, sizes, splits, shares, widths, batch, d, e, tile,
            N_0, N_L, ACTIVATION, OPERAND, COMPUTE, PRECISION, BLOCK_D, BLOCK_R, BLOCK_Y,
        )  # fmt: skip
    elif tile < shared_edges + count * edges:
        tile -= shared_edges
        edge_backward(
            matrices, prefixes, suffixes, connections, grads, kept, prefixes_bar, suffixes_bar, connections_bar,
            widths, batch, d, e, first + tile // edges, tile % edges,
            N_0, N_L, ACTIVATION, OPERAND, COMPUTE, PRECISION, BLOCK_D, BLOCK_R_STEP, BLOCK_Y_STEP, BLOCK_Z,
        )  # fmt: skip
    elif tile < shared_edges + count * (edges + middle):
        tile -= shared_edges + count * edges
        middle_backward(
            matrices, psi, prefixes, suffixes, grads, kept, suffixes_bar, left_bar, right_bar, widths, batch, d, e,
            first + tile // middle, tile % middle,
            N_0, N_L, ACTIVATION, OPERAND, COMPUTE, PRECISION,
            BLOCK_D, BLOCK_E_STEP, BLOCK_Q, BLOCK_SHORT, BLOCK_LONG,
        )  # fmt: skip
    else:
        middle_parameters(
            weights, psi, prefixes, suffixes, grads, kept, partials, sizes, splits, shares, chunk, first, count,
            widths, batch, d, e, tile - shared_edges - count * (edges + middle),
            N_0, N_L, ACTIVATION, OPERAND, COMPUTE, PRECISION, BLOCK_D, BLOCK_E, BLOCK_Q, BLOCK_J, BLOCK_K,
        )  # fmt: skip


@triton.jit
def partial_at(index, place, sizes, shares):
    """Offset of a share of the gradient of a parameter, as `tiles.sum_kernel` reads them."""
    before = tl.full((), 0, tl.int64)
    for k in tl.static_range(len(sizes)):
        before += tl.where(k < index, tl.full((), 1, tl.int64) * shares[k] * sizes[k], 0)
    return before + place * number(sizes, index).to(tl.int64)


def mix_launch(
    problem: Problem,
    config: Config,
    weights: Sequence[Tensor],
    matrices: Sequence[Tensor],
    psi: Tensor,
    factors: Sequence[Tensor],
    outputs: Sequence[Tensor],
    arguments: Sequence[Tensor] | None,
) -> Launch:
    """outputs, and arguments of the activation where they are kept: weights, then biases."""
    middle = sum(cdiv(n, config.j) * cdiv(m, config.k) for n, m in problem.middle()) * cdiv(problem.e, config.e)
    edges = sum(cdiv(rows, config.r) * cdiv(positions, config.y) for rows, positions, _ in problem.edges())
    given = {
        "weights": tuple(weights),
        "matrices": tuple(matrices),
        "psi": psi,
        **dict(zip(("prefixes", "suffixes", "connections"), factors, strict=True)),
        "outputs": tuple(outputs),
        "arguments": None if arguments is None else tuple(arguments),
        **_common(problem, config),
        "KEEP": arguments is not None,
        "BLOCK_J": config.j,
        "BLOCK_K": config.k,
        "BLOCK_R": config.r,
        "BLOCK_Y": config.y,
        "BLOCK_Z": config.z,
    }
    return Launch(mix_kernel, (problem.batch * (middle + edges),), given, config.mix_warps)


def mix_backward_launch(
    problem: Problem,
    config: Config,
    weights: Sequence[Tensor],
    matrices: Sequence[Tensor],
    psi: Tensor,
    factors: Sequence[Tensor],
    grads: Sequence[Tensor],
    kept: Sequence[Tensor],
    factors_bar: Sequence[Tensor],
    left_bar: Tensor,
    right_bar: Tensor,
    partials: Tensor,
    chunk: Chunk,
) -> Launch:
    L, d_blocks = problem.L, cdiv(problem.d, config.d)
    splits = num_splits(problem, config)
    owners = sum(cdiv(n, config.short) + cdiv(m, config.short) for n, m in problem.middle())
    owners += problem.n_L + (L - 1) * problem.n_0 + L * (L - 1) // 2
    shared = sum(splits[2 * i - 2] for i in range(2, L)) * cdiv(problem.e, config.e)
    shared_edges = 0
    if chunk.index == chunk.chunks - 1:
        for o, (rows, _, slots) in enumerate(problem.edges()):
            shared_edges += splits[edge_matrix(o, L)] * cdiv(rows, config.r) * slots
    given = {
        "weights": tuple(weights),
        "matrices": tuple(matrices),
        "psi": psi,
        **dict(zip(("prefixes", "suffixes", "connections"), factors, strict=True)),
        "grads": tuple(grads),
        "kept": tuple(kept),
        **dict(zip(("prefixes_bar", "suffixes_bar", "connections_bar"), factors_bar, strict=True)),
        "left_bar": left_bar,
        "right_bar": right_bar,
        "partials": partials,
        "sizes": tuple(m.numel() for m in matrices[:-1]),
        "splits": tuple(splits),
        "shares": tuple(num_shares(problem, config)),
        "shared_edges": d_blocks * shared_edges,
        "chunk": chunk.index,
        "first": chunk.first,
        "count": chunk.count,
        **_common(problem, config),
        "BLOCK_E_STEP": config.e_step,
        "BLOCK_J": config.j,
        "BLOCK_K": config.k,
        "BLOCK_SHORT": config.short,
        "BLOCK_LONG": config.long,
        "BLOCK_R": config.r,
        "BLOCK_R_STEP": config.r_step,
        "BLOCK_Y": config.y,
        "BLOCK_Y_STEP": config.y_step,
        "BLOCK_Z": config.z,
    }
    return Launch(
        mix_backward_kernel, (d_blocks * (shared + shared_edges + chunk.count * owners),), given, config.mix_warps
    )


def edge_matrix(o: int, L: int) -> int:
    """Which of weight_1, bias_1, …, weight_L an edge's coefficients are."""
    return 0 if o == 0 else 2 * L - 2 if o == L else 2 * o - 1


def num_splits(problem: Problem, config: Config) -> list[int]:
    """Into how many shares the sum over networks and positions is cut for weight_1, bias_1, …, weight_L: as many as
    occupy a large GPU, no more than there are tiles, the same number for all middle layers."""
    splits = [1] * (2 * problem.L - 1)
    d_blocks = cdiv(problem.d, config.d)
    for o, (rows, positions, slots) in enumerate(problem.edges()):
        programs, tiles = cdiv(rows, config.r) * slots * d_blocks, problem.batch * cdiv(positions, config.y)
        splits[edge_matrix(o, problem.L)] = max(1, min(tiles, cdiv(64, programs)))
    if problem.L > 2:
        programs = (problem.L - 2) * cdiv(problem.e, config.e) * d_blocks
        tiles = problem.batch * min(cdiv(n, config.j) * cdiv(m, config.k) for n, m in problem.middle())
        splits[2:-1:2] = [max(1, min(tiles, cdiv(256, programs)))] * (problem.L - 2)
    return splits


def num_shares(problem: Problem, config: Config) -> list[int]:
    """How many shares there are in the end: a middle layer has its own in every chunk of networks."""
    shares = num_splits(problem, config)
    shares[2:-1:2] = [len(chunks_of(problem)) * count for count in shares[2:-1:2]]
    return shares


def _common(problem: Problem, config: Config) -> dict[str, object]:
    return {
        "widths": problem.widths,
        "batch": problem.batch,
        "d": problem.d,
        "e": problem.e,
        **problem.ends,
        "ACTIVATION": problem.activation,
        **problem.arithmetic,
        "BLOCK_D": config.d,
        "BLOCK_E": config.e,
        "BLOCK_Q": block(problem.n_0, 4),
    }


def forward(
    problem: Problem,
    config: Config,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    matrices: Sequence[Tensor],
    psi: Tensor,
    keep_arguments: bool,
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """f(E(U)), weights then biases; the arguments of f alike, or nothing; prefixes, suffixes, connections, features."""
    L = problem.L

    def new(size: int) -> Tensor:
        return psi.new_empty(size, dtype=problem.compute_dtype)

    def outputs() -> list[Tensor]:
        return [x.new_empty(problem.batch, problem.e, *x.shape[2:]) for x in (*weights, *biases)]

    results, arguments = outputs(), outputs() if keep_arguments else []
    factors = [new(problem.prefix_size), new(problem.section_size(problem.n_L)), new(problem.connection_size(mix=True))]
    features = new(problem.batch * problem.readout_columns)
    run(
        [
            chain_launch(problem, config, weights, biases, psi, *factors, features),
            mix_launch(problem, config, weights, matrices, psi, factors, results, arguments or None),
            readout_launch(
                problem, config, matrices[-1], features, results[2 * L - 1], arguments[-1] if arguments else None
            ),
        ]
    )
    return results, arguments, [*factors, features]


def backward(
    problem: Problem,
    config: Config,
    grads: Sequence[Tensor],
    kept: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    matrices: Sequence[Tensor],
    psi: Tensor,
    saved: Sequence[Tensor],
) -> list[Tensor]:
    """The gradients of weights, biases, matrices and psi. kept: what the activation's derivative is taken from."""
    *factors, features = saved
    factors_bar, features_bar = [x.new_empty(x.shape) for x in factors], features.new_empty(features.shape)
    left_bar = features.new_empty(problem.section_size(problem.n_L + 1))
    right_bar = features.new_empty(problem.section_size(1))
    weights_bar, biases_bar = [w.new_empty(w.shape) for w in weights], [b.new_empty(b.shape) for b in biases]
    matrices_bar, psi_bar = [m.new_empty(m.shape) for m in matrices], psi.new_empty(psi.shape)
    chunks = chunks_of(problem)
    num = num_shares(problem, config)
    psi_at = sum(count * m.numel() for count, m in zip(num, matrices[:-1], strict=True))
    shares = features.new_empty(psi_at + problem.batch * psi.numel())
    launches = [
        readout_backward_launch(
            problem, config, matrices[-1], features, grads[-1], kept[-1], matrices_bar[-1], features_bar
        )
    ]
    for chunk in chunks:
        launches += [
            mix_backward_launch(
                problem, config, weights, matrices, psi, factors, grads, kept,
                factors_bar, left_bar, right_bar, shares, chunk,
            ),
            chain_backward_launch(
                problem, config, weights, psi, factors, factors_bar, left_bar, right_bar, features_bar,
                shares[psi_at:], weights_bar[0], biases_bar, chunk,
            ),
            weight_gradient_launch(problem, config, matrices, grads, kept, factors, factors_bar, weights_bar, chunk),
        ]  # fmt: skip
    launches.append(sum_launch(problem, shares, [*matrices_bar[:-1], psi_bar], [*num, problem.batch]))
    run(launches)
    return [*weights_bar, *biases_bar, *matrices_bar, psi_bar]
