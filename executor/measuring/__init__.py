"""What really happens: plans run on this machine, timed, verified beside one process, set beside predictions."""
