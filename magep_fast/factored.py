"""The same layers in plain torch ops after the algebra that makes them cheap: the portable backend `torch`.

Per network and channel, with P_i = [W]^(i,0) and v_(i,t) = [Wb]^(i,t)(t), A_i = [P_i | v_(i,1) … v_(i,i-1)] the prefix
chain, S_t = [W]^(L,t) the suffix chain and [G; g]_(s,t) = [Ψ; ψ]^(s,t) S_t:

    [WW]^(s,0)(L,t) = P_s G_(s,t)      [bW]^(s)(L,t) = b_s g_(s,t)
    Σ_p [WW]_pp     = ⟨Ψᵀ, S_0⟩        Σ_p [bW]_pp   = ψ · v_(L,s)

so that no product of weight matrices but the two chains is formed, and no matrix whose trace alone is wanted.

Two habits, both measured: a slice of a shared tensor is taken by one `split` (whose gradient is one `cat`, not a
zero-filled tensor per slice), and a shared matrix that is small meets a batch in `bmm` with an expanded batch
dimension, where `matmul` would copy the batch (see `product`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from einops import rearrange
from torch import Tensor

from magep_fast.activations import activate
from magep_fast.terms import LINEAR, Output, Table, equivariant_table, invariant_table


def prefix_chain(weights: Sequence[Tensor], biases: Sequence[Tensor]) -> list[Tensor]:
    """A_i = W_i [A_(i-1) | b_(i-1)] for i = 1 … L, `[B, d, n_i, n_0 + i − 1]`."""
    chain = [weights[0]]
    for w, b in zip(weights[1:], biases[:-1], strict=True):
        chain.append(w @ torch.cat([chain[-1], b.unsqueeze(-1)], dim=-1))
    return chain


def suffix_chain(weights: Sequence[Tensor]) -> list[Tensor]:
    """S_t = S_(t+1) W_(t+1) for t = L − 1 … 1, `[B, d, n_L, n_t]`; S_0 is P_L of the prefix chain."""
    chain = [weights[-1]]
    for w in weights[-2:0:-1]:
        chain.append(chain[-1] @ w)
    return chain


def chain(weights: Sequence[Tensor], biases: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """A_1 … A_L and S_1 … S_(L-1)."""
    return prefix_chain(weights, biases), suffix_chain(weights)[::-1] if len(weights) > 1 else []


class Factors:
    """The chains of a batch of networks and the terms made from them. Layers are numbered 1 … L, as in the paper."""

    def __init__(self, table: Table, weights: Sequence[Tensor], biases: Sequence[Tensor], psi: Tensor | None):
        self.table = table
        self.L, self.n_0 = len(weights), table.space.n_in
        self.W = dict(enumerate(weights, start=1))
        self.b = dict(enumerate(biases, start=1))
        if table.terms <= LINEAR:
            self.P = {1: weights[0]}
            return
        chain = enumerate(prefix_chain(weights, biases), start=1)
        self.P, self.v = {}, {}
        for i, A in chain:
            self.P[i], self.v[i] = A.split([self.n_0, i - 1], dim=-1)
        if psi is not None:
            num_input = sum(t == 0 for _, t in table.pairs)
            num_traces = sum(s == t for s, t in table.pairs)
            to_input, to_neighbour, self.psi_traces = rearrange(psi, "pair q p d -> pair d q p").split(
                [num_input, len(table.pairs) - num_input - num_traces, num_traces]
            )
            self.psi = dict(zip(table.pairs[num_input:], to_neighbour.unbind(0), strict=False))
            # [G; g]_(s,0) of all s at once.
            products = (to_input.unsqueeze(1) @ self.P[self.L]).unbind(0)
            self.G = {pair: self._split_psi(G) for pair, G in zip(table.pairs, products, strict=False)}

    def _split_psi(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The Ψ part and the ψ part of connections, along the last but one dimension."""
        big, small = rows.split([self.n_0 * self.table.has_WW, int(self.table.has_bW)], dim=-2)
        return big, small

    def meet_suffixes(self) -> None:
        """[G; g]_(i,i-1) for every layer i > 1 from the suffix chain."""
        if self.table.terms & {"WW", "bW"}:
            suffixes = suffix_chain(list(self.W.values()))
            for i, S in zip(range(self.L, 1, -1), suffixes, strict=False):
                self.G[i, i - 1] = self._split_psi(self.psi[i, i - 1] @ S)

    def hidden_columns(self, output: Output, i: int) -> Tensor:
        """What the bias of hidden layer i, and the weights of layer 1, are linear maps of: `[B, columns, n_i]`."""
        columns = []
        for term in output.terms:
            if term.name in ("W", "W_prod"):
                data = self.P[i].mT
            elif term.name == "WW":
                data = self.G[i, 0][0].mT @ self.P[i].mT
            elif term.name == "bW":
                data = self.G[i, 0][1].mT * self.b[i].unsqueeze(-2)
            elif term.name == "Wb":
                data = self._Wb(i)
            else:
                data = self.b[i].unsqueeze(-2)
            columns.append(rearrange(data, "b d q j -> b (q d) j"))
        return torch.cat(columns, dim=1)

    def _Wb(self, i: int) -> Tensor:
        """[Wb]^(i,t)(t) for t = 1 … i − 1, `[B, d, i − 1, n_i]`, or their sum where the coefficient is shared."""
        return self.v[i].sum(-1).unsqueeze(-2) if self.table.share_Wb else self.v[i].mT

    def weight_part(self, name: str, i: int) -> Tensor:
        """[W], [WW] or [bW] of the weights of layer i, `[B, d, n_i, n_(i-1)]`."""
        if name == "W":
            return self.W[i]
        G, g = self.G[i, i - 1]
        return self.P[i] @ G if name == "WW" else self.b[i].unsqueeze(-1) * g

    def readout_features(self, output: Output) -> Tensor:
        """The invariants, which the last bias and the invariant layer are linear maps of: `[B, columns]`."""
        L = self.L
        features = []
        for term in output.terms:
            if term.name in ("W", "W_prod"):
                data = self.P[L]
            elif term.name == "WW":
                data = self.P[L] @ self.G[L, 0][0]
            elif term.name == "bW":
                data = self.b[L].unsqueeze(-1) * self.G[L, 0][1]
            elif term.name == "Wb":
                data = self._Wb(L)
            elif term.name == "b":
                data = self.b[L]
            elif term.name == "WW_pp":
                data = torch.einsum("sdqp,bdpq->bds", self._split_psi(self.psi_traces)[0], self.P[L])
            elif term.name == "bW_pp":
                data = torch.einsum("sdp,bdps->bds", self._split_psi(self.psi_traces)[1].squeeze(2), self.v[L])
            else:
                data = self.b[L].new_ones(self.b[L].shape[0], 1)
            features.append(rearrange(data, "b d ... -> b (... d)"))
        return torch.cat(features, dim=1)


