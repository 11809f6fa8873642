"""The cases of the rehearsal: every pair of values of two factors that can be combined is in some case."""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import combinations, product

FACTORS: dict[str, tuple[str, ...]] = {
    "strategy": (
        "fsdp",
        "fsdp grad_op",
        "fsdp no_shard",
        "fsdp hybrid",
        "fsdp2",
        "fsdp2 tensor",
        "fsdp2 context",
        "ddp",
        "single",
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
"""The values of each factor; the first one is the usual one."""
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
_SAME_ROWS_BY_TWOS = ("fsdp2 tensor", "fsdp2 context")
"""Strategies in which two devices compute the same rows."""
_OTHER_NUMBER_OF_DEVICES = {"the same": 0, "one more": 1, "one less": -1}
_NUM_TRIES = 40

Pair = tuple[tuple[str, str], ...]
"""Values of two factors: (FACTOR, VALUE) and (FACTOR, VALUE)."""


@dataclass(frozen=True)
class Case:
    """One case; ``values`` are from ``FACTORS``, in order."""

    values: tuple[str, ...]

    def __getitem__(self, factor: str) -> str:
        """Return the case's value of a factor."""
        return self.values[list(FACTORS).index(factor)]

    @property
    def name(self) -> str:
        """Devices and strategy, and the values that are not the usual ones of their factor."""
        words = [f"{self['devices']} x {self['strategy']}"]
        for factor, factor_values in FACTORS.items():
            usual_value = factor_values[0]
            if factor not in ("strategy", "devices") and self[factor] != usual_value:
                words.append(self[factor])
        return ", ".join(words)

    @property
    def num_devices(self) -> int:
        """Number of devices, each with a rank."""
        return int(self["devices"])

    @property
    def num_devices_after(self) -> int:
        """Number of devices of the run that resumes."""
        return self.num_devices + _OTHER_NUMBER_OF_DEVICES[self["resumed on"]]

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
        if self["offload"] == "parameters":
            options["cpu_offload"] = "true"
        if self["offload"] == "activations":
            options["activation_offload"] = "true"
        if self["compile"] != "no":
            options["compile"] = "true"
        return options


def can_run(values: Mapping[str, str]) -> bool:
    """Return whether the program takes a combination; factors that are absent are taken to fit."""
    return (
        _strategy_fits_devices(values)
        and _precision_fits(values)
        and _offload_fits(values)
        and _reduction_fits(values)
        and _trained_parts_fit(values)
        and _resume_fits(values)
    )


def _strategy_fits_devices(values: Mapping[str, str]) -> bool:
    strategy = values.get("strategy", "")
    devices = values.get("devices", "")
    if strategy == "single" and devices in ("2", "3"):
        return False
    if strategy not in ("", "single") and devices == "1":
        return False
    return not (strategy in _SAME_ROWS_BY_TWOS and devices == "3")


def _precision_fits(values: Mapping[str, str]) -> bool:
    strategy = values.get("strategy", "")
    precision = values.get("precision", "")
    if precision == "16-mixed" and strategy.startswith("fsdp2"):
        return False
    return not (precision.endswith("-mixed") and strategy == "fsdp no_shard")


def _offload_fits(values: Mapping[str, str]) -> bool:
    strategy = values.get("strategy", "")
    offload = values.get("offload")
    if offload == "activations" and values.get("checkpointing", "full") != "full":
        return False
    if offload != "parameters":
        return True
    if strategy == "fsdp no_shard" or not _can_shard(values):
        return False
    return values.get("precision") != "16-mixed"


def _reduction_fits(values: Mapping[str, str]) -> bool:
    """Return whether gradient reduction fits the offload of parameters and the compiler."""
    strategy = values.get("strategy", "")
    reduces_often = values.get("reduction") == "micro_batch"
    offloads_parameters = values.get("offload") == "parameters"
    if reduces_often and not _can_shard(values):
        return False
    if reduces_often and offloads_parameters and not strategy.startswith("fsdp2"):
        return False
    is_fsdp1 = strategy.startswith("fsdp") and not strategy.startswith("fsdp2")
    return not (values.get("compile") == "aot_eager" and is_fsdp1 and (reduces_often or offloads_parameters))


def _trained_parts_fit(values: Mapping[str, str]) -> bool:
    if values.get("trained", "all") == "all":
        return True
    # for no_shard: the tiny model's head is its embedding
    return values.get("strategy") not in ("fsdp2 tensor", "fsdp no_shard")


def _resume_fits(values: Mapping[str, str]) -> bool:
    strategy = values.get("strategy", "")
    devices = values.get("devices", "")
    resumed_on = values.get("resumed on", "the same")
    if resumed_on == "the same":
        return True
    if values.get("data") == "stream":
        return False
    if strategy in ("single", *_SAME_ROWS_BY_TWOS):
        return False
    if resumed_on == "one more":
        return devices != "3"
    # of two devices one is left, on which only the strategy single can train
    return devices != "1" and not (devices == "2" and strategy != "")


def _can_shard(values: Mapping[str, str]) -> bool:
    strategy = values.get("strategy", "")
    return (strategy == "" or strategy.startswith("fsdp")) and values.get("devices") != "1"


@cache
def cases() -> tuple[Case, ...]:
    """Return cases that contain every pair of values that ``can_run``, chosen greedily and always the same."""
    rng = random.Random(0)
    missing = {pair for pair in _all_pairs() if can_run(dict(pair)) and any(_completions(dict(pair), rng))}
    chosen = []
    while missing:
        # complete a missing pair so that the case has as many other missing pairs as can be
        start = min(missing, key=lambda pair: (bool(set(pair) & _RARE), pair))
        best = max(
            _completions(dict(start), rng), key=lambda values: (len(_pairs(values) & missing), values["compile"])
        )
        missing -= _pairs(best)
        chosen.append(Case(tuple(best[factor] for factor in FACTORS)))
    return tuple(chosen)


def _all_pairs() -> Iterator[Pair]:
    """Yield every pair of values of two factors."""
    for first_factor, second_factor in combinations(FACTORS, 2):
        for first_value, second_value in product(FACTORS[first_factor], FACTORS[second_factor]):
            yield (first_factor, first_value), (second_factor, second_value)


def _pairs(values: Mapping[str, str]) -> set[Pair]:
    """Return the pairs of values that a combination of all factors has."""
    return set(combinations(((factor, values[factor]) for factor in FACTORS), 2))


def _completions(start: Mapping[str, str], rng: random.Random) -> Iterator[dict[str, str]]:
    """Yield some combinations of all factors that have the values of ``start`` and can run."""
    for _ in range(_NUM_TRIES):
        values = _complete(start, rng)
        if values is not None:
            yield values


def _complete(start: Mapping[str, str], rng: random.Random) -> dict[str, str] | None:
    """Add random values of the other factors, in random order; return None where no value of a factor fits."""
    values = dict(start)
    for factor in rng.sample(list(FACTORS), len(FACTORS)):
        if factor in values:
            continue
        fitting_values = [value for value in FACTORS[factor] if can_run({**values, factor: value})]
        common_values = [value for value in fitting_values if (factor, value) not in _RARE]
        if not fitting_values:
            return None
        values[factor] = rng.choice(common_values or fitting_values)
    return values
