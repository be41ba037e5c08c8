"""The systems of the paper's tables behind one interface: `Peer.build(space)` maps networks to accuracies `[B, 1]`.

STATNN, NP and HNP are made of the layers of PyPI's `nfn`, the graph networks on torch_geometric's message passing, from
their papers, Monomial-NFN of this package's linear layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Literal

from torch import nn

from magep_fast import WeightSpace
from magep_fast.symmetry import Kind

Subset = Literal["relu", "tanh"]
SUBSETS: tuple[Subset, ...] = ("relu", "tanh")


@dataclass(frozen=True)
class PaperRow:
    """What the paper reports for a system on the CNN zoo: millions of parameters, and for the whole run on an A100
    seconds and MB; None where it reports nothing."""

    parameters: float | None = None
    seconds: int | None = None
    megabytes: int | None = None


@dataclass(frozen=True)
class Peer:
    """A rival system for one subset of the CNN zoo.

    Args:
        name: of the row.
        build: makes the network for a space.
        paper: the paper's row.
        symmetry: the group that the system's own paper says it respects; None for none.
    """

    name: str
    build: Callable[[WeightSpace], nn.Module]
    paper: PaperRow
    symmetry: Kind | None


def minutes(m: int, s: int = 0, h: int = 0) -> int:
    return 3600 * h + 60 * m + s


PAPER: dict[Subset, dict[str, PaperRow]] = {
    "relu": {
        "STATNN": PaperRow(1.06),
        "NP": PaperRow(2.03, minutes(36, 40), 838),
        "HNP": PaperRow(2.81, minutes(30, 6), 856),
        "GNN": PaperRow(None, minutes(27, 29, h=4), 6390),
        "ScaleGMN": PaperRow(None, minutes(20, h=1), 2918),
        "Monomial-NFN": PaperRow(0.25, minutes(23, 47), 560),
        "MAGEP": PaperRow(0.99, minutes(28, 43), 584),
    },
    "tanh": {
        "STATNN": PaperRow(1.06),
        "NP": PaperRow(2.03, minutes(35, 34), 838),
        "HNP": PaperRow(2.81, minutes(29, 37), 856),
        "GNN": PaperRow(None, minutes(25, 17, h=4), 6390),
        "ScaleGMN": PaperRow(None, minutes(20, h=1), 2918),
        "Monomial-NFN": PaperRow(1.41, minutes(18, 23), 582),
        "MAGEP": PaperRow(0.99, minutes(28, 12), 584),
    },
}


def peers(subset: Subset) -> list[Peer]:
    """Every rival, in the order of the tables. Libraries they need are imported when a network is built."""
    scaled: Kind = "positive" if subset == "relu" else "sign"
    rows: list[tuple[str, str, dict[str, object], Kind | None]] = [
        ("MLP", "mlp", {}, None),
        ("STATNN", "statnn", {}, "permutation"),
        ("NP", "np", {}, "permutation"),
        ("HNP", "hnp", {}, "permutation"),
        ("GNN", "gnn", {}, "permutation"),
        ("GNN-32", "gnn", {"channels": 32}, "permutation"),
        ("ScaleGMN", "scalegmn", {"subset": subset}, scaled),
        ("Monomial-NFN", "monomial", {"subset": subset}, scaled),
    ]
    return [
        Peer(name, partial(_build, module, options), PAPER[subset].get(name, PaperRow()), symmetry)
        for name, module, options, symmetry in rows
    ]


def _build(module: str, options: dict[str, object], space: WeightSpace) -> nn.Module:
    try:
        return import_module(f"benchmarks.peers.{module}").build(space, **options)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{error.name} is not installed: pip install 'magep-fast[bench]' brings what the rival systems need",
            name=error.name,
        ) from error
