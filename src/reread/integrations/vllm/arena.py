"""Decode steps of paged requests on the GPU: everything that they read and write, at fixed
addresses, so that vLLM can capture them in its CUDA graphs.

As `reread.device`, with two differences. Keys and values lie in vLLM's pages. And what a step is
(slow or fast, for each row on its own) is decided on the device from the token that was sampled, so
that one graph serves all steps and the host need not know the tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...config import Config
from ...cuda import Staging
from ...errors import UnsupportedError
from ...lanes import Lanes, Overlap
from ...ops import kernels_lack

if TYPE_CHECKING:
    from ...ops.triton import Cache, Workspace

RING = 2  # workspaces: a layer's Selector may run under the next layer's attention
OVERLAP: Overlap = "rows"


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Query heads, KV heads and head dim of a layer in this process."""

    heads: int
    kv_heads: int
    dim: int


@dataclass(frozen=True, slots=True)
class Board:
    """What one step is, on the device: a column a row, see `ops.triton.trigger`."""

    step: Tensor
    codes: Tensor

    @classmethod
    def of(cls, rows: int, device: torch.device) -> Board:
        """Of so many rows, all of them idle."""
        from ...ops.triton import trigger

        step = torch.zeros(len(trigger.STEP), rows, dtype=torch.int32, device=device)
        return cls(step, torch.zeros(rows, dtype=torch.int32, device=device))

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return int(self.codes.shape[0])

    def column(self, row: int) -> Board:
        """One row of it, which shares its memory."""
        return Board(self.step[:, row : row + 1], self.codes[row : row + 1])

    def field(self, name: str, rows: int) -> Tensor:
        """int32 [rows]."""
        from ...ops.triton import trigger

        return self.step[trigger.STEP.index(name), :rows]


