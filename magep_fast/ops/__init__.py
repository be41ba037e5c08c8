"""The operations, one file each, and the backends that implement them."""

import warnings

from magep_fast import factored, reference
from magep_fast.ops import cuda, native, triton
from magep_fast.ops.backends import Backend, register_backend
from magep_fast.ops.chain import chain
from magep_fast.ops.equivariant import equivariant
from magep_fast.ops.invariant import invariant
from magep_fast.ops.library import missing_library
from magep_fast.ops.stack import stack, stack_backward, stack_forward, stack_train, stack_update, updating

__all__ = [
    "chain",
    "equivariant",
    "invariant",
    "stack",
    "stack_backward",
    "stack_forward",
    "stack_train",
    "stack_update",
    "updating",
]

if missing_library() is None:
    native.register()
else:
    warnings.warn(f"magep_fast runs without native kernels: {missing_library()}", RuntimeWarning, stacklevel=2)

triton.register()

register_backend(
    Backend("reference", reference.chain, reference.equivariant, reference.invariant, automatic=False),
)
register_backend(
    Backend("torch", factored.chain, factored.equivariant, factored.invariant),
)
register_backend(
    Backend(
        "cpu",
        native.chain,
        native.equivariant,
        native.invariant,
        missing_library,
        native.unsupported,
        native.stack_of,
    ),
)
register_backend(
    Backend(
        "triton",
        triton.chain,
        triton.equivariant,
        triton.invariant,
        triton.missing,
        triton.unsupported,
        automatic=not triton.interpreted(),  # the interpreter is for tests, never fast
    ),
)
register_backend(
    Backend(
        "cuda",
        cuda.chain,
        cuda.equivariant,
        cuda.invariant,
        cuda.missing,
        cuda.unsupported,
        hands_over=("triton", cuda.SMALL_NETWORK),
    ),
)
