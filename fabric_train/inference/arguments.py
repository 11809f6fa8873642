"""The arguments of ``generate.py``."""

from dataclasses import dataclass, field

from fabric_train.cli import argument_types


@dataclass(frozen=True)
class GenerateArguments:
    """Continue a prompt, chat with a model, or continue a file of prompts

    PROGRAM --model_name runs/1 --prompt "La llengua" --temperature 0.7 --top_p 0.9
    PROGRAM --model_name exports/1 --chat true --system "Answer briefly."
    PROGRAM --model_name runs/1/best --prompts prompts.jsonl --output texts.jsonl --batch_size 16
    """

    model_name: str
    """Checkpoint (RUN, RUN/best, RUN/latest, RUN/step-500 or its folder), exported folder, hub name, or folder with a
    peft adapter.
    """
    base_model: str | None = None
    """Base model of an adapter; default: the one in its adapter_config.json."""
    prompt: str | None = None
    """Text to continue; with --chat true, the user's message."""
    chat: bool = False
    """Format the prompt with the model's chat template. Without --prompt and --prompts, chat in the terminal."""
    system: str | None = None
    """System message of the chat."""
    prompts: str | None = None
    """File of prompts: .txt with one per line, or .jsonl with "prompt" text or chat "messages"."""
    output: str | None = None
    """With --prompts: file to write, with one JSON line per prompt, in the same order. Lines already in it are kept."""
    batch_size: argument_types.PositiveInt = 8
    """With --prompts: number of prompts to generate for together."""
    num_tokens: argument_types.RowLength = 100
    """Maximum number of new tokens; 1k is 1024."""
    temperature: argument_types.NonNegativeFloat = 0.0
    """0 always chooses the most likely token; above 0 samples."""
    top_p: argument_types.UnitInterval = 1.0
    """Sample only from the most likely tokens whose probabilities add up to this value (nucleus sampling,
    arXiv:1904.09751).
    """
    top_k: argument_types.NonNegativeInt = 0
    """Sample only from this number of most likely tokens; 0 uses all."""
    min_p: argument_types.UnitInterval = 0.0
    """Sample only from tokens that are at least this share as likely as the most likely one (arXiv:2407.01082)."""
    repetition_penalty: argument_types.PositiveFloat = 1.0
    """Values above 1 make tokens less likely if they are already in the prompt or the text (arXiv:1909.05858)."""
    stop: list[str] = field(default_factory=list)
    """Strings that end the generation, in addition to the tokens that end a document or a turn."""
    seed: argument_types.NonNegativeInt64 = 0
    """Sampling seed. Each prompt of a file has its own random stream."""
    device_memory: str | None = None
    """Maximum GPU memory for weights, such as 20GB; default: 85 % of the free memory. A larger model is spread over all
    GPUs, and what does not fit there stays in host memory (slow).
    """

    def faults(self) -> list[str]:
        """Return contradictions, a --top_p that leaves no token, and a --temperature at which numbers overflow."""
        faults = []
        if self.prompt is None and self.prompts is None and not self.chat:
            faults.append("--prompt, --prompts FILE or --chat true is required")
        if self.prompt is not None and self.prompts is not None:
            faults.append("--prompt and --prompts contradict each other; give only one of them")
        if (self.prompts is None) != (self.output is None):
            faults.append("--prompts and --output need each other; give both the file to read and the file to write")
        if self.system is not None and not self.chat:
            faults.append("--system only applies to a chat; add --chat true")
        if self.top_p == 0:
            faults.append("--top_p 0 leaves no token to choose from; give a number above 0")
        if 0 < self.temperature < 0.001:
            faults.append(
                f"--temperature {self.temperature:g} is too low; give 0 to always choose the most likely token"
            )
        if "" in self.stop:
            faults.append("--stop has an empty string, which would end every text immediately; remove the empty string")
        if self.device_memory is not None and not argument_types.parse_size(self.device_memory):
            faults.append(f"--device_memory: expected a size such as 20GB, got {self.device_memory!r}")
        return faults
