"""The provider of sandboxes that a config names."""

from palestra.config import AnySandbox, LocalSandbox
from palestra.protocols import Sandboxes
from palestra.sandbox.bubblewrap import Bubblewrap
from palestra.sandbox.limits import MIB, Limits
from palestra.sandbox.local import Local
from palestra.sandbox.pool import Pool


def make_provider(config: AnySandbox) -> Sandboxes:
    if isinstance(config, LocalSandbox):
        return Local()
    limits = Limits(
        memory=config.memory_mb * MIB,
        disk=config.disk_mb * MIB,
        processes=config.processes,
        cpus=config.cpus,
        network=config.network,
    )
    provider: Sandboxes = Bubblewrap(limits, cache=config.cache, base=config.base)
    return Pool(provider, config.warm) if config.warm else provider
