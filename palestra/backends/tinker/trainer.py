"""Training over the Tinker API. Samples are sent as soon as their scale is known, and nothing is waited for before the step.

Weights and optimizer stay on the server: a checkpoint here holds the name of a state there.
"""

import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import tinker
import torch
from tinker import types

from palestra import loss as losses
from palestra.backends.tinker.calls import Line, in_background
from palestra.backends.tinker.datum import Server, loss_name, needs_totals, to_datum, total
from palestra.backends.tinker.sampler import TinkerSampler
from palestra.config import Loss
from palestra.errors import InfrastructureError, ModelError
from palestra.trajectory import Sample

STATE = "tinker-state.json"


class TinkerTrainer:
    def __init__(
        self,
        service: tinker.ServiceClient,
        client: tinker.TrainingClient,
        sampler: TinkerSampler,
        line: Line,
        *,
        server: Server,
        unit_weights: bool,
        max_grad_norm: float,
        model: str,
    ) -> None:
        self._service, self._client, self._sampler, self._line = service, client, sampler, line
        self._server, self._unit_weights, self._max_grad_norm, self._model = server, unit_weights, max_grad_norm, model
        self._version = 0
        self._names = 0
        self._loss: Loss | None = None
        self._held: list[Sample] = []
        self._sent: list[tuple[Sequence[Sample], Any]] = []

    @property
    def version(self) -> int:
        return self._version

    # --- gradients -------------------------------------------------------------------------------------------------

    async def accumulate(self, samples: Sequence[Sample], loss: Loss) -> None:
        if self._loss is not None and loss != self._loss:
            raise ValueError("one step takes one loss")
        self._loss = loss
        if needs_totals(loss, self._server, self._unit_weights):
            self._held.extend(samples)
        else:
            self._send(samples, [to_datum(sample, loss, self._server) for sample in samples], loss)

    def _send(self, samples: Sequence[Sample], data: list[types.Datum], loss: Loss) -> None:
        name, constants = loss_name(loss, self._server)
        self._sent.append((samples, self._client.forward_backward(data, name, constants)))

    async def step(self, learning_rate: float) -> Mapping[str, float]:
        if self._loss is None:
            raise ValueError("step() needs samples: nothing was accumulated")
        loss, held = self._loss, self._held
        if held:
            totals = total(held)
            self._send(held, [to_datum(sample, loss, self._server, totals) for sample in held], loss)
        clip = self._max_grad_norm if self._server == "tinker" else 0.0
        # The optimizer of the embedded backend, and of everyone who leaves AdamW as it is.
        adam = types.AdamParams(learning_rate=learning_rate, beta1=0.9, beta2=0.999, eps=1e-8, grad_clip_norm=clip)
        sent, self._sent, self._held, self._loss = self._sent, [], [], None
        async with self._line.calling("take a training step"):
            stepped = self._client.optim_step(adam)
            outputs = [(samples, await future) for samples, future in sent]
            applied = await stepped
            logprobs = [_logprobs(samples, output) for samples, output in outputs]
        everything = [sample for samples, _ in sent for sample in samples]
        measured = _measure(everything, torch.cat([torch.tensor(values) for values in logprobs]), loss)
        norms = [value for name, value in (applied.metrics or {}).items() if name.endswith("grad_norm")]
        return {**({"grad_norm": norms[0]} if norms else {}), **measured}

    async def discard(self) -> None:
        """The API cannot forget gradients. So a step is taken with them, and all that it changed is put back."""
        sent, self._sent, self._held, self._loss = self._sent, [], [], None
        if not sent:
            return
        async with self._line.calling("forget gradients"):
            state = await self._client.save_state(self._name("discard"))
            await self._client.optim_step(types.AdamParams(learning_rate=0.0))
            await self._client.load_state_with_optimizer(state.path)

    async def logprobs(self, samples: Sequence[Sample], temperature: float) -> list[list[float]]:
        if temperature != 1:
            raise ValueError("the Tinker API gives logprobs at temperature 1 only")
        everywhere = [Sample(s.tokens, [False] + [True] * (len(s.tokens) - 1), s.logprobs, s.versions, 0.0) for s in samples]
        plain = Loss(kind="cross_entropy", reduction="sequence_mean")
        data = [to_datum(sample, plain, self._server, total(everywhere)) for sample in everywhere]
        async with self._line.calling("give logprobs"):
            output = await self._client.forward(data, "cross_entropy")
            flat = iter(_logprobs(everywhere, output))
        return [[0.0, *(next(flat) for _ in sample.tokens[1:])] for sample in samples]

    # --- weights ---------------------------------------------------------------------------------------------------

    async def publish(self) -> int:
        await self.publish_as(self._version + 1)
        return self._version

    async def publish_as(self, version: int) -> None:
        async with self._line.calling("give weights to its sampler"):
            client = await in_background(self._client.save_weights_and_get_sampling_client)
        self._version = version
        self._sampler.replace_client(client, version)

    async def save(self, folder: Path) -> None:
        async with self._line.calling("save its state"):
            state = await self._client.save_state(self._name("step"))
        noted = {"state": state.path, "version": self._version, "model": self._model, "server": self._line.address}
        (folder / STATE).write_text(json.dumps(noted, indent=1) + "\n", encoding="utf-8")

    async def load(self, folder: Path) -> None:
        noted = json.loads((folder / STATE).read_text(encoding="utf-8"))
        if noted["model"] != self._model:
            raise ModelError(f"checkpoint {folder} is of {noted['model']!r}; resume with the config it was made with")
        async with self._line.calling(f"load its state {noted['state']}, which this run goes on from,"):
            await self._client.load_state_with_optimizer(noted["state"])
        await self.publish_as(noted["version"])

    async def export(self, folder: Path) -> None:
        name = self._name("export")
        rest = self._service.create_rest_client()
        async with self._line.calling("hand out its weights"):
            await self._client.save_weights_for_sampler(name)
            run = self._client.model_id
            kept = name if self._server == "skyrl" else f"sampler_weights/{name}"
            archive = await rest.get_checkpoint_archive_url_async(run, kept)
            async with httpx.AsyncClient(timeout=self._line.seconds, follow_redirects=True) as plain:
                packed = await plain.get(archive.url)
        if packed.status_code != 200:
            raise InfrastructureError(
                f"the Tinker server at {self._line.address} does not hand out {archive.url}: {packed.status_code}"
            )
        with tarfile.open(fileobj=io.BytesIO(packed.content)) as files:
            files.extractall(folder, filter="data")

    def _name(self, what: str) -> str:
        self._names += 1
        return f"{what}-{self._version:05d}-{self._names}"


