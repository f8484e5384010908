"""The provider of sandboxes that a config names."""

from dataclasses import replace

from palestra.config import AnySandbox, ContainerSandbox, LocalSandbox
from palestra.protocols import Sandboxes
from palestra.sandbox.bubblewrap import Bubblewrap
from palestra.sandbox.container import Container
from palestra.sandbox.limits import MIB, Limits
from palestra.sandbox.local import Local
from palestra.sandbox.pool import Pool


def make_provider(config: AnySandbox) -> Sandboxes:
    if isinstance(config, LocalSandbox):
        return Local()
    limits = Limits(memory=config.memory_mb * MIB, processes=config.processes, cpus=config.cpus, network=config.network)
    provider: Sandboxes
    if isinstance(config, ContainerSandbox):
        provider = Container(config.image, limits, config.engine, config.options)
    else:
        provider = Bubblewrap(replace(limits, disk=config.disk_mb * MIB), cache=config.cache, base=config.base)
    return Pool(provider, config.warm) if config.warm else provider
