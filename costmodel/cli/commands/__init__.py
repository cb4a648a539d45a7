"""The commands of dsq-cost, a file each: `run(arguments)` gives the answer."""
