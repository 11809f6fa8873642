# PYTHON_ARGCOMPLETE_OK
"""Generate text from a prompt:  python generate.py --model_name CHECKPOINT|RUN|HF_FOLDER|HUB_NAME --prompt TEXT"""

import sys

from arguments import GenerateArguments, parse
from fabric_train.cli.errors import run_program


def main() -> None:
    """Print the prompt and its continuation as it is generated, and one line about the speed on standard error."""
    arguments = parse(GenerateArguments)

    from fabric_train.inference.generate import generate  # slow
    from fabric_train.inference.load_model import load_for_inference

    model, tokenizer = load_for_inference(arguments.model_name)
    generated = generate(
        model,
        tokenizer,
        arguments.prompt,
        num_tokens=arguments.num_tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        seed=arguments.seed,
        stream=True,
    )
    count, kind = len(generated.new_ids), str(model.dtype).removeprefix("torch.")
    speed = count / generated.seconds
    line = f"{count} tokens in {generated.seconds:.1f} s, {speed:.1f} tokens/s ({model.device.type}, {kind})"
    print(line, file=sys.stderr)


if __name__ == "__main__":
    run_program(main)
