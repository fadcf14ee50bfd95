"""Trains with Ray Train on two simulated nodes of a local cluster, two ranks on each."""

import sys
import tempfile

import ray
import ray.train.torch
import torch
from ray.cluster_utils import Cluster
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


def train(config: dict) -> None:
    model = ray.train.torch.prepare_model(torch.nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(config["steps"]):
        optimizer.zero_grad()
        model(torch.randn(4, 16)).sum().backward()
        optimizer.step()


if __name__ == "__main__":
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    cluster.add_node(num_cpus=2)
    ray.init(address=cluster.address)
    TorchTrainer(
        train,
        train_loop_config={"steps": int(sys.argv[1])},
        scaling_config=ScalingConfig(num_workers=4, placement_strategy="SPREAD"),
        torch_config=TorchConfig(backend="gloo"),
        run_config=RunConfig(storage_path=tempfile.mkdtemp()),
    ).fit()
    print("all steps are made", flush=True)
