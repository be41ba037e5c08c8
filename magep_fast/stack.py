"""Layers that run together: `nn.Sequential` with less between its layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from magep_fast import ops
from magep_fast.layers import MagepEquivariant, MagepInvariant, MonomialEquivariant
from magep_fast.ops.autocast import autocast_dtype
from magep_fast.ops.backends import Backend, choose_backend
from magep_fast.ops.operations import DenseLayers, Layer, Operation, transformed
from magep_fast.spaces import WeightFeatures

LARGEST = 2**20
"""Numbers of a batch of features, in the layer that has most, up to which layers run together. Beyond, the arithmetic
decides, and layer by layer the memory of each is free as soon as the backward pass has left it."""

MOST_NETWORKS = 64
"""In a batch whose layers run together: for more of them, dense layers of torch are as fast as those here."""

_Polynomial = MagepEquivariant | MagepInvariant


class Stack(nn.Sequential):
    """`nn.Sequential`, whose MAGEP layers run as one operation with one node in the graph of autograd.

    Between the layers of small networks, Python and autograd take longer than the kernels do. Here layers that follow
    one another are one operation: equivariant ones, an invariant one, and dense ones behind it (`nn.Linear` with
    `nn.ReLU` between them and `nn.Sigmoid` at the end, in an `nn.Sequential` of their own or not). Outputs, gradients
    and names of parameters are those of `nn.Sequential`.

    Layers run one by one where it could make a difference or does not pay: with hooks on them, under autocast,
    torch.compile, tracing and the transforms of torch.func, for batches of more than `MOST_NETWORKS` networks or
    `LARGEST` numbers, and on backends that cannot do it.
    """

    _plan: _Plan | None = None

    def forward(self, input: Any) -> Any:
        if torch.compiler.is_compiling() or torch.jit.is_tracing() or transformed():  # type: ignore[attr-defined]
            return super().forward(input)
        if torch._C._len_torch_dispatch_stack():  # what looks at operators sees those of layers
            return super().forward(input)
        if self._plan is None or not self._plan.is_current():
            self._plan = _Plan(self)
        if self._plan.is_hooked():
            return super().forward(input)
        for part in self._plan.parts:
            input = part(input)
        return input

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "_plan"}


class _Plan:
    """How a stack runs: its modules, some of them together, one after the other."""

    def __init__(self, stack: Stack):
        self.containers: list[tuple[nn.Sequential, list[nn.Module]]] = []  # with what was in them
        leaves = list(self._leaves(stack))
        self.hookable = [*(container for container, _ in self.containers if container is not stack), *leaves]
        self.parts: list[Callable[[Any], Any]] = list(_parts(leaves))

    def _leaves(self, container: nn.Sequential) -> Iterator[nn.Module]:
        children = list(container._modules.values())
        self.containers.append((container, children))
        for child in children:
            if type(child) is nn.Sequential or type(child) is Stack:
                yield from self._leaves(child)
            else:
                yield child

    def is_current(self) -> bool:
        return all(list(container._modules.values()) == children for container, children in self.containers)

    def is_hooked(self) -> bool:
        return torch_module._has_any_global_hook() or any(
            m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks
            for m in self.hookable
        )


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
            if leaf.in_features != width or leaf.bias is None:
                break
            width, end = leaf.out_features, k + 1
    return list(leaves[:end])


class _Run:
    """MAGEP layers, and the dense ones behind them, that run together where they can."""

    def __init__(self, layers: list[_Polynomial], dense: list[nn.Module]):
        self.layers, self.modules = layers, [*layers, *dense]
        self.dense = DenseLayers((len(dense) + 1) // 2, type(dense[-1]) is nn.Sigmoid) if dense else None
        widest = max(layer.table.in_channels for layer in layers)
        self.growth = widest / layers[0].table.in_channels  # of features, in the layer that has most
        self.accepted: list[object] | None = None  # the signature of the last features that fitted
        self.known: tuple[list[object], Operation | None] = [], None  # the operation, and what it was found for

    def __call__(self, features: WeightFeatures) -> Any:
        operation = self._operation(features)
        if operation is None:
            for module in self.modules:
                features = module(features)
            return features
        parameters = [p for module in self.modules for p in module._parameters.values() if p is not None]
        outputs = ops.stack(operation, features.tensors(), parameters)
        if _ends(self.layers):
            return outputs[0]
        return WeightFeatures(outputs[: features.num_layers], outputs[features.num_layers :])

    def _operation(self, features: WeightFeatures) -> Operation | None:
        """What to run, or None for one module after the other."""
        first = self.layers[0]
        signature = first._signature(features)
        if signature is None or signature != self.accepted:
            first._check(features)
            if signature is None or not self._fits(features):
                return None
            self.accepted = signature
        backend = choose_backend(first.backend, features.device, features.dtype, features)
        key = [backend.name, features.dtype]
        for layer in self.layers:
            key += (layer.backend, layer.activation)
        if key != self.known[0]:
            self.known = key, self._found(backend, features.dtype)
        return self.known[1]

    def _fits(self, features: WeightFeatures) -> bool:
        batch = features.batch_size
        if not 0 < batch <= MOST_NETWORKS or batch * features.numbers_per_network * self.growth > LARGEST:
            return False
        # Layers of another dtype or device than the features say so themselves.
        return autocast_dtype(features) is None and all(_is_like(module, features) for module in self.modules)

    def _found(self, backend: Backend, dtype: torch.dtype) -> Operation | None:
        if len({layer.backend for layer in self.layers}) > 1:
            return None
        described = [Layer(layer.table, layer.activation, type(layer) is MagepInvariant) for layer in self.layers]
        return backend.stack_of(described, self.dense, dtype)


def _is_like(module: nn.Module, features: WeightFeatures) -> bool:
    parameter = next(iter(module._parameters.values()), None)
    return parameter is None or (parameter.dtype == features.dtype and parameter.device == features.device)
