"""Time to the first token of one long prompt: a whole transformers model with random weights, its
dense attention as users run it, ours, and none at all."""

from __future__ import annotations

import gc
import inspect
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..config import Backend, Config
from ..errors import NumericalError, UnsupportedError
from ..integrations.hf.attach import attach
from ..integrations.hf.indexers import new_indexer
from ..prefill import resolved, share_read
from ..prefilling import SparsePrefill
from ..shapes import Shape, shape_of
from .compiled_dense import compilations, layers_compiled
from .model import random_model
from .prefill_arms import reason
from .prefill_checks import WIDTH
from .probes import linear_layers, sdpa_calls, without_attention
from .spans import Spans, watched
from .timing import Record

BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
COMPILED = ", compiled layers"  # behind a backend's name: a further dense arm
COMPILED_ARMS = ("cudnn" + COMPILED,)
RUNS, WARM_TOKENS = 3, 16_384
WARM_SECONDS = 5.0  # a first run that took longer counts, and is not a warm-up
ARM_SECONDS = 10.0  # no further run of an arm after so long
DROP = 1.15  # a backend so much slower than the fastest is not run at longer prompts
COMPARED = (
    "milliseconds from the call of the model to the last token's logits on the device, the whole "
    "prompt in one forward with an empty DynamicCache. dense: the model without reread, "
    "transformers' SDPA on one backend at a time, no mask in memory; and with the layers compiled "
    "as reread compiles them, in reread's cache. sparse: the same forward with reread attached, "
    "which compiles the layers where it can (notes say where not). parts: one further run with "
    "events around reread's parts; rest is what remains of it, linear layers above all. In "
    "compiled layers the indexer's projections are part of the attention's own product: they are "
    "in rest, and projections are missing. no_attention: the queries in the place of attention's "
    "output, layers not compiled. A run in which something was compiled is not counted."
)
Progress = Callable[[str], None]

_HYBRID = {
    "model_type": "qwen3_5_text",
    "vocab_size": 248_320,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 8,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262_144,
    "tie_word_embeddings": False,
}
# a shape of its own here: the planner's shapes count the weights of attention layers only
HYBRID = Shape(
    name="qwen3.5-9b", layers=8, total_layers=32, hidden=4096, heads=16, kv_heads=4, head_dim=256,
    intermediate=12_288, vocabulary=248_320, tied=False, source=_HYBRID,
)  # fmt: skip


def bench_shape(name: str) -> Shape:
    """As `shape_of`, and "qwen3.5-9b"; letter case ignored.

    Raises:
        InputError: no such shape.
    """
    return HYBRID if name.lower() == HYBRID.name else shape_of(name)


@dataclass(slots=True)
class Prompts:
    """A random model, and what its runs have in common.

    Attributes:
        slow: backends that longer prompts leave out, and why.
    """

    shape: Shape
    config: SparsePrefill
    device: torch.device
    model: Any
    indexer: Any
    chunk: int = 0
    backend: Backend = "auto"
    backends: dict[str, SDPBackend] = field(default_factory=lambda: dict(BACKENDS))
    warm_tokens: int = WARM_TOKENS
    slow: dict[str, str] = field(default_factory=dict)

    def ids(self, length: int) -> Tensor:
        """Random ids [1, L]."""
        torch.manual_seed(0)
        return torch.randint(0, self.shape.vocabulary, (1, length), device=self.device)

    def seconds(self, length: int, chunk: int = 0) -> tuple[float, Tensor]:
        """What one prompt takes, and its logits [V]."""
        ids = self.ids(length)
        gc.collect()  # a former cache that refers to itself would take the room of this one
        self._wait()
        begin = time.perf_counter()
        logits = first_logits(self.model, ids, chunk)
        self._wait()
        return time.perf_counter() - begin, logits

    def timed(self, length: int, chunk: int = 0) -> tuple[Record, Tensor]:
        """Milliseconds: the median of `RUNS`, fewer where a run takes long; and the logits."""
        if length > self.warm_tokens:
            self.seconds(self.warm_tokens, chunk)
        before = compilations()
        first, logits = self.seconds(length, chunk)
        ready = compilations() == before
        counts = ready and (first > WARM_SECONDS or self.device.type != "cuda")
        times, spent = [first] if counts else [], first if ready else 0.0
        while len(times) < RUNS and (not times or spent < ARM_SECONDS):
            times.append(self.seconds(length, chunk)[0])
            spent += times[-1]
        median = statistics.median(times) * 1e3
        return {"ms": median, "runs": [t * 1e3 for t in times]}, logits

    @property
    def dense_arms(self) -> list[str]:
        """Backends, and those that run with compiled layers, too."""
        further = [arm for arm in COMPILED_ARMS if arm.removesuffix(COMPILED) in self.backends]
        return [*self.backends, *further]

    def attached(self) -> Any:
        """The model attached for a sparse prefill; a context manager."""
        config = Config(mode="dense", prefill=self.config, backend=self.backend)
        return attach(self.model, config, indexer=self.indexer)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


