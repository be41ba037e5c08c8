"""The layers of the MAGEP authors: how their parameters are called, and which of ours each of them is.

Their classes are known by name and by the names and shapes of their parameters; nothing of theirs is imported.

    HNPSMixerLinear   MagepEquivariant      Ψ not trained, one [Wb] coefficient for all t
    HNPSMixerInv      MagepInvariant        Ψ trained, one [Wb] coefficient for all t
    HNPSLinear        MonomialEquivariant   taps in and out

The axes of every coefficient are those of the table of terms. Their layers are counted from 0, ours from 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from magep_fast.spaces import WeightSpace
from magep_fast.terms import GROUPS, LINEAR, Table, equivariant_table, invariant_table

CLASSES = ("HNPSMixerLinear", "HNPSMixerInv", "HNPSLinear")

_T_AXIS = 2  # of a [Wb] coefficient of ours, e d t …; theirs does not have it


def class_of(table: Table) -> str:
    """The class of theirs that a layer with this table corresponds to."""
    if table.outputs[0].name == "invariant":
        return "HNPSMixerInv"
    return "HNPSLinear" if table.terms <= LINEAR else "HNPSMixerLinear"


def table_of(cls: str, theirs: Mapping[str, Tensor]) -> Table:
    """The table of our layer for one of theirs, from the shapes of its parameters; ValueError if it has others."""
    try:
        table = _TABLES[cls]({name: tuple(x.shape) for name, x in theirs.items()})
    except KeyError as error:
        raise ValueError(f"it has no parameter {error}") from error
    except (IndexError, ValueError, ZeroDivisionError) as error:
        raise ValueError(f"its parameters have other shapes than expected: {error}") from error
    check(table, theirs)
    return table


def check(table: Table, theirs: Mapping[str, Tensor]) -> None:
    """Raises ValueError unless these are the parameters of their layer, by name and shape."""
    expected = shapes(table)
    for what, names in (("lacks", expected.keys() - theirs.keys()), ("also has", theirs.keys() - expected.keys())):
        if names:
            raise ValueError(f"it {what} {', '.join(sorted(names))}; expected the parameters of {class_of(table)}")
    for name, shape in expected.items():
        if not theirs[name].is_floating_point():
            raise ValueError(f"its {name} is {theirs[name].dtype}; expected floating point numbers")
        if tuple(theirs[name].shape) != shape:
            raise ValueError(f"its {name} is {tuple(theirs[name].shape)}; expected {shape}")


def shapes(table: Table) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all parameters that their layer has."""
    whole = _whole(table)
    ours = {name: torch.empty(shape, device="meta") for name, shape in parameter_shapes(whole).items()}
    unread = torch.empty(unread_shape(table), device="meta")
    found = _views(whole, ours, unread)
    return {
        name: tuple(x.shape[:_T_AXIS] + x.shape[_T_AXIS + 1 :] if _is_Wb(name) else x.shape)
        for name, x in found.items()
    }


