"""The machine: clusters and their devices, calibrated or from files, and units."""
