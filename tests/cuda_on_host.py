"""A pytest plugin: the operators of the backend `cpu` become those of the backend `cuda`, run on the host.

`pytest -p tests.cuda_on_host` with MAGEP_CUDA_ON_HOST naming the library that cmake -DMAGEP_CUDA_ON_HOST=ON builds.
"""

import os

import torch

import magep_fast  # noqa: F401  defines the operators

torch.ops.load_library(os.environ["MAGEP_CUDA_ON_HOST"])
