"""Mode "exact" with an indexer: drafts choose their keys anew at every token, verifications keep
the index keys that dense attention gives, and the text is dense's."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import reread
from reread import Config, ConfigError, InputError, SparsePrefill
from reread.cli import app
from reread.evaluation.methods import parse_methods
from reread.indexer.model import Indexer
from reread.integrations.hf.attach import IN_MEMORY
from reread.integrations.hf.indexers import new_indexer
from reread.stats import Drafts

from ..unit import tiny_checkpoint
from . import tiny
from .exact_cases import NEW, as_if_keys_were_all, dense, ends, everything, exact, ragged
from .test_exact_sampling import LETTERS, LEVEL, exactly, letters, p_value, small, start
from .test_exact_stats import Breaks, Stop
from .test_exact_turns import alone, assert_same_cache, together
from .tiny import CACHE, MATRIX, cache_of, left_padded, model, prompt

archs = pytest.mark.parametrize("name", MATRIX)
some = pytest.mark.parametrize("name", ["llama", "qwen2-windowed", "qwen3.5"])
batches = pytest.mark.parametrize("rows", [1, 8])
drafting = pytest.mark.parametrize("config", [exact(k=24), everything()], ids=["k=24", "all"])


def indexer_of(net: Any, heads: int = 1, init: str = "svd", seed: int = 0) -> Indexer:
    return new_indexer(net, 16, heads, init, seed=seed)


def run(
    net: Any, ids: Tensor, config: Config, indexer: Indexer | None = None, **options: Any
) -> tuple[Any, reread.Stats]:
    """transformers' output under `config`, greedy unless told otherwise, and the stats."""
    given = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, **options}
    indexer = indexer_of(net) if indexer is None else indexer
    with reread.attach(net, config, indexer=indexer) as session:
        out = net.generate(ids, return_dict_in_generate=True, **given)
    return out, session.stats


def drafts_of(stats: reread.Stats) -> Drafts:
    assert stats.drafts is not None
    assert stats.drafts.drafted > 0
    assert stats.config["indexer"] == IN_MEMORY
    return stats.drafts


def greedy(name: str, rows: int, config: Config, **options: Any) -> reread.Stats:
    """The text is dense's."""
    ids, mask = (prompt(90), None) if rows == 1 else ragged()
    out, stats = run(model(name), ids, config, attention_mask=mask, **options)
    assert out.sequences[:, ids.shape[1] :].tolist() == dense(name, rows).tolist()
    return stats


# ---- the text


@archs
@batches
def test_drafts_of_a_tiny_budget_leave_denses_text(name: str, rows: int) -> None:
    drafts = drafts_of(greedy(name, rows, exact(k=8)))
    assert drafts.accepted < drafts.drafted


@archs
@batches
def test_drafts_that_read_everything_all_stand(name: str, rows: int) -> None:
    stats = greedy(name, rows, everything())
    assert drafts_of(stats).acceptance == 1.0
    assert drafts_of(stats).lengths == {5: rows, 8: rows}
    assert (stats.slow_steps, stats.fast_steps) == ([2] * rows, [13] * rows)


@pytest.mark.parametrize("name", ["llama", "qwen3.5"])
@pytest.mark.parametrize("tokens", [1, 4, 16])
@pytest.mark.parametrize("k", [1, 40])
def test_any_budget_and_length_leave_denses_text(k: int, tokens: int, name: str) -> None:
    drafts = drafts_of(greedy(name, 8, exact(k=k, tokens=tokens, min_probability=0.2)))
    assert max(drafts.lengths) <= tokens


def test_rows_below_and_above_the_budget_and_drafts_that_adapt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    as_if_keys_were_all(monkeypatch)
    for adapt in (False, True):
        config = exact(k=24, tokens=2, adapt=adapt, dense_below_budget=True)
        assert 0 in drafts_of(greedy("llama", 8, config)).lengths


def test_a_row_that_gave_up_drafts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """No verification has to leave it anything to draft by."""
    as_if_keys_were_all(monkeypatch)
    net, ids = tiny.build(MATRIX["qwen3"], max_position_embeddings=1024), prompt(90)
    config = exact(k=24, tokens=8, adapt=True, dense_below_budget=True)
    out, stats = run(net, ids, config, max_new_tokens=160)
    assert out.sequences[:, 90:].tolist() == tiny.stock(net, ids, 160).tolist()
    lengths = drafts_of(stats).lengths
    assert lengths[0] > 60
    assert sum(times for n, times in lengths.items() if n) >= 3


