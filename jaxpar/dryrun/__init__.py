"""Dry run: memory, communication and speed of a run on GPUs that are not there."""

from jaxpar.dryrun.assumptions import Assumptions, default_assumptions
from jaxpar.dryrun.report import Report, print_report
from jaxpar.dryrun.run import Options, dry_run
from jaxpar.dryrun.targets import GpuTarget, find_target

__all__ = [
    "Assumptions",
    "GpuTarget",
    "Options",
    "Report",
    "default_assumptions",
    "dry_run",
    "find_target",
    "print_report",
]
