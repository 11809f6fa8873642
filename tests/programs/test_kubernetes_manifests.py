"""The two manifests of launch/kubernetes start the same pods, and treat exit codes as documented."""

from typing import Any

import yaml

from fabric_train.cli.errors import INPUT_ERROR, STOPPED
from tests.support.programs import ROOT


def read(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((ROOT / "launch" / "kubernetes" / name).read_text(encoding="utf-8")))


def test_both_manifests_start_the_same_pods() -> None:
    """Except how rank 0 is found, which each kind of job tells its pods in its own way."""
    job = read("indexed-job.yaml")[1]["spec"]
    runtime, trainjob = read("trainjob.yaml")
    inner = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]
    for name in ("podFailurePolicy", "backoffLimit", "podReplacementPolicy"):
        assert job[name] == inner[name], name
    pod = dict(job["template"]["spec"])
    inner_pod = dict(inner["template"]["spec"])
    (container,), (inner_container,) = pod.pop("containers"), inner_pod.pop("containers")
    assert pod.pop("subdomain") == "fabric-train"  # JobSet sets its own
    assert pod == inner_pod
    assert container.pop("command") == trainjob["spec"]["trainer"]["command"]
    assert container.pop("resources") == trainjob["spec"]["trainer"]["resourcesPerNode"]
    assert container.pop("args")[4:] == trainjob["spec"]["trainer"]["args"][4:]
    assert container == inner_container
    assert job["completions"] == job["parallelism"] == trainjob["spec"]["trainer"]["numNodes"]


def test_a_saved_run_starts_again_and_wrong_input_does_not() -> None:
    rules = read("indexed-job.yaml")[1]["spec"]["podFailurePolicy"]["rules"]
    actions = {rule["onExitCodes"]["values"][0]: rule["action"] for rule in rules if "onExitCodes" in rule}
    assert actions == {INPUT_ERROR: "FailJob", STOPPED: "Ignore"}
