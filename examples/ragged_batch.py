"""Networks of different widths and depths in one go: bucket, collate, and back.

python -m examples.ragged_batch
"""

from itertools import pairwise

import torch
from torch import nn

from magep_fast import MagepEquivariant, bucket, from_modules, to_modules


def main() -> float:
    torch.manual_seed(0)
    hidden = [(7,), (3, 20), (16,), (5, 5), (12, 4), (30,)]
    networks = [mlp(2, *widths, 1) for widths in hidden]
    features = [from_modules(network) for network in networks]

    largest = 0.0
    for batch in bucket(features):  # one batch for each depth; hidden widths are padded with zeros
        layer = MagepEquivariant(batch.features.space.any_hidden_width(), 1, 1)
        edited = layer(batch.features)
        print(f"networks {batch.indices}: one batch in {batch.features.space}, widths {batch.widths}")
        for k, result in zip(batch.indices, batch.unpad(edited), strict=True):
            alone = layer(features[k])
            largest = max(
                largest, *((x - y).abs().max().item() for x, y in zip(result.tensors(), alone.tensors(), strict=True))
            )
            to_modules(result, networks[k])  # the edited network, as a module again
    print(f"largest difference to processing networks one by one: {largest:.1e}")
    return largest


def mlp(*widths: int) -> nn.Sequential:
    layers = [nn.Linear(m, n) for m, n in pairwise(widths)]
    return nn.Sequential(*(x for layer in layers for x in (layer, nn.ReLU())))[:-1]


if __name__ == "__main__":
    main()
