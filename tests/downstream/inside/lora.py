"""Train LoRA on a Hugging Face folder for one step, save the adapter and load it: ``FOLDER ADAPTER``; prints JSON."""

import json
import sys
from typing import Any

import peft
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

TEXT = "To be, or not to be: that is the question."


def main() -> None:
    """Print the loss before and after the step, and the largest difference of a logit after loading."""
    folder, adapter = sys.argv[1:]
    torch.manual_seed(0)
    batch = AutoTokenizer.from_pretrained(folder)(TEXT, return_tensors="pt")
    model: Any = peft.get_peft_model(_load(folder), peft.LoraConfig(task_type="CAUSAL_LM", r=4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    before = model(**batch, labels=batch["input_ids"]).loss
    before.backward()
    optimizer.step()
    model.eval()
    with torch.inference_mode():
        after = model(**batch, labels=batch["input_ids"])
        model.save_pretrained(adapter)
        loaded = peft.PeftModel.from_pretrained(_load(folder), adapter).eval()
        difference = (loaded(**batch).logits - after.logits).abs().max().item()
    losses = {"before": before.item(), "after": after.loss.item()}
    print(json.dumps({"version": peft.__version__, **losses, "difference": difference}))


def _load(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


if __name__ == "__main__":
    main()
