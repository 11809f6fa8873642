"""Use a GGUF file in llama.cpp: ``FILE TEXT QUESTION TOKENS LOGITS_FILE [ADAPTER]``; prints JSON.

It has the ids of the text, TOKENS greedy tokens after it, and the answer to the question.
"""

import json
import sys
from typing import Any

import llama_cpp
import numpy as np

FP32 = 0  # of ggml_type


def main() -> None:
    """Compute, continue and answer."""
    file, text, question, tokens, logits_file, *adapter = sys.argv[1:]
    given: dict[str, Any] = {"lora_path": adapter[0]} if adapter else {}
    # the cache of keys and values would have fp16
    model: Any = llama_cpp.Llama(file, n_ctx=256, logits_all=True, type_k=FP32, type_v=FP32, verbose=False, **given)
    ids = model.tokenize(text.encode(), special=True)
    model.eval(ids)
    np.save(logits_file, model.scores[: len(ids)])
    settings = {"max_tokens": int(tokens), "temperature": 0}
    messages = [{"role": "user", "content": question}]
    answered = model.create_chat_completion(messages, **settings)["choices"][0]
    answer = {
        "version": llama_cpp.__version__,
        "ids": ids,
        "text": model.create_completion(ids, **settings)["choices"][0]["text"],
        "reply": answered["message"]["content"],
        "ended": answered["finish_reason"] == "stop",
        "template": model.metadata.get("tokenizer.chat_template"),
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
