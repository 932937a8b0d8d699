"""A whole distillation: model, data, steps, checkpoints, and what is saved at its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import InputError, NumericalError
from ..indexer import checkpoint
from ..indexer.distill import Distiller, Metrics, Progress, Schedule, assess, mean_of
from ..indexer.loss import top_of
from ..indexer.model import Indexer
from ..indexer.workers import Workers, find_workers
from ..integrations.hf.indexers import backbone_identity, init_notes, new_indexer
from ..integrations.hf.load import Loaded, load
from ..integrations.hf.teacher import Teacher
from .corpus import Corpus, open_corpus
from .provenance import provenance

DTYPES = ("auto", "bfloat16", "float32")
# what may change between the parts of a run
FREE = ("out", "checkpoint_every", "device")
Report = Callable[[Progress, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What `reread distill` is asked for; see its options."""

    model: str
    data: str
    tokens: int
    out: Path
    context: int = 16384
    width: int = 64
    heads: int = 1
    init: str = "svd"
    lr: float = 3e-3
    stretch: float = 4.0
    accumulate: int = 1
    queries: int = 1024
    checkpoint_every: int = 50
    seed: int = 0
    dtype: str = "auto"
    device: str = "auto"

    def check(self) -> None:
        """Refuse what cannot be right before anything is loaded.

        Raises:
            InputError: names the option.
        """
        for name in ("context", "tokens", "heads", "accumulate", "queries", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)} is not possible: at least 1")
        if self.width < 2 or self.width % 2:
            raise InputError(f"width={self.width} is not possible: an even number of at least 2")
        if not 0 < self.lr < 1:
            raise InputError(f"lr={self.lr} is not possible: above 0 and below 1")
        if not 1 <= self.stretch <= 1e4:
            raise InputError(f"stretch={self.stretch} is not possible: from 1 to 10000")
        if self.seed < 0:
            raise InputError(f"seed={self.seed} is not possible: at least 0")
        if self.dtype not in DTYPES:
            raise InputError(f"dtype={self.dtype!r} is not possible: one of {', '.join(DTYPES)}")
        if self.tokens < self.context:
            raise InputError(
                f"tokens={self.tokens} is not possible: at least one context of {self.context}"
            )


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished distillation.

    Attributes:
        record: what record.json holds; notes: what the user should know.
        already: it was finished before, and nothing was done.
        rank: of this process among those that ran; the one of rank 0 tells of it.
    """

    record: dict[str, Any]
    notes: tuple[str, ...] = ()
    already: bool = False
    rank: int = 0


class Interrupted(KeyboardInterrupt):
    """Ctrl-C; `step` is the last one that the checkpoint in the folder holds."""

    def __init__(self, step: int, steps: int) -> None:
        super().__init__(f"interrupted after step {step} of {steps}")
        self.step = step
        self.steps = steps


def distil(request: Request, report: Report | None = None) -> Outcome:
    """Distil an indexer into `request.out`, or continue what was interrupted there.

    Args:
        report: called after every step with the progress and the number of steps.

    Raises:
        InputError: an option, the data or the folder that cannot be right; a full disk.
        UnsupportedError: a model that reread does not serve.
        NumericalError: the model or the indexer no longer gives numbers.
        Interrupted: Ctrl-C, once the checkpoint is written.
    """
    request.check()
    checkpoint.check_writable(request.out)
    workers = find_workers(request.device)
    loaded = load(request.model, dtype=request.dtype, device=request.device)
    _check_positions(loaded, request.context)
    corpus = open_corpus(
        request.data, loaded.tokenizer,
        context=request.context, tokens=request.tokens, seed=request.seed,
    )  # fmt: skip
    run = _Run(request, loaded, corpus, workers)
    finished = checkpoint.read_json(request.out / checkpoint.RECORD)
    if finished is not None:
        checkpoint.check_same(request.out, finished.get("settings", {}), run.settings)
        return Outcome(finished, corpus.notes, already=True, rank=workers.rank)
    told = report if report is not None and not workers.rank else _quiet
    with Teacher(loaded.model) as teacher:
        record = run.finish(teacher, told)
    return Outcome(record, tuple(record["notes"]), rank=workers.rank)


def _quiet(progress: Progress, steps: int) -> None:
    pass


def _check_positions(loaded: Loaded, context: int) -> None:
    text = loaded.model.config.get_text_config(decoder=True)
    limit = getattr(text, "max_position_embeddings", None)
    if limit is not None and context > limit:
        raise InputError(
            f"context={context} is not possible: {loaded.name} has {limit} positions at most"
        )


def steps_of(request: Request, workers: Workers) -> int:
    """Steps of the optimiser.

    Raises:
        InputError: not enough tokens for one.
    """
    each = request.context * request.accumulate * workers.count
    if request.tokens < each:
        raise InputError(
            f"tokens={request.tokens} is not possible: one step takes {each} (context times "
            "accumulate times processes)"
        )
    return request.tokens // each


class _Run:
    """A distillation with its folder."""

    def __init__(self, request: Request, loaded: Loaded, corpus: Corpus, workers: Workers) -> None:
        self.request, self.corpus, self.workers = request, corpus, workers
        self.model = loaded.model
        asked = {k: v for k, v in asdict(request).items() if k not in FREE}
        self.settings = {
            **asked,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "digest": corpus.digest,
            "backbone": backbone_identity(self.model),
            "processes": workers.count,
        }
        indexer = new_indexer(
            self.model, request.width, request.heads, request.init, seed=request.seed
        ).to(self.model.device)
        schedule = Schedule(
            steps=steps_of(request, workers), lr=request.lr, accumulate=request.accumulate,
            queries=request.queries, seed=request.seed, stretch=request.stretch,
        )  # fmt: skip
        self.distiller = Distiller(indexer, schedule, workers)
        self.before: dict[str, Metrics] = {}
        self.seconds = 0.0
        self.saved = 0

    def finish(self, teacher: Teacher, report: Report) -> dict[str, Any]:
        """All steps that are left, then what is saved at the end."""
        self._restore()
        self.workers.wait()  # nobody writes before all have read
        distiller, steps = self.distiller, self.distiller.schedule.steps
        try:
            if not self.before:
                distiller.calibrate(self.corpus.training(0), teacher)
                self.before = self._assess(teacher)
                self._save()
            while not distiller.done:
                started = time.perf_counter()
                distiller.step(self.corpus.training, teacher)
                self.seconds += time.perf_counter() - started
                report(distiller.progress, steps)
                if distiller.done or distiller.progress.step % self.request.checkpoint_every == 0:
                    self._save()
            return self._conclude(teacher)
        except KeyboardInterrupt:
            self._save_unless_updating()
            raise Interrupted(self.saved, steps) from None
        except NumericalError as error:
            self._save_unless_updating()
            told = f"{error}; the checkpoint of step {self.saved} stays in {self.request.out}"
            raise NumericalError(told) from error

    def _assess(self, teacher: Teacher) -> dict[str, Metrics]:
        """Metrics on the held-out contexts, by layer."""
        found = assess(
            self.distiller.indexer, teacher, self.corpus.held_out,
            queries=self.request.queries, seed=self.request.seed,
        )  # fmt: skip
        return {str(layer): values for layer, values in found.items()}

    def _restore(self) -> None:
        found = checkpoint.load_checkpoint(self.request.out)
        if found is None:
            return
        tensors, counters = found
        checkpoint.check_same(self.request.out, counters.pop("settings"), self.settings)
        self.before, self.seconds = counters.pop("before"), counters.pop("seconds")
        self.distiller.restore(tensors, counters)
        self.saved = self.distiller.progress.step

    def _save_unless_updating(self) -> None:
        # an update that was cut short has no state to save: the checkpoint before it counts
        if not self.distiller.updating and self.before:
            self._save()

    def _save(self) -> None:
        step = self.distiller.progress.step
        if not self.workers.rank:
            tensors, counters = self.distiller.state()
            known = {"settings": self.settings, "before": self.before, "seconds": self.seconds}
            checkpoint.save_checkpoint(self.request.out, tensors, {**counters, **known})
        self.saved = step

    def _conclude(self, teacher: Teacher) -> dict[str, Any]:
        after = self._assess(teacher)
        distiller, card = self.distiller, self.distiller.indexer.card
        record = {
            "settings": self.settings,
            "steps": distiller.schedule.steps,
            "tokens_read": distiller.schedule.steps * self._tokens_of_step(),
            "seconds": self.seconds,
            "init": dict(card.record),
            "k": top_of(self.request.context),
            "held_out_contexts": len(self.corpus.held_out),
            "before": {**means(self.before), "layers": self.before},
            "after": {**means(after), "layers": after},
            "history": distiller.progress.history,
            "notes": [*self.corpus.notes, *init_notes(card.record)],
            **provenance(self.model.device),
        }
        if not self.workers.rank:
            self._store(distiller.indexer, record)
        self.workers.wait()
        return record

    def _store(self, indexer: Indexer, record: dict[str, Any]) -> None:
        """The record last: it says that the run is finished."""
        out = self.request.out
        indexer.card = replace(indexer.card, record=record)
        indexer.save(out)
        checkpoint.write_json(out / checkpoint.RECORD, record)
        checkpoint.remove_checkpoint(out)

    def _tokens_of_step(self) -> int:
        return self.request.context * self.request.accumulate * self.workers.count


def means(layers: Mapping[str, Metrics]) -> Metrics:
    """Means over the layers: kl in nats, recall and mass at k."""
    by_number = {int(layer): values for layer, values in layers.items()}
    return {name: mean_of(by_number, name) for name in ("kl", "recall", "mass")}
