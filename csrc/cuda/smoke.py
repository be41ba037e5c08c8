"""What a package built with CUDA must do, also where there is no CUDA driver: import, load the library of kernels, say
why `cuda` cannot run, and compute on the CPU. Run by `make cuda` with that package on PYTHONPATH."""

import torch

import magep_fast
from magep_fast.ops import cuda

assert cuda.architectures(), f"{magep_fast.__file__} was built without CUDA"
torch.ops.load_library(cuda._LIBRARY)
expected = None if torch.cuda.is_available() else "torch sees no CUDA device"
assert cuda.missing() == expected, cuda.missing()
space = magep_fast.WeightSpace((2, 3, 2))
features = magep_fast.WeightFeatures(
    [torch.randn(1, 2, 3, 2), torch.randn(1, 2, 2, 3)], [torch.randn(1, 2, 3), torch.randn(1, 2, 2)]
)
assert magep_fast.MagepInvariant(space, 2, 4)(features).shape == (1, 4)
print(f"loads and runs; cuda: {cuda.missing() or 'available'}")
