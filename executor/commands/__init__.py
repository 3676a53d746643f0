"""The commands of `plan`, one file for those that belong together."""
