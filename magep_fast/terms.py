"""THE table: which stable polynomial terms each output has, what their coefficients look like, how they are stored.

Parameter shapes, names, initialisation, the choice of terms and the literal reference are all read off this table.

Letters of the equations: b batch, d channels in, e channels out, j and k row and column of the output, q = 1 … n_0,
p = 1 … n_L, t and s the layers 1 … L − 1 (or i − 1). The data terms, per network and channel:

    W_i, b_i              the layer's own weights and bias
    [W]^(s,t)             W_s … W_(t+1)                       n_s × n_t
    [Wb]^(s,t)(t)         [W]^(s,t) b_t                       n_s
    [WW]^(s,0)(L,t)       [W]^(s,0) Ψ^(s,t) [W]^(L,t)         n_s × n_t      Ψ n_0 × n_L
    [bW]^(s)(L,t)         b_s ψ^(s,t) [W]^(L,t)               n_s × n_t      ψ 1 × n_L
    [WW]_pp, [bW]_pp      the traces of [WW]^(s,0)(L,s) and [bW]^(s)(L,s), 0 < s < L

L = 1 has no hidden neuron, hence no symmetry; there the formulas of the last layer (i = L) apply as they stand.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from math import prod

import torch
from einops import rearrange
from torch import Tensor

from magep_fast.spaces import WeightSpace

NAMES = ("W", "W_prod", "WW", "bW", "Wb", "b", "WW_pp", "bW_pp", "1")
"""W: own weights. W_prod: the product [W]^(i,0), i > 1. 1: the constant. The others are named as in the paper."""

LINEAR = frozenset({"W", "b", "1"})
"""The non-inter-layer terms: Monomial-NFN."""

INTER_LAYER = frozenset(NAMES) - LINEAR
GROUPS = {"all": frozenset(NAMES), "linear": LINEAR, "inter-layer": INTER_LAYER}

ABLATION = {
    "Only Non Inter-Layer terms": LINEAR,
    "Only Inter-Layer terms": INTER_LAYER,
    "Non Inter-Layer terms + [W]": LINEAR | {"W_prod"},
    "Non Inter-Layer terms + [WW]": LINEAR | {"WW", "WW_pp"},
    "Non Inter-Layer terms + [Wb]": LINEAR | {"Wb"},
    "Non Inter-Layer terms + [bW]": LINEAR | {"bW", "bW_pp"},
    "Non Inter-Layer terms + Inter-Layer terms": LINEAR | INTER_LAYER,
}
"""The rows of the paper's ablation study as values for `terms=`."""


def select_terms(terms: str | Iterable[str]) -> frozenset[str]:
    """The set of term names that `terms=` stands for: "all", "linear", "inter-layer", a name, or any set of these."""
    chosen: set[str] = set()
    for name in [terms] if isinstance(terms, str) else terms:
        if name not in GROUPS and name not in NAMES:
            raise ValueError(f"terms: {name!r} is unknown; expected {', '.join(map(repr, GROUPS))} or a set of {NAMES}")
        chosen |= GROUPS.get(name, {name})
    if not chosen:
        raise ValueError(f"terms must not be empty; expected {', '.join(map(repr, GROUPS))} or a set of {NAMES}")
    return frozenset(chosen)


@dataclass(frozen=True)
class Term:
    """One term of one output.

    Args:
        name: of NAMES.
        equation: einsum of coefficient and data, as in the paper's pseudocode.
        source: the data: a kind of NAMES and its layer indices, e.g. ("WW", i, 0).
        sizes: the extents of the coefficient's letters.
        fan: how much variance the term's data bring to an output entry, per channel and unit of coefficient variance,
            relative to the scale the output shall have (see `initialise`).
    """

    name: str
    equation: str
    source: tuple[str | int, ...]
    sizes: tuple[int, ...]
    fan: float

    @property
    def letters(self) -> str:
        """Letters of the coefficient; its rows in storage are those that the output has too, its columns the rest."""
        return self.equation.partition("->")[0].partition(",")[0]

    @cached_property
    def rows(self) -> str:
        return "".join(c for c in self.letters if c in self.equation.partition("->")[2])

    @cached_property
    def columns(self) -> str:
        return "".join(c for c in self.letters if c not in self.rows and c != "d") + "d" * ("d" in self.letters)

    def size(self, letters: str) -> int:
        return prod([self.sizes[self.letters.index(c)] for c in letters])


