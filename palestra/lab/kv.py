"""Who holds how much of the engine's KV."""

from collections import Counter
from collections.abc import Iterable, Iterator

from palestra.lab.context import Context, Prompt


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
        self.used += self.more(context, tokens)
        if context.prompt is not None and not context.held:
            context.prompt.holders += 1
        context.held = tokens

    def rest(self, context: Context) -> None:
        """A context is not served any more, and keeps what it holds."""
        self.idle[context] = None
        self.idle_tokens += context.held

    def release(self, context: Context) -> None:
        self._no_longer_idle(context)
        if context.prompt is not None and context.held:
            context.prompt.holders -= 1
            if not context.prompt.holders:
                context.prompt.computed = False
                self.used -= context.prompt.tokens
        self.used -= context.held
        context.held = 0

    def more(self, context: Context, tokens: int) -> int:
        """What would be used in addition, were it to hold so many."""
        prompt = context.prompt.tokens if context.prompt is not None and not context.prompt.holders else 0
        return prompt + tokens - context.held

    def freed(self, victims: Iterable[Context], taker: Context) -> Iterator[tuple[Context, int]]:
        """Each with what is free for the taker in addition once it has lost its KV as well; not the prompt that both share."""
        lost: Counter[Prompt] = Counter()
        for context in victims:
            tokens, prompt = context.held, context.prompt
            if prompt is not None and prompt is not taker.prompt:
                lost[prompt] += 1
                tokens += prompt.tokens if lost[prompt] == prompt.holders else 0
            yield context, tokens

    def _no_longer_idle(self, context: Context) -> None:
        if context in self.idle:
            del self.idle[context]
            self.idle_tokens -= context.held
