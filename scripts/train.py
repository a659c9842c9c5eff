"""Train a model: python scripts/train.py --config=FILE --workdir=DIR [--devices=N] [--config.a.b=c ...]."""

from __future__ import annotations

import sys

from jaxpar import cli
from jaxpar.errors import UserError


def main(argv: list[str]) -> int:
    parser = cli.Parser("Train a model; started again in the same folder, it resumes.", workdir=True)
    args = parser.parse(argv)
    if args.workdir is None:
        raise UserError("--workdir=DIR is missing: the folder that metrics and checkpoints go to")
    from jaxpar.mesh import find_processes, join_processes, simulate_devices

    processes = find_processes()
    if args.devices is not None and processes is None:
        simulate_devices(args.devices)
    else:
        join_processes(processes, heartbeat_s=args.config.runtime.heartbeat_s, local_devices=args.devices)
    from jaxpar.loop import NonFiniteError
    from jaxpar.runtime.exits import run_guarded
    from jaxpar.trainer import train

    def run() -> int:
        try:
            return train(args.config, args.workdir).outcome.exit_code
        except NonFiniteError as error:  # every process stops at the same step
            print(f"train.py: {error}", file=sys.stderr)
            return 1

    return run_guarded(run)


if __name__ == "__main__":
    cli.run_script(main)
