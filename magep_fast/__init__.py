"""Fused kernels for MAGEP neural functional networks behind a drop-in nn.Module API."""

from importlib.metadata import PackageNotFoundError, version

from magep_fast.convert import (
    from_dwsnets,
    from_modules,
    from_nfn,
    from_safetensors,
    from_state_dicts,
    from_zoo_rows,
    to_dwsnets,
    to_modules,
    to_nfn,
    to_safetensors,
    to_state_dicts,
    to_zoo_rows,
)
from magep_fast.layers import Activation, MagepEquivariant, MagepInvariant, MonomialEquivariant, check_activation
from magep_fast.ops.backends import available_backends, use_backend
from magep_fast.ragged import BucketSampler, NetworkDataset, RaggedBatch, bucket, collate, collate_fn
from magep_fast.spaces import WeightFeatures, WeightSpace
from magep_fast.stack import Stack
from magep_fast.swap import accelerate, load_authors_state_dict, to_authors_state_dict
from magep_fast.symmetry import GroupElement
from magep_fast.terms import ABLATION
from magep_fast.training_step import TrainingStep

try:
    __version__ = version("magep-fast")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+unknown"

__all__ = [
    "ABLATION",
    "Activation",
    "BucketSampler",
    "GroupElement",
    "MagepEquivariant",
    "MagepInvariant",
    "MonomialEquivariant",
    "NetworkDataset",
    "RaggedBatch",
    "Stack",
    "TrainingStep",
    "WeightFeatures",
    "WeightSpace",
    "accelerate",
    "available_backends",
    "bucket",
    "check_activation",
    "collate",
    "collate_fn",
    "from_dwsnets",
    "from_modules",
    "from_nfn",
    "from_safetensors",
    "from_state_dicts",
    "from_zoo_rows",
    "load_authors_state_dict",
    "to_authors_state_dict",
    "to_dwsnets",
    "to_modules",
    "to_nfn",
    "to_safetensors",
    "to_state_dicts",
    "to_zoo_rows",
    "use_backend",
]
