"""Which parameters of a model train: all, an adapter's, or the parts that patterns choose.

``choose_trained`` decides, for ``ModelShape.trained``. Before the model is sharded, ``freeze_other_parts`` applies the
choice, and ``requires_grad`` carries it on. A frozen parameter has no gradient and no optimizer state; it is in a
checkpoint, but not in the optimizer's files.

A pattern is a regular expression that is searched in the name of each parameter (``model.layers.0.mlp.up_proj.weight``)
and matches whole parts between dots. So ``up_proj`` and ``mlp.up_proj`` mean that module in all layers, ``layers.1`` is
not layer 10, and ``norm`` is not ``input_layernorm``. The pattern ``all`` matches every parameter.
"""

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from fabric_train.cli.argument_types import nearest_name
from fabric_train.cli.errors import InputError
from fabric_train.cli.output import number_ranges
from fabric_train.distributed.sharded_parameters import named_parameters, original_name
from fabric_train.model.adapter import Adapter
from fabric_train.model.patterns import NamePattern

ALL = "all"
"""The pattern that matches every parameter."""
IN_LAYER = re.compile(r"(.*?\.)([0-9]+)\.(.+)")
"""The name of a parameter in a layer: what comes before the layer's number, the number, and the rest."""
Names = Mapping[str, Sequence[str]]
"""All names of each parameter, by the first one; a head that is tied to the embedding is a second name."""
Sizes = Mapping[str, torch.Size]


@dataclass(frozen=True)
class Parts:
    """The parts of a model that train: ``train_only`` without ``freeze``, both patterns; empty ``train_only`` is all.

    ``option`` is where ``train_only`` is given, for messages.
    """

    train_only: tuple[str, ...] = ()
    freeze: tuple[str, ...] = ()
    option: str = field(default="--train_only", compare=False)

    def __bool__(self) -> bool:
        return bool(self.train_only or self.freeze)

    def choose(self, names: Names, source: str) -> set[str]:
        """Return the first names of the parameters that train.

        Raises:
            InputError: a pattern matches no parameter of the model, which ``source`` names, or none would train.
        """
        trained = set(names)
        if self.train_only:
            trained = set[str]().union(*(find(self.option, one, names, source) for one in self.train_only))
        for pattern in self.freeze:
            trained -= find("--freeze", pattern, names, source)
        if not trained:
            given = f"{self.option} {' '.join(self.train_only)}, " if self.train_only else ""
            raise InputError(
                f"{given}--freeze {' '.join(self.freeze)}: no parameter of {source} would train; freeze fewer"
            )
        return trained


ALL_PARTS = Parts()


def names_of_parameters(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return all names of each parameter, by the one that ``named_parameters`` has; the model may be on meta."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {of_one[0]: tuple(of_one) for of_one in names.values()}


def find(option: str, pattern: str, names: Names, source: str) -> set[str]:
    """Return the first names of the parameters that a pattern matches; ``option`` is where it is given.

    Raises:
        InputError: it matches none of the model, which ``source`` names, or it is no regular expression.
    """
    searched = NamePattern(option, ".*" if pattern == ALL else pattern, "embed_tokens")
    matched = searched.matching_parts(name for of_one in names.values() for name in of_one)
    found = {first for first, of_one in names.items() if not matched.isdisjoint(of_one)}
    if not found:
        every = [name for of_one in names.values() for name in of_one]
        modules = list(dict.fromkeys(name.split(".")[-2] for name in every if "." in name))
        layers = sorted({int(inside[2]) for inside in map(IN_LAYER.fullmatch, every) if inside})
        numbered = f", and layers {layers[0]} to {layers[-1]}" if layers else ""
        hint = nearest_name(pattern, modules)
        raise InputError(
            f"{option} {pattern}: no parameter of {source} matches; it has {', '.join(modules)}{numbered}{hint}"
        )
    return found


def rates_by_name(rates: Mapping[str, float], names: Names, source: str, trained: Container[str]) -> dict[str, float]:
    """Return the learning rate of each parameter, under all its names, that a pattern of ``--lr_of`` matches.

    Of several patterns that match a parameter, the last one counts.

    Raises:
        InputError: a pattern decides no rate of the ``trained`` parameters: it matches none of the model, which
            ``source`` names, or only frozen ones, or only such that later patterns match too.
    """
    owners: dict[str, str] = {}
    for pattern in rates:
        owners |= dict.fromkeys(sorted(find("--lr_of", pattern, names, source)), pattern)
    for pattern, rate in rates.items():
        if any(owner == pattern and name in trained for name, owner in owners.items()):
            continue
        fault = "later patterns match all that it names; give it last"
        if not any(name in trained for name in find("--lr_of", pattern, names, source)):
            fault = "all that it names is frozen; leave it out"
        raise InputError(f"--lr_of {pattern}={rate:g}: {fault}")
    return {name: rates[owner] for first, owner in owners.items() for name in names[first]}


def choose_trained(model: nn.Module, adapter: Adapter | None = None, parts: Parts = ALL_PARTS) -> dict[str, torch.Size]:
    """Return names and shapes of what trains, an adapter and modules beside it included; the model may be on meta."""
    chosen = None if adapter else parts.choose(names_of_parameters(model), "the model")
    return {
        name: parameter.shape
        for name, parameter in model.named_parameters()
        if (adapter.trains(name) if adapter else chosen is None or name in chosen)
    }


def freeze_other_parts(model: nn.Module, adapter: Adapter | None = None, parts: Parts = ALL_PARTS) -> None:
    """Let only the chosen parameters train. Call it before anything wraps the model.

    The model is asked, and not ``ModelShape.trained``: a head that is stored beside the embedding is a parameter of its
    own, although the configuration ties them.
    """
    trained = choose_trained(model, adapter, parts)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)


def trained_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of a set-up model that train, sharded, under the names that they had before any wrapper."""
    return [(original_name(name), parameter) for name, parameter in named_parameters(model) if parameter.requires_grad]


def splits_layers(trained: Iterable[str], frozen: Iterable[str]) -> bool:
    """Whether only some parameters of a layer train."""
    numbers = ({inside[2] for inside in map(IN_LAYER.fullmatch, names) if inside} for names in (trained, frozen))
    return not set.isdisjoint(*numbers)


def describe_parts(chosen: Sizes, others: Sizes) -> str:
    """Return the modules of the ``chosen`` parameters of a model in words, with their numbers of parameters.

    An example: ``model.embed_tokens 28,311,552; layers 0–1, 31 10,616,832; self_attn.q_proj of layers 2–30 9,621,504``.
    """
    partly = {inside[2] for inside in map(IN_LAYER.fullmatch, others) if inside}
    outside: dict[str, int] = {}
    layers: dict[str, dict[str, int]] = {}
    for name, size in chosen.items():
        inside = IN_LAYER.fullmatch(name)
        counts, module = (layers.setdefault(inside[2], {}), inside[3]) if inside else (outside, name)
        module = module.removesuffix(".weight")
        counts[module] = counts.get(module, 0) + size.numel()
    alike: dict[tuple[str, ...], list[str]] = {}
    for layer, counts in layers.items():
        alike.setdefault(tuple(counts) if layer in partly else (), []).append(layer)
    texts = [f"{module} {numel:,}" for module, numel in outside.items()]
    for modules, numbers in alike.items():
        of = f"{', '.join(modules)} of " if modules else ""
        numel = sum(sum(layers[number].values()) for number in numbers)
        texts.append(f"{of}layer{'s' * (len(numbers) > 1)} {number_ranges(map(int, numbers))} {numel:,}")
    return "; ".join(texts)
