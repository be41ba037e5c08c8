"""The Triton kernels compiled ahead of time for GPUs that are not here; no GPU is needed, and none is used."""

import importlib.util
from dataclasses import replace

import pytest
import torch

from benchmarks.compile import SHARED_MEMORY, TARGETS, Compiled, compile_launch, compile_shape, layer_launches, markdown
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


def test_one_network_compiles():
    """Arguments that are 1 become constants."""
    for launches in layer_launches("equivariant", replace(SHAPES["c"], batch_size=1), torch.float32).values():
        for launch in launches:
            compile_launch(launch, "sm_90")


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_every_kernel_fits_in_bfloat16(target):
    for row in compile_shape("c", torch.bfloat16, target):
        assert_fits(row)


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
