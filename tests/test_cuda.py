"""The Python side of the backend `cuda`, and what nvcc makes of its kernels. What they compute is tested on the host,
by csrc/tests/test_cuda.cpp and test_cuda_on_host.py."""

import importlib.util
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import cuda_model
from benchmarks.layers import SHAPES
from magep_fast import WeightSpace, info
from magep_fast.ops import backends, cuda, native
from magep_fast.ops.backends import Backend, choose_backend, register_backend
from magep_fast.ops.library import missing_library
from magep_fast.terms import GROUPS, invariant_table
from tests.helpers import random_features

GPU = torch.device("cuda", 0)
COMPILED = ("80", "86-real", "90-real", "100-virtual")


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0), (13, 1)])
def test_compiled_architectures_and_later_ones_run(capability):
    assert cuda.mismatch(capability, COMPILED) is None


@pytest.mark.parametrize(
    ("capability", "compiled"),
    [((7, 5), COMPILED), ((8, 0), ("86-real",)), ((9, 0), ("86-real", "100")), ((12, 0), ("90-real",))],
)
def test_mismatch_says_what_to_build(capability, compiled):
    found = "".join(map(str, capability))
    expected = rf'compiled for sm_{compiled[0]}.*, this GPU is sm_{found}.*-DMAGEP_CUDA_ARCHITECTURES={found}"'
    assert re.search(expected, cuda.mismatch(capability, compiled))


@pytest.fixture
def gpu_backends(monkeypatch):
    """Backends as a machine with a GPU has them, by name: which of them, of cuda and triton, can run."""

    def install(*names):
        others = {name: backend for name, backend in backends._backends.items() if name not in ("cuda", "triton")}
        monkeypatch.setattr(backends, "_backends", others)
        everything = {"chain": None, "equivariant": None, "invariant": None}
        for name in ("triton", "cuda"):
            given = {"hands_over": ("triton", cuda.SMALL_NETWORK)} if name == "cuda" else {}
            missing = None if name in names else "left out"
            register_backend(
                Backend(
                    name,
                    **everything,
                    missing=lambda missing=missing: missing,
                    unsupported=lambda device, dtype: None if device.type == "cuda" else "CUDA tensors only",
                    **given,
                )
            )

    return install


def chosen(size, device=GPU):
    return choose_backend("auto", device, torch.float32, SimpleNamespace(numbers_per_network=size)).name


def test_small_networks_go_to_cuda_and_large_ones_to_triton(gpu_backends):
    gpu_backends("cuda", "triton")
    assert chosen(cuda.SMALL_NETWORK) == "cuda" and chosen(cuda.SMALL_NETWORK + 1) == "triton"
    assert chosen(1, torch.device("cpu")) not in ("cuda", "triton")


@pytest.mark.parametrize("size", [1, 10**9])
@pytest.mark.parametrize("names", [("cuda",), ("triton",), ()])
def test_each_takes_all_sizes_without_the_other(gpu_backends, names, size):
    gpu_backends(*names)
    assert chosen(size) == (names[0] if names else "torch")


def test_size_of_a_network():
    features = random_features(WeightSpace((1, 16, 16, 16, 10)), channels=20, batch_size=3)
    assert features.numbers_per_network == 20 * (16 + 256 + 256 + 160 + 58) <= cuda.SMALL_NETWORK


def test_registered_backend_hands_over_to_triton():
    backend = backends._backends["cuda"]
    assert backend.hands_over == ("triton", cuda.SMALL_NETWORK) and backend.automatic


def test_missing_names_the_cause(monkeypatch, tmp_path):
    if missing_library() is not None:
        pytest.skip("needs the native operators")
    monkeypatch.setattr(cuda, "architectures", lambda: ())
    assert "not built" in cuda._load()
    monkeypatch.setattr(cuda, "architectures", lambda: COMPILED)
    monkeypatch.setattr(cuda, "_LIBRARY", tmp_path / "libmagep_fast_cuda.so")
    assert "not built" in cuda._load()
    cuda._LIBRARY.write_bytes(b"not a library")
    monkeypatch.delattr(torch.cuda, "is_available")  # it would start CUDA at import
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert cuda._load() == "torch sees no CUDA device"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert cuda._load().startswith("libmagep_fast_cuda.so does not load with torch")


def test_unsupported_names_the_cause(monkeypatch):
    assert cuda.unsupported(torch.device("cpu"), torch.float32) == "it runs on CUDA tensors only"
    assert cuda.unsupported(GPU, torch.int64).startswith("it computes in float32, float64")
    monkeypatch.setattr(cuda, "_missing", None)
    monkeypatch.setattr(cuda, "architectures", lambda: COMPILED)
    old = type("Properties", (), {"major": 7, "minor": 5})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: old)
    assert "this GPU is sm_75" in cuda.unsupported(GPU, torch.float32)


