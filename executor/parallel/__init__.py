"""The dimensions of parallelism as torch runs them: mesh, tensor, context, expert, pipeline, recompute."""
