"""Use a Hugging Face folder through transformers' pipeline: ``FOLDER TEXT QUESTION TOKENS LOGITS_FILE``; prints JSON.

It has the ids of the text, TOKENS greedy tokens after it, and the answer to the question.
"""

import json
import sys
from typing import Any

import numpy as np
import torch
import transformers


def main() -> None:
    """Compute, continue and answer."""
    folder, text, question, tokens, file = sys.argv[1:]
    generate: Any = transformers.pipeline("text-generation", model=folder, dtype=torch.float32, device="cpu")
    ids = generate.tokenizer(text)["input_ids"]
    with torch.inference_mode():
        np.save(file, generate.model(torch.tensor([ids])).logits[0].numpy())
    settings = {"do_sample": False, "max_new_tokens": int(tokens)}
    reply = generate([{"role": "user", "content": question}], **settings)[0]["generated_text"][-1]["content"]
    answer = {
        "version": transformers.__version__,
        "ids": ids,
        "text": generate(text, return_full_text=False, **settings)[0]["generated_text"],
        "reply": reply,
        "ended": len(generate.tokenizer(reply)["input_ids"]) < int(tokens),
        "template": generate.tokenizer.chat_template,
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
