"""Layers that run together: `nn.Sequential` with less between its layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from magep_fast import ops
from magep_fast.layers import MagepEquivariant, MagepInvariant, MonomialEquivariant
from magep_fast.ops.autocast import autocast_dtype
from magep_fast.ops.backends import choose_backend, requested_backend
from magep_fast.ops.operations import DenseLayers, Layer, Operation, transformed
from magep_fast.spaces import WeightFeatures

LARGEST = 2**20
"""Numbers of a batch of features, in the layer that has most, up to which layers run together. Beyond, the arithmetic
decides, and layer by layer the memory of each is free as soon as the backward pass has left it."""

MOST_NETWORKS = 64
"""In a batch whose layers run together: for more of them, dense layers of torch are as fast as those here."""

_Polynomial = MagepEquivariant | MagepInvariant
_PLAIN = (Tensor, nn.Parameter)  # no subclass, whose sizes may be symbolic


class Stack(nn.Sequential):
    """`nn.Sequential`, whose MAGEP layers run as one operation with one node in the graph of autograd.

    Between the layers of small networks, Python and autograd take longer than the kernels do. Here layers that follow
    one another are one operation: equivariant ones, an invariant one, and dense ones behind it (`nn.Linear` with
    `nn.ReLU` between them and `nn.Sigmoid` at the end, in an `nn.Sequential` of their own or not). Names of parameters
    are those of `nn.Sequential`; outputs and gradients are too, up to rounding.

    Layers run one by one where it could make a difference or does not pay: with hooks on them, under autocast,
    torch.compile, tracing and the transforms of torch.func, for batches of more than `MOST_NETWORKS` networks or
    `LARGEST` numbers, and on backends that cannot do it.
    """

    _plan: _Plan | None = None

    def forward(self, input: Any) -> Any:
        parts = self._parts()
        if parts is None:
            return super().forward(input)
        for part in parts:
            input = part(input)
        return input

    def as_one(self, features: Any) -> AsOne | None:
        """What a call with these features would run, if that is one operation and nobody would notice it."""
        if _is_hooked(self) or self._compiled_call_impl is not None:
            return None
        parts = self._parts()
        if parts is None or len(parts) != 1 or not isinstance(parts[0], _Run):
            return None
        return parts[0].as_one(features)

    def _parts(self) -> list[Callable[[Any], Any]] | None:
        """What runs, one after the other; None for all modules one by one."""
        if _is_observed():
            return None
        plan = self._plan
        if plan is None or not plan.is_current():
            plan = self._plan = _Plan(self)
        return None if any(map(_is_hooked, plan.containers)) else plan.parts

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "_plan"}


class AsOne(NamedTuple):
    """A call of a stack as one operation on its inputs and parameters; `result` makes of the operation's outputs what
    the stack returns."""

    operation: Operation
    inputs: tuple[Tensor, ...]
    parameters: list[Tensor]
    result: Callable[[Sequence[Tensor]], Any]


def _is_observed() -> bool:
    """Whether somebody traces, transforms or looks at what happens between layers."""
    return bool(
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()  # type: ignore[attr-defined]
        or transformed()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch_module._has_any_global_hook()
    )


def _is_hooked(module: nn.Module) -> bool:
    """Whether a call of the module does more than its class says."""
    state = module.__dict__
    return bool(
        state["_forward_hooks"]
        or state["_forward_pre_hooks"]
        or state["_backward_hooks"]
        or state["_backward_pre_hooks"]
        or "forward" in state
    )


class _Plan:
    """How a stack runs: its modules, some of them together, one after the other."""

    def __init__(self, stack: Stack):
        self.containers: list[nn.Module] = []  # in the stack
        # Of the stack and of them: what is in them at any time, and what was.
        self.children: list[tuple[Mapping[str, nn.Module], list[nn.Module]]] = []
        self.parts: list[Callable[[Any], Any]] = list(_parts(list(self._leaves(stack))))

    def _leaves(self, container: nn.Sequential) -> Iterator[nn.Module]:
        self.children.append((container._modules, list(container._modules.values())))
        for child in container:
            if type(child) is nn.Sequential or type(child) is Stack:
                self.containers.append(child)
                yield from self._leaves(child)
            else:
                yield child

    def is_current(self) -> bool:
        for now, children in self.children:  # noqa: SIM110, a generator costs more
            if [*now.values()] != children:
                return False
        return True


def _parts(leaves: Sequence[nn.Module]) -> Iterator[Callable[[Any], Any]]:
    at = 0
    while at < len(leaves):
        layers = _polynomial_layers(leaves[at:])
        dense = _dense_layers(leaves[at + len(layers) :], layers[-1].table.out_channels) if _ends(layers) else []
        together = [*layers, *dense]
        if len(together) > 1:
            yield _Run(layers, dense)
            at += len(together)
        else:
            yield leaves[at]
            at += 1


def _ends(layers: Sequence[_Polynomial]) -> bool:
    """Whether the last of the layers gives invariants."""
    return bool(layers) and type(layers[-1]) is MagepInvariant


def _polynomial_layers(leaves: Sequence[nn.Module]) -> list[_Polynomial]:
    """The MAGEP layers in front, as long as each takes what the one before it gives."""
    found: list[_Polynomial] = []
    for leaf in leaves:
        if not isinstance(leaf, MagepEquivariant | MagepInvariant) or _ends(found):
            break
        if type(leaf) not in (MagepEquivariant, MonomialEquivariant, MagepInvariant):  # forward may be another
            break
        if found:
            before = found[-1].table
            given = before.space.with_taps(before.out_taps), before.out_channels
            if given != (leaf.table.space, leaf.table.in_channels):
                break
        found.append(leaf)
    return found


def _dense_layers(leaves: Sequence[nn.Module], width: int) -> list[nn.Module]:
    """Linear, ReLU, Linear, …, Linear and perhaps Sigmoid in front, where the first takes `width` numbers."""
    end = 0
    for k, leaf in enumerate(leaves):
        if type(leaf) is nn.Sigmoid and end == k and k:
            return list(leaves[: k + 1])
        if type(leaf) is not (nn.ReLU if k % 2 else nn.Linear):
            break
        if isinstance(leaf, nn.Linear):
            if leaf.in_features != width or leaf.bias is None or not leaf.out_features:
                break
            width, end = leaf.out_features, k + 1
    return list(leaves[:end])


class _Run:
    """MAGEP layers, and the dense ones behind them, that run together where they can."""

    def __init__(self, layers: list[_Polynomial], dense: list[nn.Module]):
        self.layers, self.modules = layers, [*layers, *dense]
        self.wanted = [(type(module), _parameter_names(module)) for module in self.modules]
        self.dense = DenseLayers((len(dense) + 1) // 2, type(dense[-1]) is nn.Sigmoid) if dense else None
        # For what the operation was found, and it; in one place, as several threads may call.
        self.known: tuple[list[object] | None, Operation | None] = None, None

    def __call__(self, features: WeightFeatures) -> Any:
        whole = self.as_one(features)
        if whole is None:
            return self._one_by_one(features)
        try:
            return self._result(ops.stack(whole.operation, whole.inputs, whole.parameters))
        except RuntimeError:
            # Tensors that have changed their dtype or device since: the layers say it better.
            self.layers[0]._check_all(features)
            if all(_is_like(module, features) for module in self.modules):
                raise
            return self._one_by_one(features)

    def as_one(self, features: WeightFeatures) -> AsOne | None:
        operation = self._operation(features)
        parameters = None if operation is None else self._parameters()
        if operation is None or parameters is None:
            return None
        return AsOne(operation, features.weights + features.biases, parameters, self._result)

    def _result(self, outputs: Sequence[Tensor]) -> Any:
        if _ends(self.layers):
            return outputs[0]
        return WeightFeatures(outputs[: len(outputs) // 2], outputs[len(outputs) // 2 :])

    def _one_by_one(self, features: WeightFeatures) -> Any:
        for module in self.modules:
            features = module(features)
        return features

    def _parameters(self) -> list[Tensor] | None:
        """As the operation takes them, or None if a module is no longer what it was."""
        found: list[Tensor] = []
        for module, (cls, names) in zip(self.modules, self.wanted, strict=True):
            if _is_hooked(module) or type(module) is not cls:  # a parametrised module changes its class
                return None
            own = module._parameters
            for name in names:
                parameter = own.get(name)
                if parameter is None:
                    return None
                found.append(parameter)
        return found

    def _operation(self, features: WeightFeatures) -> Operation | None:
        """What to run, or None for one module after the other. Found once for features of the same kind."""
        # Little Python: this runs at every call, when the kernels have left nothing of the interpreter in the caches.
        first = self.layers[0]
        kind: list[object] | None = None
        if isinstance(features, WeightFeatures) and features.biases and type(features.biases[0]) in _PLAIN:
            bias = features.biases[0]
            kind = [x.shape for x in features.weights + features.biases]
            # Asking for any device's autocast is the quickest way to hear that there is none.
            autocast = autocast_dtype(features) if torch._C._is_any_autocast_enabled() else None
            kind += (bias.dtype, bias.device, autocast)
            for layer in self.layers:
                kind += (layer.activation, layer.backend)
            kind.append(requested_backend(first.backend))
        known, operation = self.known
        if kind is None or kind != known:
            first._check(features)
            operation = None if kind is None else self._found(features)
            self.known = None if operation is None else kind, operation
        return operation

    def _found(self, features: WeightFeatures) -> Operation | None:
        channels = [layer.table.in_channels for layer in self.layers]
        given = [layer.table.out_channels for layer in self.layers if type(layer) is not MagepInvariant]
        batch = features.batch_size
        numbers = batch * features.numbers_per_network * max(channels + given) // channels[0]
        if not 0 < batch <= MOST_NETWORKS or numbers > LARGEST or autocast_dtype(features) is not None:
            return None
        # Layers of another dtype or device than the features say so themselves.
        like = all(_is_like(module, features) for module in self.modules)
        if not like or len({layer.backend for layer in self.layers}) > 1:
            return None
        backend = choose_backend(self.layers[0].backend, features.device, features.dtype, features)
        described = [Layer(layer.table, layer.activation, type(layer) is MagepInvariant) for layer in self.layers]
        return backend.stack_of(described, self.dense, features.dtype)


def _parameter_names(module: nn.Module) -> list[str]:
    if isinstance(module, MagepEquivariant | MagepInvariant):
        return [output.name for output in module.table.outputs] + ["psi"] * (module.psi is not None)
    return ["weight", "bias"] if isinstance(module, nn.Linear) else []


def _is_like(module: nn.Module, features: WeightFeatures) -> bool:
    parameter = next(iter(module._parameters.values()), None)
    return parameter is None or (parameter.dtype == features.dtype and parameter.device == features.device)
