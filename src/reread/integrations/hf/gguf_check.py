"""Is this GGUF file whole? Read from its header alone, before anything long happens.

Layout (GGUF versions 2 and 3, little endian): magic, version u32, tensors u64, pairs u64, the
key-value pairs, one info per tensor (name, dims, type, offset), padding to `general.alignment`,
then the tensors' data.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path

from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType

from ...errors import InputError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
STRING, ARRAY = 8, 9
SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
MAX_DIMS = 8


def check_gguf(path: Path) -> None:
    """Check magic, version, header and that the file is long enough for every tensor it announces.

    Raises:
        InputError: names the file, what is wrong and, where bytes are missing, how many.
    """
    with path.open("rb") as file:
        size = path.stat().st_size
        start = file.read(len(MAGIC))
        if start != MAGIC:
            raise InputError(f"{path} is not a GGUF file: it starts with {start!r}, not {MAGIC!r}")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            needed = _Header(path, data).needed_bytes()
    if needed > size:
        raise InputError(
            f"{path} is truncated: it has {size} bytes, its tensors need {needed};"
            " fetch the file again"
        )


class _Header:
    """A cursor over the header that turns every read past the end into an InputError."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.at = len(MAGIC)

    def needed_bytes(self) -> int:
        """The least size of the file: where the data of its last tensor ends."""
        version = self._number("<I")
        if version not in VERSIONS:
            raise InputError(f"{self.path} is GGUF version {version}: reread reads 2 and 3")
        tensors, pairs = self._number("<Q"), self._number("<Q")
        alignment = self._pairs(pairs)
        ends = [self._tensor() for _ in range(tensors)]
        return math.ceil(self.at / alignment) * alignment + max(ends, default=0)

    def _pairs(self, count: int) -> int:
        alignment = GGUF_DEFAULT_ALIGNMENT
        for _ in range(count):
            key, kind = self._string(), self._number("<I")
            if key == b"general.alignment" and SCALAR_BYTES.get(kind) == 4:
                alignment = self._number("<I")
                if alignment == 0:
                    raise self._damaged("its alignment is 0")
            else:
                self._skip_value(kind)
        return alignment

    def _tensor(self) -> int:
        """Reads one tensor info; returns where its data ends, from the start of all data."""
        self._string()
        dims = self._number("<I")
        if dims > MAX_DIMS:
            raise self._damaged(f"a tensor has {dims} dimensions")
        elements = math.prod(self._number("<Q") for _ in range(dims))
        kind, offset = self._number("<I"), self._number("<Q")
        try:
            block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        except (KeyError, ValueError):
            raise InputError(
                f"{self.path} has a tensor of unknown type {kind}: a newer gguf package may know it"
            ) from None
        return offset + elements // block * block_bytes

    def _skip_value(self, kind: int) -> None:
        if kind == STRING:
            self._string()
        elif kind == ARRAY:
            inner, count = self._number("<I"), self._number("<Q")
            if inner in SCALAR_BYTES:
                self._advance(count * SCALAR_BYTES[inner])
                return
            if inner != STRING:
                raise self._damaged(f"an array of value type {inner}")
            for _ in range(count):
                self._string()
        elif kind in SCALAR_BYTES:
            self._advance(SCALAR_BYTES[kind])
        else:
            raise self._damaged(f"value type {kind} does not exist")

    def _string(self) -> bytes:
        length = self._number("<Q")
        self._advance(length)
        return self.data[self.at - length : self.at]

    def _number(self, form: str) -> int:
        at = self.at
        self._advance(struct.calcsize(form))
        value: int = struct.unpack_from(form, self.data, at)[0]
        return value

    def _advance(self, count: int) -> None:
        self.at += count
        if self.at > len(self.data):
            raise InputError(
                f"{self.path} is truncated: it ends inside its header, at byte {len(self.data)};"
                " fetch the file again"
            )

    def _damaged(self, what: str) -> InputError:
        return InputError(f"{self.path} is damaged at byte {self.at}: {what}; fetch the file again")
