"""The arguments of a push to the Hugging Face hub, and the language codes that its card accepts."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

_BRANCH = r"refs/pr/[1-9][0-9]{0,8}|(?!refs/)(?!.*\.\.)[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*"
REPOSITORY = r"[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+"
"""The pattern of a name on the Hugging Face hub, OWNER/NAME."""

_ISO_639_1 = """
aa ab ae af ak am an ar as av ay az ba be bg bi bm bn bo br bs ca ce ch co cr cs cu cv cy da de dv dz ee el en eo es
et eu fa ff fi fj fo fr fy ga gd gl gn gu gv ha he hi ho hr ht hu hy hz ia id ie ig ii ik io is it iu ja jv ka kg ki
kj kk kl km kn ko kr ks ku kv kw ky la lb lg li ln lo lt lu lv mg mh mi mk ml mn mr ms mt my na nb nd ne ng nl nn no
nr nv ny oc oj om or os pa pi pl ps pt qu rm rn ro ru rw sa sc sd se sg si sk sl sm sn so sq sr ss st su sv sw ta te
tg th ti tk tl tn to tr ts tt tw ty ug uk ur uz ve vi vo wa wo xh yi yo za zh zu
"""


@dataclass(frozen=True, kw_only=True)
class PushArguments:
    """Card and publication on the Hugging Face hub"""

    push_to_hub: str | None = None
    """Push the finished folder to the hub repository OWNER/NAME. If the folder is already finished, only push it."""
    private: bool = True
    """Make the repository private if the push creates it."""
    revision: str | None = None
    """Branch to push to, created if it does not exist; refs/pr/N is an open pull request. Default: main."""
    create_pr: bool = False
    """Open a pull request instead of changing main."""
    commit_message: str | None = None
    """Commit message, and title of the pull request."""
    license: str | None = None
    """For the card: the license's identifier on the hub, such as apache-2.0. Default for a model: the base model's
    license.
    """

    def faults(self) -> list[str]:
        """Return names that the hub refuses, and options of a push without one."""
        faults = []
        if self.license is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", self.license):
            faults.append(f"--license: expected a hub license identifier such as apache-2.0, got {self.license!r}")
        if self.license == "other":
            faults.append(
                "--license other is not supported, since it needs a name and a text; leave out --license to use the "
                "base model's license"
            )
        if self.push_to_hub is not None and not re.fullmatch(REPOSITORY, self.push_to_hub):
            faults.append(f"--push_to_hub: expected OWNER/NAME, got {self.push_to_hub!r}")
        if self.revision is not None and not re.fullmatch(_BRANCH, self.revision):
            faults.append(f"--revision: expected a branch such as step-500, or refs/pr/N, got {self.revision!r}")
        if self.create_pr and self.revision is not None:
            faults.append("--create_pr true opens a pull request against main; leave out --revision")
        if self.push_to_hub is None:
            options = {"revision": self.revision, "create_pr": self.create_pr, "commit_message": self.commit_message}
            faults += [f"--{name} needs --push_to_hub OWNER/NAME" for name, value in options.items() if value]
        return faults


def not_language_codes(option: str, codes: Sequence[str] | None) -> list[str]:
    """Return a fault for each text that is not a language code.

    It accepts the two letters of ISO 639-1, any three letters (ISO 639-3 has thousands), and the hub's special
    values.
    """
    accepted = {*_ISO_639_1.split(), "code", "multilingual"}
    faults = []
    for code in codes or ():
        if code not in accepted and not re.fullmatch(r"[a-z]{3}", code):
            faults.append(f"{option}: expected ISO 639 codes such as en, es or ca, got {code!r}")
    return faults
