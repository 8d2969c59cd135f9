"""The tree keeps the house rules of CONTRIBUTING.md, and each rule catches its breach."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.house.rules import LONG, breaches

ROOT = Path(__file__).parents[2]
BINARY = {".png", ".gz", ".npz", ".pt", ".safetensors"}


def test_the_tree_keeps_the_house_rules() -> None:
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    )  # fmt: skip
    paths = [path for path in listing.stdout.splitlines() if (ROOT / path).is_file()]
    assert "unirl/__init__.py" in paths
    texts = {path: (ROOT / path).read_text("utf-8") for path in paths if Path(path).suffix not in BINARY}
    assert [breach for path, text in texts.items() for breach in breaches(path, text)] == []


def test_the_list_of_long_files_and_functions_gives_reasons_and_nothing_stale() -> None:
    assert all(LONG.values())
    assert all((ROOT / entry.partition(":")[0]).is_file() for entry in LONG)


@pytest.mark.parametrize(
    ("path", "text", "rule"),
    [
        ("unirl/a.py", "x = getattr(y, 'z', None)", "getattr with a default"),
        ("unirl/a.py", "x = hasattr(y, 'z')", "hasattr"),
        ("unirl/a.py", "x = self.config.get('lr', 1e-4)", "a config is typed"),
        ("unirl/a.py", "try:\n    f()\nexcept Exception:\n    g()", "broad except"),
        ("unirl/a.py", "try:\n    f()\nexcept (OSError, BaseException):\n    g()", "broad except"),
        ("unirl/a.py", "try:\n    f()\nexcept:\n    g()", "broad except"),
        ("unirl/a.py", "x = torch.load(path)", "weights_only"),
        ("unirl/a.py", "x = torch.load(path, weights_only=False)", "weights_only"),
        ("unirl/a.py", "x = pickle.loads(data)", "unpickling"),
        ("unirl/a.py", "print(1)", "print outside"),
        ("unirl/a.py", "import os  #" + " noqa", "noqa without"),
        ("unirl/a.py", "import os  #" + " noqa: F401", "noqa without"),
        ("unirl/a.py", "cache = {}", "mutable state"),
        ("unirl/a.py", "cache: dict[str, int] = {}", "mutable state"),
        ("unirl/a.py", "import torch\nPredict = Callable[[torch.Tensor], torch.Tensor]", "torch is used at import"),
        ("unirl/a.py", "import torch\nclass Net(torch.nn.Module): ...", "torch is used at import"),
        ("unirl/a.py", "import torch\n@torch.no_grad()\ndef f(): ...", "torch is used at import"),
        ("unirl/a.py", "import torch\ndef f(dtype=torch.float32): ...", "torch is used at import"),
        ("unirl/a.py", "from torch import nn", "torch is used at import"),
        ("unirl/a.py", "import torch.nn.functional as F", "torch is used at import"),
        ("unirl/a.py", "x = 1\n" * 601, "a file of more than 600 lines"),
        ("unirl/a.py", "def f():\n" + "    x = 1\n" * 80, "f has 81 lines"),
        ("unirl/train/utils.py", "", "a name that says nothing"),
        ("unirl/common/a.py", "", "a name that says nothing"),
        ("unirl/recipes/diffusion/a.yaml", "a: 1\n" * 41, "a recipe of more than 40 lines"),
        ("README.md", "see /" + "work/main", "a path of one machine"),
        ("Makefile", "X = /" + "root/.cache", "a path of one machine"),
        ("README.md", "https://" + "files.example.net/x", "host files.example.net"),
    ],
)  # fmt: skip
def test_a_breach_is_found(path: str, text: str, rule: str) -> None:
    assert any(rule in breach for breach in breaches(path, text))


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("unirl/a.py", "x = getattr(module, name)"),
        ("unirl/a.py", "try:\n    f()\nexcept Exception as error:\n    raise RuntimeError('f') from error"),
        ("unirl/a.py", "try:\n    f()\nexcept Exception:  # noqa: BLE001 - a scorer is the user's code\n    g()"),
        ("unirl/a.py", "def f(path):\n    return torch.load(path, weights_only=True)"),
        ("unirl/a.py", "KERNELS = {'flow': 1}"),
        ("unirl/cli.py", "print(1)"),
        (
            "unirl/a.py",
            "import torch\nclass A:\n    x: torch.Size\n    def f(self) -> torch.Size:\n        torch.abs(1)",
        ),
        ("unirl/a.py", "import torch\nf = lambda x: torch.abs(x)\ndef g():\n    from torch import nn"),
        ("unirl/models/tiny_modules.py", "from torch import nn\nclass Net(nn.Module): ..."),
        ("tests/unit/test_a.py", "assert pickle.loads(pickle.dumps(x)) == x"),
        ("README.md", "https://github.com/x/y and /tmp/x and a/home/b"),
    ],
)
def test_good_style_is_no_breach(path: str, text: str) -> None:
    assert breaches(path, text) == []
