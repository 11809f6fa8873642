"""The cases of the rehearsal: every pair of values of two factors that can be combined is in some case."""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import combinations

FACTORS: dict[str, tuple[str, ...]] = {
    "strategy": (
        *("fsdp", "fsdp grad_op", "fsdp no_shard", "fsdp hybrid"),
        *("fsdp2", "fsdp2 tensor", "fsdp2 context", "ddp", "single"),
    ),
    "devices": ("2", "3", "1"),
    "precision": ("32-true", "bf16-mixed", "bf16-true", "16-mixed"),
    "offload": ("none", "parameters", "activations"),
    "checkpointing": ("none", "full", "selective"),
    "reduction": ("step", "micro_batch"),
    "states": ("default", "bfloat16", "8bit"),
    "compile": ("no", "aot_eager"),
    "saves": ("full", "sharded"),
    "data": ("tokens", "stream"),
    "trained": ("all", "lora", "dora"),
    "resumed on": ("the same", "one more", "one less"),
}
_RARE = {("compile", "aot_eager")}  # takes ten times as long: only where a pair needs it
_STRATEGIES: Mapping[str, Mapping[str, object]] = {
    "fsdp": {"parallelism": "fsdp"},
    "fsdp grad_op": {"parallelism": "fsdp", "sharding_strategy": "SHARD_GRAD_OP"},
    "fsdp no_shard": {"parallelism": "fsdp", "sharding_strategy": "NO_SHARD"},
    "fsdp hybrid": {"parallelism": "fsdp", "sharding_strategy": "HYBRID_SHARD"},
    "fsdp2": {"parallelism": "fsdp2"},
    "fsdp2 tensor": {"parallelism": "fsdp2", "tensor_parallel_size": 2},
    "fsdp2 context": {"parallelism": "fsdp2", "context_parallel_size": 2},
    "ddp": {"parallelism": "ddp"},
    "single": {"parallelism": "single"},
}
_PAIRS = ("fsdp2 tensor", "fsdp2 context")  # whose devices compute the same rows by twos
_NUM_TRIES = 40


@dataclass(frozen=True)
class Case:
    """One case; ``values`` are from ``FACTORS``, in order."""

    values: tuple[str, ...]

    def __getitem__(self, factor: str) -> str:
        """Return the case's value of a factor."""
        return self.values[list(FACTORS).index(factor)]

    @property
    def name(self) -> str:
        """The values that are not the first of their factor."""
        further = [(factor, values[0]) for factor, values in FACTORS.items() if factor not in ("strategy", "devices")]
        shown = [self[factor] for factor, usual in further if self[factor] != usual]
        return ", ".join([f"{self['devices']} x {self['strategy']}", *shown])

    @property
    def num_devices(self) -> int:
        """Number of devices, each with a rank."""
        return int(self["devices"])

    @property
    def num_devices_after(self) -> int:
        """Number of devices of the run that resumes."""
        return self.num_devices + {"the same": 0, "one more": 1, "one less": -1}[self["resumed on"]]

    @property
    def options(self) -> dict[str, object]:
        """The program's options, without the data's."""
        options: dict[str, object] = {
            **_STRATEGIES[self["strategy"]],
            "precision": self["precision"],
            "activation_checkpointing": self["checkpointing"],
            "gradient_reduction": self["reduction"],
            "state_dict_type": self["saves"],
        }
        if self["states"] != "default":
            options["optimizer_states"] = self["states"]
        if self["trained"] != "all":
            options |= {"adapter": self["trained"], "lora_rank": 4}
        if self["offload"] != "none":
            options["cpu_offload" if self["offload"] == "parameters" else "activation_offload"] = "true"
        if self["compile"] != "no":
            options["compile"] = "true"
        return options


def can_run(given: Mapping[str, str]) -> bool:
    """Return whether the program takes a combination; factors that are not given are taken to fit."""
    strategy = given.get("strategy", "")
    devices = given.get("devices", "")
    shards = not strategy or strategy.startswith("fsdp")
    return not (
        (strategy == "single" and devices in ("2", "3"))
        or (strategy not in ("", "single") and devices == "1")
        or (strategy in _PAIRS and devices == "3")
        or (strategy.startswith("fsdp2") and given.get("precision") == "16-mixed")
        or (given.get("offload") == "parameters" and (not shards or devices == "1"))
        or (given.get("offload") == "parameters" and strategy == "fsdp no_shard")
        or (given.get("precision", "").endswith("-mixed") and strategy == "fsdp no_shard")
        or (given.get("offload") == "parameters" and given.get("precision") == "16-mixed")
        or (given.get("offload") == "activations" and given.get("checkpointing", "full") != "full")
        or (given.get("reduction") == "micro_batch" and (not shards or devices == "1"))
        or (
            {given.get("offload"), given.get("reduction")} == {"parameters", "micro_batch"}
            and not strategy.startswith("fsdp2")
        )
        or (
            given.get("compile") == "aot_eager"
            and (given.get("reduction") == "micro_batch" or given.get("offload") == "parameters")
            and strategy.startswith("fsdp")
            and not strategy.startswith("fsdp2")
        )
        or (given.get("trained", "all") != "all" and strategy == "fsdp2 tensor")
        # the tiny model's head is its embedding
        or (given.get("trained", "all") != "all" and strategy == "fsdp no_shard")
        or (given.get("resumed on") == "one less" and (devices == "1" or strategy in ("single", *_PAIRS)))
        or (given.get("resumed on") == "one more" and (devices == "3" or strategy in ("single", *_PAIRS)))
        or (given.get("resumed on") == "one less" and devices == "2" and strategy != "")
        or (given.get("resumed on", "the same") != "the same" and given.get("data") == "stream")
    )


@cache
def cases() -> tuple[Case, ...]:
    """Return cases that contain every pair of values that ``can_run``, chosen greedily and always the same."""
    draw = random.Random(0)
    missing = {
        pair
        for first, second in combinations(FACTORS, 2)
        for one in FACTORS[first]
        for two in FACTORS[second]
        if can_run(dict(pair := ((first, one), (second, two)))) and any(_completions(dict(pair), draw))
    }
    chosen = []
    while missing:
        start = dict(min(missing, key=lambda pair: (bool(set(pair) & _RARE), pair)))
        best = max(_completions(start, draw), key=lambda values: (len(_pairs(values) & missing), values["compile"]))
        missing -= _pairs(best)
        chosen.append(Case(tuple(best[factor] for factor in FACTORS)))
    return tuple(chosen)


def _pairs(values: Mapping[str, str]) -> set[tuple[tuple[str, str], ...]]:
    return set(combinations(((factor, values[factor]) for factor in FACTORS), 2))


def _completions(given: Mapping[str, str], draw: random.Random) -> Iterator[dict[str, str]]:
    """Yield some cases that have the given values and can run."""
    for _ in range(_NUM_TRIES):
        values = dict(given)
        for factor in draw.sample(list(FACTORS), len(FACTORS)):
            if factor not in values:
                rare = [value for value in FACTORS[factor] if (factor, value) in _RARE]
                options = [value for value in FACTORS[factor] if can_run({**values, factor: value})]
                common = [value for value in options if value not in rare] or options
                if not common:
                    break
                values[factor] = draw.choice(common)
        else:
            yield values
