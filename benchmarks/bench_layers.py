"""The layers under pytest-benchmark: python -m pytest benchmarks/bench_layers.py"""

import pytest

from benchmarks.layers import LAYERS, SHAPES, Subject, backends_on
from benchmarks.measure import CPU
from magep_fast import WeightSpace


@pytest.mark.parametrize("backend", backends_on(CPU))
@pytest.mark.parametrize("key", SHAPES)
@pytest.mark.parametrize("kind", LAYERS)
def test_training_pass(benchmark, kind: str, key: str, backend: str) -> None:  # type: ignore[no-untyped-def]
    shape = SHAPES[key]
    layer = LAYERS[kind](WeightSpace(shape.widths), shape.channels, shape.channels)
    benchmark.group = f"{kind} {key}"
    benchmark(Subject(layer, shape.features(), backend).training)
