"""A loaded model as a plain checkpoint folder, which an older transformers can read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors import SafetensorError

from ...errors import InputError
from ...indexer.checkpoint import read_json
from ...integrations.hf.load import Loaded, locate, quiet_loading

MARK = "exported.json"  # in a folder that was written here: of which model


def export_model(loaded: Loaded, folder: Path) -> Path:
    """The folder of the model's weights as safetensors, with its tokenizer.

    A local checkpoint folder is used as it is; anything else is saved to `folder`, once.

    Raises:
        InputError: `folder` holds something else, or it cannot be written; nothing half-written
            stays under its name.
    """
    source = locate(loaded.name)
    if source.gguf is None and Path(source.path).is_dir():
        return Path(source.path)
    identity = {"model": loaded.name, "dtype": str(loaded.model.dtype).removeprefix("torch.")}
    if folder.exists():
        if read_json(folder / MARK) != identity:
            raise InputError(f"folder {folder} does not hold {identity}: remove it or name another")
        return folder
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        with quiet_loading():
            loaded.model.save_pretrained(unfinished)
            loaded.tokenizer.save_pretrained(unfinished)
        (unfinished / MARK).write_text(json.dumps(identity))
        unfinished.rename(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise InputError(
            f"the model cannot be written to {folder} for baselines ({error})"
        ) from error
    return folder
