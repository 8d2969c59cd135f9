"""Folders of clusters whose driver was killed are swept by the next driver, those of living drivers are not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from unirl.distributed.group.cluster_folder import cluster_folder

DRIVER = """
import sys
from pathlib import Path
from unirl.distributed.group.cluster_folder import cluster_folder

with cluster_folder(Path(sys.argv[1])) as folder:
    (folder / "log").write_text("a line")
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_the_folder_of_a_killed_driver_goes_with_the_next_one_and_that_of_a_living_one_stays(tmp_path: Path) -> None:
    (tmp_path / "unirl-ray-starting").mkdir()  # a driver that is about to lock it
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "unirl-ray-linked").symlink_to(tmp_path / "elsewhere")
    command = [sys.executable, "-c", DRIVER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        of_driver = Path(driver.stdout.readline().strip())
        try:
            with cluster_folder(tmp_path) as own:
                assert own.is_dir()
                assert (of_driver / "log").is_file()
            assert not own.exists()
        finally:
            driver.kill()
    assert (of_driver / "log").is_file()
    with cluster_folder(tmp_path) as own:
        there = sorted(path.name for path in tmp_path.iterdir())
    assert there == sorted(["elsewhere", "unirl-ray-linked", "unirl-ray-starting", own.name])
