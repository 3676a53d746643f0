"""What plans really do: they are run on this machine, timed, verified against one process, compared with
predictions."""
