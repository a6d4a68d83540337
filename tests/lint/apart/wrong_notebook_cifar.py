# In[1]:
import torch
import torchvision
from torch import nn
from torchvision import transforms

# In[2]:
transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))])
trainset = torchvision.datasets.CIFAR10("data", train=True, download=True, transform=transform)
trainloader = torch.utils.data.DataLoader(trainset, batch_size=128, shuffle=True)  # expect: RO701 RO702
testset = torchvision.datasets.CIFAR10("data", train=False, transform=transform)
testloader = torch.utils.data.DataLoader(testset, batch_size=128, num_workers=2, pin_memory=True)

# In[3]:
net = nn.Sequential(
    nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(), nn.Linear(4096, 10), nn.LogSoftmax(dim=1),
)
net.cuda()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
scaler = torch.cuda.amp.GradScaler()  # expect: RO115

# In[4]:
for epoch in range(10):
    net.train()
    for i, (inputs, labels) in enumerate(trainloader):
        inputs, labels = inputs.cuda(), labels.cuda()
        optimizer.zero_grad()
        with torch.cuda.amp.autocast():  # expect: RO209
            outputs = net(inputs)
            loss = criterion(outputs, labels)  # expect: RO502
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        if i % 100 == 99:
            scaler.update()  # expect: RO103
            print(epoch, i, loss.item())

# In[5]:
net.eval()
correct = 0
with torch.no_grad():
    for inputs, labels in testloader:
        with torch.cuda.amp.autocast():  # expect: RO209
            outputs = net(inputs.cuda())
        correct += (outputs.argmax(1).cpu() == labels).sum().item()
print(correct / len(testset))
