"""Storage that is no folder: object stores, ZIP files, TIFF stacks."""
