"""Triton kernels, each beside its reference in `ops.reference` and `policy.selector`. Imports
triton."""

from .append import append
from .decode import Cache, Chosen, Tuning, decode_dense, decode_mixed, decode_sparse
from .packed import decode_packed, pack
from .selection import select
from .workspace import Workspace, unsupported

__all__ = [
    "Cache",
    "Chosen",
    "Tuning",
    "Workspace",
    "append",
    "decode_dense",
    "decode_mixed",
    "decode_packed",
    "decode_sparse",
    "pack",
    "select",
    "unsupported",
]
