"""A loaded model as a plain checkpoint folder, which an older transformers can read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from ...errors import InputError
from ...integrations.hf.load import Loaded, locate, quiet_loading

MARK = "exported.json"  # in a folder that was written here: of which model


def export_model(loaded: Loaded, folder: Path) -> Path:
    """The folder of the model's weights as safetensors, with its tokenizer.

    A local checkpoint folder is used as it is; anything else is saved to `folder`, once.

    Raises:
        InputError: `folder` holds something else.
        OSError: it cannot be written; nothing half-written stays under its name.
    """
    source = locate(loaded.name)
    if source.gguf is None and Path(source.path).is_dir():
        return Path(source.path)
    identity = {"model": loaded.name, "dtype": str(loaded.model.dtype).removeprefix("torch.")}
    if folder.exists():
        mark = folder / MARK
        if not mark.is_file() or json.loads(mark.read_text()) != identity:
            raise InputError(f"folder {folder} does not hold {identity}: remove it or name another")
        return folder
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    with quiet_loading():
        loaded.model.save_pretrained(unfinished)
        loaded.tokenizer.save_pretrained(unfinished)
    (unfinished / MARK).write_text(json.dumps(identity))
    unfinished.rename(folder)
    return folder
