"""What a type checker finds: a line that has a mistake says so."""

import matplotlib.axes
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

import regimes


def attach(bare: nn.Module, model: DistributedDataParallel, mesh: DeviceMesh) -> None:
    regimes.attach(42, polciy="accordion", nonsense=1)  # a number, two unknown arguments
    regimes.attach(bare)  # a model without DistributedDataParallel
    hook = regimes.attach(model, compressor=regimes.PowerSGD(rank=4))
    hook.epochs_end(lr=0.1)  # a misspelt method
    regimes.attach(model, compressor=regimes.Accordion())  # a policy as compressor
    regimes.attach(model, policy=regimes.PowerSGD())  # a compressor as policy
    regimes.attach(model, every="epochs")  # a word that it does not know
    regimes.attach(model, signal="updates")  # another
    regimes.attach(model, bare.parameters())  # parameters as optimiser
    regimes.attach(model, level=4)  # a level without its compressor
    regimes.attach(model, scatter={"level": 4})  # what is for shards alone
    regimes.attach_replicas(bare, 4)  # a number as mesh
    regimes.attach_replicas(model=bare)  # no mesh
    regimes.attach_shards(bare, mesh, scatter={}, compressor="topk")  # two kinds of reduction
    regimes.PowerSGD(rank="four")  # a text as rank
    regimes.PowerSGD(bits=4)  # another compressor's word
    regimes.Accordion(low=4, high=1)  # numbers as names of levels
    regimes.Accordion(low=regimes.Static())  # a policy as level
    regimes.RecordOptions(check_evry=5)  # a misspelt option


def call(model: nn.Module, ax: matplotlib.axes.Axes) -> None:
    regimes.local_steps(model, torch.optim.SGD(model.parameters()), policy=[32])  # a list as period
    pair = torch.zeros(2, 1), torch.zeros(2)
    regimes.simulate(model, pair, pair, out="runs", wokers=4)  # a misspelt argument
    regimes.load("runs").epoch.head()  # a misspelt attribute
    regimes.simulate(model, 1, pair, out="runs")  # a number as data
    regimes.harm("smoke", minuts=3)  # a misspelt argument
    regimes.harm("smoke", epochs="3")  # a text as number
    regimes.plot("runs", against="bytes")  # a word that it does not know
    regimes.plot("runs", ax=ax).save("mine")  # not of a figure of one's own
    regimes.plot("runs").sav("mine")  # a misspelt method
    regimes.compare("runs", basline="low")  # a misspelt argument
    regimes.atach(model)  # a misspelt name
