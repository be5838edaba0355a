"""Code that several suites use: stored arrays, ways to read them, a local server, workloads of crops, callers."""
