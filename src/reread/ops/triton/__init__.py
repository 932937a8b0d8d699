"""Triton kernels, each beside its reference in `ops.reference` and `policy.selector`. Imports
triton."""

from .append import append
from .decode import Cache, Chosen, Tuning, decode_dense, decode_mixed, decode_sparse
from .selection import evidence, refresh, select
from .workspace import Workspace, unsupported

__all__ = [
    "Cache",
    "Chosen",
    "Tuning",
    "Workspace",
    "append",
    "decode_dense",
    "decode_mixed",
    "decode_sparse",
    "evidence",
    "refresh",
    "select",
    "unsupported",
]
