"""Arguments of the scripts: `--config=FILE`, `--config.a.b=c`, `--workdir`, `--devices` and each script's own flags.

Imports no jax, so `--help` and config mistakes answer at once. A script is::

    def main(argv: list[str]) -> int | None:
        parser = cli.Parser("What the script does.", workdir=True)
        parser.add_argument("--json", help="...")
        args = parser.parse(argv)   # args.config is a checked Config
        ...

    if __name__ == "__main__":
        cli.run_script(main)
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import inspect
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jaxpar import config_file, validate
from jaxpar.config import Config
from jaxpar.config_values import describe
from jaxpar.errors import UserError, collect, raise_together
from jaxpar.lines import FULL_DISK

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
OVERRIDE = config_file.COMMAND_LINE


class Parser(argparse.ArgumentParser):
    """argparse with config files, overrides and hints; mistakes raise `UserError`, all of them at once."""

    def __init__(self, description: str, *, config: bool = True, workdir: bool = False, check: bool = True) -> None:
        """Flags every script has; `check` runs the checks of validate.py on the config, for `--devices` if given."""
        super().__init__(
            description=description, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        self.takes_config = config
        self.check = check
        if config:
            self.add_argument("--config", metavar="FILE", help="config file with get_config(), or a run's config.json")
            self.add_argument(
                "--devices", type=_positive, metavar="N", help="simulate N devices on the CPU instead of the real ones"
            )
            self.usage = f"{self.prog} --config=FILE [--config.KEY=VALUE ...] [flags]"
        if workdir:
            self.add_argument("--workdir", type=Path, metavar="DIR", help="folder of the run: metrics, checkpoints")

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """The flags; `config` is the resolved `Config`, `config_path` the file or None, with `--config` taken."""
        problems: list[str] = []
        rest, overrides = _split_overrides(argv, problems) if self.takes_config else (list(argv), [])
        args = argparse.Namespace(config=None, devices=None)
        with collect(problems):
            args, unknown = self.parse_known_args(rest)
            problems.extend(self._unknown(unknown))
        if self.takes_config:
            args.config_path = args.config or self._config_path(rest)
            args.config, wrong = config_file.read(args.config_path, overrides)
            problems += wrong
            if self.check:
                problems += config_file.independent(validate.problems(args.config, args.devices), wrong)
        raise_together(problems)
        return args

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing usage, so that every mistake ends in one message."""
        raise UserError(message)

    def format_help(self) -> str:
        """The flags, then every config key with its type, default and meaning."""
        text = super().format_help()
        return f"{text}\n{_config_help()}" if self.takes_config else text

    def _config_path(self, argv: Sequence[str]) -> str | None:
        """The file of `--config` even if other flags are wrong, so that its mistakes are told with theirs."""
        only = argparse.ArgumentParser(allow_abbrev=False, add_help=False, exit_on_error=False)
        only.add_argument("--config")
        try:
            return only.parse_known_args(argv)[0].config
        except argparse.ArgumentError:  # `--config` without a value is in the list already
            return None

    def _unknown(self, flags: Sequence[str]) -> Iterator[str]:
        for before, flag in zip(["", *flags], flags):
            if flag.startswith("-"):
                yield self._unknown_flag(flag.partition("=")[0])
            elif not before.startswith("-") or "=" in before:  # else it was the value of an unknown flag
                yield f"{flag!r}: unexpected argument; flags are --name=value"

    def _unknown_flag(self, flag: str) -> str:
        known = [option for action in self._actions for option in action.option_strings]
        key = flag.lstrip("-")
        close = difflib.get_close_matches(f"--{key}", known, n=1, cutoff=0.75)
        hint = f"did you mean {close[0]}?" if close else "--help lists the flags"
        if self.takes_config and (key in config_file.known_keys() or not close):
            for_key = config_file.suggest(key)
            hint = for_key.replace("did you mean ", f"did you mean {OVERRIDE}") if "did you mean" in for_key else hint
        return f"{flag}: no such flag; {hint}"


def run_script(main: Callable[[list[str]], int | None]) -> NoReturn:
    """Run `main(argv)` and exit: 2 with one message for a user's mistake, 130 for Ctrl-C, else what main returns.

    What the library logs (a mode it picked and why, files it left out) goes to stderr.
    """
    library = logging.getLogger("jaxpar")
    library.addHandler(logging.StreamHandler())
    library.setLevel(logging.INFO)
    try:
        code = main(sys.argv[1:]) or 0
        _flush()
    except UserError as error:
        print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr)
        code = EXIT_USER_ERROR
    except PermissionError as error:
        if error.filename is None:
            raise
        print(f"{Path(sys.argv[0]).name}: error: {error.filename}: {error.strerror}; want one that this user may use",
              file=sys.stderr)  # fmt: skip
        code = EXIT_USER_ERROR
    except KeyboardInterrupt:
        print(f"{Path(sys.argv[0]).name}: interrupted", file=sys.stderr)
        code = EXIT_INTERRUPTED
    sys.exit(code)


def _flush() -> None:
    try:
        sys.stdout.flush()
    except OSError as error:
        if error.errno not in FULL_DISK:
            raise
        # What a full disk keeps of the log does not turn a finished run into a failed one; nor does Python at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted a whole number of at least 1")
    return int(text)


def _split_overrides(argv: Sequence[str], problems: list[str]) -> tuple[list[str], list[str]]:
    """Other arguments, and overrides as `a.b=c`, from `--config.a.b=c` or `--config.a.b c`."""
    rest: list[str] = []
    overrides: list[str] = []
    waiting = iter(range(len(argv)))
    for index in waiting:
        argument = argv[index]
        if not argument.startswith(OVERRIDE):
            rest.append(argument)
        elif "=" in argument:
            overrides.append(argument.removeprefix(OVERRIDE))
        elif index + 1 < len(argv) and not argv[index + 1].startswith("--"):
            overrides.append(f"{argument.removeprefix(OVERRIDE)}={argv[next(waiting)]}")
        else:
            problems.append(f"{argument}: needs a value, as in {argument}=VALUE")
    return rest, overrides


def _config_help() -> str:
    lines = ["settings (--config.KEY=VALUE):"]
    for prefix, section in _sections(Config(), ""):
        comments = _comments(type(section))
        lines.append("")
        for field in dataclasses.fields(section):
            key = f"{prefix}{field.name}"
            if key not in config_file.known_keys():
                continue
            default = getattr(section, field.name)
            kind = describe(config_file.known_keys()[key])
            comment = f"  # {comments[field.name]}" if field.name in comments else ""
            lines.append(f"  {key} = {default!r}  ({kind}){comment}")
    return "\n".join(lines) + "\n"


def _sections(section: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    yield prefix, section
    for field in dataclasses.fields(section):
        inner = getattr(section, field.name)
        if dataclasses.is_dataclass(inner):
            yield from _sections(inner, f"{prefix}{field.name}.")


def _comments(section: type) -> dict[str, str]:
    """The comment behind each field in config.py, which is where a setting is explained."""
    return dict(re.findall(r"^\s+(\w+): .*?#\s*(.+)$", inspect.getsource(section), re.MULTILINE))
