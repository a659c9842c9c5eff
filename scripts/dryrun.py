"""Will it fit, what does it communicate, how fast will it be: a run compiled for GPUs that are not there.

python scripts/dryrun.py --config=configs/llama3_8b.py --gpu=h100 --gpus=64
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxpar import cli
from jaxpar.errors import UserError

if TYPE_CHECKING:
    import argparse

    from jaxpar.dryrun.energy import EnergyAssumptions


def main(argv: list[str]) -> int:
    if "--calibrate" in [argument.partition("=")[0] for argument in argv]:
        return calibrate(argv)
    parser = cli.Parser(__doc__ or "", check=False)
    parser.add_argument("--gpu", default="h100", help="a100-80g, a100-40g, h100, h200, b200, l40s, or a .json file")
    parser.add_argument("--gpus", type=int, default=8, metavar="N", help="GPUs in all")
    parser.add_argument(
        "--gpus-per-node", type=int, metavar="N", help="GPUs that share NVLink (default: the GPU's own)"
    )
    parser.add_argument("--layout", choices=("config", "auto"), default="config", help="auto: let the planner choose")
    parser.add_argument("--json", metavar="FILE", help="write the report as JSON")
    parser.add_argument("--plot", metavar="FILE", help="write a picture of memory, communication and time line")
    parser.add_argument("--no-compile", action="store_true", help="closed-form figures only, in a second")
    parser.add_argument("--check-recompute", action="store_true", help="compile twice to catch silent recomputation")
    parser.add_argument("--compile-timeout", type=float, default=900.0, metavar="S", help="longest compile in seconds")
    parser.add_argument("--assume", action="append", default=[], metavar="NAME=VALUE", help="replace one assumption")
    parser.add_argument("--cost", action="store_true", help="energy and price of the whole run")
    parser.add_argument("--watts", type=float, help="board power of one GPU")
    parser.add_argument("--price", type=float, help="US dollars per GPU and hour")
    parser.add_argument("--kwh-price", type=float, help="US dollars per kWh")
    parser.add_argument("--calibrate", metavar="FILE", help="fit the assumptions to measured runs (own page in docs)")
    args = parser.parse(argv)
    if args.config_path is None and not any(argument.startswith(cli.OVERRIDE) for argument in argv):
        raise UserError("--config=FILE is missing: the config of the run to be examined; --help lists all flags")
    return report(args)


def report(args: argparse.Namespace) -> int:
    from rich.console import Console

    from jaxpar.dryrun.assumptions import default_assumptions, override
    from jaxpar.dryrun.prepare import prepare
    from jaxpar.dryrun.report import print_report
    from jaxpar.dryrun.run import Options, dry_run
    from jaxpar.dryrun.targets import find_target

    gpu = find_target(args.gpu)
    assumed = override(default_assumptions(gpu.name), args.assume)
    config = prepare(args.config, args.gpus, automatic=args.layout == "auto")
    if args.layout == "auto":
        from jaxpar.planner.plan import Search, mesh_words, plan

        search = Search(compile=not args.no_compile, timeout_s=args.compile_timeout)
        per_node = args.gpus_per_node
        best = plan(config, gpu, args.gpus, gpus_per_node=per_node, assumed=assumed, search_options=search).best
        print(f"layout chosen: {mesh_words(best.layout)}\n  {best.reason}")
        config = best.config
    options = Options(
        gpus_per_node=args.gpus_per_node,
        compile=not args.no_compile,
        check_recompute=args.check_recompute,
        timeout_s=args.compile_timeout,
        assumed=assumed,
        energy=_energy(args) if args.cost else None,
    )
    answer = dry_run(config, gpu, args.gpus, options=options)
    print_report(answer, Console(soft_wrap=False))
    if args.json:
        answer.write_json(args.json)
    if args.plot:
        from jaxpar.dryrun.plot import save_plot

        save_plot(answer, args.plot)
    return 0


def _energy(args: argparse.Namespace) -> EnergyAssumptions:
    import dataclasses

    from jaxpar.dryrun.energy import EnergyAssumptions

    given: dict[str, float | None] = {
        "gpu_watts": args.watts,
        "price_per_gpu_hour": args.price,
        "price_per_kwh": args.kwh_price,
    }
    return dataclasses.replace(EnergyAssumptions(), **{key: value for key, value in given.items() if value is not None})


def calibrate(argv: list[str]) -> int:
    parser = cli.Parser("Fit the assumptions to measured runs, leaving out one cluster at a time.", config=False)
    parser.add_argument("--calibrate", metavar="FILE", default="", nargs="?", help='"" takes the published runs')
    parser.add_argument("--gpu", default="h100", help="the kind of GPU whose assumptions are fitted")
    args = parser.parse(argv)
    from jaxpar.dryrun.calibrate import print_calibration

    print_calibration(args.calibrate or None, args.gpu)
    return 0


if __name__ == "__main__":
    cli.run_script(main)
