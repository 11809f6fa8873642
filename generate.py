# PYTHON_ARGCOMPLETE_OK
"""Generate text:  python generate.py --model_name CHECKPOINT|RUN|HF_FOLDER|ADAPTER_FOLDER|HUB_NAME --prompt TEXT"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arguments import GenerateArguments, parse
from fabric_train.cli.errors import run_program, set_memory_advice

if TYPE_CHECKING:
    from fabric_train.inference.generate import GenerationSettings


def main() -> None:
    """Continue a prompt, chat, or write texts for a file of prompts."""
    arguments = parse(GenerateArguments)

    from fabric_train.inference.generate import GenerationSettings  # slow

    names = ("num_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
    settings = GenerationSettings(**{name: getattr(arguments, name) for name in names}, stop=tuple(arguments.stop))
    if arguments.prompts is not None:
        _generate_for_file(arguments, settings)
    elif arguments.chat:
        _chat(arguments, settings)
    else:
        _continue_prompt(arguments, settings)


def _load(arguments: GenerateArguments) -> tuple[Any, Any]:
    from fabric_train.cli.argument_types import parse_size
    from fabric_train.inference.load_model import load_for_inference

    set_memory_advice("give a smaller --batch_size or --num_tokens, or a smaller --device_memory")
    gpu_bytes = parse_size(arguments.device_memory) if arguments.device_memory else None
    return load_for_inference(arguments.model_name, base_model=arguments.base_model, gpu_bytes=gpu_bytes)


def _continue_prompt(arguments: GenerateArguments, settings: "GenerationSettings") -> None:
    """Print the prompt and its continuation as it is generated, and one line about the speed on standard error."""
    from fabric_train.inference.generate import TextPrinter, generate
    from fabric_train.inference.prompts import Prompt, PromptEncoder, check_fits

    assert arguments.prompt is not None
    model, tokenizer = _load(arguments)
    ids = PromptEncoder(tokenizer, arguments.model_name, prompts_chats=False).encode(Prompt(arguments.prompt))
    check_fits(model, ids, "the prompt", settings.num_tokens)
    printer = TextPrinter(tokenizer, settings.stop, shows_prompt=True)
    (generated,) = generate(model, tokenizer, [ids], settings, printer=printer)
    _print_speed(model, len(generated.new_ids), generated.seconds)


def _chat(arguments: GenerateArguments, settings: "GenerationSettings") -> None:
    """Answer the prompt, or chat on the terminal."""
    from fabric_train.inference.chat import Conversation, chat_in_terminal
    from fabric_train.inference.prompts import PromptEncoder

    model, tokenizer = _load(arguments)
    encoder = PromptEncoder(tokenizer, arguments.model_name, prompts_chats=True)
    conversation = Conversation(model, tokenizer, encoder, settings, arguments.system)
    if arguments.prompt is None:
        chat_in_terminal(conversation)
        return
    generated = conversation.answer(arguments.prompt)
    _print_speed(model, len(generated.new_ids), generated.seconds)


def _generate_for_file(arguments: GenerateArguments, settings: "GenerationSettings") -> None:
    """Write a JSON line for each prompt of a file."""
    from fabric_train.inference.prompts import (
        OutputFile,
        PromptEncoder,
        encode_prompts,
        generate_for_file,
        limits_of,
        read_prompts,
    )

    assert arguments.prompts is not None
    assert arguments.output is not None
    prompts = read_prompts(Path(arguments.prompts), chat=arguments.chat, system=arguments.system)
    output = OutputFile(Path(arguments.output), prompts, settings)
    model, tokenizer = _load(arguments)
    output.check_model(model.name_or_path)
    encoder = PromptEncoder(tokenizer, arguments.model_name, any(prompt.is_chat for prompt in prompts))
    encoded = encode_prompts(encoder, prompts, limits_of(model), settings.num_tokens)
    generate_for_file(model, tokenizer, encoded, settings, output, arguments.batch_size, encoder.end_ids)


def _print_speed(model: Any, count: int, seconds: float) -> None:
    kind = str(model.dtype).removeprefix("torch.")
    line = f"{count} tokens in {seconds:.1f} s, {count / seconds:.1f} tokens/s ({model.device.type}, {kind})"
    print(line, file=sys.stderr)


if __name__ == "__main__":
    run_program(main)
