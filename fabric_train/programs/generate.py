# PYTHON_ARGCOMPLETE_OK
"""Generate text:  fabric-train generate --model_name CHECKPOINT|RUN|HF_FOLDER|ADAPTER_FOLDER|HUB_NAME --prompt TEXT"""

import sys

from fabric_train.cli.errors import run_program
from fabric_train.cli.parser import parse_arguments
from fabric_train.inference.arguments import GenerateArguments


def main() -> None:
    """Continue a prompt, chat, or write texts for a file of prompts."""
    arguments = parse_arguments(GenerateArguments)

    from fabric_train.inference import prompts  # slow

    if arguments.prompts is not None:
        prompts.write_texts(arguments)
    elif arguments.prompt is None:
        model, tokenizer = prompts.load_model(arguments)
        encoder = prompts.PromptEncoder(tokenizer, arguments.model_name, prompts_chats=True)
        prompts.chat_in_terminal(prompts.Conversation(model, tokenizer, encoder, arguments))
    else:
        model, generated = prompts.continue_prompt(arguments, prints=True)
        count = len(generated.new_ids)
        kind = str(model.dtype).removeprefix("torch.")
        speed = f"{count / generated.seconds:.1f} tokens/s ({model.device.type}, {kind})"
        print(f"{count} tokens in {generated.seconds:.1f} s, {speed}", file=sys.stderr)


if __name__ == "__main__":
    run_program(main)