@torch.no_grad()
def first_logits(model: Any, ids: Tensor, chunk: int = 0) -> Tensor:
    """The last token's logits [V] of a prompt [1, L], in forwards of `chunk` tokens or at once."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    known = inspect.signature(model.forward).parameters
    given = {"cache" if "cache" in known else "past_key_values": cache}
    for part in torch.split(ids, chunk or ids.shape[1], dim=1):
        output = model(part, **given, use_cache=True, logits_to_keep=1)
    logits: Tensor = output.logits[0, -1]
    return logits


def measure(
    shape: Shape,
    contexts: Sequence[int],
    config: SparsePrefill,
    device: torch.device,
    *,
    chunk: int = 0,
    progress: Progress = lambda _: None,
    on_row: Callable[[Record], None] = lambda _: None,
) -> list[Record]:
    """A record for each length; `on_row` is told each as it is done.

    What does not fit or run says so in "failed", in its arm or for all lengths.
    """
    progress(f"{shape.name}: building the model")
    try:
        model = random_model(shape, device, torch.bfloat16)
        prompts = Prompts(
            shape, config, device, model, new_indexer(model, WIDTH, 1, "random"), chunk
        )
    except Exception as error:  # the record says why nothing ran
        rows = [{"shape": shape.name, "context": c, "failed": reason(error)} for c in contexts]
        for row in rows:
            on_row(row)
        return rows
    found = []
    for context in contexts:
        found.append(at_length(prompts, context, progress))
        on_row(found[-1])
    return found


def at_length(prompts: Prompts, length: int, progress: Progress = lambda _: None) -> Record:
    """All arms at one length."""
    found: Record = {
        "shape": prompts.shape.name, "context": length, "chunk": prompts.chunk,
        "linear_layers": linear_layers(prompts.model),
    }  # fmt: skip
    dense, want = [], None
    for name in prompts.dense_arms:
        progress(f"{prompts.shape.name} {length}: dense, {name}")
        record, logits = dense_arm(prompts, name, length, want)
        dense.append(record)
        want = logits if want is None else want
    found["dense"] = dense
    for name, work in (("sparse", sparse_arm), ("no_attention", bare_arm)):
        progress(f"{prompts.shape.name} {length}: {name}")
        found[name] = _guarded(partial(work, prompts, length))
    ran = [arm for arm in dense if "ms" in arm]
    if ran:
        fastest = min(ran, key=lambda arm: float(arm["ms"]))
        found["fastest_dense"] = fastest["arm"]
        _leave_out([arm for arm in ran if not arm["arm"].endswith(COMPILED)], prompts, length)
        if "ms" in found["sparse"]:
            found["speedup"] = fastest["ms"] / found["sparse"]["ms"]
    return found


def _leave_out(ran: list[Record], prompts: Prompts, length: int) -> None:
    """Backends that longer prompts need not run."""
    fastest = min(ran, key=lambda arm: float(arm["ms"]), default={})
    for arm in ran:
        if arm["ms"] > DROP * fastest["ms"]:
            prompts.slow[arm["arm"]] = (
                f"left out: {arm['ms'] / fastest['ms']:.2f} times as slow as "
                f"{fastest['arm']} at {length} tokens"
            )


def _guarded(work: Callable[[], Record]) -> Record:
    try:
        return work()
    except Exception as error:  # one arm's failure is its result
        return {"failed": reason(error)}
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def dense_arm(
    prompts: Prompts, name: str, length: int, want: Tensor | None
) -> tuple[Record, Tensor | None]:
    """One backend, and its logits; they must be close to `want` where there is one."""
    if name in prompts.slow:
        return {"arm": name, "not_run": prompts.slow[name]}, None
    kept: list[Tensor] = []
    backend = prompts.backends[name.removesuffix(COMPILED)]

    def work() -> Record:
        layers = layers_compiled(prompts.model) if COMPILED in name else nullcontext()
        with layers, sdpa_kernel(backend), sdpa_calls() as calls:
            record, logits = prompts.timed(length)
        told = [dict(call) for call in sorted(calls)]
        if not told or any(call["attn_mask"] or not call["is_causal"] for call in told):
            raise UnsupportedError(f"SDPA was not called causally without a mask: {told}")
        kept.append(logits)
        error = {} if want is None else {"against_first": difference(logits, want)}
        return {"arm": name, **record, "sdpa": told, **error}

    record = _guarded(work)
    if "failed" in record:
        return {"arm": name, "not_run": f"failed: {record['failed']}"}, None
    return record, kept[0]


def sparse_arm(prompts: Prompts, length: int) -> Record:
    """Ours, and its parts in one further run."""
    with prompts.attached() as session:
        record, _ = prompts.timed(length, prompts.chunk)
        spans = Spans(prompts.device)
        with watched(spans):
            total, _ = prompts.seconds(length, prompts.chunk)
        parts = spans.totals() | {"total_ms": total * 1e3}
        with session.decoding():
            pass  # for its notes
    record["notes"] = session.stats.notes
    if not parts["calls"].get("attention"):
        raise NumericalError("the sparse attention did not run")
    known = sum(parts.get(f"{p}_ms", 0.0) for p in ("projections", "selection", "attention"))
    backend = "triton" if prompts.device.type == "cuda" else "reference"
    share = share_read(length, resolved(prompts.config, backend))
    return {**record, "parts": parts | {"rest_ms": parts["total_ms"] - known}, "share_read": share}


def bare_arm(prompts: Prompts, length: int) -> Record:
    """The same forward without attention."""
    with without_attention(prompts.model):
        return prompts.timed(length)[0]


def difference(got: Tensor, want: Tensor) -> float:
    """Relative, in the 2-norm."""
    return float((got.float() - want.float()).norm() / want.float().norm())
