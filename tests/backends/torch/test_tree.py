"""The prefix tree computes what separate sequences would: logprobs, and the gradient of every weight."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.backends.torch import attention
from palestra.backends.torch.head import logprobs
from palestra.backends.torch.tree import Tree, TreePlan

from .conftest import load, random_tokens

sequences = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=60), min_size=1, max_size=8)


@settings(deadline=None)
@given(sequences)
def test_every_sequence_is_a_path_through_the_tree(given_sequences: list[list[int]]) -> None:
    tree = Tree.of(given_sequences)
    for sequence, rows in zip(given_sequences, tree.rows, strict=True):
        assert [tree.tokens[row] for row in rows] == sequence
        assert [tree.positions[row] for row in rows] == list(range(len(sequence)))
    assert len(tree.tokens) <= sum(map(len, given_sequences))
    for node in tree.nodes:
        assert node.start < node.end <= node.subtree_end


def test_what_is_shared_is_laid_out_once() -> None:
    prompt = list(range(100, 140))
    tree = Tree.of([[*prompt, 1], [*prompt, 2], [*prompt, 1]])
    assert len(tree.tokens) == len(prompt) + 2
    assert tree.rows[0] == tree.rows[2]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_logprobs_and_gradients_are_those_of_separate_sequences(tiny: Callable[[str], Path], kind: str) -> None:
    from transformers import AutoModelForCausalLM

    packed, plain = load(tiny(kind)), AutoModelForCausalLM.from_pretrained(tiny(kind), attn_implementation="eager")
    chance = random.Random(0)
    beginning = random_tokens(chance, 20)
    batch = [beginning + random_tokens(chance, chance.randrange(1, 70)) for _ in range(5)]
    batch += [batch[0][:-3], batch[0] + random_tokens(chance, 600)]  # a prefix of another, and more rows than one block
    tree = Tree.of(batch)
    assert len(tree.tokens) < sum(map(len, batch))
    ids, positions = torch.tensor([tree.tokens]), torch.tensor([tree.positions])
    hidden = packed.base_model(ids, position_ids=positions, use_cache=False, plan=TreePlan(tree.nodes)).last_hidden_state[0]
    ours = theirs = torch.zeros(())
    for sequence, rows in zip(batch, tree.rows, strict=True):
        targets = torch.tensor(sequence[1:])
        own = logprobs(hidden[rows[:-1]], packed.get_output_embeddings().weight, targets, 0.7)
        logits = plain(torch.tensor([sequence])).logits[0, :-1] / 0.7
        reference = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
        assert torch.allclose(own, reference, atol=1e-4)
        weights = torch.linspace(-1, 1, len(targets))
        ours, theirs = ours + (own * weights).sum(), theirs + (reference * weights).sum()
    ours.backward()
    theirs.backward()
    for (name, a), (_, b) in zip(packed.named_parameters(), plain.named_parameters(), strict=True):
        if b.grad is not None and b.grad.norm() > 0:
            assert (a.grad - b.grad).norm() < 1e-3 * b.grad.norm(), name


@pytest.mark.parametrize("causal", [False, True])
def test_attention_without_the_cpu_kernel_is_the_same(monkeypatch: pytest.MonkeyPatch, causal: bool) -> None:
    """Other devices take the plain path, which can be tried here too."""
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    kernel = attention.attend(query, key, value, 0.3, causal=causal)
    monkeypatch.setattr(attention, "_has_kernel", lambda _: False)
    plain = attention.attend(query, key, value, 0.3, causal=causal)
    for a, b in zip(kernel, plain, strict=True):
        assert torch.allclose(a, b, atol=1e-5)
