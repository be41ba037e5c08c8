"""The paper's layers, formula by formula: slow, obvious, the judge of all else.

Everything the paper writes down is materialised: [W]^(s,t) for every s > t, [WW], [bW] as full matrices, the traces as
sums of diagonals. Plain autograd differentiates it any number of times.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, einsum

from magep_fast.activations import activate
from magep_fast.terms import Output, Table


class StableTerms:
    """The stable polynomial terms of a batch of networks, each computed once, when first asked for.

    W[i] is `[B, d, n_i, n_(i-1)]`, b[i] is `[B, d, n_i]`, i = 1 … L; psi as `Table.connections` gives it.
    """

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor], psi: dict[tuple[str, int, int], Tensor]):
        self.L = len(weights)
        self.psi = psi
        self.layer_weights = dict(enumerate(weights, start=1))
        self.b = dict(enumerate(biases, start=1))
        self.known: dict[tuple[str | int, ...], Tensor] = {}

    def W(self, s: int, t: int) -> Tensor:
        """[W]^(s,t) = W_s … W_(t+1), `[B, d, n_s, n_t]`."""
        if s == t + 1:
            return self.layer_weights[s]
        return einsum("bdij,bdjk->bdik", self.layer_weights[s], self["W", s - 1, t])

    def Wb(self, s: int) -> Tensor:
        """[Wb]^(s,t)(t) = [W]^(s,t) b_t for t = 1 … s − 1, `[B, d, s − 1, n_s]`."""
        return torch.stack([einsum("bdij,bdj->bdi", self["W", s, t], self.b[t]) for t in range(1, s)], dim=2)

    def WW(self, s: int, t: int) -> Tensor:
        """[WW]^(s,0)(L,t) = [W]^(s,0) Ψ [W]^(L,t), `[B, d, n_s, n_t]`."""
        connected = einsum("bdij,djk->bdik", self["W", s, 0], self.psi["WW", s, t])
        return einsum("bdij,bdjk->bdik", connected, self["W", self.L, t])

    def bW(self, s: int, t: int) -> Tensor:
        """[bW]^(s)(L,t) = b_s ψ [W]^(L,t), `[B, d, n_s, n_t]`."""
        connected = einsum("bdi,dj->bdij", self.b[s], self.psi["bW", s, t])
        return einsum("bdij,bdjk->bdik", connected, self["W", self.L, t])

    def WW_pp(self) -> Tensor:
        """Σ_p [WW]^(s,0)(L,s)_pp for s = 1 … L − 1, `[B, d, L − 1]`."""
        return torch.stack([einsum("bdpp->bd", self["WW", s, s]) for s in range(1, self.L)], dim=2)

    def bW_pp(self) -> Tensor:
        """Σ_p [bW]^(s)(L,s)_pp for s = 1 … L − 1, `[B, d, L − 1]`."""
        return torch.stack([einsum("bdpp->bd", self["bW", s, s]) for s in range(1, self.L)], dim=2)

    def __getitem__(self, source: tuple[str | int, ...]) -> Tensor:
        if source[0] == "b":
            return self.b[source[1]]  # type: ignore[index]
        if source not in self.known:
            self.known[source] = getattr(self, str(source[0]))(*source[1:])
        return self.known[source]

    def combine(self, output: Output, matrix: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Σ over the output's terms of coefficient times data."""
        total: Tensor | None = None
        for term, coefficient in zip(output.terms, output.coefficients(matrix).values(), strict=True):
            data = [] if term.name == "1" else [self[term.source]]
            value = einsum(term.equation, coefficient, *data)
            total = value if total is None else total + value
        return matrix.new_zeros(shape) if total is None else total.expand(shape)


def chain(weights: Sequence[Tensor], biases: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """A_i = [[W]^(i,0) | [Wb]^(i,1)(1) | … | [Wb]^(i,i-1)(i-1)], i = 1 … L, and S_t = [W]^(L,t), t = 1 … L − 1."""
    terms, L = StableTerms(weights, biases, {}), len(weights)
    prefixes = [weights[0]]
    for i in range(2, L + 1):
        prefixes.append(torch.cat([terms["W", i, 0], terms["Wb", i].mT], dim=-1))
    return prefixes, [terms["W", L, t] for t in range(1, L)]


def equivariant(
    table: Table,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    matrices: Sequence[Tensor],
    psi: Tensor | None,
    activation: str | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """f(E(U)), f the activation: weights `[B, e·taps_i, n_i, n_(i-1)]` and biases `[B, e, n_i]`."""
    terms = StableTerms(weights, biases, {} if psi is None else table.connections(psi))
    e = table.out_channels
    new_weights, new_biases = [], []
    for i, (w, b) in enumerate(zip(weights, biases, strict=True)):
        weight, bias = table.outputs[2 * i], table.outputs[2 * i + 1]
        channels = e * table.out_taps[i]
        new_weights.append(terms.combine(weight, matrices[2 * i], (b.shape[0], channels, *w.shape[2:])))
        new_biases.append(terms.combine(bias, matrices[2 * i + 1], (b.shape[0], e, b.shape[2])))
    return activate(new_weights, activation), activate(new_biases, activation)


def invariant(
    table: Table, weights: Sequence[Tensor], biases: Sequence[Tensor], matrix: Tensor, psi: Tensor | None
) -> Tensor:
    """I(U): `[B, out_features]`."""
    terms = StableTerms(weights, biases, {} if psi is None else table.connections(psi))
    return terms.combine(table.outputs[0], matrix, (biases[0].shape[0], table.out_channels))
