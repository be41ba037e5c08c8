"""A pytest plugin: the operators of the backend `cpu` become those of the backend `cuda`, run on the host.

`pytest -p tests.cuda_on_host` with MAGEP_CUDA_ON_HOST naming the library that cmake -DMAGEP_CUDA_ON_HOST=ON builds.
"""

import os

import torch

from magep_fast.ops import cuda, native
from magep_fast.ops.backends import Backend, register_backend
from magep_fast.ops.library import missing_library

torch.ops.load_library(os.environ["MAGEP_CUDA_ON_HOST"])
register_backend(Backend("cpu", cuda.chain, cuda.equivariant, cuda.invariant, missing_library, native.unsupported))
