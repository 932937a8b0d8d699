"""vLLM with and without the plug-in on one GPU: output tokens per second, and time to the first
token.

    python -m benchmarks.vllm_gpu --json benchmarks/results/vllm_gpu.json

The model has a real shape and random weights. So that ends of sentences come as often as in real
text (one slow step in about nine, sentences.json), its tokenizer's vocabulary has that share of
them, and tokens are sampled at temperature 1, which with such weights is nearly uniform. Each arm
is a process of its own with the same engine arguments. A cell's prompts are read once with one
output token (`first_s`: until all rows have their first token), then decoded from vLLM's prefix
cache, so that all rows are resident and decode together: `tokens_per_s` is rows x new tokens over
the whole of that call, the better of two; `step_ms` is from the difference of a long and a short
call.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from .common import console, show

ROOT = Path(__file__).resolve().parents[1]
CELLS = ((16, 2048), (16, 16384), (8, 65536), (4, 131072))
ENDS = 0.09  # share of the vocabulary that ends a sentence
SHORT = 32
INDEXER = "<folder>"  # in the place of the stress indexer's
WIDTH = 64  # of it
ARMS: dict[str, dict[str, Any]] = {
    "vllm": {},
    "reread": {"additional_config": {"reread": {"preset": "default"}}},
    "vllm, sync": {"async_scheduling": False},
    # an indexer with random weights: its choice is of no use, and costs what a trained one's does
    "reread, sparse prefill": {
        "additional_config": {"reread": {"preset": "default", "prefill": {"indexer": INDEXER}}}
    },
    "reread, sync": {
        "async_scheduling": False,
        "additional_config": {"reread": {"preset": "default"}},
    },
}
INDEXED = "reread, sparse prefill"
ENTRY = """[vllm.general_plugins]
reread = reread.integrations.vllm.plugin:register
reread_bench_weights = benchmarks.vllm_gpu:register_weights
"""
WEIGHTS = "reread_random"
SPREAD = 0.02  # standard deviation of the weights, as models of these families start from


def register_weights() -> None:
    """A load format that draws the weights. vLLM's "dummy" makes them so small that every key gets
    the same attention: no real text does that, and choosing among ties takes long."""
    import torch
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    from reread.integrations.vllm.compat import embedding_of

    class RandomLoader(DummyModelLoader):  # type: ignore[misc]  # vLLM is absent where types are checked
        def load_weights(self, model: Any, model_config: Any) -> None:
            torch.manual_seed(0)
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.dim() > 1:
                        parameter.normal_(0.0, SPREAD)
                embedding = embedding_of(model)
                rows = corner(embedding.shape[1])
                embedding[: len(rows)] = rows.to(embedding)

    register_model_loader(WEIGHTS)(RandomLoader)


def corner(hidden: int) -> Any:
    """The embedding's first rows, by which an indexer knows its model: always the same."""
    import torch

    from reread.integrations.hf.indexers import SAMPLE

    # vLLM loads models under a default type and device of its own
    draw = torch.Generator("cpu").manual_seed(0)
    made = torch.empty(SAMPLE, hidden, dtype=torch.float32, device="cpu")
    return made.normal_(0.0, SPREAD, generator=draw)


def make_indexer(folder: Path, config: Any) -> None:
    """An indexer with random weights for that model."""
    import torch

    from reread.indexer.model import Indexer, IndexerCard
    from reread.integrations.hf.cache import sparse_layers
    from reread.integrations.hf.indexers import identity_of, rope_theta

    torch.manual_seed(0)
    card = IndexerCard(
        layers=sparse_layers(config), hidden=config.hidden_size, width=WIDTH,
        theta=rope_theta(config), backbone=identity_of(config, corner(config.hidden_size)),
        record={"init": "random"},
    )  # fmt: skip
    Indexer(card).save(folder)


def asked(arm: str, model: str) -> dict[str, Any]:
    """The arm's engine arguments."""
    text = json.dumps(ARMS[arm]).replace(INDEXER, model)
    return dict(json.loads(text))


def make_model(folder: Path, shape: str) -> None:
    """A config, a tokenizer and an indexer, no weights."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, PreTrainedTokenizerFast

    from reread.shapes import Shape, hf_config

    settings = dict(hf_config(Shape.named(shape)))
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    config.dtype = "bfloat16"
    config.architectures = ["Qwen3ForCausalLM"]
    config.max_position_embeddings = 2 * max(length for _, length in CELLS)
    config.save_pretrained(folder)
    make_indexer(folder, config)
    draw = random.Random(0)
    words = {f"w{i}" + ("." if draw.random() < ENDS else ""): i for i in range(config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def surroundings(folder: Path) -> dict[str, str]:
    """The environment of an engine; the plug-in's entry point for the case that the package is not
    installed."""
    info = folder / "reread_entry-0.0.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: reread-entry\nVersion: 0\n")
    (info / "entry_points.txt").write_text(ENTRY)
    paths = [str(folder), str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }


def run_arm(args: argparse.Namespace) -> None:
    """In the arm's own process: all cells, a line of JSON each."""
    import torch
    from vllm import LLM, SamplingParams

    began = time.perf_counter()
    llm = LLM(
        args.model, load_format=WEIGHTS, max_model_len=max(n for _, n in args.cells) + 512,
        max_num_seqs=max(rows for rows, _ in args.cells), gpu_memory_utilization=0.92, seed=0,
        **asked(args.arm, args.model),
    )  # fmt: skip
    print(json.dumps({"started_s": time.perf_counter() - began}), flush=True)
    draw = random.Random(1)

    def call(prompts: list[dict[str, Any]], new: int) -> float:
        sampling = SamplingParams(
            temperature=1.0, max_tokens=new, min_tokens=new, ignore_eos=True, detokenize=False,
            seed=None,
        )  # fmt: skip
        start = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        taken = time.perf_counter() - start
        assert all(len(o.outputs[0].token_ids) == new for o in outputs)
        return taken

    words = llm.llm_engine.model_config.get_vocab_size()
    for rows, length in args.cells:
        prompts = [
            {"prompt_token_ids": [draw.randrange(words) for _ in range(length)]}
            for _ in range(rows)
        ]
        before = stats(llm, args.arm)
        first = call(prompts, 1)
        short = min(call(prompts, SHORT) for _ in range(2))
        long = min(call(prompts, args.new) for _ in range(2))
        cell = {
            "rows": rows, "length": length, "new": args.new, "first_s": first,
            "tokens_per_s": rows * args.new / long,
            "step_ms": 1000 * (long - short) / (args.new - SHORT),
            "stats": since(before, stats(llm, args.arm)),
            "free_gib": torch.cuda.mem_get_info()[0] / 2**30,
        }  # fmt: skip
        print(json.dumps(cell), flush=True)
        llm.reset_prefix_cache()


