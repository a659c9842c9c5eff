"""One file per family; each defines FAMILY."""
