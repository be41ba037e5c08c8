"""The backend `cpu`: one native operator call per layer, or per stack of layers, and direction.

The operators `magep_fast::chain`, `::equivariant`, `::linear`, `::invariant` and their backwards take and return lists
of tensors. They have fake kernels (for torch.compile and torch.export) and autograd formulas. `magep_fast::_stack`, its
backward, its update and its step have neither: where graphs are made, a `Stack` runs layer by layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from magep_fast import factored
from magep_fast.ops.operations import (
    ACTIVATIONS,
    ALIGNMENT,
    LOSSES,
    AdamState,
    AdamStep,
    DenseLayers,
    Equivariant,
    Invariant,
    Layer,
    Operation,
    empty_like,
    has_kernel,
    known_of,
    register_layer,
    run,
    second_derivative,
    shares_Wb,
    space_of,
    split,
    transformed,
    widths_of,
    wrong_dtype,
)
from magep_fast.terms import LINEAR, Table, equivariant_table

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def unsupported(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why tensors of this kind cannot be taken, or None."""
    if device.type != "cpu":
        return "it runs on CPU tensors only"
    return wrong_dtype(dtype, DTYPES)


def chain(weights: Sequence[Tensor], biases: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """As `factored.chain`."""
    if transformed():
        return factored.chain(weights, biases)
    results = torch.ops.magep_fast.chain(list(weights), list(biases))
    return results[: len(weights)], results[len(weights) :]


def equivariant(
    table: Table,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    matrices: Sequence[Tensor],
    psi: Tensor | None,
    activation: str | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """As `factored.equivariant`."""
    operation = None if transformed() else operation_of(Layer(table, activation))
    if operation is None:
        return factored.equivariant(table, weights, biases, matrices, psi, activation)
    L = len(weights)
    tensors = (*weights, *biases, *matrices) if psi is None else (*weights, *biases, *matrices, psi)
    results = run(operation, tensors)
    return list(results[:L]), list(results[L:])


def invariant(
    table: Table, weights: Sequence[Tensor], biases: Sequence[Tensor], matrix: Tensor, psi: Tensor | None
) -> Tensor:
    """As `factored.invariant`."""
    operation = None if psi is None or transformed() else operation_of(Layer(table, is_invariant=True))
    if operation is None or psi is None:
        return factored.invariant(table, weights, biases, matrix, psi)
    return run(operation, (*weights, *biases, matrix, psi))[0]


def operation_of(layer: Layer) -> _Linear | _Equivariant | _Invariant | None:
    """The operation for a layer, or None if no kernel computes it."""
    table = layer.table
    if not has_kernel(table) or (layer.is_invariant and not table.pairs):
        return None
    L = table.space.num_layers
    if layer.is_invariant:
        return _Invariant(L)
    return (_Equivariant if table.pairs else _Linear)(L, table.out_channels, ACTIVATIONS.index(layer.activation))


def stack_of(layers: Sequence[Layer], dense: DenseLayers | None, dtype: torch.dtype) -> Operation | None:
    """The operation for layers one after another, dense ones behind them, or None if there is none."""
    parts = [operation_of(layer) for layer in layers]
    known = [part for part in parts if part is not None]
    if dtype not in (torch.float32, torch.float64) or len(known) < len(parts):
        return None
    return _Stack.of([*known, _Dense(dense.count, dense.sigmoid)] if dense else known)


class _Equivariant(Equivariant):
    num_factors = 1

    @property
    def code(self) -> tuple[int, int, int]:
        """As csrc/stack.h has it."""
        return 1, self.out_channels, self.activation

    def forward(self, tensors: Sequence[Tensor], training: bool) -> list[Tensor]:
        weights, biases, (*matrices, psi) = split(self.L, tensors)
        return torch.ops.magep_fast.equivariant.default(
            weights, biases, matrices, psi, self.out_channels, self.activation, training
        )

    def backward(
        self, grads: Sequence[Tensor], tensors: Sequence[Tensor], kept: Sequence[Tensor], wanted: Sequence[bool]
    ) -> list[Tensor | None]:
        weights, biases, (*matrices, psi) = split(self.L, tensors)
        saved, *known = kept
        return torch.ops.magep_fast.equivariant_backward.default(
            list(grads), weights, biases, matrices, psi, saved, known, self.out_channels, self.activation
        )


@dataclass(frozen=True)
class _Linear:
    """tensors: weights, biases, matrices."""

    L: int
    out_channels: int
    activation: int

    @property
    def inputs(self) -> int:
        return 2 * self.L

    @property
    def count(self) -> int:
        return 4 * self.L

    @property
    def code(self) -> tuple[int, int, int]:
        return 0, self.out_channels, self.activation

    def forward(self, tensors: Sequence[Tensor], training: bool) -> list[Tensor]:
        return torch.ops.magep_fast.linear.default(
            *split(self.L, tensors), self.out_channels, self.activation, training
        )

    def keep(self, results: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        outputs, before = results[: 2 * self.L], results[2 * self.L :]
        return outputs, known_of(self.activation, outputs, before)

    def backward(
        self, grads: Sequence[Tensor], tensors: Sequence[Tensor], kept: Sequence[Tensor], wanted: Sequence[bool]
    ) -> list[Tensor | None]:
        inputs = any(wanted[: 2 * self.L])
        found = torch.ops.magep_fast.linear_backward.default(
            list(grads), *split(self.L, tensors), list(kept), self.out_channels, self.activation, inputs
        )
        return found if inputs else [None] * (2 * self.L) + found

    def in_torch(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        weights, biases, matrices = split(self.L, tensors)
        space = space_of(weights, [int(w.shape[1] // biases[0].shape[1]) for w in weights])
        out_taps = tuple(map(int, _out_taps(space.n_in, space.n_out, matrices, self.out_channels)))
        table = equivariant_table(space, out_taps, int(biases[0].shape[1]), self.out_channels, LINEAR)
        outputs = factored.equivariant(table, weights, biases, matrices, None, ACTIVATIONS[self.activation])
        return *outputs[0], *outputs[1]


def _out_taps(n_0: int, n_L: int, matrices: Sequence[Tensor], out_channels: int) -> tuple[int, ...]:
    """Of a linear layer, from the rows of its matrices: channels·taps, times n_0 in layer 1 and n_L in layer L."""
    rows = [matrix.shape[0] // out_channels for matrix in matrices[::2]]
    return rows[0] // n_0, *rows[1:-1], rows[-1] // n_L


class _Invariant(Invariant):
    code: ClassVar[tuple[int, int, int]] = (2, 0, 0)

    def forward(self, tensors: Sequence[Tensor], training: bool) -> list[Tensor]:
        weights, biases, (matrix, psi) = split(self.L, tensors)
        return torch.ops.magep_fast.invariant.default(weights, biases, matrix, psi)

    def backward(
        self, grads: Sequence[Tensor], tensors: Sequence[Tensor], kept: Sequence[Tensor], wanted: Sequence[bool]
    ) -> list[Tensor | None]:
        weights, biases, (matrix, psi) = split(self.L, tensors)
        return torch.ops.magep_fast.invariant_backward.default(grads[0], weights, biases, matrix, psi, kept[0])


@dataclass(frozen=True)
class _Dense:
    """Part of a stack. tensors: x, then weight and bias of each layer."""

    layers: int
    sigmoid: bool
    inputs: ClassVar[int] = 1

    @property
    def count(self) -> int:
        return 1 + 2 * self.layers

    @property
    def code(self) -> tuple[int, int, int]:
        return 3, self.layers, int(self.sigmoid)

    def in_torch(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        x, *layers = tensors
        for k in range(self.layers):
            x = nn.functional.linear(x if k == 0 else x.relu(), *layers[2 * k : 2 * k + 2])
        return (x.sigmoid() if self.sigmoid else x,)


@dataclass(frozen=True)
class _Stack:
    """Layers one after another: each takes the outputs of the one before. tensors: weights, biases, then the parameters
    of each."""

    parts: tuple[_Linear | _Equivariant | _Invariant | _Dense, ...]
    inputs: int
    outputs: int
    codes: list[int]
    count: int

    @staticmethod
    def of(parts: Sequence[_Linear | _Equivariant | _Invariant | _Dense]) -> _Stack:
        inputs = parts[0].inputs
        outputs = inputs if isinstance(parts[-1], (_Linear, _Equivariant)) else 1
        count = inputs + sum(part.count - part.inputs for part in parts)
        return _Stack(tuple(parts), inputs, outputs, [number for part in parts for number in part.code], count)

    def forward(self, tensors: Sequence[Tensor], training: bool) -> list[Tensor]:
        return torch.ops.magep_fast._stack.default(
            list(tensors[: self.inputs]), list(tensors[self.inputs :]), self.codes
        )

    def keep(self, results: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        outputs, workspace = results[: self.outputs], results[self.outputs :]
        last = self.parts[-1]
        if isinstance(last, _Dense):
            known = outputs if last.sigmoid else []
        else:
            known = [] if isinstance(last, _Invariant) else known_of(last.activation, outputs, [])
        return outputs, [*known, *workspace]

    def backward(
        self, grads: Sequence[Tensor], tensors: Sequence[Tensor], kept: Sequence[Tensor], wanted: Sequence[bool]
    ) -> list[Tensor | None]:
        inputs = any(wanted[: self.inputs])
        *known, workspace = kept
        found = torch.ops.magep_fast._stack_backward.default(
            list(grads),
            list(tensors[: self.inputs]),
            list(tensors[self.inputs :]),
            known,
            workspace,
            self.codes,
            inputs,
        )
        return found if inputs else [None] * self.inputs + found

    def update(
        self,
        grads: Sequence[Tensor],
        tensors: Sequence[Tensor],
        kept: Sequence[Tensor],
        state: AdamState,
        step: AdamStep,
    ) -> None:
        *known, workspace = kept
        torch.ops.magep_fast._stack_update.default(
            list(grads),
            list(tensors[: self.inputs]),
            list(tensors[self.inputs :]),
            known,
            workspace,
            *state,
            self.codes,
            *step,
        )

    def train(
        self,
        tensors: Sequence[Tensor],
        targets: Tensor,
        order: Tensor | None,
        batch_size: int,
        loss: str,
        state: AdamState,
        step: AdamStep,
    ) -> Tensor:
        return torch.ops.magep_fast._stack_train.default(
            list(tensors[: self.inputs]),
            list(tensors[self.inputs :]),
            targets,
            *state,
            order,
            batch_size,
            self.codes,
            LOSSES.index(loss),
            *step,
        )

    def in_torch(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        x, at = tensors[: self.inputs], self.inputs
        for part in self.parts:
            own = part.count - part.inputs
            x, at = part.in_torch(*x, *tensors[at : at + own]), at + own
        return x


def register() -> None:
    """Fake kernels and autograd formulas of the operators themselves, for those who call or export them. Once, after
    the library is loaded."""
    _register_chain()
    _register_layers()


def _register_chain() -> None:
    def fake(weights: list[Tensor], biases: list[Tensor]) -> list[Tensor]:
        (B, d), n = biases[0].shape[:2], widths_of(weights)
        prefixes = [w.new_empty(B, d, n[i + 1], n[0] + i) for i, w in enumerate(weights)]
        return prefixes + [weights[0].new_empty(B, d, n[-1], width) for width in n[1:-1]]

    def fake_backward(grads: list[Tensor], weights: list[Tensor], biases: list[Tensor]) -> list[Tensor]:
        return empty_like(*weights, *biases)

    def save(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
        ctx.L = len(inputs[0])
        ctx.save_for_backward(*inputs[0], *inputs[1])

    def backward(ctx: Any, grads: list[Tensor]) -> tuple:
        weights, biases = list(ctx.saved_tensors[: ctx.L]), list(ctx.saved_tensors[ctx.L :])
        found = torch.ops.magep_fast.chain_backward(grads, weights, biases)
        return found[: ctx.L], found[ctx.L :]

    def save_backward(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
        grads, weights, biases = inputs
        ctx.L = len(weights)
        ctx.save_for_backward(*grads, *weights, *biases)

    def double_backward(ctx: Any, seeds: list[Tensor]) -> tuple:
        L = ctx.L
        grads, tensors = ctx.saved_tensors[: -2 * L], ctx.saved_tensors[-2 * L :]

        def function(*x: Tensor) -> tuple[Tensor, ...]:
            prefixes, suffixes = factored.chain(x[:L], x[L:])
            return *prefixes, *suffixes

        by_grads, by_inputs = second_derivative(function, tensors, grads, seeds)
        return by_grads, by_inputs[:L], by_inputs[L:]

    torch.library.register_fake("magep_fast::chain", fake)
    torch.library.register_fake("magep_fast::chain_backward", fake_backward)
    torch.library.register_autograd("magep_fast::chain", backward, setup_context=save)
    torch.library.register_autograd("magep_fast::chain_backward", double_backward, setup_context=save_backward)


def _register_layers() -> None:
    def empty_like_features(
        weights: list[Tensor], biases: list[Tensor], taps: Sequence[int], channels: int
    ) -> list[Tensor]:
        B = biases[0].shape[0]
        return [w.new_empty(B, channels * f, *w.shape[2:]) for w, f in zip(weights, taps, strict=True)] + [
            b.new_empty(B, channels, b.shape[2]) for b in biases
        ]

    def empty_saved(weights: list[Tensor], biases: list[Tensor], readout: Tensor, is_equivariant: bool) -> Tensor:
        dtype = torch.float64 if biases[0].dtype == torch.float64 else torch.float32
        size = _saved_size(widths_of(weights), biases[0].shape[1], is_equivariant, readout.device) + readout.shape[1]
        if shares_Wb(weights, biases, readout):
            size += (len(weights) - 1) * weights[-1].shape[2] * biases[0].shape[1]
        if readout.device.type != "cuda":
            size = -(-size // ALIGNMENT) * ALIGNMENT
        return biases[0].new_empty(biases[0].shape[0], size, dtype=dtype)

    def fake_equivariant(
        weights: list[Tensor],
        biases: list[Tensor],
        matrices: list[Tensor],
        psi: Tensor,
        out_channels: int,
        activation: int,
        training: bool,
    ) -> list[Tensor]:
        outputs = empty_like_features(weights, biases, [1] * len(weights), out_channels)
        before = empty_like(*outputs) if training and ACTIVATIONS[activation] == "sin" else []
        return [*outputs, empty_saved(weights, biases, matrices[-1], True), *before]

    def fake_linear(
        weights: list[Tensor],
        biases: list[Tensor],
        matrices: list[Tensor],
        out_channels: int,
        activation: int,
        training: bool,
    ) -> list[Tensor]:
        taps = _out_taps(weights[0].shape[3], weights[-1].shape[2], matrices, out_channels)
        outputs = empty_like_features(weights, biases, taps, out_channels)
        before = empty_like(*outputs) if training and ACTIVATIONS[activation] == "sin" else []
        return [*outputs, *before]

    def fake_invariant(weights: list[Tensor], biases: list[Tensor], matrix: Tensor, psi: Tensor) -> list[Tensor]:
        output = biases[0].new_empty(biases[0].shape[0], matrix.shape[0])
        return [output, empty_saved(weights, biases, matrix, False)]

    register_layer(
        "equivariant",
        lambda weights, biases, matrices, psi, e, f, training: _Equivariant(len(weights), e, f),
        lambda grads, weights, biases, matrices, psi, saved, known, e, f: _Equivariant(len(weights), e, f),
        fake_equivariant,
        lambda grads, weights, biases, matrices, psi, *_: empty_like(*weights, *biases, *matrices, psi),
    )
    register_layer(
        "linear",
        lambda weights, biases, matrices, e, f, training: _Linear(len(weights), e, f),
        lambda grads, weights, biases, matrices, known, e, f, inputs: _Linear(len(weights), e, f),
        fake_linear,
        lambda grads, weights, biases, matrices, known, e, f, inputs: empty_like(
            *(*weights, *biases) if inputs else (), *matrices
        ),
    )
    register_layer(
        "invariant",
        lambda weights, biases, matrix, psi: _Invariant(len(weights)),
        lambda grad, weights, biases, matrix, psi, saved: _Invariant(len(weights)),
        fake_invariant,
        lambda grad, weights, biases, matrix, psi, saved: empty_like(*weights, *biases, matrix, psi),
    )


def _saved_size(widths: Sequence[int], d: int, is_equivariant: bool, device: torch.device) -> int:
    """Numbers of the chains kept per network for the backward pass, as csrc/cpu/layout.h and csrc/cuda/shape.h lay them
    out: the CUDA kernels keep no second P_L, but all that connects the chains."""
    L, n_0, n_L = len(widths) - 1, widths[0], widths[-1]
    on_cuda = device.type == "cuda"
    connected = L if on_cuda and is_equivariant else 1
    total = connected * (n_0 + 1) * n_0 + (0 if on_cuda else n_L * n_0)
    total += sum((n_0 + i) * widths[i] for i in range(1, L + 1))
    if is_equivariant:
        for i in range(2, L + 1):
            through_output = (n_L < n_0 or n_L == 1) and i < L
            total += (n_L + (1 if through_output else n_0 + 1)) * widths[i - 1]
            total += n_L * widths[i] if through_output and on_cuda else 0
    return total * d
