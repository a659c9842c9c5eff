"""Every performance claim as a ratio from one run: python scripts/benchmark.py [core pipeline data ...].

Without a name every part runs. Rows print as they come; --json=OUT keeps them. Exits 1 when a row is out of its limits.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def main(argv: list[str]) -> int:
    sys.path.insert(0, str(ROOT / "scripts"))
    files = (ROOT / "scripts" / "benchmarks").glob("*.py")
    names = sorted(path.stem for path in files if "\ndef run(" in path.read_text())
    parser = argparse.ArgumentParser(description="Ratios from one run.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(names)}; default: all")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write all rows")
    args = parser.parse_args(argv)
    if unknown := sorted(set(args.parts) - set(names)):
        parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join(names)}")
    from jaxpar.mesh import simulate_devices

    simulate_devices(8)
    rows = []
    for name in args.parts or names:
        print(f"== {name}", flush=True)
        found = importlib.import_module(f"benchmarks.{name}").run()
        rows += [{"part": name, **(row if isinstance(row, dict) else dataclasses.asdict(row))} for row in found]
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2, default=str) + "\n")
    out = [f"{row['part']}: {row['name']}" for row in rows if not within_limits(row)]
    print(f"{len(out)} of {len(rows)} rows are out of their limits" + "".join(f"; {name}" for name in out))
    return 1 if out else 0


def within_limits(row: dict[str, Any]) -> bool:
    """Whether a row keeps its limits; NaN keeps none, and a row that has none is only shown."""
    if "limits" in row:
        low, high = row["limits"]
        return low <= row["found"] <= high
    number = "found" if "found" in row else "ratio"
    limit = {"found": "limit", "ratio": "bound"}[number]
    if limit not in row:
        return True
    return row[number] <= row[limit] if row.get("at_most", True) else row[number] >= row[limit]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
