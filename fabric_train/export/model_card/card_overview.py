"""The beginning and the end of a model card: what the model is, how to use it, and how to cite it."""

from pathlib import Path

from transformers import AutoConfig, PretrainedConfig

from fabric_train.export.model_card.card_data import all_stages, seen_shares
from fabric_train.export.model_card.card_training import device_hours
from fabric_train.export.model_card.markdown import code, escaped, link, listed, rounded, steps
from fabric_train.export.model_card.record import CardFacts, ModelRecord
from fabric_train.files.typed_json import read_json
from fabric_train.model.origin import ModelOrigin, legal_files

_TEXT = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}", dtype="auto")
tokenizer = AutoTokenizer.from_pretrained("{name}")

inputs = tokenizer("Once upon a time", return_tensors="pt")
output = model.generate(**inputs, max_new_tokens=50)
print(tokenizer.decode(output[0], skip_special_tokens=True))
```"""
_CHAT = """```python
messages = [{"role": "user", "content": "What is the capital of Spain?"}]
inputs = tokenizer.apply_chat_template(
    messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
)
output = model.generate(**inputs, max_new_tokens=50)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
```"""


def introduction(record: ModelRecord) -> str:
    """Return two sentences: what the model began as, and what it was trained on."""
    state = record.state
    shares = [(name, share) for name, share in seen_shares(record) if share]
    sources = [code(name) + (f" ({share:.1%})" if len(shares) > 1 else "") for name, share in shares]
    sources = sources or [code(place.name) for place in record.stream_places()]
    data = f" from {listed(sources)}" if sources else ""
    average = f" The weights are the average of {len(record.parts):,} checkpoints." if record.parts else ""
    last = f"In the last of {len(record.stages) + 1:,} stages, it" if record.stages else "It"
    trained = f"{last} was trained on {rounded(state.num_tokens)} tokens{data}, in {steps(state.step)}."
    return f"{_beginning(record)} {trained}{average}"


def _beginning(record: ModelRecord) -> str:
    if record.origin:
        return f"{_linked(record.origin)}, trained further with Fabric Train."
    kind, is_known = _config(record).model_type, "base_model" in record.trainer
    beginning = "from random weights" if is_known else "from a base model that is not known"
    return f"A language model ({code(kind)}), trained with Fabric Train {beginning}."


def _config(record: ModelRecord) -> PretrainedConfig:
    return AutoConfig.from_pretrained(record.checkpoint, trust_remote_code=False)


def _linked(origin: ModelOrigin) -> str:
    name = code(origin.name)
    if origin.repository:
        name = link(origin.repository, f"https://huggingface.co/{origin.repository}")
    return name + (f" (revision {code(origin.revision)})" if origin.revision else "")


def key_facts(record: ModelRecord, facts: CardFacts, folder: Path) -> str:
    """Return a list of what a reader looks for first; ``folder`` is the export, with the licence's files."""
    sessions = [session for stage in all_stages(record) for session in stage.sessions]
    found = [
        ("Licence", _licence(record.origin, facts.license, folder)),
        ("Languages", ", ".join(facts.languages or ())),
        ("Context length", _context_length(record)),
        ("Compute", device_hours(sessions) if sessions else ""),
    ]
    return "\n".join(f"- **{name}:** {fact}" for name, fact in found if fact)


def _licence(origin: ModelOrigin | None, license: str | None, folder: Path) -> str:
    """Return the licence and the files of the base model about it; empty if nothing is known."""
    if origin is None:
        return license or ""
    files = ", ".join(link(file.name, file.name) for file in legal_files(folder))
    if license:
        return license + (f"; of the base model: {files}" if files else "")
    return ", ".join([*map(escaped, filter(None, [origin.license])), "as the base model"]) + (
        f": {files}" if files else ""
    )


def _context_length(record: ModelRecord) -> str:
    """Return the largest number of positions, and the length of the rows in training."""
    positions = getattr(_config(record).get_text_config(), "max_position_embeddings", None)
    longest = [f"{positions:,} tokens"] if positions else []
    rows = [f"trained on rows of {record.row_length:,} tokens"] if record.row_length else []
    return ", ".join([*longest, *rows])


def usage(record: ModelRecord, name: str) -> str:
    """Return code that completes a text, and one that chats if the tokenizer has a chat template."""
    text = "## How to use\n\n" + _TEXT.replace("{name}", name)
    if not _has_chat_template(record.checkpoint / "tokenizer"):
        return text
    caution = "" if record.has_chats in (None, True) else ", which the training data did not use"
    return f"{text}\n\nA chat, with the tokenizer's template{caution}:\n\n{_CHAT}"


def _has_chat_template(tokenizer: Path) -> bool:
    config = tokenizer / "tokenizer_config.json"
    if (tokenizer / "chat_template.jinja").is_file():
        return True
    return config.is_file() and bool(read_json(config, dict, "fetch it again").get("chat_template"))


def citation(record: ModelRecord, name: str) -> str:
    """Return an entry for BibTeX if the model has a place on the hub, and how to cite the base model."""
    parts = ["## Citation"]
    owner, _, model = name.rpartition("/")
    if owner:
        entry = [f"title = {{{model}}}", f"author = {{{owner}}}", f"url = {{https://huggingface.co/{name}}}"]
        parts.append("```bibtex\n@misc{" + ",\n  ".join([model, *entry]) + "\n}\n```")
    repository = record.origin.repository if record.origin else None
    if repository:
        parts.append(f"Cite the base model as {link('its card', f'https://huggingface.co/{repository}')} says.")
    return "\n\n".join(parts) if len(parts) > 1 else ""
