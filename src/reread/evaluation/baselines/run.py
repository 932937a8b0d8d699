"""Answers of kvpress's methods, from the process that runs them in an environment of its own.

kvpress needs an older transformers than reread, so the two talk by files, see `worker.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import InputError

PYTHON = "REREAD_BASELINES"  # environment variable that names the other environment's Python
FOLDER = ".venv-baselines"
HOW = f"run `make baselines` in reread's repository, or set {PYTHON} to the Python that has kvpress"
WORKER = Path(__file__).with_name("worker.py")
POLL = 0.1  # seconds between two looks at the answers
START_LIMIT = 300.0  # seconds for importing kvpress from a cold disk
TAIL = 600  # characters of the worker's last words that an error repeats
VERSIONS = """
import json
from importlib import metadata
import kvpress
names = ("kvpress", "transformers", "torch")
print(json.dumps({name: metadata.version(name) for name in names}))
"""


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt for one baseline.

    Attributes:
        id: names it among the answers.
        press: a class of kvpress, one of `methods.PRESSES`.
        kept: share of the prompt's keys to keep, 0 to 1; of key channels for ThinK. 1 is dense.
        ids: token ids of the prompt, question included.
        new_tokens: of a greedy answer.
        eos: tokens that end one; the one that did is its last.
        choices: token ids of continuations; where given, log-probabilities are the answer.
    """

    id: str
    press: str
    kept: float
    ids: tuple[int, ...]
    new_tokens: int = 0
    eos: tuple[int, ...] = ()
    choices: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineAnswer:
    """What came back of a job: an answer or an error, never both.

    Attributes:
        tokens: the greedy answer.
        logprobs: of each choice, in nats.
        kept_share: of the numbers in the prompt's keys, measured in the cache, mean of layers.
        kv_bytes_share: the same of keys and values together.
        seconds: for reading and answering.
        path: what was kept, in words.
    """

    id: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    kept_share: float | None = None
    kv_bytes_share: float | None = None
    seconds: float = 0.0
    path: str = ""
    error: str | None = None


def find_python() -> Path:
    """The Python of the baselines' environment: what REREAD_BASELINES names, else that of
    .venv-baselines in the current folder or in reread's repository.

    Raises:
        InputError: there is none.
    """
    if named := os.environ.get(PYTHON):
        if not os.access(named, os.X_OK) or not Path(named).is_file():
            raise InputError(f"{PYTHON}={named!r} is no Python: {HOW}")
        return Path(named).absolute()
    repository = Path(__file__).parents[4]
    for folder in (Path.cwd(), repository):
        # not resolved: an environment's Python is a link, and followed it loses its packages
        python = (folder / FOLDER / "bin" / "python").absolute()
        if python.is_file():
            return python
    raise InputError(f"the baselines' environment is missing ({FOLDER}): {HOW}")


def check_environment(python: Path) -> dict[str, str]:
    """Versions of kvpress, transformers and torch there.

    Raises:
        InputError: it cannot import kvpress; says why.
    """
    try:
        done = subprocess.run(
            [str(python), "-I", "-c", VERSIONS],
            capture_output=True,
            text=True,
            timeout=START_LIMIT,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise InputError(f"baselines: {python} does not run ({error}): {HOW}") from error
    if done.returncode:
        why = _last(done.stderr.strip().rpartition("\n")[2]) or f"exit status {done.returncode}"
        raise InputError(f"baselines: {python} has no working kvpress ({why}): {HOW}")
    versions: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return versions


def answers(
    jobs: Sequence[Job],
    model_folder: Path,
    dtype: str,
    device: str,
    python: Path,
    workdir: Path,
) -> Iterator[BaselineAnswer]:
    """Answers as they come, each job's exactly once; when the iterator is closed or interrupted,
    the worker ends.

    Where the worker dies, the jobs it had not answered yield errors with its last words.

    Args:
        jobs: ids are unique. Jobs of one prompt may be many: it is written once.
        model_folder: safetensors checkpoint, see `export.export_model`.
        dtype: "float32", "bfloat16", "float16" or "auto".
        device: a device of torch.
        python: of the baselines' environment, see `find_python`.
        workdir: folder for jobs.json, answers.jsonl and worker.log, made if missing.
    """
    waiting = {job.id: job for job in jobs}
    assert len(waiting) == len(jobs), "job ids are unique"
    if not jobs:
        return
    workdir.mkdir(parents=True, exist_ok=True)
    out, log = workdir / "answers.jsonl", workdir / "worker.log"
    out.write_text("")
    request = workdir / "jobs.json"
    request.write_text(json.dumps(_request(jobs, model_folder, dtype, device)))
    problem = ""
    with _started([str(python), "-I", str(WORKER), str(request), str(out)], log) as process:
        for line in _lines(out, process):
            try:
                answer = _parsed(line)
                del waiting[answer.id]
            except (ValueError, TypeError, KeyError):
                problem = f"; it wrote {line[:80]!r}, which is no answer"
                continue
            yield answer
        code = process.wait()
    reason = f"the worker {_ended(code)} before it answered{problem}: {_last(log.read_text())}"
    for job in waiting.values():
        yield BaselineAnswer(id=job.id, error=reason)


def _request(jobs: Sequence[Job], folder: Path, dtype: str, device: str) -> dict[str, Any]:
    prompts: dict[tuple[int, ...], int] = {}
    lines = [
        {
            "id": job.id,
            "press": job.press,
            "kept": job.kept,
            "prompt": prompts.setdefault(job.ids, len(prompts)),
            "new_tokens": job.new_tokens,
            "eos": job.eos,
            "choices": job.choices,
        }
        for job in jobs
    ]
    where = {"model": str(folder.absolute()), "dtype": dtype, "device": device}
    return {**where, "prompts": list(prompts), "jobs": lines}


@contextlib.contextmanager
def _started(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The process, which does not outlive the block."""
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
            start_new_session=True,  # ^C reaches us alone, and we end it
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _lines(file: Path, process: subprocess.Popen[bytes]) -> Iterator[str]:
    """Whole lines of a file that `process` is writing, until it has ended."""
    rest = b""
    with file.open("rb") as source:
        while True:
            over = process.poll() is not None  # asked first: what it wrote last is read below
            *whole, rest = (rest + source.read()).split(b"\n")
            yield from (line.decode(errors="replace") for line in whole)
            if over:
                break
            if not whole:
                time.sleep(POLL)
    if rest:
        yield rest.decode(errors="replace")


def _parsed(line: str) -> BaselineAnswer:
    """Raises ValueError, TypeError or KeyError: no answer."""
    values = json.loads(line)
    if ("error" in values) == ("tokens" in values or "logprobs" in values):
        raise ValueError("neither an answer nor an error")
    for name in ("tokens", "logprobs"):
        values[name] = tuple(values.get(name, ()))
    return BaselineAnswer(**values)


def _ended(code: int) -> str:
    if code < 0:
        return f"was killed by signal {-code} (out of memory?)"
    return f"ended with exit status {code}"


def _last(words: str) -> str:
    """The end of what a process said, on one line."""
    text = " ".join(words.split())
    return text if len(text) <= TAIL else "..." + text[-TAIL:]
