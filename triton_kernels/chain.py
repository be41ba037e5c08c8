"""The two chains of every network and channel, what connects them, and their reverse.

    A_1 = W_1,  A_i = W_i [A_(i-1) | b_(i-1)]        S_(L-1) = W_L,  S_t = S_(t+1) W_(t+1)

One program runs one chain of one network and channel; its products go through memory, where they stay in cache. The
chains meet the layers in opposite orders, so no order reads every matrix once: the programs of the two chains are
neighbours and run at the same time, and whichever comes second finds the matrix in cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from magep_fast.triton_kernels.launch import Chunk, Config, Launch, Problem, cdiv, run
from magep_fast.triton_kernels.tiles import (
    connection_at,
    copy,
    dot,
    gemm,
    last_connection_at,
    load_gradient,
    number,
    pick,
    prefix_at,
    section_at,
)
from torch import Tensor


@triton.jit
def _suffix_chain(
    weights, suffixes, widths, batch, d, item,
    N_L: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """S_(L-1) … S_1 of an item."""
    L: tl.constexpr = len(weights)
    items = batch * d
    n = number(widths, L - 1)
    W = weights[L - 1] + item.to(tl.int64) * (N_L * n)
    S = suffixes + section_at(widths, L - 1, items, item, N_L)
    copy(W, n, 1, S, n, 1, N_L, n, False, COMPUTE, BLOCK_C, BLOCK_N)
    for step in range(1, L - 1):
        t = L - 1 - step
        m = number(widths, t)
        n = number(widths, t + 1)
        W = pick(weights, t) + item.to(tl.int64) * (n * m)
        after = suffixes + section_at(widths, t + 1, items, item, N_L)
        S = suffixes + section_at(widths, t, items, item, N_L)
        gemm(
            after, n, 1, W, m, 1, S, m, 1, N_L, m, n,
            False, COMPUTE, PRECISION, BLOCK_C, BLOCK_N, BLOCK_K,
        )  # fmt: skip


@triton.jit
def _prefix_chain(
    weights, biases, psi, prefixes, connections, features, widths, batch, d, item,
    N_0: tl.constexpr, N_L: tl.constexpr, ALL: tl.constexpr, FEATURES: tl.constexpr,
    FIRST_PAIR: tl.constexpr, TRACE_PAIR: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A_1 … A_L of an item and what is made from A_L."""
    L: tl.constexpr = len(weights)
    items = batch * d
    n = number(widths, 1)
    W = weights[0] + item.to(tl.int64) * (n * N_0)
    A = prefixes + prefix_at(widths, 1, items, item, N_0)
    copy(W, 1, N_0, A, n, 1, N_0, n, False, COMPUTE, BLOCK_C, BLOCK_N)
    copy(biases[0] + item.to(tl.int64) * n, 0, 1, A + N_0 * n, 0, 1, 1, n, False, COMPUTE, 1, BLOCK_N)
    for i in range(2, L + 1):
        m = number(widths, i - 1)
        n = number(widths, i)
        W = pick(weights, i - 1) + item.to(tl.int64) * (n * m)
        before = prefixes + prefix_at(widths, i - 1, items, item, N_0)
        A = prefixes + prefix_at(widths, i, items, item, N_0)
        # A_i[c, j] = Σ_k A_(i-1)[c, k] W_i[j, k]
        gemm(
            before, m, 1, W, 1, m, A, n, 1, N_0 + i - 1, n, m,
            False, COMPUTE, PRECISION, BLOCK_C, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        bias = pick(biases, i - 1) + item.to(tl.int64) * n
        copy(bias, 0, 1, A + (N_0 + i - 1) * n, 0, 1, 1, n, False, COMPUTE, 1, BLOCK_N)
    if FEATURES:
        A_L = prefixes + prefix_at(widths, tl.full((), L, tl.int32), items, item, N_0)
        _connect(
            A_L, psi, connections, item, batch, d, L, N_0, N_L, ALL, FIRST_PAIR, COMPUTE, PRECISION,
        )  # fmt: skip
        _features(
            A_L, psi, connections, features, item, batch, d, L, N_0, N_L, TRACE_PAIR, COMPUTE, PRECISION,
        )  # fmt: skip


@triton.jit
def chain_kernel(
    weights, biases, psi, prefixes, suffixes, connections, features, widths, batch, d,
    N_0: tl.constexpr, N_L: tl.constexpr, SUFFIX: tl.constexpr, FEATURES: tl.constexpr,
    FIRST_PAIR: tl.constexpr, TRACE_PAIR: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Prefixes and, with SUFFIX, suffixes; with FEATURES what is made from P_L = S_0 too (see `tiles` and `features`).

    FIRST_PAIR is the place of pair (L, 0) in psi, TRACE_PAIR that of (1, 1). Grid: items, or 2 items with SUFFIX.
    """
    item = tl.program_id(0)
    if SUFFIX:
        if item % 2 == 1:
            _suffix_chain(
                weights, suffixes, widths, batch, d, item // 2, N_L, COMPUTE, PRECISION, BLOCK_C, BLOCK_N, BLOCK_K
            )  # fmt: skip
        else:
            _prefix_chain(
                weights, biases, psi, prefixes, connections, features, widths, batch, d, item // 2,
                N_0, N_L, SUFFIX, FEATURES, FIRST_PAIR, TRACE_PAIR, COMPUTE, PRECISION, BLOCK_C, BLOCK_N, BLOCK_K,
            )  # fmt: skip
    else:
        _prefix_chain(
            weights, biases, psi, prefixes, connections, features, widths, batch, d, item,
            N_0, N_L, SUFFIX, FEATURES, FIRST_PAIR, TRACE_PAIR, COMPUTE, PRECISION, BLOCK_C, BLOCK_N, BLOCK_K,
        )  # fmt: skip


@triton.jit
def _connect(
    A_L, psi, connections, item, batch, d,
    L: tl.constexpr, N_0: tl.constexpr, N_L: tl.constexpr, ALL: tl.constexpr, FIRST_PAIR: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """G_i = [Ψ; ψ]_(i,0) S_0 of all layers, or of the last only; and H."""
    b, channel = item // d, item % d
    for i in range(1 if ALL else L, L + 1):
        pair = psi + (FIRST_PAIR - (L - i)) * ((N_0 + 1) * N_L * d) + channel
        G = connections + connection_at(i, b, batch, d, L, N_0) + channel
        # G[q', q] = Σ_p psi[q', p] S_0[p, q], and S_0[p, q] = A_L[q, p]
        gemm(
            pair, N_L * d, d, A_L, 1, N_L, G, N_0 * d, d, N_0 + 1, N_0, N_L,
            False, COMPUTE, PRECISION, 16, 16, 16,
        )  # fmt: skip
    if ALL:
        pair = psi + (2 * L - 2) * ((N_0 + 1) * N_L * d) + channel
        H = connections + last_connection_at(b, batch, d, L, N_0, N_L) + channel
        gemm(
            pair, d, N_L * d, A_L, N_L, 1, H, 2 * N_L * d, d, N_L, N_L, N_0,
            False, COMPUTE, PRECISION, 16, 16, 16,
        )  # fmt: skip
        gemm(
            pair + N_0 * N_L * d, d, 0, A_L + (N_0 + L - 1) * N_L, 0, 1, H + N_L * d, 2 * N_L * d, d, N_L, N_L, 1,
            False, COMPUTE, PRECISION, 16, 16, 16,
        )  # fmt: skip


@triton.jit
def _features(
    A_L, psi, connections, features, item, batch, d,
    L: tl.constexpr, N_0: tl.constexpr, N_L: tl.constexpr, TRACE_PAIR: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The invariants of one channel, channels innermost: P_L, [WW], [bW], [Wb], b_L, the traces, 1."""
    b, channel = item // d, item % d
    SIZE: tl.constexpr = N_L * N_0
    columns = d * (3 * SIZE + L * N_L + 2 * (L - 1)) + 1
    F = features + b.to(tl.int64) * columns + channel
    G = connections + connection_at(L, b, batch, d, L, N_0) + channel
    copy(A_L, 1, N_L, F, N_0 * d, d, N_L, N_0, False, COMPUTE, 16, 16)
    WW = F + SIZE * d
    gemm(A_L, 1, N_L, G, N_0 * d, d, WW, N_0 * d, d, N_L, N_0, N_0, False, COMPUTE, PRECISION, 16, 16, 16)
    bW, bias = WW + SIZE * d, A_L + (N_0 + L - 1) * N_L
    gemm(
        bias, 1, 0, G + N_0 * N_0 * d, 0, d, bW, N_0 * d, d, N_L, N_0, 1, False, COMPUTE, PRECISION, 16, 16, 16
    )  # fmt: skip
    # v_(L,1) … v_(L,L-1) and b_L
    vectors = A_L + N_0 * N_L
    Wb = bW + SIZE * d
    copy(vectors, N_L, 1, Wb, N_L * d, d, L, N_L, False, COMPUTE, 16, 16)
    # Σ_p [WW]_pp = ⟨Ψᵀ, S_0⟩, over q and p at once; Σ_p [bW]_pp = ψ · v_(L,s)
    WW_pp = Wb + L * N_L * d
    PAIR = (N_0 + 1) * N_L * d
    traces = psi + TRACE_PAIR * PAIR + channel
    gemm(traces, PAIR, d, A_L, 1, 0, WW_pp, d, 0, L - 1, 1, SIZE, False, COMPUTE, PRECISION, 16, 16, 16)
    for s in range(L - 1):
        gemm(
            traces + s * PAIR + SIZE * d, 0, d, vectors + s * N_L, 1, 0, WW_pp + (L - 1 + s) * d, 0, 0, 1, 1, N_L,
            False, COMPUTE, PRECISION, 16, 16, 16,
        )  # fmt: skip
    if channel == 0:
        tl.store(features + b.to(tl.int64) * columns + columns - 1, 1.0)


@triton.jit
def _suffix_backward(
    weights, psi, suffixes, suffixes_bar, right_bar, psi_bar, widths, batch, d, item,
    N_0: tl.constexpr, N_L: tl.constexpr, MIX: tl.constexpr, PAIRS: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """S̄_1 … S̄_(L-1) of an item, and ψ̄ of the middle layers."""
    L: tl.constexpr = len(weights)
    items = batch * d
    channel = item % d
    PAIR = (N_0 + 1) * N_L * d
    if MIX:
        psi_bar += (item // d).to(tl.int64) * (PAIRS * PAIR) + channel
    for t in range(1, L - 1):
        m = number(widths, t)
        n = number(widths, t + 1)
        S_bar = suffixes_bar + section_at(widths, t, items, item, N_L)
        if MIX:
            small = (L + t - 1) * PAIR + N_0 * N_L * d
            S = suffixes + section_at(widths, t, items, item, N_L)
            g_bar = right_bar + section_at(widths, t, items, item, 1)
            gemm(
                psi + small + channel, d, 0, g_bar, 0, 1, S_bar, m, 1, N_L, m, 1,
                True, COMPUTE, PRECISION, 16, BLOCK_N, 16,
            )  # fmt: skip
            gemm(
                S, m, 1, g_bar, 1, 0, psi_bar + small, d, 0, N_L, 1, m,
                False, COMPUTE, PRECISION, 16, 16, BLOCK_K,
            )  # fmt: skip
        W = pick(weights, t) + item.to(tl.int64) * (n * m)
        after_bar = suffixes_bar + section_at(widths, t + 1, items, item, N_L)
        gemm(
            S_bar, m, 1, W, 1, m, after_bar, n, 1, N_L, n, m,
            True, COMPUTE, PRECISION, BLOCK_C, BLOCK_N, BLOCK_K,
        )  # fmt: skip


@triton.jit
def _prefix_backward(
    weights, psi, prefixes, connections, prefixes_bar, connections_bar, left_bar, features_bar,
    psi_bar, first_weight_bar, biases_bar, widths, batch, d, item,
    N_0: tl.constexpr, N_L: tl.constexpr, FEATURES: tl.constexpr, MIX: tl.constexpr,
    FIRST_PAIR: tl.constexpr, TRACE_PAIR: tl.constexpr, PAIRS: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Ā_L … Ā_1 of an item, its b̄_i and W̄_1, and the gradients of all connections but ψ of the middle layers."""
    L: tl.constexpr = len(weights)
    items = batch * d
    channel = item % d
    PAIR = (N_0 + 1) * N_L * d
    if FEATURES:
        psi_bar += (item // d).to(tl.int64) * (PAIRS * PAIR) + channel
    last = tl.full((), L, tl.int32)
    A_L = prefixes + prefix_at(widths, last, items, item, N_0)
    A_L_bar = prefixes_bar + prefix_at(widths, last, items, item, N_0)
    if FEATURES:
        _features_backward(
            A_L, A_L_bar, psi, psi_bar, connections, connections_bar, features_bar, item, batch, d,
            L, N_0, N_L, TRACE_PAIR, COMPUTE, PRECISION,
        )  # fmt: skip
        _connect_backward(
            A_L, A_L_bar, psi, psi_bar, connections_bar, item, batch, d,
            L, N_0, N_L, MIX, FIRST_PAIR, COMPUTE, PRECISION,
        )  # fmt: skip
    if MIX:
        for i in range(2, L):
            n = number(widths, i)
            big = (L + i - 2) * PAIR
            A = prefixes + prefix_at(widths, i, items, item, N_0)
            A_bar = prefixes_bar + prefix_at(widths, i, items, item, N_0)
            U_bar = left_bar + section_at(widths, i, items, item, N_L + 1)
            gemm(
                psi + big + channel, N_L * d, d, U_bar, n, 1, A_bar, n, 1, N_0, n, N_L,
                True, COMPUTE, PRECISION, 16, BLOCK_N, 16,
            )  # fmt: skip
            copy(U_bar + N_L * n, 0, 1, A_bar + (N_0 + i - 1) * n, 0, 1, 1, n, True, COMPUTE, 1, BLOCK_N)
            gemm(
                A, n, 1, U_bar, 1, n, psi_bar + big, N_L * d, d, N_0, N_L, n,
                False, COMPUTE, PRECISION, 16, 16, BLOCK_K,
            )  # fmt: skip
    for step in range(L):
        i = L - step
        n = number(widths, i)
        A_bar = prefixes_bar + prefix_at(widths, i, items, item, N_0)
        bias_bar = pick(biases_bar, i - 1)
        row = A_bar + (N_0 + i - 1) * n
        copy(row, 0, 1, bias_bar + item.to(tl.int64) * n, 0, 1, 1, n, False, bias_bar.dtype.element_ty, 1, BLOCK_N)
        if i > 1:
            m = number(widths, i - 1)
            W = pick(weights, i - 1) + item.to(tl.int64) * (n * m)
            before_bar = prefixes_bar + prefix_at(widths, i - 1, items, item, N_0)
            gemm(
                A_bar, n, 1, W, m, 1, before_bar, m, 1, N_0 + i - 1, m, n,
                MIX or not FEATURES, COMPUTE, PRECISION, BLOCK_C, BLOCK_N, BLOCK_K,
            )  # fmt: skip
    n = number(widths, 1)
    A_bar = prefixes_bar + prefix_at(widths, 1, items, item, N_0)
    W_bar = first_weight_bar + item.to(tl.int64) * (n * N_0)
    copy(A_bar, n, 1, W_bar, 1, N_0, N_0, n, False, first_weight_bar.dtype.element_ty, BLOCK_C, BLOCK_N)


@triton.jit
def chain_backward_kernel(
    weights, psi, prefixes, suffixes, connections,
    prefixes_bar, suffixes_bar, connections_bar, left_bar, right_bar, features_bar,
    psi_bar, first_weight_bar, biases_bar, widths, first, batch, d,
    N_0: tl.constexpr, N_L: tl.constexpr, SUFFIX: tl.constexpr, FEATURES: tl.constexpr, MIX: tl.constexpr,
    FIRST_PAIR: tl.constexpr, TRACE_PAIR: tl.constexpr, PAIRS: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Completes the gradients of the factors in place, from those that reach them directly:

        [Ā_(i-1) | b̄_(i-1)] += W_iᵀ Ā_i        S̄_(t+1) += S̄_t W_(t+1)ᵀ

    and writes those of the biases, of W_1 and, one share per network, of psi. The direct ones are, with MIX, all of
    prefixes_bar but A_L, suffixes_bar, connections_bar but G_L, left_bar = Ū_i = (P_i Ψ)‾ [n_L, n_i] above a row of
    b̄_i, and right_bar = (ψ S_t)‾; with FEATURES features_bar; with neither all of prefixes_bar and suffixes_bar.
    Grid: the items of a chunk, of which `first` is the first network, or twice that with SUFFIX.
    """
    item = tl.program_id(0)
    if SUFFIX:
        if item % 2 == 1:
            _suffix_backward(
                weights, psi, suffixes, suffixes_bar, right_bar, psi_bar, widths, batch, d, first * d + item // 2,
                N_0, N_L, MIX, PAIRS, COMPUTE, PRECISION, BLOCK_C, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        else:
            _prefix_backward(
                weights, psi, prefixes, connections, prefixes_bar, connections_bar, left_bar, features_bar,
                psi_bar, first_weight_bar, biases_bar, widths, batch, d, first * d + item // 2,
                N_0, N_L, FEATURES, MIX, FIRST_PAIR, TRACE_PAIR, PAIRS, COMPUTE, PRECISION, BLOCK_C, BLOCK_N, BLOCK_K,
            )  # fmt: skip
    else:
        _prefix_backward(
            weights, psi, prefixes, connections, prefixes_bar, connections_bar, left_bar, features_bar,
            psi_bar, first_weight_bar, biases_bar, widths, batch, d, first * d + item,
            N_0, N_L, FEATURES, MIX, FIRST_PAIR, TRACE_PAIR, PAIRS, COMPUTE, PRECISION, BLOCK_C, BLOCK_N, BLOCK_K,
        )  # fmt: skip


@triton.jit
def _features_backward(
    A_L, A_L_bar, psi, psi_bar, connections, connections_bar, features_bar, item, batch, d,
    L: tl.constexpr, N_0: tl.constexpr, N_L: tl.constexpr, TRACE_PAIR: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Writes Ā_L and Ḡ_L, and the gradients of the traces' connections, as `_features` made the features."""
    b, channel = item // d, item % d
    SIZE: tl.constexpr = N_L * N_0
    F_bar = features_bar + b.to(tl.int64) * (d * (3 * SIZE + L * N_L + 2 * (L - 1)) + 1) + channel
    at = connection_at(L, b, batch, d, L, N_0) + channel
    G, G_bar = connections + at, connections_bar + at
    copy(F_bar, d, N_0 * d, A_L_bar, N_L, 1, N_0, N_L, False, COMPUTE, 16, 16)
    WW_bar = F_bar + SIZE * d
    gemm(
        G, N_0 * d, d, WW_bar, d, N_0 * d, A_L_bar, N_L, 1, N_0, N_L, N_0, True, COMPUTE, PRECISION, 16, 16, 16
    )  # fmt: skip
    gemm(
        A_L, N_L, 1, WW_bar, N_0 * d, d, G_bar, N_0 * d, d, N_0, N_0, N_L, False, COMPUTE, PRECISION, 16, 16, 16
    )  # fmt: skip
    bW_bar = WW_bar + SIZE * d
    vectors, vectors_bar = A_L + N_0 * N_L, A_L_bar + N_0 * N_L
    Wb_bar = bW_bar + SIZE * d
    copy(Wb_bar, N_L * d, d, vectors_bar, N_L, 1, L, N_L, False, COMPUTE, 16, 16)
    bias, bias_bar = vectors + (L - 1) * N_L, vectors_bar + (L - 1) * N_L
    g, g_bar = G + N_0 * N_0 * d, G_bar + N_0 * N_0 * d
    gemm(g, 0, d, bW_bar, d, N_0 * d, bias_bar, 0, 1, 1, N_L, N_0, True, COMPUTE, PRECISION, 16, 16, 16)
    gemm(bias, 0, 1, bW_bar, N_0 * d, d, g_bar, 0, d, 1, N_0, N_L, False, COMPUTE, PRECISION, 16, 16, 16)
    PAIR = (N_0 + 1) * N_L * d
    WW_pp_bar = Wb_bar + L * N_L * d
    traces, traces_bar = psi + TRACE_PAIR * PAIR + channel, psi_bar + TRACE_PAIR * PAIR
    gemm(traces, d, PAIR, WW_pp_bar, d, 0, A_L_bar, 1, 0, SIZE, 1, L - 1, True, COMPUTE, PRECISION, 16, 16, 16)
    gemm(WW_pp_bar, d, 0, A_L, 0, 1, traces_bar, PAIR, d, L - 1, SIZE, 1, False, COMPUTE, PRECISION, 16, 16, 16)
    for s in range(L - 1):
        bW_pp_bar, small = WW_pp_bar + (L - 1 + s) * d, s * PAIR + SIZE * d
        gemm(
            bW_pp_bar, 0, 0, traces + small, 0, d, vectors_bar + s * N_L, 0, 1, 1, N_L, 1,
            True, COMPUTE, PRECISION, 16, 16, 16,
        )  # fmt: skip
        gemm(
            bW_pp_bar, 0, 0, vectors + s * N_L, 0, 1, traces_bar + small, 0, d, 1, N_L, 1,
            False, COMPUTE, PRECISION, 16, 16, 16,
        )  # fmt: skip


@triton.jit
def _connect_backward(
    A_L, A_L_bar, psi, psi_bar, connections_bar, item, batch, d,
    L: tl.constexpr, N_0: tl.constexpr, N_L: tl.constexpr, ALL: tl.constexpr, FIRST_PAIR: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds to Ā_L what reaches it through G_i and H, and writes the gradients of their connections."""
    b, channel = item // d, item % d
    for i in range(1 if ALL else L, L + 1):
        pair = (FIRST_PAIR - (L - i)) * ((N_0 + 1) * N_L * d)
        G_bar = connections_bar + connection_at(i, b, batch, d, L, N_0) + channel
        gemm(
            G_bar, d, N_0 * d, psi + pair + channel, N_L * d, d, A_L_bar, N_L, 1, N_0, N_L, N_0 + 1,
            True, COMPUTE, PRECISION, 16, 16, 16,
        )  # fmt: skip
        gemm(
            G_bar, N_0 * d, d, A_L, N_L, 1, psi_bar + pair, N_L * d, d, N_0 + 1, N_L, N_0,
            False, COMPUTE, PRECISION, 16, 16, 16,
        )  # fmt: skip
    if ALL:
        big = (2 * L - 2) * ((N_0 + 1) * N_L * d)
        small = big + N_0 * N_L * d
        bias, bias_bar = A_L + (N_0 + L - 1) * N_L, A_L_bar + (N_0 + L - 1) * N_L
        H_bar = connections_bar + last_connection_at(b, batch, d, L, N_0, N_L) + channel
        h_bar = H_bar + N_L * d
        row = 2 * N_L * d
        gemm(
            psi + big + channel, N_L * d, d, H_bar, row, d, A_L_bar, N_L, 1, N_0, N_L, N_L,
            True, COMPUTE, PRECISION, 16, 16, 16,
        )  # fmt: skip
        gemm(
            A_L, N_L, 1, H_bar, d, row, psi_bar + big, N_L * d, d, N_0, N_L, N_L,
            False, COMPUTE, PRECISION, 16, 16, 16,
        )  # fmt: skip
        gemm(
            psi + small + channel, 0, d, h_bar, row, d, bias_bar, 0, 1, 1, N_L, N_L,
            True, COMPUTE, PRECISION, 16, 16, 16,
        )  # fmt: skip
        gemm(
            bias, 0, 1, h_bar, d, row, psi_bar + small, 0, d, 1, N_L, N_L,
            False, COMPUTE, PRECISION, 16, 16, 16,
        )  # fmt: skip


@triton.jit
def weight_gradient_kernel(
    matrices, grads, kept, prefixes, suffixes, prefixes_bar, suffixes_bar, weights_bar, widths, last, batch, d, e,
    N_0: tl.constexpr, N_L: tl.constexpr, SUFFIX: tl.constexpr, MIX: tl.constexpr, ACTIVATION: tl.constexpr,
    OPERAND: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """W̄_i = Φᵀ ō_i (MIX, 1 < i < L) + Ā_i [A_(i-1) | b_(i-1)]ᵀ + S_iᵀ S̄_(i-1), S_L = 1, for i > 1; each written once.

    The grid covers a chunk of networks, of which `last` is the last.
    """
    L: tl.constexpr = len(weights_bar)
    pid = tl.program_id(0)
    d_blocks = tl.cdiv(d, BLOCK_D)
    total = 0
    for layer in tl.static_range(2, L + 1):
        total += d_blocks * tl.cdiv(widths[layer], BLOCK_J) * tl.cdiv(widths[layer - 1], BLOCK_K)
    b = last - pid // total  # in reverse, as what the launch before touched last is still in cache
    tile = pid % total
    i = tl.full((), 2, tl.int32)
    while tile >= d_blocks * tl.cdiv(number(widths, i), BLOCK_J) * tl.cdiv(number(widths, i - 1), BLOCK_K):
        tile -= d_blocks * tl.cdiv(number(widths, i), BLOCK_J) * tl.cdiv(number(widths, i - 1), BLOCK_K)
        i += 1
    n = number(widths, i)
    m = number(widths, i - 1)
    k_blocks = tl.cdiv(m, BLOCK_K)
    dd = tile % d_blocks * BLOCK_D + tl.arange(0, BLOCK_D)
    j = tile // d_blocks // k_blocks * BLOCK_J + tl.arange(0, BLOCK_J)
    k = tile // d_blocks % k_blocks * BLOCK_K + tl.arange(0, BLOCK_K)
    row_inside = (dd < d)[:, None] & (j < n)[None, :]
    column_inside = (dd < d)[:, None] & (k < m)[None, :]
    where = (j[:, None] * m + k[None, :])[None, :, :]
    inside = ((j < n)[:, None] & (k < m)[None, :])[None, :, :]

    mixed = tl.zeros((BLOCK_D, BLOCK_J * BLOCK_K), COMPUTE)
    if MIX:
        if i < L:
            matrix, grad, values = pick(matrices, 2 * i - 2), pick(grads, i - 1), pick(kept, i - 1)
            for e_0 in range(0, e, BLOCK_E):
                ee = e_0 + tl.arange(0, BLOCK_E)
                phi = tl.load(
                    matrix + ee[None, :] * (3 * d) + dd[:, None],
                    mask=(ee < e)[None, :] & (dd < d)[:, None],
                    other=0.0,
                )
                at = (b.to(tl.int64) * e + ee)[:, None, None] * (n * m) + where
                bar = load_gradient(grad, values, at, (ee < e)[:, None, None] & inside, COMPUTE, ACTIVATION)
                mixed = dot(phi, tl.reshape(bar, (BLOCK_E, BLOCK_J * BLOCK_K)), mixed, OPERAND, PRECISION)
    total_bar = tl.reshape(mixed, (BLOCK_D, BLOCK_J, BLOCK_K))

    items = batch * d
    item = b * d + dd
    A_bar = prefixes_bar + prefix_at(widths, i, items, item, N_0)[:, None] + j[None, :]
    before = prefixes + prefix_at(widths, i - 1, items, item, N_0)[:, None] + k[None, :]
    for c in range(N_0 + i - 1):
        left = tl.load(A_bar + c * n, mask=row_inside, other=0.0)
        right = tl.load(before + c * m, mask=column_inside, other=0.0)
        total_bar += left[:, :, None] * right[:, None, :]
    if SUFFIX:
        S = suffixes + section_at(widths, i, items, item, N_L)[:, None] + j[None, :]
        S_bar = suffixes_bar + section_at(widths, i - 1, items, item, N_L)[:, None] + k[None, :]
        known = (dd < d)[:, None] & (j < tl.where(i < L, n, 0))[None, :]
        for p in range(N_L):
            left = tl.load(S + p * n, mask=known, other=0.0)
            left = tl.where((j == tl.where(i < L, -1, p))[None, :], 1.0, left)
            right = tl.load(S_bar + p * m, mask=column_inside, other=0.0)
            total_bar += left[:, :, None] * right[:, None, :]
    W_bar = pick(weights_bar, i - 1)
    at = item.to(tl.int64)[:, None, None] * (n * m) + where
    value = total_bar.to(W_bar.dtype.element_ty)
    tl.store(W_bar + at, value, mask=(dd < d)[:, None, None] & inside, cache_modifier=".cs")


def chain_launch(
    problem: Problem,
    config: Config,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    psi: Tensor | None,
    prefixes: Tensor,
    suffixes: Tensor | None,
    connections: Tensor | None,
    features: Tensor | None,
) -> Launch:
    """Without psi the chains alone; without suffixes what the invariant layer needs."""
    mix = suffixes is not None
    arguments = {
        "weights": tuple(weights),
        "biases": tuple(biases),
        "psi": psi,
        "prefixes": prefixes,
        "suffixes": suffixes,
        "connections": connections,
        "features": features,
        "widths": problem.widths,
        "batch": problem.batch,
        "d": problem.d,
        **problem.ends,
        "SUFFIX": mix,
        "FEATURES": psi is not None,
        **problem.pairs(mix),
        **_arithmetic(problem),
        **_blocks(config),
    }
    return Launch(chain_kernel, (problem.items * (1 + mix),), arguments, config.chain_warps)


def chain_backward_launch(
    problem: Problem,
    config: Config,
    weights: Sequence[Tensor],
    psi: Tensor | None,
    factors: Sequence[Tensor | None],
    factors_bar: Sequence[Tensor | None],
    left_bar: Tensor | None,
    right_bar: Tensor | None,
    features_bar: Tensor | None,
    psi_bar: Tensor | None,
    first_weight_bar: Tensor,
    biases_bar: Sequence[Tensor],
    chunk: Chunk,
) -> Launch:
    """factors: prefixes, suffixes, connections. Mixing is undone where left_bar is given."""
    suffix, mix = factors[1] is not None, left_bar is not None
    arguments = {
        "weights": tuple(weights),
        "psi": psi,
        **dict(zip(("prefixes", "suffixes", "connections"), factors, strict=True)),
        **dict(zip(("prefixes_bar", "suffixes_bar", "connections_bar"), factors_bar, strict=True)),
        "left_bar": left_bar,
        "right_bar": right_bar,
        "features_bar": features_bar,
        "psi_bar": psi_bar,
        "first_weight_bar": first_weight_bar,
        "biases_bar": tuple(biases_bar),
        "widths": problem.widths,
        "first": chunk.first,
        "batch": problem.batch,
        "d": problem.d,
        **problem.ends,
        "SUFFIX": suffix,
        "FEATURES": psi is not None,
        "MIX": mix,
        **problem.pairs(suffix),
        "PAIRS": problem.num_pairs(suffix),
        **_arithmetic(problem),
        **_blocks(config),
    }
    return Launch(chain_backward_kernel, (chunk.count * problem.d * (1 + suffix),), arguments, config.chain_warps)


def weight_gradient_launch(
    problem: Problem,
    config: Config,
    matrices: Sequence[Tensor] | None,
    grads: Sequence[Tensor] | None,
    kept: Sequence[Tensor] | None,
    factors: Sequence[Tensor | None],
    factors_bar: Sequence[Tensor | None],
    weights_bar: Sequence[Tensor],
    chunk: Chunk,
) -> Launch:
    """weights_bar lists all layers; the first is left alone. Without matrices nothing is mixed."""
    mix, n = matrices is not None, problem.widths
    tiles = sum(cdiv(n[i], config.j) * cdiv(n[i - 1], config.k) for i in range(2, problem.L + 1))
    arguments = {
        "matrices": None if matrices is None else tuple(matrices),
        "grads": None if grads is None else tuple(grads),
        "kept": None if kept is None else tuple(kept),
        "prefixes": factors[0],
        "suffixes": factors[1],
        "prefixes_bar": factors_bar[0],
        "suffixes_bar": factors_bar[1],
        "weights_bar": tuple(weights_bar),
        "widths": problem.widths,
        "last": chunk.first + chunk.count - 1,
        "batch": problem.batch,
        "d": problem.d,
        "e": problem.e,
        **problem.ends,
        "SUFFIX": factors[1] is not None,
        "MIX": mix,
        "ACTIVATION": problem.activation,
        **problem.arithmetic,
        "BLOCK_D": config.d,
        "BLOCK_E": config.e_step,
        "BLOCK_J": config.j,
        "BLOCK_K": config.k,
    }
    grid = (chunk.count * cdiv(problem.d, config.d) * tiles,)
    return Launch(weight_gradient_kernel, grid, arguments, config.back_warps)


def forward(
    problem: Problem, config: Config, weights: Sequence[Tensor], biases: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Prefixes and suffixes, laid out as `tiles` says."""
    prefixes, suffixes = (
        weights[0].new_empty(size, dtype=problem.compute_dtype)
        for size in (problem.prefix_size, problem.section_size(problem.n_L))
    )
    run([chain_launch(problem, config, weights, biases, None, prefixes, suffixes, None, None)])
    return prefixes, suffixes


def backward(
    problem: Problem,
    config: Config,
    weights: Sequence[Tensor],
    prefixes: Tensor,
    suffixes: Tensor,
    prefixes_bar: Tensor,
    suffixes_bar: Tensor,
) -> list[Tensor]:
    """The gradients of weights and biases."""
    factors, factors_bar = (prefixes, suffixes, None), (prefixes_bar.clone(), suffixes_bar.clone(), None)
    weights_bar = [w.new_empty(w.shape) for w in weights]
    biases_bar = [w.new_empty(w.shape[:3]) for w in weights]
    everything = Chunk(0, 1, 0, problem.batch)
    run(
        [
            chain_backward_launch(
                problem, config, weights, None, factors, factors_bar,
                None, None, None, None, weights_bar[0], biases_bar, everything,
            ),
            weight_gradient_launch(problem, config, None, None, None, factors, factors_bar, weights_bar, everything),
        ]
    )  # fmt: skip
    return [*weights_bar, *biases_bar]


def _arithmetic(problem: Problem) -> dict[str, object]:
    """Chains are multiplied in the dtype they are kept in."""
    return {name: problem.arithmetic[name] for name in ("COMPUTE", "PRECISION")}


def _blocks(config: Config) -> dict[str, int]:
    return {"BLOCK_C": config.c, "BLOCK_N": config.n, "BLOCK_K": config.inner}
