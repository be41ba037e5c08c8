import importlib.util

import pytest
import torch

from benchmarks import cuda_model
from benchmarks.layers import SHAPES, Shape
from benchmarks.model import (
    COUNTS,
    GPUS,
    LAUNCH_SECONDS,
    Cache,
    Gpu,
    Launch,
    launch_table,
    minimum_traffic,
    predict,
    rows,
    trace_reference,
    triton_counts,
)

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
TINY = Shape("tiny", (2, 5, 4, 3), 3, 2)


def test_cache_counts_misses_and_what_is_written_back():
    cache = Cache(100)
    for what, size, written in [("x", 60, False), ("x", 60, False), ("y", 60, True), ("x", 60, False)]:
        cache.access(what, size, written, False)
    assert cache.traffic == 60 + 60 + 60  # x, y when it leaves, x again
    cache.flush()
    assert cache.traffic == 180


def test_streams_do_not_stay():
    cache = Cache(100)
    cache.access("x", 60, False, False)
    cache.access("y", 60, True, True)
    cache.access("x", 60, False, True)
    assert cache.traffic == 60 + 60
    cache.access("x", 60, False, False)
    assert cache.traffic == 180


def test_time_is_launches_and_the_longer_of_flops_and_bytes():
    gpu = Gpu("simple", 1e9, 1e9, 0)
    launch = Launch("any", 2e9)
    launch.read(("x", 10**9))
    assert predict([launch, launch], gpu).seconds == pytest.approx(2 * (2 + LAUNCH_SECONDS))
    launch.flops = 0
    assert predict([launch], gpu).seconds == pytest.approx(1 + LAUNCH_SECONDS)


def test_reference_is_counted_from_its_ops():
    launches = trace_reference("equivariant", TINY)
    assert len(launches["both"]) > len(launches["forward"]) > 30
    flops = sum(launch.flops for launch in launches["forward"])
    assert flops > 0 and any("bmm" in launch.name for launch in launches["forward"])
    assert predict(launches["forward"], GPUS[0]).traffic >= minimum_traffic("equivariant", TINY)["forward"]


def test_minimum_traffic_is_everything_once():
    d, B, n = 3, 2, TINY.widths
    inputs = B * d * sum(n[i] * (n[i - 1] + 1) for i in range(1, 4))
    from magep_fast import MagepEquivariant, WeightSpace

    parameters = sum(p.numel() for p in MagepEquivariant(WeightSpace(n), d, d).parameters())
    assert minimum_traffic("equivariant", TINY) == {
        "forward": 4 * (2 * inputs + parameters),
        "both": 4 * (5 * inputs + 3 * parameters),
    }


@needs_triton
@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("key", ["b", "c", "d", "e"])
def test_triton_moves_little_more_than_it_must(key, gpu):
    launches, least = COUNTS["triton"]("equivariant", SHAPES[key]), minimum_traffic("equivariant", SHAPES[key])
    assert predict(launches["forward"], gpu).traffic <= 1.25 * least["forward"]
    assert predict(launches["both"], gpu).traffic <= 1.5 * least["both"]


@needs_triton
@pytest.mark.parametrize("kind", ["equivariant", "invariant"])
def test_less_cache_never_helps(kind):
    for row in rows(kind, "c"):
        assert row["times_least_half_cache"] >= row["times_least_traffic"] > 0
        assert row["times_least_cold"] >= 1  # every launch moves what it touches


@needs_triton
@pytest.mark.parametrize("gpu", cuda_model.GPUS, ids=lambda gpu: gpu.name)
def test_launches_of_both_backends_are_counted_alike(gpu):
    for key in SHAPES:
        for counted in (triton_counts("equivariant", key, gpu), cuda_model.counts("equivariant", SHAPES[key], gpu)):
            assert list(counted) == ["forward", "backward"]
            for launch in (*counted["forward"], *counted["backward"]):
                assert 0 < launch.occupancy <= 1 and launch.blocks > 0 and launch.shared <= gpu.shared_per_block
            inputs = 4 * SHAPES[key].batch_size * SHAPES[key].features().numbers_per_network
            assert sum(x.bytes_read for x in counted["forward"]) >= inputs
            assert sum(x.bytes_written for x in counted["backward"]) >= inputs
    table = launch_table(["a"])
    assert {"triton", "cuda"} <= set(table.columns[4].cells)


@needs_triton
@pytest.mark.parametrize("kind", ["equivariant", "invariant"])
@pytest.mark.parametrize("key", SHAPES)
def test_the_model_counts_the_launches_there_are(key, kind):
    """And every tensor that a kernel is given is counted as large as it is."""
    from benchmarks.compile import layer_launches

    counted = COUNTS["triton"](kind, SHAPES[key])
    passes = layer_launches(kind, SHAPES[key], torch.float32)
    made = [*passes["forward"], *passes["backward"]]
    assert [launch.name + "_kernel" for launch in counted["both"]] == [launch.kernel.__name__ for launch in made]
    sizes = {name: 0 for name in ("A", "S")}
    for what, size, _, _ in {access[0]: access for access in counted["forward"][0].accesses}.values():
        if isinstance(what, tuple) and what[0] in sizes:
            sizes[what[0]] += size
    arguments = made[0].arguments
    assert sizes["A"] == 4 * arguments["prefixes"].numel()
    assert sizes["S"] == (4 * arguments["suffixes"].numel() if kind == "equivariant" else 0)
