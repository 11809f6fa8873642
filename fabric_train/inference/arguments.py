"""The arguments of ``generate.py``."""

from dataclasses import dataclass, field

from fabric_train.cli import argument_types


@dataclass(frozen=True)
class GenerateArguments:
    """Continue a prompt, chat with a model, or write texts for a file of prompts

    PROGRAM --model_name runs/1 --prompt "La llengua" --temperature 0.7 --top_p 0.9
    PROGRAM --model_name exports/1 --chat true --system "Answer briefly."
    PROGRAM --model_name runs/1/best --prompts prompts.jsonl --output texts.jsonl --batch_size 16
    """

    model_name: str
    """Checkpoint (RUN, RUN/best, RUN/latest, RUN/step-500 or its folder), exported folder, hub name, or folder with an
    adapter of peft.
    """
    base_model: str | None = None
    """Model of an adapter; default: the one in its adapter_config.json."""
    prompt: str | None = None
    """Text to continue, or with --chat true the user's turn."""
    chat: bool = False
    """Prompt with the model's chat template. Without --prompt and --prompts, chat in the terminal."""
    system: str | None = None
    """Text of the system turn of a chat."""
    prompts: str | None = None
    """File of prompts: .txt with one on each line, or .jsonl with a text "prompt" or the "messages" of a chat."""
    output: str | None = None
    """With --prompts: file to write, a JSON line for each prompt in their order. Lines that it has are kept."""
    batch_size: argument_types.PositiveInt = 8
    """With --prompts: prompts that are continued together."""
    num_tokens: argument_types.RowLength = 100
    """Largest number of new tokens; 1k is 1024."""
    temperature: argument_types.NonNegativeFloat = 0.0
    """0 takes the most likely token each time; above 0 samples."""
    top_p: argument_types.UnitInterval = 1.0
    """Sample from the most likely tokens that together have this probability (nucleus sampling, arXiv:1904.09751)."""
    top_k: argument_types.NonNegativeInt = 0
    """Sample from this number of most likely tokens; 0 for all."""
    min_p: argument_types.UnitInterval = 0.0
    """Sample from tokens at least this share as likely as the most likely one (arXiv:2407.01082)."""
    repetition_penalty: argument_types.PositiveFloat = 1.0
    """Above 1 makes tokens that prompt and text have already less likely (arXiv:1909.05858)."""
    stop: list[str] = field(default_factory=list)
    """Texts at which generation ends, in addition to the tokens that end a document or a turn."""
    seed: argument_types.NonNegativeInt64 = 0
    """Seed of the sampling. Each prompt of a file has a random stream of its own."""
    device_memory: str | None = None
    """Most memory of a GPU for weights, such as 20GB; default: 85 % of the free memory. A model that needs more is
    spread over all GPUs, and what does not fit there stays in host memory (slow).
    """

    def faults(self) -> list[str]:
        """Return contradictions, a --top_p that leaves no token, and a --temperature at which numbers overflow."""
        faults = []
        if self.prompt is None and self.prompts is None and not self.chat:
            faults.append("--prompt is required, or --prompts FILE, or --chat true")
        if self.prompt is not None and self.prompts is not None:
            faults.append("--prompt and --prompts: give one of them")
        if (self.prompts is None) != (self.output is None):
            faults.append("--prompts and --output need each other: the file to read and the file to write")
        if self.system is not None and not self.chat:
            faults.append("--system is of a chat: give --chat true, too")
        if self.top_p == 0:
            faults.append("--top_p 0 leaves no token to choose from: give a number above 0")
        if 0 < self.temperature < 0.001:
            faults.append(f"--temperature {self.temperature:g} is too low: give 0 for the most likely tokens")
        if "" in self.stop:
            faults.append("--stop has an empty text, at which every text ends: leave it out")
        if self.device_memory is not None and not argument_types.parse_size(self.device_memory):
            faults.append(f"--device_memory: expected a size such as 20GB, got {self.device_memory!r}")
        return faults
