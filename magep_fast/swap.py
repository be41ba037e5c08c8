"""Existing models made fast: known layers out, fused layers in, the same numbers."""

from __future__ import annotations

import copy as copying
import gc
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from magep_fast import authors
from magep_fast.convert import from_nfn, kernels_of, to_nfn
from magep_fast.layers import MagepEquivariant, MagepInvariant, MonomialEquivariant
from magep_fast.terms import Table

_SLOW_BACKENDS = ("reference", "torch")
_WRAPPERS = {
    "OptimizedModule": "compiled already: accelerate the model first, then torch.compile it",
    "DistributedDataParallel": "wrapped for distributed training already: accelerate the model first, then wrap it",
    "FullyShardedDataParallel": "wrapped for distributed training already: accelerate the model first, then wrap it",
    "RecursiveScriptModule": "scripted already: accelerate the model first",
    "TopLevelTracedModule": "traced already: accelerate the model first",
}


class FusedLayer(nn.Module):
    """A layer of this package in the place of one that takes and returns features of the caller's own class.

    Args:
        layer: does the work.
        kernels: the shape of each layer's kernels in the features going out, `()` for none; None: as they come in.
        unread_psi: connections that the layer replaced has and no term reads, kept for `to_authors_state_dict`.
    """

    unread_psi: Tensor | None

    def __init__(
        self,
        layer: MagepEquivariant | MagepInvariant,
        kernels: Sequence[tuple[int, ...]] | None = None,
        unread_psi: Tensor | None = None,
    ):
        super().__init__()
        self.layer = layer
        self.kernels = kernels
        self.register_buffer("unread_psi", unread_psi)

    def forward(self, features: Any) -> Any:
        output = self.layer(from_nfn(features))
        if isinstance(output, Tensor):
            return output
        return to_nfn(output, features, kernels_of(features) if self.kernels is None else self.kernels)


class Replaced(NamedTuple):
    """A layer that was replaced: where it stands, what it was, what it is now."""

    name: str
    old: str
    new: str


class Left(NamedTuple):
    """A layer that was left as it is: where it stands, what it is, why it was left."""

    name: str
    layer: str
    reason: str


@dataclass(frozen=True, eq=False)
class Report:
    """What `accelerate` did.

    Args:
        model: the accelerated model.
        replaced: layers that are fast now.
        left: layers that are as they were, and why.
        optimizers: optimisers that hold parameters which the model no longer has.
    """

    model: nn.Module
    replaced: tuple[Replaced, ...]
    left: tuple[Left, ...]
    optimizers: tuple[torch.optim.Optimizer, ...]

    def __str__(self) -> str:
        lines = [f"accelerate: {len(self.replaced)} replaced, {len(self.left)} left"]
        rows = [("+", _place(x.name), x.old, f"-> {x.new}") for x in self.replaced]
        rows += [("-", _place(x.name), x.layer, x.reason) for x in self.left]
        widths = [max((len(row[k]) for row in rows), default=0) for k in (1, 2)]
        lines += [f"  {sign} {name:{widths[0]}}  {old:{widths[1]}}  {rest}" for sign, name, old, rest in rows]
        return "\n".join(lines + [_advice(optimizer) for optimizer in self.optimizers])

    __repr__ = __str__