def unshare_Wb(table: Table, matrices: Sequence[Tensor]) -> tuple[Table, list[Tensor]]:
    """The same layer with one coefficient of [Wb] for each t: for kernels that know no other."""
    space, d, e = table.space, table.in_channels, table.out_channels
    if len(table.outputs) == 1:
        full = invariant_table(space, d, e, table.terms)
    else:
        full = equivariant_table(space, table.out_taps, d, e, table.terms)
    expanded = []
    for shared, each, matrix in zip(table.outputs, full.outputs, matrices, strict=True):
        blocks = zip(matrix.split(shared.column_sizes, dim=1), shared.column_sizes, each.column_sizes, strict=True)
        expanded.append(torch.cat([copy for block, n, times in blocks for copy in [block] * (times // n)], dim=1))
    return full, expanded


def product(matrix: Tensor, data: Tensor) -> Tensor:
    """matrix `[rows, columns]` times data `[B, columns, N]`: `[B, rows, N]`.

    The gradient of an expanded matrix is one matrix per network, that of a folded batch a copy of the data: whichever
    is smaller.
    """
    batch = data.shape[0]
    if batch * matrix.numel() <= 4 * data.numel():
        return torch.bmm(matrix.expand(batch, *matrix.shape), data)
    folded = matrix @ rearrange(data, "b c n -> c (b n)")
    return rearrange(folded, "r (b n) -> b r n", n=data.shape[2])


def mix(output: Output, matrix: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """Σ over the terms of their block of columns times their data `[B, columns of the term, N]`: `[B, rows, N]`."""
    batch = parts[0].shape[0]
    total: Tensor | None = None
    for block, part in zip(matrix.split(output.column_sizes, dim=1), parts, strict=True):
        block = block.expand(batch, *block.shape)
        total = torch.bmm(block, part) if total is None else torch.baddbmm(total, block, part)
    assert total is not None
    return total


def equivariant(
    table: Table,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    matrices: Sequence[Tensor],
    psi: Tensor | None,
    activation: str | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """f(E(U)), f the activation: weights `[B, e·taps_i, n_i, n_(i-1)]` and biases `[B, e, n_i]`."""
    factors = Factors(table, weights, biases, psi)
    factors.meet_suffixes()
    L, e = len(weights), table.out_channels
    new_weights, new_biases = [], []
    for i in range(1, L + 1):
        w, b = factors.W[i], factors.b[i]
        batch, n = b.shape[0], b.shape[2]
        channels = e * table.out_taps[i - 1]
        weight_output, bias_output = table.outputs[2 * i - 2 : 2 * i]
        weight_matrix, bias_matrix = matrices[2 * i - 2 : 2 * i]

        if not weight_output.terms:
            weight = b.new_zeros(batch, channels, *w.shape[2:])
        elif 1 == i < L:  # rows (e, k), columns (q, d), data [columns, j]
            columns = factors.hidden_columns(weight_output, i)
            weight = product(weight_matrix, columns).unflatten(1, (channels, -1)).mT
        elif i == L:  # rows (e, j), columns (p, d), data [columns, k]
            parts = [
                rearrange(factors.weight_part(term.name, i), "b d p k -> b (p d) k") for term in weight_output.terms
            ]
            weight = mix(weight_output, weight_matrix, parts).unflatten(1, (channels, n))
        else:  # rows e, columns d, data [columns, (j, k)]
            parts = [factors.weight_part(term.name, i).flatten(2) for term in weight_output.terms]
            weight = mix(weight_output, weight_matrix, parts).unflatten(2, (n, -1))

        if not bias_output.terms:
            bias = b.new_zeros(batch, e, n)
        elif i < L:
            bias = product(bias_matrix, factors.hidden_columns(bias_output, i))
        else:
            bias = (factors.readout_features(bias_output) @ bias_matrix.mT).unflatten(1, (e, n))

        new_weights.append(weight)
        new_biases.append(bias)
    return activate(new_weights, activation), activate(new_biases, activation)


def invariant(
    table: Table, weights: Sequence[Tensor], biases: Sequence[Tensor], matrix: Tensor, psi: Tensor | None
) -> Tensor:
    """I(U): `[B, out_features]`."""
    output = table.outputs[0]
    if not output.terms:
        return biases[0].new_zeros(biases[0].shape[0], table.out_channels)
    return Factors(table, weights, biases, psi).readout_features(output) @ matrix.mT
