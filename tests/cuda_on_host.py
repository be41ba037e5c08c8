"""A pytest plugin: the backends `cpu` and `cuda` are both the operators of `cuda`, run on the host.

`pytest -p tests.cuda_on_host` with MAGEP_CUDA_ON_HOST naming the library that cmake -DMAGEP_CUDA_ON_HOST=ON builds.
"""

import os

import torch

from magep_fast.ops import cuda, native
from magep_fast.ops.backends import Backend, register_backend
from magep_fast.ops.library import missing_library

torch.ops.load_library(os.environ["MAGEP_CUDA_ON_HOST"])
for name in ("cpu", "cuda"):
    register_backend(Backend(name, cuda.chain, cuda.equivariant, cuda.invariant, missing_library, native.unsupported))
