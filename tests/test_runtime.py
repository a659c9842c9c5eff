"""Watchdog, stop signals, exit codes and the ledger, without a gang."""

import errno
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from jaxpar.checkpoint import CheckpointError
from jaxpar.errors import UserError
from jaxpar.runtime import exits, goodput, lock, watchdog
from jaxpar.runtime.peers import Heard
from jaxpar.runtime.watchdog import Watchdog

ROOT = Path(__file__).parents[1]


def start(code: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
    )


# -- watchdog ------------------------------------------------------------


class Board:
    """What process 0 reads of the others. Notes marked as alive change; instead of notes, None: nobody answers."""

    def __init__(self, notes, alive=()):
        self.notes, self.alive, self.reads = notes, alive, 0

    def pin(self, rank, note):
        if self.notes is None:  # a stopped service answers nobody
            threading.Event().wait(30.0)
            raise RuntimeError("the service is gone")
        self.notes[rank] = note

    def read(self, rank=None):
        self.reads += 1
        found = {who: note | ({"number": self.reads} if who in self.alive else {}) for who, note in self.notes.items()}
        return found if rank is None else {rank: found[rank]}


def run_dog(timeout_s, seconds, act, **settings):
    ended = []
    with Watchdog(timeout_s, end=ended.append, **settings) as dog:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not ended:
            act(dog)
            time.sleep(0.02)
    return ended


def test_steps_keep_the_watchdog_quiet():
    assert run_dog(0.3, 0.9, lambda dog: dog.finished(1)) == []


def test_silence_ends_the_process_with_75_and_all_stacks():
    child = start("""
        import time
        from jaxpar.runtime.watchdog import Watchdog
        def stuck_in_the_data_loader():
            time.sleep(60)
        with Watchdog(0.4) as dog:
            dog.finished(41)
            stuck_in_the_data_loader()
    """)
    began = time.monotonic()
    output, _ = child.communicate(timeout=30)
    assert child.returncode == exits.RETRY
    assert time.monotonic() - began < 10
    assert re.search(r"waited 0\.\d s for the step after 41", output)
    assert "in stuck_in_the_data_loader" in output


def test_time_inside_busy_does_not_count():
    def act(dog):
        with dog.busy("compile"):
            time.sleep(0.6)

    assert run_dog(0.3, 0.7, act) == []


def test_a_peer_that_compiles_is_waited_for_and_a_silent_one_is_not():
    def board(**settings):
        return Board({1: {"step": None, "busy": "compile", "waiting": None}}, **settings)

    assert run_dog(0.2, 2.5, lambda dog: None, num_processes=2, board=board(alive=[1])) == []
    assert run_dog(0.2, 5.0, lambda dog: None, num_processes=2, board=board()) == [exits.RETRY]


@pytest.mark.parametrize("busy", [True, False])
def test_process_0_tells_the_others_whom_they_wait_for(busy, capfd):
    note = {
        "step": 3,
        "busy": None,
        "waiting": None,
        "others_busy": busy,
        "suspects": ["process 2 is behind: at step 1"],
    }
    ended = run_dog(0.2, 2.0, lambda dog: None, rank=1, num_processes=3, board=Board({0: note}, alive=[0]))
    assert ended == ([] if busy else [exits.RETRY])
    assert ("process 2 is behind" in capfd.readouterr().err) == (not busy)


def test_a_busy_process_ends_when_a_peer_is_lost_and_waits_for_a_live_one():
    def save(dog):
        with dog.busy("save"):
            time.sleep(4.0)

    def board(**settings):
        return Board({1: {"step": 8, "busy": "save", "waiting": None}}, **settings)

    assert exits.RETRY in run_dog(0.2, 5.0, save, num_processes=2, board=board())
    assert exits.RETRY in run_dog(0.2, 5.0, save, rank=1, num_processes=2, board=Board(None))
    assert run_dog(0.2, 0.5, save, num_processes=2, board=board(alive=[1])) == []