@some
@drafting
def test_processors_end_tokens_and_chunks_leave_denses_text(name: str, config: Config) -> None:
    ids, mask = ragged()
    options = {
        "attention_mask": mask, "max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0,
        "repetition_penalty": 1.3, "eos_token_id": ends(dense(name, 8)), "prefill_chunk_size": 16,
    }  # fmt: skip
    want = model(name).generate(ids, **options)
    out, stats = run(model(name), ids, config, **options)
    assert out.sequences.tolist() == want.tolist()
    drafts_of(stats)


@drafting
def test_padding_between_the_tokens_of_a_row_is_not_read(config: Config) -> None:
    net, (ids, mask) = model("llama"), ragged()
    mask = mask.clone()
    mask[1, -12:-7] = mask[3, -30] = 0
    want = net.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
    out, stats = run(net, ids, config, attention_mask=mask)
    assert out.sequences.tolist() == want.tolist()
    assert (drafts_of(stats).acceptance == 1.0) == (config.k > 100)


def test_an_indexer_of_several_heads_where_rows_stand_apart() -> None:
    """It sees a row's own keys alone, though the cache is longer where others have come further."""
    net, config = model("llama"), exact(k=8, min_probability=0.05)
    indexer, (ids, mask) = indexer_of(net, 2), ragged()
    out, stats = run(net, ids, config, indexer, attention_mask=mask)
    assert out.sequences[:, ids.shape[1] :].tolist() == dense("llama", 8).tolist()
    for b, length in enumerate(mask.sum(1).tolist()):
        _, own = run(net, ids[b : b + 1, -length:], config, indexer)
        assert [stats.slow_steps[b], stats.fast_steps[b]] == [*own.slow_steps, *own.fast_steps]


# ---- what drafts read


def told(config: Config) -> Config:
    """Decode steps of mode "indexed" that read as the drafts of `config`."""
    changes = {"boundary": False, "t_max": None, "first_step": False}
    return config.updated({"mode": "indexed", **changes})


@torch.no_grad()
def simulated(net: Any, indexer: Indexer, config: Config, ids: Tensor) -> tuple[Drafts, float]:
    """By the definition: behind every verified text, steps of mode "indexed" over a dense cache of
    it draft, and dense's text says what stands. Also the share of keys read."""
    width, tokens = ids.shape[1] + NEW, config.draft.tokens
    text = [*ids[0].tolist(), *tiny.stock(net, ids, NEW)[0].tolist()]
    lengths, verified, accepted, read, cached = dict[int, int](), 0, 0, 0, 0
    count = ids.shape[1] + 1
    with reread.attach(net, told(config), indexer=indexer) as session:
        while count < width:
            wanted, drafted = min(tokens, width - count - 1), list[int]()
            cache = tiny.prefilled(net, torch.tensor([text[: count - 1]]))
            with session.decoding():
                newest = text[count - 1]
                for _ in range(wanted):
                    logits = net(torch.tensor([[newest]]), use_cache=True, **{CACHE: cache}).logits
                    newest = int(logits[0, -1].argmax())
                    read += min(config.budget, count + len(drafted))
                    drafted.append(newest)
            right = text[count : count + wanted]
            n = next((i for i in range(wanted) if drafted[i] != right[i]), wanted)
            lengths[wanted] = lengths.get(wanted, 0) + 1
            verified, accepted, read = verified + 1, accepted + n, read + count + wanted
            cached += sum(range(count, count + n + 1))
            count += n + 1
    drafted_all = sum(n * times for n, times in lengths.items())
    return Drafts(
        verified, drafted_all, accepted, dict(sorted(lengths.items())), NEW
    ), read / cached


@pytest.mark.parametrize("name", ["llama", "llama-gqa4", "qwen3-moe", "qwen3.5"])
@pytest.mark.parametrize(("k", "tokens"), [(8, 1), (24, 4), (40, 3)])
@pytest.mark.parametrize(("heads", "init"), [(1, "svd"), (2, "svd"), (1, "random")])
def test_drafts_are_the_steps_of_mode_indexed(
    name: str, k: int, tokens: int, heads: int, init: str
) -> None:
    net, config = model(name), exact(k=k, tokens=tokens)
    indexer, ids = indexer_of(net, heads, init), prompt(90)
    _, stats = run(net, ids, config, indexer)
    want, share = simulated(net, indexer, config, ids)
    assert stats.drafts == want
    assert stats.keys_read_share == pytest.approx(share)


