"""The supervisor with small programs in place of training: restarts, exit codes, output, orphans."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from jaxpar.runtime import supervisor
from jaxpar.runtime.supervisor import Gang

ROOT = Path(__file__).parents[1]
HEAD = """
    import json, os, signal, sys, time
    from pathlib import Path
    rank, folder = int(os.environ["JAXPAR_PROCESS_ID"]), Path(sys.argv[1].partition("=")[2])
    folder.mkdir(parents=True, exist_ok=True)
    starts = folder / f"starts{rank}"
    attempt = len(starts.read_text().split()) if starts.exists() else 0
    with starts.open("a") as file:
        file.write(os.environ["JAXPAR_COORDINATOR"] + "\\n")
"""


@pytest.fixture
def launch(tmp_path):
    """launch(body, ...) -> finished process; the body runs in every rank, after HEAD."""

    def run(body, *flags, processes=2, wait=True):
        program = tmp_path / "program.py"
        program.write_text(textwrap.dedent(HEAD) + textwrap.dedent(body))
        command = [
            *(sys.executable, str(ROOT / "scripts" / "launch.py"), f"--processes={processes}", *flags),
            *("--", str(program), f"--workdir={tmp_path / 'run'}"),
        ]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if wait:
            process.out, process.err = process.communicate(timeout=60)
        return process

    return run


def starts(tmp_path, rank=0):
    return (tmp_path / "run" / f"starts{rank}").read_text().split()


def test_success(launch, tmp_path):
    done = launch("print('hello from', rank)")
    assert done.returncode == 0
    assert done.out == "hello from 0\n"
    assert done.err == "[1] hello from 1\n"
    assert len(starts(tmp_path)) == 1


@pytest.mark.parametrize(
    ("death", "peer_lives_s"),
    [("sys.exit(75)", 0.5), ("os.kill(os.getpid(), signal.SIGKILL)", 60), ("os.abort()", 0.5)],
)
def test_a_lost_process_restarts_all_on_a_fresh_port(launch, tmp_path, death, peer_lives_s):
    done = launch(f"""
        if attempt == 0:
            if rank == 1:
                {death}
            time.sleep({peer_lives_s})
    """)
    assert done.returncode == 0, done.err
    assert len(starts(tmp_path, 0)) == len(starts(tmp_path, 1)) == 2
    assert len(set(starts(tmp_path))) == 2
    assert "launch: process 1 ended with" in done.err


@pytest.mark.parametrize("code", [1, 2])
def test_a_bug_or_a_mistake_ends_the_run_at_once(launch, tmp_path, code):
    began = time.monotonic()
    done = launch(f"""
        if rank == 1:
            print("ValueError: it is this", file=sys.stderr)
            sys.exit({code})
        time.sleep(0.3)
        print("lost my peer", file=sys.stderr)
        sys.exit(75)
    """)
    assert done.returncode == code
    assert len(starts(tmp_path)) == 1
    assert time.monotonic() - began < 20
    assert done.err.splitlines()[-2:] == ["launch: the last lines of process 1:", "ValueError: it is this"]


def test_the_number_of_restarts_is_limited(launch, tmp_path):
    done = launch("sys.exit(75)", "--max-restarts=2")
    assert done.returncode == 75
    assert len(starts(tmp_path)) == 3
    assert "giving up: 2 restarts without a newer checkpoint" in done.err


def test_progress_renews_the_restarts(launch, tmp_path):
    done = launch(
        """
        if rank == 0 and attempt < 5:
            (folder / "checkpoints" / str(attempt)).mkdir(parents=True)
        time.sleep(0.2)
        sys.exit(75 if attempt < 6 else 0)
        """,
        "--max-restarts=1",
    )
    assert done.returncode == 75
    # Attempts 0 to 4 each leave a newer checkpoint; 5 does not, and was the one restart allowed.
    assert len(starts(tmp_path)) == 6


def test_gloo_is_not_heard(launch):
    done = launch(
        "print('[Gloo] Rank 0 is connected to 3 peer ranks.', file=sys.stderr); print('heard', file=sys.stderr)"
    )
    assert sorted(done.err.split("\n")) == ["", "[0] heard", "[1] heard"]


SLEEPERS = """
    import subprocess
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    (folder / f"pids{rank}").write_text(json.dumps([os.getpid(), child.pid]))
    (folder / f"ready{rank}").touch()