def test_a_peer_that_left_in_good_order_is_not_lost():
    def save(dog):
        with dog.busy("save"):
            time.sleep(3.0)

    board = Board({0: {"step": 8, "busy": None, "waiting": None}})
    with Watchdog(5.0, rank=1, num_processes=2, board=board):
        pass
    time.sleep(0.2)  # a thread pins the last note
    assert board.notes[1]["left"]
    assert run_dog(0.2, 0.5, save, num_processes=2, board=board) == []


def test_a_bark_is_answered_before_the_own_time_is_over(capfd):
    board = Board({1: {"step": 3, "busy": None, "waiting": None, "barks": True}}, alive=[1])
    assert run_dog(8.0, 20.0, lambda dog: None, num_processes=2, board=board) == [exits.RETRY]
    assert re.search(r"process 0 of 2 waited [45]\.\d s", capfd.readouterr().err)


def test_a_stop_of_the_whole_process_does_not_count():
    child = start("""
        import time
        from jaxpar.runtime.watchdog import Watchdog
        with Watchdog(4.0) as dog:
            dog.finished(1)
            print("ready", flush=True)
            time.sleep(2.0 + 6.0)
            print("went on", flush=True)
            time.sleep(60)
    """)
    assert child.stdout.readline() == "ready\n"
    time.sleep(1.0)
    child.send_signal(signal.SIGSTOP)
    time.sleep(6.0)
    child.send_signal(signal.SIGCONT)
    output, _ = child.communicate(timeout=30)
    assert child.returncode == exits.RETRY
    assert output.startswith("went on"), output


def test_a_coordinator_that_does_not_answer_is_named(capfd):
    assert run_dog(0.2, 5.0, lambda dog: None, rank=1, num_processes=2, board=Board(None)) == [exits.RETRY]
    assert "process 0, which coordinates, does not answer" in capfd.readouterr().err


def test_suspects_are_named():
    def note(step, busy=None, waiting=None):
        return {"step": step, "busy": busy, "waiting": waiting}

    heard = {
        1: Heard(note(6), 40.0),
        2: Heard(note(5, busy="save"), 1.0),
        4: Heard(note(7), 0.5),
        5: Heard(note(7, waiting="data"), 1.0),
    }
    lines = watchdog.suspects(heard, range(1, 6), step=7, stale_s=10.0)
    assert lines == [
        "process 1 is missing: silent for 40.0 s, last at step 6",
        "process 2 is behind: at step 5, save",
        "process 3 never reported: it did not reach the training loop",
        "process 5 waits for its data after step 7",
    ]


def test_a_process_that_waits_for_its_data_says_so(capfd):
    def wait(dog):
        with dog.waiting("data"):
            time.sleep(3.0)

    run_dog(0.5, 1.0, wait, num_processes=2, board=Board({1: {"step": 1, "busy": None, "waiting": None}}, alive=[1]))
    assert "process 0 itself waits for its data" in capfd.readouterr().err


def test_a_silent_peer_is_found_before_jax_would_end_the_process():
    """With the defaults: the time without a step is long, jax's own heartbeat is not."""
    lost = Board({1: {"step": 8, "busy": None, "waiting": None}})
    began = time.monotonic()
    ended = run_dog(600.0, 20.0, lambda dog: None, num_processes=2, board=lost, heartbeat_s=9.0)
    assert ended == [exits.RETRY]
    assert time.monotonic() - began < 9.0, "it told, and heard the others, before"


def test_after_an_error_a_process_is_missed():
    board = Board({})
    with pytest.raises(ValueError, match="bug"), Watchdog(5.0, rank=1, num_processes=2, board=board):
        raise ValueError("bug")
    time.sleep(0.2)
    assert not board.notes.get(1, {}).get("left")


def test_a_collective_that_does_not_return_is_named(capfd):
    board = Board({1: {"step": None, "busy": None, "waiting": None}}, alive=[1])
    assert run_dog(0.2, 5.0, lambda dog: None, num_processes=2, board=board) == [exits.RETRY]
    assert "a collective does not return" in capfd.readouterr().err


