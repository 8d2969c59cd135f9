from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def run(program: str, *path: Path) -> str:
    """What `program` prints, in a fresh interpreter with `path` and the repository importable."""
    search = f"import sys; sys.path[:0] = {[str(one) for one in (*path, ROOT)]!r}\n"
    result = subprocess.run([sys.executable, "-c", search + program], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_the_values_and_kernels_import_and_load_without_torch() -> None:
    loaded = run("""
from unirl.config.lazy import defer_heavy_imports
defer_heavy_imports()
import unirl.sde.strategy
import unirl.types.sample
import unirl.types.sampling
from unirl.config.load import load
params = load(unirl.types.sampling.DiffusionSamplingParams, {"steps": 10, "height": 512, "width": 512})
assert params.resolve_sde_indices(0) == tuple(range(9))
print(sorted(name for name in sys.modules if name.startswith(("torch.", "sklearn.", "diffusers.", "transformers."))))
""")
    assert loaded == "[]"


def test_torch_loads_once_at_first_use_and_is_then_itself() -> None:
    told = run("""
from unirl.config.lazy import defer_heavy_imports
defer_heavy_imports()
import torch
held = torch
assert "torch._C" not in sys.modules
import torch.nn.functional as F
assert "torch._C" in sys.modules and held is sys.modules["torch"] and type(held).__name__ == "module"
assert torch.nn is sys.modules["torch.nn"] and torch.nn.functional is F and F.__spec__.name == "torch.nn.functional"
print(F.relu(held.nn.Linear(2, 3)(held.zeros(1, 2))).shape == (1, 3))
""")
    assert told == "True"


@pytest.fixture
def fakes(tmp_path: Path) -> Path:
    """Packages under the names of heavy ones that note when they run."""
    (tmp_path / "peft").mkdir()
    (tmp_path / "peft" / "__init__.py").write_text("print('peft runs')\nfrom peft import tuners\nVERSION = 1\n")
    (tmp_path / "peft" / "tuners.py").write_text("print('tuners runs')\nclass Lora: pass\n")
    (tmp_path / "accelerate.py").write_text(
        "import sys, types\n"
        "print('accelerate runs')\n"
        "class Own(types.ModuleType):\n"
        "    late = 5\n"
        "sys.modules[__name__] = Own(__name__)\n"
    )
    return tmp_path


DEFER = "from unirl.config.lazy import defer_heavy_imports\ndefer_heavy_imports()\n"


def test_a_deferred_package_runs_when_an_attribute_is_asked_for(fakes: Path) -> None:
    told = run(
        DEFER + "import peft\nimport peft as again\nprint('imported')\nprint(peft.VERSION, peft is again)", fakes
    )
    assert told.split("\n") == ["imported", "peft runs", "tuners runs", "1 True"]


def test_importing_a_submodule_runs_package_and_submodule_once(fakes: Path) -> None:
    told = run(
        DEFER + "import peft\nprint('imported')\nfrom peft.tuners import Lora\nprint(Lora is peft.tuners.Lora)", fakes
    )
    assert told.split("\n") == ["imported", "peft runs", "tuners runs", "True"]


def test_a_package_that_puts_another_object_in_its_place_is_followed(fakes: Path) -> None:
    told = run(
        DEFER + "import accelerate as held\nfrom accelerate import late\nimport accelerate\nprint(late, held.late)",
        fakes,
    )
    assert told.split("\n") == ["accelerate runs", "5 5"]


def test_looking_over_all_modules_loads_none(fakes: Path) -> None:
    told = run(
        DEFER + "import inspect\ninspect.getmodule(inspect.currentframe())\nimport peft\nprint(isinstance(peft, int))",
        fakes,
    )
    assert told == "False"


def test_what_is_loaded_already_and_what_is_not_installed_stays_as_it_is(fakes: Path) -> None:
    told = run(
        "import peft\nheld = peft\n" + DEFER + "import peft\nprint(held is peft, type(peft).__name__)\n"
        "print([name for name in ('diffusers_not_installed',) if name in sys.modules])",
        fakes,
    )
    assert told.split("\n") == ["peft runs", "tuners runs", "True module", "[]"]
