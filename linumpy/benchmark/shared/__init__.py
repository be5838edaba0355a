"""What suites share: stored arrays and ways to read them, a server on this machine, workloads of crops, callers."""
