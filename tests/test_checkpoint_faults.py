"""Damaged files, full and read-only disks, kills: a clear message, older steps intact, the next save works."""

import contextlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.checkpoint import CheckpointError, Checkpoints, load_arrays
from jaxpar.config import CheckpointConfig
from jaxpar.errors import UserError


def state(value=0.0, size=1000):
    return {"params": {"up": jnp.full((4, size), value), "down": jnp.full((size,), value, jnp.bfloat16)}}


@pytest.fixture
def lines():
    return []


@pytest.fixture
def open_at(tmp_path, lines):
    def opener(directory=None, **settings):
        return Checkpoints(directory or tmp_path / "checkpoints", CheckpointConfig(**settings), report=lines.append)

    return opener


@pytest.fixture
def two_steps(open_at, tmp_path):
    with open_at() as checkpoints:
        checkpoints.save(10, state(10.0), {})
        checkpoints.save(20, state(20.0), {})
    return tmp_path / "checkpoints"


def largest_file(folder: Path) -> Path:
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def flip_a_bit(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(bytes(data))


def flip_in_an_array(folder: Path) -> None:
    """One bit of a stored value, with the CRC of the file index made to fit, as on a disk that rots later."""
    path = largest_file(folder)
    data = path.read_bytes()
    value = np.float32(20.0).tobytes() * 8
    flip_a_bit(path, data.index(value) + 17)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][str(path.relative_to(folder))][1] = None
    rewrite_manifest(folder, manifest)


def rewrite_manifest(folder: Path, manifest: dict) -> None:
    from jaxpar.checkpoint.manifest import _crc

    body = {key: value for key, value in manifest.items() if key != "crc32"}
    (folder / "manifest.json").write_text(json.dumps({"crc32": _crc(body), **body}))