def _logprobs(samples: Sequence[Sample], output: types.ForwardBackwardOutput) -> list[float]:
    """Of the sampled tokens, one after the other."""
    values: list[float] = []
    for sample, given in zip(samples, output.loss_fn_outputs, strict=True):
        row = zip(sample.mask[1:], given["logprobs"].tolist(), strict=True)
        values.extend(float(value) for sampled, value in row if sampled)
    return values


def _measure(samples: Sequence[Sample], logprobs: torch.Tensor, loss: Loss) -> dict[str, float]:
    """What the step measured, computed from the server's logprobs as the embedded backend does."""
    lengths = torch.tensor([sum(sample.mask) for sample in samples])
    sequence = torch.repeat_interleave(torch.arange(len(samples)), lengths)
    tokens = losses.Tokens(
        old_logprobs=torch.tensor([x for s in samples for x, sampled in zip(s.logprobs, s.mask, strict=True) if sampled]),
        advantages=torch.tensor([s.advantage for s in samples])[sequence],
        weights=torch.tensor([s.weight for s in samples])[sequence],
        sequence=sequence,
        lengths=lengths,
    )
    summed, sums = losses.policy_loss(logprobs, tokens, loss)
    totals = total(samples)
    count = float(len(logprobs))
    means = {name: value.item() / (1 if name.endswith("_max") else count) for name, value in sums.items()}
    scale = losses.normaliser(loss, totals.token_weight, totals.sequence_weight)
    return {"tokens": count, "loss": summed.item() / scale, **means}
