"""The command line: flags, overrides in both spellings, hints, exit codes, and no jax for any of it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxpar import cli, config_file
from jaxpar.errors import UserError

SCRIPT = """
from jaxpar import cli

def main(argv):
    args = cli.Parser("Test.", workdir=True).parse(argv)
    if args.config.steps == 13:
        raise KeyboardInterrupt
    if args.config.steps == 14:
        raise ValueError("a bug")
    import sys
    print(args.config.steps, args.devices, args.workdir, "jax" in sys.modules)
    return 3 if args.config.steps == 15 else None

cli.run_script(main)
"""


def parse(*argv: str):
    parser = cli.Parser("Test.", workdir=True)
    parser.add_argument("--json")
    return parser.parse(argv)


def run(tmp_path: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    return subprocess.run([sys.executable, str(script), *argv], capture_output=True, text=True, check=False)


def test_overrides_in_both_spellings():
    joined = parse("--config.steps=5", "--config.parallel.data=-1", "--config.model.tied=true", "--workdir=runs/a")
    spaced = parse(
        "--config.steps", "5", "--config.parallel.data", "-1", "--config.model.tied", "on", "--workdir", "runs/a"
    )
    assert joined.config == spaced.config == config_file.from_dict({"steps": 5, "model": {"tied": True}})
    assert joined.workdir == spaced.workdir == Path("runs/a")
    assert joined.config_path is None


def test_the_last_override_wins_and_values_may_hold_equal_signs():
    assert parse("--config.steps=5", "--config.steps=6").config.steps == 6
    assert parse("--config.data.files=a=b.txt").config.data.files == ("a=b.txt",)


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (["--wrkdir=a"], "did you mean --workdir?"),
        (["--confg=a"], "did you mean --config?"),
        (["--parallel.tensor=2"], "did you mean --config.parallel.tensor?"),
        (["--lr", "3"], "did you mean --config.optimizer.learning_rate?"),
        (["--config.num-steps=3"], "did you mean steps?"),
        (["--xyzzy"], "--help lists the flags"),
        (["--config.steps"], "--config.steps: needs a value"),
        (["--config.steps", "--json=a"], "--config.steps: needs a value"),
        (["--devices=0"], "wanted a whole number of at least 1"),
        (["--devices=x"], "wanted a whole number of at least 1"),
        (["train"], "unexpected argument"),
        (["--work=a"], "--work: no such flag"),
    ],
)
def test_mistaken_flags_are_refused_with_a_hint(argv: list[str], hint: str):
    with pytest.raises(UserError) as caught:
        parse(*argv)
    assert hint in str(caught.value)
    assert len(caught.value.problems) == 1


def test_flags_overrides_and_sizes_are_reported_together():
    with pytest.raises(UserError) as caught:
        parse("--wrkdir=a", "--config.parallel.tensor=3", "--config.global_batch=7", "--devices=8", "--config.seed")
    text = str(caught.value)
    for part in ("--wrkdir", "--config.seed: needs", "num_heads = 4", "parallel.tensor = 3 does not divide the 8"):
        assert part in text
    with pytest.raises(UserError, match=r"(?s)wanted a whole number.*nowhere.py: no such config file"):
        parse("--devices=0", "--config=nowhere.py")


def test_a_wrong_value_does_not_hide_the_checks_of_other_sections():
    with pytest.raises(UserError) as caught:
        parse("--config.optimizer.learning_rate=abc", "--config.global_batch=7", "--config.parallel.data=8")
    assert [p.split(":")[0].split(" = ")[0] for p in caught.value.problems] == [
        "--config.optimizer.learning_rate",
        "global_batch",
    ]
    # The mesh was mistyped: what its default does not fit says nothing.
    with pytest.raises(UserError) as caught:
        parse("--config.parallels.tensor=2", "--config.parallel.data=3", "--devices=8", "--config.model.head_dim=33")
    assert len(caught.value.problems) == 2
    assert not any("devices" in problem for problem in caught.value.problems)
    with pytest.raises(UserError) as caught:
        parse("--config=absent.py", "--config.parallel.data=3", "--devices=8")
    assert len(caught.value.problems) == 1


def test_exit_codes_and_streams(tmp_path: Path):
    fine = run(tmp_path, "--config.steps=5", "--devices=8", "--workdir", "w")
    assert (fine.returncode, fine.stdout, fine.stderr) == (0, "5 8 w False\n", "")
    mistake = run(tmp_path, "--config.step=5")
    assert (mistake.returncode, mistake.stdout) == (2, "")
    assert mistake.stderr == "script.py: error: --config.step: no such setting; did you mean steps?\n"
    interrupted = run(tmp_path, "--config.steps=13")
    assert (interrupted.returncode, interrupted.stderr) == (130, "script.py: interrupted\n")
    bug = run(tmp_path, "--config.steps=14")
    assert bug.returncode == 1
    assert "Traceback" in bug.stderr
    assert run(tmp_path, "--config.steps=15").returncode == 3
    assert not list(tmp_path.glob("w*"))


def test_help_lists_every_setting_without_jax(tmp_path: Path):
    start = time.monotonic()
    shown = run(tmp_path, "--help")
    elapsed_s = time.monotonic() - start
    assert shown.returncode == 0
    for key in config_file.known_keys():
        assert f"  {key} = " in shown.stdout, key
    assert "# rows per optimizer step" in shown.stdout
    assert elapsed_s < 5  # about 0.2 s; importing jax alone would take longer on a busy machine


def test_a_table_that_goes_elsewhere_is_as_wide_as_its_content(capsys: pytest.CaptureFixture[str]):
    from rich.table import Table

    from jaxpar.report import print_table

    table = Table("name")
    table.add_row("n" * 300)
    print_table(table)
    assert "n" * 300 in capsys.readouterr().out


def test_a_file_without_permission_is_one_line():
    code = (
        "import sys; from jaxpar import cli; sys.argv = ['scripts/train.py']\n"
        "def main(argv): raise PermissionError(13, 'Permission denied', 'data/tokens-0.bin')\n"
        "cli.run_script(main)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == "train.py: error: data/tokens-0.bin: Permission denied; want one that this user may use\n"
