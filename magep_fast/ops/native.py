"""The backend `cpu`: one native operator call per layer and direction.

The operators `magep_fast::chain`, `::equivariant`, `::linear`, `::invariant` and their backwards take and return lists
of tensors. They have fake kernels (for torch.compile and torch.export) and autograd formulas. Layers call them through
the autograd Function below, which does the same with less overhead.

What no kernel computes is done by the `torch` backend, the same function in torch ops: second derivatives, forward
mode, and every transform of torch.func.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from magep_fast import factored
from magep_fast.activations import FUNCTIONS
from magep_fast.spaces import WeightSpace
from magep_fast.terms import GROUPS, LINEAR, Table, equivariant_table, invariant_table

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def unsupported(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why tensors of this kind cannot be taken, or None."""
    if device.type != "cpu":
        return "it runs on CPU tensors only"
    if dtype not in DTYPES:
        return f"it computes in {', '.join(str(d).removeprefix('torch.') for d in DTYPES)}"
    return None


MOST_INPUTS = 64
"""The widest n_0 of a table of all terms: layer 1 is mixed by n_0 × n_0 matrices of each network, which does not pay
beyond."""

ACTIVATIONS = (None, *FUNCTIONS)
"""By their number in the operators' arguments."""


def has_kernel(table: Table) -> bool:
    """Whether fused kernels cover a table: networks with a hidden layer, and either the linear terms, with any taps, or
    all terms, with one weight per connection and few enough inputs. Other tables run in torch ops."""
    space = table.space
    if space.num_layers == 1:
        return False
    if table.terms == LINEAR:
        return True
    return table.terms == GROUPS["all"] and set(space.taps + table.out_taps) == {1} and (space.n_in or 0) <= MOST_INPUTS


