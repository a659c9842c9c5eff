"""Train a model: python scripts/train.py --config=FILE --workdir=DIR [--devices=N] [--config.a.b=c ...]."""

from __future__ import annotations

import itertools
import logging
import sys

from jaxpar import cli
from jaxpar.errors import UserError


def main(argv: list[str]) -> int:
    automatic = "--layout=auto" in argv or ("--layout", "auto") in itertools.pairwise(argv)
    # A layout that is to be replaced need not fit the devices.
    parser = cli.Parser(
        "Train a model; started again in the same folder, it resumes.", workdir=True, check=not automatic
    )
    parser.add_argument(
        "--layout",
        choices=("config", "auto"),
        default="config",
        help="auto: the planner chooses, in place of the config",
    )
    parser.add_argument("--gpu", help="with --layout=auto: the kind of GPU to plan for, if not that of the devices")
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="of many processes: the address of process 0")
    parser.add_argument("--num-processes", type=int, metavar="N", help="how many processes take part")
    parser.add_argument("--process-id", type=int, metavar="I", help="which of them this one is, from 0")
    args = parser.parse(argv)
    if args.gpu is not None and not automatic:
        raise UserError(f"--gpu={args.gpu} is what --layout=auto plans for; training runs on the devices there are")
    if args.workdir is None:
        raise UserError("--workdir=DIR is missing: the folder that metrics and checkpoints go to")
    from jaxpar.mesh import find_processes, join_processes, simulate_devices

    processes = find_processes(args.coordinator, args.num_processes, args.process_id)
    heartbeat_s = args.config.runtime.heartbeat_s
    if not join_processes(processes, heartbeat_s=heartbeat_s, local_devices=args.devices) and args.devices is not None:
        simulate_devices(args.devices)  # which sees to it that there are so many
    import jax

    if jax.process_index() != 0:
        logging.getLogger("jaxpar").setLevel(logging.WARNING)  # one process tells what all of them decide
    config = args.config
    if automatic:
        from jaxpar.planner.auto import with_planned_layout

        config = with_planned_layout(config, args.gpu, print if jax.process_index() == 0 else lambda text: None)
    from jaxpar.loop import NonFiniteError
    from jaxpar.runtime.exits import run_guarded
    from jaxpar.trainer import train

    def run() -> int:
        try:
            return train(config, args.workdir).outcome.exit_code
        except NonFiniteError as error:  # every process stops at the same step
            print(f"train.py: {error}", file=sys.stderr)
            return 1

    return run_guarded(run)


if __name__ == "__main__":
    cli.run_script(main)
