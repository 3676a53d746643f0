"""What of a model can be split: found from its data flow, and tried on fake tensors."""