"""


def pids(tmp_path):
    for rank in range(2):
        wait_for(lambda rank=rank: (tmp_path / "run" / f"ready{rank}").exists())
    return [pid for rank in range(2) for pid in json.loads((tmp_path / "run" / f"pids{rank}").read_text())]


def wait_for(condition, timeout_s=20.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_sigterm_is_passed_on_and_nothing_is_left(launch, tmp_path):
    process = launch(
        SLEEPERS
        + """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    time.sleep(100)
    """,
        wait=False,
    )
    everyone = pids(tmp_path)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 75
    assert "SIGTERM: passing SIGTERM on" in err
    assert len(starts(tmp_path)) == 1
    wait_for(lambda: not any(map(alive, everyone)))


def test_a_gang_that_ignores_sigterm_is_killed_after_the_grace_time(launch, tmp_path):
    process = launch(
        SLEEPERS
        + """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(100)
    """,
        "--grace-s=0.5",
        wait=False,
    )
    everyone = pids(tmp_path)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 75
    wait_for(lambda: not any(map(alive, everyone)))


def test_a_killed_supervisor_leaves_no_process_of_the_gang(launch, tmp_path):
    process = launch(SLEEPERS + "\n    time.sleep(100)\n", wait=False)
    ranks = pids(tmp_path)[::2]
    process.kill()
    process.communicate(timeout=30)
    wait_for(lambda: not any(map(alive, ranks)))


def test_variables_of_a_process(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8 --xla_dump_to=/x")
    env = supervisor.environment(Gang(["x"], 4, devices_per_process=2), 3, 1234)
    assert env["JAXPAR_COORDINATOR"] == "127.0.0.1:1234"
    assert (env["JAXPAR_NUM_PROCESSES"], env["JAXPAR_PROCESS_ID"]) == ("4", "3")
    assert (env["JAX_NUM_CPU_DEVICES"], env["JAX_PLATFORMS"]) == ("2", "cpu")
    assert int(env["NPROC"]) >= max(4, os.cpu_count())
    assert env["XLA_FLAGS"] == "--xla_dump_to=/x"
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES", raising=False)
    assert "JAX_NUM_CPU_DEVICES" not in supervisor.environment(Gang(["x"], 4), 3, 1234)


def test_signals_without_a_name_have_a_number():
    assert [supervisor.describe(code) for code in (-9, -40, -200, 3)] == [
        "SIGKILL",
        "signal 40",
        "signal 200",
        "exit code 3",
    ]


def test_only_folders_with_plain_numbers_are_steps(tmp_path):
    for name in ("20", "²", "٣", "30.partial", "-1"):
        (tmp_path / name).mkdir()
    (tmp_path / "100").touch()
    assert supervisor.newest_step(tmp_path) == 20


def test_a_mistake_outweighs_its_victims():
    assert supervisor.decisive(0, [75, -9, 1]) == (2, 1)
    assert supervisor.decisive(1, [75, -9, None]) == (1, -9)


def test_the_checkpoint_folder_comes_from_the_command(tmp_path):
    assert supervisor.checkpoints_of(["train.py", f"--workdir={tmp_path}"]) == tmp_path / "checkpoints"
    assert supervisor.checkpoints_of(["train.py", "--workdir", str(tmp_path)]) == tmp_path / "checkpoints"
    assert supervisor.newest_step(supervisor.checkpoints_of(["train.py"])) == -1
