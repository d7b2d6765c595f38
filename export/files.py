"""Reading source files: JSON, and stretches of numbers."""

import json
from pathlib import Path

import numpy as np

from export.errors import ExportError


def read_json(path: Path) -> dict:
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ExportError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(content, dict):
        raise ExportError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


def read_json_if_there(path: Path) -> dict:
    return read_json(path) if path.is_file() else {}


def read_array(path: Path, offset: int, count: int, dtype: str) -> np.ndarray:
    """Reads count numbers with plain reads: mapped pages would count as this process's memory, and
    a file that shrinks under a mapping ends the process instead of giving an error."""
    array = np.fromfile(path, dtype=dtype, count=count, offset=offset)
    if len(array) != count:
        raise ExportError(
            f"{path}: expected {count * array.itemsize} bytes at offset {offset}, "
            f"found {array.nbytes}: is the file cut short?"
        )
    return array
