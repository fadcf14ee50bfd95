"""Communication between ranks: sync passes, and sampled collectives.

`gradient_sync`: when the gradients of DistributedDataParallel were ready. `collective_sampler`: when collectives are
sampled; `kernels` see each collective of a sample. Other parts of the tracer import only this module.
"""

from dpmon.tracer.collectives.collective_sampler import CollectiveSampler
from dpmon.tracer.collectives.gradient_sync import GradientSync

__all__ = ["CollectiveSampler", "GradientSync"]
