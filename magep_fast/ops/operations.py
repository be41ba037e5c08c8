"""What the backends with kernels have in common: which tables their kernels cover, how an operator is run and
registered with its derivatives, and the same function in torch ops.

Layers call operators through the autograd Function below: it does what the operators' own autograd formulas do, with
less work in Python. What no kernel computes is done by the `torch` backend: second derivatives, forward mode, and every
transform of torch.func.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from magep_fast import factored
from magep_fast.activations import FUNCTIONS
from magep_fast.spaces import WeightSpace
from magep_fast.terms import GROUPS, LINEAR, Table, equivariant_table, invariant_table

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


def wrong_dtype(dtype: torch.dtype, dtypes: Sequence[torch.dtype]) -> str | None:
    """Why a dtype is none that a backend computes in, or None."""
    if dtype in dtypes:
        return None
    return f"it computes in {', '.join(str(d).removeprefix('torch.') for d in dtypes)}"


def transformed() -> bool:
    """Whether a transform of torch.func or a forward-mode level is active, of which the operators know nothing."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


@dataclass(frozen=True)
class Layer:
    """What an operation is to compute: the layer of a table, with its activation, or the invariant layer of one."""

    table: Table
    activation: str | None = None
    is_invariant: bool = False


@dataclass(frozen=True)
class DenseLayers:
    """What an operation is to compute: dense layers with ReLU between them, and a sigmoid behind them or not."""

    count: int
    sigmoid: bool


class Operation(Protocol):
    """An operator and its arguments that are no tensors; `tensors` are all the others, in the order of its schema."""

    @property
    def inputs(self) -> int:
        """How many of the tensors come first and are no parameters."""

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


class AdamStep(NamedTuple):
    """A step of `torch.optim.Adam`, or with `decoupled` of AdamW."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool


class AdamState(NamedTuple):
    """What Adam keeps of all parameters: means and squares of their gradients, one tensor each in which each parameter
    begins at a multiple of `ALIGNMENT` numbers, and how many steps each has made, the same number for all."""

    means: Tensor
    squares: Tensor
    steps: Tensor


class UpdatingOperation(Operation, Protocol):
    """An operation that can take a step of Adam in its backward pass."""

    def update(
        self,
        grads: Sequence[Tensor],
        tensors: Sequence[Tensor],
        kept: Sequence[Tensor],
        state: AdamState,
        step: AdamStep,
    ) -> None:
        """Changes the parameters among `tensors`, and the state, in place."""

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
        """The forward pass, one of the `LOSSES` and `update`, for one batch of networks after the other; the losses.

        Features among `tensors`, and the targets, are those of all networks. They are taken `batch_size` at a time,
        fewer at the end, in the `order` given or without one as they lie. A RuntimeError, and nothing is changed,
        unless the targets are of the shape and dtype of the only tensor of outputs; a batch for which the loss is not
        defined ends the training before it."""


LOSSES = ("binary_cross_entropy", "mse_loss")
"""Of torch.nn.functional, with their defaults; by their number in the operator's arguments."""

ALIGNMENT = 16
"""As `kLine` of csrc/cpu/layout.h."""


def run(operation: Operation, tensors: tuple[Tensor, ...]) -> Sequence[Tensor]:
    training = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if torch.compiler.is_compiling():  # a graph holds operators
        return operation.keep(operation.forward(tensors, training))[0]
    if training:
        # As _Layer.apply does where no transform of torch.func is active, but without a look at every tensor for
        # remains of one: parameters are none.
        return super(torch.autograd.Function, _Layer).apply(operation, *tensors)
    with torch._C._AutoDispatchBelowAutograd():
        return operation.keep(operation.forward(tensors, False))[0]


class _Layer(torch.autograd.Function):
    """Calls the operators below their own autograd formulas, whose work in Python this Function saves."""

    @staticmethod
    def forward(ctx: Any, operation: Operation, *tensors: Tensor) -> tuple[Tensor, ...]:
        with torch._C._AutoDispatchBelowAutograd():
            outputs, kept = operation.keep(operation.forward(tensors, True))
        ctx.operation = operation
        ctx.save_for_backward(*tensors, *kept)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        tensors, kept = _saved(ctx)
        if torch.is_grad_enabled() or transformed():  # a further derivative is wanted, or a batch of gradients
            return None, *torch.func.vjp(ctx.operation.in_torch, *tensors)[1](grads)
        with torch._C._AutoDispatchBelowAutograd():
            return None, *ctx.operation.backward(grads, tensors, kept, ctx.needs_input_grad[1:])


def _saved(ctx: Any) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """What was saved for an operation: its tensors and what it keeps."""
    saved, count = ctx.saved_tensors, ctx.operation.count
    return saved[:count], saved[count:]


