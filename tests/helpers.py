from contextlib import contextmanager
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from benchmarks.layers import backends_on
from magep_fast import MagepInvariant, MonomialEquivariant, WeightFeatures, WeightSpace, use_backend
from magep_fast.terms import NAMES

BACKENDS = tuple(backends_on(torch.device("cpu")))
"""Those that take CPU tensors as they are: not `triton`, whose own tests are in test_triton_kernels.py."""


def random_features(space, channels=2, batch_size=2, dtype=torch.float64):
    """Features at the scale of freshly initialised networks: weights of variance 1/fan-in, biases of variance 1."""
    weights, biases = [], []
    for n_in, n_out, taps in zip(space.widths, space.widths[1:], space.taps, strict=False):
        scale = (n_in * taps) ** -0.5
        weights.append(scale * torch.randn(batch_size, channels * taps, n_out, n_in, dtype=dtype))
        biases.append(torch.randn(batch_size, channels, n_out, dtype=dtype))
    return WeightFeatures(weights, biases)


def tensors_of(output):
    """The tensors of a layer's output, be it features or a tensor of invariants."""
    return output.tensors() if isinstance(output, WeightFeatures) else (output,)


@contextmanager
def threads(count):
    """Torch's, for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def assert_same(found, expected, tolerance=0.0):
    """Equal, up to a tolerance relative to each expected tensor's largest magnitude."""
    for x, y in zip(tensors_of(found), tensors_of(expected), strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
        scale = y.abs().max().item() if y.numel() else 0.0
        torch.testing.assert_close(x, y, rtol=0, atol=tolerance * scale, equal_nan=True)


def gradients(layer, features):
    """The layer's output, and a fixed linear functional's gradients by all inputs and parameters."""
    features = features.map(lambda x: x.detach().requires_grad_())
    inputs = (*features.tensors(), *layer.parameters())
    output = layer(features)
    loss = 0 * inputs[0].sum()  # an output without any of the chosen terms depends on nothing
    for x in tensors_of(output):
        loss = loss + (x * torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view(x.shape)).sum()
    return output, torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)


def runs_together(model, features):
    """Whether one node of autograd computes all of the model."""
    output = model(features)
    node = tensors_of(output)[0].grad_fn
    return {type(f).__name__ for f, _ in node.next_functions if f is not None} == {"AccumulateGrad"}


def assert_second_derivatives_are_those_of_torch_ops(layer, features, tolerance):
    features = features.map(lambda x: x.requires_grad_())
    inputs = (*features.tensors(), *layer.parameters())

    def second():
        loss = sum(x.square().sum() for x in tensors_of(layer(features)))
        first = torch.autograd.grad(loss, inputs, create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in first), inputs)

    found = second()
    with use_backend("torch"):
        expected = second()
    for x, y in zip(found, expected, strict=True):
        assert_same(x, y, tolerance)


@dataclass(frozen=True)
class Case:
    """An architecture, how many networks and channels, and what a layer on it is made of."""

    space: WeightSpace
    batch_size: int
    in_channels: int
    out_channels: int
    terms: frozenset
    seed: int
    out_taps: int | tuple[int, ...] = 1
    activation: str | None = None
    share_Wb: bool = False

    def features(self, dtype=torch.float64):
        torch.manual_seed(self.seed)
        return random_features(self.space, self.in_channels, self.batch_size, dtype)

    def layer(self, kind, dtype=torch.float64, **options):
        """A layer with no coefficient left at zero."""
        shared = {"terms": self.terms, "share_Wb": self.share_Wb}
        options |= {"out_taps": self.out_taps} if kind is MonomialEquivariant else shared
        options |= {"activation": self.activation} if kind is not MagepInvariant else {}
        layer = kind(self.space, self.in_channels, self.out_channels, dtype=dtype, **options)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        return layer


@st.composite
def cases(draw, taps=False):
    widths = draw(st.lists(st.integers(1, 6), min_size=2, max_size=7))
    counts = draw(st.lists(st.integers(1, 3), min_size=len(widths) - 1, max_size=len(widths) - 1)) if taps else 1
    return Case(
        WeightSpace(widths, counts),
        batch_size=draw(st.integers(0, 3)),
        in_channels=draw(st.integers(1, 4)),
        out_channels=draw(st.integers(1, 4)),
        terms=frozenset(draw(st.sets(st.sampled_from(NAMES), min_size=1) | st.just(set(NAMES)))),
        seed=draw(st.integers(0, 2**16)),
        share_Wb=draw(st.booleans()),
    )
