"""Show where every parameter of a config lives: shape, logical axes, mesh axes, bytes per device."""

from __future__ import annotations

import json
import math
from pathlib import Path

from jaxpar import cli
from jaxpar.errors import UserError
from jaxpar.mesh import AXES


def main(argv: list[str]) -> int:
    parser = cli.Parser("One row per parameter: shape, logical axes, mesh axes, bytes per device.")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the rows as JSON too; - for stdout alone")
    parser.add_argument("--compile", action="store_true", help="compile and check the promise (small models only)")
    args = parser.parse(argv)
    sizes = [getattr(args.config.parallel, axis) for axis in AXES]
    from jaxpar.mesh import simulate_devices

    simulate_devices(args.devices or math.prod(size for size in sizes if size > 0))
    import jax

    from jaxpar.build import build
    from jaxpar.contract import check_gradients, check_step
    from jaxpar.report import as_json, as_table, print_table
    from jaxpar.trainer import resolved

    built = build(resolved(args.config, len(jax.devices())))
    if args.config.lora.rank:
        from jaxpar.lora import check_targets

        check_targets(args.config.lora, built.abstract_state.params)
    if args.json is not None:
        text = json.dumps(as_json(built), indent=2)
        print(text) if str(args.json) == "-" else _write(args.json, text + "\n")
    if str(args.json) != "-":
        print_table(as_table(built))
    if args.compile:
        check_step(built, built.step.lower(built.abstract_state, built.abstract_batch).compile())
        check_gradients(built)
        print("compiled: parameters, gradients and optimizer state hold the promised bytes on every device")
    return 0


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise UserError(
            f"--json={path}: cannot be written ({error.strerror}); want a file in a folder that is there"
        ) from error


if __name__ == "__main__":
    cli.run_script(main)
