# PYTHON_ARGCOMPLETE_OK
"""Generate text:  python generate.py --model_name CHECKPOINT|RUN|HF_FOLDER|ADAPTER_FOLDER|HUB_NAME --prompt TEXT"""

import sys
from pathlib import Path
from typing import Any

from fabric_train.cli.argument_types import parse_size
from fabric_train.cli.errors import run_program, set_memory_advice
from fabric_train.cli.parser import parse_arguments
from fabric_train.inference.arguments import GenerateArguments


def main() -> None:
    """Continue a prompt, chat, or write texts for a file of prompts."""
    arguments = parse_arguments(GenerateArguments)
    if arguments.prompts is not None:
        _generate_for_file(arguments)
    elif arguments.chat:
        _chat(arguments)
    else:
        _continue_prompt(arguments)


def _load(arguments: GenerateArguments) -> tuple[Any, Any]:
    from fabric_train.inference.load_model import load_for_inference

    set_memory_advice("give a smaller --batch_size or --num_tokens, or a smaller --device_memory")
    gpu_bytes = parse_size(arguments.device_memory) if arguments.device_memory else None
    return load_for_inference(arguments.model_name, base_model=arguments.base_model, gpu_bytes=gpu_bytes)


def _continue_prompt(arguments: GenerateArguments) -> None:
    """Print the prompt and its continuation as it is generated, and one line about the speed on standard error."""
    from fabric_train.inference.generate import TextPrinter, generate
    from fabric_train.inference.prompts import Prompt, PromptEncoder, encode_prompts, limits_of

    assert arguments.prompt is not None
    model, tokenizer = _load(arguments)
    encoder = PromptEncoder(tokenizer, arguments.model_name, prompts_chats=False)
    prompts = encode_prompts(encoder, [Prompt(arguments.prompt)], limits_of(model), arguments.num_tokens)
    printer = TextPrinter(tokenizer, arguments.stop, shows_prompt=True)
    (generated,) = generate(model, tokenizer, prompts, arguments, printer=printer)
    _print_speed(model, len(generated.new_ids), generated.seconds)


def _chat(arguments: GenerateArguments) -> None:
    """Answer the prompt, or chat on the terminal."""
    from fabric_train.inference.prompts import Conversation, PromptEncoder, chat_in_terminal

    model, tokenizer = _load(arguments)
    encoder = PromptEncoder(tokenizer, arguments.model_name, prompts_chats=True)
    conversation = Conversation(model, tokenizer, encoder, arguments)
    if arguments.prompt is None:
        chat_in_terminal(conversation)
        return
    generated = conversation.answer(arguments.prompt)
    _print_speed(model, len(generated.new_ids), generated.seconds)


def _generate_for_file(arguments: GenerateArguments) -> None:
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
    output = OutputFile(Path(arguments.output), prompts, arguments)
    model, tokenizer = _load(arguments)
    output.check_model(model.name_or_path)
    encoder = PromptEncoder(tokenizer, arguments.model_name, any(prompt.is_chat for prompt in prompts))
    encoded = encode_prompts(encoder, prompts, limits_of(model), arguments.num_tokens)
    generate_for_file(model, tokenizer, encoded, arguments, output, encoder.end_ids)


def _print_speed(model: Any, count: int, seconds: float) -> None:
    kind = str(model.dtype).removeprefix("torch.")
    line = f"{count} tokens in {seconds:.1f} s, {count / seconds:.1f} tokens/s ({model.device.type}, {kind})"
    print(line, file=sys.stderr)


if __name__ == "__main__":
    run_program(main)
