"""The README's tables of what was measured on a GPU, from their result files."""

from __future__ import annotations

from typing import Any

from benchmarks.common import RESULTS
from benchmarks.readme_parts import load, size, table


def gpu_rows() -> list[dict[str, Any]]:
    """Every cell's newest measurement of whole decode steps, with the overlap that users get."""
    found: dict[tuple[str, int, int], dict[str, Any]] = {}
    for name in ("gpu_decode", "gpu_decode_apart"):
        if not (RESULTS / f"{name}.json").is_file():
            continue  # the second is gone once the first was measured anew
        result = load(name)
        for row in result["decode"]["rows"]:
            overlap = next(o for o in ("rows", "refresh") if o in row["slow_fast"])
            key = row["shape"], row["rows"], row["context"]
            found[key] = {**row, "ours": row["slow_fast"][overlap], "commit": result["commit"][:7]}
    return list(found.values())


def gpu_decode() -> str:
    """Whole decode steps by cell, at four rates of slow steps."""
    gaps = {"20": "1 in 20", "9": "1 in 9", "6.8": "1 in 6.8", "6": "1 in 6"}
    head = (
        "model, batch × context", "fastest dense, ms", "fast step, ms", "not attention, ms",
        *(f"× at {words}" for words in gaps.values()), "roofline, dense / 1 in 20", "commit",
    )  # fmt: skip
    rows = []
    for row in gpu_rows():
        dense = next(arm for arm in row["dense"] if arm["arm"] == row["fastest_dense"])
        bare = next(arm["bare_ms"] for arm in row["dense"] if "bare_ms" in arm)
        ours = row["ours"]
        rows.append(
            (
                f"{row['shape']}, {row['rows']} × {size(row['context'])}",
                f"{dense['ms']:.2f} ({dense['arm']})",
                f"{ours['fast']['ms']:.2f}",
                f"{bare:.2f}",
                *(f"{ours[f'1/{gap}']['speedup']:.2f}" for gap in gaps),
                f"{dense['roofline']:.2f} / {ours['1/20']['roofline']:.2f}",
                row["commit"],
            )
        )
    return table(head, rows)


def gpu_kernels() -> str:
    """Sparse attention over the fastest dense attention, by share of keys; and the refresh."""
    records = load("gpu_kernels")["records"]
    head = ("rows × keys", "fastest dense, µs", "share of keys", "sparse, µs", "×", "roofline")
    rows = []
    shapes = sorted({(r["rows"], r["length"]) for r in records}, reverse=True)
    for batch, length in shapes:
        here = [r for r in records if (r["rows"], r["length"]) == (batch, length)]
        dense = min(r["us"] for r in here if r["kernel"] == "dense")
        for r in here:
            if r["kernel"] == "sparse" and r["run"] == 32:
                rows.append(
                    (
                        f"{batch} × {size(length)}",
                        f"{dense:.0f}",
                        f"{r['keys'] / length:.1%}",
                        f"{r['us']:.1f}",
                        f"{r['speedup']:.1f}",
                        f"{r['roofline']:.2f}",
                    )
                )
    return table(head, rows)


def gpu_refresh() -> str:
    """What choosing again costs beside dense attention."""
    head = ("rows × keys", "K", "evidence and Selector, µs", "share of the dense attention")
    rows = [
        (
            f"{r['rows']} × {size(r['length'])}",
            str(r["k"]),
            f"{r['refresh_us']:.0f}",
            f"{r['share_of_dense']:.2f}",
        )
        for r in load("gpu_kernels")["records"]
        if r["kernel"] == "refresh"
    ]
    return table(head, rows)


def needle_gpu() -> str:
    """Share of answer words right by length and kind of question, bfloat16 on a GPU."""
    kinds = ("code", "note", "chain")
    head = ("variant, tokens", *kinds, "keys of a fast step", "slow steps", "keys read in all")
    rows = [
        (
            f"{row['variant']}, {round(row['tokens'] / 1024)}K",
            *(f"{row[kind]:.2f}" for kind in kinds),
            f"{row['fast_keys_share']:.1%}" if row["slow_rate"] else "100%",
            f"{row['slow_rate']:.2f}",
            f"{row['keys_read_share']:.2f}",
        )
        for row in load("needle_gpu")["rows"]
    ]
    return table(head, rows)


def gpu_prefill() -> str:
    """One layer's prefill attention against the fastest dense arm, and its parts."""
    head = (
        "tokens", "dense, ms", "sparse, ms", "×", "index scores", "top-k", "attention",
        "keys read", "roofline, dense / sparse", "peak, GiB",
    )  # fmt: skip
    rows = []
    for row in load("gpu_layer")["layer"]["layer"]:
        dense = next(arm for arm in row["dense"] if arm["arm"] == row["fastest_dense"])
        ours, parts = row["sparse"], row["sparse"]["parts"]
        names = ("index_scores_ms", "top_k_ms", "attention_ms")
        rows.append(
            (
                size(row["context"]),
                f"{dense['ms']:.1f} ({dense['arm']})",
                f"{ours['ms']:.2f}",
                f"{row['speedup']:.1f}",
                *(f"{parts[name]:.2f}" for name in names),
                f"{ours['share_read']:.1%}",
                f"{dense['share_of_matmul']:.2f} / {ours['share_of_floor']:.2f}",
                f"{ours['peak_bytes'] / 2**30:.2f}",
            )
        )
    return table(head, rows)


