"""Kill, freeze and damage a tiny training run again and again, and compare it with an unbroken one.

    python scripts/fault_campaign.py --rounds=50 --minutes=60

Exit code 0 when all rounds ran and every fault was survived; 1 otherwise, also when --minutes ended it early.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from jaxpar.runtime import campaign


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--rounds", type=int, default=50, help="faults to inject (default 50)")
    parser.add_argument("--minutes", type=float, default=60.0, help="start no round after this long (default 60)")
    parser.add_argument("--processes", type=int, default=2, help="size of the gang (default 2)")
    parser.add_argument("--devices", type=int, default=4, help="simulated devices in all (default 4)")
    parser.add_argument("--steps", type=int, default=1200, help="length of the run (default 1200)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder, removed at the end)")
    args = parser.parse_args(argv)
    if min(args.rounds, args.processes, args.steps) < 1 or args.devices % args.processes or args.minutes <= 0:
        parser.error("--rounds, --processes, --steps and --minutes are above 0; --devices divides by --processes")
    with tempfile.TemporaryDirectory() as temporary:
        plan = campaign.Plan(
            folder=args.folder or Path(temporary),
            rounds=args.rounds,
            minutes=args.minutes,
            steps=args.steps,
            processes=args.processes,
            devices=args.devices,
            seed=args.seed,
        )
        score = campaign.run(plan, lambda line: print(line, flush=True))
    return 0 if score.passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