# -- signals ------------------------------------------------------------

BLOCKED = """
    import ctypes, sys, time
    from jaxpar.runtime.signals import StopSignals
    with StopSignals() as signals:
        print("ready", flush=True)
        for _ in range({naps}):
            ctypes.CDLL(None).usleep(100_000)  # in C, where Python runs no signal handler
        print("asked to stop:", signals.stop_requested(1), flush=True)
"""


def test_sigterm_is_remembered_until_the_step_ends():
    child = start(BLOCKED.format(naps=5))
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGTERM)
    output, _ = child.communicate(timeout=30)
    assert "SIGTERM: saving after the running step" in output
    assert "asked to stop: True" in output
    assert child.returncode == 0


def test_a_second_sigterm_ends_the_process_even_inside_c_code():
    child = start(BLOCKED.format(naps=600))
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGTERM)
    assert "SIGTERM" in child.stdout.readline()
    began = time.monotonic()
    child.send_signal(signal.SIGTERM)
    output, _ = child.communicate(timeout=30)
    assert child.returncode == exits.RETRY
    assert "second SIGTERM" in output
    assert time.monotonic() - began < 5


def test_handlers_are_put_back():
    from jaxpar.runtime.signals import StopSignals

    before = signal.getsignal(signal.SIGTERM)
    with StopSignals() as signals:
        assert not signals.stop_requested(0)
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


def test_outside_the_main_thread_nothing_changes():
    from jaxpar.runtime.signals import StopSignals

    before, inside = signal.getsignal(signal.SIGTERM), []

    def run():
        with StopSignals():
            inside.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert inside == [before]


# -- exit codes ------------------------------------------------------------


class JaxRuntimeError(RuntimeError):
    """Stands for jax's own: the code goes by the name, which is the same in every version."""


