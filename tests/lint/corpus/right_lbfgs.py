import torch

x = torch.linspace(-3, 3, 200).unsqueeze(1)
y = torch.sin(x)
net = torch.nn.Sequential(torch.nn.Linear(1, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
opt = torch.optim.LBFGS(net.parameters(), max_iter=20, line_search_fn="strong_wolfe")
mse = torch.nn.MSELoss()


def closure():
    opt.zero_grad()
    loss = mse(net(x), y)
    loss.backward()
    return loss


for i in range(50):
    value = opt.step(closure)
    if i % 10 == 0:
        print(i, value.item())
