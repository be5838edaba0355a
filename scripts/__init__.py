"""Command-line scripts, each a thin front of one library function."""
