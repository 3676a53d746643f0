"""The model: loaded, run on fake tensors, and described by what its layers do and need."""
