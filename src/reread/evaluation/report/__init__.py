"""`reread report`: one HTML file from a folder of results."""

from __future__ import annotations

from .page import write_report
from .sums import Floor, Line, Missing, Summary, summarise

__all__ = ["Floor", "Line", "Missing", "Summary", "summarise", "write_report"]
