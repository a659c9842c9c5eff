"""Blocks encoded by several processes, handed out and taken back in order, with a bounded number under way."""

from __future__ import annotations

import collections
import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from jaxpar.data.encode import Encoded, Encoder, Recipe
from jaxpar.data.sources import Block
from jaxpar.errors import UserError

Numbered = tuple[int, Block]
Result = tuple[int, Block, Encoded]

_state: dict[str, Encoder] = {}  # of a worker process: its encoder


def encode_in_order(
    blocks: Iterator[Numbered], encoder: Encoder, recipe: Recipe, processes: int
) -> Generator[Result, None, None]:
    """Every (number, block) with its ids, in order; one process works in this one."""
    if processes == 1:
        for number, block in blocks:
            yield number, block, encoder.encode(block)
        return
    # A fork shares the tokenizer that is loaded already, but is only safe while this process has one thread.
    forkable = threading.active_count() == 1 and "jax" not in sys.modules
    context = multiprocessing.get_context("fork" if forkable else "spawn")
    if forkable:
        _state["encoder"] = encoder
    try:
        pool = ProcessPoolExecutor(processes, context, _start_worker, (recipe, os.getpid()))
    except OSError as error:
        raise _no_start(error) from error
    waiting: collections.deque[tuple[int, Block, Future[Encoded]]] = collections.deque()
    try:
        for number, block in blocks:
            waiting.append((number, block, _submit(pool, block)))
            if len(waiting) > processes + 1:
                yield _take(waiting)
        while waiting:
            yield _take(waiting)
    finally:
        with contextlib.suppress(OSError):  # of a broken pool: its pipe is closed, and nothing is left to end
            pool.shutdown(wait=True, cancel_futures=True)
        _state.clear()


def _submit(pool: ProcessPoolExecutor, block: Block) -> Future[Encoded]:
    """Hand out a block, which starts a worker where one is wanting."""
    try:
        return pool.submit(_encode, block)
    except BrokenProcessPool as error:
        raise _killed(block) from error
    except (OSError, RuntimeError) as error:  # RuntimeError: of the thread that watches the workers
        # Without a number it is the pipe of a pool that has just broken.
        raise (_killed(block) if isinstance(error, OSError) and error.errno is None else _no_start(error)) from error


def _killed(block: Block) -> UserError:
    return UserError(
        f"{block.path}: a worker process was killed or could not start (out of memory?); "
        "what is on disk stays, start again to go on"
    )


def _no_start(error: Exception) -> UserError:
    reason = (error.strerror if isinstance(error, OSError) else None) or error
    return UserError(
        f"a worker process cannot start ({reason}): use fewer --processes, or raise the limit; "
        "what is on disk stays, start again to go on"
    )


def _take(waiting: collections.deque[tuple[int, Block, Future[Encoded]]]) -> Result:
    number, block, future = waiting.popleft()
    try:
        return number, block, future.result()
    except BrokenProcessPool as error:
        raise _killed(block) from error


def _start_worker(recipe: Recipe, parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    threading.Thread(target=_die_with, args=(parent,), daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread per worker: the workers are the parallelism
    if "encoder" not in _state:
        _state["encoder"] = recipe.encoder(recipe.load(threads=1))


def _die_with(parent: int) -> None:
    """A worker waits on a pipe that stays open when its parent is killed; it must not wait for ever."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _encode(block: Block) -> Encoded:
    return _state["encoder"].encode(block)
