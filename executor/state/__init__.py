"""Numbers of a stage: initial values, loading trained weights, saving, and resuming under another plan."""
