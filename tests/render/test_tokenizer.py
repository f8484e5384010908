import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from palestra.errors import ModelError
from palestra.render.tokenizer import Own, Tokenizer, load

MakeFolder = Callable[..., Path]
MARKS = ["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "<|begin_of_text|>", "<|eot_id|>"]


@pytest.fixture(scope="module", params=["smollm2", "qwen3", "llama3"])
def tokenizer(request: pytest.FixtureRequest, make_folder: MakeFolder) -> Tokenizer:
    return load(make_folder(request.param))


@given(st.lists(st.sampled_from(MARKS) | st.text(max_size=6), max_size=8).map("".join))
def test_plain_text_never_becomes_a_marker(tokenizer: Tokenizer, text: str) -> None:
    tokens = tokenizer.encode([text])
    assert not tokenizer.ids(*tokenizer.markers) & set(tokens)
    assert tokenizer.decode(tokens) == text


def test_own_text_is_encoded_as_the_whole_tokenizer_does(tokenizer: Tokenizer) -> None:
    text = "<|im_start|>user\nWhat is the weather?<|im_end|>\n<tool_call>\n{}\n</tool_call><|eot_id|><|start_header_id|>"
    whole = tokenizers.Tokenizer.from_file(str(tokenizer.folder / "tokenizer.json"))
    assert tokenizer.encode([Own(text)]) == whole.encode(text, add_special_tokens=False).ids


def test_text_on_both_sides_of_a_piece_is_encoded_together(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode([Own("What is the wea"), "ther in", Own(" Paris")]) == tokenizer.encode(
        ["What is the weather in Paris"]
    )


def test_a_marker_that_is_also_a_word_cannot_be_written_by_text(make_folder: MakeFolder) -> None:
    folder = make_folder("smollm2")
    data = json.loads((folder / "tokenizer.json").read_text())
    data["model"]["vocab"] |= {"<m": 500, "<m>": 501}
    data["model"]["merges"] += [["<", "m"], ["<m", ">"]]
    data["model"]["ignore_merges"] = True  # as Llama 3 does: a word of the vocabulary is taken whole
    data["pre_tokenizer"] = None
    data["added_tokens"].append({**data["added_tokens"][0], "id": 501, "content": "<m>"})
    (folder / "tokenizer.json").write_text(json.dumps(data))
    tokenizer = load(folder)
    assert tokenizer.encode([Own("<m>")]) == [501]
    assert tokenizer.encode(["<m>"])[0] == 500
    assert 501 not in tokenizer.encode(["<m>", "<m", ">"])


def test_a_marker_may_take_the_space_beside_it(make_folder: MakeFolder) -> None:
    folder = make_folder("smollm2")
    data = json.loads((folder / "tokenizer.json").read_text())
    data["added_tokens"].append({**data["added_tokens"][0], "id": 0, "content": "<|end|>", "rstrip": True, "lstrip": True})
    (folder / "tokenizer.json").write_text(json.dumps(data))
    tokenizer = load(folder)
    assert tokenizer.encode(["a ", Own("<|end|>"), "\n b"]) == tokenizer.encode(["a", Own("<|end|>"), "b"])


def test_halves_of_surrogate_pairs_do_not_crash(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode(["a\ud800b"])) == "a\ufffdb"


def test_marks_are_found_by_id_where_they_are_tokens(make_folder: MakeFolder) -> None:
    tokenizer = load(make_folder("qwen3"))
    tokens = tokenizer.encode(["<think>", Own("<think>")])
    assert tokenizer.split(tokens, ["<think>"]) == ["<think>", Own("<think>"), ""]


def test_marks_are_found_by_letters_where_they_are_no_tokens(make_folder: MakeFolder) -> None:
    tokenizer = load(make_folder("smollm2"))
    assert tokenizer.split(tokenizer.encode(["a<think>b"]), ["<think>"]) == ["a", Own("<think>"), "b"]


def test_the_template_may_stand_in_the_tokenizer_config(make_folder: MakeFolder) -> None:
    folder = make_folder("smollm2")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "one"}))
    assert load(folder).template == "one"
    several = [{"name": "rag", "template": "two"}, {"name": "default", "template": "three"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    assert load(folder).template == "three"


@pytest.mark.parametrize(
    ("file", "text", "problem"),
    [
        ("tokenizer.json", "{", "tokenizer.json cannot be read"),
        ("tokenizer.json", "[]", "holds no JSON object"),
        ("tokenizer.json", "{}", "only BPE"),
        ("tokenizer.json", '{"model": {"type": "Unigram"}}', "a Unigram tokenizer; only BPE"),
        ("tokenizer.json", '{"model": {"type": "BPE"}, "added_tokens": []}', "tokenizer.json cannot be used"),
        ("tokenizer_config.json", "nonsense", "tokenizer_config.json cannot be read"),
        ("config.json", "\x00", "config.json cannot be read"),
    ],
)
def test_broken_files_are_named(make_folder: MakeFolder, file: str, text: str, problem: str) -> None:
    folder = make_folder("smollm2")
    (folder / file).write_text(text)
    with pytest.raises(ModelError, match=problem) as caught:
        load(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer.json here; give the folder"):
        load(tmp_path / "nowhere")