def split(L: int, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Weights, biases and what follows."""
    return list(tensors[:L]), list(tensors[L : 2 * L]), list(tensors[2 * L :])


def empty_like(*tensors: Tensor) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in tensors]


def known_of(activation: int, outputs: list[Tensor], before: list[Tensor]) -> list[Tensor]:
    """What the slope of the activation is computed from: nothing, the outputs, or for sin the values before it."""
    return before if ACTIVATIONS[activation] == "sin" else outputs if activation else []


def widths_of(weights: Sequence[Tensor]) -> list[int]:
    return [weights[0].shape[-1], *(w.shape[-2] for w in weights)]


def space_of(weights: Sequence[Tensor], taps: Sequence[int] | int = 1) -> WeightSpace:
    """The space of the weights with hidden widths left open: no table depends on them, and they may be symbolic."""
    return WeightSpace((int(weights[0].shape[-1]), *(None,) * (len(weights) - 1), int(weights[-1].shape[-2])), taps)


def shares_Wb(weights: Sequence[Tensor], biases: Sequence[Tensor], readout: Tensor) -> bool:
    """Whether [Wb] has one coefficient for all t, by the columns of the last matrix."""
    L, n_0, n_L, d = len(weights), int(weights[0].shape[-1]), int(weights[-1].shape[-2]), int(biases[0].shape[1])
    return L > 2 and int(readout.shape[1]) == d * (3 * n_L * n_0 + 2 * n_L + 2 * (L - 1)) + 1


@dataclass(frozen=True)
class Equivariant:
    """tensors: weights, biases, matrices, psi. The operator returns its outputs, what the backward pass needs of the
    chains (`num_factors` tensors), and for sin the values before it."""

    num_factors: ClassVar[int]
    L: int
    out_channels: int
    activation: int

    @property
    def inputs(self) -> int:
        return 2 * self.L

    @property
    def count(self) -> int:
        return 4 * self.L + 1

    def keep(self, results: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        outputs, rest = results[: 2 * self.L], results[2 * self.L :]
        factors, before = rest[: self.num_factors], rest[self.num_factors :]
        return outputs, [*factors, *known_of(self.activation, outputs, before)]

    def in_torch(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        weights, biases, (*matrices, psi) = split(self.L, tensors)
        space = space_of(weights)
        d, shared = int(biases[0].shape[1]), shares_Wb(weights, biases, matrices[-1])
        table = equivariant_table(space, space.taps, d, self.out_channels, GROUPS["all"], shared)
        outputs = factored.equivariant(table, weights, biases, matrices, psi, ACTIVATIONS[self.activation])
        return *outputs[0], *outputs[1]


@dataclass(frozen=True)
class Invariant:
    """tensors: weights, biases, matrix, psi. The operator returns its output and what the backward pass needs."""

    L: int

    @property
    def inputs(self) -> int:
        return 2 * self.L

    @property
    def count(self) -> int:
        return 2 * self.L + 2

    def keep(self, results: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        return results[:1], results[1:]

    def in_torch(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        weights, biases, (matrix, psi) = split(self.L, tensors)
        d, shared = int(biases[0].shape[1]), shares_Wb(weights, biases, matrix)
        table = invariant_table(space_of(weights), d, int(matrix.shape[0]), GROUPS["all"], shared)
        return (factored.invariant(table, weights, biases, matrix, psi),)


def second_derivative(
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


def register_layer(
    name: str,
    operation_of: Callable[..., Operation],
    operation_of_backward: Callable[..., Operation],
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
        ctx.rest, ctx.shapes = len(leaves) - ctx.operation.count, [y.shape for y in outputs]
        ctx.set_materialize_grads(False)  # what is kept is large and would get gradients of zeros
        ctx.save_for_backward(*leaves[: ctx.operation.count], *kept)

    def backward(ctx: Any, grads: list[Tensor | None]) -> tuple:
        tensors, kept = _saved(ctx)
        pairs = zip(grads, ctx.shapes, strict=False)
        of_outputs = [tensors[0].new_zeros(shape) if grad is None else grad for grad, shape in pairs]
        found = ctx.operation.backward(of_outputs, tensors, kept, [True] * len(tensors))
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
        by_grads, by_inputs = second_derivative(ctx.operation.in_torch, tensors, grads, seeds)
        return tree_unflatten([*by_grads, *by_inputs, *[None] * ctx.rest], ctx.structure)

    torch.library.register_fake(f"magep_fast::{name}", fake)
    torch.library.register_fake(f"magep_fast::{name}_backward", fake_backward)
    torch.library.register_autograd(f"magep_fast::{name}", backward, setup_context=save)
    torch.library.register_autograd(f"magep_fast::{name}_backward", double_backward, setup_context=save_backward)
