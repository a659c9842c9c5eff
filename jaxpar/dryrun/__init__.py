"""Dry run: memory, communication and speed of a run on GPUs that are not there."""
