"""A result folder as `reread eval` writes it, from a seed: several methods, tasks and lengths,
failures, fidelity, speed, gaps and pictures."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from reread.evaluation.methods import Method, parse_methods
from reread.evaluation.tasks.base import Sample

HOSTILE = '</script><script>window.hacked = 1</script><img src=x onerror="window.hacked = 2">'
METHODS = "dense,default,paper,oracle,indexer,default@3%,snapkv@3%,streaming-llm@3%,think"
LENGTHS = (4096, 16384)
TASKS = {"needle": ("code", "note", "chain"), "niah_multikey": ("niah_multikey",),
         "vt": ("vt",), "cwe": ("cwe",)}  # fmt: skip
TEXTS = ("prose", "python", "table without sentence marks")
CASES = 12
# chance of a right answer, and of one to chain; then ms per token, share of keys
QUALITY = {
    "dense": (0.99, 0.97, 21.0, 1.0), "default": (0.985, 0.96, 8.4, 0.07),
    "paper": (0.96, 0.78, 8.9, 0.09), "oracle": (0.99, 0.96, 30.0, 0.03),
    "indexer": (0.975, 0.9, 7.2, 0.035), "default@3%": (0.97, 0.9, 7.6, 0.03),
    "snapkv@3%": (0.7, 0.2, 6.9, 0.03), "streaming-llm@3%": (0.12, 0.02, 6.6, 0.03),
    "think": (0.9, 0.5, 12.0, 0.5),
}  # fmt: skip


def write_folder(folder: Path, *, cases: int = CASES, hostile: bool = False) -> Path:
    """A whole run in `folder`.

    Args:
        hostile: markup in answers, errors, tokens and names.
    """
    folder.mkdir(parents=True, exist_ok=True)
    methods = parse_methods(METHODS, indexer="indexers/needle")
    samples = list(_samples(methods, cases, HOSTILE if hostile else ""))
    (folder / "run.json").write_text(json.dumps(_run(methods, samples, hostile)))
    write_lines(folder / "samples.jsonl", [sample.to_dict() for sample in samples])
    write_lines(folder / "speed.jsonl", list(_speed(methods)))
    (folder / "gaps.json").write_text(json.dumps({"gaps": _gaps(), "notes": ["decoding is dense"]}))
    return folder


def write_lines(path: Path, values: list[dict[str, Any]]) -> None:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(value) + "\n" for value in values))


def _run(methods: list[Method], samples: list[Sample], hostile: bool) -> dict[str, Any]:
    counts: dict[tuple[str, int], int] = {}
    for sample in samples:
        if sample.method == "dense":
            counts[sample.task, sample.length] = counts.get((sample.task, sample.length), 0) + 1
    return {
        "config": {"model": HOSTILE if hostile else "needle-27m", "seed": 0, "limit": 12,
                   "dtype": "auto", "dtype_used": "float32", "device": "cuda",
                   "backbone": "15c6fec4e27e9c87f9533121ed24bef900f8b6c4c4656e0436265b6a82539326"},
        "methods": {method.name: method.to_dict() for method in methods},
        "places": [{"task": t, "length": n, "samples": c} for (t, n), c in counts.items()],
        "skipped": [{"task": "longbench", "length": 65536, "samples": 40,
                     "reason": "the model has 32768 positions"}],
        "notes": ["greedy decoding", *([HOSTILE] if hostile else [])],
        "versions": {"python": "3.11.7", "torch": "2.11.0", "transformers": "5.17.0"},
        "device": {"kind": "cuda", "name": "NVIDIA H200", "memory": 150109880320},
        "commit": "f1390f2",
    }  # fmt: skip


def _samples(methods: list[Method], cases: int, hostile: str) -> Iterator[Sample]:
    for length in LENGTHS:
        for task, kinds in TASKS.items():
            for method in methods:
                yield from _answers(task, length, kinds, method.name, cases, hostile)
        for method in methods:
            if method.press is None:
                yield from _fidelity(length, method.name, hostile)


def _answers(
    task: str, length: int, kinds: tuple[str, ...], method: str, cases: int, hostile: str
) -> Iterator[Sample]:
    rng = random.Random(f"{task} {length} {method}")
    usual, hard, _, share = QUALITY[method]
    shares = {"keys_read_share": share, "fast_keys_share": 0.8 * share}
    if method.startswith(("snapkv", "streaming", "think")):
        shares = {"kept_share": share, "kv_bytes_share": share}
    broken = method == "think" and task == "vt"
    error = f"ThinKPress: shapes (8, 128) and (4, 128) do not match {hostile}"
    for number in range(cases):
        for query, kind in enumerate(kinds):
            depth = None if task == "cwe" else rng.random()
            chance = hard if kind in ("chain", "vt") else 0.3 if task == "cwe" else usual
            lost = 0.15 * (length > 4096) * (method not in ("dense", "oracle", "default"))
            right = float(rng.random() < chance - lost * (depth or 0.0))
            yield Sample(
                task=task, length=length, method=method, number=number, kind=kind, query=query,
                depth=depth, score=None if broken else right, answer=hostile or "amber 4183",
                error=error if broken else None, expected=("amber 4183",),
                figures={} if broken else shares, seconds=rng.random(),
            )  # fmt: skip


def _fidelity(length: int, method: str, hostile: str) -> Iterator[Sample]:
    rng = random.Random(f"fidelity {length} {method}")
    for number, text in enumerate(TEXTS * 2):
        kl = 0.0 if method == "dense" else (0.004 + 0.02 * TEXTS.index(text)) * (1 + rng.random())
        figures = {
            "agreement": 1 - 2 * kl, "kl": kl, "kl_max": 9 * kl, "ppl": 9.0 + 40 * kl,
            "ppl_dense": 9.0, "sentences": 0.0 if "without" in text else 7.0,
            "keys_read_share": QUALITY[method][3],
        }  # fmt: skip
        extra = {}
        if method != "dense":
            figures |= {
                "mass_fast": 0.94 - 3 * kl,
                "useless_share": 0.2 + rng.random() / 10,
                "stability_inside": 0.7,
                "stability_across": 0.35,
                "slow_rate": 0.08,
            }
            extra = {"picture": picture(rng, length, hostile)}  # fmt: skip
        yield Sample(
            task="fidelity", length=length, method=method, number=number, kind=text,
            score=1.0 - 2 * kl, figures=figures, extra=extra,
        )  # fmt: skip


def picture(rng: random.Random, length: int, hostile: str, steps: int = 30) -> dict[str, Any]:
    """Mass on a sink, the newest keys and a few places that change with the sentence."""
    bins, size = 64, length // 64
    mass, kept, missed, ends = [], [], [], [step % 9 == 8 for step in range(steps)]
    kinds = ["slow" if step == 0 or ends[step - 1] else "fast" for step in range(steps)]
    chosen: set[int] = set()
    for step in range(steps):
        told = random.Random(f"{length} {step // 9}")
        peaks = {told.randrange(2, 58) for _ in range(6)} | {rng.randrange(2, 60)}
        row = [rng.random() * 0.002 + 0.12 * (i in peaks) * rng.random() for i in range(bins)]
        row[0], row[63], row[62] = 0.3, 0.25, 0.1
        total = math.fsum(row)
        row = [value / total for value in row]
        if kinds[step] == "slow":
            chosen = {i for i in peaks if rng.random() < 0.8}
        read = [1.0 if kinds[step] == "slow" or i in {0, 62, 63} else 0.6 * (i in chosen)
                for i in range(bins)]  # fmt: skip
        mass.append(row)
        kept.append(read)
        missed.append(math.fsum(m * (1 - k) for m, k in zip(row, read, strict=True)))
    words = ["the", "lamp", "of", "the", "north", "tower", "is", "amber", "and", "."]
    return {
        "bins": bins, "positions": [i * size for i in range(bins)], "mass": mass, "kinds": kinds,
        "ends": ends, "kept": kept, "missed": missed, "layer": 5, "head": 1,
        "tokens": [hostile or ("." if end else words[i % 9]) for i, end in enumerate(ends)],
    }  # fmt: skip


def _speed(methods: list[Method]) -> Iterator[dict[str, Any]]:
    for length in LENGTHS:
        for method in methods:
            ms, share = QUALITY[method.name][2:]
            if method.press is None:
                yield {
                    "method": method.name, "length": length, "ttft_s": length / 40000,
                    "ms_per_token": ms * (0.5 + length / 32768), "prefill_tokens": length,
                    "new_tokens": 128, "runs": 5, "keys_read_share": share, "path": "triton graph",
                    "device": "NVIDIA H200",
                }  # fmt: skip


def _gaps() -> list[dict[str, Any]]:
    pairs = {"oracle gap": ("dense", "oracle per query"),
             "indexer gap": ("oracle per query", "indexer per query"),
             "realisation gap": ("indexer per query", "indexer shared by 64")}  # fmt: skip
    return [
        {"task": "needle", "length": 16384, "gap": name, "of": list(of), "kind": kind,
         "value": value, "low": value - 0.01, "high": value + 0.012, "cases": 58,
         "dense_can": True}
        for value, (name, of) in enumerate(pairs.items())
        for kind, value in (("code", 0.004 * value), ("chain", 0.03 * value))
    ]  # fmt: skip
