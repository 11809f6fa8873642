"""Choose which parameters of a model train: all, an adapter's, or the parts that patterns select.

``choose_trained`` decides, for ``ModelShape.trained``. Before the model is sharded, ``freeze_other_parts`` applies the
choice, and ``requires_grad`` carries it on. A frozen parameter has no gradient and no optimizer state; it is in a
checkpoint, but not in the optimizer's files.

A pattern is a regular expression that is searched in the name of each parameter (``model.layers.0.mlp.up_proj.weight``)
and matches whole parts between dots. So ``up_proj`` and ``mlp.up_proj`` mean that module in all layers, ``layers.1`` is
not layer 10, and ``norm`` is not ``input_layernorm``. The pattern ``all`` matches every parameter.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from fabric_train.cli.argument_types import nearest_name
from fabric_train.cli.errors import InputError
from fabric_train.cli.output import number_ranges
from fabric_train.distributed.sharded_parameters import IN_LAYER, named_parameters, original_name
from fabric_train.model.adapter import Adapter
from fabric_train.model.patterns import NamePattern

ALL = "all"
"""The pattern that matches every parameter."""
Names = Mapping[str, Sequence[str]]
"""All names of each parameter, by the first name; the name of a head that is tied to the embedding is a second one."""
Sizes = Mapping[str, torch.Size]


@dataclass(frozen=True)
class TrainedParts:
    """The parts of a model that train: ``train_only`` without ``freeze``, both patterns; no ``train_only`` means all.

    ``option`` is the argument that gives ``train_only``, for messages.
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
        trained: set[str] = set()
        for pattern in self.train_only:
            trained |= match_parameters(self.option, pattern, names, source)
        if not self.train_only:
            trained = set(names)
        for pattern in self.freeze:
            trained -= match_parameters("--freeze", pattern, names, source)
        if not trained:
            train_only = f"{self.option} {' '.join(self.train_only)}, " if self.train_only else ""
            raise InputError(
                f"{train_only}--freeze {' '.join(self.freeze)}: no parameter of {source} would be trained; freeze "
                "fewer parts"
            )
        return trained


ALL_PARTS = TrainedParts()


def names_of_parameters(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return all names of each parameter, by its name in ``named_parameters``; the model may be on the meta device."""
    names_by_parameter: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_by_parameter.setdefault(id(parameter), []).append(name)
    return {names[0]: tuple(names) for names in names_by_parameter.values()}


def match_parameters(option: str, pattern: str, names: Names, source: str) -> set[str]:
    """Return the first names of the parameters that a pattern matches; ``option`` is the argument that gives it.

    Raises:
        InputError: it matches no parameter of the model, which ``source`` names, or it is not a regular expression.
    """
    all_names: list[str] = []
    for synonyms in names.values():
        all_names += synonyms
    expression = ".*" if pattern == ALL else pattern
    matched = NamePattern(option, expression, example="embed_tokens").matching_parts(all_names)
    parameters = {name for name, synonyms in names.items() if not matched.isdisjoint(synonyms)}
    if not parameters:
        fault = f"no parameter of {source} matches; it has {_describe_names(all_names, pattern)}"
        raise InputError(f"{option} {pattern}: {fault}")
    return parameters


def _describe_names(names: Sequence[str], pattern: str) -> str:
    """Return the modules and layers that parameters belong to, and a module with a name similar to a pattern."""
    modules = list(dict.fromkeys(name.split(".")[-2] for name in names if "." in name))
    layers = sorted({int(match[2]) for match in map(IN_LAYER.fullmatch, names) if match})
    layer_range = f", and layers {layers[0]} to {layers[-1]}" if layers else ""
    return f"{', '.join(modules)}{layer_range}{nearest_name(pattern, modules)}"


def rates_by_name(rates: Mapping[str, float], names: Names, source: str, trained: Container[str]) -> dict[str, float]:
    """Return the learning rate of each parameter, under all its names, that a pattern of ``--lr_of`` matches.

    If several patterns match a parameter, the last one applies.

    Raises:
        InputError: a pattern sets no rate of the ``trained`` parameters: it matches none of the model, which
            ``source`` names, or only frozen ones, or only ones that later patterns also match.
    """
    # the pattern that decides the rate of each parameter, by the parameter's first name
    deciding_patterns: dict[str, str] = {}
    for pattern in rates:
        for name in sorted(match_parameters("--lr_of", pattern, names, source)):
            deciding_patterns[name] = pattern

    for pattern, rate in rates.items():
        decided = [name for name, deciding in deciding_patterns.items() if deciding == pattern]
        if any(name in trained for name in decided):
            continue
        matched = match_parameters("--lr_of", pattern, names, source)
        if any(name in trained for name in matched):
            fault = "later patterns match everything that it matches; give it last"
        else:
            fault = "everything that it matches is frozen; leave it out"
        raise InputError(f"--lr_of {pattern}={rate:g}: {fault}")

    rate_by_name: dict[str, float] = {}
    for name, pattern in deciding_patterns.items():
        for synonym in names[name]:
            rate_by_name[synonym] = rates[pattern]
    return rate_by_name


def choose_trained(
    model: nn.Module, adapter: Adapter | None = None, parts: TrainedParts = ALL_PARTS
) -> dict[str, torch.Size]:
    """Return the names and shapes of the parameters that train, including an adapter's; the model may be on meta."""
    sizes = {name: parameter.shape for name, parameter in model.named_parameters()}
    if adapter is not None:
        return {name: size for name, size in sizes.items() if adapter.trains(name)}
    trained_names = parts.choose(names_of_parameters(model), "the model")
    return {name: size for name, size in sizes.items() if name in trained_names}


def freeze_other_parts(model: nn.Module, adapter: Adapter | None = None, parts: TrainedParts = ALL_PARTS) -> None:
    """Let only the chosen parameters train. Call it before anything wraps the model.

    The choice is made from the model itself, and not taken from ``ModelShape.trained``: a head that is stored next to
    the embedding is a separate parameter, although the configuration ties them.
    """
    trained = choose_trained(model, adapter, parts)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)


