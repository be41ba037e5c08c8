"""The layers: modules from features to features, and from features to invariants."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

import torch
from torch import Tensor, nn

from magep_fast import ops
from magep_fast.activations import FUNCTIONS
from magep_fast.ops.autocast import autocast_dtype
from magep_fast.ops.backends import check_backend
from magep_fast.spaces import WeightFeatures, WeightSpace
from magep_fast.symmetry import KINDS, Kind
from magep_fast.terms import GROUPS, NAMES, Table, equivariant_table, initialise, invariant_table, select_terms


class _PolynomialLayer(nn.Module):
    """Parameters of a table: one matrix per output, and the connections `psi`."""

    psi: nn.Parameter | None
    activation: str | None = None
    _accepted: list[object] | None = None  # the signature of the last features that were checked

    def __init__(
        self,
        table: Table,
        learn_psi: bool,
        init: str,
        backend: str,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ):
        super().__init__()
        self.table = table
        self.init = init
        self.backend = check_backend(backend)
        for output in table.outputs:
            self.register_parameter(output.name, nn.Parameter(torch.empty(output.shape, device=device, dtype=dtype)))
        if table.pairs:
            self.psi = nn.Parameter(torch.empty(table.psi_shape, device=device, dtype=dtype), learn_psi)
        else:
            self.register_parameter("psi", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws all parameters anew, as `init` says."""
        initialise(self.table, self._matrices(), self.psi, self.init)

    def connection(self, kind: Literal["WW", "bW"], s: int, t: int) -> Tensor:
        """Ψ^(s,t) `[d, n_0, n_L]` for "WW", ψ^(s,t) `[d, n_L]` for "bW": a view of the parameter `psi`."""
        views = {} if self.psi is None else self.table.connections(self.psi)
        if (kind, s, t) not in views:
            raise KeyError(f"no connection {(kind, s, t)}; there are {list(views)}")
        return views[kind, s, t]

    def _matrices(self) -> list[Tensor]:
        return [getattr(self, output.name) for output in self.table.outputs]

    def _coefficient(self, index: int, term: str) -> Tensor:
        return self.table.outputs[index].coefficient(self._matrices()[index], term)

    def _check(self, features: WeightFeatures) -> None:
        """Raises unless the layer can take the features; those shaped as at the call before are known to be good."""
        # Where calls are traced, sizes need not be numbers.
        traced = torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined]
        signature = None if traced else self._signature(features)
        if signature is None:
            self._check_all(features)
        elif signature != self._accepted:
            self._check_all(features)
            self._accepted = signature

    def _signature(self, features: WeightFeatures) -> list[object] | None:
        """All that `_check_all` looks at, or None for what is worth a full check: no features, or tensors of a
        subclass, whose sizes may be symbolic."""
        if not isinstance(features, WeightFeatures):
            return None
        parameter = getattr(self, self.table.outputs[0].name)
        signature: list[object] = [len(features.weights), parameter.dtype, parameter.device]
        for x in features.tensors():
            if type(x) is not Tensor and type(x) is not nn.Parameter:
                return None
            signature += (x.shape, x.dtype, x.device)
        return [*signature, autocast_dtype(features)] if features.biases else None

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "_accepted"}

    def _check_all(self, features: WeightFeatures) -> None:
        if not isinstance(features, WeightFeatures):
            raise TypeError(f"{type(self).__name__} takes WeightFeatures; found {type(features).__name__}")
        features.check(self.table.space, self.table.in_channels)
        parameter = getattr(self, self.table.outputs[0].name)
        if features.device != parameter.device:
            raise ValueError(f"features are on {features.device} but the layer is on {parameter.device}: move one")
        cast = autocast_dtype(features) is not None and parameter.dtype != torch.float64
        if features.dtype != parameter.dtype and not cast:
            other_way = f" or layer.to({features.dtype})" if features.dtype.is_floating_point else ""
            raise ValueError(
                f"features are {features.dtype} but the layer's parameters are {parameter.dtype}: "
                f"use features.to({parameter.dtype}){other_way}"
            )

    def extra_repr(self) -> str:
        table = self.table
        parts = [str(table.space), f"{table.in_channels} -> {table.out_channels}"]
        if set(table.out_taps) != {1}:
            parts.append(f"out_taps={table.out_taps}")
        group = next((repr(name) for name, names in GROUPS.items() if names == table.terms), None)
        parts.append(f"terms={group or '{' + ', '.join(name for name in NAMES if name in table.terms) + '}'}")
        if table.share_Wb:
            parts.append("share_Wb=True")
        if self.psi is not None and not self.psi.requires_grad:
            parts.append("learn_psi=False")
        if self.backend != "auto":
            parts.append(f"backend={self.backend!r}")
        return ", ".join(parts)


