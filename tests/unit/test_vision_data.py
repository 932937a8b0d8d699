"""Data of documents and videos as it is published."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from reread import InputError
from reread.evaluation.tasks import vision_data
from reread.evaluation.tasks.vision_data import Asked, documents, evenly, load_images, videos

DOCUMENT = {
    "doc_id": "report-2018.pdf",
    "doc_type": "Research report / Introduction",
    "question": "How many?",
    "answer": "8",
    "evidence_pages": "[2, 22]",
    "evidence_sources": "['Chart']",
    "answer_format": "Int",
}
VIDEO = {
    "video_id": "001",
    "duration": "short",
    "domain": "Knowledge",
    "videoID": "fFjv93ACGo8",
    "question_id": "001-1",
    "question": "Which colour?",
    "options": ["A. Black.", "B. Gray.", "C. Green.", "D. Brown."],
    "answer": "C",
}


def write(path: Path, value: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    return path


def pictures(folder: Path, names: list[str]) -> Path:
    """Images whose red is their place in `names`."""
    folder.mkdir(parents=True)
    for red, name in enumerate(names):
        Image.new("RGB", (4, 6), (red, 0, 0)).save(folder / name)
    return folder


def reds(images: list[Any]) -> list[int]:
    return [image.getpixel((0, 0))[0] for image in images]


def about(source: Path, *, video: bool = False) -> Asked:
    options = tuple(VIDEO["options"]) if video else ()
    return Asked(source, "?", "8", "single page", "Int", options)


def test_documents_of_the_published_file(tmp_path: Path) -> None:
    rows = [
        DOCUMENT,
        {**DOCUMENT, "evidence_pages": "[5]"},
        {**DOCUMENT, "answer": "Not answerable", "evidence_pages": "[]", "answer_format": "None"},
    ]
    write(tmp_path / "samples.json", rows)
    folder = pictures(tmp_path / "documents" / "report-2018", ["1.png"])
    found = documents(tmp_path)
    assert [a.kind for a in found] == ["cross page", "single page", "unanswerable"]
    assert {a.source for a in found} == {folder}
    assert found[0] == Asked(folder, "How many?", "8", "cross page", "Int")


def test_a_clone_of_the_repository_and_its_pdf(tmp_path: Path) -> None:
    write(tmp_path / "data" / "samples.json", [DOCUMENT])
    pdf = write(tmp_path / "data" / "documents" / "report-2018.pdf", "")
    assert documents(tmp_path)[0].source == pdf


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_videos_of_the_published_file(tmp_path: Path, form: str) -> None:
    if form == "jsonl":
        write(tmp_path / "test.jsonl", json.dumps(VIDEO) + "\n\n")
    else:
        pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
        parquet = importlib.import_module("pyarrow.parquet")
        (tmp_path / "videomme").mkdir()
        file = tmp_path / "videomme" / "test-00000-of-00001.parquet"
        parquet.write_table(pyarrow.Table.from_pylist([VIDEO]), file)
    film = write(tmp_path / "data" / "fFjv93ACGo8.mp4", "")
    (found,) = videos(tmp_path)
    assert found == Asked(film, "Which colour?", "C", "short", options=tuple(VIDEO["options"]))
    frames = pictures(tmp_path / "frames" / "fFjv93ACGo8", ["f1.png"])
    assert videos(tmp_path)[0].source == frames


def test_pages_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    names = [f"scan7_page_{n}.png" for n in (10, 9, 11)]
    assert reds(load_images(about(pictures(tmp_path / "d", names)))) == [1, 0, 2]


def test_frames_are_spread_over_the_video(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vision_data, "FRAMES", 3)
    folder = pictures(tmp_path / "v", [f"{n:03}.png" for n in range(0, 90, 10)])
    assert reds(load_images(about(folder, video=True))) == [1, 4, 7]


def test_evenly() -> None:
    assert evenly(3, 8) == [0, 1, 2]
    assert evenly(100, 4) == [12, 37, 62, 87]
    assert evenly(5, 5) == [0, 1, 2, 3, 4]


def test_a_long_document_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vision_data, "MAX_PAGES", 2)
    assert reds(load_images(about(pictures(tmp_path / "d", ["1.png", "2.png", "3.png"])))) == [0, 1]


def test_what_is_missing_or_broken_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"data folder .*none is not there"):
        documents(tmp_path / "none")
    with pytest.raises(InputError, match=r"has none of samples.json"):
        documents(tmp_path)
    for text in ("[{", "{}", "[]", '["a"]'):
        write(tmp_path / "samples.json", text)
        with pytest.raises(InputError, match=r"samples.json (cannot be read|is no list)"):
            documents(tmp_path)
    write(tmp_path / "videomme" / "test.parquet", "no table")
    with pytest.raises(InputError, match=r"test.parquet cannot be read"):
        videos(tmp_path)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"answer_format": "Date"}, "sample 0 has answer_format 'Date', which is none of Str, Int"),
        ({"answer": ""}, "sample 0 has no answer"),
        ({"doc_id": None}, "sample 0 has no doc_id"),
    ],
)
def test_documents_that_cannot_be_right(tmp_path: Path, change: Any, told: str) -> None:
    write(tmp_path / "samples.json", [{**DOCUMENT, **change}])
    with pytest.raises(InputError, match=told):
        documents(tmp_path)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"options": ["A. Yes", "B. No"]}, "4 of them are needed"),
        ({"options": None}, "has options None"),
        ({"answer": "E"}, "has answer 'E': one of A, B, C, D"),
        ({"answer": "AB"}, "has answer 'AB'"),
        ({"videoID": ""}, "has no videoID"),
    ],
)
def test_videos_that_cannot_be_right(tmp_path: Path, change: Any, told: str) -> None:
    write(tmp_path / "test.jsonl", {**VIDEO, **change})
    with pytest.raises(InputError, match=told):
        videos(tmp_path)


def test_images_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"doc is not there: give the file, or a folder"):
        load_images(about(tmp_path / "doc"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="has no images"):
        load_images(about(tmp_path / "empty"))
    gap = pictures(tmp_path / "gap", ["1.png", "2.png", "4.png"])
    with pytest.raises(InputError, match="has no image of page 3"):
        load_images(about(gap))
    with pytest.raises(InputError, match=r"cover.png has no number"):
        load_images(about(pictures(tmp_path / "cover", ["cover.png"])))
    with pytest.raises(InputError, match="have the same number"):
        load_images(about(pictures(tmp_path / "twice", ["1.png", "01.png"])))
    write(tmp_path / "broken" / "1.png", "no image")
    with pytest.raises(InputError, match=r"1.png cannot be read"):
        load_images(about(tmp_path / "broken"))


@pytest.mark.parametrize(("name", "library"), [("a.pdf", "pypdfium2"), ("a.mp4", "av")])
def test_a_library_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, library: str
) -> None:
    def without(module: str) -> Any:
        raise ImportError(module)

    monkeypatch.setattr(importlib, "import_module", without)
    source = write(tmp_path / name, "")
    with pytest.raises(InputError, match=rf"{name} needs {library}: pip install {library}, or"):
        load_images(about(source, video=name.endswith("mp4")))


def test_a_pdf_is_rendered(tmp_path: Path) -> None:
    pdf = pytest.importorskip("pypdfium2", reason="pypdfium2 is not installed")
    with pdf.PdfDocument.new() as made:
        for _ in range(2):
            made.new_page(72, 144)
        made.save(tmp_path / "a.pdf")
    assert [i.size for i in load_images(about(tmp_path / "a.pdf"))] == [(144, 288)] * 2
    write(tmp_path / "b.pdf", "no PDF")
    with pytest.raises(InputError, match=r"b.pdf cannot be read"):
        load_images(about(tmp_path / "b.pdf"))


def test_a_video_is_decoded(tmp_path: Path) -> None:
    av = pytest.importorskip("av", reason="av is not installed")
    with av.open(str(tmp_path / "a.mp4"), "w") as film:
        stream = film.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
        for i in range(96):
            image = Image.new("RGB", (32, 32), (2 * i, 2 * i, 2 * i))
            film.mux(stream.encode(av.VideoFrame.from_image(image)))
        film.mux(stream.encode())
    shades = reds(load_images(about(tmp_path / "a.mp4", video=True)))
    assert len(shades) == vision_data.FRAMES
    # the middle of each third of a second; the codec loses a little
    wanted = [2 * (3 * i + 2) for i in range(vision_data.FRAMES)]
    assert all(abs(a - b) <= 6 for a, b in zip(shades, wanted, strict=True)), shades
    write(tmp_path / "b.mp4", "no video")
    with pytest.raises(InputError, match=r"b.mp4 cannot be read"):
        load_images(about(tmp_path / "b.mp4", video=True))