class PagedArena:
    """Fixed addresses of the decode steps of all requests of a worker.

    Attributes:
        rows: most requests at once; longest: positions of the longest.
        indices, counts: per layer what fast steps read, int32 [rows + 1, Hkv, K] and [rows + 1,
            Hkv], by lane. The last lane is nobody's, and empty.
        state: int32 [.., rows + 1], what the triggers remember of each lane.
    """

    def __init__(
        self,
        layers: Mapping[str, LayerShape],
        config: Config,
        rows: int,
        longest: int,
        dtype: torch.dtype,
        device: torch.device,
        ends: Tensor | None,
    ) -> None:
        """ends: bool [vocabulary], the tokens that end a sentence or line; None: unknown.

        Raises:
            UnsupportedError: a shape that the kernels do not cover.
        """
        from ...ops.triton import trigger

        shape = self._one_shape(layers)
        reason = kernels_lack(rows, shape.heads, shape.kv_heads, shape.dim, longest, dtype)
        if reason is not None:
            raise UnsupportedError(f"reread's GPU kernels do not cover {reason}")
        self.config, self.rows, self.longest = config, rows, longest
        self.device, self.shape = device, shape
        self.layers = tuple(layers)
        zeros = functools.partial(torch.zeros, dtype=torch.int32, device=device)
        self.k = min(config.k, longest)
        self.indices = {name: zeros(rows + 1, shape.kv_heads, self.k) for name in layers}
        self.counts = {name: zeros(rows + 1, shape.kv_heads) for name in layers}
        self.state = zeros(len(trigger.STATE), rows + 1)
        self.board = Board.of(rows, device)
        self.info = zeros(len(trigger.INFO), rows)
        self.ends = None if ends is None else ends.to(device)
        self._staging = Staging(self.info)
        self.lanes = Lanes(OVERLAP, device, self._workspace, ring=RING)

    @staticmethod
    def _one_shape(layers: Mapping[str, LayerShape]) -> LayerShape:
        shapes = set(layers.values())
        if len(shapes) != 1:
            found = ", ".join(
                f"{s.heads} on {s.kv_heads} of {s.dim}" for s in sorted(shapes, key=str)
            )
            raise UnsupportedError(
                f"full-attention layers of several shapes ({found}) are not supported: one shape"
            )
        return shapes.pop()

    def _workspace(self, evidence: bool) -> Workspace:
        from ...ops.triton import Workspace, multiprocessors

        shape = self.shape
        # without evidence it is for fast steps, of which pages want four programs an SM
        programs = 0 if evidence else 2 * multiprocessors(self.device)
        return Workspace(
            self.rows, shape.heads, shape.kv_heads, shape.dim, self.longest, self.device,
            evidence=evidence and self.config.mode != "dense", programs=programs, masses=False,
        )  # fmt: skip

    @property
    def nbytes(self) -> int:
        """Bytes of selections and scratch."""
        return self.lane_bytes * (self.rows + 1) + self.lanes.nbytes

    @property
    def lane_bytes(self) -> int:
        """Bytes of what one request selects."""
        return len(self.layers) * self.shape.kv_heads * (self.k + 1) * 4

    # -- what a step is

    def tell(self, info: Sequence[Sequence[int]], tokens: Tensor) -> None:
        """Plan the next step of all rows; see `plan_steps`.

        Args:
            info: a row's values in the order of INFO; rows beyond these are idle.
            tokens: int32, read where the rows say.
        """
        from ...ops.triton import trigger

        idle = (self.rows, 0, trigger.IDLE, 0, -1, 0)
        self._staging.upload([tuple(row) for row in info] + [idle] * (self.rows - len(info)))
        self._plan(self.info, tokens, self.board, 0)

    def replay(self, groups: Sequence[Sequence[Sequence[int]]], tokens: Tensor) -> list[Board]:
        """Plan several steps of one request, one after the other. Steps of a group read nothing
        that another of them chooses, so they run as the rows of one board.

        Args:
            groups: of the steps' values in the order of INFO; at most `rows` each.
        """
        flat = [list(step) for group in groups for step in group]
        columns = torch.tensor(flat, dtype=torch.int32).T.contiguous()
        if self.device.type == "cuda":
            columns = columns.pin_memory()
        given = columns.to(self.device, non_blocking=True)
        boards, column = [], 0
        for group in groups:
            board = Board.of(len(group), self.device)
            for i in range(len(group)):
                self._plan(given, tokens, board.column(i), column)
                column += 1
            boards.append(board)
        return boards

    def _plan(self, info: Tensor, tokens: Tensor, board: Board, column: int) -> None:
        from ...ops.triton import trigger

        trigger.plan_steps(
            info, tokens, self.ends, self.state, board.step, board.codes, self.config, row=column
        )

    def warm_up(self, page: int, dtype: torch.dtype) -> None:
        """Compile the kernels for every number of rows, so that no request waits for it. page:
        positions of a page."""
        shape = self.shape
        cache = torch.zeros(1, 2, page, shape.kv_heads, shape.dim, dtype=dtype, device=self.device)
        pages = cache[:, 0].transpose(1, 2), cache[:, 1].transpose(1, 2)
        most = -(-self.longest // page)
        tables = torch.zeros(self.rows, most, dtype=torch.int32, device=self.device)
        tokens = torch.zeros(1, dtype=torch.int32, device=self.device)
        q = torch.zeros(self.rows, shape.heads, shape.dim, dtype=dtype, device=self.device)
        for rows in range(1, self.rows + 1):
            self.tell([], tokens)
            for name in {self.layers[0], self.layers[-1]}:
                out = torch.empty_like(q[:rows])
                self.attend(name, q[:rows], pages, tables[:rows], out, shape.dim**-0.5)
            self.lanes.barrier()

    def uncertain(self, flags: Tensor, lanes: Tensor) -> None:
        """Note which lanes' outputs were uncertain: flags bool [B], lanes int64 [B]."""
        from ...ops.triton import trigger

        self.state[trigger.STATE.index("uncertain")].index_copy_(0, lanes, flags.to(torch.int32))

    # -- the step itself

    def attend(
        self,
        name: str,
        q: Tensor,
        pages: tuple[Tensor, Tensor],
        tables: Tensor,
        out: Tensor,
        scale: float,
        board: Board | None = None,
    ) -> None:
        """Attention of one new token per row in the layer `name`, and the choice of the rows that
        choose again; keys and values of the new tokens are in the pages.

        Args:
            q, out: [B, H, D], contiguous; B at most `rows`.
            pages: keys and values, each [pages, Hkv, page size, D] of any strides but the last.
            tables: int32 [B, most pages].
            board: of these rows; None: the one of `tell`.
        """
        from ...ops.triton import Cache

        alone = board is not None
        board, rows = board or self.board, q.shape[0]
        field = functools.partial(board.field, rows=rows)
        kv = Cache(*pages, field("starts"), field("lengths"), tables, self.longest)
        if alone:
            # a Selector of this layer's other rows may still read its workspace
            self.lanes.barrier()
        if name == self.layers[0] or alone:
            self.lanes.restart()
        self._rows(name, q, kv, board, scale, out)
        if name == self.layers[-1] or alone:
            # what was chosen is there when the next step begins
            self.lanes.barrier()

    def _rows(
        self, name: str, q: Tensor, kv: Cache, board: Board, scale: float, out: Tensor
    ) -> None:
        from ...ops.triton import Chosen, decode_dense

        field = functools.partial(board.field, rows=q.shape[0])
        if self.config.mode == "dense":
            work = self.lanes.works[0]
            out.zero_()  # rows that are padding are left alone
            decode_dense(q, kv, scale=scale, work=work, active=field("dense"), out=out)
            return
        lists = self.indices[name], self.counts[name]
        chosen = Chosen(*lists, field("window"), self.config.sink, field("lane"))
        allowed, work = (field("low"), field("high")), self.lanes.next()
        kinds = field("dense"), field("fast")
        self.lanes.attend(q, kv, chosen, kinds, allowed, scale=scale, work=work, out=out)
        self.lanes.later(functools.partial(self._choose, name, kv, q.shape[1], work, board))

    def _choose(self, name: str, kv: Cache, heads: int, work: Workspace, board: Board) -> None:
        from ...ops.triton import refresh

        field = functools.partial(board.field, rows=kv.lengths.shape[0])
        refresh(
            kv, self.config.selector, heads=heads, work=work,
            allowed=(field("low"), field("high")), active=field("refresh"),
            indices=self.indices[name], counts=self.counts[name], lanes=field("lane"),
        )  # fmt: skip