class MagepEquivariant(_PolynomialLayer):
    """E(U): features in, features of the same space out, equivariant to the group of the space.

    Args:
        space: of the features; hidden widths do not matter to the parameters.
        in_channels, out_channels: d and e.
        terms: "all", "linear" (Monomial-NFN), "inter-layer", or any set of term names, such as `{"W", "b", "WW"}`. An
            output that has none of the chosen terms is zero.
        share_Wb: one coefficient of [Wb]^(i,t)(t) for all t, as the authors' code and the paper's parameter counts have
            it, instead of one for each t, as the paper's formulas have it.
        activation: applied to the layer's outputs and fused into its kernels: "relu" for features scaled by positive
            numbers, "tanh" or "sin" for features whose signs flip. For any other function follow with `Activation`.
        learn_psi: whether the connections Ψ, ψ inside [WW] and [bW] are trained.
        init: "unit" keeps features at the scale of freshly initialised networks (weights of variance 1/n_(i-1), biases
            of variance 1) for any depth; "xavier_normal" is the authors' choice.
        backend: "auto" or the name of one.

    The parameters are packed, one matrix per output, `weight_1`, `bias_1`, …, `weight_L`, `bias_L`, and the connections
    `psi`; `coefficient` and `connection` give the paper's coefficients as views of them.
    """

    def __init__(
        self,
        space: WeightSpace,
        in_channels: int,
        out_channels: int,
        *,
        terms: str | Iterable[str] = "all",
        share_Wb: bool = False,
        activation: str | None = None,
        learn_psi: bool = True,
        init: str = "unit",
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        check_space(space)
        _check_channels(in_channels=in_channels, out_channels=out_channels)
        taps = (1,) * space.num_layers
        table = equivariant_table(space, taps, in_channels, out_channels, select_terms(terms), share_Wb)
        super().__init__(table, learn_psi, init, backend, device, dtype)
        self.activation = _check_fused(activation)

    def coefficient(self, term: str, layer: int, output: Literal["weight", "bias"] = "weight") -> Tensor:
        """The paper's coefficient of a term in the weights or the bias of a layer, 1 … L: a view `[e, d, …]`.

        Its axes are those of the einsum in the table of terms: `[e, d]` for any weight term of a middle layer,
        `[e, d, i − 1]`, one per t, for "Wb" in the bias of a hidden layer i (`[e, d, 1]` if shared), and so on.
        """
        return self._coefficient(self.table.output_index(f"{output}_{layer}"), term)

    def forward(self, features: WeightFeatures) -> WeightFeatures:
        """Weights `[B, d·taps_i, n_i, n_(i-1)]` and biases `[B, d, n_i]` in, the same with e channels out."""
        self._check(features)
        return ops.equivariant(self.table, features, self._matrices(), self.psi, self.activation, self.backend)

    def extra_repr(self) -> str:
        return super().extra_repr() + ("" if self.activation is None else f", activation={self.activation!r}")


class MonomialEquivariant(MagepEquivariant):
    """The linear equivariant layer (Monomial-NFN), and the one that changes taps: features with several weights per
    connection in or out.

    Args:
        space: of the features that come in.
        in_channels, out_channels: of the biases; weights have channels·taps.
        activation: as for `MagepEquivariant`.
        out_taps: weights per connection going out, default 1: from convolution kernels to a space where products of
            layers are defined. `MonomialEquivariant(space.with_taps(1), d, 1, out_taps=space.taps)` leads back.
    """

    def __init__(
        self,
        space: WeightSpace,
        in_channels: int,
        out_channels: int,
        *,
        out_taps: int | Iterable[int] = 1,
        activation: str | None = None,
        init: str = "unit",
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        check_space(space)
        _check_channels(in_channels=in_channels, out_channels=out_channels)
        taps = space.with_taps(out_taps).taps
        table = equivariant_table(space, taps, in_channels, out_channels, select_terms("linear"))
        _PolynomialLayer.__init__(self, table, False, init, backend, device, dtype)
        self.activation = _check_fused(activation)


class MagepInvariant(_PolynomialLayer):
    """I(U): features in, `[B, out_features]` out, invariant to the group of the space.

    Arguments as for `MagepEquivariant`. The parameters are the matrix `invariant` and the connections `psi`.
    """

    def __init__(
        self,
        space: WeightSpace,
        in_channels: int,
        out_features: int,
        *,
        terms: str | Iterable[str] = "all",
        share_Wb: bool = False,
        learn_psi: bool = True,
        init: str = "unit",
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        check_space(space)
        _check_channels(in_channels=in_channels, out_features=out_features)
        table = invariant_table(space, in_channels, out_features, select_terms(terms), share_Wb)
        super().__init__(table, learn_psi, init, backend, device, dtype)

    def coefficient(self, term: str) -> Tensor:
        """The paper's coefficient of a term: a view `[out_features, d, …]`."""
        return self._coefficient(0, term)

    def forward(self, features: WeightFeatures) -> Tensor:
        """Weights `[B, d, n_i, n_(i-1)]` and biases `[B, d, n_i]` in, `[B, out_features]` out."""
        self._check(features)
        return ops.invariant(self.table, features, self._matrices()[0], self.psi, self.backend)


class Activation(nn.Module):
    """An elementwise function applied to every weight and bias, refused if it does not respect the group.

    Args:
        function: e.g. `nn.ReLU()`, `torch.sin`.
        kind: the group to respect, "positive", "sign" or "permutation".
    """

    def __init__(self, function: Callable[[Tensor], Tensor], kind: Kind):
        super().__init__()
        check_activation(kind, function)
        self.function = function
        self.kind = kind

    def forward(self, features: WeightFeatures) -> WeightFeatures:
        return features.map(self.function)

    def extra_repr(self) -> str:
        name = "" if isinstance(self.function, nn.Module) else f"{_name(self.function)}, "
        return f"{name}kind={self.kind!r}"


_SUGGESTIONS = {
    "positive": "nn.ReLU(), nn.LeakyReLU(), nn.Identity() or torch.abs",
    "sign": "nn.Tanh(), torch.sin, nn.Softsign() or nn.Identity()",
}


def check_activation(kind: Kind, activation: Callable[[Tensor], Tensor]) -> None:
    """Raises ValueError unless f(λx) = λf(x) for the λ of the group: λ > 0 for "positive", λ = ±1 for "sign".

    Any elementwise function is accepted for "permutation". The function is probed, so it may be one of your own.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {KINDS}; found {kind!r}")
    if kind == "permutation":
        return
    x = torch.linspace(-5, 5, 401, dtype=torch.float64)[None, None]
    scales = (-1.0,) if kind == "sign" else (0.125, 0.5, 3.0, 16.0)
    probe = activation
    if isinstance(activation, nn.Module) and any(True for _ in activation.parameters()):
        parameter = next(activation.parameters())
        x = x.expand(1, parameter.numel(), -1) if parameter.dim() == 1 else x  # nn.PReLU: one slope per channel
        x = x.to(parameter.device, parameter.dtype)
    with torch.no_grad():
        for scale in scales:
            left, right = probe(scale * x), scale * probe(x)
            error = (left - right).abs()
            if left.shape != x.shape or not torch.all(error <= 1e-6 * (1 + right.abs())):
                group = "sign flips" if kind == "sign" else "positive scaling"
                where = int(error.flatten().nan_to_num(torch.inf).argmax()) if left.shape == x.shape else 0
                at = x.flatten()[where].item()
                raise ValueError(
                    f"{_name(activation)} does not respect {group}: f({scale:g}·x) should be {scale:g}·f(x) but at "
                    f"x = {at:.3g} it is {left.flatten()[where]:.3g}, not {right.flatten()[where]:.3g}. "
                    f"For kind={kind!r} use {_SUGGESTIONS[kind]}"
                )


def _name(function: Callable[[Tensor], Tensor]) -> str:
    if isinstance(function, nn.Module):
        return str(function)
    return getattr(function, "__name__", repr(function))


def _check_fused(activation: str | None) -> str | None:
    if activation is not None and activation not in FUNCTIONS:
        raise ValueError(
            f"activation must be None or one of {tuple(FUNCTIONS)}; found {activation!r}. "
            "For any other function let Activation(function, kind) follow the layer"
        )
    return activation


def check_space(space: WeightSpace) -> None:
    if not isinstance(space, WeightSpace):
        found = type(space).__name__
        raise TypeError(f"the space must be a WeightSpace, such as WeightSpace((1, 16, 10)); found {found}")


def _check_channels(**counts: int) -> None:
    for name, count in counts.items():
        if not isinstance(count, int) or count < 1:
            raise ValueError(f"{name} must be a positive int; found {count!r}")
