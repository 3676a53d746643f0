"""The way to the proven best: the space of shapes, bounds, columns of the inner knapsack, and the integer program."""
