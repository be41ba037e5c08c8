"""Steps of training as one call: forward, loss, backward and optimizer, fused where that can be done."""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import chain
from operator import is_
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

from magep_fast import ops
from magep_fast.ops.operations import ALIGNMENT, LOSSES, AdamState, AdamStep, UpdatingOperation
from magep_fast.spaces import WeightFeatures
from magep_fast.stack import AsOne, Stack

_MODULES_OF_ADAM = ("torch.optim.adam", "torch.optim.adamw")
_LOSSES = [(name, getattr(nn.functional, name)) for name in LOSSES]
_COUNTERS = (torch.float32, torch.float64)  # what it counts steps in
_NAMES = ("step", "exp_avg", "exp_avg_sq")  # of what Adam keeps for each parameter


class TrainingStep:
    """`step(features, targets)` trains the model on one batch and returns the loss, detached.

    It does what these lines do, up to rounding:

        value = loss(model(features), targets)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()

    If the model is a `Stack` all of whose layers run together on the `cpu` backend, and the optimizer is Adam or AdamW,
    the backward pass and the optimizer are one operator: each layer's parameters are updated as soon as their gradients
    are known, which are still in cache then and never become tensors. `.grad` of the parameters is None afterwards.
    With `torch.nn.functional.binary_cross_entropy` or `mse_loss` as the loss, all of the step is that one operator, and
    so are the steps on many batches, see `train`. The optimizer's state is kept as torch keeps it, so that
    `optimizer.state_dict()`, schedulers of the learning rate and ordinary steps in between work as ever.

    Steps are taken in the ordinary way where that could be told apart or cannot be done: with hooks on modules,
    parameters or the optimizer, where a `Stack` would run layer by layer, for features or fewer than all parameters
    that require gradients, with several groups of parameters, `amsgrad`, `maximize`, `capturable` or `differentiable`.

    Args:
        model: called with the features.
        loss: of the model's outputs and the targets, a scalar.
        optimizer: of the model's parameters. A class derived from Adam that has a `step` of its own, which does what
            that of Adam does, says so by an attribute `steps_like_adam = True`; otherwise its `step` is called.
    """

    def __init__(self, model: nn.Module, loss: Callable[[Any, Any], Tensor], optimizer: torch.optim.Optimizer):
        self.model, self.loss, self.optimizer = model, loss, optimizer

    def __call__(self, features: Any, targets: Any) -> Tensor:
        # Little Python: this runs at every step, when the kernels have left nothing of the interpreter in the caches.
        fused = self._fused(features)
        if fused is not None:
            losses = self._train(fused, fused.whole.inputs, targets, None, features.batch_size)
            value = losses[0] if len(losses) else self._update(fused, targets)
            if value is not None:
                return value
        return self._ordinary(features, targets)

    def train(self, features: WeightFeatures | Tensor, targets: Tensor, order: Tensor, batch_size: int) -> Tensor:
        """One step after the other on batches of a data set; their losses, [number of batches], detached.

        Where a step would be one operator, all of them are: between two steps no Python runs, and of contiguous
        features only the networks of a batch are copied. Steps before a batch for which the loss is an error are taken.
        Python sees Ctrl-C when the operator returns, so give it as many steps at a time as you would wait for.

        Args:
            features, targets: of the whole data set, a row of each tensor for each sample.
            order: indices of samples, a tensor of one dimension: a batch is `batch_size` of them that follow one
                another, the last of what is left. `torch.randperm(len(targets))` for an epoch.
            batch_size: at least 1.
        """
        samples = features.batch_size if isinstance(features, WeightFeatures) else len(features)
        order = _checked_order(order, samples)
        if len(targets) != samples:
            raise ValueError(f"expected targets for each of the {samples} samples; found {len(targets)}")
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1; found {batch_size}")
        losses = []
        together = True
        while len(order):
            index = order[:batch_size]
            batch, wanted = _rows(features, index), targets.index_select(0, index)
            fused = self._fused(batch)
            taken = torch.empty(0)
            if fused is not None and together and isinstance(features, WeightFeatures):
                taken = self._train(fused, features.tensors(), targets, order, batch_size)
                together = len(taken) > 0  # what is refused once is not asked for again
            if not len(taken):
                value = None if fused is None else self._update(fused, wanted)
                taken = (self._ordinary(batch, wanted) if value is None else value).reshape(1)
            losses.append(taken)
            order = order[len(taken) * batch_size :]
        return torch.cat(losses) if losses else torch.empty(0, dtype=features.dtype, device=features.device)

    def _ordinary(self, features: Any, targets: Any) -> Tensor:
        value = self.loss(self.model(features), targets)
        self.optimizer.zero_grad()
        value.backward()
        self.optimizer.step()
        return value.detach()

    def _fused(self, features: Any) -> _Fused | None:
        """How steps on batches like this one are fused, or None if they are to be ordinary ones."""
        model, optimizer = self.model, self.optimizer
        if type(model) is not Stack or not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
            return None
        if not torch.is_grad_enabled() or torch.is_anomaly_enabled() or not _is_plain(optimizer):
            return None
        whole = model.as_one(features)
        operation = None if whole is None else ops.updating(whole.operation)
        if whole is None or operation is None or not _all_are_trained(whole):
            return None
        state = _state_of(optimizer, whole.parameters)
        step = None if state is None else state.next_step(optimizer.param_groups[0])
        if state is None or step is None:
            return None
        return _Fused(whole, operation, state.tensors, step)

    def _train(
        self,
        fused: _Fused,
        inputs: tuple[Tensor, ...],
        targets: Any,
        order: Tensor | None,
        batch_size: int,
    ) -> Tensor:
        """The losses of the steps that one operator has taken: all, or those before a batch that it does not take."""
        name = _known_loss(self.loss)
        if name is None or type(targets) is not Tensor or targets.requires_grad:
            return torch.empty(0)
        try:
            losses = ops.stack_train(
                fused.operation,
                (*inputs, *fused.whole.parameters),
                targets,
                order,
                batch_size,
                name,
                fused.state,
                fused.step,
            )
        except RuntimeError:  # what is wrong with the targets, or that they are broadcast, torch says
            return torch.empty(0)
        if len(losses):
            _clear_gradients(fused.whole)
            self.optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers ask whether there was a step
        return losses

    def _update(self, fused: _Fused, targets: Any) -> Tensor | None:
        """The loss after a step of which the backward pass and Adam are one operator, or None if it cannot be one."""
        whole, operation = fused.whole, fused.operation
        tensors = (*whole.inputs, *whole.parameters)
        try:
            outputs, kept = ops.stack_forward(operation, tensors)
        except RuntimeError:  # tensors that have changed their dtype or device since: the layers say it better
            return None
        for output in outputs:
            output.requires_grad_()
        # Copies, as a loss may change its argument in place.
        value = self.loss(whole.result([output.clone() for output in outputs]), targets)
        _clear_gradients(whole)
        value.backward()
        grads = [torch.zeros_like(output) if output.grad is None else output.grad for output in outputs]
        reached = any([output.grad is not None for output in outputs])
        if reached and all([parameter.grad is None for parameter in whole.parameters]):
            ops.stack_update(operation, grads, tensors, kept, fused.state, fused.step)
            self.optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers ask whether there was a step
            return value.detach()
        # The loss has used parameters by itself, as a penalty on their size does, or nothing but them.
        if reached:
            for parameter, grad in zip(
                whole.parameters, ops.stack_backward(operation, grads, tensors, kept), strict=True
            ):
                parameter.grad = grad if parameter.grad is None else parameter.grad + grad
        self.optimizer.step()
        return value.detach()


