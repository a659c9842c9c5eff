"""Which layout is fastest: searches parallel degrees, ZeRO, remat and microbatches, and compiles the best few.

python scripts/plan.py --config=configs/llama3_8b.py --gpu=h100 --gpus=64 --write=plan.py
"""

from __future__ import annotations

import dataclasses
import sys

from jaxpar import cli
from jaxpar.errors import UserError


def main(argv: list[str]) -> int:
    parser = cli.Parser(__doc__ or "", check=False)
    parser.add_argument("--gpu", default="h100", help="a100-80g, a100-40g, h100, h200, b200, l40s, or a .json file")
    parser.add_argument("--gpus", type=int, default=8, metavar="N", help="GPUs in all")
    parser.add_argument(
        "--gpus-per-node", type=int, metavar="N", help="GPUs that share NVLink (default: the GPU's own)"
    )
    parser.add_argument("--global-batch", type=int, metavar="ROWS", help="instead of the config's global_batch")
    parser.add_argument("--json", metavar="FILE", help="write the plan as JSON")
    parser.add_argument("--write", metavar="FILE", help="write the winner as a config file")
    parser.add_argument("--compiles", type=int, default=12, metavar="N", help="compile at most N layouts; 0: none")
    parser.add_argument("--compile-timeout", type=float, default=900.0, metavar="S", help="longest compile in seconds")
    parser.add_argument("--assume", action="append", default=[], metavar="NAME=VALUE", help="replace one assumption")
    args = parser.parse(argv)

    from rich.console import Console

    from jaxpar.dryrun.assumptions import default_assumptions, override
    from jaxpar.dryrun.prepare import prepare
    from jaxpar.dryrun.targets import find_target
    from jaxpar.planner.output import print_plan, write_config, write_json
    from jaxpar.planner.plan import Search, plan

    if args.compiles < 0:
        raise UserError(f"--compiles={args.compiles}: wanted 0 or more")
    gpu = find_target(args.gpu)
    config = args.config
    if args.global_batch is not None:
        config = dataclasses.replace(config, global_batch=args.global_batch)
    config = prepare(config, args.gpus, automatic=True)
    found = plan(
        config,
        gpu,
        args.gpus,
        gpus_per_node=args.gpus_per_node,
        assumed=override(default_assumptions(gpu.name), args.assume),
        search_options=Search(max_compiles=args.compiles, compile=args.compiles > 0, timeout_s=args.compile_timeout),
        progress=lambda message: print(message, file=sys.stderr, flush=True),
    )
    print_plan(found, Console(soft_wrap=False))
    if args.json:
        write_json(found, args.json)
    if args.write:
        write_config(found.best, args.write, command="python scripts/plan.py " + " ".join(argv))
        print(f"config file: {args.write}")
    return 0


if __name__ == "__main__":
    if sys.argv[1:] == []:
        sys.argv.append("--help")
    cli.run_script(main)
