"""How concentrated attention is: the mass profile of the oracle, layer by layer.

P(t) is the mean over query heads of dense attention's probabilities. The mass of the top k is what
a choice of k past tokens keeps of it; shared, one choice serves a block of consecutive queries, and
P is averaged over them first.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from ..indexer.loss import LayerCall
from ..integrations.hf.teacher import Teacher

TARGETS = (0.90, 0.95, 0.99)
BLOCK = 64
QUERIES = 256
PIECE_BYTES = 1 << 29  # of fp32 logits [H, N, L] at a time
SHORTEST = 2 * BLOCK
STYLES = (("-", "o"), ("--", "s"), (":", "^"))  # of TARGETS: readable without colours


@dataclass(frozen=True, slots=True)
class Profile:
    """One layer, per query or shared.

    Attributes:
        mass: by k, mean share of P that the top k hold.
        needed: by target share, the k that holds it: mean, median and 90th percentile.
        count: queries, or blocks of them.
    """

    mass: dict[int, float]
    needed: dict[float, dict[str, float]]
    count: int


@dataclass(frozen=True, slots=True)
class MassProfile:
    """A text's profile.

    Attributes:
        tokens: length of the text; block: queries that share a choice.
        per_query, shared: by layer.
    """

    tokens: int
    block: int
    per_query: dict[int, Profile]
    shared: dict[int, Profile]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


@torch.no_grad()
def mass_profile(
    model: Any,
    ids: Tensor,
    ks: Sequence[int],
    *,
    queries: int = QUERIES,
    block: int = BLOCK,
    piece_bytes: int = PIECE_BYTES,
    tick: Callable[[int], None] | None = None,
) -> MassProfile:
    """The profile of every full-attention layer over one dense pass.

    Args:
        ids: int64 [T], at least 2 * block tokens.
        ks: whole numbers of at least 1.
        queries: positions that are asked, evenly spaced over the last three quarters; a quarter as
            many blocks are asked for the shared profile, at most 16.
        tick: called with each layer's index when it is done.

    Raises:
        InputError: too short a text, or a k below 1.
        UnsupportedError: a model that reread does not serve.
    """
    length = ids.shape[0]
    if length < 2 * block:
        raise InputError(f"the text has {length} tokens: at least {2 * block} are needed")
    if not ks or any(k < 1 for k in ks):
        raise InputError(f"k={list(ks)} is not possible: whole numbers of at least 1")
    alone, blocks = positions_asked(length, queries), blocks_asked(length, queries, block)
    per_query: dict[int, Profile] = {}
    shared: dict[int, Profile] = {}

    def on_layer(call: LayerCall) -> None:
        asked = _masses(call, [[p] for p in alone], piece_bytes)
        per_query[call.layer] = _profile(asked, ks)
        shared[call.layer] = _profile(_masses(call, blocks, piece_bytes), ks)
        if tick is not None:
            tick(call.layer)

    with Teacher(model) as teacher:
        teacher.read(ids, on_layer)
    return MassProfile(length, block, per_query, shared)


def positions_asked(length: int, queries: int) -> list[int]:
    """Evenly spaced positions of the last three quarters, the last one among them."""
    first = length // 4
    count = min(queries, length - first)
    return [first + (i + 1) * (length - first) // count - 1 for i in range(count)]


def blocks_asked(length: int, queries: int, block: int) -> list[list[int]]:
    """Whole blocks of consecutive positions of the last three quarters, evenly spaced."""
    whole = range(-(-(length // 4) // block), length // block)
    count = min(len(whole), 16, max(1, queries // 4))
    chosen = [whole[(i + 1) * len(whole) // count - 1] for i in range(count)]
    return [list(range(n * block, (n + 1) * block)) for n in chosen]


def _masses(call: LayerCall, blocks: Sequence[Sequence[int]], piece_bytes: int) -> Iterator[Tensor]:
    """Mean P of each block's queries, [n, L], some blocks at a time."""
    length = call.x.shape[0]
    size = len(blocks[0])
    # logits and probabilities exist at once
    room = max(1, piece_bytes // (2 * 4 * call.heads * length) // size)
    for first in range(0, len(blocks), room):
        part = blocks[first : first + room]
        asked = torch.tensor([p for block in part for p in block], device=call.x.device)
        mass = call.mass(asked, length)
        yield mass.view(len(part), size, length).mean(dim=1)


def _profile(masses: Iterator[Tensor], ks: Sequence[int]) -> Profile:
    """The figures of all rows."""
    held: list[Tensor] = []
    needed: list[Tensor] = []
    for mass in masses:
        covered = mass.sort(dim=-1, descending=True).values.double().cumsum(dim=-1)
        covered = covered / covered[:, -1:]  # fp32 probabilities add up to nearly 1
        last = covered.shape[1]
        held.append(torch.stack([covered[:, min(k, last) - 1] for k in ks], dim=1).cpu())
        short = [(covered < target).sum(dim=-1) for target in TARGETS]
        needed.append((torch.stack(short, dim=1) + 1).clamp(max=last).double().cpu())
    means, counts = torch.cat(held).mean(dim=0), torch.cat(needed)
    return Profile(
        mass={k: float(means[i]) for i, k in enumerate(ks)},
        needed={target: _spread(counts[:, i]) for i, target in enumerate(TARGETS)},
        count=len(counts),
    )


def _spread(values: Tensor) -> dict[str, float]:
    return {
        "mean": float(values.mean()),
        "median": float(values.quantile(0.5)),
        "p90": float(values.quantile(0.9)),
    }


def check_plot(path: Path) -> None:
    """Refuse a plot that could not be written, before anything is measured.

    Raises:
        InputError: matplotlib is missing, or a kind of file that it does not write.
    """
    try:
        importlib.import_module("matplotlib")
    except ImportError as error:
        raise InputError(
            "a plot needs matplotlib, which is not installed: pip install matplotlib"
        ) from error
    if path.suffix not in (".svg", ".png", ".pdf"):
        raise InputError(f"plot {path} is not possible: a name that ends in .svg, .png or .pdf")
    if not path.resolve().parent.is_dir():
        raise InputError(f"plot {path} is not possible: its folder does not exist")


def draw(profile: MassProfile, path: Path, title: str) -> None:
    """Draw the median k that each layer needs, per query and shared, one line a target share.

    Raises:
        InputError: as `check_plot`, or the file cannot be written.
    """
    check_plot(path)
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import ScalarFormatter

    # the same file for the same figures, wherever it is drawn
    with rc_context({"svg.hashsalt": "reread", "svg.fonttype": "none"}):
        figure = Figure(figsize=(9, 4), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(1, 2, sharey=True)
        sides = ("per query", profile.per_query), (f"shared by {profile.block}", profile.shared)
        for axes, (name, layers) in zip(panels, sides, strict=True):
            for target, (line, mark) in zip(TARGETS, STYLES, strict=True):
                values = [found.needed[target]["median"] for found in layers.values()]
                label = f"{target:.0%} of the mass"
                axes.plot(list(layers), values, line, marker=mark, color="black", label=label)
            axes.set_title(name)
            axes.set_xlabel("layer")
            axes.set_yscale("log", base=2)
            axes.yaxis.set_major_formatter(ScalarFormatter())
            axes.grid(alpha=0.3)
        panels[0].set_ylabel("tokens needed (median)")
        panels[0].legend()
        figure.suptitle(f"{title}, {profile.tokens} tokens")
        undated = {"Date": None, "Creator": None} if path.suffix == ".svg" else None
        try:
            figure.savefig(path, metadata=undated)
        except OSError as error:
            raise InputError(f"plot {path} cannot be written: {error.strerror}") from error