def test_other_indexers_draft_otherwise_and_the_selector_too() -> None:
    net, config, ids = model("llama"), exact(k=24), prompt(90)
    seen = {
        drafts_of(run(net, ids, config, indexer_of(net, init="random", seed=seed))[1]).accepted
        for seed in range(6)
    }
    assert len(seen) > 1
    found = []
    for given in (indexer_of(net), None):
        with reread.attach(net, config, indexer=given) as session:
            net.generate(prompt(90, rows=4), do_sample=False, max_new_tokens=NEW)
        found.append(session.stats.drafts)
    assert found[0] != found[1]


def test_nothing_is_chosen_by_verifications(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("the Selector ran")

    for name in ("chosen_by", "select_from_tail", "read_chosen"):
        monkeypatch.setattr(f"reread.verifying.{name}", never)
    monkeypatch.setattr("reread.verifying.Evidence", never)
    drafts_of(greedy("llama", 8, exact(k=8)))


# ---- the index keys


@torch.no_grad()
def read_anew(net: Any, indexer: Indexer, ids: Tensor, mask: Tensor) -> Any:
    """A cache of the text, read in one dense pass."""
    cache = tiny.DynamicCache(config=net.config)
    places = (mask.cumsum(1) - 1).clamp(min=0)  # as `generate` counts them
    with reread.attach(net, told(exact()), indexer=indexer):
        net(ids, attention_mask=mask, position_ids=places, use_cache=True, **{CACHE: cache})
    return cache


def assert_same_index(got: Any, want: Any, padding: Tensor) -> None:
    kept = 0
    for ours, theirs in zip(got.layers, want.layers, strict=True):
        state = getattr(ours, "state", None)
        if state is None:
            continue
        assert state.kv.indexed == state.kv.length == padding.shape[1]
        a, b = (x.state.kv.index.masked_fill(padding[:, None, :, None], 0) for x in (ours, theirs))
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
        kept += 1
    assert kept


@some
@drafting
@pytest.mark.parametrize("ended", [False, True])
def test_index_keys_are_those_of_the_text_read_densely(
    name: str, config: Config, ended: bool
) -> None:
    """Whatever was drafted, refused or padded: of all rows, whenever they ended."""
    net, (ids, mask) = model(name), ragged()
    indexer = indexer_of(net)
    end = {"eos_token_id": ends(dense(name, 8))} if ended else {}
    out, stats = run(net, ids, config, indexer, attention_mask=mask, **end)
    drafts_of(stats)
    read = out.sequences[:, :-1]
    wide = torch.nn.functional.pad(mask, (0, read.shape[1] - mask.shape[1]), value=1)
    want = read_anew(net, indexer, read, wide)
    assert_same_index(cache_of(out), want, wide == 0)
    assert_same_cache(want, cache_of(out), wide == 0)


def test_a_cache_that_grows_keeps_its_index_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reread.kv.GROWTH_STEP", 1)
    monkeypatch.setattr("reread.kv.GROWTH_SHARE", 1000)
    monkeypatch.setattr("reread.kv.GrowingKV.reserve", lambda kv, positions: None)
    net, (ids, mask) = model("llama"), ragged()
    indexer = indexer_of(net)
    out, _ = run(net, ids, exact(k=8), indexer, attention_mask=mask)
    assert out.sequences[:, ids.shape[1] :].tolist() == dense("llama", 8).tolist()
    wide = torch.nn.functional.pad(mask, (0, NEW - 1), value=1)
    want = read_anew(net, indexer, out.sequences[:, :-1], wide)
    assert_same_index(cache_of(out), want, wide == 0)


# ---- turns


def talk(
    net: Any, configs: tuple[Config | None, Config | None], given: Any, **options: Any
) -> tuple[Tensor, Any]:
    """Two turns on one cache, each with reread (a config) or without (None)."""
    ids, mask, more = given
    cache, indexer, out = dict[str, Any](), indexer_of(net), None
    for config, (tail, seen) in zip(configs, ((ids, mask), more), strict=True):
        if out is not None:
            ids = torch.cat([out.sequences, tail], 1)
            pad = out.sequences.shape[1] - mask.shape[1]
            mask = torch.cat([torch.nn.functional.pad(mask, (0, pad), value=1), seen], 1)
        attached = reread.attach(net, config, indexer=indexer) if config else nullcontext()
        with attached as session:
            out = net.generate(
                ids, attention_mask=mask, do_sample=False, pad_token_id=0, max_new_tokens=NEW,
                return_dict_in_generate=True, **options, **cache,
            )  # fmt: skip
        if session is not None:
            drafts_of(session.stats)
        cache = {CACHE: cache_of(out)}
    return out.sequences, cache_of(out)


@some
@drafting
@pytest.mark.parametrize("given", [alone, together])
def test_a_second_turn_on_the_cache_of_the_first_is_denses(
    name: str, config: Config, given: Any
) -> None:
    net = model(name)
    want = talk(net, (None, None), given())
    got = talk(net, (config, config), given())
    assert got[0].tolist() == want[0].tolist()
    # plain transformers goes on from it, too
    assert talk(net, (config, None), given())[0].tolist() == want[0].tolist()


def test_a_cache_that_was_read_without_the_indexer_is_refused_and_left_alone() -> None:
    net, ids = model("llama"), prompt(90)
    cache = tiny.prefilled(net, ids[:, :50])
    with pytest.raises(InputError, match="of 0 this indexer has read"):
        run(net, ids, exact(k=8), **{CACHE: cache})
    assert cache.get_seq_length() == 50
    out = net.generate(ids, max_new_tokens=NEW, do_sample=False, **{CACHE: cache})
    assert out[:, 90:].tolist() == dense("llama", 1).tolist()


def test_steps_of_a_loop_of_ones_own_read_everything_and_go_on() -> None:
    net, ids = model("llama"), prompt(90)
    indexer = indexer_of(net)
    with reread.attach(net, exact(k=8), indexer=indexer) as session, torch.no_grad():
        cache, text = tiny.prefilled(net, ids[:, :-1]), ids.tolist()[0]
        with session.decoding():
            for _ in range(5):
                fed = torch.tensor([text[-1:]])
                text.append(int(net(fed, use_cache=True, **{CACHE: cache}).logits[0, -1].argmax()))
        assert (session.stats.fast_steps, session.stats.keys_read_share) == ([0], 1.0)
        given = {"max_new_tokens": NEW - 5, "do_sample": False, CACHE: cache}
        out = net.generate(torch.tensor([text]), **given)
        drafts_of(session.stats)
    assert out[:, 90:].tolist() == dense("llama", 1).tolist()


@drafting
@pytest.mark.parametrize("after", [1, 3, 7])
def test_an_interrupted_cache_serves_the_next_call(config: Config, after: int) -> None:
    net, ids, breaks = model("llama"), prompt(90), Breaks(after)
    indexer, cache = indexer_of(net), tiny.DynamicCache(config=net.config)
    options: dict[str, Any] = {"do_sample": False, CACHE: cache}
    with reread.attach(net, config, indexer=indexer) as session:
        with pytest.raises(Stop):
            net.generate(ids, max_new_tokens=NEW, streamer=breaks, **options)
        assert session._reader is not None
        assert session._reader._hooks == []
        text = torch.cat([ids, torch.tensor([breaks.tokens])], 1)
        cache.crop(text.shape[1] - 1 - cache.get_seq_length())
        got = net.generate(text, max_new_tokens=NEW - after, **options)
    assert got[:, 90:].tolist() == dense("llama", 1).tolist()
    wide = torch.ones_like(got[:, :-1])
    assert_same_index(cache, read_anew(net, indexer, got[:, :-1], wide), wide == 0)


def test_a_pass_that_fails_within_a_layer_leaves_no_hook() -> None:
    net, ids, left = tiny.build(MATRIX["llama"]), prompt(90), [9]

    def fail(*_: Any) -> None:
        left[0] -= 1
        if not left[0]:
            raise Stop

    with reread.attach(net, exact(k=8), indexer=indexer_of(net)):
        handle = net.model.layers[1].self_attn.q_proj.register_forward_hook(fail)
        with pytest.raises(Stop):
            net.generate(ids, max_new_tokens=NEW, do_sample=False)
        handle.remove()
        assert not any(m._forward_pre_hooks for m in net.model.layers.modules())
        got = net.generate(ids, max_new_tokens=NEW, do_sample=False)
    assert got[:, 90:].tolist() == dense("llama", 1).tolist()


# ---- sampling


@pytest.mark.slow
def test_samples_are_distributed_as_denses() -> None:
    net, ids, draws, options = letters(), start(), 2000, {"temperature": 1.7, "top_k": 0}
    indexer, counts = indexer_of(net), torch.zeros(LETTERS**3)
    torch.manual_seed(5)
    for _ in range(draws // 500):
        out, stats = run(
            net, ids, small(2), indexer, attention_mask=torch.ones_like(ids), max_new_tokens=3,
            do_sample=True, num_return_sequences=500, **options,
        )  # fmt: skip
        assert 0.1 < drafts_of(stats).acceptance < 0.95
        place = LETTERS ** torch.arange(2, -1, -1)
        counts += torch.bincount((out.sequences[:, 40:] * place).sum(1), minlength=LETTERS**3)
    assert p_value(counts, exactly(3, options)) > LEVEL


@some
def test_sampling_with_a_seed_is_repeatable(name: str) -> None:
    ids, mask = left_padded([prompt(n, seed=n) for n in (40, 66, 90)])
    texts = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        out, stats = run(model(name), ids, exact(k=24), attention_mask=mask, do_sample=True)
        drafts_of(stats)
        texts.append(out.sequences.tolist())
    assert texts[0] == texts[1] != texts[2]


# ---- settings and errors


def test_a_folder_is_what_an_indexer_in_memory_is(tmp_path: Path) -> None:
    net, ids = model("llama"), prompt(90)
    indexer_of(net).save(tmp_path)
    config = exact(k=8).updated({"indexer": tmp_path})
    config = Config.from_dict(json.loads(json.dumps(config.to_dict())))
    assert config.indexed
    assert config.uses_indexer
    assert config.indexer_folder == str(tmp_path)
    output = reread.generate(net, ids, config=config, max_new_tokens=NEW, do_sample=False)
    out, stats = run(net, ids, exact(k=8))
    assert output.sequences.tolist() == out.sequences.tolist()
    assert output.stats.drafts == stats.drafts
    assert output.stats.config["indexer"] == str(tmp_path)


def test_exact_mode_without_an_indexer_is_as_it_was() -> None:
    config = Config.preset("exact")
    assert not config.indexed
    assert not config.uses_indexer
    with reread.attach(model("llama"), exact(k=8)) as session:
        assert session._reader is None


def test_indexers_that_do_not_fit(tmp_path: Path) -> None:
    net = model("llama")
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(InputError, match="holds no indexer"):
            reread.attach(net, exact().updated({"indexer": folder}))
    other = indexer_of(tiny.build(MATRIX["llama"], seed=3))
    other.save(tmp_path)
    with pytest.raises(InputError, match="made for another backbone"):
        reread.attach(net, exact().updated({"indexer": tmp_path}))
    with pytest.raises(InputError, match="made for another backbone"):
        reread.attach(net, exact(), indexer=other)
    with pytest.raises(ConfigError, match="indexer="):
        reread.attach(net, exact(), indexer=str(tmp_path))  # type: ignore[arg-type]  # refused


def test_settings_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match=r"prefill.*exact"):
        Config(mode="exact", indexer="a", prefill=SparsePrefill(indexer="a"))
    with pytest.raises(ConfigError, match="neither mode nor prefill uses one"):
        Config(mode="exact", indexer="a").updated({"mode": "dense"})
    with pytest.raises(ConfigError, match="indexer"):
        Config(mode="exact", indexer="")


def test_a_method_of_eval_may_have_one(tmp_path: Path) -> None:
    (method,) = parse_methods(f"exact:indexer={tmp_path}", None)
    assert method.config is not None
    assert method.config.indexed


def command(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})


