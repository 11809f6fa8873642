# PYTHON_ARGCOMPLETE_OK
"""Generate text:  fabric-train generate --model_name CHECKPOINT|RUN|HF_FOLDER|ADAPTER_FOLDER|HUB_NAME --prompt TEXT"""

import sys

from fabric_train.cli.errors import run_program
from fabric_train.cli.parser import parse_arguments
from fabric_train.inference.arguments import GenerateArguments


def main() -> None:
    """Continue a prompt, chat, or write texts for a file of prompts."""
    arguments = parse_arguments(GenerateArguments)
    from fabric_train.checkpoint import check_model_exists

    # before torch is imported, which takes seconds
    for name in (arguments.model_name, arguments.base_model):
        if name is not None:
            check_model_exists(name)

    from fabric_train.inference.conversation import Conversation, chat_in_terminal, continue_prompt  # slow, like these
    from fabric_train.inference.load_model import load_to_generate
    from fabric_train.inference.prompts import PromptEncoder
    from fabric_train.inference.text_file import write_texts

    if arguments.prompts is not None:
        write_texts(arguments)
    elif arguments.prompt is None:
        model, tokenizer = load_to_generate(arguments)
        encoder = PromptEncoder(tokenizer, arguments.model_name, prompts_chats=True)
        chat_in_terminal(Conversation(model, tokenizer, encoder, arguments))
    else:
        model, generated = continue_prompt(arguments, prints=True)
        num_tokens = len(generated.new_ids)
        dtype = str(model.dtype).removeprefix("torch.")
        speed = f"{num_tokens / generated.seconds:.1f} tokens/s ({model.device.type}, {dtype})"
        print(f"{num_tokens} tokens in {generated.seconds:.1f} s, {speed}", file=sys.stderr)


if __name__ == "__main__":
    run_program(main)
