"""The embedded sampler: one thread that batches continuously over all sessions, between whose turns it keeps their keys and
values. Requests arrive and leave between decode steps; so do new weights, and every token carries the version that wrote it.
"""

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from palestra.backends.torch.cache import Cache, Path, Shape, Tail, agreement, length, shelf_for
from palestra.backends.torch.draw import draw
from palestra.backends.torch.packed import pack, replace_weight
from palestra.backends.torch.pieces import Piece, PiecesPlan
from palestra.errors import InfrastructureError
from palestra.protocols import Capacity, Sampling
from palestra.trajectory import Completion, FinishReason

PREFILL_TOKENS = 1024
"""Prompt tokens computed in one pass: enough to be efficient, few enough that decoding goes on beside them."""

SHARE = 16
"""Prompts share trunks in whole multiples of so many tokens: fewer different lengths make fewer attention calls."""

WORTH = 512
"""Behind a trunk, a second one is worth its own attention calls in every later step when it saves computing so many tokens."""


HEADROOM = 0.05
"""Who comes in leaves this share of the KV tokens free for those under way to grow: it would be evicted soon otherwise."""


@dataclass(eq=False)
class _Request:
    tokens: list[int]
    sampling: Sampling
    deliver: Callable[[Completion | Exception], None]
    written: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    cancelled: bool = False


@dataclass(eq=False)
class _Sequence:
    """A session as the engine sees it."""

    random: random.Random
    held: list[int] = field(default_factory=list)
    """The tokens whose keys and values are in the trunks of its path and in its tail."""
    path: Path | None = None
    tail: Tail | None = None
    request: _Request | None = None


