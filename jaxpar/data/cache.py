"""Folders that are built once and reused: by content key, published whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from jaxpar.errors import UserError

log = logging.getLogger(__name__)

T = TypeVar("T")


def cached(cache_dir: Path, name: str, build: Callable[[Path], None], open_folder: Callable[[Path], T]) -> T:
    """What `open_folder` makes of cache_dir/name, built first where it is not there.

    `name` must change with everything that changes the content. A build goes into a folder of its own and is renamed
    when complete, so a killed build is never taken for a result and two builders at once give one valid folder.
    """
    final = cache_dir / name
    created = missing_folders(cache_dir)
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _lock(cache_dir / f".{name}.lock"):
            opened = _reuse(final, open_folder)
            if opened is not None:
                return opened
            _build(cache_dir, final, build)
    except OSError as error:
        raise UserError(
            f"{error.filename or cache_dir}: {error.strerror}; data.cache_dir must be writable; "
            "unless set, it lies in --workdir"
        ) from error
    except UserError:
        # A mistake in the input leaves no trace in a folder that was not there before.
        if created:
            (cache_dir / f".{name}.lock").unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                for folder in created:
                    folder.rmdir()
        raise
    return open_folder(final)


def missing_folders(folder: Path) -> list[Path]:
    """The folder and its parents as far as they do not exist yet, innermost first."""
    missing: list[Path] = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    return missing


def _reuse(final: Path, open_folder: Callable[[Path], T]) -> T | None:
    """The opened folder, or None where it is missing or damaged (which is said)."""
    if not final.is_dir():
        return None
    try:
        opened = open_folder(final)
    except UserError as error:
        log.warning("cache %s is damaged and is built again: %s", final, error)
        shutil.rmtree(final)
        return None
    log.info("reusing cache %s", final)
    return opened


def _build(cache_dir: Path, final: Path, build: Callable[[Path], None]) -> None:
    for left_over in cache_dir.glob(f".building-{final.name}-*"):
        shutil.rmtree(left_over, ignore_errors=True)  # of a killed builder: the lock is ours
    log.info("building cache %s", final)
    folder = Path(tempfile.mkdtemp(prefix=f".building-{final.name}-", dir=cache_dir))
    try:
        build(folder)
        folder.chmod(0o755)
        os.rename(folder, final)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """One builder at a time; the kernel frees the lock of a killed one."""
    with path.open("a") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield
