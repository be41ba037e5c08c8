"""What the tests of the GPU kernels share: where they run and how results are judged.

On a GPU where there is one; else `triton` runs in Triton's interpreter (TRITON_INTERPRET=1) and `cuda` on the host
(tests/test_cuda_on_host.py).
"""

import os
from copy import deepcopy

import torch

from magep_fast import WeightSpace, use_backend
from magep_fast.ops import backends, triton
from tests.helpers import Case, assert_same, tensors_of
from tests.interpreter import quicken

ON_HOST = triton.interpreted() or "MAGEP_CUDA_ON_HOST" in os.environ
if triton.interpreted():
    quicken()
DEVICE, EXACT, TOLERANCE = (
    (torch.device("cpu"), torch.float64, 1e-10) if ON_HOST else (torch.device("cuda"), torch.float32, 1e-4)
)
"""The interpreter and the host compute in float64, a GPU with `triton` in float32 at best."""

MISSING = {name: backends._backends[name].missing() for name in ("triton", "cuda")}
BACKENDS = [name for name, reason in MISSING.items() if reason is None]
NEEDS_A_GPU = "needs a GPU: here kernels run on the CPU"


def make_case(widths, batch_size=2, in_channels=2, out_channels=3):
    return Case(WeightSpace(widths), batch_size, in_channels, out_channels, frozenset({"all"}), seed=0)


def made(case, kind, dtype=EXACT, **options):
    """Layer and features of a case on the device."""
    return case.layer(kind, dtype, **options).to(DEVICE), case.features(dtype).to(DEVICE)


def derivatives(layer, features, seeds=None):
    """Outputs and gradients by all features and parameters, from seeds or from fixed numbers."""
    features = features.map(lambda x: x.detach().requires_grad_())
    outputs = tensors_of(layer(features))
    if seeds is None:
        generator = torch.Generator().manual_seed(1)
        seeds = [torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y) for y in outputs]
    return *outputs, *torch.autograd.grad(outputs, (*features.tensors(), *layer.parameters()), seeds)


def exact_derivatives(layer, features):
    """The same by the reference in float64 on the CPU."""
    with use_backend("reference"):
        return derivatives(deepcopy(layer).cpu().double(), features.to("cpu").to(torch.float64))


def errors(found, exact):
    """The largest error of each tensor, relative to its largest magnitude."""
    for x, y in zip(found, exact, strict=True):
        assert x.shape == y.shape
        difference = (x.cpu().double() - y).abs()
        yield (difference.max() / y.abs().max()).item() if y.numel() and y.any() else x.abs().sum().item()


def assert_exact(layer, features):
    assert max(errors(derivatives(layer, features), exact_derivatives(layer, features))) <= TOLERANCE


def assert_captured_in_a_graph(layer, features):
    """Forward and backward, captured once and replayed, give what plain calls give."""
    seeds = [torch.ones_like(y) for y in tensors_of(layer(features))]
    for _ in range(3):
        expected = derivatives(layer, features, seeds)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = derivatives(layer, features, seeds)
    graph.replay()
    for x, y in zip(found, expected, strict=True):
        assert_same(x, y)