@dataclass(frozen=True)
class Output:
    """One output of a layer and the matrix its coefficients are stored in.

    The matrix is `[rows, columns]`: rows run over e and the output's own free index, columns over the terms one after
    the other, in the order of NAMES, and within a term over what is summed, channels innermost. So the output is one
    product of this matrix with stacked data, each paper coefficient is a view of a block of columns, and the small
    algebra between coefficients and connections runs along contiguous channels.
    """

    name: str
    terms: tuple[Term, ...]
    num_rows: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_rows, sum(self.column_sizes)

    @property
    def column_sizes(self) -> list[int]:
        return [term.size(term.columns) for term in self.terms]

    def coefficients(self, matrix: Tensor) -> dict[str, Tensor]:
        """The views of the matrix that are the paper's coefficients, each with its axes in the equation's order."""
        views = {}
        for term, block in zip(self.terms, matrix.split(self.column_sizes, dim=1), strict=True):
            pattern = f"({' '.join(term.rows)}) ({' '.join(term.columns)}) -> {' '.join(term.letters)}"
            views[term.name] = rearrange(block, pattern, **dict(zip(term.letters, term.sizes, strict=True)))
        return views

    def coefficient(self, matrix: Tensor, name: str) -> Tensor:
        """The view that is the paper's coefficient of one term."""
        views = self.coefficients(matrix)
        if name not in views:
            raise KeyError(f"{self.name} has no term {name!r}; it has {list(views)}")
        return views[name]


@dataclass(frozen=True)
class Table:
    """All outputs of a layer and its connection matrices.

    Ψ and ψ are stored together, `[pairs, rows, n_L, d]`, one pair (s, t) after the other: Ψ in the first n_0 rows where
    a [WW] term is present, ψ in the last row where a [bW] term is. One product `[Ψ; ψ] S_t` then serves both.

    With `share_Wb`, [Wb]^(i,t)(t) has one coefficient for all t, stored with one t; its data are summed over t.
    """

    space: WeightSpace
    out_taps: tuple[int, ...]
    in_channels: int
    out_channels: int
    terms: frozenset[str]
    outputs: tuple[Output, ...]
    pairs: tuple[tuple[int, int], ...]
    share_Wb: bool

    @property
    def has_WW(self) -> bool:
        return bool(self.terms & {"WW", "WW_pp"})

    @property
    def has_bW(self) -> bool:
        return bool(self.terms & {"bW", "bW_pp"})

    @property
    def psi_shape(self) -> tuple[int, int, int, int]:
        rows = self.space.n_in * self.has_WW + self.has_bW
        return len(self.pairs), rows, self.space.n_out, self.in_channels

    def connections(self, psi: Tensor) -> dict[tuple[str, int, int], Tensor]:
        """Views of the stored tensor: Ψ^(s,t) `[d, n_0, n_L]` at ("WW", s, t), ψ^(s,t) `[d, n_L]` at ("bW", s, t)."""
        views = {}
        for (s, t), stored in zip(self.pairs, rearrange(psi, "pair q p d -> pair d q p").unbind(0), strict=True):
            big, small = stored.split([self.space.n_in * self.has_WW, int(self.has_bW)], dim=1)
            if self.has_WW:
                views["WW", s, t] = big
            if self.has_bW:
                views["bW", s, t] = small.squeeze(1)
        return views

    def output_index(self, name: str) -> int:
        """Where an output stands in `outputs`."""
        names = [output.name for output in self.outputs]
        if name not in names:
            raise KeyError(f"no output {name!r}; there are {names}")
        return names.index(name)


