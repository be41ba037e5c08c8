"""What can be said of the backend `triton` without running a kernel."""

import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from benchmarks.compile import layer_launches
from benchmarks.layers import SHAPES, Shape
from magep_fast import MagepInvariant, WeightSpace, info
from magep_fast.ops import triton
from magep_fast.ops.backends import choose_backend
from tests.helpers import random_features

CPU, CUDA, GPU = torch.device("cpu"), torch.device("cuda"), torch.device("cuda", 0)
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def test_missing_triton_is_explained(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert triton.find_missing() == "triton is not installed; run pip install triton"


@needs_triton
def test_missing_gpu_is_explained(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "torch sees no GPU" in triton.find_missing()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert triton.find_missing() is None


def test_import_does_not_start_cuda():
    code = (
        "import torch\n"
        "def started(): raise AssertionError('CUDA was started')\n"
        "torch.cuda.is_available = torch.cuda.init = started\n"
        "import magep_fast"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(
    ("interpret", "device", "dtype", "reason"),
    [
        ("0", CUDA, torch.float32, None),
        ("0", CUDA, torch.bfloat16, None),
        ("0", CUDA, torch.float64, "it computes in float32, bfloat16, float16"),
        ("0", CPU, torch.float32, "GPU tensors only"),
        ("1", CPU, torch.float64, None),
        ("1", CPU, torch.int64, "it computes in float64, float32, bfloat16, float16"),
        ("1", CUDA, torch.float32, "runs on CPU tensors"),
    ],
)
def test_unsupported_tensors_are_explained(monkeypatch, interpret, device, dtype, reason):
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    found = triton.unsupported(device, dtype)
    assert found is None if reason is None else reason in found


def test_a_cpu_tensor_outside_the_interpreter_is_a_clear_error(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(triton, "_missing", triton.find_missing())
    space = WeightSpace((2, 3, 2))
    layer = MagepInvariant(space, 2, 1, backend="triton")
    with pytest.raises(
        RuntimeError, match=r"backend 'triton' cannot take torch\.float32 tensors on cpu: .*TRITON_INTERPRET"
    ):
        layer(random_features(space, dtype=torch.float32))


@pytest.mark.parametrize("interpret", ["0", "1"])
def test_auto_never_chooses_it_for_cpu_tensors(interpret):
    environment = {**os.environ, "TRITON_INTERPRET": interpret}
    run = subprocess.run(
        [sys.executable, "-m", "magep_fast.info"], capture_output=True, text=True, timeout=120, env=environment
    )
    assert run.returncode == 0, run.stderr
    assert re.search(r"^auto on cpu, float32   (cpu|torch)$", run.stdout, re.MULTILINE)


def test_auto_on_gpu_tensors_falls_back_with_a_reason(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(triton, "_missing", triton.find_missing())
    assert choose_backend("auto", CUDA, torch.float64).name == "torch"
    report = info.report()
    assert "auto on cuda, float64   torch (triton: it computes in float32, bfloat16, float16; cuda: " in report


def test_report_says_why_it_does_not_run(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(triton, "interpreted", lambda: False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(triton, "_missing", triton.find_missing())
    assert "  triton      missing: torch sees no GPU" in info.report()


@needs_triton
@pytest.mark.parametrize("activation", [None, "sin"])
@pytest.mark.parametrize("L", [2, 3, 4, 8, 12])
def test_launches_do_not_depend_on_the_number_of_layers(L, activation):
    for batch_size, backward in ((2, 5), (100_000, 8)):  # a large batch goes backward in two halves
        shape = Shape("any", (3, *(5,) * (L - 1), 2), 4, batch_size)
        equivariant = layer_launches("equivariant", shape, torch.float32, activation)
        assert len(equivariant["forward"]) == 3 and len(equivariant["backward"]) == backward
        invariant = layer_launches("invariant", shape, torch.float32)
        assert len(invariant["forward"]) == 2 and len(invariant["backward"]) == 4


def problem_of(shape, dtype):
    from magep_fast.triton_kernels.launch import Problem

    return Problem(shape.batch_size, shape.channels, shape.channels, shape.widths, dtype)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_default_configuration_is_the_table_s(shape, dtype):
    from magep_fast.triton_kernels import launch

    problem = problem_of(shape, dtype)
    known = launch.DEFAULTS[launch.config_key(problem)]
    config = launch.default_config(problem)
    assert tuple(getattr(config, name) for name in launch._FIELDS) == known
    assert launch.choose_config("equivariant", problem, lambda config: 1 / 0, CPU) == config
    assert launch.choose_config("equivariant", problem, lambda config: 1 / 0, CUDA) == config


@pytest.fixture
def tuning(monkeypatch):
    """Autotuning as on a GPU, with times made up: the last candidate is the fastest, the first is too large."""
    import triton
    from magep_fast.triton_kernels import launch

    measured = []

    def do_bench(function, return_mode):
        function()
        if len(measured) % len(launch.candidates(problem_of(SHAPES["c"], torch.float32))) == 1:
            raise triton.runtime.errors.OutOfResources(1, 0, "shared memory")
        return -len(measured)

    monkeypatch.setenv(launch.AUTOTUNE_VARIABLE, "1")
    monkeypatch.setattr(launch, "_tuned", {})
    monkeypatch.setattr(triton.testing, "do_bench", do_bench)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return launch, measured


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autotuning_takes_the_fastest_once(tuning, dtype):
    launch, measured = tuning
    problem = problem_of(SHAPES["c"], dtype)
    candidates = launch.candidates(problem)
    assert launch.default_config(problem) in candidates and len(set(candidates)) == len(candidates) > 5
    for _ in range(2):
        assert launch.choose_config("equivariant", problem, measured.append, GPU) == candidates[-1]
    assert measured == candidates


@needs_triton
def test_autotuning_tells_passes_devices_and_dtypes_apart(tuning):
    launch, measured = tuning
    for name, dtype, device in [
        ("equivariant", torch.float32, GPU),
        ("equivariant_backward", torch.float32, GPU),
        ("equivariant", torch.float32, torch.device("cuda", 1)),
        ("equivariant", torch.bfloat16, GPU),
        ("equivariant", torch.float16, GPU),
    ]:
        before = len(measured)
        launch.choose_config(name, problem_of(SHAPES["c"], dtype), measured.append, device)
        assert len(measured) > before
    before = len(measured)
    larger_batch = problem_of(replace(SHAPES["c"], batch_size=77), torch.float32)
    launch.choose_config("equivariant", larger_batch, measured.append, GPU)
    assert len(measured) == before


@needs_triton
def test_nothing_is_measured_while_a_graph_is_captured(tuning, monkeypatch):
    launch, measured = tuning
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    problem = problem_of(SHAPES["c"], torch.float32)
    assert launch.choose_config("equivariant", problem, measured.append, GPU) == launch.default_config(problem)
    assert not measured