def stats(llm: Any, arm: str) -> dict[str, float]:
    """The plug-in's counts."""
    if "reread" not in arm:
        return {}
    found = llm.collective_rpc("reread_stats")[0]
    return {k: v for k, v in found.items() if isinstance(v, int | float)}


def since(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """What the counts grew by, and the shares of that."""
    grown = {
        k: after[k] - before[k] for k in after if k.endswith(("_steps", "keys_read", "cached"))
    }
    if grown:
        steps = grown["slow_steps"] + grown["fast_steps"]
        grown["slow_share"] = grown["slow_steps"] / max(1.0, steps)
        prompts = "prompt_keys_read", "prompt_keys_cached"
        read, cached = (after[name] - before[name] for name in prompts)
        grown["prompt_keys_read_share"] = read / cached if cached else 1.0
        grown["keys_read_share"] = grown["keys_read"] / max(1.0, grown["keys_cached"])
    return grown


def main() -> None:
    """Run the arms one after the other; the result file grows with every cell."""
    args = parse()
    if args.arm:
        run_arm(args)
        return
    result: dict[str, Any] = {"cells": [], "started_s": {}, **provenance(args)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model", args.shape)
        for arm in args.arms:
            console.log(f"{arm}: starting")
            for line in lines_of(arm, folder, args):
                if "started_s" in line:
                    result["started_s"][arm] = line["started_s"]
                else:
                    result["cells"].append({"arm": arm, **line})
                console.log(arm, {k: v for k, v in line.items() if k != "stats"})
                ratios(result)
                args.json.write_text(json.dumps(result, indent=1) + "\n")
    columns = (
        "arm", "rows", "length", "tokens_per_s", "step_ms", "first_s", "speedup", "first_ratio",
    )  # fmt: skip
    show("vLLM", result["cells"], columns)


def lines_of(arm: str, folder: Path, args: argparse.Namespace) -> Any:
    """What the arm's process prints as JSON; the rest of its output goes to stderr."""
    cells = ",".join(f"{rows}x{length}" for rows, length in args.cells)
    command = [
        sys.executable, "-m", "benchmarks.vllm_gpu", "--arm", arm, "--model", str(folder / "model"),
        "--cells", cells, "--new", str(args.new),
    ]  # fmt: skip
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=surroundings(folder)
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                yield json.loads(line)
            else:
                sys.stderr.write(line)
    if process.returncode:
        raise SystemExit(f"{arm}: ended with {process.returncode}; what it measured is kept")


def ratios(result: dict[str, Any]) -> None:
    """Each cell against vLLM's own arm, as it is by default."""
    base = {(c["rows"], c["length"]): c for c in result["cells"] if c["arm"] == "vllm"}
    for cell in result["cells"]:
        own = base.get((cell["rows"], cell["length"]))
        cell["speedup"] = cell["tokens_per_s"] / own["tokens_per_s"] if own else 0.0
        cell["first_ratio"] = own["first_s"] / cell["first_s"] if own else 0.0


def provenance(args: argparse.Namespace) -> dict[str, Any]:
    """Device, versions, commit and config."""
    from reread.config import Config
    from reread.evaluation import provenance as common

    found = common.provenance("cuda")
    return {
        **found,
        "versions": {**found["versions"], "vllm": importlib.metadata.version("vllm")},
        "commit": args.commit or found["commit"],
        "config": {**Config().to_dict(), "model": args.shape, "ends": ENDS},
        "flashinfer": importlib.util.find_spec("flashinfer") is not None,
    }


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/vllm_gpu.json"))
    parser.add_argument("--shape", default="qwen3-4b")
    parser.add_argument("--cells", type=_cells, default=CELLS, help="16x2048,4x131072")
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument(
        "--arms", type=lambda text: text.split(";"), default=["vllm", "reread", INDEXED]
    )
    parser.add_argument("--commit", help="for a copy of the tree without its history")
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    return parser.parse_args()


def _cells(text: str) -> tuple[tuple[int, int], ...]:
    pairs = (part.split("x") for part in text.split(","))
    return tuple((int(rows), int(length)) for rows, length in pairs)


if __name__ == "__main__":
    main()
