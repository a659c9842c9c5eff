"""Prove that a config's layout does not change the maths: its mesh against one device, shrunk, in float32."""

from __future__ import annotations

import dataclasses
import math

from jaxpar import cli
from jaxpar.errors import UserError
from jaxpar.validate import AXES


def main(argv: list[str]) -> int:
    parser = cli.Parser("Compare a config's mesh with one device; exit code 1 above the tolerance.", check=False)
    args = parser.parse(argv)
    config = args.config
    sizes = {axis: getattr(config.parallel, axis) for axis in AXES}
    needed = args.devices or math.prod(size for size in sizes.values() if size > 0)
    if needed > 64:
        raise UserError(
            f"this mesh has {needed} devices; simulating more than 64 is slow. Check a smaller one of the same kind, "
            "for example --config.parallel.data=2 --config.parallel.tensor=2 --devices=4"
        )
    from jaxpar.mesh import degrees, simulate_devices

    simulate_devices(needed)
    parallel = dataclasses.replace(config.parallel, **degrees(config.parallel, needed))
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


if __name__ == "__main__":
    cli.run_script(main)
