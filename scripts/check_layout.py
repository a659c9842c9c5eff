"""Prove that a config's layout does not change the maths: its mesh against one device, shrunk, in float32."""

from __future__ import annotations

import dataclasses
import math

from jaxpar import cli
from jaxpar.config import ParallelConfig
from jaxpar.errors import UserError, raise_together
from jaxpar.validate import AXES, problems


def main(argv: list[str]) -> int:
    parser = cli.Parser("Compare a config's mesh with one device; exit code 1 above the tolerance.", check=False)
    args = parser.parse(argv)
    config = args.config
    # Rows and the length of a row are chosen anew; of everything else a mistake would be shrunk out of sight.
    own = ("global_batch", "accumulation", "seq_len")
    raise_together([problem for problem in problems(config, args.devices) if not problem.startswith(own)])
    needed = args.devices or _devices(config.parallel)
    if needed == 1:
        raise UserError(
            "this would compare one device with itself: set the size of an axis, for example "
            "--config.parallel.data=4 --config.parallel.tensor=2, or --devices=8 for parallel.data = -1"
        )
    if needed > 64:
        raise UserError(
            f"this mesh has {needed} devices; simulating more than 64 is slow. Check a smaller one of the same kind, "
            "for example --config.parallel.data=2 --config.parallel.tensor=2 --devices=4"
        )
    from jaxpar.mesh import degrees, simulate_devices

    simulate_devices(needed)
    sizes = degrees(config.parallel, needed)
    print("mesh:", " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1))
    parallel = dataclasses.replace(config.parallel, **sizes)
    from jaxpar.layout_check import GRADIENT_TOLERANCE, LOSS_TOLERANCE, check_layout

    result = check_layout(dataclasses.replace(config, parallel=parallel))
    print(f"loss: relative error {result.loss:.2e} (tolerance {LOSS_TOLERANCE:.0e})")
    for name, error in sorted(result.gradients.items(), key=lambda item: -item[1]):
        print(f"  {error:.2e}  {name}")
    print(f"largest gradient error {result.worst_gradient:.2e} (tolerance {GRADIENT_TOLERANCE:.0e})")
    for name in result.differing_replicas:
        print(f"copies of {name} differ between devices after one step")
    print("PASSED" if result.passed else "FAILED")
    return 0 if result.passed else 1


def _devices(parallel: ParallelConfig) -> int:
    """How many devices the mesh needs; an axis of -1 brings them to 8 at least, and is itself more than 1."""
    sizes = [getattr(parallel, axis) for axis in AXES]
    fixed = math.prod(size for size in sizes if size > 0)
    return fixed * max(2, -(-8 // fixed)) if -1 in sizes else fixed


if __name__ == "__main__":
    cli.run_script(main)