def parameter_shapes(table: Table) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the parameters of our layer."""
    own: dict[str, tuple[int, ...]] = {output.name: output.shape for output in table.outputs}
    return own | ({"psi": table.psi_shape} if table.pairs else {})


def unread_shape(table: Table) -> tuple[int, int, int, int]:
    """Of the connections that their layer has and no term reads, stored as `psi` is."""
    return _unread(table).psi_shape


def to_ours(table: Table, theirs: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    """Parameters of our layer from theirs, and the connections that no term reads."""
    check(table, theirs)
    like = next(iter(theirs.values()))
    ours = {name: like.new_zeros(shape) for name, shape in parameter_shapes(table).items()}
    unread = like.new_zeros(unread_shape(table))
    views = _views(table, ours, unread)
    for name, x in theirs.items():
        value = x.detach()
        if name in views:
            views[name].copy_(value.unsqueeze(_T_AXIS) if _is_Wb(name) else value)
        elif value.any():
            raise ValueError(f"{name} is not zero but the layer was built without its term; build it with terms='all'")
    return ours, unread


def to_theirs(table: Table, ours: Mapping[str, Tensor], unread: Tensor | None) -> dict[str, Tensor]:
    """Parameters of their layer from ours; terms that ours does not have are zero."""
    like = next(iter(ours.values()))
    unread = like.new_zeros(unread_shape(table)) if unread is None else unread
    views, theirs = _views(table, ours, unread), {}
    for name, shape in shapes(table).items():
        value = views.get(name)
        if value is None:
            theirs[name] = like.new_zeros(shape)
            continue
        if _is_Wb(name):
            first = value.select(_T_AXIS, 0)
            if not torch.equal(value, first.unsqueeze(_T_AXIS).expand_as(value)):
                raise ValueError(
                    f"{name}: the layer has a coefficient of [Wb] for each t, and they differ; the authors' layer has "
                    "one for all t and cannot express that. Layers built with share_Wb=True can be converted"
                )
            value = first
        theirs[name] = value.detach().clone(memory_format=torch.contiguous_format)
    return theirs


def parameters_behind(table: Table) -> dict[str, str]:
    """For each parameter of theirs the one of ours that holds it; those that no term reads are left out."""
    names = {
        _coefficient_name(table, output.name, term.name): output.name
        for output in table.outputs
        for term in output.terms
    }
    return names | {_connection_name(table, kind, s, t): "psi" for s, t in table.pairs for kind in ("WW", "bW")}


def _views(table: Table, ours: Mapping[str, Tensor], unread: Tensor) -> dict[str, Tensor]:
    """Each parameter of theirs as a view of ours, [Wb] with its axis t."""
    views = {
        _coefficient_name(table, output.name, term): view
        for output in table.outputs
        for term, view in output.coefficients(ours[output.name]).items()
    }
    connections = _unread(table).connections(unread) | (table.connections(ours["psi"]) if table.pairs else {})
    for (kind, s, t), view in connections.items():
        views[_connection_name(table, kind, s, t)] = view if kind == "WW" else view.unsqueeze(1)
    return views


def _is_Wb(name: str) -> bool:
    return name.endswith("_Wb.weight")


def _coefficient_name(table: Table, output: str, term: str) -> str:
    cls, L = class_of(table), table.space.num_layers
    if cls == "HNPSMixerInv":
        return "tau_weight" if term == "1" else f"layer_{_PLAIN.get(term, term)}.weight"
    part, _, number = output.partition("_")
    i = int(number)
    last_bias = part == "bias" and i == L
    if cls == "HNPSLinear":
        return f"layer_{i - 1}_{'Y' if part == 'weight' else 'z'}_{'tau' if term == '1' else term}.weight"
    if last_bias:
        return f"layer_{i - 1}_b{_LAST_BIAS[term]}.weight"
    return f"layer_{i - 1}_{'W' if part == 'weight' else 'b'}_{_PLAIN.get(term, term)}.weight"


_PLAIN = {"W_prod": "W"}
_LAST_BIAS = {
    "W_prod": "_W",
    "WW": "_WW_L0L0",
    "bW": "_bW_LL0",
    "Wb": "_Wb",
    "b": "_b_L",
    "WW_pp": "_WW_0L",
    "bW_pp": "_bW_L",
    "1": "",
}


def _connection_name(table: Table, kind: str, s: int, t: int) -> str:
    stem = "Psi_s_0_L" if kind == "WW" else "Psi_s_L"
    if s == t:
        return f"{stem}_s.{s}_{s}"
    return f"{stem}_t" if class_of(table) == "HNPSMixerInv" else f"{stem}_t.{s}_{t}"


def _whole(table: Table) -> Table:
    """The table with every term that their layer has, [Wb] shared."""
    space, d, e = table.space, table.in_channels, table.out_channels
    if class_of(table) == "HNPSMixerInv":
        return invariant_table(space, d, e, GROUPS["all"], True)
    terms = GROUPS["linear" if class_of(table) == "HNPSLinear" else "all"]
    return equivariant_table(space, table.out_taps, d, e, terms, True)


def _unread(table: Table) -> Table:
    """The table's connections replaced by those that their layer has and no term of it reads."""
    L = table.space.num_layers
    pairs: tuple[tuple[int, int], ...] = ()
    if class_of(table) == "HNPSMixerLinear":
        read = _whole(table).pairs
        pairs = tuple((s, t) for s in range(1, L + 1) for t in range(s) if (s, t) not in read)
    return replace(_whole(table), pairs=pairs)


_Shapes = Mapping[str, tuple[int, ...]]


def _open_space(L: int, n_0: int, n_L: int, taps: list[int] | int = 1) -> WeightSpace:
    if L < 2:
        raise ValueError("it is for networks of one layer, which have no hidden neurons")
    return WeightSpace((n_0, *(None,) * (L - 1), n_L), taps)


def _count_layers(shapes: _Shapes) -> int:
    return len({name.split("_")[1] for name in shapes if name.startswith("layer_")})


def _mixer_table(shapes: _Shapes) -> Table:
    L = _count_layers(shapes)
    e, d, n_0 = shapes["layer_0_W_W.weight"][:3]
    space = _open_space(L, n_0, shapes["Psi_s_0_L_t.1_0"][2])
    return equivariant_table(space, (1,) * L, d, e, GROUPS["all"], True)


def _invariant_table(shapes: _Shapes) -> Table:
    e, d, n_L, n_0 = shapes["layer_WW.weight"]
    return invariant_table(_open_space(shapes["layer_WW_pp.weight"][2] + 1, n_0, n_L), d, e, GROUPS["all"], True)


def _linear_table(shapes: _Shapes) -> Table:
    L = _count_layers(shapes)
    e, d = shapes["layer_0_z_b.weight"]
    weights = [shapes[f"layer_{i}_Y_W.weight"] for i in range(L)]
    space = _open_space(L, weights[0][2], weights[-1][2], [w[1] // d for w in weights])
    return equivariant_table(space, tuple(w[0] // e for w in weights), d, e, LINEAR)


_TABLES = {"HNPSMixerLinear": _mixer_table, "HNPSMixerInv": _invariant_table, "HNPSLinear": _linear_table}