def trained_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of a set-up model that train, sharded, under the names that they had before any wrapper."""
    parameters = named_parameters(model)
    return [(original_name(name), parameter) for name, parameter in parameters if parameter.requires_grad]


def splits_layers(trained: Iterable[str], frozen: Iterable[str]) -> bool:
    """Return whether a layer has both trained and frozen parameters."""
    return not _layers_of(trained).isdisjoint(_layers_of(frozen))


def _layers_of(names: Iterable[str]) -> set[str]:
    """Return the numbers of the layers, as text, that parameters belong to."""
    return {match[2] for match in map(IN_LAYER.fullmatch, names) if match}


def describe_parts(chosen: Sizes, others: Sizes) -> str:
    """Return the modules of the ``chosen`` parameters of a model in words, with their numbers of parameters.

    An example: ``model.embed_tokens 28,311,552; layers 0–1, 31 10,616,832; self_attn.q_proj of layers 2–30 9,621,504``.
    """
    # The number of elements of each module, outside of the layers and in each layer.
    outer_modules: dict[str, int] = {}
    modules_by_layer: dict[str, dict[str, int]] = {}
    for name, size in chosen.items():
        match = IN_LAYER.fullmatch(name)
        if match:
            counts = modules_by_layer.setdefault(match[2], {})
            module = match[3].removesuffix(".weight")
        else:
            counts = outer_modules
            module = name.removesuffix(".weight")
        counts[module] = counts.get(module, 0) + size.numel()

    # Layers with the same modules are described together. A whole layer is described without its modules.
    split_layers = _layers_of(others)
    layers_by_modules: dict[tuple[str, ...], list[str]] = {}
    for layer, counts in modules_by_layer.items():
        modules = tuple(counts) if layer in split_layers else ()
        layers_by_modules.setdefault(modules, []).append(layer)

    # One text for each module outside of the layers, and one for each group of layers.
    texts = [f"{module} {numel:,}" for module, numel in outer_modules.items()]
    for modules, layers in layers_by_modules.items():
        module_names = f"{', '.join(modules)} of " if modules else ""
        plural = "s" if len(layers) > 1 else ""
        numel = sum(sum(modules_by_layer[layer].values()) for layer in layers)
        texts.append(f"{module_names}layer{plural} {number_ranges(map(int, layers))} {numel:,}")
    return "; ".join(texts)
