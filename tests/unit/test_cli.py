"""The command line: what goes where, exit codes, and bad input without tracebacks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pexpect
import pytest
from typer.testing import CliRunner

from reread.cli import app, report
from reread.cli.options import parse_setting
from reread.errors import ConfigError

from . import tiny_checkpoint

# a budget far below the prompt's length, so that fast steps happen
SMALL = ["--set", "k=8", "--set", "recent=8", "--set", "sink=2", "--set", "t_max=4"]
PROMPT = "The quick brown fox jumps over the lazy dog. " * 3
OPTIONS = [
    "--model",
    "--prompt",
    "--prompt-file",
    "--chat",
    "--raw",
    "--max-new-tokens",
    "--preset",
    "--set",
    "--dtype",
    "--device",
    "--seed",
    "--json",
    "--trust-remote-code",
]
COMPARED = [
    "tokens_per_s",
    "text",
    "speedup",
    "token_agreement",
    "first_difference",
    "keys_read_share",
    "slow_steps",
    "fast_steps",
    "prefill_s",
    "config",
    "versions",
    "device",
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_checkpoint.save(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint without a chat template."""
    return str(tiny_checkpoint.save(tmp_path_factory.mktemp("plain"), template=False))


def run(*arguments: str, stdin: str | bytes | None = None) -> Any:
    return CliRunner().invoke(app, list(arguments), input=stdin, env={"COLUMNS": "200"})


def generate_json(checkpoint: str, *arguments: str) -> dict[str, Any]:
    result = run("generate", "--model", checkpoint, "--json", "--max-new-tokens", "12", *arguments)
    assert result.exit_code == 0, result.output
    value: dict[str, Any] = json.loads(result.stdout)
    return value


# -- the shape of the command ------------------------------------------------------------------


def test_help_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from reread.cli import app; app(['info', '--help'], standalone_mode=False);"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, timeout=180)


