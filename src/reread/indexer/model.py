"""A small module per layer that predicts the attention mass of its layer: one query and one key of
width d from the layer's input, rotary positions, scores shared by all heads of the backbone.

score(t, j) = <R_t W_q x_t, R_j W_k x_j> / sqrt(d); softmax over the past is the prediction of P.

Head-collapsed is one such pair (heads=1), which is what the kernels serve. Several index heads,
whose predictions are averaged, are there to be compared with it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ..errors import InputError
from .checkpoint import write_tensors

WEIGHTS = "indexer.safetensors"
FORMAT = "1"
# what of a config decides the shapes and positions that weights are trained for; what else a config
# holds differs between releases of transformers
DEFINING = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "layer_types",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerCard:
    """What an indexer is, and for which backbone.

    Attributes:
        layers: indices of the full-attention layers it has a part for.
        hidden: width of the layers' input; width: d of one index head, even; heads: n.
        theta: base of its rotary positions.
        backbone: hash of the backbone's config, see `identity`.
        record: how it was trained; {} where it was not.
    """

    layers: tuple[int, ...]
    hidden: int
    width: int
    theta: float
    backbone: str
    heads: int = 1
    record: Mapping[str, Any] = field(default_factory=dict)

    def check_fits(self, hidden: int, layers: Sequence[int]) -> None:
        """Refuse a model of other shapes: hidden: width of its layers' input; layers: indices of
        those that need a part.

        Raises:
            InputError: a part is missing, or of another width.
        """
        missing = [i for i in layers if i not in self.layers]
        if missing:
            raise InputError(f"the indexer has no part for layers {missing} of the model")
        if self.hidden != hidden:
            raise InputError(f"the indexer reads inputs of {self.hidden}, the model has {hidden}")


def identity(config: Mapping[str, Any], sample: bytes = b"") -> str:
    """Hash of what defines a backbone: its text config (plain values), and a sample of its
    weights, by which two trainings of one architecture differ."""
    kept = json.dumps({name: config.get(name) for name in DEFINING}, sort_keys=True, default=str)
    return hashlib.sha256(kept.encode() + sample).hexdigest()


class Indexer(nn.Module):
    """All layers' indexers; see the module's docstring for the equation."""

    def __init__(self, card: IndexerCard) -> None:
        super().__init__()
        if card.width < 2 or card.width % 2:
            raise InputError(f"width={card.width} is not possible: an even number of at least 2")
        if card.heads < 1:
            raise InputError(f"heads={card.heads} is not possible: at least 1")
        self.card = card
        shape = card.hidden, card.heads * card.width
        self.query = nn.ModuleDict({str(i): nn.Linear(*shape, bias=False) for i in card.layers})
        self.key = nn.ModuleDict({str(i): nn.Linear(*shape, bias=False) for i in card.layers})

    def queries(self, layer: int, x: Tensor, positions: Tensor) -> Tensor:
        """x: [..., N, hidden], the input of the layer's attention, at `positions` (int64, [..., N],
        counted from the row's first token). Returns [..., n, N, d], scaled by 1 / sqrt(d)."""
        return self._project(self.query[str(layer)], x, positions) * math.sqrt(1 / self.card.width)

    def keys(self, layer: int, x: Tensor, positions: Tensor) -> Tensor:
        """As `queries`, not scaled."""
        return self._project(self.key[str(layer)], x, positions)

    def _project(self, linear: nn.Module, x: Tensor, positions: Tensor) -> Tensor:
        split = linear(x).unflatten(-1, (self.card.heads, self.card.width)).transpose(-2, -3)
        return rotate(split, positions.unsqueeze(-2), self.card.theta)

    def save(self, folder: Path) -> Path:
        """Write weights and card into a folder, and return the file.

        Raises:
            InputError: it cannot be written; an older indexer there is untouched.
        """
        path = folder / WEIGHTS
        metadata = {"format": FORMAT, "card": json.dumps(asdict(self.card))}
        write_tensors(path, self.state_dict(), metadata)
        return path

    @classmethod
    def load(
        cls, folder: Path, *, backbone: str | None = None, device: torch.device | str = "cpu"
    ) -> Indexer:
        """An indexer from a folder, in float32.

        Args:
            backbone: `identity` of the model it is for; None: not checked.

        Raises:
            InputError: no indexer there, a broken file, or one of another backbone.
        """
        path = folder / WEIGHTS
        with _opened(path, device) as file:
            card = _card(path, file.metadata() or {})
            if backbone is not None and card.backbone != backbone:
                raise InputError(
                    f"the indexer in {folder} was made for another backbone (config hash "
                    f"{card.backbone[:12]}, this model's is {backbone[:12]}): distil one for this "
                    "model"
                )
            names = file.keys()
            held = {name: file.get_tensor(name) for name in names}
        wrong = [n for n, x in held.items() if not x.is_floating_point() or not x.isfinite().all()]
        if wrong:
            raise InputError(f"{path} holds weights that are no finite numbers: {wrong[0]}")
        state = {name: x.to(torch.float32) for name, x in held.items()}
        # nothing is drawn only to be replaced
        with torch.device("meta"):
            found = cls(card)
        try:
            found.load_state_dict(state, assign=True)
        except RuntimeError as error:
            raise InputError(f"{path} does not hold what its card says: {error}") from error
        return found

    @staticmethod
    def read_card(folder: Path) -> IndexerCard:
        """The card of the indexer in a folder; no weights are read.

        Raises:
            InputError: no indexer there, a broken file, or weights of other shapes than its card's.
        """
        path = folder / WEIGHTS
        with _opened(path, "cpu") as file:
            card = _card(path, file.metadata() or {})
            names = file.keys()
            held = {name: tuple(file.get_slice(name).get_shape()) for name in names}
        with torch.device("meta"):
            wanted = {name: tuple(x.shape) for name, x in Indexer(card).state_dict().items()}
        if held != wanted:
            wrong = sorted(n for n in held.keys() | wanted if held.get(n) != wanted.get(n))
            raise InputError(f"{path} does not hold what its card says: {', '.join(wrong[:4])}")
        return card


