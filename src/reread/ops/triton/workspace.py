"""Device memory that the kernels need besides inputs and outputs: sized once, shared by all
layers, never grown."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from ...errors import UnsupportedError
from .. import MAX_LENGTH

HEAD_DIMS = (64, 128, 256)
MAX_GROUP = 16
MAX_ROWS = 64
CHUNK = 2048  # positions that one program of the Selector handles
BINS = 256  # of the top-K's counts
MAX_SPLITS = 16
CHOOSERS = 8  # programs an SM
MAX_TILE = 128  # queries times query heads of a KV head that one program attends with


def unsupported(q: Tensor, k: Tensor) -> str | None:
    """Why the kernels cannot run on q [B, H, D], or [B, H, T, D] of any strides, and k [B, Hkv, L,
    D]; None if they can."""
    rows, heads, dim = q.shape[0], q.shape[1], q.shape[-1]
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"dtype {q.dtype}: bfloat16, float16 or float32"
    if k.dtype != q.dtype:
        return f"keys in {k.dtype} under queries in {q.dtype}: the same dtype"
    if dim not in HEAD_DIMS:
        return f"head dim {dim}: one of {', '.join(map(str, HEAD_DIMS))}"
    if heads % k.shape[1] or heads // k.shape[1] > MAX_GROUP:
        return f"{heads} query heads on {k.shape[1]} KV heads: at most {MAX_GROUP} a KV head"
    if rows > MAX_ROWS:
        return f"{rows} rows: at most {MAX_ROWS}"
    if k.shape[2] > MAX_LENGTH:
        return f"a cache of {k.shape[2]} positions: at most {MAX_LENGTH}"
    whole = q.stride(-1) == 1 if q.dim() == 4 else q.is_contiguous()
    if k.stride(-1) != 1 or not whole:
        return "memory layout: q contiguous, keys contiguous in the head dim"
    if q.is_cuda and torch.cuda.get_device_capability(q.device) < (8, 0):
        return "compute capability below 8.0"
    return None


def check(q: Tensor, k: Tensor) -> None:
    """Refuse what the kernels do not cover.

    Raises:
        UnsupportedError: names the offending value and what would be right.
    """
    reason = unsupported(q, k)
    if reason is not None:
        raise UnsupportedError(f"the Triton kernels do not cover {reason}")


def multiprocessors(device: torch.device) -> int:
    """SMs of a CUDA device; 2 where kernels are interpreted, so that small tests split their work
    as well."""
    if device.type != "cuda":
        return 2
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@dataclass(slots=True)
class Workspace:
    """Scratch memory for one device and one largest shape. One stream at a time may use it.

    Attributes:
        rows, heads, kv_heads, dim, capacity: the largest B, H, Hkv, D and L.
        programs: what dense work is cut into; 0: one program an SM.
        queries: most queries of a row that are verified at once; 0: none.
        evidence: whether slow steps feed a Selector; without, its share is not allocated.
        masses: whether anybody asks for the mass itself, as the prior does.
        parts, sums: unfinished softmax results of the attention kernels.
        lse, logits, mass: evidence. scores, members, hists, cursors, cuts, tallies, prior_sums: the
            Selector.
        query_parts, query_sums: as parts and sums, of verification.
    """

    rows: int
    heads: int
    kv_heads: int
    dim: int
    capacity: int
    device: torch.device
    evidence: bool = True
    programs: int = 0
    queries: int = 0
    masses: bool = True
    parts: Tensor = field(init=False)
    sums: Tensor = field(init=False)
    lse: Tensor = field(init=False)
    logits: Tensor = field(init=False)
    mass: Tensor = field(init=False)
    scores: Tensor = field(init=False)
    members: Tensor = field(init=False)
    hists: Tensor = field(init=False)
    cursors: Tensor = field(init=False)
    cuts: Tensor = field(init=False)
    tallies: Tensor = field(init=False)
    prior_sums: Tensor = field(init=False)
    always: Tensor = field(init=False)
    query_parts: Tensor = field(init=False)
    query_sums: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.programs = self.programs or multiprocessors(self.device)
        tiles = self.rows * self.kv_heads
        group = self.heads // self.kv_heads
        # a small batch has more pieces than max_splits each, but no more than two an SM in all
        slots = 2 * self.programs + tiles + max(tiles * self.max_splits, 2 * self.programs)
        self.parts = self._fp32(slots, group, self.dim)
        self.sums = self._fp32(slots, 4, 16)
        self.always = torch.ones(self.rows, dtype=torch.int32, device=self.device)
        width = self.capacity if self.evidence else 0
        heads = tiles if self.evidence else 0
        self.lse = self._fp32(self.rows, self.heads)
        self.logits = self._fp32(self.rows, self.heads, width)
        self.mass = self._fp32(self.rows, self.kv_heads, width if self.masses else 0)
        size = heads * -(-width // CHUNK) * CHUNK  # in whole chunks
        self.scores = self._fp32(size)
        self.members = torch.empty(2, size, dtype=torch.int32, device=self.device)
        # the kernels leave histograms and cursors at zero for the next call
        self.hists = torch.zeros(heads, BINS, dtype=torch.int32, device=self.device)
        self.cursors = torch.zeros(heads, dtype=torch.int32, device=self.device)
        self.cuts = torch.zeros(heads, 2, dtype=torch.int32, device=self.device)
        self.tallies = torch.zeros(heads, 2, self.chunks, dtype=torch.int32, device=self.device)
        self.prior_sums = self._fp32(heads, 5, self.chunks)
        slots = 2 * self.programs + tiles if self.queries else 0
        self.query_parts = self._fp32(slots, min(self.queries * group, MAX_TILE), self.dim)
        self.query_sums = self._fp32(slots, 4, MAX_TILE)

    def require(self, q: Tensor, k: Tensor, programs: int, splits: int, evidence: int) -> None:
        """Our own callers must have sized this for what they run: kernels do not check their
        stores. evidence: positions of a row that leave it; 0: none do."""
        rows, heads, dim = q.shape
        tiles = rows * k.shape[1]
        assert programs + tiles + tiles * splits <= self.parts.shape[0], (programs, splits)
        assert heads // k.shape[1] <= self.parts.shape[1]
        assert dim <= self.dim
        assert rows <= self.rows
        assert heads <= self.heads
        assert k.shape[1] <= self.kv_heads
        assert not evidence or (self.evidence and evidence <= self.capacity)

    def require_queries(self, q: Tensor, k: Tensor, programs: int, evidence: int) -> None:
        """As `require`, for q [B, H, T, D]."""
        self.require(q[:, :, 0], k, 0, 0, evidence)
        assert q.shape[2] <= self.queries, (q.shape, self.queries)
        assert programs + q.shape[0] * k.shape[1] <= self.query_parts.shape[0], programs

    def clean(self) -> None:
        """Zero what every Selector leaves at zero, after one that did not come to its end."""
        self.hists.zero_()
        self.cursors.zero_()

    def require_scores(self, size: int) -> None:
        """As `require`, for the Selector."""
        assert size <= self.scores.numel(), (size, self.scores.shape)

    def _fp32(self, *shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.float32, device=self.device)

    @property
    def choosers(self) -> int:
        """Programs that share a Selector's chunks."""
        return CHOOSERS * self.programs

    @property
    def max_splits(self) -> int:
        """`splits` of the largest batch."""
        return self.splits(self.rows * self.kv_heads)

    def splits(self, tiles: int) -> int:
        """Pieces that the sparse work of each of so many tiles (row, KV head) is cut into: two
        programs an SM in all, at most 16."""
        return max(1, min(MAX_SPLITS, 2 * self.programs // tiles))

    @property
    def chunks(self) -> int:
        """Chunks of the Selector, a power of two (a Triton vector)."""
        return 1 << max(0, (-(-self.capacity // CHUNK) - 1).bit_length())

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        values = (getattr(self, f.name) for f in fields(self))
        return sum(value.nbytes for value in values if isinstance(value, Tensor))
