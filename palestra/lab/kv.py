"""Who holds how much of the engine's KV."""

from palestra.lab.context import Context


class Kv:
    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        """All there is."""
        self.used = 0
        self.idle: dict[Context, None] = {}
        """Contexts that hold some and are not served, the least recently used first."""
        self.idle_tokens = 0

    def hold(self, context: Context, tokens: int) -> None:
        """A context that is served holds so many from now on."""
        self._no_longer_idle(context)
        self.used += tokens - context.held
        context.held = tokens

    def rest(self, context: Context) -> None:
        """A context is not served any more, and keeps what it holds."""
        self.idle[context] = None
        self.idle_tokens += context.held

    def release(self, context: Context) -> None:
        self._no_longer_idle(context)
        self.used -= context.held
        context.held = 0

    def _no_longer_idle(self, context: Context) -> None:
        if context in self.idle:
            del self.idle[context]
            self.idle_tokens -= context.held
