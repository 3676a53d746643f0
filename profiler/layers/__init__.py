"""Where a model can be cut: its chain of layers, the tensors that cross, and who makes them."""
