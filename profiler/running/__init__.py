"""A model run on fake tensors: what its forward and backward compute, keep, and leave behind."""
