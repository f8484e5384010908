"""Rows of all known shapes become instances; what is wrong with a file or a row is said in one line."""

import gzip
import json
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
from swe.bench.conftest import SHARED, needs_data

from palestra.errors import TaskError
from palestra.swe.bench.instance import R2E_PARSER, Instance, from_row
from palestra.swe.bench.loading import load

Row = Mapping[str, object]


def test_lines_plain_and_packed_hold_the_same(tmp_path: Path, row: Row) -> None:
    text = f"{json.dumps(row)}\n\n{json.dumps({**row, 'instance_id': 'other-1'})}\n"
    (tmp_path / "a.jsonl").write_text(text)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    plain = load(str(tmp_path / "a.jsonl"))
    assert plain == load(str(tmp_path / "a.jsonl.gz"))
    assert [each.id for each in plain] == ["maker__abacus-1", "other-1"]
    assert plain[0].fails == ("tests/test_abacus.py::test_mean_of_nothing",)


def test_parquet_and_folders_hold_the_same(tmp_path: Path, row: Row) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    datasets = pytest.importorskip("datasets")
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    [expected] = load(str(tmp_path / "a.jsonl"))
    as_text = {**row, "FAIL_TO_PASS": json.dumps(row["FAIL_TO_PASS"]), "PASS_TO_PASS": json.dumps(row["PASS_TO_PASS"])}
    made = datasets.Dataset.from_list([as_text])  # on the hub the lists are texts
    parquet.write_table(made.data.table, tmp_path / "a.parquet")
    datasets.DatasetDict({"test": made}).save_to_disk(tmp_path / "saved")
    assert load(str(tmp_path / "a.parquet")) == load(str(tmp_path / "saved")) == [expected]
    with pytest.raises(TaskError, match="no split 'train'; it has test"):
        load(str(tmp_path / "saved"), "train")


def test_images_are_named_as_each_data_set_names_them(row: Row) -> None:
    official = from_row({**row, "environment_setup_commit": "c"}, "here")
    assert official.image == "swebench/sweb.eval.x86_64.maker_1776_abacus-1:latest"
    gym = {key: row[key] for key in row if key not in ("environment_yml", "eval_sh", "log_parser")}
    assert from_row(gym, "here").image == "xingyaoww/sweb.eval.x86_64.maker_s_abacus-1:latest"
    assert from_row({**row, "docker_image": "own:1"}, "here").image == "own:1"


def test_rows_of_r2e_gym(tmp_path: Path) -> None:
    change = {"header": {"file": {"path": "abacus/__init__.py"}}, "old_file_content": "a\nb", "new_file_content": "a\nc"}
    tests = {"header": {"file": {"path": "tests/test_x.py"}}, "old_file_content": "", "new_file_content": "x\n"}
    row = {
        "repo_name": "abacus",
        "docker_image": "namanjain12/abacus_final:0123",
        "commit_hash": "0123456789abcdef",
        "problem_statement": "It is wrong.",
        "parsed_commit_content": json.dumps({"file_diffs": [change, tests]}),
        "execution_result_content": json.dumps(
            {"test_file_names": ["test_1.py"], "test_file_codes": ["def test_a():\n    pass"]}
        ),
        "expected_output_json": json.dumps({"TestA.test_b": "PASSED", "test_a - x": "PASSED", "test_c": "FAILED"}),
    }
    found = from_row(row, "here")
    assert (found.id, found.parser, found.image) == ("abacus-0123456789ab", R2E_PARSER, "namanjain12/abacus_final:0123")
    assert found.fails == ("TestA.test_b", "test_a")
    for folder, diff in (("patch", found.patch), ("tests", found.test_patch)):
        (tmp_path / folder / "abacus").mkdir(parents=True)
        (tmp_path / folder / "abacus/__init__.py").write_text("a\nb")
        subprocess.run(["git", "apply", "-"], input=diff, text=True, cwd=tmp_path / folder, check=True)
    assert (tmp_path / "patch/abacus/__init__.py").read_text() == "a\nc"
    assert not (tmp_path / "patch/tests").exists()
    assert (tmp_path / "tests/r2e_tests/test_1.py").read_text() == "def test_a():\n    pass"
    with pytest.raises(TaskError, match="here: execution_result_content has no test_file_names"):
        from_row({**row, "execution_result_content": "{}"}, "here")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"repo": None}, "row 1: the field 'repo' is missing"),
        ({"base_commit": ""}, "row 1: the field 'base_commit' is empty"),
        ({"patch": 3}, "row 1: the field 'patch' is of type int; it must be a text"),
        ({"FAIL_TO_PASS": "test_a"}, "FAIL_TO_PASS is neither a list nor a list as JSON"),
        ({"PASS_TO_PASS": [1]}, "PASS_TO_PASS is of type list; it must be a list of test names"),
        ({"PASS_TO_PASS": None}, "PASS_TO_PASS is missing; it must be a list of test names"),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, row: Row, change: Row, said: str) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({**row, **change}))
    with pytest.raises(TaskError) as raised:
        load(str(tmp_path / "a.jsonl"))
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("a.jsonl", b"", "has no rows"),
        ("a.jsonl", b"\n{", "line 2: not JSON"),
        ("a.jsonl", b"[1]", "line 1: list, not an object"),
        ("a.jsonl.gz", b"not packed", "cannot be read"),
        ("a.csv", b"a,b", "ends with none of .jsonl"),
        ("a.parquet", b"nothing", "is no parquet file"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, name: str, data: bytes, said: str) -> None:
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(data)
    with pytest.raises(TaskError, match=said):
        load(str(tmp_path / name))


def test_a_data_set_that_is_not_there(tmp_path: Path, row: Row) -> None:
    with pytest.raises(TaskError, match=r"no data set .*: give a file"):
        load(str(tmp_path / "none.jsonl"))
    (tmp_path / "a.jsonl").write_text(f"{json.dumps(row)}\n" * 2)
    with pytest.raises(TaskError, match="two rows with the id 'maker__abacus-1'"):
        load(str(tmp_path / "a.jsonl"))


@needs_data
def test_the_whole_of_swe_bench_is_read() -> None:
    sets: dict[str, list[Instance]] = {name: load(str(SHARED / f"{name}.jsonl.gz")) for name in ("verified", "lite", "other")}
    assert {name: len(found) for name, found in sets.items()} == {"verified": 500, "lite": 230, "other": 1789}
    assert all(each.fails and each.patch and each.test_patch for found in sets.values() for each in found)
