"""The Triton kernels compiled ahead of time for GPUs that are not here; no GPU is needed, and none is used."""

import importlib.metadata
import importlib.util
from dataclasses import replace

import pytest
import torch

from benchmarks.compile import (
    REPORT,
    SHARED_MEMORY,
    TARGETS,
    Compiled,
    compile_launch,
    compile_shape,
    layer_launches,
    markdown,
    read_resources,
)
from benchmarks.layers import SHAPES
from magep_fast.ops import triton

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)
if triton.interpreted():
    pytest.skip("kernels made for the interpreter cannot be compiled", allow_module_level=True)


def assert_fits(row):
    assert row.spills == 0, row
    assert 0 < row.registers <= (512 if row.target.startswith("gfx") else 255), row
    assert row.shared <= SHARED_MEMORY[row.target], row


def committed(key, dtype, target):
    """The rows of the committed table, or None if another Triton compiled it."""
    if f"Triton {importlib.metadata.version('triton')}," not in REPORT.read_text():
        return None
    return [row for row in read_resources() if (row.shape, row.dtype, row.target) == (key, dtype, target)]


def test_report_is_the_committed_table_and_has_no_gaps():
    rows = read_resources()
    for row in rows:
        assert_fits(row)
    kernels = {(row.shape, row.dtype, row.layer, row.kernel) for row in rows}
    assert {(shape, dtype) for shape, dtype, _, _ in kernels} == {
        (k, d) for k in SHAPES for d in ("float32", "bfloat16")
    }
    assert len(rows) == len(kernels) * len(TARGETS)
    report = REPORT.read_text()
    assert report.count("|\n") == len(kernels) + 2 and "|  |" not in report
    assert markdown(rows).partition("\n| shape")[2] == report.partition("\n| shape")[2]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("key", SHAPES)
def test_every_kernel_fits(key, target):
    rows = compile_shape(key, torch.float32, target)
    assert {row.kernel for row in rows if row.layer == "equivariant"} == {
        "chain_kernel",
        "mix_kernel",
        "readout_kernel",
        "readout_backward_kernel",
        "mix_backward_kernel",
        "chain_backward_kernel",
        "weight_gradient_kernel",
        "sum_kernel",
    }
    for row in rows:
        assert_fits(row)
    expected = committed(key, "float32", target)
    assert expected is None or rows == expected


def test_one_network_compiles():
    """Arguments that are 1 become constants."""
    for launches in layer_launches("equivariant", replace(SHAPES["c"], batch_size=1), torch.float32).values():
        for launch in launches:
            compile_launch(launch, "sm_90")


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_every_kernel_fits_in_bfloat16(target):
    rows = compile_shape("c", torch.bfloat16, target)
    for row in rows:
        assert_fits(row)
    assert rows == (committed("c", "bfloat16", target) or rows)


@pytest.mark.parametrize("activation", ["relu", "tanh", "sin"])
def test_activations_compile(activation):
    passes = layer_launches("equivariant", SHAPES["c"], torch.float32, activation)
    launch = next(launch for launch in passes["forward"] if launch.kernel.__name__ == "readout_kernel")
    assert compile_launch(launch, "sm_90").metadata.shared <= SHARED_MEMORY["sm_90"]


def test_bfloat16_runs_on_tensor_cores():
    launch = layer_launches("equivariant", SHAPES["c"], torch.bfloat16)["forward"][1]
    assert "mma" in compile_launch(launch, "sm_80").asm["ptx"]


def test_float32_is_not_rounded_to_tf32():
    launch = layer_launches("equivariant", SHAPES["c"], torch.float32)["forward"][1]
    assert "tf32" not in compile_launch(launch, "sm_80").asm["ptx"]


def test_report_has_a_line_for_every_kernel():
    rows = [
        Compiled("sm_90", "a", "float32", "equivariant", "mix_kernel", 8, 200, 0, 0, 2048),
        Compiled("gfx942", "a", "float32", "equivariant", "mix_kernel", 8, 100, 3, 0, 1024),
    ]
    text = markdown(rows)
    assert "| a | float32 | equivariant | `mix_kernel` | 8 | 200 / 2 | 100 / 1 (3) |" in text