@contextlib.contextmanager
def _opened(path: Path, device: torch.device | str) -> Iterator[Any]:
    """The file of an indexer."""
    if not path.is_file():
        raise InputError(f"{path.parent} holds no indexer: {WEIGHTS} is missing")
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} cannot be read as safetensors: {error}") from error


def _card(path: Path, metadata: Mapping[str, str]) -> IndexerCard:
    if metadata.get("format") != FORMAT or "card" not in metadata:
        raise InputError(f"{path} is no indexer of format {FORMAT}")
    try:
        values = json.loads(metadata["card"])
        card = IndexerCard(**{**values, "layers": tuple(map(int, values["layers"]))})
        numbers = card.hidden, card.width, card.heads
        ok = all(isinstance(n, int) and n > 0 for n in numbers)
        ok = ok and 0 < card.theta < math.inf and len(set(card.layers)) == len(card.layers)
        ok = ok and isinstance(card.backbone, str) and isinstance(card.record, Mapping)
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} has a card that cannot be read: {error!r}") from error
    if not ok:
        raise InputError(f"{path} has a card whose values are not possible: {values}")
    return card


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary positions: pairs (i, i + d/2) turn by position / theta^(2i/d). x: [..., N, d]."""
    half = x.shape[-1] // 2
    steps = torch.arange(half, device=x.device, dtype=torch.float32)
    angles = positions[..., None].float() * theta ** (-steps / half)
    cos, sin = angles.cos(), angles.sin()
    # in float32 whatever x is: bfloat16 would round the turn itself
    a, b = x[..., :half].float(), x[..., half:].float()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


@torch.no_grad()
def initialise_from(
    indexer: Indexer, projections: Mapping[int, tuple[Tensor, Tensor]], head_dim: int
) -> None:
    """Start from the layers' own projections: the best product of rank d to the mean of W_qh^T W_kh
    over the query heads that an index head stands for, by its singular value decomposition.

    Args:
        projections: per layer W_q [H D, hidden] and W_k [Hkv D, hidden].

    Raises:
        InputError: the index heads do not divide the query heads.
    """
    card = indexer.card
    for layer in card.layers:
        w_q, w_k = (w.float() for w in projections[layer])
        heads, kv_heads = w_q.shape[0] // head_dim, w_k.shape[0] // head_dim
        if heads % card.heads:
            raise InputError(f"heads={card.heads} is not possible: a divisor of {heads}")
        per_head = w_k.view(kv_heads, head_dim, -1).repeat_interleave(heads // kv_heads, dim=0)
        group = heads // card.heads
        for n in range(card.heads):
            # the sum over heads of products is one product of the stacked projections
            own = slice(n * group, (n + 1) * group)
            stacked_q = w_q.view(heads, head_dim, -1)[own].reshape(group * head_dim, -1)
            mean = stacked_q.T @ per_head[own].reshape(group * head_dim, -1) / group
            u, s, v = torch.linalg.svd(mean, full_matrices=False)
            root, into = s[: card.width].sqrt(), slice(n * card.width, (n + 1) * card.width)
            _put(indexer.query[str(layer)], into, (u[:, : card.width] * root).T)
            _put(indexer.key[str(layer)], into, (v[: card.width].T * root).T)


def _put(linear: nn.Module, into: slice, vectors: Tensor) -> None:
    """Rows of a weight; what the rank does not fill is zero."""
    weight = linear.weight
    assert isinstance(weight, Tensor)
    weight[into] = 0
    weight[into][: vectors.shape[0]] = vectors.to(weight)


def predicted_mass(iq: Tensor, ik: Tensor, positions: Sequence[int] | Tensor, start: int) -> Tensor:
    """The indexer's P: softmax over the past of its scores, averaged over index heads.

    Args:
        iq: [n, N, d] of queries at cache `positions`; ik: [n, L, d]; start: first position that is
            no padding.

    Returns:
        fp32 [N, L], each row sums to 1.
    """
    at = torch.arange(ik.shape[1], device=ik.device)
    seen_from = torch.as_tensor(positions, device=ik.device)
    hidden = (at[None, :] > seen_from[:, None]) | (at[None, :] < start)
    scores = torch.matmul(iq.float(), ik.float().transpose(1, 2))
    return torch.softmax(scores.masked_fill_(hidden, float("-inf")), dim=-1).mean(dim=0)
