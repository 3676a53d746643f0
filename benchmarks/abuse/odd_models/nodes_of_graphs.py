"""Graphs of different sizes in one batch, with edges and the graph of each node, scattered and pooled."""

import torch
from torch import nn
from torch.nn import functional


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.message, self.own = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x, edges):
        sums = torch.zeros_like(x).scatter_add(0, edges[1][:, None].expand(-1, 32), self.message(x)[edges[0]])
        return torch.relu(self.own(x) + sums)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(32, 5)

    def forward(self, x, edges, graph, num_graphs):
        for layer in self.layers:
            x = layer(x, edges)
        pooled = torch.zeros(num_graphs, 32, device=x.device).index_add_(0, graph, x)
        return self.head(pooled / torch.bincount(graph, minlength=num_graphs)[:, None])


def model():
    return Model()


def batch(size):
    nodes = [3 + i % 4 for i in range(size)]
    graph = torch.repeat_interleave(torch.arange(size), torch.tensor(nodes))
    starts = [sum(nodes[:i]) for i in range(size)]
    edges = torch.cat([start + torch.randint(count, (2, 8)) for start, count in zip(starts, nodes, strict=True)], 1)
    return {
        "x": torch.randn(sum(nodes), 32),
        "edges": edges,
        "graph": graph,
        "num_graphs": size,
        "y": torch.randint(5, (size,)),
    }


def loss(output, batch):
    return functional.cross_entropy(output, batch["y"])
