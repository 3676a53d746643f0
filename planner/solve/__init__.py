"""The way to a plan that is proven best: the space of shapes, bounds, columns (a knapsack each), and the integer
program."""
