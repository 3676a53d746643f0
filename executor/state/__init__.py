"""Numbers of a stage: how they begin, are read from trained weights, saved, and resumed under another plan."""
