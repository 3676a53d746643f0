"""Random planning problems that several tests enumerate."""

from benchmarks.planning_time.brute_force import instances

FEW = list(instances(60, most_plans=250))
"""Instances that a test can enumerate."""