def accelerate(model: nn.Module, copy: bool = False) -> Report:
    """Replaces the layers of a model that this package knows by fused ones that hold the same numbers.

    Known are `HNPSMixerLinear`, `HNPSMixerInv` and `HNPSLinear` of the MAGEP authors, by the names of the classes and
    of their parameters, and this package's own layers with a slow backend. A `TupleOp` with relu, tanh or sin that
    stands behind such a layer in an `nn.Sequential` is fused into it. Outputs and gradients agree to rounding.

    Parameters are packed anew, so optimisers are to be built after this; those that hold replaced parameters are named
    in the report and in a warning. Everything else in the model stays as it is.

    Args:
        model: any module.
        copy: whether to leave the model as it is and work on a copy.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"accelerate takes an nn.Module; found {type(model).__name__}")
    model = copying.deepcopy(model) if copy else model
    swap = _Swap(model)
    model = swap.visit(model, "")
    swap.fuse_activations()
    optimizers = _optimizers_of(swap.old_parameters)
    for optimizer in optimizers:
        warnings.warn(_advice(optimizer), stacklevel=2)
    return Report(model, tuple(swap.replaced), tuple(swap.left), optimizers)


def load_authors_state_dict(model: nn.Module, state_dict: Mapping[str, Tensor], strict: bool = True) -> None:
    """Loads a checkpoint of a model with the MAGEP authors' layers into the same model with layers of this package.

    Layers are found by their place: those of `accelerate`d models, or layers of this package built in the same places.
    The authors' one [Wb] coefficient goes to every t where a layer has several. Other entries are loaded as usual.

    Args:
        model: e.g. of `accelerate`.
        state_dict: keys may all begin with `module.` or `_orig_mod.`, as wrapped models save them.
        strict: as for `nn.Module.load_state_dict`, for all other entries.
    """
    rest = dict(state_dict)
    for key, value in rest.items():
        if not isinstance(value, Tensor):
            raise TypeError(
                f"'{key}' is {type(value).__name__}; expected a state_dict, a mapping from names to tensors"
            )
    for wrapper in ("_orig_mod.", "module.", "_orig_mod."):
        if rest and all(key.startswith(wrapper) for key in rest):
            rest = {key.removeprefix(wrapper): value for key, value in rest.items()}
    ours: dict[str, Tensor] = {}
    for prefix, module, layer in _places(model):
        theirs = {key.removeprefix(prefix): rest.pop(key) for key in list(rest) if key.startswith(prefix)}
        with _naming(prefix):
            parameters, unread = authors.to_ours(layer.table, theirs)
        inner = f"{prefix}layer." if isinstance(module, FusedLayer) else prefix
        ours |= {inner + name: value for name, value in parameters.items()}
        if isinstance(module, FusedLayer) and module.unread_psi is not None:
            ours[f"{prefix}unread_psi"] = unread
    model.load_state_dict(rest | ours, strict)


def to_authors_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state_dict with the authors' names and shapes, which their own model can load: the inverse of
    `load_authors_state_dict`.

    A layer with a [Wb] coefficient for each t can be written only where they are equal.
    """
    state: dict[str, Tensor] = dict(model.state_dict())
    for prefix, module, layer in _places(model):
        for key in [key for key in state if key.startswith(prefix)]:
            del state[key]
        unread = module.unread_psi if isinstance(module, FusedLayer) else None
        with _naming(prefix):
            theirs = authors.to_theirs(layer.table, dict(layer.named_parameters()), unread)
        state |= {prefix + name: value for name, value in theirs.items()}
    return state