def _transformed() -> bool:
    """Whether a transform of torch.func or a forward-mode level is active, of which the operators know nothing."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def chain(weights: Sequence[Tensor], biases: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """As `factored.chain`."""
    if _transformed():
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
    if not has_kernel(table) or _transformed():
        return factored.equivariant(table, weights, biases, matrices, psi, activation)
    L = len(weights)
    operation = (_Linear if psi is None else _Equivariant)(L, table.out_channels, ACTIVATIONS.index(activation))
    tensors = (*weights, *biases, *matrices) if psi is None else (*weights, *biases, *matrices, psi)
    results = _run(operation, tensors)
    return list(results[:L]), list(results[L:])


def invariant(
    table: Table, weights: Sequence[Tensor], biases: Sequence[Tensor], matrix: Tensor, psi: Tensor | None
) -> Tensor:
    """As `factored.invariant`."""
    if psi is None or not has_kernel(table) or _transformed():
        return factored.invariant(table, weights, biases, matrix, psi)
    return _run(_Invariant(len(weights)), (*weights, *biases, matrix, psi))[0]


class _Operation(Protocol):
    """An operator and its arguments that are no tensors; `tensors` are all the others, in the order of its schema."""

    @property
    def count(self) -> int:
        """How many tensors it takes."""

    def forward(self, tensors: Sequence[Tensor], training: bool) -> list[Tensor]:
        """The operator's results."""

    def keep(self, results: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The outputs among the results, and what `backward` needs besides `tensors`."""

    def backward(
        self, grads: Sequence[Tensor], tensors: Sequence[Tensor], kept: Sequence[Tensor], wanted: Sequence[bool]
    ) -> list[Tensor | None]:
        """Gradients of `tensors` from those of the outputs; those that are not wanted may be None."""

    def in_torch(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The outputs by the `torch` backend."""


def _run(operation: _Operation, tensors: tuple[Tensor, ...]) -> Sequence[Tensor]:
    training = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if torch.compiler.is_compiling():  # a graph holds operators
        return operation.keep(operation.forward(tensors, training))[0]
    if training:
        return _Layer.apply(operation, *tensors)
    with torch._C._AutoDispatchBelowAutograd():
        return operation.keep(operation.forward(tensors, False))[0]


class _Layer(torch.autograd.Function):
    """Calls the operators below their own autograd formulas, whose work in Python this Function saves."""

    @staticmethod
    def forward(ctx: Any, operation: _Operation, *tensors: Tensor) -> tuple[Tensor, ...]:
        with torch._C._AutoDispatchBelowAutograd():
            outputs, kept = operation.keep(operation.forward(tensors, True))
        ctx.operation = operation
        ctx.save_for_backward(*tensors, *kept)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        tensors, kept = _saved(ctx)
        if torch.is_grad_enabled():  # a further derivative is wanted
            return None, *torch.func.vjp(ctx.operation.in_torch, *tensors)[1](grads)
        with torch._C._AutoDispatchBelowAutograd():
            return None, *ctx.operation.backward(grads, tensors, kept, ctx.needs_input_grad[1:])


def _saved(ctx: Any) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """What was saved for an operation: its tensors and what it keeps."""
    saved, count = ctx.saved_tensors, ctx.operation.count
    return saved[:count], saved[count:]


def _split(L: int, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Weights, biases and what follows."""
    return list(tensors[:L]), list(tensors[L : 2 * L]), list(tensors[2 * L :])


def _known(activation: int, outputs: list[Tensor], before: list[Tensor]) -> list[Tensor]:
    """What the slope of the activation is computed from: nothing, the outputs, or for sin the values before it."""
    return before if ACTIVATIONS[activation] == "sin" else outputs if activation else []


def _widths(weights: Sequence[Tensor]) -> list[int]:
    return [weights[0].shape[-1], *(w.shape[-2] for w in weights)]


def _space(weights: Sequence[Tensor], taps: Sequence[int] | int = 1) -> WeightSpace:
    """The space of the weights with hidden widths left open: no table depends on them, and they may be symbolic."""
    return WeightSpace((int(weights[0].shape[-1]), *(None,) * (len(weights) - 1), int(weights[-1].shape[-2])), taps)


@dataclass(frozen=True)
class _Equivariant:
    """tensors: weights, biases, matrices, psi."""

    L: int
    out_channels: int
    activation: int

    @property
    def count(self) -> int:
        return 4 * self.L + 1

    def forward(self, tensors: Sequence[Tensor], training: bool) -> list[Tensor]:
        weights, biases, (*matrices, psi) = _split(self.L, tensors)
        return torch.ops.magep_fast.equivariant.default(
            weights, biases, matrices, psi, self.out_channels, self.activation, training
        )

    def keep(self, results: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        outputs, saved, before = results[: 2 * self.L], results[2 * self.L], results[2 * self.L + 1 :]
        return outputs, [saved, *_known(self.activation, outputs, before)]

    def backward(
        self, grads: Sequence[Tensor], tensors: Sequence[Tensor], kept: Sequence[Tensor], wanted: Sequence[bool]
    ) -> list[Tensor | None]:
        weights, biases, (*matrices, psi) = _split(self.L, tensors)
        saved, *known = kept
        return torch.ops.magep_fast.equivariant_backward.default(
            list(grads), weights, biases, matrices, psi, saved, known, self.out_channels, self.activation
        )

    def in_torch(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        weights, biases, (*matrices, psi) = _split(self.L, tensors)
        space = _space(weights)
        d, shared = int(biases[0].shape[1]), _shares_Wb(weights, biases, matrices[-1])
        table = equivariant_table(space, space.taps, d, self.out_channels, GROUPS["all"], shared)
        outputs = factored.equivariant(table, weights, biases, matrices, psi, ACTIVATIONS[self.activation])
        return *outputs[0], *outputs[1]


@dataclass(frozen=True)
class _Linear:
    """tensors: weights, biases, matrices."""

    L: int
    out_channels: int
    activation: int

    @property
    def count(self) -> int:
        return 4 * self.L

    def forward(self, tensors: Sequence[Tensor], training: bool) -> list[Tensor]:
        return torch.ops.magep_fast.linear.default(
            *_split(self.L, tensors), self.out_channels, self.activation, training
        )

    def keep(self, results: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        outputs, before = results[: 2 * self.L], results[2 * self.L :]
        return outputs, _known(self.activation, outputs, before)

    def backward(
        self, grads: Sequence[Tensor], tensors: Sequence[Tensor], kept: Sequence[Tensor], wanted: Sequence[bool]
    ) -> list[Tensor | None]:
        inputs = any(wanted[: 2 * self.L])
        found = torch.ops.magep_fast.linear_backward.default(
            list(grads), *_split(self.L, tensors), list(kept), self.out_channels, self.activation, inputs
        )
        return found if inputs else [None] * (2 * self.L) + found

    def in_torch(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        weights, biases, matrices = _split(self.L, tensors)
        space = _space(weights, [int(w.shape[1] // biases[0].shape[1]) for w in weights])
        out_taps = tuple(map(int, _out_taps(space.n_in, space.n_out, matrices, self.out_channels)))
        table = equivariant_table(space, out_taps, int(biases[0].shape[1]), self.out_channels, LINEAR)
        outputs = factored.equivariant(table, weights, biases, matrices, None, ACTIVATIONS[self.activation])
        return *outputs[0], *outputs[1]


def _shares_Wb(weights: Sequence[Tensor], biases: Sequence[Tensor], readout: Tensor) -> bool:
    """Whether [Wb] has one coefficient for all t, by the columns of the last matrix."""
    L, n_0, n_L, d = len(weights), int(weights[0].shape[-1]), int(weights[-1].shape[-2]), int(biases[0].shape[1])
    return L > 2 and int(readout.shape[1]) == d * (3 * n_L * n_0 + 2 * n_L + 2 * (L - 1)) + 1


def _out_taps(n_0: int, n_L: int, matrices: Sequence[Tensor], out_channels: int) -> tuple[int, ...]:
    """Of a linear layer, from the rows of its matrices: channels·taps, times n_0 in layer 1 and n_L in layer L."""
    rows = [matrix.shape[0] // out_channels for matrix in matrices[::2]]
    return rows[0] // n_0, *rows[1:-1], rows[-1] // n_L


@dataclass(frozen=True)
class _Invariant:
    """tensors: weights, biases, matrix, psi."""

    L: int

    @property
    def count(self) -> int:
        return 2 * self.L + 2

    def forward(self, tensors: Sequence[Tensor], training: bool) -> list[Tensor]:
        weights, biases, (matrix, psi) = _split(self.L, tensors)
        return torch.ops.magep_fast.invariant.default(weights, biases, matrix, psi)

    def keep(self, results: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        return results[:1], results[1:]

    def backward(
        self, grads: Sequence[Tensor], tensors: Sequence[Tensor], kept: Sequence[Tensor], wanted: Sequence[bool]
    ) -> list[Tensor | None]:
        weights, biases, (matrix, psi) = _split(self.L, tensors)
        return torch.ops.magep_fast.invariant_backward.default(grads[0], weights, biases, matrix, psi, kept[0])

    def in_torch(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        weights, biases, (matrix, psi) = _split(self.L, tensors)
        d, shared = int(biases[0].shape[1]), _shares_Wb(weights, biases, matrix)
        table = invariant_table(_space(weights), d, int(matrix.shape[0]), GROUPS["all"], shared)
        return (factored.invariant(table, weights, biases, matrix, psi),)


def _second_derivative(
    function: Callable[..., tuple[Tensor, ...]],
    inputs: Sequence[Tensor],
    grads: Sequence[Tensor],
    seeds: Sequence[Tensor | None],
) -> tuple[list[Tensor], list[Tensor]]:
    """The gradient of ⟨seeds, vjp(grads)⟩ in `grads` and in `inputs`, where vjp is that of `function` at `inputs`."""
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # Aliases, so that the caller's graph stays connected for a third derivative.
        inputs = [x.view_as(x) if x.requires_grad else x.detach().requires_grad_() for x in inputs]
        grads = [g.view_as(g) if g.requires_grad else g.detach().requires_grad_() for g in grads]
        first = torch.autograd.grad(function(*inputs), inputs, grads, create_graph=True, allow_unused=True)
        pairs = [(f, s) for f, s in zip(first, seeds, strict=True) if f is not None and s is not None]
        wanted = [*grads, *inputs]
        second = torch.autograd.grad(
            [f for f, _ in pairs], wanted, [s for _, s in pairs], create_graph=create_graph, allow_unused=True
        )
    filled = [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, second, strict=True)]
    return filled[: len(grads)], filled[len(grads) :]


def register() -> None:
    """Fake kernels and autograd formulas of the operators themselves, for those who call or export them. Once, after
    the library is loaded."""
    _register_chain()
    _register_layers()


def _register_chain() -> None:
    def fake(weights: list[Tensor], biases: list[Tensor]) -> list[Tensor]:
        (B, d), n = biases[0].shape[:2], _widths(weights)
        prefixes = [w.new_empty(B, d, n[i + 1], n[0] + i) for i, w in enumerate(weights)]
        return prefixes + [weights[0].new_empty(B, d, n[-1], width) for width in n[1:-1]]

    def fake_backward(grads: list[Tensor], weights: list[Tensor], biases: list[Tensor]) -> list[Tensor]:
        return [x.new_empty(x.shape) for x in (*weights, *biases)]

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

        by_grads, by_inputs = _second_derivative(function, tensors, grads, seeds)
        return by_grads, by_inputs[:L], by_inputs[L:]

    torch.library.register_fake("magep_fast::chain", fake)
    torch.library.register_fake("magep_fast::chain_backward", fake_backward)
    torch.library.register_autograd("magep_fast::chain", backward, setup_context=save)
    torch.library.register_autograd("magep_fast::chain_backward", double_backward, setup_context=save_backward)


def _register_layer(
    name: str,
    operation_of: Callable[..., _Operation],
    operation_of_backward: Callable[..., _Operation],
    fake: Callable[..., list[Tensor]],
    fake_backward: Callable[..., list[Tensor]],
) -> None:
    """Registers a layer's operator and its backward, given the operation that arguments of either stand for.

    The tensors of the operation come first among the arguments of the operator, and in those of its backward they come
    right after the gradients.
    """

    def save(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
        ctx.operation = operation_of(*inputs)
        leaves, ctx.structure = tree_flatten(inputs)
        outputs, kept = ctx.operation.keep(output)
        ctx.rest, ctx.outputs = len(leaves) - ctx.operation.count, len(outputs)
        ctx.save_for_backward(*leaves[: ctx.operation.count], *kept)

    def backward(ctx: Any, grads: list[Tensor]) -> tuple:
        tensors, kept = _saved(ctx)
        found = ctx.operation.backward(grads[: ctx.outputs], tensors, kept, [True] * len(tensors))
        return tree_unflatten([*found, *[None] * ctx.rest], ctx.structure)

    def save_backward(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
        ctx.operation = operation_of_backward(*inputs)
        leaves, ctx.structure = tree_flatten(inputs)
        ctx.grads = len(tree_leaves(inputs[0]))
        ctx.rest = len(leaves) - ctx.grads - ctx.operation.count
        ctx.save_for_backward(*leaves[: ctx.grads + ctx.operation.count])

    def double_backward(ctx: Any, seeds: list[Tensor | None]) -> tuple:
        grads, tensors = ctx.saved_tensors[: ctx.grads], ctx.saved_tensors[ctx.grads :]
        seeds = [*[None] * (len(tensors) - len(seeds)), *seeds]  # linear, without gradients of weights and biases
        by_grads, by_inputs = _second_derivative(ctx.operation.in_torch, tensors, grads, seeds)
        return tree_unflatten([*by_grads, *by_inputs, *[None] * ctx.rest], ctx.structure)

    torch.library.register_fake(f"magep_fast::{name}", fake)
    torch.library.register_fake(f"magep_fast::{name}_backward", fake_backward)
    torch.library.register_autograd(f"magep_fast::{name}", backward, setup_context=save)
    torch.library.register_autograd(f"magep_fast::{name}_backward", double_backward, setup_context=save_backward)


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
        size = _saved_size(_widths(weights), biases[0].shape[1], is_equivariant, readout.device) + readout.shape[1]
        if _shares_Wb(weights, biases, readout):
            size += (len(weights) - 1) * weights[-1].shape[2] * biases[0].shape[1]
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
        before = [torch.empty_like(y) for y in outputs] if training and ACTIVATIONS[activation] == "sin" else []
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
        before = [torch.empty_like(y) for y in outputs] if training and ACTIVATIONS[activation] == "sin" else []
        return [*outputs, *before]

    def fake_invariant(weights: list[Tensor], biases: list[Tensor], matrix: Tensor, psi: Tensor) -> list[Tensor]:
        output = biases[0].new_empty(biases[0].shape[0], matrix.shape[0])
        return [output, empty_saved(weights, biases, matrix, False)]

    def empty_like(*tensors: Tensor) -> list[Tensor]:
        return [x.new_empty(x.shape) for x in tensors]

    _register_layer(
        "equivariant",
        lambda weights, biases, matrices, psi, e, f, training: _Equivariant(len(weights), e, f),
        lambda grads, weights, biases, matrices, psi, saved, known, e, f: _Equivariant(len(weights), e, f),
        fake_equivariant,
        lambda grads, weights, biases, matrices, psi, *_: empty_like(*weights, *biases, *matrices, psi),
    )
    _register_layer(
        "linear",
        lambda weights, biases, matrices, e, f, training: _Linear(len(weights), e, f),
        lambda grads, weights, biases, matrices, known, e, f, inputs: _Linear(len(weights), e, f),
        fake_linear,
        lambda grads, weights, biases, matrices, known, e, f, inputs: empty_like(
            *(*weights, *biases) if inputs else (), *matrices
        ),
    )
    _register_layer(
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
