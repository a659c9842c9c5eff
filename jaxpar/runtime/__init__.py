"""What surrounds the training loop: launcher and supervisor outside, watchdog, signals and ledger inside."""
