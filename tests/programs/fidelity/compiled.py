import torch


@torch.compile
def work(x):
    return (x.sin() + 1).sum()


x = torch.ones(16, requires_grad=True)
y = work(x)
y.backward()
print("compiled", round(y.item(), 4), round(x.grad.sum().item(), 4))
