"""Writes a line for each easy training bug, mended with the small recipe's tools: the data of small_warm.toml's warm start.

python recipes/swe/demonstrate.py runs/demonstrations.jsonl
"""

import json
import sys
from pathlib import Path

from factory import small_train


def main(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(task.demonstration()) for task in small_train(shown=0)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    sys.stdout.write(f"{len(lines)} bugs mended: {path}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