def ttft_rows() -> list[dict[str, Any]]:
    """By shape and length; what the newest run lacks comes from an older one, with its commit."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for name in ("gpu_ttft_256k", "gpu_prefill"):
        if not (RESULTS / f"{name}.json").is_file():
            continue  # the first is gone once its length was measured anew
        parts = [part for key, part in load(name).items() if key.startswith("ttft")]
        for part in parts:
            for row in part.get("ttft", ()):
                if "speedup" in row:
                    key = row["shape"], row["context"]
                    found[key] = {**row, "commit": part["commit"][:7]}
    return [found[key] for key in sorted(found)]


def gpu_ttft() -> str:
    """Time to the first token, and where the sparse arm's goes."""
    head = (
        "model, tokens", "dense, ms", "sparse, ms", "×", "choice", "attention", "rest",
        "no attention, eager", "commit",
    )  # fmt: skip
    rows = []
    for row in ttft_rows():
        dense = next(arm for arm in row["dense"] if arm["arm"] == row["fastest_dense"])
        parts = row["sparse"]["parts"]
        rows.append(
            (
                f"{row['shape']}, {size(row['context'])}",
                f"{dense['ms']:.0f} ({dense['arm']})",
                f"{row['sparse']['ms']:.0f}",
                f"{row['speedup']:.2f}",
                # compiled layers make the index projections within attention's: part of the rest
                f"{parts.get('projections_ms', 0) + parts['selection_ms']:.0f}",
                f"{parts['attention_ms']:.0f}",
                f"{parts['rest_ms']:.0f}",
                f"{row['no_attention']['ms']:.0f}",
                row["commit"],
            )
        )
    return table(head, rows)


def gpu_indexed() -> str:
    """Whole steps of indexed decoding over the fastest dense arm."""
    head = (
        "model, batch × context", "fastest dense, ms", "indexed step, ms", "×",
        "not attention, ms", "roofline, dense / indexed",
    )  # fmt: skip
    rows = []
    for row in load("gpu_indexed")["indexed"]["rows"]:
        dense = next(arm for arm in row["dense"] if arm["arm"] == row["fastest_dense"])
        bare = next(arm["bare_ms"] for arm in row["dense"] if "bare_ms" in arm)
        ours = row["indexed"]
        rows.append(
            (
                f"{row['shape']}, {row['rows']} × {size(row['context'])}",
                f"{dense['ms']:.2f} ({dense['arm']})",
                f"{ours['ms']:.2f}",
                f"{ours['speedup']:.2f}",
                f"{bare:.2f}",
                f"{dense['roofline']:.2f} / {ours['roofline']:.2f}",
            )
        )
    return table(head, rows)


def vllm_gpu() -> str:
    """vLLM with and without the plug-in, by cell."""
    cells = load("vllm_gpu")["cells"]
    stock = {(c["rows"], c["length"]): c for c in cells if c["arm"] == "vllm"}
    # with a sparse prefill decode steps are the same; then the first token is compared, too
    arms = {"reread", "reread, sparse prefill"} & {c["arm"] for c in cells}
    arm = max(arms, key=len)
    ours = {(c["rows"], c["length"]): c for c in cells if c["arm"] == arm}
    head = (
        "rows × context", "vLLM, tokens/s", "reread, tokens/s", "×", "vLLM, ms a step",
        "reread, ms a step", "×, a step", "slow steps", "keys read",
    )  # fmt: skip
    first = "sparse" in arm
    if first:
        head = (*head, "vLLM, s to all first tokens", "reread", "×", "keys read by prompts")
    rows = []
    for cell, own in stock.items():
        name, found = f"{cell[0]} × {size(cell[1])}", ours.get(cell)
        shown = (f"{own['tokens_per_s']:.0f}", f"{own['step_ms']:.2f}")
        if found is None:
            rows.append((name, shown[0], "—", "—", shown[1], *("—",) * (len(head) - 5)))
            continue
        beside = () if not first else (
            f"{own['first_s']:.2f}", f"{found['first_s']:.2f}", f"{found['first_ratio']:.2f}",
            f"{found['stats']['prompt_keys_read_share']:.2f}",
        )  # fmt: skip
        rows.append(
            (
                name, shown[0], f"{found['tokens_per_s']:.0f}", f"{found['speedup']:.2f}",
                shown[1], f"{found['step_ms']:.2f}", f"{own['step_ms'] / found['step_ms']:.2f}",
                f"{found['stats']['slow_share']:.3f}", f"{found['stats']['keys_read_share']:.2f}",
                *beside,
            )
        )  # fmt: skip
    return table(head, rows)


def paged_gpu() -> str:
    """Kernels of a decode step on contiguous rows and on vLLM's pages."""
    names = ("slow", "one row slow", "no row slow", "fast", "choose, one", "choose, none")
    head = ("rows × keys", "pages of", *names)
    rows = [
        (
            f"{row['rows']} × {size(row['length'])}", str(row["page"] or "none"),
            *(f"{row[name]:.1f}" for name in names),
        )
        for row in load("paged_gpu")["rows"]
    ]  # fmt: skip
    return table(head, rows)
