"""Questions about documents and videos, from local copies of the published data sets.

mmlongbench_doc: samples.json, or the hub's data/train-*.parquet, and documents/DOC_ID, a PDF or a
folder of page images. videomme: the hub's videomme/test-*.parquet, or test.jsonl, and the frames
of a video as images in frames/VIDEO_ID, or the video itself in data/ or videos/.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import InputError
from .vision_scores import FORMATS, LETTERS

IMAGES = (".png", ".jpg", ".jpeg")
VIDEOS = (".mp4", ".mkv", ".webm")
MAX_PAGES = 120  # of a document, and
DPI = 144  # of its pages: as MMLongBench-Doc's own evaluation renders them
FRAMES = 32  # of a video
DOCUMENT_FILES = ("samples.json", "data/samples.json", "data/*.parquet", "*.parquet")
VIDEO_FILES = ("videomme/*.parquet", "*.parquet", "test.jsonl", "*.jsonl")


@dataclass(frozen=True, slots=True)
class Asked:
    """One question and where what it is about lies.

    Attributes:
        source: a folder of images, a PDF or a video.
        expected: the answer as the data set writes it.
        form: format of a document's answer; "" for a video.
        options: of a multiple choice, such as "A. Black."; else ().
        kind: the row of a table that it counts in.
    """

    source: Path
    question: str
    expected: str
    kind: str
    form: str = ""
    options: tuple[str, ...] = ()


def documents(folder: Path) -> list[Asked]:
    """All questions of MMLongBench-Doc; kinds are those of its paper: by pages with evidence.

    Raises:
        InputError: a file that is missing or broken, or a sample that cannot be right.
    """
    file = find_file(folder, DOCUMENT_FILES)
    found = []
    for number, row in enumerate(read_rows(file)):
        where = f"{file} sample {number}"
        name, question, answer, form = fields(
            row, ("doc_id", "question", "answer", "answer_format"), where
        )
        if form not in FORMATS:
            raise InputError(
                f"{where} has answer_format {form!r}, which is none of {', '.join(FORMATS)}"
            )
        pages = re.findall(r"\d+", str(row.get("evidence_pages", "")))
        kind = "single page" if len(pages) == 1 else "cross page"
        kind = "unanswerable" if form == "None" else kind
        found.append(Asked(_document(folder, name), question, answer, kind, form))
    return found


def videos(folder: Path) -> list[Asked]:
    """All questions of Video-MME (arXiv 2405.21075), without subtitles; kinds are durations.

    Raises:
        InputError: as `documents`.
    """
    file = find_file(folder, VIDEO_FILES)
    found = []
    for number, row in enumerate(read_rows(file)):
        where = f"{file} sample {number}"
        name, question, answer, kind = fields(
            row, ("videoID", "question", "answer", "duration"), where
        )
        given = row.get("options")
        options = () if given is None or isinstance(given, str) else tuple(map(str, given))
        if len(options) != len(LETTERS):
            raise InputError(f"{where} has options {given!r}: {len(LETTERS)} of them are needed")
        if answer not in LETTERS or len(answer) != 1:
            raise InputError(f"{where} has answer {answer!r}: one of {', '.join(LETTERS)}")
        found.append(Asked(_video(folder, name), question, answer, kind, options=options))
    return found


def load_images(asked: Asked) -> list[Any]:
    """Pages of a document or frames of a video, as RGB images of Pillow in their order.

    Raises:
        InputError: nothing there, an image that is missing or broken, or no library for the file.
    """
    source = asked.source
    if source.is_dir():
        found = _numbered(source)
        chosen = _some_frames(found) if asked.options else _all_pages(source, found)
        return [_open(path) for path in chosen]
    if not source.exists():
        raise InputError(f"{source} is not there: give the file, or a folder of images")
    return _pages(source) if source.suffix.lower() == ".pdf" else _frames(source)


def evenly(total: int, count: int) -> list[int]:
    """The middles of `count` equal parts of range(total); all of it where that is fewer."""
    if total <= count:
        return list(range(total))
    return [(2 * i + 1) * total // (2 * count) for i in range(count)]


def find_file(folder: Path, patterns: Sequence[str]) -> Path:
    """The first file of these.

    Raises:
        InputError: no such folder, or none of them in it.
    """
    if not folder.is_dir():
        raise InputError(f"data folder {folder} is not there")
    for pattern in patterns:
        if found := sorted(folder.glob(pattern)):
            return found[0]
    raise InputError(f"data folder {folder} has none of {', '.join(patterns)}")


def read_rows(file: Path) -> list[Mapping[str, Any]]:
    """The samples of a .json, .jsonl or .parquet file.

    Raises:
        InputError: it cannot be read, or holds no samples.
    """
    try:
        if file.suffix == ".parquet":
            rows = _library("pyarrow.parquet", file).read_table(file).to_pylist()
        elif file.suffix == ".jsonl":
            lines = file.read_text(encoding="utf-8").splitlines()
            rows = [json.loads(line) for line in lines if line.strip()]
        else:
            rows = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read ({error})") from error
    if not isinstance(rows, list) or not rows or not all(isinstance(r, dict) for r in rows):
        raise InputError(f"{file} is no list of samples")
    return rows


def fields(row: Mapping[str, Any], names: Sequence[str], where: str) -> list[str]:
    """The named values, as texts.

    Raises:
        InputError: one is missing or empty.
    """
    missing = [name for name in names if row.get(name) in (None, "")]
    if missing:
        raise InputError(f"{where} has no {', '.join(missing)}")
    return [str(row[name]).strip() for name in names]


def _document(folder: Path, name: str) -> Path:
    """A folder of page images before the PDF, which need not be rendered then."""
    bases = [folder / "documents", folder / "data" / "documents"]
    bare = name.removesuffix(".pdf")
    for base in bases:
        for path in (base / bare, base / name, base / f"{bare}.pdf"):
            if path.exists():
                return path
    return bases[0] / name


def _video(folder: Path, name: str) -> Path:
    frames = folder / "frames" / name
    files = [folder / at / f"{name}{end}" for at in ("data", "videos", "video") for end in VIDEOS]
    return next((path for path in (frames, *files) if path.exists()), frames)


def _numbered(folder: Path) -> dict[int, Path]:
    """The images of a folder by the last number in their names."""
    found: dict[int, Path] = {}
    for path in folder.iterdir():
        if path.suffix.lower() in IMAGES:
            digits = re.findall(r"\d+", path.stem)
            if not digits:
                raise InputError(f"image {path} has no number in its name")
            if other := found.get(int(digits[-1])):
                raise InputError(f"images {path} and {other} have the same number")
            found[int(digits[-1])] = path
    if not found:
        raise InputError(f"folder {folder} has no images ({', '.join(IMAGES)})")
    return found


def _some_frames(found: Mapping[int, Path]) -> list[Path]:
    numbers = sorted(found)
    return [found[numbers[i]] for i in evenly(len(numbers), FRAMES)]


def _all_pages(folder: Path, found: Mapping[int, Path]) -> list[Path]:
    first = min(found)
    for number in range(first, first + len(found)):
        if number not in found:
            raise InputError(f"folder {folder} has no image of page {number}")
    return [found[number] for number in sorted(found)[:MAX_PAGES]]


def _open(path: Path) -> Any:
    image = _library("PIL.Image", path)
    try:
        with image.open(path) as opened:
            return opened.convert("RGB")
    except (OSError, ValueError) as error:
        raise InputError(f"image {path} cannot be read ({error})") from error


def _pages(file: Path) -> list[Any]:
    pdf = _library("pypdfium2", file)
    try:
        with pdf.PdfDocument(file) as document:
            pages = range(min(len(document), MAX_PAGES))
            return [document[i].render(scale=DPI / 72).to_pil().convert("RGB") for i in pages]
    except pdf.PdfiumError as error:
        raise InputError(f"PDF {file} cannot be read ({error})") from error


def _frames(file: Path) -> list[Any]:
    """FRAMES frames, evenly spread over the video's time."""
    av = _library("av", file)
    try:
        with av.open(str(file)) as video:
            stream = video.streams.video[0]
            seconds = video.duration / av.time_base
            times = [seconds * (2 * i + 1) / (2 * FRAMES) for i in range(FRAMES)]
            return [frame for at in times if (frame := _frame_at(video, stream, at))]
    except (av.FFmpegError, IndexError, TypeError) as error:
        raise InputError(f"video {file} cannot be read ({error})") from error


def _frame_at(video: Any, stream: Any, seconds: float) -> Any:
    """The first frame from `seconds` on, else the last one; None where there is none."""
    # to the key frame before it
    video.seek(int(seconds / stream.time_base), stream=stream)
    last = None
    for last in video.decode(stream):
        if last.time is not None and last.time >= seconds:
            break
    return None if last is None else last.to_image()


def _library(name: str, file: Path) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = {"PIL.Image": "pillow", "pyarrow.parquet": "pyarrow"}.get(name, name)
        other = "" if name in ("PIL.Image",) else ", or give what it would read as images or JSON"
        raise InputError(f"{file} needs {package}: pip install {package}{other}") from error
