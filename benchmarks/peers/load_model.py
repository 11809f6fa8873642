"""Import transformers and load a model: the least that a program does before it can train."""

import argparse

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    """Load the model in fp32."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model_name", required=True)
    AutoModelForCausalLM.from_pretrained(parser.parse_args().model_name, dtype=torch.float32)


if __name__ == "__main__":
    main()