@cache
def equivariant_table(
    space: WeightSpace,
    out_taps: tuple[int, ...],
    in_channels: int,
    out_channels: int,
    terms: frozenset[str],
    share_Wb: bool = False,
) -> Table:
    """Outputs weight_1, bias_1, …, weight_L, bias_L of E(U)."""
    L, n_0, n_L = space.num_layers, space.n_in, space.n_out
    _require_single_taps(space, out_taps, terms - LINEAR)
    outputs = []
    for i in range(1, L + 1):
        f_in, f_out = space.taps[i - 1], out_taps[i - 1]
        t = min(i - 1, 1) if share_Wb else i - 1
        sizes = {"d": in_channels, "e": out_channels, "j": n_L, "k": n_0, "p": n_L, "q": n_0, "t": t, "s": L - 1}
        weight_rows = _weight_rows(i, L, n_0, n_L, f_out)
        bias_rows = _readout_rows(L, n_L, "j") if i == L else _hidden_bias_rows(i)
        outputs.append(_output(f"weight_{i}", weight_rows, terms, sizes | {"e": out_channels * f_out}, f_in))
        outputs.append(_output(f"bias_{i}", bias_rows, terms, sizes, f_in))
    return Table(space, out_taps, in_channels, out_channels, terms, tuple(outputs), _pairs(outputs, L), share_Wb)


@cache
def invariant_table(
    space: WeightSpace, in_channels: int, out_features: int, terms: frozenset[str], share_Wb: bool = False
) -> Table:
    """The one output, "invariant", of I(U)."""
    L, n_0, n_L = space.num_layers, space.n_in, space.n_out
    _require_single_taps(space, (1,) * L, terms)
    t = min(L - 1, 1) if share_Wb else L - 1
    sizes = {"d": in_channels, "e": out_features, "p": n_L, "q": n_0, "t": t, "s": L - 1}
    output = _output("invariant", _readout_rows(L, n_L, ""), terms, sizes, 1)
    return Table(space, (1,) * L, in_channels, out_features, terms, (output,), _pairs([output], L), share_Wb)


_Row = tuple[str, str, tuple[str | int, ...], float]


def _weight_rows(i: int, L: int, n_0: int, n_L: int, f_out: int) -> list[_Row]:
    """The weights of layer i."""
    if i == L:
        equation, fan = "edpj,bdpk->bejk", n_L * f_out
    elif i == 1:
        equation, fan = "edqk,bdjq->bejk", n_0 * f_out
    else:
        equation, fan = "ed,bdjk->bejk", f_out
    rows: list[_Row] = [
        ("W", equation, ("W", i, i - 1), fan),
        ("WW", equation, ("WW", i, i - 1), fan),
        ("bW", equation, ("bW", i, i - 1), fan),
    ]
    return rows + [("b", "edk,bdj->bejk", ("b", 1), fan)] if 1 == i < L else rows


def _hidden_bias_rows(i: int) -> list[_Row]:
    """The bias of a hidden layer i."""
    return [
        ("W" if i == 1 else "W_prod", "edq,bdjq->bej", ("W", i, 0), 1),
        ("WW", "edq,bdjq->bej", ("WW", i, 0), 1),
        ("bW", "edq,bdjq->bej", ("bW", i, 0), 1),
        ("Wb", "edt,bdtj->bej", ("Wb", i), i - 1),
        ("b", "ed,bdj->bej", ("b", i), 1),
    ]


def _readout_rows(L: int, n_L: int, j: str) -> list[_Row]:
    """The bias of the last layer (j = "j") and the invariant layer (j = ""): a linear map of the invariants."""
    return [
        ("W" if L == 1 else "W_prod", f"edpq{j},bdpq->be{j}", ("W", L, 0), n_L),
        ("WW", f"edpq{j},bdpq->be{j}", ("WW", L, 0), n_L),
        ("bW", f"edpq{j},bdpq->be{j}", ("bW", L, 0), n_L),
        ("Wb", f"edtp{j},bdtp->be{j}", ("Wb", L), n_L * (L - 1)),
        ("b", f"edp{j},bdp->be{j}", ("b", L), n_L),
        ("WW_pp", f"eds{j},bds->be{j}", ("WW_pp",), L - 1),
        ("bW_pp", f"eds{j},bds->be{j}", ("bW_pp",), L - 1),
        ("1", f"e{j}->e{j}", ("1",), 0),
    ]