def test_commands(tmp_path: Path) -> None:
    checkpoint, folder = str(tiny_checkpoint.save(tmp_path / "model")), str(tmp_path / "indexer")
    new_indexer(tiny_checkpoint.model(), 8, 1, "svd").save(tmp_path / "indexer")
    given = ["--preset", "exact", "--set", f"indexer={folder}"]
    text = "The quick brown fox jumps over the lazy dog. " * 3
    common = ["--model", checkpoint, "--prompt", text, "--max-new-tokens", "6", "--json"]
    small_budget = ["--set", "k=8", "--set", "recent=8", "--set", "sink=2", "--set", "adapt=false"]
    for name in ("generate", "compare"):
        result = command(name, *common, *given, *small_budget)
        assert result.exit_code == 0, result.output
        value = json.loads(result.stdout)
        assert value["config"]["indexer"] == folder
    result = command("generate", *common, "--preset", "exact", "--set", "indexer=nowhere")
    assert result.exit_code == 2
    assert "nowhere holds no indexer" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan"], "drafts by an indexer ('here') are not in the planner's model"),
        (["bench", "decode"], "drafts by an indexer ('here') are not timed as cycles"),
    ],
)
def test_commands_that_know_the_selectors_drafts_alone_say_so(
    arguments: list[str], message: str
) -> None:
    result = command(*arguments, "--preset", "exact", "--set", "indexer=here")
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.stderr.split())
