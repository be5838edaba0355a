"""What lets other packages read by linumpy; each module imports the package that loads it."""
