"""An optimizer that torch does not have, in a file of its own: golden kernels quote its lines."""

import torch


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023, algorithm 2."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                exp_avg = state["exp_avg"]
                p.mul_(1 - lr * group["weight_decay"])
                update = exp_avg.lerp(p.grad, 1 - beta1).sign_()
                p.add_(update, alpha=-lr)
                exp_avg.lerp_(p.grad, 1 - beta2)