class _Swap:
    """One walk through a model."""

    def __init__(self, model: nn.Module):
        # How many places of the model hold a module, or a parameter: what is shared cannot be changed for one of them.
        places = list(model.modules())
        self.uses = Counter(id(child) for module in places for child in module._modules.values() if child is not None)
        self.owners = Counter(id(p) for module in places for p in module._parameters.values() if p is not None)
        self.visited: dict[int, nn.Module] = {}
        self.sequences: list[tuple[str, nn.Sequential]] = []
        self.tuple_ops: dict[str, nn.Module] = {}
        self.replaced: list[Replaced] = []
        self.left: list[Left] = []
        self.old_parameters: list[nn.Parameter] = []

    def visit(self, module: nn.Module, name: str) -> nn.Module:
        """The module to have in this place, its children replaced where they are known."""
        if id(module) not in self.visited:
            self.visited[id(module)] = self._visit(module, name)
        return self.visited[id(module)]

    def _visit(self, module: nn.Module, name: str) -> nn.Module:
        kind = type(module).__name__
        if kind in _WRAPPERS:
            return self._leave(module, name, _WRAPPERS[kind])
        if isinstance(module, (MagepEquivariant, MagepInvariant)):
            if module.backend in _SLOW_BACKENDS:
                self.replaced.append(Replaced(name, f"{kind}, backend {module.backend!r}", "backend 'auto'"))
                module.backend = "auto"
                return module
            return self._leave(module, name, "a layer of this package already")
        if isinstance(module, FusedLayer):
            return self._leave(module, name, "accelerated already")
        if kind in authors.CLASSES:
            try:
                new = self._fused(module)
            except ValueError as error:
                return self._leave(module, name, str(error))
            self.replaced.append(Replaced(name, kind, f"{type(new.layer).__name__}({new.layer.extra_repr()})"))
            self.old_parameters += module.parameters()
            return new
        if _is_tuple_op(module):
            self.tuple_ops[name] = module
            return module
        if type(module) is nn.Sequential:  # of a subclass, forward may be another
            self.sequences.append((name, module))
        for key, child in module._modules.items():
            if child is not None:
                new_child = self.visit(child, _join(name, key))
                if new_child is not child:
                    setattr(module, key, new_child)
        if not module._modules or module._parameters or module._buffers:
            self._leave(module, name, "not a layer this package knows")
        return module

    def fuse_activations(self) -> None:
        """TupleOps go into the fused layers in front of them where nothing else can see what is between the two."""
        for name, sequence in self.sequences:
            for (before, layer), (key, follower) in pairwise(list(sequence._modules.items())):
                if layer is not None and follower is not None and self._fuses(layer, follower):
                    layer.layer.activation = _FUSED[_function(follower)]  # type: ignore[union-attr]
                    self.tuple_ops.pop(_join(name, key))
                    self.replaced.append(Replaced(_join(name, key), str(follower), f"fused into {_join(name, before)}"))
                    setattr(sequence, key, nn.Identity())
        for name, module in self.tuple_ops.items():
            self._leave(module, name, "no fused layer directly before it in an nn.Sequential, or no fused function")

    def _fuses(self, layer: nn.Module, follower: nn.Module) -> bool:
        return (
            isinstance(layer, FusedLayer)
            and isinstance(layer.layer, MagepEquivariant)
            and layer.layer.activation is None
            and _is_tuple_op(follower)
            and _function(follower) in _FUSED
            and not _has_hooks(follower)
            and not _has_hooks(layer)
            and self.uses[id(follower)] == 1
            and self._uses_of(layer) == 1
        )

    def _uses_of(self, new: nn.Module) -> int:
        """In how many places the layer stood that `new` took the place of."""
        return sum(self.uses[old] for old, module in self.visited.items() if module is new)

    def _leave(self, module: nn.Module, name: str, reason: str) -> nn.Module:
        kind = str(module) if _is_tuple_op(module) else type(module).__name__
        self.left.append(Left(name, kind, reason))
        return module

    def _fused(self, module: nn.Module) -> FusedLayer:
        """The replacement of one of the authors' layers; ValueError with the reason if there is none."""
        theirs = module.state_dict(keep_vars=True)
        table = authors.table_of(type(module).__name__, theirs)
        if any(_has_hooks(m) for m in module.modules()):
            raise ValueError("it has hooks, which a replacement would not call: remove them first")
        if any(self.owners[id(p)] > 1 for p in module.parameters()):
            raise ValueError("it shares parameters with another layer")
        kinds = {(x.dtype, x.device) for x in theirs.values()}
        if len(kinds) > 1:
            raise ValueError(f"its parameters have several dtypes or devices: {sorted(map(str, kinds))}")
        trained: dict[str, bool] = {}
        for name, own in authors.parameters_behind(table).items():
            if trained.setdefault(own, theirs[name].requires_grad) != theirs[name].requires_grad:
                raise ValueError(f"some of its parameters are trained and some are not, among those of our {own}")
        kernels = _kernels(module, table)
        ((dtype, device),) = kinds
        layer = _empty_layer(table, dtype).to_empty(device=device)
        parameters, unread = authors.to_ours(table, theirs)
        layer.load_state_dict(parameters)
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(trained[name])
        return FusedLayer(layer, kernels, unread if unread.numel() else None).train(module.training)


