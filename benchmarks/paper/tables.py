"""All published tables by name."""

from __future__ import annotations

from reread.errors import InputError

from . import osp, sfi, speeds
from .expected import Table

_ORDER = (
    "sfi-throughput", "sfi-kernel", "sfi-longbench-v1", "sfi-longbench-v2", "sfi-reasoning",
    "sfi-ablation", "osp-oracle", "osp-budget", "osp-shared", "osp-distilled", "osp-ruler-32k",
    "osp-ttft",
)  # fmt: skip
_ALL = {table.name: table for table in (*sfi.TABLES, *osp.TABLES, *speeds.TABLES)}
TABLES: dict[str, Table] = {name: _ALL[name] for name in _ORDER}


def named(name: str) -> Table:
    """The table of that name.

    Raises:
        InputError: there is none.
    """
    if name not in TABLES:
        raise InputError(f"table {name!r} is unknown: list, or one of {', '.join(TABLES)}")
    return TABLES[name]