@pytest.mark.parametrize(
    ("error", "num_processes", "code"),
    [
        (UserError("bad"), 4, 2),
        (CheckpointError("disk full"), 1, 75),
        (OSError(errno.ENOSPC, "No space left on device"), 1, 75),
        (PermissionError(errno.EACCES, "Permission denied"), 1, 1),
        (KeyboardInterrupt(), 1, 130),
        (ValueError("bug"), 4, 1),
        (JaxRuntimeError("Gloo all-reduce failed: Connection reset by peer"), 2, 75),
        (JaxRuntimeError("Gloo all-reduce failed: Connection reset by peer"), 1, 1),
        (JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory"), 2, 1),
    ],
)
def test_exit_codes(error, num_processes, code):
    assert exits.code_of(error, num_processes) == code


def test_alone_a_bug_keeps_its_traceback_and_a_failed_save_asks_for_a_retry(capsys):
    def fail(error):
        def train():
            raise error

        return train

    assert exits.run_guarded(lambda: 0) == 0
    with pytest.raises(ValueError, match="bug"):
        exits.run_guarded(fail(ValueError("bug")))
    assert exits.run_guarded(fail(CheckpointError("the disk is full"))) == 75
    assert "the disk is full" in capsys.readouterr().err


# -- goodput ------------------------------------------------------------


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def attempt(path, clock, steps, *, save_s=0.0, killed=False):
    ledger = goodput.Ledger(path, clock=clock)
    with ledger.phase("compile"):
        clock.now += 10.0
    for step in steps:
        with ledger.phase("data"):
            clock.now += 1.0
        clock.now += 4.0
        ledger.finished(step)
    with ledger.phase("save"):
        clock.now += save_s
    if not killed:
        ledger.end()
    return ledger


def test_seconds_add_up_to_the_wall_time(tmp_path):
    clock = Clock()
    ledger = attempt(tmp_path / "goodput.jsonl", clock, range(1, 11), save_s=3.0)
    assert ledger.seconds == {"compile": 10.0, "data": 10.0, "other": 4.0, "step": 36.0, "save": 3.0}
    assert sum(ledger.seconds.values()) == clock.now - 1000.0
    summary = goodput.summarize(goodput.read(tmp_path / "goodput.jsonl"))
    assert summary.goodput == pytest.approx(36 / 63)
    assert "goodput 57.1% of 63.0 s in 1 attempt" in summary.line()


def test_work_done_twice_is_lost(tmp_path):
    clock, path = Clock(), tmp_path / "goodput.jsonl"
    attempt(path, clock, range(1, 11), killed=True)
    clock.now += 20.0
    attempt(path, clock, range(6, 11))
    summary = goodput.summarize(goodput.read(path))
    assert summary.attempts == 2
    assert summary.down_s == 20.0
    assert summary.lost_s == pytest.approx(36.0 * 5 / 10)
    assert summary.goodput == pytest.approx((36 + 16 - 18) / summary.wall_s)


def test_a_line_cut_by_a_kill_is_left_out(tmp_path):
    path = tmp_path / "goodput.jsonl"
    attempt(path, Clock(), range(1, 4))
    rows = goodput.read(path)
    path.write_text(path.read_text() + '{"event": "prog')
    assert goodput.read(path) == rows


@pytest.mark.parametrize("torn", ['{"event": "prog', "[1]\n", "7\n", "{}\n", '{"attempt": 0}\n', "\udcff\udcfe\n"])
def test_an_attempt_after_a_damaged_line_is_counted_whole(tmp_path, torn):
    clock, path = Clock(), tmp_path / "goodput.jsonl"
    attempt(path, clock, range(1, 4), killed=True)
    path.write_text(path.read_text() + torn, encoding="utf-8", errors="surrogateescape")
    attempt(path, clock, range(2, 4))
    rows = goodput.read(path)
    assert [(row["attempt"], row["event"], row["step"]) for row in rows if row["event"] == "start"] == [
        (0, "start", 1),
        (1, "start", 2),
    ]
    assert goodput.summarize(rows).attempts == 2


def test_nothing_is_written_before_the_first_step(tmp_path):
    ledger = goodput.Ledger(tmp_path / "run" / "goodput.jsonl")
    with ledger.phase("compile"):
        pass
    ledger.end()
    assert not (tmp_path / "run").exists()


def test_the_slowest_process_is_the_one_that_others_wait_for():
    seconds = {
        0: {"step": 90.0, "data": 2.0},
        1: {"step": 60.0, "data": 30.0, "save": 2.0},
        2: {"step": 91.0, "data": 1.0},
    }
    assert goodput.slowest(seconds) == "slowest process: 1, 32.0 s outside of steps (data 30.0), median 2.0"
    assert goodput.slowest({0: {"step": 90.0, "data": 2.0}, 1: {"step": 90.0, "data": 2.1}}) is None
    assert goodput.slowest({0: {"step": 1.0}}) is None


def test_no_module_of_the_launcher_imports_jax():
    code = "import sys, jaxpar.runtime.supervisor; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, env={**os.environ}).returncode == 0


def test_a_directory_is_held_by_one_process_and_freed_by_its_death(tmp_path):
    hold = (
        "import pathlib, sys, time; from jaxpar.runtime import lock\n"
        f"with lock.held(pathlib.Path({str(tmp_path)!r}), print): print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=rf"--workdir=.* process {child.pid} on .*another --workdir"):
            lock.held(tmp_path, print).__enter__()
        child.kill()
    with lock.held(tmp_path, print):
        assert (tmp_path / lock.NAME).read_text().startswith(f"process {os.getpid()} on ")


def test_a_directory_that_cannot_be_made_is_the_users_mistake(tmp_path):
    (tmp_path / "file").touch()
    for directory in (Path("/proc/nope"), tmp_path / "file" / "run"):
        with pytest.raises(UserError, match=rf"--workdir={directory} cannot be used: .*; give a folder"):
            lock.held(directory, print).__enter__()
