"""What tensors of a run mean: which tokens they hold, which logits, and who makes them."""
