"""The one exception that users cause and can mend.

Scripts turn a `UserError` into its message on stderr and exit code 2; every other exception is a bug
of ours and keeps its traceback.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator


class UserError(ValueError):
    """A mistake in a config, a file or a command line: what, got, wanted, and what would work.

    Several mistakes may be given; they make one message and stay apart in `problems`.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__(*problems)
        self.problems = problems

    def __str__(self) -> str:
        if len(self.problems) <= 1:
            return "".join(self.problems)
        listed = (f"  {i}. {problem}" for i, problem in enumerate(self.problems, 1))
        return "\n".join([f"{len(self.problems)} problems:", *listed])


def raise_together(problems: Iterable[str]) -> None:
    """Raise one `UserError` that lists every problem; do nothing when there is none."""
    problems = list(dict.fromkeys(problems))
    if problems:
        raise UserError(*problems)


@contextlib.contextmanager
def collect(problems: list[str]) -> Iterator[None]:
    """Append the problems of a `UserError` raised inside to `problems` and go on."""
    try:
        yield
    except UserError as error:
        problems.extend(error.problems)
