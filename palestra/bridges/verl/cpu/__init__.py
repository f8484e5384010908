"""What verl lacks on a machine without a GPU: a platform, and a rollout server. verl loads it as a plugin (see `driving`), and
only there; its trainer, agent-loop workers, FSDP2 engine, losses and checkpoints are verl's own here too.
"""

from palestra.bridges.verl.cpu import platform, server

platform.install()
server.install()
