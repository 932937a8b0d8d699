"""The folder of a run: nothing that was measured is lost, and nothing is mixed."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reread.errors import InputError
from reread.evaluation.suite.store import RUN, SAMPLES, Folder, parse_samples
from reread.evaluation.tasks.base import Sample

SETTINGS = {"model": "m", "seed": 0}
VERSIONS = {"reread": "1", "torch": "2", "transformers": "3", "python": "3.11"}


def sample(number: int = 0, method: str = "dense", score: float | None = 1.0) -> Sample:
    return Sample(
        task="t", length=8, method=method, number=number, kind="k", score=score,
        expected=("a", "b"), answer="naïve\n☃", figures={"kl": 0.5},
    )  # fmt: skip


def opened(path: Path, **settings: Any) -> Folder:
    folder = Folder(path, {**SETTINGS, **settings}, VERSIONS)
    with folder:
        folder.note(methods={"dense": {"k": 1}}, versions=VERSIONS)
    return folder


def test_what_was_added_is_read_again(tmp_path: Path) -> None:
    with Folder(tmp_path / "new", SETTINGS, VERSIONS) as folder:
        folder.note(versions=VERSIONS)
        folder.add(sample(0))
        folder.add(sample(1))
    with Folder(tmp_path / "new", SETTINGS, VERSIONS) as folder:
        assert list(folder.samples.values()) == [sample(0), sample(1)]


@given(cut=st.integers(1, 10_000))
def test_a_half_written_line_is_cut_off(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = tmp_path_factory.mktemp("run")
    opened(path)
    with Folder(path, SETTINGS, VERSIONS) as folder:
        for number in range(3):
            folder.add(sample(number))
    data = (path / SAMPLES).read_bytes()
    kept = data[: len(data) - cut % len(data)]
    (path / SAMPLES).write_bytes(kept)
    with Folder(path, SETTINGS, VERSIONS) as folder:
        assert len(folder.samples) == kept.count(b"\n")
        folder.add(sample(9))
    with Folder(path, SETTINGS, VERSIONS) as folder:
        assert (*folder.samples.values(),)[-1] == sample(9)


def test_a_full_disk_loses_nothing_that_was_there(tmp_path: Path) -> None:
    opened(tmp_path)
    with Folder(tmp_path, SETTINGS, VERSIONS) as folder:
        folder.add(sample(0))
        file = folder._file

        class Full:
            """Writes half of what it is given, as a disk that fills up does."""

            def write(self, data: bytes) -> int:
                assert file is not None
                file.write(data[: len(data) // 2])
                file.flush()
                raise OSError(errno.ENOSPC, "No space left on device")

            def __getattr__(self, name: str) -> Any:
                return getattr(file, name)

        folder._file = Full()  # type: ignore[assignment]  # stands in for the file
        with pytest.raises(InputError, match=r"No space left.*1 samples before are kept"):
            folder.add(sample(1))
    with Folder(tmp_path, SETTINGS, VERSIONS) as folder:
        assert list(folder.samples.values()) == [sample(0)]
        folder.add(sample(1))
    assert [s.number for s in parse_samples(tmp_path, (tmp_path / SAMPLES).read_text())] == [0, 1]


@pytest.mark.parametrize(
    ("settings", "versions", "said"),
    [
        ({"seed": 1}, {}, "seed=0 there, 1 now"),
        ({"model": "n"}, {}, "model='m' there, 'n' now"),
        ({}, {"torch": "9"}, "torch='2' there, '9' now"),
    ],
)
def test_another_run_is_refused(
    tmp_path: Path, settings: dict[str, Any], versions: dict[str, str], said: str
) -> None:
    opened(tmp_path)
    before = (tmp_path / RUN).read_bytes()
    with pytest.raises(InputError, match=said):
        Folder(tmp_path, {**SETTINGS, **settings}, {**VERSIONS, **versions})
    assert (tmp_path / RUN).read_bytes() == before


def test_settings_that_are_known_late_count_too(tmp_path: Path) -> None:
    with Folder(tmp_path, SETTINGS, VERSIONS) as folder:
        folder.settle({"backbone": "abc"})
        folder.note(versions=VERSIONS)
    with pytest.raises(InputError, match="backbone='abc' there, 'xyz' now"):
        Folder(tmp_path, SETTINGS, VERSIONS).settle({"backbone": "xyz"})


def test_a_method_of_another_configuration_is_refused(tmp_path: Path) -> None:
    opened(tmp_path)
    folder = Folder(tmp_path, SETTINGS, VERSIONS)
    folder.check_methods({"dense": {"k": 1}, "new": {"k": 7}})
    with pytest.raises(InputError, match=r"'dense'.*k=1 there, 2 now"):
        folder.check_methods({"dense": {"k": 2}})


def test_two_runs_at_once(tmp_path: Path) -> None:
    opened(tmp_path)
    with (
        Folder(tmp_path, SETTINGS, VERSIONS),
        pytest.raises(InputError, match="another run writes"),
        Folder(tmp_path, SETTINGS, VERSIONS),
    ):
        pass
    with Folder(tmp_path, SETTINGS, VERSIONS):
        pass


@pytest.mark.parametrize("line", ["{}", "[]", "3", "{", '{"task": "t", "colour": 1}'])
def test_a_line_that_is_no_sample_is_named(tmp_path: Path, line: str) -> None:
    opened(tmp_path)
    good = json.dumps(sample().to_dict())
    (tmp_path / SAMPLES).write_text(f"{good}\n{line}\n")
    with (
        pytest.raises(InputError, match="line 2 is no sample"),
        Folder(tmp_path, SETTINGS, VERSIONS),
    ):
        pass


def test_samples_without_a_run_are_no_run(tmp_path: Path) -> None:
    (tmp_path / SAMPLES).write_text("{}\n")
    with pytest.raises(InputError, match=r"no run\.json"):
        Folder(tmp_path, SETTINGS, VERSIONS)


def test_the_newer_line_counts(tmp_path: Path) -> None:
    opened(tmp_path)
    with Folder(tmp_path, SETTINGS, VERSIONS) as folder:
        folder.add(sample(score=None))
        folder.forget([sample().key])
        assert not folder.samples
        folder.add(sample(score=0.5))
    with Folder(tmp_path, SETTINGS, VERSIONS) as folder:
        assert [s.score for s in folder.samples.values()] == [0.5]


def test_speeds_are_kept(tmp_path: Path) -> None:
    opened(tmp_path)
    with Folder(tmp_path, SETTINGS, VERSIONS) as folder:
        folder.add_speed({"method": "dense", "length": 8})
        folder.add_speed({"method": "paper", "length": 8})
        assert [line["method"] for line in folder.speeds()] == ["dense", "paper"]
