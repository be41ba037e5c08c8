"""What is Triton's own about its kernels: tiles, autotuning, halves of a batch, operators. See test_gpu.py."""

import pytest
import torch
from torch.library import opcheck

from magep_fast import MagepEquivariant, MagepInvariant, use_backend
from tests.gpu import (
    EXACT,
    MISSING,
    NEEDS_A_GPU,
    ON_HOST,
    assert_exact,
    derivatives,
    errors,
    exact_derivatives,
    made,
    make_case,
)

pytestmark = pytest.mark.gpu
if MISSING["triton"] is not None:
    pytest.skip(MISSING["triton"], allow_module_level=True)

from magep_fast.triton_kernels import launch  # noqa: E402

only_on_a_gpu = pytest.mark.skipif(ON_HOST, reason=NEEDS_A_GPU)
every_layer = pytest.mark.parametrize("kind", [MagepEquivariant, MagepInvariant])


@pytest.fixture(autouse=True)
def on_triton(clean_state):
    with use_backend("triton"):
        yield


@every_layer
def test_layers_larger_than_tiles(kind, monkeypatch):
    tiles = launch.Config(e=16, j=16, k=16, short=8, long=16, r=16, y=16, z=2, n=16)
    monkeypatch.setattr(launch, "default_config", lambda problem: tiles)
    assert_exact(*made(make_case((2, 18, 17, 2), 1, 1, 17), kind))


def test_every_candidate_of_autotuning_computes_the_same(monkeypatch):
    layer, features = made(make_case((1, 3, 2, 1), 1, 1, 2), MagepEquivariant)
    problem = launch.Problem(1, 1, 2, (1, 3, 2, 1), EXACT)
    for config in launch.candidates(problem):
        monkeypatch.setattr(launch, "default_config", lambda problem, config=config: config)
        assert_exact(layer, features)


@only_on_a_gpu
@every_layer
def test_autotuned_results_agree_with_the_reference(kind, monkeypatch):
    monkeypatch.setenv(launch.AUTOTUNE_VARIABLE, "1")
    monkeypatch.setattr(launch, "_tuned", {})
    assert_exact(*made(make_case((2, 8, 8, 3), 4, 16, 16), kind))
    assert len(launch._tuned) == 2  # forward and backward


def test_halves_of_a_batch(monkeypatch):
    monkeypatch.setattr(launch, "CACHE", 0)
    layer, features = made(make_case((2, 3, 2, 1), 3, 1, 2), MagepEquivariant)
    assert len(launch.chunks_of(launch.Problem(3, 1, 2, (2, 3, 2, 1), EXACT))) == 2
    assert_exact(layer, features)


def operator_arguments(kind, requires_grad):
    layer, features = made(make_case((2, 3, 2), 1, 2, 2), kind, torch.float32)
    matrices = [getattr(layer, output.name) for output in layer.table.outputs]
    weights, biases, matrices, (psi,) = (
        [x.detach().clone().requires_grad_(requires_grad) for x in group]
        for group in (features.weights, features.biases, matrices, [layer.psi])
    )
    return weights, biases, matrices, psi


def test_operators_are_registered_completely():
    ops = torch.ops.magep_fast
    weights, biases, matrices, psi = operator_arguments(MagepEquivariant, True)
    opcheck(ops.triton_equivariant.default, (weights, biases, matrices, psi, 2, 2, True))
    opcheck(ops.triton_chain.default, (weights, biases))
    weights, biases, (matrix,), psi = operator_arguments(MagepInvariant, True)
    opcheck(ops.triton_invariant.default, (weights, biases, matrix, psi))


@pytest.mark.parametrize(
    ("position", "index", "change", "message"),
    [
        (0, 1, lambda x: x[..., 1:], r"weights\[1\] must have shape \[1, 2, 2, 3\]"),
        (0, 0, lambda x: x[0], r"weights\[0\] must have rank 4; found 3"),
        (1, 0, lambda x: x.half(), r"biases\[0\] .* dtype torch.float32 .*; found .* dtype torch.float16"),
        (2, 0, lambda x: x[:, 1:], r"matrices\[0\] must have shape"),
        (0, None, lambda x: x[:-1], "as many weights as biases"),
        (2, None, lambda x: x[:-1], "expected 4 matrices; found 3"),
        (3, None, lambda x: x[1:], "psi must have shape"),
    ],
)
def test_operators_refuse(position, index, change, message):
    given = list(operator_arguments(MagepEquivariant, False))
    if index is None:
        given[position] = change(given[position])
    else:
        given[position] = list(given[position])
        given[position][index] = change(given[position][index])
    with pytest.raises(RuntimeError, match=f"magep_fast::triton_equivariant: .*{message}"):
        torch.ops.magep_fast.triton_equivariant(*given, 2, 0, False)


@only_on_a_gpu
def test_tf32_is_used_only_where_torch_allows_it():
    layer, features = made(make_case((2, 40, 40, 3), 4, 32, 32), MagepEquivariant, torch.float32)
    exact = exact_derivatives(layer, features)
    plain = max(errors(derivatives(layer, features), exact))
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        allowed = max(errors(derivatives(layer, features), exact))
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert plain < 1e-5 < allowed < 1e-2