def truncate(folder: Path) -> None:
    path = largest_file(folder)
    os.truncate(path, path.stat().st_size // 2)


DAMAGES = {
    "array bit flipped": (flip_in_an_array, r"params/up changed after the save"),
    "array file cut": (truncate, r"file state/.* has \d+ bytes, the save wrote \d+"),
    "array file removed": (lambda folder: largest_file(folder).unlink(), r"file state/.* is missing"),
    "index changed": (
        lambda f: flip_a_bit(f / "state" / "manifest.ocdbt", 40),
        r"file state/manifest.ocdbt was changed",
    ),
    "Orbax metadata removed": (
        lambda folder: (folder / "state" / "_METADATA").unlink(),
        r"file state/_METADATA is missing",
    ),
    "extra changed": (lambda folder: (folder / "extra.json").write_text("[]"), r"file extra.json"),
    "manifest removed": (lambda folder: (folder / "manifest.json").unlink(), r"manifest.json is missing"),
    "manifest cut": (lambda folder: os.truncate(folder / "manifest.json", 100), r"manifest.json cannot be read"),
    "manifest changed": (lambda folder: flip_a_bit(folder / "manifest.json", 13), r"manifest.json (was|cannot)"),
    "state removed": (lambda folder: shutil.rmtree(folder / "state"), r"is missing; .* and \d+ more"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_step_is_skipped_by_name(two_steps, open_at, lines, damage):
    harm, message = DAMAGES[damage]
    harm(two_steps / "20")
    restored = open_at().restore_latest(state())
    assert restored.step == 10
    assert float(restored.state["params"]["up"][0, 0]) == 10.0
    ((step, reason),) = restored.skipped
    assert step == 20
    assert re.search(message, reason), reason
    assert len(lines) == 1
    assert lines[0] == f"checkpoint 20 is skipped: {reason}"


def on_mesh(*sizes, dims=("data",)):
    devices = np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
    mesh = jax.sharding.Mesh(devices, ("data", "tensor")[: len(sizes)], axis_types=(AxisType.Auto,) * len(sizes))
    return NamedSharding(mesh, P(*dims))


VALUES = np.random.default_rng(0).standard_normal((48, 64)).astype(np.float32)
LAYOUTS = {
    "the same": on_mesh(8),
    "data 4 x tensor 2": on_mesh(4, 2, dims=("data", "tensor")),
    "replicated": on_mesh(8, dims=()),
    "one device": jax.sharding.SingleDeviceSharding(jax.devices()[0]),
    "three devices": on_mesh(3),
    "two devices, other dim": on_mesh(2, dims=(None, "data")),
    "host": None,
}


def change_stored_values(folder: Path, change) -> None:
    """Let `change` edit the bytes of the files of a step."""
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    changed = {path: new for path, data in files.items() if (new := change(data)) != data}
    assert changed
    for path, data in changed.items():
        path.write_bytes(data)


def forget_crcs(folder: Path) -> None:
    """As if the files were too large for a CRC-32 each, so that only the checksums of the arrays are left."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for file in manifest["files"].values():
        file[1] = None
    rewrite_manifest(folder, manifest)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_damaged_block_is_named_in_any_layout(tmp_path, open_at, layout):
    with open_at() as checkpoints:
        checkpoints.save(1, {"w": jax.device_put(VALUES, on_mesh(8)), "step": 3}, {})
    target = np.zeros_like(VALUES)
    if LAYOUTS[layout] is not None:
        target = jax.ShapeDtypeStruct(VALUES.shape, VALUES.dtype, sharding=LAYOUTS[layout])
    restored = open_at().restore_latest({"w": target, "step": 0})
    np.testing.assert_array_equal(restored.state["w"], VALUES)

    def flip(data):
        row = bytearray(VALUES[37].tobytes())
        row[40] ^= 4
        return data.replace(VALUES[37].tobytes(), bytes(row))

    folder = tmp_path / "checkpoints" / "1"
    forget_crcs(folder)
    change_stored_values(folder, flip)
    with pytest.raises(UserError, match=re.escape("the bytes of w [36:42, 0:64] changed after the save")):
        open_at().restore(1, {"w": target, "step": 0})


def test_two_blocks_that_are_swapped_are_named(tmp_path, open_at):
    with open_at() as checkpoints:
        checkpoints.save(1, {"w": jax.device_put(VALUES, on_mesh(8)), "b": jnp.ones(3)}, {})

    def swap(data):
        one, other = VALUES[6:12].tobytes(), VALUES[36:42].tobytes()
        return data.replace(one, b"*" * len(one)).replace(other, one).replace(b"*" * len(one), other)

    folder = tmp_path / "checkpoints" / "1"
    forget_crcs(folder)
    change_stored_values(folder, swap)
    with pytest.raises(UserError, match=re.escape("of w [6:12, 0:64] and 1 more of its 8 blocks changed")):
        load_arrays(tmp_path / "checkpoints")
    assert list(load_arrays(tmp_path / "checkpoints", prefix="b")[1]) == [""]


def test_the_format_with_one_checksum_per_array_is_read(two_steps, open_at):
    for step in (10, 20):
        manifest = json.loads((two_steps / str(step) / "manifest.json").read_text())
        manifest["format"] = 1
        for entry in manifest["arrays"].values():  # of an unsharded array the only block is the whole
            assert set(entry.pop("grid")) == {1}
            entry["checksum"] = int(entry.pop("checksums"), 16)
        rewrite_manifest(two_steps / str(step), manifest)
    flip_in_an_array(two_steps / "20")
    target = {
        "up": jax.ShapeDtypeStruct((4, 1000), jnp.float32, sharding=on_mesh(4)),
        "down": state()["params"]["down"],
    }
    restored = open_at().restore_latest({"params": target})
    assert restored.step == 10
    assert restored.skipped == [(20, "the bytes of params/up changed after the save (checksum differs)")]
    manifest = json.loads((two_steps / "10" / "manifest.json").read_text())
    rewrite_manifest(two_steps / "10", manifest | {"format": 3})
    with pytest.raises(UserError, match="has format 3, this version reads 1 and 2"):
        open_at().restore(10, {"params": target})


ODD = {
    "a file": (lambda d: (d / "30").write_text("notes"), r"checkpoint 30 is skipped: .*/30 is no folder"),
    "a dangling link": (
        lambda d: (d / "30").symlink_to(d / "nowhere"),
        r"checkpoint 30 is skipped: .*/30 is no folder",
    ),
    "a copied step": (
        lambda d: shutil.copytree(d / "20", d / "30"),
        r"checkpoint 30 is skipped: it is a copy of step 20, by its manifest.json",
    ),
    "an empty folder": (lambda d: (d / "30").mkdir(), r"checkpoint 30 is skipped: manifest.json is missing"),
    "a manifest that is a folder": (
        lambda d: (d / "30" / "manifest.json").mkdir(parents=True),
        r"checkpoint 30 is skipped: manifest.json cannot be read .*Is a directory",
    ),
    "a file for a partial step": (lambda d: (d / "30.partial").touch(), r"checkpoint 30 is skipped: its save was cut"),
    "a file for a replaced step": (lambda d: (d / "20.replaced").touch(), None),
    "other names": (lambda d: [(d / name).mkdir() for name in ("²", "030", "30 (copy)", "٣")], None),
}


@pytest.mark.parametrize("kind", ODD)
def test_what_is_no_step_is_skipped_by_name_and_breaks_no_save(two_steps, open_at, lines, kind):
    put, message = ODD[kind]
    put(two_steps)
    with open_at(keep=2) as checkpoints:
        restored = checkpoints.restore_latest(state())
        assert restored.step == 20
        assert float(restored.state["params"]["up"][0, 0]) == 20.0
        assert [bool(re.match(message, line)) for line in lines] == [True] if message else lines == []
        for step in (20, 25, 30, 40):
            checkpoints.save(step, state(float(step)), {})
    assert not any("NOT saved" in line for line in lines)
    assert open_at().steps() == [30, 40]
    assert open_at().restore_latest(state()).step == 40
    assert load_arrays(two_steps, 30)[1]["params/up"][0, 0] == 30.0


def test_strict_refuses_a_damaged_newest_step(two_steps, open_at):
    truncate(two_steps / "20")
    with pytest.raises(UserError, match=r"20 is damaged: .*; set checkpoint.strict=false"):
        open_at(strict=True).restore_latest(state())


def test_it_never_starts_over_silently(two_steps, open_at):
    truncate(two_steps / "10")
    (two_steps / "20" / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"(?s)no checkpoint in .* can be restored.*20: manifest.*10: file"):
        open_at().restore_latest(state())
    with pytest.raises(UserError, match="is damaged"):
        load_arrays(two_steps, 10)


def test_after_going_back_the_damaged_step_is_saved_again(two_steps, open_at):
    flip_in_an_array(two_steps / "20")
    with open_at() as checkpoints:
        assert checkpoints.restore_latest(state()).step == 10
        checkpoints.save(20, state(21.0), {})
    restored = open_at().restore_latest(state())
    assert (restored.step, restored.skipped) == (20, [])
    assert float(restored.state["params"]["up"][0, 0]) == 21.0


def test_a_damaged_step_does_not_count_as_kept(two_steps, open_at):
    truncate(two_steps / "20")
    with open_at(keep=2) as checkpoints:
        checkpoints.save(15, state(15.0), {})
    assert 10 in checkpoints.steps()


def test_a_checkpoint_that_does_not_fit_gives_one_table(two_steps, open_at):
    wrong = state(size=900)["params"] | {"gate": jnp.zeros(3), "down": jnp.zeros((1000,), jnp.int32)}
    with pytest.raises(UserError) as caught:
        open_at().restore_latest({"params": wrong, "step": jnp.int32(0)})
    table = [line.split() for line in str(caught.value).splitlines()]
    assert ["array", "checkpoint", "this", "run"] in table
    assert ["params/up", "float32[4,1000]", "float32[4,900]"] in table
    assert ["params/down", "bfloat16[1000]", "int32[1000]"] in table
    assert ["params/gate", "-", "float32[3]"] in table
    assert ["step", "-", "int32[]"] in table


def test_a_float_type_is_cast_only_on_demand(two_steps, open_at):
    target = {"params": {"up": jnp.zeros((4, 1000), jnp.bfloat16), "down": jnp.zeros((1000,), jnp.float32)}}
    with pytest.raises(UserError, match=r"checkpoint\.cast=true converts"):
        open_at().restore_latest(target)
    restored = open_at(cast=True).restore_latest(target).state["params"]
    assert (restored["up"].dtype, restored["down"].dtype) == (jnp.bfloat16, jnp.float32)
    assert float(restored["down"][5]) == 20.0
    with pytest.raises(UserError, match="does not fit"):
        open_at(cast=True).restore_latest({"params": state()["params"] | {"down": jnp.zeros((1000,), jnp.int32)}})


def test_an_unfinished_save_is_never_the_latest(two_steps, open_at, lines):
    shutil.copytree(two_steps / "20", two_steps / "30.partial")
    restored = open_at().restore_latest(state())
    assert restored.step == 20
    assert restored.skipped == [(30, "its save was cut short")]
    assert lines == ["checkpoint 30 is skipped: its save was cut short"]
    with open_at() as checkpoints:
        checkpoints.save(30, state(30.0), {})
    assert open_at().restore_latest(state()).step == 30
    assert not list(two_steps.glob("*.partial"))


def test_a_kill_between_the_two_renames_loses_nothing(two_steps, open_at):
    (two_steps / "20").rename(two_steps / "20.replaced")
    with open_at() as checkpoints:
        assert checkpoints.restore_latest(state()).step == 20


def test_a_disk_that_fails_is_reported_and_the_run_goes_on(open_at, tmp_path, lines):
    directory = tmp_path / "checkpoints"
    checkpoints = open_at(directory)
    directory.write_text("a file where the directory should be")
    checkpoints.save(1, state(), {})
    assert "checkpoint 1 was NOT saved" in lines[0]
    directory.unlink()
    checkpoints.save(2, state(), {})
    checkpoints.close()
    assert checkpoints.steps() == [2]


def test_a_run_stops_when_saves_keep_failing(open_at, tmp_path):
    directory = tmp_path / "checkpoints"
    directory.write_text("a file where the directory should be")
    checkpoints = open_at(directory, max_failed_saves=2)
    checkpoints.save(1, state(), {})
    with pytest.raises(CheckpointError, match="2 saves in a row failed"):
        checkpoints.save(2, state(), {})
    with pytest.raises(CheckpointError, match="the last checkpoint was not saved"):
        checkpoints.close()


def test_an_exception_in_the_run_waits_for_the_save(open_at):
    def run():
        with open_at() as checkpoints:
            checkpoints.save(7, state(7.0), {})
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    assert open_at().restore_latest(state()).step == 7


@contextlib.contextmanager
def mounted(where: Path, options: str):
    where.mkdir(exist_ok=True)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(where)], capture_output=True).returncode:
        pytest.skip("no permission to mount a small disk")
    try:
        yield where
    finally:
        subprocess.run(["umount", "-l", str(where)], check=True)


MEGA = {"w": jnp.zeros(2**21)}  # 8 MiB


def test_a_full_disk(tmp_path, open_at, lines):
    with mounted(tmp_path / "disk", "size=20m") as disk:
        checkpoints = open_at(disk / "checkpoints", keep=1, max_failed_saves=5)
        assert checkpoints.restore_latest(MEGA) is None
        assert lines == []
        assert open_at(disk / "checkpoints", keep=2).restore_latest(MEGA) is None
        assert "warning: 3 checkpoints of 8.39 MB must fit" in lines.pop()
        checkpoints.save(1, MEGA, {})
        checkpoints.wait()

        (disk / "other").write_bytes(bytes(6 * 2**20))  # less room than a checkpoint needs: refused before it starts
        checkpoints.save(2, MEGA, {})
        assert "6.29 MB free" in lines[-1] or "the checkpoint needs 8.39 MB" in lines[-1]
        (disk / "other").unlink()

        filler = threading.Thread(target=lambda: (disk / "other").write_bytes(bytes(8 * 2**20)))
        real = checkpoints._prepare
        checkpoints._prepare = lambda *args: (real(*args), filler.start(), filler.join())[0]  # fills up meanwhile
        checkpoints.save(3, MEGA, {})
        with pytest.raises(CheckpointError, match="disk is full"):
            checkpoints.wait()
        checkpoints._prepare = real
        assert checkpoints.steps() == [1]
        assert not list((disk / "checkpoints").glob("*.partial"))
        (disk / "other").unlink()

        checkpoints.save(4, MEGA, {})
        checkpoints.close()
        assert checkpoints.steps() == [4]
        assert open_at(disk / "checkpoints", keep=1).restore_latest(MEGA).step == 4


def test_a_read_only_disk(tmp_path, open_at, lines):
    with mounted(tmp_path / "disk", "size=40m") as disk:
        checkpoints = open_at(disk / "checkpoints", max_failed_saves=3)
        checkpoints.save(1, MEGA, {})
        checkpoints.wait()
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        checkpoints.save(2, MEGA, {})
        assert "read-only" in lines[-1]
        with pytest.raises(CheckpointError):
            checkpoints.close()
        assert open_at(disk / "checkpoints").restore_latest(MEGA).step == 1


SAVER = """
    import os, signal, sys, time
    from pathlib import Path
    import jax, jax.numpy as jnp
    import orbax.checkpoint
    from jaxpar.checkpoint import Checkpoints
    from jaxpar.config import CheckpointConfig
    # A child per kill, forked before jax has started any thread of its own: importing takes longer than saving.
    for delay_s in map(float, sys.argv[2:]):
        started, ready = os.pipe()
        child = os.fork()
        if not child:
            checkpoints = Checkpoints(Path(sys.argv[1]), CheckpointConfig(keep=1))
            step = max(checkpoints.steps(), default=0)
            first = step + 1
            while True:
                step += 1
                state = {"w": jnp.full(2**18, float(step)), "b": jnp.full(7, float(step))}
                checkpoints.save(step, state, {"step": step})
                if step == first:
                    checkpoints.wait()  # it compiles; the kill shall fall on any moment of the later ones
                    os.write(ready, b".")
        os.read(started, 1)
        time.sleep(delay_s)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        print(",".join(sorted(path.name for path in Path(sys.argv[1]).iterdir())), flush=True)
"""


@pytest.mark.parametrize("kills", [4, pytest.param(24, marks=pytest.mark.sweep)])
def test_sigkill_at_any_moment_of_a_save(tmp_path, open_at, kills):
    rng = random.Random(5)
    delays = [f"{rng.uniform(0.0, 0.4):.3f}" for _ in range(kills)]
    listing = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SAVER), str(tmp_path / "checkpoints"), *delays],
        capture_output=True,
        text=True,
        check=True,
        timeout=400,
        cwd=Path(__file__).parents[1],
    ).stdout.splitlines()
    assert len(listing) == kills
    target = {"w": jnp.zeros(2**18), "b": jnp.zeros(7)}
    restored = open_at(keep=1).restore_latest(target)
    assert restored is not None
    assert restored.extra["step"] == restored.step
    assert all(float(leaf[-1]) == restored.step for leaf in jax.tree.leaves(restored.state))
    assert all(reason == "its save was cut short" for _, reason in restored.skipped)
    # At every kill one whole step was there.
    assert all(any(name.isdigit() or name.endswith(".replaced") for name in names.split(",")) for names in listing)
