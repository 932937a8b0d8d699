"""Run as a program: tokens, counts and selected positions of an engine with several processes.

Arguments: model folder, tensor-parallel size, file for the result, what is asked for as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from .engines import greedy, start, text_ids


def chosen(worker: Any) -> list[list[int]]:
    """Positions that each KV head of this process last selected, of all layers and requests; the
    layer's number comes first."""
    out = []
    for request in worker.reread.requests.values():
        for number, state in enumerate(request.layers.values()):
            out += [[number, *head] for head in state.chosen[0].selected.tolist()]
    return out


def main() -> None:
    """Write the result."""
    folder, size, out = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    llm = start(folder, json.loads(sys.argv[4]), tensor_parallel_size=size, max_num_seqs=4)
    prompts = [text_ids(llm.get_tokenizer(), n, n) for n in (120, 300, 90)]
    tokens = greedy(llm, prompts, 40)
    # requests that end in an engine's last pass are known until it has another one
    result = {
        "tokens": tokens,
        "stats": llm.collective_rpc("reread_stats"),
        "chosen": llm.collective_rpc(chosen),
    }
    out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
