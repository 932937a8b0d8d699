"""`reread bench`: what goes where, bad input, and its tables. Nothing is timed here."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from reread import Config
from reread.cli import app
from reread.cli.bench import DecodeOptions, decode_table
from reread.planner import BOUNDARY_EVERY, DEFAULT_SLOW_EVERY, expected_slow_every

RESULT = Path(__file__).resolve().parents[2] / "benchmarks/results/gpu_decode.json"
COMMON = ["--shape", "--context", "--batch", "--commit", "--json"]
OPTIONS = {
    "decode": [*COMMON, "--preset", "--set", "--sentence", "--arms"],
    "kernel": [*COMMON, "--shares"],
}
BAD_COMMON = [
    (["--shape", "gpt"], "shape 'gpt' is unknown: one of qwen3-0.6b"),
    (["--context", "8K"], "--context '8K' is not possible: whole numbers"),
    (["--context", "8192,,1"], "--context '' is not possible"),
    (["--batch", "0"], "--batch '0' is not possible"),
    (["--batch", "16,-1"], "--batch '-1' is not possible"),
]
BAD = {
    "decode": [
        *BAD_COMMON,
        (["--sentence", "0.5"], "--sentence '0.5' is not possible: numbers of at least 1"),
        (["--sentence", "9,x"], "--sentence '9,x' is not possible"),
        (["--sentence", ""], "--sentence '' is not possible"),
        (["--arms", "cudnn,fa9"], "arm 'fa9' is unknown: all, or some of cudnn, flash"),
        (["--preset", "dense"], "mode 'dense' has no fast steps"),
        (["--set", "mode=dense"], "mode 'dense' has no fast steps"),
        (["--preset", "fast"], "preset 'fast' is unknown"),
        (["--set", "k=0"], "k=0 is not possible"),
        (["--set", "uncertainty=1.5"], "triggers.uncertainty=1.5"),
    ],
    "kernel": [
        *BAD_COMMON,
        (["--shares", "25,100"], "--shares '25,100' is not possible: percentages such as 1.6,25"),
        (["--shares", "0"], "--shares '0' is not possible"),
        (["--shares", "half"], "--shares 'half' is not possible"),
        (["--shares", "nan"], "--shares 'nan' is not possible"),
    ],
}


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", *arguments], env={"COLUMNS": "200"})


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def decode() -> dict[str, Any]:
    """A saved result of whole decode steps."""
    result: dict[str, Any] = json.loads(RESULT.read_text(encoding="utf-8"))["decode"]
    return result


# -- options -----------------------------------------------------------------------------------


@pytest.mark.parametrize("command", OPTIONS)
def test_help_names_every_option(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert [option for option in OPTIONS[command] if option not in result.stdout] == []


def test_help_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from reread.cli import app;"
        "app(['bench', 'decode', '--help'], standalone_mode=False);"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, timeout=60)


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [(command, *case) for command, cases in BAD.items() for case in cases],
)
def test_bad_input_is_one_line_and_exit_code_2(
    command: str, arguments: list[str], message: str, no_gpu: None
) -> None:
    if "--arms" in arguments:
        pytest.importorskip("triton")
    result = run(command, *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert re.fullmatch(r"error: [^\n]*\n", result.stderr)


@pytest.mark.parametrize("command", OPTIONS)
def test_without_a_gpu_it_says_so_before_anything_is_built(
    command: str, no_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")

    def build(*_: object) -> None:
        pytest.fail("something was built")

    monkeypatch.setattr("reread.bench.table.random_model", build)
    monkeypatch.setattr("reread.bench.kernel.make_pool", build)
    result = run(command)
    assert (result.exit_code, result.stdout) == (2, "")
    assert re.fullmatch(r"error: this benchmark needs a CUDA GPU[^\n]*\n", result.stderr)


def test_the_sentence_is_what_real_text_gave() -> None:
    def gaps(*settings: str, **given: Any) -> list[float]:
        options = DecodeOptions(settings=list(settings), **given)
        return options.gaps(options.config())

    assert gaps() == [expected_slow_every(Config().triggers)] == [DEFAULT_SLOW_EVERY]
    assert gaps("t_max=null", "t_min=1") == [BOUNDARY_EVERY]
    assert gaps("uncertainty=1.5", sentence="20, 9,6.8") == [20.0, 9.0, 6.8]


# -- what is measured, and how it is told ------------------------------------------------------


def test_decode_measures_every_cell_and_prints(
    decode: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    asked: list[tuple[Any, ...]] = []

    def measure(shape: Any, cells: Any, config: Config, **more: Any) -> dict[str, Any]:
        more["progress"]("building the model")
        asked.append((shape.name, cells, config, more["slow_every"], more["commit"]))
        assert [arm.name for arm in more["arms"]] == ["flash", "reread-dense"]
        return decode

    monkeypatch.setattr("reread.bench.table.measure", measure)
    given = ["--context", "8192,32768", "--batch", "1,16", "--arms", "flash, reread-dense"]
    told = run("decode", *given, "--shape", "qwen3-0.6b", "--preset", "paper", "--sentence", "9")
    as_json = run("decode", *given, "--json", "--commit", "abc")
    assert told.exit_code == as_json.exit_code == 0, told.output + as_json.output
    cells = [(1, 8192), (16, 8192), (1, 32768), (16, 32768)]
    assert asked == [
        ("qwen3-0.6b", cells, Config.preset("paper"), [9.0], ""),
        ("qwen3-4b", cells, Config(), [DEFAULT_SLOW_EVERY], "abc"),
    ]
    found = json.loads(as_json.stdout)
    assert "sentences.json" in found.pop("slow_every_from")
    assert found == decode
    assert "Mean tokens between slow steps 9: as given" in told.stdout
    assert "building the model" in told.stderr
    assert "building the model" not in told.stdout
    assert "quality is not measured" in told.stdout


def test_kernel_measures_every_cell_and_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    file = RESULT.parent / "gpu_kernels.json"
    saved: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    asked: list[tuple[Any, ...]] = []

    def measure(shapes: Any, shares: Any, **_: Any) -> dict[str, Any]:
        sizes = [(s.rows, s.length, s.heads, s.kv_heads, s.dim) for s in shapes]
        asked.append((sizes, shares))
        return saved

    monkeypatch.setattr("reread.bench.kernel.measure", measure)
    given = ["--shape", "qwen3-0.6b", "--batch", "2,4", "--shares", "25,50"]
    result = run("kernel", *given)
    assert result.exit_code == 0, result.output
    assert asked == [([(2, 32768, 16, 8, 128), (4, 32768, 16, 8, 128)], [0.25, 0.5])]
    lines = result.stdout.splitlines()
    for record in saved["records"]:
        want = [f"{record['rows']} x {record['length']}", record["arm"], f"{record['us']:.1f}"]
        assert any(all(part in line for part in want) for line in lines), want
    assert json.loads(run("kernel", *given, "--json").stdout) == saved


def lines_of(result: dict[str, Any]) -> list[list[str]]:
    """The cells of each line of the table, as printed."""
    console = Console(width=200)
    with console.capture() as captured:
        console.print(decode_table(result))
    rows = [line for line in captured.get().splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in rows]


def test_the_table_has_a_line_for_each_cell_and_arm(decode: dict[str, Any]) -> None:
    decode["rows"].append(
        {"shape": "qwen3-4b", "rows": 64, "context": 131072, "failed": "300 GiB are too much"}
    )
    lines = lines_of(decode)
    expected = 0
    for row in decode["rows"]:
        where = f"{row['shape']}, {row['rows']} x {row['context']}"
        here = {cells[1]: cells[2:] for cells in lines if cells[0] == where}
        if "failed" in row:
            assert here == {row["failed"]: [""] * 4}
            expected += 1
            continue
        arms = {arm["arm"]: arm for arm in row["dense"]}
        timed = {name: arm for name, arm in arms.items() if "ms" in arm}
        absent = {f"{name}: {a['not_run']}" for name, a in arms.items() if "not_run" in a}
        slow = {
            f"slow 1/{gap:g}, {place}": found[f"1/{gap:g}"]
            for place, found in row["slow_fast"].items()
            for gap in row["slow_every"]
        }
        assert here.keys() == timed.keys() | absent | slow.keys()
        assert len(absent) == 2
        assert here[row["fastest_dense"]][-1] == "1.00"
        for name, arm in (timed | slow).items():
            assert here[name][0] == f"{arm['ms']:.2f}"
            assert here[name][1] == f"{arm['tokens_per_s']:.0f}"
        for name, arm in slow.items():
            assert here[name][-1] == f"{arm['speedup']:.2f}"
        expected += len(here)
    assert len(lines) == expected