class TorchSampler:
    def __init__(self, model: Any, kv_tokens: int) -> None:
        pack(model)
        self._model = model
        self._device: torch.device = model.device
        self._dtype: torch.dtype = model.dtype
        config = model.config
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = Shape(config.num_hidden_layers, config.num_key_value_heads, size, model.dtype, model.device)
        self._cache = Cache(shape)
        self._sharing = config.num_attention_heads // config.num_key_value_heads
        self._capacity = Capacity(kv_tokens)
        self._version = 0
        self._weights = threading.Lock()
        self._news = threading.Condition()
        self._arrived: list[tuple[_Sequence, _Request]] = []
        self._left: list[_Sequence] = []
        self._closed = False
        self._ended: str | None = None
        self._sequences: dict[int, _Sequence] = {}
        self._thread = threading.Thread(target=self._work, name="palestra-sampler", daemon=True)
        self.prefilled_tokens = 0
        self.sampled_tokens = 0

    @property
    def capacity(self) -> Capacity:
        return self._capacity

    @property
    def version(self) -> int:
        return self._version

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        with self._news:
            self._closed = True
            self._news.notify()
        if self._thread.is_alive():
            self._thread.join()

    @asynccontextmanager
    async def session(self, seed: int, expected_tokens: int) -> AsyncIterator["TorchSession"]:
        if expected_tokens > self._capacity.kv_tokens:
            raise InfrastructureError(
                f"a rollout of {expected_tokens} tokens does not fit the sampler's {self._capacity.kv_tokens} KV tokens"
            )
        sequence = _Sequence(random.Random(seed))
        try:
            yield TorchSession(self, sequence)
        finally:
            with self._news:
                self._left.append(sequence)
                self._news.notify()

    @torch.no_grad()
    def replace_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Between two decode steps, take new weights. What is under way goes on with the keys and values it has."""
        with self._weights:
            for name, tensor in weights.items():
                replace_weight(self._model, name, tensor)
            self._version = version
            self._cache.drop_unused(version)

    def submit(self, sequence: _Sequence, request: _Request) -> None:
        with self._news:
            if self._ended is not None:
                raise InfrastructureError(f"the sampler has stopped: {self._ended}")
            self._arrived.append((sequence, request))
            self._news.notify()

    # --- the engine's thread -------------------------------------------------------------------------------------

    def _work(self) -> None:
        reason = "it was closed"
        try:
            while self._wait_for_work():
                with self._weights, torch.inference_mode():
                    self._take_news()
                    self._step()
        except Exception as error:  # noqa: BLE001  # the boundary of the thread: whatever it was, those who wait must hear of it
            reason = f"it failed: {type(error).__name__}: {error}"
        with self._news:
            self._ended = reason
            waiting = [request for _, request in self._arrived]
            waiting += [sequence.request for sequence in self._sequences.values() if sequence.request is not None]
        for request in waiting:
            request.deliver(InfrastructureError(f"the sampler has stopped: {reason}"))

    def _wait_for_work(self) -> bool:
        """False when it is time to stop."""
        with self._news:
            while not (self._closed or self._arrived or self._left or self._running()):
                self._news.wait()
            return not self._closed

    def _take_news(self) -> None:
        """Take in who came, went, or no longer wants an answer."""
        with self._news:
            arrived, self._arrived = self._arrived, []
            left, self._left = self._left, []
        for sequence, request in arrived:
            sequence.request = request
            self._sequences[id(sequence)] = sequence
        for sequence in self._running():
            if sequence.request is not None and sequence.request.cancelled:
                sequence.request = None
        for sequence in left:
            self._forget(sequence)
            self._sequences.pop(id(sequence), None)

    def _running(self) -> list[_Sequence]:
        return [sequence for sequence in self._sequences.values() if sequence.request is not None]

    def _step(self) -> None:
        placed = self._placed()
        pieces, writers = self._plan(placed)
        if not pieces:
            return
        plan = PiecesPlan(pieces, self._sharing, self._dtype, self._device)
        rows = plan.last_rows()
        wanted = [rows[place] for _, place in writers]
        output = self._model(
            input_ids=torch.tensor([plan.tokens()], device=self._device),
            position_ids=torch.tensor([plan.positions()], device=self._device),
            logits_to_keep=torch.tensor(wanted, dtype=torch.long, device=self._device),
            use_cache=False,
            plan=plan,
        )
        plan.done()
        for sequence, place in writers:
            sequence.held.extend(pieces[place].tokens)
        if writers:
            self._write([sequence for sequence, _ in writers], output.logits[0])

    def _plan(self, sequences: Sequence[_Sequence]) -> tuple[list[Piece], list[tuple[_Sequence, int]]]:
        """What the next pass computes: trunks that are not there yet, and new tokens of sequences whose path is. With the
        sequences whose next token can be drawn afterwards comes the place of their piece."""
        pieces: list[Piece] = []
        writers: list[tuple[_Sequence, int]] = []
        room = PREFILL_TOKENS
        filling: set[int] = set()
        for sequence in sequences:
            assert sequence.path is not None
            assert sequence.request is not None
            trunk = next((use.trunk for use in sequence.path if use.trunk.filled < use.tokens), None)
            if trunk is not None:
                if id(trunk) not in filling and room > 0:
                    filling.add(id(trunk))
                    first = length(trunk.path) + trunk.filled
                    pieces.append(Piece(trunk.whole[first : first + room], trunk.path, trunk))
                    room -= len(pieces[-1].tokens)
                continue
            pending = sequence.request.tokens[len(sequence.held) :]
            new = pending if len(pending) == 1 else pending[:room]
            if not new:
                continue
            room -= len(new) if len(pending) > 1 else 0
            sequence.tail = self._cache.reserve(sequence.tail, len(sequence.held) - length(sequence.path) + len(new))
            pieces.append(Piece(new, sequence.path, sequence.tail))
            if len(new) == len(pending):
                writers.append((sequence, len(pieces) - 1))
            else:
                sequence.held.extend(new)
        self.prefilled_tokens += PREFILL_TOKENS - room
        return pieces, writers

    def _write(self, sequences: Sequence[_Sequence], logits: Tensor) -> None:
        requests = [sequence.request for sequence in sequences if sequence.request is not None]
        temperatures = torch.tensor([request.sampling.temperature for request in requests], device=self._device)
        uniforms = torch.tensor([sequence.random.random() for sequence in sequences], dtype=torch.float64, device=self._device)
        tokens, logprobs = draw(logits, temperatures, uniforms)
        for sequence, request, token, logprob in zip(sequences, requests, tokens.tolist(), logprobs.tolist(), strict=True):
            request.written.append(token)
            request.logprobs.append(logprob)
            request.versions.append(self._version)
            request.tokens.append(token)
            finish: FinishReason | None = None
            if token in request.sampling.stop_ids:
                finish = "stop"
            elif len(request.written) >= request.sampling.max_tokens:
                finish = "length"
            if finish is not None:
                sequence.request = None
                request.deliver(Completion(request.written, request.logprobs, request.versions, finish))
        self.sampled_tokens += len(sequences)

    # --- where a sequence's keys and values are -------------------------------------------------------------------

    def _placed(self) -> list[_Sequence]:
        """Those who can go on. Who has no room waits, and nobody who came later goes in before."""
        placed, waiting = [], False
        for sequence in self._running():
            if sequence.path is None and waiting:
                continue
            if self._place(sequence):
                placed.append(sequence)
            else:
                waiting = True
        return placed

    def _place(self, sequence: _Sequence) -> bool:
        """Give the sequence a path, or find that what it holds still fits. False when it has to wait."""
        request = sequence.request
        assert request is not None
        if sequence.path is not None:
            if request.written:
                return True
            if self._keep_prefix(sequence, request.tokens):
                self._make_room(0, growing=True)  # for as far as that goes: who is under way is not sent back
                return True
            self._forget(sequence)
        prompt = request.tokens[:-1]
        trunk, agreed = self._cache.longest_trunk(prompt, self._version)
        if agreed < len(prompt):
            agreed -= agreed % SHARE
        path = trunk.path_to(agreed) if trunk is not None else ()
        self._cache.hold(path)  # before room is made, which drops what nobody holds
        if not self._make_room(len(prompt) - agreed + shelf_for(request.sampling.max_tokens)):
            self._cache.let_go(path, self._version)
            return False
        if len(prompt) - agreed >= SHARE and (not path or self._sharers(prompt) * (len(prompt) - agreed) >= WORTH):
            longer = self._cache.add_trunk(path, prompt, self._version).path_to(len(prompt))
            self._cache.hold(longer)
            self._cache.let_go(path, self._version)  # the new trunk holds it
            path = longer
        sequence.path, sequence.held = path, prompt[: length(path)]
        return True

    def _sharers(self, prompt: Sequence[int]) -> int:
        """How many other sequences wait with the same prompt."""
        waiting = [s.request.tokens for s in self._sequences.values() if s.request is not None and s.path is None]
        return sum(tokens[:-1] == prompt for tokens in waiting) - 1

    def _keep_prefix(self, sequence: _Sequence, tokens: Sequence[int]) -> bool:
        """Whether the new tokens begin with all of the path; if so, cut the tail to what still agrees."""
        assert sequence.path is not None
        held = sequence.held
        agreed = len(held) if held == tokens[: len(held)] else agreement(held, tokens)
        agreed = min(agreed, len(tokens) - 1)
        if agreed < length(sequence.path):
            return False
        if sequence.tail is not None:
            sequence.tail.length = agreed - length(sequence.path)
        del held[agreed:]
        return True

    def _make_room(self, tokens: int, growing: bool = False) -> bool:
        """Drop what nobody uses until so many tokens fit. False when those at work must end first.

        A session that waits for a tool keeps what it has: it is evicted for one that is under way and grows, the latest started
        first, but for a newcomer only when nobody is at work who would ever make room.
        """
        limit = self._capacity.kv_tokens * (1 if growing else 1 - HEADROOM)
        while self._committed() + tokens > limit:
            unused = next((trunk for trunk in self._cache.trunks if trunk.users == 0), None)
            holders = [s for s in self._sequences.values() if s.path is not None]
            idle = [s for s in holders if s.request is None]
            if unused is not None:
                self._cache.drop(unused, self._version)
            elif idle and (growing or len(idle) == len(holders)):
                self._forget(idle[-1])
            else:
                return not holders
        return True

    def _committed(self) -> int:
        """Tokens of trunks, and of the rows that tails have or will need before their present reply ends."""
        rows = 0
        for sequence in self._sequences.values():
            if sequence.path is not None:
                needed = len(sequence.held)
                if sequence.request is not None:
                    request = sequence.request
                    needed = len(request.tokens) + request.sampling.max_tokens - len(request.written)
                row = sequence.tail.shelf.capacity if sequence.tail is not None else 0
                rows += max(row, shelf_for(needed - length(sequence.path)))
        return rows + sum(trunk.tokens for trunk in self._cache.trunks)

    def _forget(self, sequence: _Sequence) -> None:
        if sequence.tail is not None:
            self._cache.release(sequence.tail)
        if sequence.path is not None:
            self._cache.let_go(sequence.path, self._version)
        sequence.path, sequence.tail, sequence.held = None, None, []


class TorchSession:
    """One rollout's line to the sampler."""

    def __init__(self, sampler: TorchSampler, sequence: _Sequence) -> None:
        self._sampler, self._sequence = sampler, sequence

    async def sample(self, tokens: Sequence[int], sampling: Sampling) -> Completion:
        if not tokens:
            raise ValueError("a prompt needs at least one token")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Completion] = loop.create_future()

        def settle(result: Completion | Exception) -> None:
            if answer.done():
                return
            if isinstance(result, Exception):
                answer.set_exception(result)
            else:
                answer.set_result(result)

        def deliver(result: Completion | Exception) -> None:
            with suppress(RuntimeError):  # its loop has ended, and with it who asked
                loop.call_soon_threadsafe(settle, result)

        request = _Request(list(tokens), sampling, deliver)
        self._sampler.submit(self._sequence, request)
        try:
            return await answer
        except asyncio.CancelledError:
            request.cancelled = True
            raise
