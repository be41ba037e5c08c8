import csv
import math

import pytest
import torch

from benchmarks import layers, scaling
from benchmarks.floor import Machine, equivariant_flops, floor_seconds
from benchmarks.layers import LAYERS, Shape, Subject, disagreement, measure
from benchmarks.measure import count_ops, peak_memory, time_interleaved
from benchmarks.report import append_rows
from magep_fast import WeightSpace
from tests.helpers import BACKENDS

TINY = Shape("tiny", (2, 5, 4, 3), 3, 2)
MACHINE = Machine(flops=1e9, warm_bytes=1e9, fresh_bytes=1e9, one_thread=1e9)


def test_calls_are_interleaved_and_timed():
    order = []
    timings = time_interleaved([lambda: order.append("a"), lambda: order.append("b")], repeats=3, warmup=1)
    assert order == ["a", "b"] + ["a", "b"] * 3
    assert all(0 <= timing.p20 <= timing.p50 <= timing.p80 for timing in timings)


def test_peak_memory_counts_what_is_held_at_once():
    def function():
        x = torch.empty(1 << 20)
        del x
        return torch.empty(1 << 18)

    assert 4 << 20 <= peak_memory(function) < 5 << 20


def test_views_are_not_counted_as_ops():
    x = torch.randn(4, 4)
    assert count_ops(lambda: x.t().unsqueeze(0) + 1) == 1


@pytest.mark.parametrize("kind", LAYERS)
def test_one_row_for_each_implementation(kind):
    names = list(BACKENDS)
    rows = measure(kind, TINY, names, 2, MACHINE, lambda: None)
    assert [row["implementation"] for row in rows] == names
    assert rows[0]["speed_up"] == 1
    assert all(isinstance(row["speed_up"], float) and row["peak_mb"] > 0 for row in rows)


def test_no_speed_up_for_a_wrong_answer(monkeypatch):
    monkeypatch.setattr(layers, "disagreement", lambda found, expected: 0.5)
    rows = measure("invariant", TINY, ["reference", "torch"], 2, MACHINE, lambda: None)
    assert rows[1]["speed_up"] == "wrong by 5e-01"


def test_disagreement_is_relative_to_the_largest_entry():
    assert disagreement([torch.tensor([1.0, 9.0])], [torch.tensor([1.0, 10.0])]) == pytest.approx(0.1)


def test_nothing_agrees_with_nan():
    one, nan = torch.ones(2), torch.tensor([1.0, torch.nan])
    assert math.isnan(disagreement([one, nan, one], [one, one, one]))


def test_all_implementations_get_the_same_output_gradients():
    layer = LAYERS["equivariant"](WeightSpace(TINY.widths), 3, 3)
    features = TINY.features()
    first, second = (Subject(layer, features, name).gradients for name in ("reference", "torch"))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def test_floor_is_arithmetic_plus_traffic():
    assert floor_seconds(MACHINE, 1e9, 0, 0, 0) == pytest.approx(3)
    assert floor_seconds(MACHINE, 0, 10**9, 0, 0) == pytest.approx(2)
    # 2-32-32-1 in 128 channels: the middle layer, 2 d e n² multiply-adds, is most of it.
    flops = equivariant_flops((2, 32, 32, 1), 128, 128, 1)
    assert 1 < flops / (2 * 2 * 128 * 128 * 32 * 32) < 1.5


def test_rows_are_appended_under_one_header(tmp_path):
    path = tmp_path / "results" / "x.csv"
    append_rows(path, [{"a": 1}])
    append_rows(path, [{"a": 2}])
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["a"] for row in rows] == ["1", "2"] and rows[0]["torch"] == torch.__version__
    with pytest.raises(ValueError, match="has the columns"):
        append_rows(path, [{"b": 1}])


def test_scaling_measures_and_plots(tmp_path):
    sweep = scaling.Sweep("depth", (2, 3))
    backends = [name for name in BACKENDS if name != "reference"]
    rows = [row for value in sweep.values for row in scaling.measure("invariant", sweep, value, backends, 0.01)]
    assert all(row["ns_per_weight"] > 0 for row in rows)
    scaling.plot(rows, tmp_path / "scaling.png")
    assert (tmp_path / "scaling.png").stat().st_size > 10_000
