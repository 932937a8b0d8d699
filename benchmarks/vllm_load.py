"""vLLM with the plug-in under load: requests of mixed lengths arrive, end and are aborted for some
minutes. Errors, memory and latencies.

    python -m benchmarks.vllm_load --minutes 10 --json benchmarks/results/vllm_load.json

Prompts of 256 to `--longest` tokens (uniform in the logarithm), a third of them beginning as an
earlier one did, 16 to 512 new tokens, sampled; one request in ten is aborted on its way. Arrivals
are a Poisson process. Latencies: to the first token, and between tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from .common import console, show
from .vllm_gpu import INDEXED, WEIGHTS, asked, make_model, provenance, surroundings


class Load:
    """What happened so far."""

    def __init__(self, engine: Any, args: argparse.Namespace, words: int) -> None:
        self.engine, self.args, self.words = engine, args, words
        self.draw = random.Random(0)
        self.began = time.perf_counter()
        self.first: list[float] = []
        self.between: list[float] = []
        self.tokens = self.ended = self.aborted = 0
        self.errors: list[str] = []
        self.prompts: list[list[int]] = []
        self.memory: list[dict[str, float]] = []

    def prompt(self) -> list[int]:
        draw = self.draw
        low, high = math.log(256), math.log(self.args.longest)
        length = int(math.exp(draw.uniform(low, high)))
        start: list[int] = []
        if self.prompts and draw.random() < 1 / 3:
            start = draw.choice(self.prompts)[: length // 2]
        found = start + [draw.randrange(self.words) for _ in range(length - len(start))]
        self.prompts = [*self.prompts[-20:], found]
        return found

    async def request(self, name: str) -> None:
        from vllm import SamplingParams

        new = self.draw.randrange(16, 513)
        stop_at = self.draw.randrange(1, new) if self.draw.random() < 0.1 else None
        sampling = SamplingParams(
            temperature=1.0, max_tokens=new, min_tokens=new, ignore_eos=True, detokenize=False
        )
        sent = last = time.perf_counter()
        count = 0
        try:
            prompt = {"prompt_token_ids": self.prompt()}
            async for output in self.engine.generate(prompt, sampling, name):
                now, known = time.perf_counter(), len(output.outputs[0].token_ids)
                if count == 0:
                    self.first.append(now - sent)
                elif known > count:
                    self.between += [(now - last) / (known - count)] * (known - count)
                self.tokens += known - count
                count, last = known, now
                if stop_at is not None and count >= stop_at:
                    await self.engine.abort(name)
                    self.aborted += 1
                    return
            if count != new:
                self.errors.append(f"{name}: {count} of {new} tokens")
            self.ended += 1
        except Exception as error:
            self.errors.append(f"{name}: {error!r}")

    async def note_memory(self) -> None:
        """Bytes in use, of the card and of the processes' own memory."""
        import psutil
        import torch

        free, total = torch.cuda.mem_get_info()
        mine = psutil.Process()
        resident = sum(p.memory_info().rss for p in (mine, *mine.children(recursive=True)))
        names = ("state_bytes", "requests", "slow_steps", "fast_steps", "full_steps")
        found = {}
        if not self.args.stock:
            found = (await self.engine.collective_rpc("reread_stats"))[0]
        self.memory.append(
            {
                "s": time.perf_counter() - self.began,
                "card": (total - free) / 2**30,
                "resident": resident / 2**30,
                **{name: found[name] for name in names if name in found},
            }
        )
        console.log(self.memory[-1], f"ended {self.ended}, errors {len(self.errors)}")

    async def run(self) -> None:
        """Requests for so many minutes, then until the last one ends."""
        tasks: set[asyncio.Task[None]] = set()
        until, noted, i = self.began + 60 * self.args.minutes, 0.0, 0
        while (now := time.perf_counter()) < until:
            task = asyncio.create_task(self.request(f"r{i}"))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            i += 1
            if now - noted > self.args.every:
                noted = now
                await self.note_memory()
            await asyncio.sleep(self.draw.expovariate(self.args.rate))
        await asyncio.gather(*tasks)
        # what has ended is dropped when the next pass begins
        await self.request("last")
        await asyncio.sleep(1)
        await self.note_memory()

    def table(self) -> list[dict[str, Any]]:
        """Latencies in milliseconds."""
        rows = []
        for name, found in (("first token", self.first), ("between tokens", self.between)):
            cuts = statistics.quantiles(found, n=100, method="inclusive")
            shown = {"p50": cuts[49], "p90": cuts[89], "p99": cuts[98], "longest": max(found)}
            rows.append({"latency, ms": name, **{k: 1000 * v for k, v in shown.items()}})
        return rows


async def serve(args: argparse.Namespace, folder: Path) -> Load:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    given = {} if args.stock else asked(INDEXED if args.indexed else "reread", str(folder))
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            str(folder), load_format=WEIGHTS, max_model_len=args.longest + 1024, max_num_seqs=32,
            gpu_memory_utilization=0.9, **given,
        )
    )  # fmt: skip
    load = Load(engine, args, engine.model_config.get_vocab_size())
    await load.run()
    engine.shutdown()
    return load


def main() -> None:
    """Run the load and write what happened."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/vllm_load.json"))
    parser.add_argument("--shape", default="qwen3-4b")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--rate", type=float, default=2.0, help="requests a second")
    parser.add_argument("--longest", type=int, default=32768)
    parser.add_argument("--every", type=float, default=15.0, help="seconds between memory readings")
    parser.add_argument("--indexed", action="store_true", help="prompts are read sparsely, too")
    parser.add_argument("--stock", action="store_true", help="without the plug-in")
    parser.add_argument("--commit", help="for a copy of the tree without its history")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        make_model(Path(name) / "model", args.shape)
        os.environ.update(surroundings(Path(name)))
        sys.path[:0] = [name]  # the entry point, for this process
        load = asyncio.run(serve(args, Path(name) / "model"))
    result = {
        **provenance(args), "indexed": args.indexed,
        "minutes": args.minutes, "rate": args.rate, "longest": args.longest,
        "rows": load.table(), "memory": load.memory, "ended": load.ended,
        "aborted": load.aborted, "errors": load.errors, "tokens": load.tokens,
    }  # fmt: skip
    args.json.write_text(json.dumps(result, indent=1) + "\n")
    show("load", result["rows"], list(result["rows"][0]))
    console.log(f"ended {load.ended}, aborted {load.aborted}, errors {load.errors[:3]}")
    if load.errors:
        raise SystemExit(f"{len(load.errors)} requests went wrong: see {args.json}")


if __name__ == "__main__":
    main()