class _Fused(NamedTuple):
    """What a fused step takes besides features and targets; the inputs of `whole` are those of one batch."""

    whole: AsOne
    operation: UpdatingOperation
    state: AdamState
    step: AdamStep


def _checked_order(order: Tensor, samples: int) -> Tensor:
    """As int64. An error unless it names samples."""
    if not isinstance(order, Tensor) or order.dtype not in (torch.int32, torch.int64) or order.dim() != 1:
        found = f"{order.dtype} of shape {list(order.shape)}" if isinstance(order, Tensor) else type(order).__name__
        raise TypeError(f"order must be a tensor of indices of one dimension, int64; found {found}")
    if len(order):
        low, high = (x.item() for x in order.aminmax())
        if low < 0 or high >= samples:
            raise IndexError(f"order must name samples 0 to {samples - 1}; found {low if low < 0 else high}")
    return order.long()


def _rows(features: WeightFeatures | Tensor, index: Tensor) -> WeightFeatures | Tensor:
    def rows(x: Tensor) -> Tensor:
        return x.index_select(0, index)

    return features.map(rows) if isinstance(features, WeightFeatures) else rows(features)


def _known_loss(loss: object) -> str | None:
    """The name of a loss that the operator computes itself."""
    for name, known in _LOSSES:
        if loss is known:
            return name
    return None


def _clear_gradients(whole: AsOne) -> None:
    for parameter in whole.parameters:
        parameter.grad = None


def _is_plain(optimizer: torch.optim.Adam) -> bool:
    """Whether a step of the optimizer is one of Adam or AdamW on one group of parameters that nobody watches."""
    step = vars(optimizer).get("step")  # a scheduler wraps it to see that it is called
    if step is not None and getattr(step, "__wrapped__", None) is not type(optimizer).step:
        return False
    if type(optimizer).step.__module__ not in _MODULES_OF_ADAM and not getattr(optimizer, "steps_like_adam", False):
        return False
    if (
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or torch_optimizer._global_optimizer_pre_hooks
        or torch_optimizer._global_optimizer_post_hooks
        or len(optimizer.param_groups) != 1
    ):
        return False
    group = optimizer.param_groups[0]
    return not (group["amsgrad"] or group["maximize"] or group["capturable"] or group["differentiable"])