@pytest.mark.parametrize("command", ["generate", "compare", "demo", "info"])
def test_every_command_has_every_option(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert [option for option in OPTIONS if option not in result.stdout] == []


def test_setting_values_are_json_where_they_can_be() -> None:
    given = ["k=8", "uncertainty=1.5", "t_max=null", "boundary=false", "refine=span", "a = b=c "]
    assert [parse_setting(s)[1] for s in given] == [8, 1.5, None, False, "span", "b=c"]
    with pytest.raises(ConfigError, match="KEY=VALUE"):
        parse_setting("k")


# -- generate ----------------------------------------------------------------------------------


def test_generate_writes_text_alone_to_stdout(checkpoint: str) -> None:
    arguments = ["--model", checkpoint, "--prompt", PROMPT, "--max-new-tokens", "12", *SMALL]
    result = run("generate", *arguments)
    assert result.exit_code == 0, result.output
    assert result.stdout == generate_json(checkpoint, "--prompt", PROMPT, *SMALL)["text"] + "\n"
    assert "tokens/s" in result.stderr


def test_generate_json_says_what_ran_and_where(checkpoint: str) -> None:
    value = generate_json(checkpoint, "--prompt", PROMPT, *SMALL)
    assert len(value["tokens"]) == 12
    assert value["stats"]["fast_steps"][0] > 0
    assert value["stats"]["slow_steps"][0] > 0
    assert value["config"]["k"] == 8
    assert {"versions", "device", "commit", "model", "prompt_tokens"} <= value.keys()


def test_settings_and_preset_have_an_effect(checkpoint: str) -> None:
    dense = generate_json(checkpoint, "--prompt", PROMPT, "--preset", "dense")
    assert dense["config"]["mode"] == "dense"
    assert dense["stats"]["full_steps"] == [11]


def test_prompt_file_stdin_and_prompt_are_the_same(checkpoint: str, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"\xef\xbb\xbf" + PROMPT.encode())
    given = generate_json(checkpoint, "--prompt", PROMPT)
    assert generate_json(checkpoint, "--prompt-file", str(file))["tokens"] == given["tokens"]
    arguments = ["--model", checkpoint, "--json", "--max-new-tokens", "12"]
    piped = run("generate", *arguments, "--prompt-file", "-", stdin=PROMPT)
    assert json.loads(piped.stdout)["tokens"] == given["tokens"]


def test_prompt_follows_the_text_of_the_prompt_file(checkpoint: str, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("some text")
    both = generate_json(checkpoint, "--prompt-file", str(file), "--prompt", "and a question")
    whole = generate_json(checkpoint, "--prompt", "some text\n\nand a question")
    assert both["tokens"] == whole["tokens"]
    assert both["prompt_tokens"] == whole["prompt_tokens"]


def test_chat_is_the_default_where_there_is_a_template(checkpoint: str, plain: str) -> None:
    chat = generate_json(checkpoint, "--prompt", "hi")["prompt_tokens"]
    assert chat == generate_json(checkpoint, "--prompt", "hi", "--chat")["prompt_tokens"]
    assert chat > generate_json(checkpoint, "--prompt", "hi", "--raw")["prompt_tokens"] == 2
    assert generate_json(plain, "--prompt", "hi")["prompt_tokens"] == 2


def test_seed_samples_and_repeats(checkpoint: str) -> None:
    sampled = [
        generate_json(checkpoint, "--prompt", PROMPT, *seed)["tokens"]
        for seed in (["--seed", "1"], ["--seed", "1"], ["--seed", "2"], [])
    ]
    assert sampled[0] == sampled[1]
    assert sampled[0] != sampled[2]
    assert sampled[0] != sampled[3]


# -- compare, demo, info -----------------------------------------------------------------------


def test_compare_json_has_both_arms(checkpoint: str) -> None:
    arguments = ["--model", checkpoint, "--prompt", PROMPT, "--max-new-tokens", "12", *SMALL]
    result = run("compare", "--json", *arguments)
    assert result.exit_code == 0, result.output
    value = json.loads(result.stdout)
    assert [name for name in COMPARED if name not in value] == []
    assert value["tokens_per_s"].keys() == value["text"].keys() == {"dense", "reread"}
    assert value["speedup"] == pytest.approx(
        value["tokens_per_s"]["reread"] / value["tokens_per_s"]["dense"]
    )
    assert value["fast_steps"] > 0
    assert value["keys_read_share"] < 0.5
    assert value["slow_steps"] + value["fast_steps"] + value["full_steps"] == 11


def test_comparing_dense_with_dense_finds_no_difference(checkpoint: str) -> None:
    arguments = ["--model", checkpoint, "--prompt", PROMPT, "--max-new-tokens", "12", "--json"]
    for sampling in ([], ["--seed", "3"]):
        value = json.loads(run("compare", *arguments, "--preset", "dense", *sampling).stdout)
        assert value["token_agreement"] == 1.0
        assert value["first_difference"] is None
        assert value["keys_read_share"] == 1.0


def test_compare_prints_texts_to_stdout_and_the_table_to_stderr(checkpoint: str) -> None:
    arguments = ["--model", checkpoint, "--prompt", PROMPT, "--max-new-tokens", "5", *SMALL]
    result = run("compare", *arguments)
    assert result.exit_code == 0, result.output
    assert "[dense]" in result.stdout
    assert "[reread]" in result.stdout
    assert "speed-up" in result.stderr
    assert "speed-up" not in result.stdout
    assert "prefill" in result.stderr


def test_demo_asks_about_a_long_text(tmp_path: Path) -> None:
    folder = str(tiny_checkpoint.save(tmp_path, positions=7000))
    arguments = ["--model", folder, "--max-new-tokens", "3", "--json"]
    value = json.loads(run("demo", *arguments).stdout)
    assert 5900 < value["prompt_tokens"] < 6300
    file = tmp_path / "own.txt"
    file.write_text(PROMPT)
    own = json.loads(run("demo", *arguments, "--prompt-file", str(file), "--prompt", "Q").stdout)
    assert own["prompt_tokens"] < 300


def test_info_names_sparse_layers_and_kv_memory(checkpoint: str) -> None:
    result = run("info", "--model", checkpoint, "--json", "--prompt", "hi", "--raw", *SMALL)
    assert result.exit_code == 0, result.output
    value = json.loads(result.stdout)
    model = value["model"]
    assert model["sparse_layers"] == [0, 1]
    assert model["kv_bytes_per_token"] == 2 * 2 * 8 * 4 * 2  # K and V, heads, dim, float32, layers
    assert model["supported"]
    assert value["prompt"]["kv_bytes"] == 130 * model["kv_bytes_per_token"]
    assert value["prompt"]["keys_per_fast_step"] == 18
    assert "sparse_layers" in run("info", "--model", checkpoint).stdout


def test_info_says_why_a_model_is_refused(tmp_path: Path) -> None:
    from transformers import Gemma2Config

    Gemma2Config(hidden_size=32, num_hidden_layers=2, vocab_size=64).save_pretrained(tmp_path)
    model = json.loads(run("info", "--model", str(tmp_path), "--json").stdout)["model"]
    assert not model["supported"]
    assert "attn_logit_softcapping" in model["refusal"]
    assert len(model["sparse_layers"]) == 1


# -- bad input: exit code 2, one line, nothing on stdout ----------------------------------------


def assert_refused(result: Any, *expected: str) -> None:
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert result.stderr.splitlines()[-1] == errors[0]
    assert "Traceback" not in result.stderr
    assert [part for part in expected if part not in errors[0]] == []


BAD: dict[str, tuple[list[str], list[str]]] = {
    "unknown preset": (["--prompt", "x", "--preset", "fast"], ["'fast'", "default", "paper"]),
    "unknown key": (["--prompt", "x", "--set", "kk=3"], ["'kk'", "triggers.t_max"]),
    "K = 0": (["--prompt", "x", "--set", "K=0"], ["k=0", "at least 1"]),
    "negative K": (["--prompt", "x", "--set", "k=-1"], ["k=-1"]),
    "recent = 0": (["--prompt", "x", "--set", "recent=0"], ["recent=0"]),
    "no value": (["--prompt", "x", "--set", "k"], ["'k'", "KEY=VALUE"]),
    "no prompt": ([], ["--prompt", "--prompt-file"]),
    "empty prompt": (["--prompt", ""], ["empty"]),
    "blank prompt": (["--prompt", " \n"], ["empty"]),
    "missing prompt file": (["--prompt-file", "gone.txt"], ["gone.txt"]),
    "a folder as prompt file": (["--prompt-file", "."], ["cannot be read"]),
    "no new tokens": (["--prompt", "x", "--max-new-tokens", "0"], ["0", "at least 1"]),
    "unknown dtype": (["--prompt", "x", "--dtype", "int3"], ["'int3'", "bfloat16"]),
    "unknown device": (["--prompt", "x", "--device", "tpu9"], ["'tpu9'", "cpu"]),
    "a device without numbers": (["--prompt", "x", "--device", "meta"], ["meta"]),
    "prompt too long": (["--raw", "--prompt", "x" * 300], ["300 tokens", "128 new", "400"]),
}


@pytest.mark.parametrize("command", ["generate", "compare"])
@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused(command: str, case: str, checkpoint: str) -> None:
    arguments, expected = BAD[case]
    assert_refused(run(command, "--model", checkpoint, *arguments), *expected)


@pytest.mark.parametrize("command", ["generate", "compare", "demo", "info"])
def test_missing_models_are_refused(command: str, tmp_path: Path) -> None:
    arguments = [] if command in ("demo", "info") else ["--prompt", "x"]
    missing = str(tmp_path / "nothing")
    assert_refused(run(command, "--model", missing, *arguments), missing, "hub id")
    gguf = str(tmp_path / "gone.gguf")
    assert_refused(run(command, "--model", gguf, *arguments), gguf, "does not exist")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")
    bad = str(tmp_path / "bad.gguf")
    assert_refused(run(command, "--model", bad, *arguments), bad, "truncated")


def test_prompt_that_is_not_utf8_names_the_file_and_the_byte(
    checkpoint: str, tmp_path: Path
) -> None:
    file = tmp_path / "latin1.txt"
    file.write_bytes("caf\xe9 au lait".encode("latin-1"))
    result = run("generate", "--model", checkpoint, "--prompt-file", str(file))
    assert_refused(result, str(file), "0xe9", "offset 3", "UTF-8")
    piped = run("generate", "--model", checkpoint, "--prompt-file", "-", stdin=b"a\xff")
    assert_refused(piped, "standard input", "0xff", "offset 1")


def test_chat_without_a_template_names_raw(plain: str) -> None:
    assert_refused(run("generate", "--model", plain, "--prompt", "x", "--chat"), "--raw")


def test_unknown_options_end_with_the_same_code(checkpoint: str) -> None:
    assert run("generate", "--model", checkpoint, "--promt", "x").exit_code == 2


# -- interrupts --------------------------------------------------------------------------------


def heed_interrupts() -> None:
    """A test run in the background of a shell inherits that interrupts are ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_interrupt_while_decoding_prints_what_there_is(tmp_path: Path) -> None:
    folder = str(tiny_checkpoint.save(tmp_path, positions=100_000))
    arguments = ["--model", folder, "--prompt", "x", "--max-new-tokens", "90000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "reread", "generate", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=heed_interrupts,
    )
    assert process.stdout is not None
    start = process.stdout.read(5)
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=180)
    assert process.returncode == 130
    assert (start + rest).endswith(b"\n")
    assert len(start + rest) < 90_000
    assert b"Traceback" not in errors


def test_text_streams_into_a_terminal_until_control_c(tmp_path: Path) -> None:
    """No progress bar may run into the text, and none may hold it back."""
    folder = str(tiny_checkpoint.save(tmp_path, positions=100_000))
    arguments = ["--model", folder, "--prompt", PROMPT, "--max-new-tokens", "90000"]
    terminal = pexpect.spawn(
        sys.executable,
        ["-m", "reread", "generate", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm"},
        encoding="utf-8",
        preexec_fn=heed_interrupts,
        timeout=120,
    )
    terminal.expect("prefill")
    terminal.expect(r"[!-~]{20}")
    terminal.sendcontrol("c")
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == 130
    assert "prefill" not in terminal.before
    assert "Traceback" not in terminal.before


@pytest.mark.parametrize("command", ["generate", "compare"])
def test_interrupted_json_is_whole_and_says_so(
    command: str, checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(self: object, arm: str, phase: str, done: int, total: int) -> None:
        if phase == "decode" and arm != "dense" and done == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(report.Reporter, "__call__", interrupt)
    arguments = ["--model", checkpoint, "--prompt", PROMPT, "--json", "--max-new-tokens", "9"]
    result = run(command, *arguments)
    assert result.exit_code == 130
    value = json.loads(result.stdout)
    assert value["interrupted"] is True
    if command == "compare":
        assert value["tokens_per_s"]["dense"] > 0
        assert len(value["text"]["dense"]) > len(value["text"]["reread"]) > 0
    else:
        assert 0 < len(value["tokens"]) < 9
