"""Run a training command as several processes on this machine, restarted together when one is lost.

    python scripts/launch.py --processes=2 --devices-per-process=2 -- scripts/train.py --config=FILE --workdir=DIR

Exit codes: that of the run; 75 when it was stopped or still failed after the last restart.
"""

from __future__ import annotations

import argparse
import sys

from jaxpar.runtime.supervisor import Gang, Supervisor


def main(argv: list[str]) -> int:
    own, dashes, command = _split(argv)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--processes", type=_positive, required=True, help="how many processes to start")
    parser.add_argument("--devices-per-process", type=_positive, help="simulate so many CPU devices in each")
    parser.add_argument("--max-restarts", type=int, default=3, help="in a row without a newer checkpoint (default 3)")
    parser.add_argument("--grace-s", type=float, default=60.0, help="seconds from a stop signal to a kill (default 60)")
    args = parser.parse_args(own)
    if not dashes or not command:
        parser.error("give the command after ' -- ', as in: -- scripts/train.py --config=FILE --workdir=DIR")
    if command[0].endswith(".py"):
        command = [sys.executable, *command]
    gang = Gang(
        command,
        args.processes,
        devices_per_process=args.devices_per_process,
        max_restarts=args.max_restarts,
        grace_s=args.grace_s,
    )
    return Supervisor(gang).run()


def _split(argv: list[str]) -> tuple[list[str], bool, list[str]]:
    if "--" not in argv:
        return argv, False, []
    at = argv.index("--")
    return argv[:at], True, argv[at + 1 :]


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
