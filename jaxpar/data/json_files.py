"""JSON files: read with an error that names them, written whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from jaxpar.errors import UserError


def read_json(path: Path) -> Any:
    """A JSON file, or an error that names it."""
    try:
        return json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON ({error})") from error


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that the file is either the old one or the whole new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as stream:
        json.dump(value, stream, indent=1, sort_keys=True)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)
