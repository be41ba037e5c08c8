"""torch.compile and torch.export of a model with fused layers: one graph, no breaks, the same results.

python -m examples.compile_and_export                      # compiles with inductor, which takes a minute
python -m examples.compile_and_export --backend aot_eager  # traces and differentiates, compiles nothing
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from magep_fast import WeightSpace, from_modules
from magep_fast.models import CnnGeneralization


def main(arguments: Sequence[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    networks = [
        nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 10))
        for _ in range(4)
    ]
    features = from_modules(networks)
    model = CnnGeneralization(channels=8, hidden=32).build(WeightSpace.of(networks[0]))
    expected = model(features)

    compiled = torch.compile(model, fullgraph=True, backend=options.backend)  # an error if the graph had a break
    found = compiled(features)
    found.sum().backward()
    errors = [(found - expected).abs().max().item()]
    print(f"torch.compile(fullgraph=True, backend={options.backend!r}): largest difference {errors[0]:.1e}")

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.pt2"
        torch.export.save(torch.export.export(model, (features,)), file)
        loaded = torch.export.load(file).module()
    errors.append((loaded(features) - expected).abs().max().item())
    print(f"torch.export, saved and loaded: largest difference {errors[1]:.1e}")
    return max(errors)


if __name__ == "__main__":
    main()
