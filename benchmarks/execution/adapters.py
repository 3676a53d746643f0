"""LoRA by hand, in the modules and names of PEFT: low-rank matrices beside linear layers, which alone are trained."""

import math

import torch
from torch import nn

RANK, ALPHA = 4, 8


class LoraLinear(nn.Module):
    """A linear layer, plus a product of two narrow ones (Hu et al., 2021, section 4.1)."""

    def __init__(self, base: nn.Linear, dropout: float = 0.0) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_dropout = nn.ModuleDict({"default": nn.Dropout(dropout) if dropout else nn.Identity()})
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, RANK, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(RANK, base.out_features, bias=False)})
        nn.init.kaiming_uniform_(self.lora_A["default"].weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B["default"].weight)

    @property
    def weight(self) -> torch.Tensor:
        """The base's, for code that reads it by that name (T5's of Hugging Face)."""
        return self.base_layer.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What the layer gives, adapted."""
        adapted: torch.Tensor = self.base_layer(x)
        read = self.lora_dropout["default"](x)
        return adapted + self.lora_B["default"](self.lora_A["default"](read)) * (ALPHA / RANK)


def with_adapters(model: nn.Module, dropout: float = 0.0) -> nn.Module:
    """The model with an adapter at every linear layer that lies in a list of layers; all else is frozen. dropout: of
    what adapters read."""
    model.requires_grad_(False)
    for path, module in list(model.named_modules()):
        inside = any(part.isdigit() for part in path.split("."))
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and (inside or name.isdigit()):
                module._modules[name] = LoraLinear(child, dropout)
    return model
