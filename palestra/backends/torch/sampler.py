"""The embedded sampler: one thread that batches continuously over all sessions, between whose turns it keeps their keys and
values. Requests arrive and leave between decode steps; so do new weights, and every token carries the version that wrote it.
"""

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from palestra.backends.torch.cache import Cache, Shape, length
from palestra.backends.torch.draw import draw
from palestra.backends.torch.packed import pack, replace_weight
from palestra.backends.torch.pieces import Piece, PiecesPlan
from palestra.backends.torch.placement import Placement, Request, Strand
from palestra.errors import InfrastructureError, ModelError
from palestra.protocols import Capacity, Sampling
from palestra.trajectory import Completion, FinishReason

PREFILL_TOKENS = 1024
"""Prompt tokens computed in one pass: enough to be efficient, few enough that decoding goes on beside them."""


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
        self._placement = Placement(self._cache, kv_tokens)
        self._sharing = config.num_attention_heads // config.num_key_value_heads
        self._capacity = Capacity(kv_tokens)
        self._version = 0
        self._weights = threading.Lock()
        self._news = threading.Condition()
        self._arrived: list[tuple[Strand, Request]] = []
        self._left: list[Strand] = []
        self._closed = False
        self._ended: Exception | None = None
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
        strand = Strand(random.Random(seed))
        try:
            yield TorchSession(self, strand)
        finally:
            with self._news:
                self._left.append(strand)
                self._news.notify()

    @torch.no_grad()
    def replace_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Between two decode steps, take new weights. What is under way goes on with the keys and values it has."""
        with self._weights:
            for name, tensor in weights.items():
                replace_weight(self._model, name, tensor)
            self._version = version
            self._cache.drop_unused(version)

    def submit(self, strand: Strand, request: Request) -> None:
        with self._news:
            if self._ended is not None:
                raise _anew(self._ended)
            self._arrived.append((strand, request))
            self._news.notify()

    # --- the engine's thread -------------------------------------------------------------------------------------

    def _work(self) -> None:
        ended: Exception = InfrastructureError("the sampler has stopped: it was closed")
        try:
            while self._wait_for_work():
                with self._weights, torch.inference_mode():
                    self._take_news()
                    self._step()
        except ModelError as error:
            ended = error
        except Exception as error:  # noqa: BLE001  # the boundary of the thread: whatever it was, those who wait must hear of it
            ended = InfrastructureError(f"the sampler has stopped: it failed: {type(error).__name__}: {error}")
        with self._news:
            self._ended = ended
            waiting = [request for _, request in self._arrived]
            waiting += [strand.request for strand in self._placement.running() if strand.request is not None]
        for request in waiting:
            request.deliver(_anew(ended))

    def _wait_for_work(self) -> bool:
        """False when it is time to stop."""
        with self._news:
            while not (self._closed or self._arrived or self._left or self._placement.running()):
                self._news.wait()
            return not self._closed

    def _take_news(self) -> None:
        """Take in who came, went, or no longer wants an answer."""
        with self._news:
            arrived, self._arrived = self._arrived, []
            left, self._left = self._left, []
        for strand, request in arrived:
            strand.request = request
            self._placement.add(strand)
        for strand in self._placement.running():
            if strand.request is not None and strand.request.cancelled:
                strand.request = None
        for strand in left:
            self._placement.remove(strand, self._version)

    def _step(self) -> None:
        placed = self._placement.placed(self._version)
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
        for strand, place in writers:
            strand.held.extend(pieces[place].tokens)
        if writers:
            self._write([strand for strand, _ in writers], output.logits[0])

    def _plan(self, strands: Sequence[Strand]) -> tuple[list[Piece], list[tuple[Strand, int]]]:
        """What the next pass computes: trunks that are not there yet, and new tokens of strands whose path is. With the
        strands whose next token can be drawn afterwards comes the place of their piece."""
        pieces: list[Piece] = []
        writers: list[tuple[Strand, int]] = []
        room = PREFILL_TOKENS
        filling: set[int] = set()
        for strand in strands:
            assert strand.path is not None
            assert strand.request is not None
            trunk = next((use.trunk for use in strand.path if use.trunk.filled < use.tokens), None)
            if trunk is not None:
                if id(trunk) not in filling and room > 0:
                    filling.add(id(trunk))
                    first = length(trunk.path) + trunk.filled
                    pieces.append(Piece(trunk.whole[first : first + room], trunk.path, trunk))
                    room -= len(pieces[-1].tokens)
                continue
            pending = strand.request.tokens[len(strand.held) :]
            new = pending if len(pending) == 1 else pending[:room]
            if not new:
                continue
            room -= len(new) if len(pending) > 1 else 0
            strand.tail = self._cache.reserve(strand.tail, len(strand.held) - length(strand.path) + len(new))
            pieces.append(Piece(new, strand.path, strand.tail))
            if len(new) == len(pending):
                writers.append((strand, len(pieces) - 1))
            else:
                strand.held.extend(new)
        self.prefilled_tokens += PREFILL_TOKENS - room
        return pieces, writers

    def _write(self, strands: Sequence[Strand], logits: Tensor) -> None:
        requests = [strand.request for strand in strands if strand.request is not None]
        temperatures = torch.tensor([request.sampling.temperature for request in requests], device=self._device)
        uniforms = torch.tensor([strand.random.random() for strand in strands], dtype=torch.float64, device=self._device)
        tokens, logprobs = draw(logits, temperatures, uniforms)
        for strand, request, token, logprob in zip(strands, requests, tokens.tolist(), logprobs.tolist(), strict=True):
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
                strand.request = None
                request.deliver(Completion(request.written, request.logprobs, request.versions, finish))
        self.sampled_tokens += len(strands)


def _anew(error: Exception) -> Exception:
    """The same for one more to hear: its traceback keeps whoever heard it in memory."""
    return type(error)(*error.args)


class TorchSession:
    """One rollout's line to the sampler."""

    def __init__(self, sampler: TorchSampler, strand: Strand) -> None:
        self._sampler, self._strand = sampler, strand

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

        request = Request(list(tokens), sampling, deliver)
        self._sampler.submit(self._strand, request)
        try:
            return await answer
        except asyncio.CancelledError:
            request.cancelled = True
            raise
