"""docs/scaling.md: its tables are what the code computes, its commands are accepted, its manifests hold together."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.model_sizes import MODELS, memory_table, sample_table, traffic_table
from unirl.config.run import load_recipe

PAGE = (Path(__file__).parents[2] / "docs" / "scaling.md").read_text("utf-8")
COMMANDS = re.findall(r"^unirl check ([^#\n]+)", PAGE, flags=re.MULTILINE)
MANIFESTS = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)


def test_the_tables_are_what_the_code_computes() -> None:
    tables = {"memory": memory_table(MODELS), "traffic": traffic_table(MODELS), "samples": sample_table()}
    written = re.findall(r"<!-- (\w+) -->\n(.*?)\n<!-- end -->", PAGE, flags=re.DOTALL)
    assert dict(written) == tables, "paste what `python -m benchmarks.model_sizes` prints"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_is_accepted(command: str) -> None:
    recipe, *overrides = shlex.split(command)
    placement = load_recipe(recipe, overrides).placement
    assert placement.launcher == ("ray" if overrides else "local")


def test_the_manifests_name_one_image_one_claim_and_nothing_else_to_fill_in() -> None:
    assert sorted(set(re.findall(r"<\w+>", MANIFESTS[0]))) == ["<claim>", "<image>"]
    assert all(f"`{name}`" in PAGE for name in ("<claim>", "<image>"))


def test_the_job_runs_on_the_cluster_with_all_of_its_devices_and_a_recipe_that_is_accepted() -> None:
    cluster, job = yaml.safe_load_all(MANIFESTS[0])
    assert [(it["apiVersion"], it["kind"]) for it in (cluster, job)] == [
        ("ray.io/v1", "RayCluster"),
        ("ray.io/v1", "RayJob"),
    ]
    assert job["spec"]["clusterSelector"] == {"ray.io/cluster": cluster["metadata"]["name"]}
    unirl, train, recipe, *overrides = shlex.split(job["spec"]["entrypoint"])
    placement = load_recipe(recipe, overrides).placement
    assert (unirl, train, placement.launcher, placement.address) == ("unirl", "train", "ray", "auto")
    [workers] = cluster["spec"]["workerGroupSpecs"]
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"]
    gpus = containers(workers)[0]["resources"]["limits"]["nvidia.com/gpu"]
    assert placement.devices == workers["replicas"] * int(gpus)


def test_every_pod_has_bounded_resources_and_mounts_the_volumes_that_it_declares() -> None:
    cluster, _ = yaml.safe_load_all(MANIFESTS[0])
    for group in (cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]):
        declared = {volume["name"] for volume in group["template"]["spec"]["volumes"]}
        for container in containers(group):
            assert container["resources"]["limits"] == container["resources"]["requests"]
            assert {mount["name"] for mount in container["volumeMounts"]} == declared
            assert all(isinstance(value, str) for value in container["resources"]["limits"].values())


def containers(group: dict[str, Any]) -> list[dict[str, Any]]:
    return group["template"]["spec"]["containers"]