def _all_are_trained(whole: AsOne) -> bool:
    """Whether gradients of all parameters and of nothing else are wanted, and nobody looks at them."""
    for x in whole.inputs:
        if x.requires_grad:
            return False
    for parameter in whole.parameters:
        if (
            not parameter.requires_grad
            or parameter._backward_hooks
            or parameter._post_accumulate_grad_hooks
            or not parameter.is_contiguous()
        ):
            return False
    return True


_states: WeakKeyDictionary[torch.optim.Optimizer, _State] = WeakKeyDictionary()


def _state_of(optimizer: torch.optim.Adam, parameters: list[Tensor]) -> _State | None:
    """The optimizer's state as the operator takes it, or None if it cannot be brought into that form."""
    state = _states.get(optimizer)
    if state is None or not state.is_current(optimizer, parameters):
        if not _can_be_taken(optimizer, parameters):
            return None
        state = _states[optimizer] = _State(optimizer, parameters)
    return state


def _can_be_taken(optimizer: torch.optim.Adam, parameters: list[Tensor]) -> bool:
    """Whether the parameters are those of the optimizer, none of them twice, and its state is what Adam makes."""
    group, first = optimizer.param_groups[0]["params"], parameters[0]
    if {*map(id, group)} != {*map(id, parameters)} or len({p.data_ptr() for p in parameters}) != len(parameters):
        return False
    for p in parameters:
        if type(p) is not nn.Parameter or p.dtype != first.dtype or p.device != first.device:
            return False
        entry = optimizer.state.get(p)
        if not entry:
            continue
        step, *moments = (entry.get(name) for name in _NAMES)
        if not isinstance(step, Tensor) or step.device.type != "cpu" or step.dim() or step.dtype not in _COUNTERS:
            return False
        for x in moments:
            if not isinstance(x, Tensor) or (x.shape, x.dtype, x.device) != (p.shape, p.dtype, p.device):
                return False
    return True


class _State:
    """What Adam keeps: means and squares of the gradients of all parameters in one tensor each, and how many steps each
    has made in a third. The optimizer's own state consists of views of them from then on."""

    @torch.no_grad()
    def __init__(self, optimizer: torch.optim.Adam, parameters: list[Tensor]):
        entries = [optimizer.state.get(p) or {} for p in parameters]
        sizes = [-(-p.numel() // ALIGNMENT) * ALIGNMENT for p in parameters]
        dtypes = [entry["step"].dtype for entry in entries if entry]
        self.tensors = AdamState(
            parameters[0].new_zeros(sum(sizes)),
            parameters[0].new_zeros(sum(sizes)),
            torch.zeros(len(parameters), dtype=dtypes[0] if dtypes else torch.float32),
        )
        views: dict[Tensor, dict[str, Tensor]] = {}
        begin = 0
        for k, (p, entry, size) in enumerate(zip(parameters, entries, sizes, strict=True)):
            mean, square = (x[begin : begin + p.numel()].view(p.shape) for x in self.tensors[:2])
            views[p] = dict(zip(_NAMES, (self.tensors.steps[k], mean, square), strict=True))
            for name, view in views[p].items():
                if entry:
                    view.copy_(entry[name])
            begin += size
        self.parameters, self.shapes = list(parameters), [p.shape for p in parameters]
        self.group = list(optimizer.param_groups[0]["params"])
        for p in self.group:  # in the order in which torch would
            optimizer.state[p].update(views[p])
        self.entries = list(optimizer.state.values())
        self.own = [optimizer.state[p] for p in parameters]
        self.views = self._tensors()

    def _tensors(self) -> list[object]:
        """What the optimizer's state has for the parameters."""
        return [*chain.from_iterable(map(dict.values, self.own))]

    def is_current(self, optimizer: torch.optim.Adam, parameters: list[Tensor]) -> bool:
        """Whether these are still the parameters, and the optimizer's state still consists of views."""
        return (
            _same(parameters, self.parameters)
            and _same(optimizer.param_groups[0]["params"], self.group)
            and _same(optimizer.state.values(), self.entries)
            and _same(self._tensors(), self.views)
            and [p.shape for p in parameters] == self.shapes
            and parameters[0].dtype == self.tensors.means.dtype
        )

    def next_step(self, group: dict[str, Any]) -> AdamStep | None:
        """The step to take now, or None if it is not the same for all parameters or not made of numbers."""
        done, lr, (beta1, beta2) = self.tensors.steps.tolist(), group["lr"], group["betas"]
        if done.count(done[0]) != len(done) or isinstance(beta1, Tensor) or isinstance(beta2, Tensor):
            return None
        if isinstance(lr, Tensor):
            if lr.device.type != "cpu":
                return None
            lr = lr.item()
        decoupled = group["decoupled_weight_decay"]
        return AdamStep(lr, beta1, beta2, group["eps"], group["weight_decay"], decoupled)


def _same(found: Collection[object], known: Collection[object]) -> bool:
    return len(found) == len(known) and all(map(is_, found, known))
