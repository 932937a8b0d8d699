"""Triton kernels, each beside its reference in `ops.reference` and `policy.selector`. Imports
triton."""

from .append import append
from .decode import Tuning, decode_dense, decode_mixed, decode_sparse
from .index import block_topk, index_refusal, index_scores, indexer_topk, on_device
from .index_decode import choose_keys, frequencies, turn_and_append, turn_and_store
from .inputs import Cache, Chosen
from .prefill import prefill_refusal, prefill_sparse
from .selection import evidence, refresh, select
from .verify import VerifyTuning, verify_dense
from .workspace import Workspace, multiprocessors, unsupported

__all__ = [
    "Cache",
    "Chosen",
    "Tuning",
    "VerifyTuning",
    "Workspace",
    "append",
    "block_topk",
    "choose_keys",
    "decode_dense",
    "decode_mixed",
    "decode_sparse",
    "evidence",
    "frequencies",
    "index_refusal",
    "index_scores",
    "indexer_topk",
    "multiprocessors",
    "on_device",
    "prefill_refusal",
    "prefill_sparse",
    "refresh",
    "select",
    "turn_and_append",
    "turn_and_store",
    "unsupported",
    "verify_dense",
]