def _empty_layer(table: Table, dtype: torch.dtype) -> MagepEquivariant | MagepInvariant:
    """The layer of a table of the authors' classes, without storage, so that no random number is drawn."""
    space, d, e = table.space, table.in_channels, table.out_channels
    if authors.class_of(table) == "HNPSMixerInv":
        return MagepInvariant(space, d, e, share_Wb=True, dtype=dtype, device="meta")
    if authors.class_of(table) == "HNPSMixerLinear":
        return MagepEquivariant(space, d, e, share_Wb=True, dtype=dtype, device="meta")
    return MonomialEquivariant(space, d, e, out_taps=table.out_taps, dtype=dtype, device="meta")


def _kernels(module: nn.Module, table: Table) -> list[tuple[int, ...]] | None:
    """Kernel shapes of the features that one of the authors' layers gives; None if they are those it takes."""
    if authors.class_of(table) != "HNPSLinear":
        return None
    spec = getattr(module, "out_network_spec", None)
    if spec is not None:
        kernels = [tuple(x.shape[2:]) for x in spec.weight_spec]
        if [prod(kernel) for kernel in kernels] != list(table.out_taps):
            raise ValueError(f"its out_network_spec has kernels {kernels}; expected {table.out_taps} weights each")
        return kernels
    if set(table.out_taps) == {1}:
        return [()] * len(table.out_taps)
    if table.out_taps == table.space.taps:
        return None
    raise ValueError(
        f"it has {table.out_taps} weights per connection going out but no out_network_spec with their shapes"
    )


def _is_tuple_op(module: nn.Module) -> bool:
    return type(module).__name__ == "TupleOp" and hasattr(module, "op")


_FUSED: dict[Any, str] = {
    nn.ReLU: "relu",
    torch.relu: "relu",
    nn.functional.relu: "relu",
    nn.Tanh: "tanh",
    torch.tanh: "tanh",
    nn.functional.tanh: "tanh",
    torch.sin: "sin",
}


def _function(tuple_op: nn.Module) -> Any:
    """What a TupleOp applies: a function, or the class of a module."""
    return type(tuple_op.op) if isinstance(tuple_op.op, nn.Module) else tuple_op.op


def _has_hooks(module: nn.Module) -> bool:
    """Whether calling the module does more than its class says."""
    return "forward" in vars(module) or any(
        getattr(module, hooks)
        for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    )


def _optimizers_of(parameters: Iterable[nn.Parameter]) -> tuple[torch.optim.Optimizer, ...]:
    """All living optimisers that hold one of the parameters."""
    old = {id(p) for p in parameters}
    if not old:
        return ()
    living = [x for x in gc.get_objects() if issubclass(type(x), torch.optim.Optimizer)]
    return tuple(x for x in living if any(id(p) in old for group in x.param_groups for p in group["params"]))


def _advice(optimizer: torch.optim.Optimizer) -> str:
    kind = type(optimizer).__name__
    return f"{kind} holds parameters that accelerate replaced: build it again, {kind}(report.model.parameters(), …)"


def _join(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _place(name: str) -> str:
    return name or "(the model itself)"


def _places(model: nn.Module) -> Iterator[tuple[str, nn.Module, MagepEquivariant | MagepInvariant]]:
    """Where a model has layers of this package: the prefix of its keys, the module there, and the layer."""
    inner = {id(module.layer) for module in model.modules() if isinstance(module, FusedLayer)}
    for name, module in model.named_modules(remove_duplicate=False):  # as state_dict has what is shared in every place
        prefix = f"{name}." if name else ""
        if isinstance(module, FusedLayer):
            yield prefix, module, module.layer
        elif isinstance(module, (MagepEquivariant, MagepInvariant)) and id(module) not in inner:
            yield prefix, module, module


@contextmanager
def _naming(prefix: str) -> Iterator[None]:
    """Puts the name of the layer in front of a ValueError."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"layer '{prefix.removesuffix('.')}': {error}") from error