@pytest.mark.parametrize(
    ("capability", "expected"), [((9, 0), "this GPU can run them"), ((7, 0), "this GPU is sm_70"), (None, "sm_86-real")]
)
def test_info_reports_architectures(monkeypatch, capability, expected):
    monkeypatch.setattr(info, "architectures", lambda: COMPILED)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    line = next(line for line in info.report().splitlines() if line.startswith("CUDA kernels"))
    assert "compiled for sm_80, sm_86-real" in line and expected in line


def test_deep_networks_run_in_torch_ops():
    """Beyond the kernels' limit of layers; linear terms likewise."""
    space = WeightSpace((2,) * (cuda.MOST_LAYERS + 2))
    features = random_features(space, channels=1, batch_size=1)
    prefixes, suffixes = cuda.chain(features.weights, features.biases)
    assert (len(prefixes), len(suffixes)) == (cuda.MOST_LAYERS + 1, cuda.MOST_LAYERS)


def resources():
    """csrc/cuda/resources.py, which is no package."""
    path = Path(__file__).resolve().parent.parent / "csrc" / "cuda" / "resources.py"
    spec = importlib.util.spec_from_file_location("cuda_resources", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_table_of_resources_is_complete_and_without_spills():
    module = resources()
    table = module.read()
    kernels = {(row.kernel, row.storage, row.flags) for row in table}
    assert {row.architecture for row in table} == set(module.ARCHITECTURES)
    assert len(table) == len(kernels) * len(module.ARCHITECTURES) and len(kernels) == 4 * 4 + 2 + 4 * 9
    assert all(row.spill_bytes == 0 and row.registers <= 255 and row.shared <= 48 << 10 for row in table)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
def test_kernels_need_what_the_table_says():
    """One architecture; the others are compared by `make cuda` in CI."""
    module = resources()
    found = module.compile_for(80)
    assert len(found) == len(module.read()) / len(module.ARCHITECTURES) and module.differences(found) == []


def test_parser_reads_spills():
    symbol = "_ZN5magep4cuda11layer_fusedI6__halfLb1EEEvNS0_17ForwardParametersIT_EE"
    log = (
        f"ptxas info    : Compiling entry function '{symbol}' for 'sm_90'\n"
        f"ptxas info    : Function properties for {symbol}\n"
        "    32 bytes stack frame, 76 bytes spill stores, 120 bytes spill loads\n"
        "ptxas info    : Used 64 registers, used 1 barriers, 32 bytes cumulative stack size, 6656 bytes smem\n"
    )
    module = resources()
    (found,) = module.parse(log, "13.0")
    assert found == module.Resources("layer_fused", "half", "yes", 90, 64, 6656, 196, "13.0")
    assert found in module.differences([found])


@pytest.mark.parametrize(("nvcc", "count"), [("13.0", 2), ("99.0", 0)])
def test_another_number_of_registers_is_a_difference(nvcc, count):
    """By the nvcc that the table is of."""
    module = resources()
    table = module.read()
    other = [replace(row, registers=row.registers + (k == 0), nvcc=nvcc) for k, row in enumerate(table)]
    assert module.differences(table) == [] and len(module.differences(other)) == count


@pytest.mark.parametrize("gpu", cuda_model.GPUS, ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("kind", ["equivariant", "invariant"])
@pytest.mark.parametrize("name", SHAPES)
def test_model_counts_launches_and_bytes(gpu, kind, name):
    shape = SHAPES[name]
    forward, backward = cuda_model.counts(kind, shape, gpu).values()
    small = shape.features().numbers_per_network <= cuda.SMALL_NETWORK
    assert len(forward) == (1 if small else 2) and len(backward) == (4 if kind == "equivariant" else 3)
    inputs = 4 * shape.batch_size * shape.features().numbers_per_network
    assert sum(x.bytes_read for x in forward) >= inputs and sum(x.bytes_written for x in backward) >= inputs
    for launch in (*forward, *backward):
        assert 0 < launch.occupancy <= 1 and launch.blocks > 0 and launch.shared <= gpu.shared_per_block


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("equivariant", [True, False])
def test_model_lays_out_what_is_saved_as_the_operators_do(name, equivariant):
    shape = SHAPES[name]
    sizes = cuda_model.Sizes(shape.widths, shape.channels, shape.channels, equivariant)
    space, device = WeightSpace(shape.widths), torch.device("cuda")
    features = invariant_table(space, shape.channels, 1, GROUPS["all"]).outputs[0].shape[1]
    assert sizes.saved == native._saved_size(shape.widths, shape.channels, equivariant, device) + features
