"""Checkpoints of several real processes: written by a gang, read by any other number of processes and devices."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.checkpoint import Checkpoints, load_arrays
from jaxpar.config import CheckpointConfig

ROOT = Path(__file__).parents[1]
PROGRAM = """
    import os, sys
    from pathlib import Path
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P
    from jaxpar.checkpoint import Checkpoints
    from jaxpar.config import CheckpointConfig
    from jaxpar.mesh import find_processes, join_processes

    join_processes(find_processes())
    mesh = jax.make_mesh((len(jax.devices()),), ("data",), axis_types=(AxisType.Auto,))
    split, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())

    def place(array, sharding):
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    values = np.random.default_rng(0).standard_normal((16, 3)).astype(np.float32)
    state = {"w": place(values, split), "b": place(values[0], whole), "step": place(np.int32(7), whole)}
    is_main = jax.process_index() == 0
    directory = Path(sys.argv[1])
    checkpoints = Checkpoints(directory, CheckpointConfig(keep=5), is_main)
"""


def run_gang(tmp_path, body, processes=2):
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM) + textwrap.dedent(body))
    done = subprocess.run(
        [
            *(
                sys.executable,
                str(ROOT / "scripts" / "launch.py"),
                f"--processes={processes}",
                "--devices-per-process=2",
            ),
            *("--max-restarts=0", "--", str(program), str(tmp_path / "checkpoints")),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    return done


def test_a_gang_saves_skips_a_damaged_step_and_is_read_by_one_process(tmp_path):
    done = run_gang(
        tmp_path,
        """
        from jaxpar.checkpoint import checksum
        grids = {"w": (8, 3), "b": (3,), "step": ()}
        sums = [checksum.start(tree, grids)() for tree in (state, {"w": values, "b": values[0], "step": np.int32(7)})]
        assert sums[0] == sums[1] and len(sums[0]["w"]) == 24, sums
        checkpoints.save(1, state, {"next": 10})
        checkpoints.save(2, jax.jit(lambda s: jax.tree.map(lambda x: x + x, s), donate_argnums=0)(state), {"next": 20})
        checkpoints.wait()
        assert checkpoints.steps() == [1, 2], checkpoints.steps()

        # A bit that flips later, on the disk: all processes go back to the same step.
        if is_main:
            biggest = max((p for p in (directory / "2").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
            os.truncate(biggest, biggest.stat().st_size - 1)
        jax.experimental.multihost_utils.sync_global_devices("damaged")
        abstract = jax.tree.map(
            lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=s.sharding),
            {"w": place(values, split), "b": place(values[0], whole), "step": place(np.int32(0), whole)},
        )
        restored = Checkpoints(directory, CheckpointConfig(keep=5), is_main).restore_latest(abstract)
        assert restored.step == 1 and restored.extra == {"next": 10}, restored
        assert [step for step, _ in restored.skipped] == [2]
        for shard in restored.state["w"].addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), values[shard.index])
        print("gang:", jax.process_count(), "restored", restored.step, flush=True)
        """,
    )
    assert "gang: 2 restored 1" in done.stdout
    assert done.stderr.count("checkpoint 2 is skipped") == 1  # only the main process speaks

    values = np.random.default_rng(0).standard_normal((16, 3)).astype(np.float32)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    abstract = {
        "w": jax.ShapeDtypeStruct((16, 3), jnp.float32, sharding=NamedSharding(mesh, P("data"))),
        "b": jax.ShapeDtypeStruct((3,), jnp.float32, sharding=NamedSharding(mesh, P())),
        "step": jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, P())),
    }
    restored = Checkpoints(tmp_path / "checkpoints", CheckpointConfig()).restore(1, abstract)
    np.testing.assert_array_equal(np.asarray(restored.state["w"]), values)
    np.testing.assert_array_equal(load_arrays(tmp_path / "checkpoints", 1)[1]["b"], values[0])


@pytest.mark.parametrize("bad", [0, 1])
def test_a_write_that_fails_on_one_process_does_not_make_the_others_wait(tmp_path, bad):
    done = run_gang(
        tmp_path,
        f"""
        import resource, signal, time
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        if jax.process_index() == {bad}:  # no file may grow beyond a few bytes, as on a full disk
            resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
        began = time.monotonic()
        checkpoints.save(1, state, {{}})
        checkpoints._join()
        print("first", checkpoints._failed_saves, checkpoints._last_error, flush=True)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        checkpoints.save(2, state, {{}})
        checkpoints.wait()
        assert checkpoints.steps() == [2], checkpoints.steps()
        print("seconds", time.monotonic() - began, flush=True)
        """,
    )
    told = done.stdout + done.stderr
    assert told.count("first 1 step 1:") == 2, told  # both count the failure
    assert told.count(f"step 1: GateError: it failed on process {bad}") == 1, told  # one of them knows its own reason
    reasons = [line for line in told.splitlines() if "checkpoint 1 was NOT saved: " in line]
    own = [line for line in reasons if "it failed on process" not in line]
    assert len(own) == 1, told  # and tells it, whichever it is
    assert re.search("File too large|Error writing", own[0]), told  # a long path leaves no room for the former
    assert ("process 1: " in own[0]) == (bad == 1), told
    assert len(reasons) == 1 + bad, told  # the main process speaks in any case
    seconds = [float(line.split("seconds")[1]) for line in told.splitlines() if "seconds " in line]
    assert len(seconds) == 2, told
    assert max(seconds) < 100, told  # the patience of a barrier is 300


@pytest.mark.sweep
def test_saved_by_one_process_read_by_four(tmp_path):
    values = np.random.default_rng(0).standard_normal((16, 3)).astype(np.float32)
    with Checkpoints(tmp_path / "checkpoints", CheckpointConfig()) as checkpoints:
        checkpoints.save(5, {"w": jnp.asarray(values), "b": jnp.asarray(values[0]), "step": jnp.int32(7)}, {})
    done = run_gang(
        tmp_path,
        """
        abstract = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=s.sharding), state)
        restored = checkpoints.restore_latest(abstract)
        for shard in restored.state["w"].addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), values[shard.index])
        print("gang:", jax.process_count(), "restored", restored.step, flush=True)
        """,
        processes=4,
    )
    assert "gang: 4 restored 5" in done.stdout
