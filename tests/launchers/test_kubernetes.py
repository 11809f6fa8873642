"""The manifests of launch/kubernetes: valid by the published schemas, and their commands train on two nodes.

There is no cluster here. kubernetes-validate has the JSON schemas of Kubernetes, kubeflow-trainer-api the models of
Kubeflow's; both are installed once into ``.cache/kubernetes``. Pods are two network namespaces that find each other by
the names that a headless Service would give them.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from fabric_train.cli.errors import STOPPED
from tests.support.environments import environment_with
from tests.support.network_namespaces import Node, skip_without_namespaces, two_joined_nodes
from tests.support.programs import ROOT
from tests.support.short_runs import argv, metrics, saved_steps

pytestmark = [pytest.mark.slow, pytest.mark.launchers]

MANIFESTS = ROOT / "launch" / "kubernetes"
# the models drop what they do not know, so a manifest with an unknown field does not come back as it was
CHECK_KUBEFLOW = """
import sys, yaml
from kubeflow_trainer_api import models
for manifest in yaml.safe_load_all(open(sys.argv[1])):
    model = getattr(models, "TrainerV1alpha1" + manifest["kind"])
    if model.from_dict(manifest).to_dict() != manifest:
        sys.exit(f"{manifest['kind']} has a field that Kubeflow does not know")
"""


@pytest.fixture(scope="module")
def validators() -> Path:
    """The Python of an environment that has the published schemas."""
    return environment_with("kubernetes", "kubernetes-validate==1.37.0", "kubeflow-trainer-api==2.3.0")


def run(*command: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([str(word) for word in command], text=True, capture_output=True, check=False)


def check_with_kubernetes(validators: Path, manifest: Path) -> "subprocess.CompletedProcess[str]":
    return run(validators, "-m", "kubernetes_validate", "--strict", manifest)


def check_with_kubeflow(validators: Path, manifest: Path) -> "subprocess.CompletedProcess[str]":
    return run(validators, "-c", CHECK_KUBEFLOW, manifest)


CHECKS = [
    ("storage.yaml", check_with_kubernetes),
    ("indexed-job.yaml", check_with_kubernetes),
    ("trainjob.yaml", check_with_kubeflow),
]


@pytest.mark.parametrize("name, check", CHECKS)
def test_manifests_fit_the_published_schemas(
    validators: Path, tmp_path: Path, name: str, check: Callable[[Path, Path], "subprocess.CompletedProcess[str]"]
) -> None:
    checked = check(validators, MANIFESTS / name)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    wrong = tmp_path / name
    wrong.write_text((MANIFESTS / name).read_text().replace("\nspec:\n", "\nspec:\n  replicaz: 2\n"))
    assert check(validators, wrong).returncode != 0


def test_the_jobs_in_the_runtime_fit_the_schema_of_kubernetes(validators: Path, tmp_path: Path) -> None:
    runtime, _ = yaml.safe_load_all((MANIFESTS / "trainjob.yaml").read_text())
    (job,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    inner = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "inner"}, "spec": job["template"]["spec"]}
    manifest = tmp_path / "inner.yaml"
    manifest.write_text(yaml.safe_dump(inner))
    checked = check_with_kubernetes(validators, manifest)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def read_indexed_job() -> tuple[dict[str, Any], str, str, dict[str, str]]:
    """Return the container, the host name without index, the domain, and a pod's variables of the indexed Job."""
    service, job = yaml.safe_load_all((MANIFESTS / "indexed-job.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"]
    return pod["containers"][0], job["metadata"]["name"], pod["subdomain"], {"JOB_COMPLETION_INDEX": "{index}"}


def read_trainjob() -> tuple[dict[str, Any], str, str, dict[str, str]]:
    """Return the same of the TrainJob; names and variables are from Kubeflow's torch plugin."""
    _, job = yaml.safe_load_all((MANIFESTS / "trainjob.yaml").read_text())
    name = job["metadata"]["name"]
    variables = {
        "JOB_COMPLETION_INDEX": "{index}",
        "PET_NNODES": str(job["spec"]["trainer"]["numNodes"]),
        "PET_NPROC_PER_NODE": "auto",
        "PET_NODE_RANK": "{index}",
        "PET_MASTER_ADDR": f"{name}-node-0-0.{name}",
        "PET_MASTER_PORT": "29500",
    }
    return job["spec"]["trainer"], f"{name}-node-0", name, variables


def start(
    container: dict[str, Any], node: Node, variables: dict[str, str], words: list[str], log: Path
) -> "subprocess.Popen[str]":
    """Start a container's command on a node as a kubelet does, with one CPU process and further arguments."""
    command = [*container["command"], *container["args"]]
    command = [re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], word) for word in command]
    assert "--devices=8" in command
    command[command.index("--devices=8")] = "--devices=1"
    program = str(Path(sys.executable).with_name(command[0]))
    with log.open("a") as output:
        return subprocess.Popen(
            node.command([program, *command[1:], *words]),
            cwd=ROOT,  # the image's working folder has the same content
            env={**os.environ, **variables, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )


@pytest.mark.parametrize("read", [read_indexed_job, read_trainjob])
def test_pods_find_rank_0_by_name_save_on_sigterm_and_resume(
    tmp_path: Path,
    tiny_model_dir: Path,
    tiny_tokens_dir: Path,
    read: Callable[[], tuple[dict[str, Any], str, str, dict[str, str]]],
) -> None:
    """The pod of rank 0 starts last, as after a slow pull of its image. The other is drained, and both start again."""
    skip_without_namespaces()
    container, host, domain, variables = read()
    settings = {"max_step": 150, "number_epochs": 99, "eval_step_interval": 150, "save_step_interval": 150}
    words = argv(tiny_model_dir, tiny_tokens_dir, tmp_path / "run", **settings)
    logs = [tmp_path / "log-0", tmp_path / "log-1"]
    pods: list[subprocess.Popen[str]] = []

    def output() -> str:
        return "\n".join(log.read_text() for log in logs)

    def start_pod(index: int) -> "subprocess.Popen[str]":
        own = {name: value.format(index=index) for name, value in variables.items()}
        pods.append(start(container, nodes[index], own, words, logs[index]))
        return pods[-1]

    with two_joined_nodes((f"{host}-0", f"{host}-1"), domain) as nodes:
        try:
            second = start_pod(1)
            time.sleep(3)
            first = start_pod(0)
            deadline = time.monotonic() + 200
            while len(metrics(tmp_path / "run")) < 3 and time.monotonic() < deadline:
                assert first.poll() is None, output()
                assert second.poll() is None, output()
                time.sleep(0.1)
            second.terminate()
            assert [first.wait(100), second.wait(100)] == [STOPPED, STOPPED], output()
            (step,) = saved_steps(tmp_path / "run")
            assert 2 <= step < 150
            again = [start_pod(0), start_pod(1)]
            assert [pod.wait(300) for pod in again] == [0, 0], output()
        finally:
            for pod in pods:
                pod.kill()
    assert "2 × fsdp2" in output()
    assert [row[0] for row in metrics(tmp_path / "run")] == [str(step) for step in range(1, 151)]