def _output(name: str, rows: list[_Row], terms: frozenset[str], sizes: dict[str, int], f_in: int) -> Output:
    """An output with those of its rows that are chosen and not empty (as [Wb] is for i = 1)."""
    chosen = []
    for term, equation, source, fan in rows:
        # Only the own weights have taps; they join the channels.
        extent = sizes | {"d": sizes["d"] * f_in} if term == "W" else sizes
        coefficient = equation.partition("->")[0].partition(",")[0]
        candidate = Term(term, equation, source, tuple(extent[c] for c in coefficient), fan)
        if term in terms and min(candidate.sizes) > 0:
            chosen.append(candidate)
        num_rows = candidate.size(candidate.rows)
    return Output(name, tuple(chosen), num_rows)


def _pairs(outputs: list[Output], L: int) -> tuple[tuple[int, int], ...]:
    """The (s, t) whose Ψ, ψ some term uses: (1, 0) … (L, 0), then (2, 1) … (L, L − 1), then the traces' (s, s)."""
    sources = [term.source for output in outputs for term in output.terms]
    used = {(int(s), int(t)) for kind, s, t in (x for x in sources if len(x) == 3) if kind in ("WW", "bW")}
    if any(kind in ("WW_pp", "bW_pp") for kind, *_ in sources):
        used |= {(s, s) for s in range(1, L)}
    return tuple(sorted(used, key=lambda pair: (pair[0] == pair[1], pair[1] > 0, pair[0])))


def _require_single_taps(space: WeightSpace, out_taps: tuple[int, ...], products: frozenset[str]) -> None:
    if len(out_taps) != space.num_layers:
        raise ValueError(f"out_taps must list one number per layer ({space.num_layers}); found {out_taps}")
    if products and any(f != 1 for f in space.taps + out_taps):
        raise ValueError(
            f"products of layers need one weight per connection; found {space}, out_taps={out_taps}. "
            "Bring the features to a space without taps first: MonomialEquivariant(space, in_channels, out_channels)"
        )


INITS = ("unit", "xavier_normal")


def initialise(table: Table, matrices: Iterable[Tensor], psi: Tensor | None, init: str) -> None:
    """Fills coefficients and connections in place.

    "unit": features whose weights have variance 1/(n_(i-1)·taps_i) and whose biases have variance 1, as networks have
    at their own initialisation, are mapped to features of the same kind, whatever L and the widths. Under that scale
    [W]^(s,t), [WW] and [bW] have variance 1/n_t, [Wb] and the traces variance 1 (with Ψ, ψ of variance 1/n_L), and
    each term of an output is given its share of the variance. [WW] and [bW] get 1/L² of what the others get: they
    repeat the product S_0 in every layer, so with equal shares its powers outgrow the rest once layers are stacked.

    "xavier_normal": as the authors do it, variance 2 / (fan_in + fan_out) of the coefficient seen as `[e, d, …]`.
    """
    if init not in INITS:
        raise ValueError(f"init must be one of {INITS}; found {init!r}")
    with torch.no_grad():
        for output, matrix in zip(table.outputs, matrices, strict=True):
            shares = {term.name: _share(term, table.space.num_layers) for term in output.terms}
            for term, view in zip(output.terms, output.coefficients(matrix).values(), strict=True):
                if term.name == "1":
                    view.zero_()
                elif init == "unit":
                    view.normal_(0, (shares[term.name] / sum(shares.values()) / (table.in_channels * term.fan)) ** 0.5)
                else:
                    view.normal_(0, _xavier_deviation(view))
        for view in table.connections(psi).values() if psi is not None else ():
            view.normal_(0, table.space.n_out**-0.5 if init == "unit" else _xavier_deviation(view))


def _share(term: Term, L: int) -> float:
    return {"WW": L**-2, "bW": L**-2, "1": 0.0}.get(term.name, 1.0)


def _xavier_deviation(x: Tensor) -> float:
    """As torch.nn.init.xavier_normal_ computes it for a tensor `[out, in, receptive field…]`."""
    field = prod(x.shape[2:])
    return (2 / ((x.shape[0] + x.shape[1]) * field)) ** 0.5
