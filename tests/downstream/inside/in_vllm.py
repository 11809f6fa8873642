"""Use a Hugging Face folder in vLLM on the CPU: ``FOLDER TEXT QUESTION TOKENS FILE [ADAPTER]``; prints JSON.

It has the ids of the text, TOKENS greedy tokens after it, and the answer to the question, which ends as the folder's
generation_config.json says. FILE gets the log-probability of each token of the text but the first.
"""

import json
import os
import sys
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import numpy as np
import vllm
from vllm.lora.request import LoRARequest


def main() -> None:
    """Score, continue and answer."""
    folder, text, question, num_tokens, file, *adapters = sys.argv[1:]
    options: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8} if adapters else {}
    llm = vllm.LLM(folder, dtype="float32", max_model_len=256, enforce_eager=True, **options)
    request = {"lora_request": LoRARequest("adapter", 1, adapters[0])} if adapters else {}

    greedy = vllm.SamplingParams(temperature=0, max_tokens=int(num_tokens), prompt_logprobs=0, ignore_eos=True)
    continued = llm.generate([text], greedy, use_tqdm=False, **request)[0]
    ids = continued.prompt_token_ids
    by_token = zip(ids[1:], continued.prompt_logprobs[1:], strict=True)
    np.save(file, np.array([choices[token].logprob for token, choices in by_token]))

    settings = llm.get_default_sampling_params()  # with the folder's generation_config.json
    settings.temperature = 0
    settings.max_tokens = int(num_tokens)
    answered = llm.chat([{"role": "user", "content": question}], settings, use_tqdm=False, **request)[0].outputs[0]
    answer = {
        "version": vllm.__version__,
        "ids": list(ids),
        "text": continued.outputs[0].text,
        "reply": answered.text,
        "ended": answered.finish_reason == "stop",
        "template": llm.get_tokenizer().chat_template,
    }
    llm.llm_engine.engine_core.shutdown()  # its processes hold the pipe to the caller
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
